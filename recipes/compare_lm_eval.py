"""Compare an SSA checkpoint with its softmax twin on lm-evaluation-harness tasks, beside the paper's figures.

    python -m ssa_hf.recipes.compare_lm_eval --ssa runs/nemotron_114m_ssa --softmax runs/nemotron_114m_softmax

Twins with other attention join the table by --others NAME=CHECKPOINT. Each model is a checkpoint, which is evaluated,
or a JSON file of results that the harness (--output_path) or this command wrote. Writes the results of each
(softmax.json, ssa.json, ...), comparison.json, comparison.md and comparison.png into --output_dir.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ssa_hf.lm_eval import MISSING
from ssa_hf.recipes.arguments import parse

#: Of arXiv 2508.14685 (114M parameters): metric, softmax, SSA. cb and copa have few questions; wikitext is not there.
PAPER: dict[str, tuple[str, float | None, float | None]] = {
    "arc_easy": ("acc_norm", 0.2934, 0.5387),
    "arc_challenge": ("acc_norm", 0.2398, 0.2713),
    "boolq": ("acc", 0.3783, 0.5618),
    "cb": ("acc", 0.1429, 0.4643),
    "copa": ("acc", 0.59, 0.64),
    "hellaswag": ("acc_norm", 0.2550, 0.3283),
    "record": ("f1", 0.1983, 0.2482),
    "winogrande": ("acc", 0.4972, 0.5178),
    "wikitext": ("word_perplexity", None, None),
}


@dataclass
class CompareArguments:
    """What to compare, and on which tasks."""

    ssa: str = field(metadata={"help": "SSA checkpoint, or JSON file of its results"})
    softmax: str = field(metadata={"help": "softmax checkpoint, or JSON file of its results"})
    others: list[str] = field(
        default_factory=list, metadata={"help": "further models as NAME=CHECKPOINT or NAME=FILE.json"}
    )
    tasks: list[str] = field(default_factory=lambda: ["ssa_paper"], metadata={"help": "tasks and groups"})
    data: str | None = field(default=None, metadata={"help": "folder of the local tasks' files (ssa_paper_local)"})
    batch_size: str = field(default="8", metadata={"help": "sequences at once, or auto"})
    limit: int | None = field(default=None, metadata={"help": "first questions of each task; all by default"})
    device: str = field(default="cuda" if torch.cuda.is_available() else "cpu", metadata={"help": "where to run"})
    output_dir: str = field(default="runs/compare_lm_eval", metadata={"help": "folder for the results"})


@dataclass(frozen=True)
class Score:
    """A metric of one model and its difference to softmax, with standard errors where the harness has them."""

    value: float
    stderr: float | None
    difference: float
    difference_stderr: float | None
    outside_error: bool | None


@dataclass(frozen=True)
class Row:
    """One task: each model's score, softmax's first, and the paper's figures."""

    task: str
    metric: str
    scores: dict[str, Score]
    paper: dict[str, float | None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the recipe; return the exit status."""
    (options,) = parse((CompareArguments,), arguments, __doc__)
    output = Path(options.output_dir)
    try:
        results = {
            name: results_of(source, "ssa" if name == "ssa" else "hf", options)
            for name, source in sources(options).items()
        }
        rows = compare(results)
    except (ImportError, OSError, ValueError) as error:
        print(f"compare_lm_eval: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    output.mkdir(parents=True, exist_ok=True)
    for name, by_task in results.items():
        (output / f"{name}.json").write_text(json.dumps({"results": by_task}, indent=2) + "\n")
    content: dict[str, Any] = {"options": vars(options), "rows": [asdict(row) for row in rows]}
    (output / "comparison.json").write_text(json.dumps(content, indent=2) + "\n")
    table = markdown(rows)
    (output / "comparison.md").write_text(table)
    plot(rows, output / "comparison.png")
    print(table, end="")
    return 0


def sources(options: CompareArguments) -> dict[str, str]:
    """Return checkpoint or file by the model's name, softmax first.

    Raises:
        ValueError: for one of ``others`` that is not NAME=SOURCE, or a name that is there already.
    """
    found = {"softmax": options.softmax, "ssa": options.ssa}
    for other in options.others:
        name, separator, source = other.partition("=")
        if not (name and separator and source) or name in found:
            raise ValueError(f"--others takes NAME=CHECKPOINT with a name of its own, got {other!r}.")
        found[name] = source
    return found


def results_of(source: str, model: str, options: CompareArguments) -> dict[str, dict[str, Any]]:
    """Read the harness's results from a JSON file, or evaluate a checkpoint.

    Args:
        source: the file or checkpoint.
        model: the harness's model type for a checkpoint.
        options: tasks, data and how to run.

    Returns:
        The harness's "results": for each task its metrics, such as "acc,none" and "acc_stderr,none".

    Raises:
        ImportError: if a checkpoint is given and lm-eval is not installed.
        OSError: if the file or checkpoint can't be read.
        ValueError: for a file without results, or if the harness refuses.
    """
    if source.endswith(".json"):
        try:
            found: dict[str, dict[str, Any]] = json.loads(Path(source).read_text())["results"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{source} holds no results of lm-eval (a file that --output_path writes).") from error
        return found
    try:
        from lm_eval import simple_evaluate
    except ImportError as error:
        raise ImportError(MISSING) from error
    import ssa_hf.lm_eval.models  # noqa: F401 - registers the model types
    from ssa_hf.lm_eval.tasks import TaskManager

    evaluated: dict[str, dict[str, dict[str, Any]]] = simple_evaluate(
        model=model,
        model_args={"pretrained": source},
        tasks=options.tasks,
        task_manager=TaskManager(metadata={"data": options.data}),
        batch_size=options.batch_size,
        limit=options.limit,
        device=options.device,
        log_samples=False,
    )
    return evaluated["results"]


def compare(results: dict[str, dict[str, dict[str, Any]]]) -> list[Row]:
    """Compare the tasks that all results (by model, softmax first) have, each by the paper's metric.

    A difference is outside the error if it is more than 1.96 of its standard errors, those of the two models taken
    as independent. (They answer the same questions, so that is cautious.)

    Raises:
        ValueError: if they have no task in common.
    """
    rows = []
    for task in results["softmax"]:
        # Without a figure of the paper's: accuracy, which a group may not have.
        metric, paper_softmax, paper_ssa = PAPER.get(task.removesuffix("_local"), ("acc", None, None))
        if not all(f"{metric},none" in by_task.get(task, ()) for by_task in results.values()):
            continue
        values = {name: _value(by_task[task], metric) for name, by_task in results.items()}
        scores = {name: _score(*value, *values["softmax"]) for name, value in values.items()}
        rows.append(Row(task, metric, scores, {"softmax": paper_softmax, "ssa": paper_ssa}))
    if not rows:
        listed = "; ".join(f"{name} has {', '.join(by_task)}" for name, by_task in results.items())
        raise ValueError(f"no task in common: {listed}.")
    return rows


def _score(value: float, stderr: float | None, softmax: float, softmax_stderr: float | None) -> Score:
    difference = value - softmax
    error = None if stderr is None or softmax_stderr is None else math.hypot(stderr, softmax_stderr)
    return Score(value, stderr, difference, error, None if error is None else abs(difference) > 1.96 * error)


def _value(results: dict[str, Any], metric: str) -> tuple[float, float | None]:
    error = results.get(f"{metric}_stderr,none")
    return float(results[f"{metric},none"]), float(error) if isinstance(error, int | float) else None


def markdown(rows: Sequence[Row]) -> str:
    """Tabulate the comparison."""
    others = list(rows[0].scores)[1:]
    titles = ["task", "metric", "softmax", *(title for name in others for title in (name, f"{name} - softmax"))]
    lines = [f"| {' | '.join([*titles, 'paper: softmax', 'ssa'])} |", "|---" * (len(titles) + 2) + "|"]
    for row in rows:
        cells = [row.task, row.metric, _measured(row.scores["softmax"].value, row.scores["softmax"].stderr)]
        for score in (row.scores[name] for name in others):
            difference = _measured(score.difference, score.difference_stderr, sign="+")
            cells += [_measured(score.value, score.stderr), f"**{difference}**" if score.outside_error else difference]
        cells += ["-" if value is None else f"{value:.4f}" for value in row.paper.values()]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n\nDifferences in bold are outside the error, 1.96 standard errors.\n"


def _measured(value: float, error: float | None, sign: str = "") -> str:
    return f"{value:{sign}.4f}" + ("" if error is None else f" ± {error:.4f}")


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw the models' scores with their standard errors, and the paper's; perplexities are left out."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if "perplexity" not in row.metric]
    names = list(rows[0].scores) if rows else []
    width = 0.8 / max(1, len(names))
    figure = Figure(figsize=(2 + 0.6 * max(2, len(names)) * len(rows), 4), layout="constrained")
    axes = figure.subplots()
    for index, name in enumerate(names):
        places = [position + width * index for position in range(len(rows))]
        scores = [row.scores[name] for row in rows]
        errors = [score.stderr or 0.0 for score in scores]
        axes.bar(places, [score.value for score in scores], width, yerr=errors, label=name, capsize=2)
        paper = [math.nan if (value := row.paper.get(name)) is None else value for row in rows]
        axes.plot(places, paper, "k_", markersize=12, label=None if index else "paper (114M)")
    middle = width * (len(names) - 1) / 2
    labels = [f"{row.task}\n{row.metric}" for row in rows]
    axes.set_xticks([position + middle for position in range(len(rows))], labels)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_ylabel("score")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    raise SystemExit(main())
