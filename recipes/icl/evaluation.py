"""Errors of a trained learner in and out of its training distribution, and its attention."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import default_data_collator

from ssa_hf.diagnostics import MEASURES, attention_statistics, observed_weights
from ssa_hf.recipes.icl.model import InContextLearner
from ssa_hf.recipes.icl.tasks import TASKS, Prompts, Shift

SIGMAS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
LARGE_VALUES = (1.0, 3.0, 10.0, 30.0, 100.0, 1000.0)
#: Of the training length; the paper goes to 200 from 40.
LENGTHS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0)
#: The prompts whose attention is measured and drawn beside ordinary ones.
LARGE = Shift(large_value=100.0)
#: Test prompts are the same for every model and seed.
TEST_SEED = 20250820

#: For each curve what is varied; the error at each of its values is that of the answer to the whole prompt.
Curve = list[dict[str, float]]


def conditions(task: str, length: int) -> dict[str, list[tuple[float, int, Shift]]]:
    """Return for each curve its points: the value that is varied, the length of the prompts and their shift."""
    lengths = [max(3, round(share * length)) for share in LENGTHS]
    curves: dict[str, list[tuple[float, int, Shift]]] = {
        "length": [(points, points, Shift()) for points in lengths],
        "sigma": [(sigma, length, Shift(sigma=sigma)) for sigma in SIGMAS],
        "context_sigma": [(sigma, length, Shift(context_sigma=sigma)) for sigma in SIGMAS],
        "large_value": [(value, length, Shift(large_value=value)) for value in LARGE_VALUES],
    }
    if task == "linear":
        curves["function_sigma"] = [(sigma, length, Shift(function_sigma=sigma)) for sigma in SIGMAS]
    return curves


def error_curves(model: InContextLearner, task: str, length: int, count: int, batch_size: int = 64) -> dict[str, Curve]:
    """Measure the errors of the answers to whole prompts: shares of wrong ones, or mean squared errors.

    Args:
        model: in evaluation mode.
        task: one of ``TASKS``.
        length: number of x in the longest training prompts.
        count: test prompts for each point.
        batch_size: prompts at once.

    Returns:
        Curves "length", "sigma" (of x), "context_sigma" (of all x but the last), "large_value" and, for functions,
        "function_sigma". A point has "value" and "error"; for quantifiers also "error_yes" and "error_no", among
        prompts with that answer.
    """
    return {
        name: [
            {
                "value": value,
                **_errors(task, *_answers(model, Prompts(task, points, count, (TEST_SEED,), shift), batch_size)),
            }
            for value, points, shift in curve
        ]
        for name, curve in conditions(task, length).items()
    }


def reference_curves(length: int, count: int) -> dict[str, dict[str, Curve]]:
    """Return the curves of "least squares" (of minimal norm, where one example leaves a choice) and of "zero"."""
    references: dict[str, dict[str, Curve]] = {"least squares": {}, "zero": {}}
    for name, curve in conditions("linear", length).items():
        for curves in references.values():
            curves[name] = []
        for value, points, shift in curve:
            prompts = [Prompts("linear", points, count, (TEST_SEED,), shift)[index] for index in range(count)]
            labels = torch.tensor([prompt["labels"][-1] for prompt in prompts])
            fitted = torch.tensor([least_squares(prompt["values"]) for prompt in prompts])
            references["least squares"][name].append({"value": value, **_errors("linear", fitted, labels)})
            references["zero"][name].append({"value": value, **_errors("linear", torch.zeros_like(labels), labels)})
    return references


def least_squares(values: np.ndarray) -> float:
    """Predict f at the last number of a prompt x_1, f(x_1), ..., x_t from the least-squares line, in float64."""
    x, y = values[:-1:2].astype(np.float64), values[1::2].astype(np.float64)
    a, c = np.linalg.lstsq(np.stack([x, np.ones_like(x)], -1), y, rcond=None)[0]
    return float(a * values[-1] + c)


def attention_on_large_value(
    model: InContextLearner, task: str, length: int, count: int, batch_size: int = 64
) -> dict[str, dict[str, float]]:
    """Measure attention on "ordinary" prompts and on those with one "large_value".

    Returns:
        For both, each statistic of :mod:`ssa_hf.diagnostics`, its mean over layers and heads.
    """
    measured = {}
    for name, shift in (("ordinary", Shift()), ("large_value", LARGE)):
        prompts = Prompts(task, length, count, (TEST_SEED,), shift)
        found = attention_statistics(model, ({"values": batch["values"]} for batch in _batches(prompts, batch_size)))
        measured[name] = {measure: getattr(found, measure).mean().item() for measure in MEASURES}
    return measured


def attention_map(model: InContextLearner, task: str, length: int) -> dict[str, Any]:
    """Return one prompt with a large value ("prompt"), and each layer's attention on it, mean over heads ("layers")."""
    values = torch.from_numpy(Prompts(task, length, 1, (TEST_SEED,), LARGE)[0]["values"])
    layers: list[list[list[float]]] = []
    with observed_weights(model, lambda _, weights: layers.append(weights[0].mean(0).tolist())), torch.no_grad():
        model(values[None].to(model.device))
    return {"prompt": values.tolist(), "layers": layers}


def _batches(prompts: Prompts, batch_size: int) -> Iterator[dict[str, Tensor]]:
    yield from DataLoader(prompts, batch_size, collate_fn=default_data_collator)


@torch.no_grad()
def _answers(model: InContextLearner, prompts: Prompts, batch_size: int) -> tuple[Tensor, Tensor]:
    """Return the logits or predictions for each whole prompt, and the right answers."""
    predicted, labels = [], []
    for batch in _batches(prompts, batch_size):
        predicted.append(model(batch["values"].to(model.device)).logits[:, -1].cpu())
        labels.append(batch["labels"][:, -1])
    return torch.cat(predicted), torch.cat(labels)


def _errors(task: str, predicted: Tensor, labels: Tensor) -> dict[str, float]:
    if TASKS[task].problem_type == "regression":
        return {"error": (predicted.double() - labels.double()).square().mean().item()}
    wrong = ((predicted > 0) != (labels > 0.5)).double()
    yes = labels > 0.5
    return {
        "error": wrong.mean().item(),
        "error_yes": wrong[yes].mean().item(),
        "error_no": wrong[~yes].mean().item(),
    }
