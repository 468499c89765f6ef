"""What "ssa" names in Transformers: its attention function and its mask function."""

from typing import Any

from torch import Tensor, nn
from transformers.masking_utils import sdpa_mask
from transformers.utils import output_capturing

from ssa_hf.functional import attend

_UNSUPPORTED = {
    "s_aux": "attention sinks",
    "position_bias": "a relative position bias",
    "softcap": "score softcapping",
}


def ssa_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention function registered as "ssa" in ``AttentionInterface``.

    Args:
        module: attention module with an ``ssa_norm``.
        query: (batch, query_heads, query_length, head_dim).
        key: (batch, key_heads, key_length, head_dim).
        value: (batch, key_heads, key_length, value_dim).
        attention_mask: 4-D mask, boolean or float. None means no padding: then ``is_causal``, else
            ``module.is_causal``, decides about causality, and ``sliding_window`` applies.
        scaling: factor on query·key, 1/sqrt(head_dim) by default.
        dropout: dropout on the weights.
        is_causal: overrides ``module.is_causal``.
        sliding_window: keys a query sees, itself included.
        kwargs: further arguments of the model; those that change the scores are refused.

    Returns:
        The output (batch, query_length, query_heads, value_dim) and, if attentions are being recorded,
        the weights (batch, query_heads, query_length, key_length) in query's dtype, else None.

    Raises:
        ValueError: if the module has no ``ssa_norm``, or for a feature that SSA does not implement.
    """
    ssa_norm = getattr(module, "ssa_norm", None)
    if ssa_norm is None:
        raise ValueError(
            f"{type(module).__name__} has no SSA parameters. Choose SSA when the model is built "
            '(attn_implementation="ssa") or with model.set_attn_implementation("ssa"), not by writing to the '
            "config; a class that SSA does not know needs ssa_hf.register_family(...) first."
        )
    _refuse_unsupported(kwargs)
    if attention_mask is not None and attention_mask.dim() != 4:
        raise ValueError(
            f"SSA takes a 4-D attention mask here, got shape {tuple(attention_mask.shape)}: "
            "the model's mask function was bypassed."
        )
    causal = False
    if attention_mask is None:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    b, n = ssa_norm()
    output, weights = attend(
        query,
        key,
        value,
        b,
        n,
        attn_mask=attention_mask,
        is_causal=causal,
        sliding_window=sliding_window if causal else None,
        scale=scaling,
        dropout_p=dropout,
        return_weights=_attentions_wanted(kwargs),
    )
    return output.transpose(1, 2).contiguous(), None if weights is None else weights.to(query.dtype)


def ssa_mask(*, q_length: int, kv_length: int, allow_is_causal_skip: bool = True, **kwargs: Any) -> Tensor | None:
    """Mask function registered as "ssa" in ``AttentionMaskInterface``: SDPA's boolean masks.

    SDPA also skips the mask when a static cache is filled for the first time, counting on its top-left
    alignment of ``is_causal``. Ours is bottom-right, so that mask is kept.
    """
    skip = allow_is_causal_skip and (q_length == 1 or q_length == kv_length)
    return sdpa_mask(q_length=q_length, kv_length=kv_length, allow_is_causal_skip=skip, **kwargs)


def _refuse_unsupported(kwargs: dict[str, Any]) -> None:
    for argument, feature in _UNSUPPORTED.items():
        if kwargs.get(argument) is not None:
            raise ValueError(f'SSA does not implement {feature} (`{argument}`): use attn_implementation="eager".')


def _attentions_wanted(kwargs: dict[str, Any]) -> bool:
    # Not every model hands output_attentions down to its attention (Nemotron does not), but all
    # record through the collector of the running forward.
    collector = output_capturing._active_collector.get() or {}
    return bool(kwargs.get("output_attentions")) or any("attentions" in name for name in collector)
