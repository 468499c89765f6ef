"""Instruments for saturation: how far the attention weights of a model collapse, for every layer and head.

They work for any Transformers model that can give its attention weights, softmax and SSA alike, and keep no attention
map: each is reduced to a few numbers a head as soon as its layer has run.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ssa_hf.modules import attention_modules, scoring_parameters

#: A query attends to the sink if the first token has more than this weight (Gu et al., 2025, arXiv 2410.10781).
SINK_THRESHOLD = 0.3

#: The statistics and how plots call them.
MEASURES = {
    "entropy": "entropy, nats",
    "largest_weight": "largest weight",
    "context_mass": "context mass (1 - largest weight)",
    "effective_tokens": "effective number of tokens",
    "sink_rate": "sink rate",
}


@dataclass(frozen=True)
class AttentionStatistics:
    """Means over all queries that are not padding; each field a float64 tensor (layers, heads).

    Layers with fewer heads than others end in NaN.

    Attributes:
        layers: the attention modules' names in the model.
        entropy: of the weights, nats. It is 0 if all attention is on one token.
        largest_weight: of a query's keys.
        context_mass: 1 minus the largest weight, what is left for all other tokens.
        effective_tokens: exp(entropy): as many tokens with equal weights would have that entropy.
        sink_rate: share of the queries after the first token that give it more than ``SINK_THRESHOLD``.
    """

    layers: list[str]
    entropy: Tensor
    largest_weight: Tensor
    context_mass: Tensor
    effective_tokens: Tensor
    sink_rate: Tensor

    def to_dict(self) -> dict[str, Any]:
        """Return layers and statistics as lists that JSON can hold."""
        return {"layers": self.layers, **{name: getattr(self, name).tolist() for name in MEASURES}}


def attention_statistics(
    model: PreTrainedModel, batches: Iterable[Mapping[str, Any]], *, progress: bool = False
) -> AttentionStatistics:
    """Measure the attention of a model over batches, in evaluation mode and without dropout.

    Args:
        model: an encoder or a decoder; its attention implementation and mode are restored afterwards.
        batches: keyword arguments of the model's forward, such as ``input_ids`` and ``attention_mask`` (batch,
            length); tensors are moved to the model's device. Without a mask every position counts.
        progress: show a progress bar.

    Raises:
        ValueError: if the model does not give its attention weights, is an encoder-decoder, or there are no batches.
    """
    sums = _Sums()
    with observed_weights(model, sums.add), torch.no_grad():
        for batch in track(batches, "attention statistics", disable=not progress):
            inputs = {
                name: value.to(model.device) if isinstance(value, Tensor) else value for name, value in batch.items()
            }
            sums.mask = inputs.get("attention_mask")
            if sums.mask is not None and sums.mask.ndim != 2:
                raise ValueError(f"attention_mask must be (batch, length), got {tuple(sums.mask.shape)}.")
            model(**inputs)
    return sums.statistics()


@contextmanager
def observed_weights(model: PreTrainedModel, observe: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Within the context, call ``observe(name, weights)`` for each attention module that runs.

    ``weights`` is (batch, heads, query length, key length). Softmax models run with "eager", the only one of
    Transformers' implementations that forms the weights; models with a scoring of this package with that.

    Raises:
        ValueError: if the model has no attention modules or is an encoder-decoder, and, when it runs, if an
            attention module does not return its weights.
    """
    if model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} is an encoder-decoder: give its encoder, model.get_encoder().")
    names = {module: name for name, module in model.named_modules()}
    modules = [module for module, _ in attention_modules(model, model.config)]
    if not modules:
        raise ValueError(f"{type(model).__name__} has no attention module.")

    def reduce(module: nn.Module, arguments: Any, output: Any) -> Any:
        if not (
            isinstance(output, tuple) and len(output) > 1 and isinstance(output[1], Tensor) and output[1].ndim == 4
        ):
            raise ValueError(f"{type(module).__name__} ({names[module]}) does not return its attention weights.")
        observe(names[module], output[1])
        return (output[0], None, *output[2:])  # no one keeps the map

    implementation, training = model.config._attn_implementation, model.training
    ours = {module: scoring_parameters(module) is not None for module in modules}
    softmax = not any(ours.values())
    hooks = []
    try:
        model.eval()
        if softmax:
            model.set_attn_implementation("eager")
        for module in modules:
            if ours[module] or "output_attentions" in inspect.signature(module.forward).parameters:
                hooks.append(module.register_forward_pre_hook(_ask_for_weights, with_kwargs=True))
            hooks.append(module.register_forward_hook(reduce))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        if softmax:
            model.set_attn_implementation(implementation)
        model.train(training)


def _ask_for_weights(module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return arguments, {**keywords, "output_attentions": True}


class _Sums:
    """Running sums of the statistics of each attention module."""

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        self.sums: dict[str, dict[str, Tensor]] = {}

    def add(self, layer: str, weights: Tensor) -> None:
        """Reduce the weights (batch, heads, query length, key length) of one layer and batch."""
        weights = weights.float()
        batch, _, query_length, key_length = weights.shape
        real = torch.ones(batch, key_length, dtype=torch.bool, device=weights.device)
        if self.mask is not None:
            real = self.mask.bool()
        first = real.int().argmax(-1)  # of the real tokens, with left padding too
        queries = real[:, -query_length:]
        positions = torch.arange(key_length - query_length, key_length, device=weights.device)
        later = queries & (positions > first[:, None])
        entropy = torch.special.entr(weights).sum(-1)  # (batch, heads, query length)
        largest = weights.amax(-1)
        on_first = weights.gather(-1, first[:, None, None, None].expand(*weights.shape[:-1], 1))[..., 0]
        values = {
            "entropy": (entropy, queries),
            "largest_weight": (largest, queries),
            "context_mass": (1 - largest, queries),
            "effective_tokens": (entropy.exp(), queries),
            "sink_rate": ((on_first > SINK_THRESHOLD).float(), later),
        }
        sums = self.sums.setdefault(layer, {})
        for name, (value, counted) in values.items():
            # A padded query may hold anything.
            total = value.double().masked_fill(~counted[:, None], 0).sum((0, 2))
            # Its last entry counts the queries.
            total = torch.cat([total, counted.sum()[None]]).cpu()
            sums[name] = sums[name] + total if name in sums else total

    def statistics(self) -> AttentionStatistics:
        if not self.sums:
            raise ValueError("There were no batches to measure attention on.")
        means = {
            name: pad_sequence(
                [sums[name][:-1] / sums[name][-1] for sums in self.sums.values()], True, padding_value=torch.nan
            )
            for name in MEASURES
        }
        return AttentionStatistics(list(self.sums), **means)


def plot_attention_statistics(models: Mapping[str, AttentionStatistics], path: Path) -> None:
    """Draw heat maps, layer by head, into a PNG: a row for each model, a column for each statistic.

    Args:
        models: statistics by the name to show; a statistic has one colour scale for all of them.
        path: where to write.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(MEASURES), 2.8 * len(models)), layout="constrained")
    grid = figure.subplots(len(models), len(MEASURES), squeeze=False)
    for column, (measure, title) in enumerate(MEASURES.items()):
        maps = [getattr(statistics, measure) for statistics in models.values()]
        finite = torch.cat([values[values.isfinite()] for values in maps])
        low, high = finite.min().item(), finite.max().item()
        for row, (name, values) in enumerate(zip(models, maps, strict=True)):
            axes = grid[row][column]
            image = axes.imshow(values.numpy(), vmin=low, vmax=high, aspect="auto")
            axes.set(xlabel="head", ylabel=f"{name}: layer", title=title)
        figure.colorbar(image, ax=list(grid[:, column]))
    figure.savefig(path, dpi=120)
