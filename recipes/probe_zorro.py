"""Probe grammar with Zorro's minimal pairs: how often does a model find the grammatical sentence more probable?

    ssa-hf zorro --model runs/babyberta_softmax runs/babyberta_ssa_2 --data zorro/sentences/babyberta

The folder holds a file PHENOMENON-PARADIGM.txt for each paradigm, ungrammatical and grammatical sentences in turn. The
models after the first are compared with it. Writes results.json and accuracy.png into --output_dir.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from scipy.stats import binomtest
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ssa_hf.likelihood import log_likelihoods, pseudo_log_likelihoods, unmasked_cross_entropies
from ssa_hf.recipes.arguments import parse
from ssa_hf.recipes.sentences import read_pairs

#: Accuracies in % of the paper (arXiv 2508.14685): softmax, the better of SSA-1.5 and SSA-2, and which it was.
PAPER = {
    "agreement_subject_verb-across_prepositional_phrase": (56.00, 65.95, "n=2"),
    "argument_structure-swapped_arguments": (83.30, 92.00, "n=1.5"),
    "binding-principle_a": (78.25, 87.90, "n=1.5"),
    "quantifiers-superlative": (71.20, 83.95, "n=1.5"),
}
#: Scores of a pair (nats) nearer than this are a tie: rounding decides which is higher.
TIE = 1e-5


@dataclass
class ProbeArguments:
    """What to probe, and how."""

    model: list[str] = field(default_factory=list, metadata={"help": "checkpoints: folders or Hub names"})
    data: str = field(default="", metadata={"help": "folder with Zorro's files"})
    scoring: str = field(
        default="both",
        metadata={
            "help": "for masked models: BabyBERTa's cross-entropy without masks, or pseudo-log-likelihood",
            "choices": ["unmasked", "pseudo", "both"],
        },
    )
    pairs: int | None = field(default=None, metadata={"help": "first pairs of each paradigm; all by default"})
    batch_size: int = field(default=128, metadata={"help": "sequences at once"})
    device: str = field(default="cuda" if torch.cuda.is_available() else "cpu", metadata={"help": "where to run"})
    output_dir: str = field(default="runs/zorro", metadata={"help": "folder for the results"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the recipe; return the exit status."""
    (options,) = parse((ProbeArguments,), arguments, __doc__)
    # Redirected, rich would wrap at 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 160)
    try:
        if not options.model or not options.data:
            raise ValueError("give --model, one or more checkpoints, and --data, the folder with Zorro's files.")
        paradigms = read_paradigms(Path(options.data), options.pairs)
        outcomes: dict[str, dict[str, dict[str, list[float]]]] = {}  # by scoring, model and paradigm
        for name in options.model:
            model, tokenizer = load(name, options.device)
            for scoring in scorings(model, options.scoring):
                outcomes.setdefault(scoring, {})[name] = probe(
                    model, tokenizer, paradigms, scoring, options.batch_size, f"{name}, {scoring}"
                )
    except ValueError as error:
        print(f"ssa-hf zorro: {error}", file=sys.stderr)
        return 2
    results = {
        scoring: {name: summarise(by_model, name) for name in by_model} for scoring, by_model in outcomes.items()
    }
    output = Path(options.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    content = {"options": vars(options), "paper": PAPER, "results": results}
    (output / "results.json").write_text(json.dumps(content, indent=2) + "\n")
    plot(results, output / "accuracy.png")
    for scoring, by_model in results.items():
        console.print(table(scoring, by_model))
    return 0


def read_paradigms(folder: Path, pairs: int | None = None) -> dict[str, list[str]]:
    """Read Zorro's files: for each paradigm its sentences, each ungrammatical one before its grammatical partner.

    Raises:
        ValueError: if there are none, or for an odd number of lines, a blank line or bytes that are not UTF-8.
    """
    paradigms = {}
    for path in sorted(folder.glob("*-*.txt")):
        sentences = read_pairs(path)
        paradigms[path.stem] = sentences if pairs is None else sentences[: 2 * pairs]
    if not paradigms:
        raise ValueError(f"{folder} has no files PHENOMENON-PARADIGM.txt: give the folder with Zorro's sentences.")
    return paradigms


def load(name: str, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a masked language model or a decoder, and its tokenizer.

    Raises:
        ValueError: if they can't be loaded.
    """
    try:
        config = AutoConfig.from_pretrained(name)
        auto: Any = AutoModelForMaskedLM if _is_masked(config) else AutoModelForCausalLM
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = auto.from_pretrained(name).to(device).eval()
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load {name}: {str(error).splitlines()[0]}") from error
    return model, tokenizer


def scorings(model: PreTrainedModel, asked: str) -> list[str]:
    """Return the scorings for a model: those asked for if it is a masked one, plain log-likelihood for a decoder."""
    if not _is_masked(model.config):
        return ["log-likelihood"]
    return ["unmasked", "pseudo"] if asked == "both" else [asked]


def _is_masked(config: PreTrainedConfig) -> bool:
    return any(architecture.endswith("ForMaskedLM") for architecture in config.architectures or [])


def probe(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    paradigms: dict[str, list[str]],
    scoring: str,
    batch_size: int,
    description: str,
) -> dict[str, list[float]]:
    """Return by how many nats each pair's grammatical sentence is ahead, for each paradigm."""
    ahead = {}
    with Progress() as progress:
        task = progress.add_task(description, total=sum(map(len, paradigms.values())))
        for paradigm, sentences in paradigms.items():
            values = score(model, tokenizer, sentences, scoring, batch_size)
            ahead[paradigm] = [good - bad for bad, good in zip(values[::2], values[1::2], strict=True)]
            progress.advance(task, len(sentences))
    return ahead


def score(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sentences: list[str], scoring: str, batch_size: int
) -> list[float]:
    """Score sentences: the higher, the more probable."""
    ids = tokenizer(sentences, add_special_tokens=scoring != "log-likelihood")["input_ids"]
    if scoring == "unmasked":
        return [-value for value in unmasked_cross_entropies(model, ids, batch_size)]
    if scoring == "pseudo":
        return pseudo_log_likelihoods(model, ids, tokenizer.mask_token_id, tokenizer.all_special_ids, batch_size)
    # A decoder begins a text as in recipes/perplexity.py.
    begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    return log_likelihoods(model, [[begin, *sentence] for sentence in ids], batch_size)


def phenomenon(paradigm: str) -> str:
    """Return the phenomenon that a paradigm belongs to: "filler-gap" for "filler-gap-wh_question_object"."""
    return paradigm.rpartition("-")[0]


def summarise(by_model: dict[str, dict[str, list[float]]], name: str) -> dict[str, dict[str, Any]]:
    """Return accuracy, its 95% interval (Wilson), ties and exact McNemar p against the first model.

    For each paradigm, each phenomenon (its paradigms together) and "all". A tie is no success, as in BabyBERTa's code.
    """
    first = next(iter(by_model))
    groups: dict[str, list[str]] = {}
    for paradigm in by_model[name]:
        for group in (paradigm, phenomenon(paradigm)):
            groups.setdefault(group, []).append(paradigm)
    groups["all"] = list(by_model[name])
    summary = {}
    for group, members in groups.items():
        ahead = [value for paradigm in members for value in by_model[name][paradigm]]
        right = [value > TIE for value in ahead]
        interval = binomtest(sum(right), len(right)).proportion_ci(method="wilson")
        summary[group] = {
            "accuracy": sum(right) / len(right),
            "interval": [interval.low, interval.high],
            "ties": sum(abs(value) <= TIE for value in ahead),
            "pairs": len(right),
        }
        if name != first:
            before = [value > TIE for paradigm in members for value in by_model[first][paradigm]]
            gained = sum(now and not then for now, then in zip(right, before, strict=True))
            lost = sum(then and not now for now, then in zip(right, before, strict=True))
            p = binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
            summary[group] |= {"gained": gained, "lost": lost, "mcnemar_p": float(p)}
    return summary


def table(scoring: str, by_model: dict[str, dict[str, dict[str, Any]]]) -> Table:
    """Tabulate accuracies in %; p is McNemar's against the first model, the last column the paper's figures."""
    shown = Table(title=f"Zorro, {scoring}: accuracy in % (± half of the 95% interval)", title_justify="left")
    shown.add_column("paradigm", overflow="fold")
    for index, name in enumerate(by_model):
        shown.add_column(Path(name).name, justify="right", overflow="fold")
        if index:
            shown.add_column("p", justify="right")
    shown.add_column("ties", justify="right")
    shown.add_column("paper: softmax, SSA", justify="right")
    for group in next(iter(by_model.values())):
        cells = []
        for index, summary in enumerate(by_model.values()):
            low, high = summary[group]["interval"]
            cells.append(f"{100 * summary[group]['accuracy']:.2f} ± {50 * (high - low):.2f}")
            if index:
                cells.append(f"{summary[group]['mcnemar_p']:.2g}")
        ties = " ".join(str(summary[group]["ties"]) for summary in by_model.values())
        paper = "{:.2f}, {:.2f} ({})".format(*PAPER[group]) if group in PAPER else ""
        shown.add_row(group, *cells, ties, paper)
    return shown


def plot(results: dict[str, dict[str, dict[str, dict[str, Any]]]], path: Path) -> None:
    """Draw each paradigm's accuracy as a bar a model, one panel a scoring."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7 * len(results), 12), layout="constrained")
    for axes, (scoring, by_model) in zip(
        figure.subplots(1, len(results), squeeze=False)[0], results.items(), strict=True
    ):
        groups = list(next(iter(by_model.values())))
        phenomena = {phenomenon(group) for group in groups}
        groups = [group for group in groups if group not in phenomena]
        height = 0.8 / len(by_model)
        for index, (name, summary) in enumerate(by_model.items()):
            accuracy = [100 * summary[group]["accuracy"] for group in groups]
            low, high = ([100 * summary[group]["interval"][end] for group in groups] for end in (0, 1))
            errors = [
                [middle - end for middle, end in zip(accuracy, low, strict=True)],
                [end - middle for middle, end in zip(accuracy, high, strict=True)],
            ]
            rows = [row + index * height for row in range(len(groups))]
            axes.barh(rows, accuracy, height, xerr=errors, label=Path(name).name, error_kw={"linewidth": 0.7})
        axes.set_yticks([row + 0.4 - height / 2 for row in range(len(groups))], groups, fontsize=7)
        axes.axvline(50, color="grey", linewidth=0.7)
        axes.set(xlabel="accuracy, %", title=scoring, xlim=(0, 100))
        axes.invert_yaxis()
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    raise SystemExit(main())
