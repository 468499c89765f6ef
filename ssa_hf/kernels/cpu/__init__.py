"""The fused kernel for the CPU: C++ that is compiled at its first use.

attention.cpp names the entry points; forward.h and backward.h are the two passes, blocks.h cuts queries and keys
into blocks, gemm.h multiplies small matrices in registers, vector.h has the SIMD register with log2 and exp2.
"""

import ctypes
import math

import torch
from torch import Tensor

from ssa_hf.kernels import op
from ssa_hf.kernels.cpu.library import KernelUnavailable, build, load

__all__ = ["KernelUnavailable", "build", "load"]

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Tensor4(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64 * 4))


class _Problem(ctypes.Structure):
    """Mirrors ssa::Problem in problem.h."""

    __slots__ = ()  # a misspelt field is an error
    _fields_ = (
        *((name, ctypes.c_int64) for name in ["batch", "heads", "groups", "q_len", "k_len", "dim", "value_dim"]),
        *((name, ctypes.c_int64) for name in ["dtype", "causal", "window", "splits", "seed"]),
        *((name, ctypes.c_double) for name in ["scale", "dropout"]),
        *((name, _Tensor4) for name in ["query", "key", "value", "mask", "output"]),
        *((name, _Tensor4) for name in ["grad_output", "grad_query", "grad_key", "grad_value"]),
        ("mask_kind", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ["b", "n", "documents", "normaliser", "grad_b", "grad_n"]),
    )


@op.attention.register_kernel("cpu")
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
    library = load()
    output = op.like_model_layout(query, value.shape[-1])
    normaliser = query.new_empty((*query.shape[:3], 2), dtype=torch.float32)
    b, n = b.contiguous(), n.contiguous()
    problem = _problem(
        query, key, value, b, n, mask, documents, seed, is_causal, window, scale, dropout_p, output, normaliser
    )
    if output.numel():
        library.ssa_forward(ctypes.byref(problem))
    return output, normaliser


@op.attention_backward.register_kernel("cpu")
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
    library = load()
    b, n = b.contiguous(), n.contiguous()
    problem = _problem(
        query, key, value, b, n, mask, documents, seed, is_causal, window, scale, dropout_p, output, normaliser
    )
    gradients = [op.like_model_layout(tensor) for tensor in (query, key, value)]
    problem.grad_output = _tensor4(grad_output)
    problem.grad_query, problem.grad_key, problem.grad_value = (_tensor4(gradient) for gradient in gradients)
    sums = torch.zeros(2, query.shape[0], problem.splits, query.shape[1], dtype=torch.float64)
    problem.grad_b, problem.grad_n = sums[0].data_ptr(), sums[1].data_ptr()
    if output.numel():
        library.ssa_backward(ctypes.byref(problem))
    else:
        gradients = [gradient.zero_() for gradient in gradients]
    grad_b, grad_n = sums.sum(dim=(1, 2)).to(torch.float32)
    return (*gradients, grad_b, grad_n.clone())


def _problem(
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
    output: Tensor,
    normaliser: Tensor,
) -> _Problem:
    problem = _Problem()
    problem.batch, problem.heads, problem.q_len, problem.dim = query.shape
    problem.groups, problem.k_len, problem.value_dim = value.shape[1:]
    problem.dtype = _DTYPES[query.dtype]
    problem.causal, problem.window = is_causal, window
    problem.scale, problem.dropout, problem.seed = scale, dropout_p, int(seed)
    problem.splits = _splits(problem.batch * problem.groups, problem.q_len)
    problem.query, problem.key, problem.value = _tensor4(query), _tensor4(key), _tensor4(value)
    problem.output, problem.normaliser = _tensor4(output), normaliser.data_ptr()
    problem.b, problem.n = b.data_ptr(), n.data_ptr()
    if documents is not None:
        problem.documents = documents.data_ptr()
    if mask is not None:
        problem.mask, problem.mask_kind = _tensor4(mask), 1 if mask.dtype == torch.bool else 2
    return problem


def _tensor4(tensor: Tensor) -> _Tensor4:
    return _Tensor4(tensor.data_ptr(), (ctypes.c_int64 * 4)(*op.broadcast_strides(tensor)))


def _splits(heads: int, query_length: int) -> int:
    """In how many parts to cut the queries of each key/value head, so that threads get equal work."""
    threads = torch.get_num_threads()
    if heads >= 4 * threads or query_length <= 1:
        return 1
    return threads // math.gcd(heads, threads)
