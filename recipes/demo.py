"""Train a small Nemotron-style decoder with SSA, and its softmax twin, on the same batches of a text.

Prints both losses side by side and the learned b and n of every layer, saves the SSA model, reloads it with
no arguments and lets it write a sentence. Runs on a CPU in a minute or two, with no network.
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    NemotronConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)

from ssa_hf import SSANorm
from ssa_hf.recipes.tokenizer import train_tokenizer

HELD_OUT = 0.1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status."""
    options = _parser().parse_args(arguments)
    console = Console()
    try:
        text = read_text(options.data)
        vocab_size = options.vocab_size or min(1024, max(320, len(text) // 32))
        tokenizer = train_tokenizer(text.splitlines(keepends=True), vocab_size)
        train, held_out = split(tokenizer, text, options.sequence_length)
    except ValueError as error:
        print(f"ssa-hf demo: {error}", file=sys.stderr)
        return 2
    console.print(
        f"{len(text):,} characters, {len(train) + len(held_out):,} tokens, vocabulary {len(tokenizer)}; "
        f"the last {len(held_out):,} tokens are held out"
    )
    passes = options.steps * options.batch_size * options.sequence_length / len(train)
    if passes > 10:
        console.print(
            f"{passes:.0f} passes over so short a text: both models will learn it by heart, and the held-out "
            "loss rise again. Give a longer one with --data."
        )

    models = {name: build_model(name, tokenizer, options) for name in ("ssa", "sdpa")}
    history = train_twins(models, train, held_out, options)
    console.print(_loss_table(history))
    console.print(_parameter_table(models["ssa"]))

    output = Path(options.output)
    models["ssa"].save_pretrained(output)
    tokenizer.save_pretrained(output)
    results = {"options": vars(options), "history": history, "b_and_n": parameters_by_layer(models["ssa"])}
    (output / "results.json").write_text(json.dumps(results, indent=2, default=str) + "\n")

    sentence = write_sentence(output, options.prompt or text[: text.find(" ", 20)])
    console.print(f"Saved to {output}; reloaded with no arguments, it writes:")
    console.print(textwrap.indent(sentence, "  "), highlight=False, markup=False, soft_wrap=True)
    return 0


def read_text(path: str | None) -> str:
    """Read a text file, or all .txt files below a folder; None gives the text shipped with the package.

    Raises:
        ValueError: if there is no such text, or it is not UTF-8.
    """
    if path is None:
        return resources.files("ssa_hf").joinpath("data/alice.txt").read_text(encoding="utf-8")
    where = Path(path)
    files = sorted(where.rglob("*.txt")) if where.is_dir() else [where]
    if not files or not files[0].is_file():
        raise ValueError(f"no text at {path}: give a text file or a folder with .txt files.")
    texts = []
    for file in files:
        try:
            texts.append(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 text ({error}).") from error
    return "\n".join(texts)


def split(tokenizer: PreTrainedTokenizerFast, text: str, sequence_length: int) -> tuple[Tensor, Tensor]:
    """Tokenize the text and hold out its end; both parts are 1-D.

    Raises:
        ValueError: if the held-out part is shorter than a sequence.
    """
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    train, held_out = tokens.split([len(tokens) - int(len(tokens) * HELD_OUT), int(len(tokens) * HELD_OUT)])
    if len(held_out) <= sequence_length:
        raise ValueError(
            f"the text is too short: a tenth of it must exceed --sequence-length {sequence_length}, "
            f"but has {len(held_out)} tokens."
        )
    return train, held_out


def build_model(
    implementation: str, tokenizer: PreTrainedTokenizerFast, options: argparse.Namespace
) -> PreTrainedModel:
    """Build a Nemotron-style decoder; the same seed gives twins the same initial weights."""
    torch.manual_seed(options.seed)
    config = NemotronConfig(
        vocab_size=len(tokenizer),
        hidden_size=options.width,
        intermediate_size=4 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 32,
        num_key_value_heads=options.width // 64,
        head_dim=32,
        max_position_embeddings=options.sequence_length,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


def train_twins(
    models: dict[str, PreTrainedModel], train: Tensor, held_out: Tensor, options: argparse.Namespace
) -> list[dict[str, float]]:
    """Train the models in step on the same batches.

    Returns:
        One record per report: the step and, for each model, the mean training loss since the report before
        and the held-out loss (nats per token).
    """
    generator = torch.Generator().manual_seed(options.seed)
    optimisers = {name: torch.optim.AdamW(model.parameters(), lr=options.lr) for name, model in models.items()}
    schedules = {
        name: get_cosine_schedule_with_warmup(optimiser, options.steps // 20, options.steps)
        for name, optimiser in optimisers.items()
    }
    history: list[dict[str, float]] = []
    losses: dict[str, list[float]] = {name: [] for name in models}
    report_at = {round(options.steps * part / 5) for part in range(1, 6)}
    for step in track(range(1, options.steps + 1), description="training SSA and softmax"):
        starts = torch.randint(len(train) - options.sequence_length, (options.batch_size,), generator=generator)
        batch = torch.stack([train[start : start + options.sequence_length] for start in starts])
        for name, model in models.items():
            loss = model.train()(batch, labels=batch, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimisers[name].step()
            optimisers[name].zero_grad()
            schedules[name].step()
            losses[name].append(loss.item())
        if step in report_at:
            record: dict[str, float] = {"step": step}
            for name, model in models.items():
                record[f"{name}_train"] = sum(losses[name]) / len(losses[name])
                record[f"{name}_held_out"] = held_out_loss(model, held_out, options)
                losses[name].clear()
            history.append(record)
    return history


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, held_out: Tensor, options: argparse.Namespace) -> float:
    """Mean loss in nats per token over at most 64 windows of the held-out text."""
    windows = held_out.unfold(0, options.sequence_length, options.sequence_length)[:64]
    model.eval()
    losses = [
        model(part, labels=part, use_cache=False).loss.item() * len(part) for part in windows.split(options.batch_size)
    ]
    return sum(losses) / len(windows)


def parameters_by_layer(model: PreTrainedModel) -> list[dict[str, list[float]]]:
    """Return b and n of every head, layer by layer."""
    norms = [module for module in model.modules() if isinstance(module, SSANorm)]
    return [{"b": norm.b.tolist(), "n": norm.n.tolist()} for norm in norms]


def write_sentence(checkpoint: Path, prompt: str) -> str:
    """Load a checkpoint with no further arguments and continue the prompt."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    room = model.config.max_position_embeddings - inputs["input_ids"].shape[1]
    torch.manual_seed(0)
    tokens = model.generate(**inputs, max_new_tokens=min(40, room), do_sample=True, temperature=0.7)
    return str(tokenizer.decode(tokens[0], skip_special_tokens=True))


def _loss_table(history: list[dict[str, float]]) -> Table:
    table = Table(title="loss, nats per token", title_justify="left")
    for column in ("step", "SSA train", "softmax train", "SSA held-out", "softmax held-out"):
        table.add_column(column, justify="right")
    for record in history:
        values = [record[key] for key in ("ssa_train", "sdpa_train", "ssa_held_out", "sdpa_held_out")]
        table.add_row(f"{record['step']:.0f}", *(f"{value:.3f}" for value in values))
    return table


def _parameter_table(model: PreTrainedModel) -> Table:
    table = Table(title="learned b and n of each head", title_justify="left")
    for column in ("layer", "b", "n"):
        table.add_column(column, justify="right" if column == "layer" else "left")
    for layer, values in enumerate(parameters_by_layer(model)):
        table.add_row(str(layer), *(" ".join(f"{value:.3f}" for value in values[name]) for name in ("b", "n")))
    return table


def _width(value: str) -> int:
    width = int(value)
    if width <= 0 or width % 64:
        raise argparse.ArgumentTypeError("must be a multiple of 64: heads are 32 wide, two to a key/value head")
    return width


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ssa-hf demo", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--data", help="a text file, or a folder of .txt files (default: a chapter of Alice)")
    parser.add_argument("--output", default="runs/demo", help="where to save the SSA checkpoint and results.json")
    parser.add_argument("--steps", type=int, default=150, help="training steps")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences a step")
    parser.add_argument("--sequence-length", type=int, default=128, help="tokens a sequence")
    parser.add_argument("--layers", type=int, default=4, help="decoder layers")
    parser.add_argument("--width", type=_width, default=128, help="hidden size, a multiple of 64")
    parser.add_argument("--vocab-size", type=int, help="size of the BPE vocabulary (default: by length, up to 1024)")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate (AdamW, cosine)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches")
    parser.add_argument("--prompt", help="what the reloaded model continues (default: the text's beginning)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
