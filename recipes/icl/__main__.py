"""Train decoders on the paper's in-context tasks, one for each scoring, and test them under distribution shift.

    accelerate launch -m ssa_hf.recipes.icl --config icl_small --task every --scoring ssa,softmax --seeds 1 2 3

Tasks: is every (or some) number so far positive; and linear functions f(x) = ax + c from examples. Models with the same
seed start from the same weights and see the same prompts. Writes each run into --output_dir/SCORING-SEED, and
results.json, errors.png, attention.png and scoring_values.png over all of them into --output_dir. A killed experiment
goes on with --resume_from_checkpoint last.
"""

import copy
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import default_data_collator, set_seed

import ssa_hf
from ssa_hf.recipes.arguments import parse
from ssa_hf.recipes.icl import figures
from ssa_hf.recipes.icl.evaluation import attention_map, attention_on_large_value, error_curves, reference_curves
from ssa_hf.recipes.icl.model import InContextLearner, build_model
from ssa_hf.recipes.icl.tasks import TASKS, Prompts
from ssa_hf.recipes.training import RecipeArguments, RecipeTrainer, scoring_values


@dataclass
class IclArguments:
    """The task, the decoders and their test; the defaults are the paper's."""

    task: str = field(default="every", metadata={"help": "what to learn", "choices": list(TASKS)})
    scoring: str = field(
        default="ssa,softmax", metadata={"help": "attention implementations to train in turn, separated by commas"}
    )
    ssa: str | None = field(
        default=None, metadata={"help": f"SSA preset: {', '.join(ssa_hf.PRESETS)}; or trained b, n"}
    )
    seeds: list[int] = field(default_factory=lambda: [1], metadata={"help": "seeds to train each of them with"})
    layers: int = field(default=12, metadata={"help": "decoder layers"})
    heads: int = field(default=8, metadata={"help": "attention heads"})
    hidden_size: int = field(default=256, metadata={"help": "width"})
    length: int = field(default=40, metadata={"help": "numbers x in a training prompt; every prefix is asked about"})
    test_prompts: int = field(default=2000, metadata={"help": "test prompts for each point of a curve"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the recipe; return the exit status."""
    options, training_arguments = parse((IclArguments, RecipeArguments), arguments, __doc__)
    runs, trainer = [], None
    try:
        if training_arguments.max_steps < 1:
            raise ValueError("give --max_steps: prompts are generated without end.")
        for scoring in options.scoring.split(","):
            for seed in options.seeds:
                trainer = train(options, training_arguments, scoring, seed)
                if trainer.is_world_process_zero():
                    runs.append(test(options, trainer, scoring, seed))
    except ValueError as error:
        print(f"icl: {error}", file=sys.stderr)
        return 2
    if runs:
        report(options, runs, Path(str(training_arguments.output_dir)))
    return 0


def train(options: IclArguments, training_arguments: RecipeArguments, scoring: str, seed: int) -> RecipeTrainer:
    """Train one learner in a folder of its own, or finish its training.

    Raises:
        ValueError: for an unknown scoring, wrong sizes, or a folder that holds another run.
    """
    own = copy.copy(training_arguments)
    own.output_dir = str(Path(str(training_arguments.output_dir)) / f"{scoring}-{seed}")
    own.seed = own.data_seed = seed
    set_seed(seed)
    task = TASKS[options.task]
    model = build_model(
        scoring, task, options.layers, options.heads, options.hidden_size, task.kinds * options.length, options.ssa
    )
    prompts = Prompts(options.task, options.length, own.max_steps * own.samples_per_step, (seed,))
    trainer = RecipeTrainer(model, own, train_dataset=prompts, data_collator=default_data_collator)
    shared = {name: getattr(options, name) for name in ("task", "layers", "heads", "hidden_size", "length")}
    settings = {"scoring": scoring, **shared}
    if scoring == "ssa":
        settings["ssa"] = options.ssa
    trainer.run(settings, trainer.checkpoint_to_resume(settings))
    return trainer


def test(options: IclArguments, trainer: RecipeTrainer, scoring: str, seed: int) -> figures.Run:
    """Measure a trained learner."""
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    assert isinstance(model, InContextLearner)
    return {
        "scoring": scoring,
        "seed": seed,
        "parameters": model.num_parameters(),
        "curves": error_curves(model, options.task, options.length, options.test_prompts),
        "attention": attention_on_large_value(model, options.task, options.length, min(options.test_prompts, 256)),
        "attention_map": attention_map(model, options.task, options.length),
        "scoring_values": scoring_values(model),
    }


def report(options: IclArguments, runs: list[figures.Run], output: Path) -> None:
    """Write results and figures, and print the table."""
    references: dict[str, Any] = {}
    if TASKS[options.task].problem_type == "regression":
        references = reference_curves(options.length, options.test_prompts)
    figures.plot_errors(options.task, runs, references, output / "errors.png")
    figures.plot_attention(runs, output / "attention.png")
    shown = [{key: value for key, value in run.items() if key != "attention_map"} for run in runs]
    content = {"options": vars(options), "references": references, "runs": shown}
    (output / "results.json").write_text(json.dumps(content, indent=1) + "\n")
    if any(run["scoring_values"] for run in runs):
        figures.plot_scoring_values(runs, output / "scoring_values.png")
    Console(width=None if sys.stdout.isatty() else 160).print(figures.error_table(options.task, runs, references))


if __name__ == "__main__":
    raise SystemExit(main())
