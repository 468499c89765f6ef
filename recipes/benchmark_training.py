"""Time a training step of whole models with SSA and with softmax (SDPA), alternating in one run.

BabyBERTa (RoBERTa, 8 layers, width 256) on padded batches of 16 short sentences with dropout, and the paper's 114M
Nemotron decoder: forward, backward and AdamW. On a CPU in float32, Nemotron on 512 tokens; on a GPU under bfloat16
autocast, Nemotron on 16 sequences of 1,024.
"""

import argparse
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, NemotronConfig, PreTrainedModel, RobertaConfig

from ssa_hf.recipes.benchmarking import Row, Run, append_csv, measure, print_table, row

IMPLEMENTATIONS = {"softmax (sdpa)": "sdpa", "ssa": "ssa"}
SOFTMAX = "softmax (sdpa)"
Batch = dict[str, Tensor]


def babyberta(implementation: str) -> PreTrainedModel:
    """Build BabyBERTa: RoBERTa with 8 layers of width 256."""
    config = RobertaConfig(
        vocab_size=8192,
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=8,
        intermediate_size=1024,
        max_position_embeddings=130,
        type_vocab_size=1,
    )
    return AutoModelForMaskedLM.from_config(config, attn_implementation=implementation)


def babyberta_batches(device: str) -> list[Batch]:
    """Return 8 right-padded batches of 16 sentences of 4 to 20 tokens."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(8):
        lengths = torch.randint(4, 21, (16, 1), generator=generator)
        tokens = torch.randint(4, 8192, (16, int(lengths.max())), generator=generator)
        mask = (torch.arange(tokens.shape[1]) < lengths).long()
        tokens = tokens.masked_fill(mask == 0, 1)
        batches.append({"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)})
    return [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]


def nemotron(implementation: str) -> PreTrainedModel:
    """Build the paper's 114M decoder."""
    config = NemotronConfig(
        vocab_size=50_000,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


def nemotron_batches(device: str) -> list[Batch]:
    """Return one batch: a sequence of 512 tokens on a CPU, 16 of 1,024 on a GPU."""
    size = (1, 512) if device == "cpu" else (16, 1024)
    tokens = torch.randint(50_000, size, generator=torch.Generator().manual_seed(0)).to(device)
    return [{"input_ids": tokens, "labels": tokens}]


MODELS: dict[str, tuple[Callable[[str], PreTrainedModel], Callable[[str], list[Batch]]]] = {
    "BabyBERTa": (babyberta, babyberta_batches),
    "Nemotron 114M": (nemotron, nemotron_batches),
}


def training_step(model: PreTrainedModel, batches: list[Batch]) -> Run:
    """Return a function that trains one step on the next batch."""
    optimiser = torch.optim.AdamW(model.train().parameters(), lr=1e-4)
    endless = itertools.cycle(batches)

    def step() -> None:
        batch = next(endless)
        device = batch["input_ids"].device.type
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            loss = model(**batch).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def benchmark(name: str, seconds: float, device: str) -> list[Row]:
    """Return one CSV row for softmax and one for SSA."""
    build, batches = MODELS[name]
    runs: dict[str, Run] = {}
    for label, implementation in IMPLEMENTATIONS.items():
        torch.manual_seed(0)
        with torch.device(device):
            model = build(implementation)
        runs[label] = training_step(model, batches(device))
    times = measure(runs, seconds)
    shape = tuple(batches(device)[0]["input_ids"].shape)
    rows = [row(f"{name}, batch {shape}", label, times, SOFTMAX, None) for label in runs]
    for result in rows:
        result["tokens_per_second"] = f"{math.prod(shape) / float(str(result['median_ms'])) * 1e3:.0f}"
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/benchmark"), help="folder for the CSV")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=40, help="time for each model, about")
    options = parser.parse_args(arguments)
    for name in MODELS:
        rows = benchmark(name, options.seconds, options.device)
        append_csv(options.output / "benchmark_training.csv", rows)
        print_table(Console(), rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
