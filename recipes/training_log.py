"""The log of a training run as a plot and a summary."""

import json
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def plot_training(history: list[Record], path: Path) -> None:
    """Draw loss, and what the scoring trains (b and n), over the steps (Trainer's ``log_history``) into a PNG."""
    from matplotlib.figure import Figure

    scalars = sorted({key.partition("/layer")[0] for key in _last(history) if "/layer" in key})
    figure = Figure(figsize=(5 * (1 + len(scalars)), 4), layout="constrained")
    loss, *others = figure.subplots(1, 1 + len(scalars), squeeze=False)[0]
    for key, label in (("loss", "training"), ("eval_loss", "held out")):
        points = [(record["step"], record[key]) for record in history if key in record]
        if points:
            loss.plot(*zip(*points, strict=True), label=label)
    loss.set(xlabel="step", ylabel="loss, nats per token")
    loss.legend()
    for name, axes in zip(scalars, others, strict=True):
        for key in sorted(key for key in _last(history) if key.startswith(f"{name}/layer")):
            points = [(record["step"], record[key]) for record in history if key in record]
            axes.plot(*zip(*points, strict=True), linewidth=0.7)
        axes.set(xlabel="step", ylabel=f"{name}, every layer and head")
    figure.savefig(path, dpi=120)


def write_summary(history: list[Record], settings: Record, path: Path) -> Record:
    """Write settings, last losses, median throughput, and the final scoring values as JSON, and return them."""
    final = _last(history)
    summary: Record = {"settings": settings, "steps": final.get("step"), "final_loss": final.get("loss")}
    held_out = [record["eval_loss"] for record in history if "eval_loss" in record]
    if held_out:
        summary["held_out_loss"] = held_out[-1]
    for key in ("tokens_per_second", "model_tflops", "mfu"):
        values = sorted(record[key] for record in history if key in record)
        if values:
            summary[key] = values[len(values) // 2]
    summary["scoring_values"] = {key: value for key, value in final.items() if "/layer" in key}
    path.write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def _last(history: list[Record]) -> Record:
    return next((record for record in reversed(history) if "loss" in record), {})
