"""Perplexity of decoders on a corpus: per token, per word, and as bits per byte, so that tokenizers compare.

    python -m ssa_hf.recipes.perplexity --model runs/114m_ssa runs/114m_softmax --dataset wikimedia/wikipedia \\
        --dataset_config 20231101.en --documents 2000

Each document is scored by itself, after a begin-of-text token, in windows that overlap: every token is scored once,
with at least window - stride tokens before it (or all there are). Writes JSON, and a bar chart beside it.
"""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ssa_hf.recipes.arguments import parse
from ssa_hf.recipes.corpus import CorpusArguments, Counts, open_corpus, texts


@dataclass
class PerplexityArguments(CorpusArguments):
    """What to evaluate, and on what."""

    model: list[str] = field(default_factory=list, metadata={"help": "checkpoints: folders or Hub names"})
    documents: int | None = field(
        default=500,
        metadata={"help": "first documents of the corpus to score (pretrain_fineweb keeps 500 from training)"},
    )
    window: int | None = field(
        default=None, metadata={"help": "tokens at once; by default all the model was built for"}
    )
    stride: int | None = field(default=None, metadata={"help": "tokens a window moves on; by default half of it"})
    batch_size: int = field(default=8, metadata={"help": "windows at once"})
    device: str = field(default="cuda" if torch.cuda.is_available() else "cpu", metadata={"help": "where to run"})
    output: str = field(default="runs/perplexity.json", metadata={"help": "JSON file with the results"})


@dataclass
class Score:
    """Negative log-likelihood (nats) of a text, and its length in tokens, words (at white space) and UTF-8 bytes."""

    nats: float = 0.0
    tokens: int = 0
    words: int = 0
    bytes: int = 0

    def to_dict(self) -> dict[str, float]:
        """Return the lengths, perplexities and bits per byte."""
        return {
            "perplexity": math.exp(self.nats / self.tokens),
            "word_perplexity": math.exp(self.nats / self.words),
            "bits_per_byte": self.nats / math.log(2) / self.bytes,
            **vars(self),
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the recipe; return the exit status."""
    (options,) = parse((PerplexityArguments,), arguments, __doc__)
    results = {}
    try:
        if not options.model:
            raise ValueError("give --model, one or more checkpoints.")
        for name in options.model:
            model, tokenizer = load(name, options.device)
            counts = Counts()
            rows = open_corpus(options)
            documents = texts(rows if options.documents is None else rows.take(options.documents), options, counts)
            window, stride = window_and_stride(model, options)
            score = perplexity(model, tokenizer, documents, window, stride, options.batch_size, options.documents)
            results[name] = {**score.to_dict(), "window": window, "stride": stride, **counts.to_dict()}
    except ValueError as error:
        print(f"perplexity: {error}", file=sys.stderr)
        return 2
    output = Path(options.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"options": vars(options), "results": results}, indent=2) + "\n")
    plot(results, output.with_suffix(".png"))
    Console().print(_table(results))
    return 0


def load(name: str, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a decoder and its tokenizer.

    Raises:
        ValueError: if they can't be loaded.
    """
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(name)
        return model.to(device).eval(), AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load {name}: {str(error).splitlines()[0]}") from error


def window_and_stride(model: PreTrainedModel, options: PerplexityArguments) -> tuple[int, int]:
    """Return the lengths to use.

    Raises:
        ValueError: unless 0 < stride < window <= what the model was built for.
    """
    longest = model.config.max_position_embeddings
    window = options.window or longest
    stride = options.stride or window // 2
    if not 0 < stride < window <= longest:
        raise ValueError(f"need 0 < stride < window <= {longest}, got a stride of {stride} and a window of {window}.")
    return window, stride


def perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Iterator[str],
    window: int,
    stride: int,
    batch_size: int = 8,
    total: int | None = None,
) -> Score:
    """Score documents.

    Args:
        model: decoder, in evaluation mode.
        tokenizer: its ``bos_token`` (or else ``eos_token``) begins each document, and is not scored.
        documents: texts.
        window: tokens the model sees at once.
        stride: tokens by which windows move on.
        batch_size: windows at once; the result does not depend on it.
        total: number of documents, for the progress bar.

    Raises:
        ValueError: if the tokenizer has neither token, or there is nothing to score.
    """
    begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if begin is None:
        raise ValueError("the tokenizer has neither a bos_token nor an eos_token to begin a document with.")
    score = Score()
    waiting: list[tuple[list[int], int]] = []
    for document in track(documents, description="scoring", total=total):
        tokens = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
        score.tokens += len(tokens)
        score.words += len(document.split())
        score.bytes += len(document.encode())
        waiting += windows([begin, *tokens], window, stride)
        while len(waiting) >= batch_size:
            score.nats += negative_log_likelihood(model, waiting[:batch_size])
            del waiting[:batch_size]
    if waiting:
        score.nats += negative_log_likelihood(model, waiting)
    if not score.tokens:
        raise ValueError("there is nothing to score.")
    return score


def windows(tokens: list[int], window: int, stride: int) -> Iterator[tuple[list[int], int]]:
    """Cut a document into windows; yield each with how many of its last tokens are to be scored."""
    scored = 1
    while scored < len(tokens):
        end = min(len(tokens), window if scored == 1 else scored + stride)
        yield tokens[max(0, end - window) : end], end - scored
        scored = end


@torch.no_grad()
def negative_log_likelihood(model: PreTrainedModel, batch: list[tuple[list[int], int]]) -> float:
    """Return the sum over the windows of -log p, in nats, of the last tokens that are to be scored."""
    longest = max(len(tokens) for tokens, _ in batch)
    # Padding on the right: no token sees what comes after it.
    ids = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens, _ in batch], device=model.device)
    logits: Tensor = model(ids, use_cache=False).logits
    nats = 0.0
    for row, (tokens, scored) in enumerate(batch):
        predictions = logits[row, len(tokens) - 1 - scored : len(tokens) - 1].float()
        target = ids[row, len(tokens) - scored : len(tokens)]
        nats += functional.cross_entropy(predictions, target, reduction="sum").item()
    return nats


def _table(results: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="perplexity", title_justify="left")
    table.add_column("model", overflow="fold")
    for column in ("per token", "per word", "bits per byte", "tokens", "documents"):
        table.add_column(column, justify="right")
    for name, result in results.items():
        table.add_row(
            name,
            f"{result['perplexity']:.3f}",
            f"{result['word_perplexity']:.2f}",
            f"{result['bits_per_byte']:.4f}",
            f"{result['tokens']:,}",
            f"{result['documents']:,}",
        )
    return table


def plot(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw each model's perplexity per token as a bar."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 1 + 0.4 * len(results)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([Path(name).name for name in results], [result["perplexity"] for result in results.values()])
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.set_xlabel("perplexity per token")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    raise SystemExit(main())
