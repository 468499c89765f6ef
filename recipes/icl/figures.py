"""Figures and the table of an in-context learning experiment."""

from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from scipy.stats import t as student_t

#: A run of the results: "scoring", "seed", "curves", "attention", "attention_map", "scoring_values".
Run = dict[str, Any]

AXES = {
    "length": "numbers in the prompt",
    "sigma": "sigma of x",
    "context_sigma": "sigma of all x but the last",
    "function_sigma": "sigma of a and c",
    "large_value": "the one large value",
}


def by_scoring(runs: list[Run]) -> dict[str, list[Run]]:
    """Group runs by their scoring."""
    return {name: [run for run in runs if run["scoring"] == name] for name in dict.fromkeys(r["scoring"] for r in runs)}


def mean_errors(runs: list[Run], curve: str) -> list[tuple[float, float | None]]:
    """Return for each point the mean over seeds and half of its 95% t-interval, None for a single seed."""
    errors = torch.tensor([[point["error"] for point in run["curves"][curve]] for run in runs], dtype=torch.float64)
    means = errors.mean(0).tolist()
    if len(runs) == 1:
        return [(mean, None) for mean in means]
    halves = student_t.ppf(0.975, len(runs) - 1) * errors.std(0) / len(runs) ** 0.5
    return list(zip(means, halves.tolist(), strict=True))


def error_table(task: str, runs: list[Run], references: dict[str, Any]) -> Table:
    """Tabulate the errors: % of the prompts for quantifiers, mean squared errors for functions."""
    unit, scale = ("mean squared error", 1.0) if references else ("error, %", 100.0)
    groups = by_scoring(runs)
    title = f"{task}: {unit} (mean of {len(next(iter(groups.values())))} seed(s) ± half of the 95% interval)"
    table = Table(title=title, title_justify="left")
    table.add_column("shift")
    for name in (*groups, *references):
        table.add_column(name, justify="right")
    for curve, points in runs[0]["curves"].items():
        columns = [mean_errors(members, curve) for members in groups.values()]
        for index, point in enumerate(points):
            cells = []
            for column in columns:
                mean, half = column[index]
                cells.append(f"{scale * mean:.4g}" + ("" if half is None else f" ± {scale * half:.2g}"))
            cells += [f"{reference[curve][index]['error']:.4g}" for reference in references.values()]
            table.add_row(f"{AXES[curve]}: {point['value']:g}", *cells)
    return table


def plot_errors(task: str, runs: list[Run], references: dict[str, Any], path: Path) -> None:
    """Draw error against each shift: thick lines are means over seeds, thin ones single seeds."""
    from matplotlib.figure import Figure

    curves = list(runs[0]["curves"])
    figure = Figure(figsize=(5 * len(curves), 4.2), layout="constrained")
    for axes, curve in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves, strict=True):
        values = [point["value"] for point in runs[0]["curves"][curve]]
        for index, (name, members) in enumerate(by_scoring(runs).items()):
            for run in members:
                axes.plot(values, [p["error"] for p in run["curves"][curve]], f"C{index}", linewidth=0.7, alpha=0.5)
            axes.plot(values, [mean for mean, _ in mean_errors(members, curve)], f"C{index}o-", label=name)
        for style, (name, reference) in zip((":", "--"), references.items(), strict=False):
            axes.plot(values, [p["error"] for p in reference[curve]], f"k{style}", linewidth=1, label=name)
        axes.set(
            xlabel=AXES[curve], ylabel="mean squared error" if references else "share of wrong answers", title=task
        )
        if curve != "length":
            axes.set_xscale("log")
        if references:
            # Least squares is exact but for rounding, and would fill the axis with zeros.
            axes.set_yscale("log")
            axes.set_ylim(bottom=1e-4)
        axes.legend()
    figure.savefig(path, dpi=120)


def plot_attention(runs: list[Run], path: Path) -> None:
    """Draw each scoring's attention on the large-value prompt, first seed, layer by layer, mean over heads."""
    from matplotlib.figure import Figure

    groups = {name: members[0] for name, members in by_scoring(runs).items()}
    layers = max(len(run["attention_map"]["layers"]) for run in groups.values())
    figure = Figure(figsize=(2.6 * layers, 2.9 * len(groups)), layout="constrained")
    grid = figure.subplots(len(groups), layers, squeeze=False)
    for row, (name, run) in enumerate(groups.items()):
        prompt = torch.tensor(run["attention_map"]["prompt"])
        for layer, weights in enumerate(run["attention_map"]["layers"]):
            axes = grid[row][layer]
            image = axes.imshow(weights, vmin=0, vmax=1)
            axes.set(
                title=f"{name}, layer {layer}",
                xlabel=f"key (large value: {int(prompt.abs().argmax())})",
                ylabel="query",
            )
        figure.colorbar(image, ax=list(grid[row]))
    figure.savefig(path, dpi=110)


def plot_scoring_values(runs: list[Run], path: Path) -> None:
    """Draw what the scorings learned (SSA's b and n) of every head against its layer, a colour for each run."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(key.partition("/layer")[0] for run in runs for key in run["scoring_values"]))
    figure = Figure(figsize=(5 * len(names), 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        own = [run for run in runs if any(key.startswith(f"{name}/") for key in run["scoring_values"])]
        for index, run in enumerate(own):
            points = [
                (int(key.split("/")[2].removeprefix("layer")), value)
                for key, value in run["scoring_values"].items()
                if key.startswith(f"{name}/")
            ]
            layers, values = zip(*points, strict=True)
            axes.scatter([layer + 0.1 * index for layer in layers], values, s=12, label=f"seed {run['seed']}")
        axes.set(xlabel="layer", ylabel=f"{name} of each head")
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)
