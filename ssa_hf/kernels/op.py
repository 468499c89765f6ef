"""The fused attention as PyTorch operators, ssa_hf::attention and its backward: one contract for all devices.

Each device's module registers its kernels here. torch.compile, torch.export and activation checkpointing see two
opaque operators with known shapes and an autograd rule.
"""

from typing import Any

import torch
from torch import Tensor

MAX_HEAD_DIM = 256


@torch.library.custom_op("ssa_hf::attention", mutates_args=(), device_types=())
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    b: Tensor,
    n: Tensor,
    mask: Tensor | None,
    documents: Tensor | None,
    seed: Tensor,
    is_causal: bool,
    window: int,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """Attend with SSA weights.

    Args:
        query: (batch, query_heads, query_length, head_dim), float32, bfloat16 or float16.
        key: (batch, key_heads, key_length, head_dim), same dtype.
        value: (batch, key_heads, key_length, value_dim), same dtype.
        b: (query_heads,), float32.
        n: (query_heads,), float32.
        mask: 4-D with sizes 1 where it is broadcast; boolean (True = attend), or float32: added to the scores,
            -inf masks. It gets no gradient.
        documents: (batch, length), int32: the document of each position; a query sees the keys of its own document
            only. query_length must equal key_length.
        seed: int64 scalar on the device, the seed of dropout.
        is_causal: hide later keys, aligned bottom-right.
        window: keys that a query sees at most, itself included, counted backwards from it; 0 is no limit.
        scale: factor on query·key.
        dropout_p: chance of dropping a normalised weight.

    Returns:
        The output (batch, query_heads, query_length, value_dim), stored as (batch, query_length, query_heads,
        value_dim), and each query's normaliser (batch, query_heads, query_length, 2), float32: a normalised weight is
        2^(g·log2(e) - [0]) · [1], and [1] is 0 where the query sees nothing.
    """
    raise NotImplementedError(f"SSA has no fused kernel for {query.device.type}.")


@torch.library.custom_op("ssa_hf::attention_backward", mutates_args=(), device_types=())
def attention_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    b: Tensor,
    n: Tensor,
    mask: Tensor | None,
    documents: Tensor | None,
    seed: Tensor,
    output: Tensor,
    normaliser: Tensor,
    is_causal: bool,
    window: int,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value, b and n; arguments as in :func:`attention`."""
    raise NotImplementedError(f"SSA has no fused kernel for {query.device.type}.")


def like_model_layout(tensor: Tensor, last: int | None = None) -> Tensor:
    """Return an empty (batch, heads, length, dim) tensor stored as models want it: (batch, length, heads, dim)."""
    batch, heads, length, dim = tensor.shape
    return tensor.new_empty(batch, length, heads, dim if last is None else last).transpose(1, 2)


def broadcast_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor, 0 where its size is 1 and it is to be broadcast."""
    return tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return like_model_layout(query, value.shape[-1]), query.new_empty((*query.shape[:3], 2), dtype=torch.float32)


@attention_backward.register_fake
def _(
    grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, b: Tensor, n: Tensor, *_: object
) -> tuple[Tensor, ...]:
    return (*(like_model_layout(tensor) for tensor in (query, key, value)), torch.empty_like(b), torch.empty_like(n))


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.options = inputs[:8], inputs[8:]
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_output: Tensor | None, _grad_normaliser: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_output is None:
        return (None,) * 12
    gradients = attention_backward(grad_output, *ctx.saved_tensors, *ctx.options)
    return (*gradients, *(None,) * 7)


attention.register_autograd(_backward, setup_context=_setup_context)
