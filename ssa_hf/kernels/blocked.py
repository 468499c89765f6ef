"""SSA attention in plain PyTorch, block by block of queries: memory O(length), for where no fused kernel runs."""

import functools

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ssa_hf.kernels import reference

# Scores held at a time, over all heads and the batch: 64 MiB in float32.
_SCORES = 2**24


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    b: Tensor,
    n: Tensor,
    *,
    bias: Tensor | None,
    allowed: Tensor | None,
    is_causal: bool,
    window: int | None,
    documents: tuple[Tensor, Tensor] | None,
    scale: float,
    dropout_p: float,
    softcap: float | None = None,
) -> Tensor:
    """Attend with SSA weights; arguments as in :func:`ssa_hf.kernels.reference.scored_attention`.

    Each block of queries is the reference on the keys that causality and window leave it, recomputed in the
    backward pass.
    """
    batch, heads, query_length, _ = query.shape
    key_length = key.shape[2]
    size = max(1, _SCORES // max(1, batch * heads * key_length))
    attend = functools.partial(
        reference.attention, is_causal=is_causal, window=window, scale=scale, dropout_p=dropout_p, softcap=softcap
    )
    if size >= query_length:
        return attend(query, key, value, b, n, bias=bias, allowed=allowed, documents=documents)[0]

    def rows_of(mask: Tensor | None, start: int, stop: int, first: int, last: int) -> Tensor | None:
        if mask is None:
            return None
        mask = mask if mask.dim() < 2 or mask.shape[-2] == 1 else mask[..., start:stop, :]
        return mask if mask.shape[-1] == 1 else mask[..., first:last]

    def block(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        b: Tensor,
        n: Tensor,
        bias: Tensor | None,
        allowed: Tensor | None,
        ids: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        # Without the weights: what a checkpoint returns stays in memory.
        return attend(query, key, value, b, n, bias=bias, allowed=allowed, documents=ids)[0]

    outputs = []
    for start in range(0, query_length, size):
        stop = min(start + size, query_length)
        offset = key_length - query_length
        last = min(max(stop + offset, 0), key_length) if is_causal else key_length
        first = min(max(start + offset + 1 - window, 0), last) if window is not None else 0
        ids = None if documents is None else (documents[0][:, start:stop], documents[1][:, first:last])
        masks = (rows_of(mask, start, stop, first, last) for mask in (bias, allowed))
        inputs = (query[:, :, start:stop], key[:, :, first:last], value[:, :, first:last], b, n, *masks, ids)
        outputs.append(checkpoint(block, *inputs, use_reentrant=False))
    return torch.cat(outputs, dim=2)
