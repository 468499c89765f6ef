"""Attention in plain PyTorch: for SSA the definition of right, and the backend that returns weights.

Memory is O(query_length · key_length). Every other SSA backend is tested against this one; the other scorings have
no other.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ssa_hf.scoring import ssa_logits

Weigh = Callable[[Tensor, Tensor | None], Tensor]


def attention(
    query: Tensor, key: Tensor, value: Tensor, b: Tensor, n: Tensor, **arguments: Any
) -> tuple[Tensor, Tensor]:
    """Attend with SSA weights: :func:`scored_attention` with b and n, slope and exponent, each (query_heads,)."""

    def weigh(scores: Tensor, allowed: Tensor | None) -> Tensor:
        dtype = scores.dtype
        return masked_softmax(ssa_logits(scores, b.to(dtype).view(-1, 1, 1), n.to(dtype).view(-1, 1, 1)), allowed)

    return scored_attention(query, key, value, weigh, **arguments)


def scored_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weigh: Weigh,
    *,
    bias: Tensor | None,
    allowed: Tensor | None,
    is_causal: bool,
    window: int | None,
    documents: tuple[Tensor, Tensor] | None,
    scale: float,
    dropout_p: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend with weights that a function makes of the scores.

    Args:
        query: (batch, query_heads, query_length, head_dim).
        key: (batch, key_heads, key_length, head_dim); key_heads divides query_heads.
        value: (batch, key_heads, key_length, value_dim).
        weigh: called with the scores (batch, query_heads, query_length, key_length) in the accumulation dtype, and
            with where attention is allowed, broadcastable likewise, or None for everywhere. Returns the weights.
        bias: added to the scaled scores, broadcastable to (batch, query_heads, query_length, key_length).
        allowed: True where a query may attend to a key, broadcastable likewise.
        is_causal: hide later keys, aligned bottom-right: the last query sees every key.
        window: with ``is_causal``, keys that a query sees at most, itself included.
        documents: ids of each query's and of each key's document, (batch, query_length) and (batch, key_length);
            a query sees the keys of its own document only.
        scale: factor on query·key.
        dropout_p: chance of dropping a normalised weight.
        softcap: bound of the scaled scores, softcap·tanh(score / softcap), before ``bias``.

    Returns:
        The output (batch, query_heads, query_length, value_dim) in value's dtype, and the weights before dropout
        (batch, query_heads, query_length, key_length) in the accumulation dtype: float32, or float64 for float64
        inputs. Where attention is not allowed, weights and their gradients are exactly 0.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    # Autocast would run the two products in half precision again.
    with torch.autocast(query.device.type, enabled=False):
        scores = _grouped_matmul(query.to(dtype) * scale, key.to(dtype).transpose(-2, -1))
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        if bias is not None:
            scores = scores + bias.to(dtype)
        if documents is not None:
            same = (documents[0][:, :, None] == documents[1][:, None, :])[:, None]
            allowed = same if allowed is None else allowed & same
        if is_causal:
            causal = causal_mask(query.shape[-2], key.shape[-2], window, query.device)
            allowed = causal if allowed is None else allowed & causal
        weights = weigh(scores, allowed)
        if allowed is not None:
            # Exactly 0, and with them their gradients; a fully masked row is 0 altogether.
            weights = weights.masked_fill(~allowed, 0)
        dropped = torch.nn.functional.dropout(weights, dropout_p) if dropout_p > 0 else weights
        output = _grouped_matmul(dropped, value.to(dtype))
    return output.to(value.dtype), weights


def masked_softmax(logits: Tensor, allowed: Tensor | None) -> Tensor:
    """Return the softmax over the keys that are allowed; in a row with none, something finite."""
    if allowed is not None:
        # A finite fill keeps fully masked rows free of NaN.
        logits = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)
    return logits.softmax(dim=-1)


def causal_mask(query_length: int, key_length: int, window: int | None, device: torch.device) -> Tensor:
    """Return the bottom-right aligned causal mask, (query_length, key_length), True = attend."""
    last = key_length - query_length
    allowed = torch.ones(query_length, key_length, dtype=torch.bool, device=device).tril(last)
    return allowed if window is None else allowed.triu(last + 1 - window)


def _grouped_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Multiply per head where ``right`` has fewer heads (GQA, MQA), without repeating them."""
    batch, heads, rows, inner = left.shape
    groups, columns = right.shape[1], right.shape[-1]
    product = left.reshape(batch, groups, heads // groups * rows, inner) @ right
    return product.reshape(batch, heads, rows, columns)
