"""The fused kernel for GPUs, in Triton: the operators of ssa_hf.kernels.op on CUDA, ROCm and XPU.

Under TRITON_INTERPRET=1 it runs on CPU tensors, in place of the C++ kernel: that is how it is tested without a GPU.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from ssa_hf.kernels import op
from ssa_hf.kernels.triton import backward, forward
from ssa_hf.kernels.triton.configurations import FEWEST_QUERIES, INTERPRETED, tuned

DEVICES = ("cuda", "xpu", "cpu") if INTERPRETED else ("cuda", "xpu")

_forward = tuned(forward.forward_kernel, "forward")
_query = tuned(backward.query_kernel, "query", reset_to_zero=["grad_b", "grad_n"])
_key = tuned(backward.key_kernel, "key")


def _attention(
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
    output = op.like_model_layout(query, value.shape[-1])
    normaliser = query.new_empty((*query.shape[:3], 2), dtype=torch.float32)
    if not output.numel():
        return output, normaliser
    batch, heads, query_length, _ = query.shape
    dims = _dims(query, value)
    splits = _splits(triton.cdiv(query_length, 64) * batch * heads, key.shape[2], query.device)
    target, target_normaliser = output[None], normaliser[None]
    if splits > 1:
        target = query.new_empty(splits, *output.shape, dtype=torch.float32)
        target_normaliser = query.new_empty(splits, *normaliser.shape, dtype=torch.float32)
    with _device_of(query):
        _forward[_blocks_of("BLOCK_QUERIES", query_length, batch * heads, splits)](
            query,
            key,
            value,
            _mask_data(mask, query),
            query if documents is None else documents,  # not read if None
            b.contiguous(),
            n.contiguous(),
            seed,
            target,
            target_normaliser,
            scale,
            dropout_p,
            window,
            *_lengths(query, key, value),
            *query.stride(),
            *key.stride(),
            *value.stride(),
            *_mask_strides(mask),
            *target.stride(),
            SPLITS=splits,
            **_options(mask, documents, is_causal, window, dropout_p, query),
            **dims,
        )
        if splits > 1:
            forward.combine_kernel[(query_length, batch * heads)](
                target,
                target_normaliser,
                output,
                normaliser,
                heads,
                query_length,
                value.shape[-1],
                *output.stride(),
                SPLITS=splits,
                BLOCK_VALUE_DIM=dims["BLOCK_VALUE_DIM"],
            )
    return output, normaliser


def _attention_backward(
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
    grad_query, grad_key, grad_value = (op.like_model_layout(tensor) for tensor in (query, key, value))
    if not output.numel() or not key.numel():
        return grad_query.zero_(), grad_key.zero_(), grad_value.zero_(), torch.zeros_like(b), torch.zeros_like(n)
    batch, heads, query_length, _ = query.shape
    dims = _dims(query, value)
    delta = torch.empty_like(normaliser[..., 0])
    # A block of queries writes one share; with large blocks, most stay 0.
    most_blocks = triton.cdiv(query_length, FEWEST_QUERIES)
    shares = query.new_zeros(2, batch, heads, most_blocks, dtype=torch.float32)
    ids = query if documents is None else documents  # not read if None
    inputs = (query, key, value, _mask_data(mask, query), ids, b.contiguous(), n.contiguous(), seed, normaliser)
    numbers = (scale, dropout_p, window, *_lengths(query, key, value))
    strides = (*query.stride(), *key.stride(), *value.stride(), *_mask_strides(mask), *grad_output.stride())
    options = _options(mask, documents, is_causal, window, dropout_p, query)
    with _device_of(query):
        backward.delta_kernel[(triton.cdiv(query_length, 64), batch * heads)](
            output,
            grad_output,
            delta,
            heads,
            query_length,
            value.shape[-1],
            *output.stride(),
            *grad_output.stride(),
            BLOCK_QUERIES=64,
            BLOCK_VALUE_DIM=dims["BLOCK_VALUE_DIM"],
        )
        _query[_blocks_of("BLOCK_QUERIES", query_length, batch * heads)](
            *inputs,
            grad_output,
            delta,
            grad_query,
            *shares,
            most_blocks,
            *numbers,
            *strides,
            *grad_query.stride(),
            **options,
            **dims,
        )
        _key[_blocks_of("BLOCK_KEYS", key.shape[2], batch * key.shape[1])](
            *inputs,
            grad_output,
            delta,
            grad_key,
            grad_value,
            *numbers,
            *strides,
            *grad_key.stride(),
            *grad_value.stride(),
            **options,
            **dims,
        )
    grad_b, grad_n = shares.sum(dim=(1, 3))
    return grad_query, grad_key, grad_value, grad_b, grad_n.clone()


for _device in DEVICES:
    op.attention.register_kernel(_device)(_attention)
    op.attention_backward.register_kernel(_device)(_attention_backward)


def _blocks_of(size: str, length: int, *others: int) -> Callable[[dict[str, Any]], tuple[int, ...]]:
    """Return the grid: as many blocks of the size that the tuner chooses as cover the length, times the others."""
    return lambda meta: (triton.cdiv(length, meta[size]), *others)


def _dims(query: Tensor, value: Tensor) -> dict[str, int]:
    dim, value_dim = (max(16, triton.next_power_of_2(tensor.shape[-1])) for tensor in (query, value))
    return {"BLOCK_DIM": dim, "BLOCK_VALUE_DIM": value_dim}


def _splits(programs: int, key_length: int, device: torch.device) -> int:
    """In how many parts to cut the keys, so that a few queries on a long cache occupy the whole device."""
    on_cuda = device.type == "cuda"
    processors = torch.cuda.get_device_properties(device).multi_processor_count if on_cuda else 8
    splits = min(processors // max(1, programs), key_length // 256, 32)
    return 1 << max(0, splits.bit_length() - 1)


def _lengths(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    heads, query_length, head_dim = query.shape[1:]
    return heads, heads // key.shape[1], query_length, key.shape[2], head_dim, value.shape[-1]


def _mask_data(mask: Tensor | None, query: Tensor) -> Tensor:
    if mask is None:
        return query  # never read
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def _mask_strides(mask: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if mask is None else op.broadcast_strides(mask)


def _options(
    mask: Tensor | None, documents: Tensor | None, is_causal: bool, window: int, dropout_p: float, query: Tensor
) -> dict[str, bool | int | str]:
    return {
        "CAUSAL": is_causal,
        "WINDOW": window > 0,
        "MASK": 0 if mask is None else 1 if mask.dtype == torch.bool else 2,
        "DOCUMENTS": documents is not None,
        "DROPOUT": dropout_p > 0,
        "FAST": torch.version.cuda is not None and query.dtype != torch.float32 and not INTERPRETED,
        # float32 means float32, as in the other backends: TF32 keeps 10 bits of a score. The interpreter knows no
        # products of bfloat16.
        "PRECISION": "ieee" if query.dtype == torch.float32 or INTERPRETED else "tf32",
    }


def _device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    # Triton launches on the current device, which need not be the tensors'.
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
