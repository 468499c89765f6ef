"""What a scoring's name stands for in Transformers: its attention function."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import output_capturing

from ssa_hf.kernels.reference import causal_mask
from ssa_hf.scorings import Scoring


def attention_forward(
    scoring: type[Scoring],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention function registered for each scoring in ``AttentionInterface``.

    Args:
        scoring: which one.
        module: attention module with the scoring's parameters.
        query: (batch, query_heads, query_length, head_dim).
        key: (batch, key_heads, key_length, head_dim).
        value: (batch, key_heads, key_length, value_dim).
        attention_mask: what the scoring's mask function made. None means no padding; then, and with a 2-D mask,
            which tells of padding alone, ``is_causal``, else ``module.is_causal``, decides about causality, and
            ``sliding_window`` applies.
        scaling: factor on query·key, 1/sqrt(head_dim) by default.
        dropout: dropout on the weights.
        is_causal: overrides ``module.is_causal``.
        sliding_window: keys a query sees, itself included.
        softcap: bound of the scaled scores (Gemma 2).
        position_bias: added to the scores, broadcastable to (batch, query_heads, query_length, key_length) (T5).
        s_aux: attention sinks, which are refused.
        kwargs: further arguments of the model.

    Returns:
        The output (batch, query_length, query_heads, value_dim) and, if attentions are being recorded,
        the weights (batch, query_heads, query_length, key_length) in query's dtype, else None.

    Raises:
        ValueError: if the module has no parameters of the scoring, or for a feature that it does not implement.
    """
    parameters = getattr(module, scoring.attribute(), None)
    if parameters is None:
        raise ValueError(
            f"{type(module).__name__} has no {scoring.name} parameters. Choose the attention when the model is built "
            f'(attn_implementation="{scoring.name}") or with model.set_attn_implementation("{scoring.name}"), not by '
            "writing to the config; a class that ssa_hf does not know needs ssa_hf.register_family(...) first."
        )
    if s_aux is not None:
        raise ValueError(f'"{scoring.name}" does not implement attention sinks (`s_aux`): use "eager" attention.')
    if attention_mask is not None and attention_mask.dim() != scoring.mask_dim:
        raise ValueError(
            f'"{scoring.name}" takes a {scoring.mask_dim}-D attention mask here, got shape '
            f"{tuple(attention_mask.shape)}: the model's mask function was bypassed."
        )
    causal = False
    if attention_mask is None or scoring.mask_dim == 2:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if position_bias is not None:
        attention_mask, causal = _with_bias(scoring, position_bias, attention_mask, causal, query, key), False
    output, weights = parameters.config.attend(
        parameters,
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=causal,
        sliding_window=sliding_window if causal else None,
        scale=scaling,
        dropout_p=dropout,
        softcap=softcap,
        return_weights=_attentions_wanted(kwargs),
    )
    return output.transpose(1, 2).contiguous(), None if weights is None else weights.to(query.dtype)


def _with_bias(
    scoring: type[Scoring], bias: Tensor, mask: Tensor | None, causal: bool, query: Tensor, key: Tensor
) -> Tensor:
    """Put the mask into an additive bias."""
    if scoring.mask_dim != 4:
        raise ValueError(f'"{scoring.name}" has no scores that a position bias could be added to.')
    if mask is None and causal:
        mask = causal_mask(query.shape[-2], key.shape[-2], None, query.device)
    if mask is None:
        return bias
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask


def _attentions_wanted(kwargs: dict[str, Any]) -> bool:
    # Not every model hands output_attentions down to its attention (Nemotron does not), but all
    # record through the collector of the running forward.
    collector = output_capturing._active_collector.get() or {}
    return bool(kwargs.get("output_attentions")) or any("attentions" in name for name in collector)
