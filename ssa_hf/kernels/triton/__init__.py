"""The fused kernel for GPUs, in Triton: the operators of ssa_hf.kernels.op on CUDA, ROCm and XPU.

Under TRITON_INTERPRET=1 it runs on CPU tensors, in place of the C++ kernel: that is how it is tested without a GPU.
"""

import contextlib
import os

import torch
import triton
from torch import Tensor

from ssa_hf.kernels import op
from ssa_hf.kernels.triton import backward, forward

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = ("cuda", "xpu", "cpu") if INTERPRETED else ("cuda", "xpu")


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
    sizes = _sizes("forward", query, value)
    blocks = triton.cdiv(query_length, sizes["BLOCK_QUERIES"])
    splits = _splits(blocks * batch * heads, key.shape[2], query.device)
    target, target_normaliser = output[None], normaliser[None]
    if splits > 1:
        target = query.new_empty(splits, *output.shape, dtype=torch.float32)
        target_normaliser = query.new_empty(splits, *normaliser.shape, dtype=torch.float32)
    with _device_of(query):
        forward.forward_kernel[(blocks, batch * heads, splits)](
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
            **sizes,
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
                BLOCK_VALUE_DIM=sizes["BLOCK_VALUE_DIM"],
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
    query_sizes, key_sizes = (_sizes(kernel, query, value) for kernel in ("query", "key"))
    query_blocks = triton.cdiv(query_length, query_sizes["BLOCK_QUERIES"])
    key_blocks = triton.cdiv(key.shape[2], key_sizes["BLOCK_KEYS"])
    delta = torch.empty_like(normaliser[..., 0])
    shares = query.new_empty(2, batch, heads, query_blocks, dtype=torch.float32)
    ids = query if documents is None else documents  # not read if None
    inputs = (query, key, value, _mask_data(mask, query), ids, b.contiguous(), n.contiguous(), seed, normaliser)
    numbers = (scale, dropout_p, window, *_lengths(query, key, value))
    strides = (*query.stride(), *key.stride(), *value.stride(), *_mask_strides(mask), *grad_output.stride())
    options = _options(mask, documents, is_causal, window, dropout_p, query)
    with _device_of(query):
        backward.delta_kernel[(query_blocks, batch * heads)](
            output,
            grad_output,
            delta,
            heads,
            query_length,
            value.shape[-1],
            *output.stride(),
            *grad_output.stride(),
            BLOCK_QUERIES=query_sizes["BLOCK_QUERIES"],
            BLOCK_VALUE_DIM=query_sizes["BLOCK_VALUE_DIM"],
        )
        backward.query_kernel[(query_blocks, batch * heads)](
            *inputs,
            grad_output,
            delta,
            grad_query,
            *shares,
            *numbers,
            *strides,
            *grad_query.stride(),
            **options,
            **query_sizes,
        )
        backward.key_kernel[(key_blocks, batch * key.shape[1])](
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
            **key_sizes,
        )
    grad_b, grad_n = shares.sum(dim=(1, 3))
    return grad_query, grad_key, grad_value, grad_b, grad_n.clone()


for _device in DEVICES:
    op.attention.register_kernel(_device)(_attention)
    op.attention_backward.register_kernel(_device)(_attention_backward)


# (queries, keys, warps) of a block, for half precision and head dimensions up to 128: the largest that ptxas fits into
# registers for sm_90 with little or no spilling.
_BLOCKS = {"forward": (128, 64, 8), "query": (64, 32, 4), "key": (32, 64, 4)}
_SMALL_BLOCKS = (32, 32, 4)
_INTERPRETED_BLOCKS = (16, 32, 4)


def _sizes(kernel: str, query: Tensor, value: Tensor) -> dict[str, int]:
    dim, value_dim = (max(16, triton.next_power_of_2(tensor.shape[-1])) for tensor in (query, value))
    queries, keys, warps = _BLOCKS[kernel]
    if INTERPRETED:
        queries, keys, warps = _INTERPRETED_BLOCKS
    elif query.dtype == torch.float32 or max(dim, value_dim) > 128:
        queries, keys, warps = _SMALL_BLOCKS
    return {
        "BLOCK_QUERIES": queries,
        "BLOCK_KEYS": keys,
        "BLOCK_DIM": dim,
        "BLOCK_VALUE_DIM": value_dim,
        "num_warps": warps,
    }


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
