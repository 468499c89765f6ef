"""Time SSA attention against softmax (SDPA) and the other ways to compute it, alternating in one run.

Every round runs each candidate once, so that whatever else the machine does falls on all of them alike. Prints ratios
of median times to SDPA softmax and peak memory above the inputs, appends all figures to a CSV (with device, versions,
commit and percentiles) and draws them over the sequence length.
"""

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import ssa_hf
from ssa_hf.recipes.benchmarking import Row, Run, append_csv, machine, measure, peak_memory, print_table, row
from ssa_hf.scorings import find_scoring

SOFTMAX = "sdpa softmax"


@dataclass(frozen=True)
class Case:
    """One attention call to time.

    Attributes:
        name: how tables call it.
        batch, heads, q_len, k_len, dim: sizes.
        groups: key/value heads; 0 is as many as ``heads``.
        dtype: of query, key and value.
        causal: causal attention, else bidirectional.
        padded: with a boolean mask that hides each row's padding, and dropout 0.1 (BabyBERTa's batches).
        train: forward and backward, else forward only.
    """

    name: str
    batch: int
    heads: int
    q_len: int
    dim: int
    k_len: int = 0
    groups: int = 0
    dtype: torch.dtype = torch.float32
    causal: bool = True
    padded: bool = False
    train: bool = False

    @property
    def flops(self) -> float:
        """Floating-point operations of the matrix products: two forward, five more backward, half if causal."""
        forward = 4.0 * self.batch * self.heads * self.q_len * (self.k_len or self.q_len) * self.dim
        return forward * (3.5 if self.train else 1.0) * (0.5 if self.causal and self.q_len > 1 else 1.0)

    @property
    def title(self) -> str:
        """Name, sizes, type and passes."""
        sizes = f"({self.batch},{self.heads},{self.q_len},{self.dim})"
        passes = "fwd+bwd" if self.train else "fwd"
        return f"{self.name} {sizes} {str(self.dtype).removeprefix('torch.')} {passes}"


def cases(device: str) -> list[Case]:
    """Return the shapes that the project's claims are about."""
    if device == "cuda":
        # 16,384 tokens and a width of 2,048 throughout.
        return [
            Case("decoder", 16384 // length, 2048 // dim, length, dim, dtype=torch.bfloat16, train=train)
            for dim in (32, 64, 128)
            for length in (512, 2048, 8192, 16384)
            for train in (False, True)
        ] + [Case("decode", batch=8, heads=32, q_len=1, k_len=16384, dim=128, groups=8, dtype=torch.bfloat16)]
    shapes = [
        dict(name="decoder", batch=4, heads=24, q_len=1024, dim=32),
        dict(name="decoder", batch=2, heads=24, q_len=1024, dim=32),
        dict(name="short", batch=16, heads=8, q_len=128, dim=32),
        dict(name="decoder", batch=1, heads=12, q_len=4096, dim=64),
        dict(name="long", batch=1, heads=8, q_len=16384, dim=64),
        dict(name="babyberta", batch=16, heads=8, q_len=20, dim=32, causal=False, padded=True),
        dict(name="decoder", batch=4, heads=24, q_len=1024, dim=32, dtype=torch.bfloat16),
    ]
    both = [Case(**shape, train=train) for shape in shapes for train in (False, True)]  # type: ignore[arg-type]
    return [*both, Case("decode", batch=8, heads=12, q_len=1, k_len=4096, dim=64, groups=4)]


def lengths(device: str) -> list[Case]:
    """Return the cases of the figure over the sequence length."""
    if device == "cuda":
        return [case for case in cases(device) if case.dim == 64 and case.name == "decoder"]
    sizes = (128, 256, 512, 1024, 2048, 4096, 8192)
    return [Case("length", 1, 8, length, 64, train=train) for train in (False, True) for length in sizes]


def candidates(case: Case, compiled: bool, device: str, scorings: Sequence[str] = ()) -> dict[str, Run]:
    """Return the ways to compute a case, softmax first.

    Args:
        case: what to compute.
        compiled: add those that torch.compile must build.
        device: where.
        scorings: names of other scorings to add.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(heads: int, length: int) -> Tensor:
        # Stored (batch, length, heads, dim), as the projections of a model leave it.
        data = torch.randn(case.batch, length, heads, case.dim, generator=generator)
        return data.to(device, case.dtype).transpose(1, 2).requires_grad_(case.train)

    groups, k_len = case.groups or case.heads, case.k_len or case.q_len
    query, key, value = normal(case.heads, case.q_len), normal(groups, k_len), normal(groups, k_len)
    b, n = (torch.full((case.heads,), x, device=device, requires_grad=case.train) for x in (0.8, 1.5))
    mask = None
    if case.padded:
        real = torch.randint(4, k_len + 1, (case.batch, 1, 1, 1), generator=generator)
        mask = (torch.arange(k_len) < real).expand(-1, 1, case.q_len, -1)
    causal = case.causal and case.q_len > 1
    dropout = 0.1 if case.padded and case.train else 0.0
    grad = normal(case.heads, case.q_len).detach()

    def softmax() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, enable_gqa=groups != case.heads
        )

    def ssa(backend: str) -> Tensor:
        return ssa_hf.ssa_attention(
            query, key, value, b, n, attn_mask=mask, dropout_p=dropout, is_causal=causal, backend=backend
        )

    def score_mod(score: Tensor, _batch: Tensor, head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return n[head] * torch.sign(score) * torch.log1p(b[head] * torch.abs(score))

    def scored(name: str) -> Callable[[], Tensor]:
        scoring = find_scoring(name)
        assert scoring is not None
        attend = scoring.from_any(None).attend
        parameters = scoring.from_any(None).parameters(case.heads, torch.device(device))
        padding = mask[:, 0, 0] if mask is not None and scoring.mask_dim == 2 else mask
        return lambda: attend(
            parameters, query, key, value, attn_mask=padding, is_causal=causal, dropout_p=dropout,
            sliding_window=None, scale=None, softcap=None, return_weights=False,
        )[0]  # fmt: skip

    fused = "triton" if device == "cuda" else "cpu"
    forwards: dict[str, Callable[[], Tensor]] = {SOFTMAX: softmax, f"ssa {fused}": functools.partial(ssa, fused)}
    if device == "cuda":
        for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("efficient", SDPBackend.EFFICIENT_ATTENTION)):
            forwards[f"sdpa {name}"] = sdpa_kernel(backend)(softmax)
    if case.batch * case.heads * case.q_len * k_len <= 2**28:  # beyond, plain PyTorch takes minutes
        forwards |= {f"ssa {backend}": functools.partial(ssa, backend) for backend in ("blocked", "reference")}
        forwards |= {name: scored(name) for name in scorings}
        if compiled:
            forwards["ssa reference, compiled"] = torch.compile(functools.partial(ssa, "reference"))
    # On the CPU flex_attention has no backward pass; on the GPU it has one for trained b and n.
    if compiled and not case.padded and (not case.train or device == "cuda"):
        block_mask = None
        if causal:
            block_mask = create_block_mask(
                lambda _b, _h, q, k: q >= k, None, None, case.q_len, k_len, device=query.device
            )
        flex = functools.partial(torch.compile(flex_attention), enable_gqa=groups != case.heads)
        forwards["flex_attention ssa"] = lambda: flex(query, key, value, score_mod=score_mod, block_mask=block_mask)

    def train(forward: Callable[[], Tensor]) -> None:
        forward().backward(grad)

    def infer(forward: Callable[[], Tensor]) -> None:
        with torch.no_grad():
            forward()

    step = train if case.train else infer
    return {name: functools.partial(step, forward) for name, forward in forwards.items()}


def benchmark(case: Case, compiled: bool, seconds: float, device: str, scorings: Sequence[str] = ()) -> list[Row]:
    """Return one CSV row for each candidate of a case; one that fails is named, and left out."""
    runs = candidates(case, compiled, device, scorings)
    memory = {}
    for name, run in list(runs.items()):
        try:
            memory[name] = peak_memory(run)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            if name == SOFTMAX or name.startswith("ssa triton"):
                raise
            print(f"{case.title}: {name} left out: {str(error).splitlines()[0]}", file=sys.stderr)
            del runs[name]
    times = measure(runs, seconds)
    return [
        row(case.title, name, times, SOFTMAX, memory[name])
        | {"tflops": f"{case.flops / statistics.median(values) / 1e12:.2f}"}
        for name, values in times.items()
    ]


def draw(path: Path, swept: dict[Case, list[Row]]) -> None:
    """Draw the time ratio to softmax over the sequence length, one panel for forward, one for training."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    for panel, train in zip(panels, (False, True), strict=True):
        points: dict[str, list[tuple[int, float]]] = {}
        for case, rows in swept.items():
            for result in rows if case.train == train else ():
                ratio = float(str(result["ratio_to_softmax"]))
                points.setdefault(str(result["candidate"]), []).append((case.q_len, ratio))
        for candidate, line in points.items():
            panel.plot(*zip(*line, strict=True), marker="o", label=candidate)
        panel.set(xlabel="sequence length", ylabel="time, SDPA softmax = 1", yscale="log")
        panel.set_xscale("log", base=2)
        panel.set_title("forward and backward" if train else "forward")
        panel.grid(alpha=0.3)
        panel.legend()
    first = next(iter(swept))
    sizes = f"heads of {first.dim}, {str(first.dtype).removeprefix('torch.')}, causal"
    figure.suptitle(f"{sizes}; {machine()['device']}, {machine()['threads']} CPU threads")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/benchmark"), help="folder for CSV and PNG")
    parser.add_argument("--seconds", type=float, default=10, help="time for each case, about")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    names = ",".join(scoring.name for scoring in ssa_hf.registered_scorings() if scoring.name != "ssa")
    parser.add_argument("--scorings", help=f"other scorings to time as well, of {names}")
    parser.add_argument("--only", help="run only cases whose title contains this")
    parser.add_argument("--no-compiled", action="store_true", help="leave out what torch.compile must build first")
    parser.add_argument("--no-lengths", action="store_true", help="leave out the figure over sequence lengths")
    options = parser.parse_args(arguments)
    console = Console()

    chosen = [case for case in cases(options.device) if not options.only or options.only in case.title]
    if not chosen:
        print(f"benchmark_attention: no case contains {options.only!r}.", file=sys.stderr)
        return 2
    scorings = options.scorings.split(",") if options.scorings else []
    if unknown := [name for name in scorings if find_scoring(name) is None]:
        print(f"benchmark_attention: no scoring is called {', '.join(unknown)}.", file=sys.stderr)
        return 2
    path = options.output / "benchmark_attention.csv"
    for case in chosen:
        torch.compiler.reset()
        rows = benchmark(case, not options.no_compiled, options.seconds, options.device, scorings)
        append_csv(path, rows)
        print_table(console, rows)
    if not options.no_lengths:
        swept = {}
        for case in track(lengths(options.device), description="sequence lengths"):
            swept[case] = benchmark(case, False, options.seconds / 2, options.device)
            append_csv(path, swept[case])
        draw(options.output / "benchmark_attention.png", swept)
    console.print(f"Saved to {options.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
