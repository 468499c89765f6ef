"""Show where softmax saturates and SSA does not: attention weights against logit gaps and magnifications.

    ssa-hf saturation --n 1.5 --b 0.8

The figure shows the winner's weight against the gap between its raw score and a runner-up's; then the context mass,
what is left for all other keys (1 minus the winner's weight), when all scores are magnified by λ (the paper's Theorem
1), and when one score alone grows to λ (Theorem 2). Softmax loses context exponentially, SSA by a power of λ at most.
Writes saturation.png and saturation.json, with fitted and derived rates, into --output_dir.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ssa_hf import ssa_logits
from ssa_hf.recipes.arguments import parse

#: Raw scores of the winner and of the other keys that the theorems are shown with, the runner-up x2 first.
WINNER = 2.0
OTHERS = {"x2 > 0": (1.0, -0.5), "x2 = 0": (0.0, -0.5), "x2 < 0": (-0.5, -1.0)}
DOMINATING = "one score"


@dataclass
class SaturationArguments:
    """Which SSA to show."""

    n: float = field(default=1.5, metadata={"help": "exponent, at least 1"})
    b: float = field(default=0.8, metadata={"help": "slope, above 0"})
    output_dir: str = field(default="runs/saturation", metadata={"help": "folder for the figure and the rates"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    (options,) = parse((SaturationArguments,), arguments, __doc__)
    if options.n < 1 or options.b <= 0:
        print(f"ssa-hf saturation: SSA needs n >= 1 and b > 0, got {options.n} and {options.b}.", file=sys.stderr)
        return 2
    output = Path(options.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    found = rates(options.b, options.n)
    (output / "saturation.json").write_text(json.dumps({"options": vars(options), "rates": found}, indent=2) + "\n")
    plot(options.b, options.n, output / "saturation.png")
    table = Table(title=f"how context mass decays (SSA: b = {options.b}, n = {options.n})", title_justify="left")
    for column in ("magnified", "softmax: exp(rate λ)", "derived", "SSA: λ^rate", "derived"):
        table.add_column(column, justify="left" if column == "magnified" else "right")
    for case, row in found.items():
        table.add_row(case, *(f"{row[key]:.4f}" for key in ("softmax", "softmax_derived", "ssa", "ssa_derived")))
    Console().print(table)
    return 0


def scores(case: str, factors: Tensor) -> Tensor:
    """Return raw scores (factors, keys), the winner's first: all times λ, or the winner's alone set to λ."""
    if case == DOMINATING:
        others = torch.tensor(OTHERS["x2 > 0"], dtype=factors.dtype)
        return torch.cat([factors[:, None], others.expand(len(factors), -1)], -1)
    return factors[:, None] * torch.tensor((WINNER, *OTHERS[case]), dtype=factors.dtype)


def log_context_mass(logits: Tensor) -> Tensor:
    """Return log(1 - the first key's weight), which in this form neither cancels nor underflows."""
    return logits[..., 1:].logsumexp(-1) - logits.logsumexp(-1)


def rates(b: float, n: float) -> dict[str, dict[str, float]]:
    """Fit how context mass decays, in float64, and derive it from the formula.

    With x1 > x2 the winner's and the runner-up's scores, softmax's context mass is exp(-λ(x1 - x2)) for large λ. SSA
    weighs x1 by (1 + bλx1)^n and x2 by (1 + bλ|x2|)^(±n), so that it tends to the constant ratio (x2/x1)^n for x2 > 0,
    and decays like λ^-n for x2 = 0 and λ^-2n for x2 < 0. With x1 = λ alone, the others' weights are constant:
    exp(-λ) and λ^-n.

    Returns:
        For each case the fitted and derived rates: of log mass in λ for softmax, in log λ for SSA.
    """
    softmax_factors = torch.linspace(10, 100, 50, dtype=torch.float64)
    ssa_factors = torch.logspace(4, 6, 50, dtype=torch.float64)
    powers = {"x2 > 0": 0.0, "x2 = 0": -n, "x2 < 0": -2 * n, DOMINATING: -n}
    found = {}
    for case, power in powers.items():
        ssa = log_context_mass(_ssa(scores(case, ssa_factors), b, n))
        found[case] = {
            "softmax": _slope(softmax_factors, log_context_mass(scores(case, softmax_factors))),
            "softmax_derived": -1.0 if case == DOMINATING else OTHERS[case][0] - WINNER,
            "ssa": _slope(ssa_factors.log(), ssa),
            "ssa_derived": power,
        }
    return found


def _ssa(raw: Tensor, b: float, n: float) -> Tensor:
    return ssa_logits(raw, torch.tensor(b, dtype=raw.dtype), torch.tensor(n, dtype=raw.dtype))


def _slope(x: Tensor, y: Tensor) -> float:
    """Return the slope of the least-squares line."""
    x = x - x.mean()
    return ((x * y).sum() / (x * x).sum()).item()


def plot(b: float, n: float, path: Path) -> None:
    """Draw the three panels into a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    gaps, magnified, dominating = figure.subplots(1, 3)
    _plot_gaps(gaps, b, n)
    factors = torch.logspace(0, 4, 200, dtype=torch.float64)
    for index, case in enumerate(OTHERS):
        _plot_mass(magnified, factors, case, b, n, f"C{index}", f", {case}")
    _plot_mass(dominating, factors, DOMINATING, b, n, "C0", "")
    magnified.set(title="Theorem 1: all scores times λ", xlabel="λ")
    dominating.set(title="Theorem 2: one score is λ", xlabel="λ")
    for axes in (magnified, dominating):
        axes.set(xscale="log", yscale="log", ylim=(1e-14, 2), ylabel="context mass, 1 - the winner's weight")
    for axes in (gaps, magnified, dominating):
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def _plot_gaps(axes: Any, b: float, n: float) -> None:
    gap = torch.linspace(0, 20, 200, dtype=torch.float64)
    zero = torch.zeros_like(gap)
    axes.plot(gap, torch.sigmoid(gap), "k--", label="softmax")
    for label, winner, other in (
        ("x2 = 0", gap, zero),
        ("x2 = -x1", gap / 2, -gap / 2),
        ("x2 = 5", gap + 5, zero + 5),
    ):
        axes.plot(gap, _ssa(torch.stack([winner, other], -1), b, n).softmax(-1)[:, 0], label=f"SSA, {label}")
    axes.set(title=f"two keys (SSA: b = {b}, n = {n})", xlabel="logit gap, x1 - x2", ylabel="the winner's weight")


def _plot_mass(axes: Any, factors: Tensor, case: str, b: float, n: float, colour: str, label: str) -> None:
    raw = scores(case, factors)
    axes.plot(factors, log_context_mass(_ssa(raw, b, n)).exp(), colour, label=f"SSA{label}")
    axes.plot(factors, log_context_mass(raw).exp(), f"{colour}--", label=f"softmax{label}")


if __name__ == "__main__":
    raise SystemExit(main())
