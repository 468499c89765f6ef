"""ssa_attention: scaled_dot_product_attention with SSA in the place of softmax."""

import functools
import logging
import os

import torch
from torch import Tensor

from ssa_hf.kernels import blocked, cpu, op, reference

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "cpu", "triton", "blocked", "reference")


def ssa_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    b: Tensor | float,
    n: Tensor | float,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    sliding_window: int | None = None,
    document_ids: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    softcap: float | None = None,
    enable_gqa: bool = True,
    backend: str = "auto",
) -> Tensor:
    """Attend with Scaled Signed Averaging weights, w(x) = (1 + b|x|)^(sgn(x)·n) normalised over the keys.

    Arguments follow :func:`torch.nn.functional.scaled_dot_product_attention`, with three differences:
    a query that may attend to nothing gives output and gradients 0, ``is_causal`` is aligned bottom-right
    (the last query sees every key), and it may be combined with ``attn_mask``.

    Args:
        query: (batch, query_heads, query_length, head_dim), floating point.
        key: (batch, key_heads, key_length, head_dim).
        value: (batch, key_heads, key_length, value_dim).
        b: slope, > 0: a float, or a tensor with one value or (query_heads,) values.
        n: exponent, >= 1, likewise.
        attn_mask: broadcastable to (batch, query_heads, query_length, key_length). Boolean: True = attend.
            Floating point: added to the scores before the transform, but -inf and the dtype's minimum mask.
        is_causal: let no query see a later key.
        sliding_window: with ``is_causal``, keys that a query sees at most, itself included.
        document_ids: (batch, length), integers: where sequences pack several documents, the document of each
            position. A query sees the keys of its own document only; needs query_length = key_length.
        scale: factor on query·key, 1/sqrt(head_dim) by default.
        dropout_p: chance of dropping a normalised weight (applied whenever above 0, as in PyTorch).
        softcap: bound of the scaled scores, softcap·tanh(score / softcap) before any mask, as Gemma 2 has it. The fused
            kernels do without.
        enable_gqa: allow key_heads < query_heads.
        backend: "auto", or one by name: "cpu" (fused, C++), "triton" (fused, on GPUs), "blocked" (plain PyTorch in
            memory O(length)) or "reference" (plain PyTorch, the definition). "auto" takes the fused kernel of the
            device where it can, else "blocked", and logs why once.

    Returns:
        (batch, query_heads, query_length, value_dim) in value's dtype, accumulated in float32 (float64 for
        float64 inputs, which only "blocked" and "reference" take).

    Raises:
        ValueError: for shapes, dtypes or options that do not fit together, or that the named backend can't do.
    """
    output, _ = attend(
        query,
        key,
        value,
        b,
        n,
        attn_mask=attn_mask,
        is_causal=is_causal,
        sliding_window=sliding_window,
        document_ids=document_ids,
        scale=scale,
        dropout_p=dropout_p,
        softcap=softcap,
        enable_gqa=enable_gqa,
        backend=backend,
    )
    return output


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    b: Tensor | float,
    n: Tensor | float,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    sliding_window: int | None = None,
    document_ids: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    softcap: float | None = None,
    enable_gqa: bool = True,
    backend: str = "auto",
    return_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Do what :func:`ssa_attention` does and, if asked, return the weights before dropout as well.

    Weights have the shape (batch, query_heads, query_length, key_length); only the reference backend
    forms them, and "auto" chooses it then.
    """
    _check_arguments(query, key, value, enable_gqa, is_causal, sliding_window, dropout_p)
    b, n = _per_head(b, "b", query), _per_head(n, "n", query)
    bias, allowed = _split_mask(attn_mask, query, key)
    _check_documents(document_ids, query, key)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    backend = _choose_backend(backend, query, key, value, bias, softcap, return_weights)
    if backend in ("cpu", "triton"):
        mask = _fused_mask(bias, allowed)
        return _fused(query, key, value, b, n, mask, document_ids, is_causal, sliding_window, scale, dropout_p), None
    arguments = dict(
        bias=bias,
        allowed=allowed,
        is_causal=is_causal,
        window=sliding_window,
        documents=None if document_ids is None else (document_ids, document_ids),
        scale=scale,
        dropout_p=dropout_p,
        softcap=softcap,
    )
    if backend == "blocked":
        return blocked.attention(query, key, value, b, n, **arguments), None  # type: ignore[arg-type]
    output, weights = reference.attention(query, key, value, b, n, **arguments)
    return output, weights if return_weights else None


def attend_by_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weigh: reference.Weigh,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    sliding_window: int | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    softcap: float | None = None,
    return_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attend with weights that a function makes of the scores, in plain PyTorch and memory O(length²).

    Arguments and results are those of :func:`attend`; ``weigh`` is described in
    :func:`ssa_hf.kernels.reference.scored_attention`.
    """
    _check_arguments(query, key, value, True, is_causal, sliding_window, dropout_p)
    bias, allowed = _split_mask(attn_mask, query, key)
    output, weights = reference.scored_attention(
        query,
        key,
        value,
        weigh,
        bias=bias,
        allowed=allowed,
        is_causal=is_causal,
        window=sliding_window,
        documents=None,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        dropout_p=dropout_p,
        softcap=softcap,
    )
    return output, weights if return_weights else None


def _choose_backend(
    backend: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    return_weights: bool,
) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"Unknown backend {backend!r}; choose from {', '.join(BACKENDS)}.")
    if return_weights:
        if backend not in ("auto", "reference"):
            raise ValueError(f"Backend {backend!r} does not form weights; only 'reference' does.")
        return "reference"
    if backend in ("reference", "blocked"):
        return backend
    if backend == "auto" and _exporting_to_onnx():
        return "reference"  # of operators that ONNX has
    fused = backend if backend != "auto" else _fused_backend(query.device.type)
    reason = _why_not_fused(query, key, value, bias, softcap) or _why_no_kernel(fused, query.device.type)
    if reason is None:
        return fused
    if backend != "auto":
        raise ValueError(f"Backend {backend!r} can't run: {reason}")
    _log_fallback(reason)
    return "blocked"


def _why_not_fused(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, softcap: float | None) -> str | None:
    if torch.float64 in (query.dtype, key.dtype, value.dtype):
        return "the fused kernels compute in float32, not float64."
    if max(query.shape[-1], value.shape[-1]) > op.MAX_HEAD_DIM:
        return f"the fused kernels take head dimensions up to {op.MAX_HEAD_DIM}."
    if bias is not None and bias.requires_grad:
        return "the fused kernels have no gradient for attn_mask."
    if softcap is not None:
        return "the fused kernels have no softcap."
    return None


# These run while torch.compile traces, and leave nothing of themselves in the graph.
@torch.compiler.assume_constant_result
def _fused_backend(device: str) -> str:
    # Triton's interpreter, once asked for, stands in for the CPU kernel.
    return "cpu" if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1" else "triton"


@torch.compiler.assume_constant_result
def _why_no_kernel(backend: str, device: str) -> str | None:
    if backend == "triton":
        try:
            from ssa_hf.kernels import triton
        except ImportError as error:
            return f'Triton is not installed ({error}): pip install "ssa_hf[triton]".'
        return None if device in triton.DEVICES else f"the Triton kernel does not run on {device}."
    if device != "cpu" or _fused_backend(device) != "cpu":
        return f"the C++ kernel runs on CPUs, not on {device}{' under TRITON_INTERPRET=1' * (device == 'cpu')}."
    try:
        cpu.load()
    except cpu.KernelUnavailable as error:
        return str(error)
    return None


@torch.compiler.assume_constant_result
def _exporting_to_onnx() -> bool:
    return torch.onnx.is_in_onnx_export()


@torch.compiler.assume_constant_result
def _log_fallback(reason: str) -> None:
    _warn_once(reason)


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning("SSA attention falls back to blocked PyTorch, which is slower: %s", reason)


def _fused_mask(bias: Tensor | None, allowed: Tensor | None) -> Tensor | None:
    mask = allowed
    if bias is not None and allowed is not None:
        mask = bias.to(torch.float32).masked_fill(~allowed, float("-inf"))
    return mask if mask is None else mask[(None,) * (4 - mask.dim())]


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    b: Tensor,
    n: Tensor,
    mask: Tensor | None,
    documents: Tensor | None,
    is_causal: bool,
    window: int | None,
    scale: float,
    dropout_p: float,
) -> Tensor:
    dtype = value.dtype if query.dtype == key.dtype == value.dtype else torch.float32
    # The seed comes from PyTorch's generator: torch.manual_seed repeats it, and checkpointing restores it.
    if dropout_p > 0:
        seed = torch.randint(2**62, (), device=query.device)
    else:
        seed = torch.zeros((), dtype=torch.int64, device=query.device)
    output, _ = op.attention(
        query.to(dtype),
        key.to(dtype),
        value.to(dtype),
        b.to(torch.float32),
        n.to(torch.float32),
        mask,
        None if documents is None else documents.to(torch.int32).contiguous(),
        seed,
        is_causal,
        window or 0,
        scale,
        dropout_p,
    )
    return output.to(value.dtype)


def _check_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    enable_gqa: bool,
    is_causal: bool,
    sliding_window: int | None,
    dropout_p: float,
) -> None:
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}.")
    if sliding_window is not None and (not is_causal or sliding_window < 1):
        raise ValueError(f"sliding_window must be at least 1, with is_causal=True; got {sliding_window}.")
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} must be (batch, heads, length, head_dim): {shapes}.")
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {tensor.dtype}.")
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        raise ValueError(f"Batch sizes differ: {shapes}.")
    if key.shape[1:3] != value.shape[1:3] or query.shape[3] != key.shape[3]:
        raise ValueError(f"key and value must agree in heads and length, query and key in head_dim: {shapes}.")
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(f"The number of key heads must divide that of query heads: {shapes}.")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(f"Fewer key heads than query heads need enable_gqa=True: {shapes}.")


def _check_documents(documents: Tensor | None, query: Tensor, key: Tensor) -> None:
    if documents is None:
        return
    if documents.shape != (query.shape[0], query.shape[2]) or query.shape[2] != key.shape[2]:
        raise ValueError(
            f"document_ids must be (batch, length) with as many queries as keys, got {tuple(documents.shape)} "
            f"for {query.shape[2]} queries and {key.shape[2]} keys."
        )
    if documents.is_floating_point() or documents.dtype == torch.bool:
        raise ValueError(f"document_ids must be integers, got {documents.dtype}.")


def _per_head(parameter: Tensor | float, name: str, query: Tensor) -> Tensor:
    heads = query.shape[1]
    tensor = torch.as_tensor(parameter, device=query.device)
    if not tensor.is_floating_point():
        tensor = tensor.to(torch.float32)
    if tensor.dim() > 1 or tensor.numel() not in (1, heads):
        raise ValueError(f"{name} must be one value or {heads} (one per query head), got shape {tuple(tensor.shape)}.")
    return tensor.expand(heads)


def _split_mask(mask: Tensor | None, query: Tensor, key: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Split a mask into what is added to the scores and where attention is allowed."""
    if mask is None:
        return None, None
    full = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if mask.dim() > 4 or any(
        have not in (1, want) for have, want in zip(reversed(mask.shape), reversed(full), strict=False)
    ):
        raise ValueError(f"attn_mask of shape {tuple(mask.shape)} does not broadcast to {full}.")
    if mask.dtype == torch.bool:
        return None, mask
    if not mask.is_floating_point():
        raise ValueError(f"attn_mask must be boolean (True = attend) or floating point, got {mask.dtype}.")
    # A mask that was expanded says the same in one row.
    for dim, stride in enumerate(mask.stride()):
        if stride == 0:
            mask = mask.narrow(dim, 0, 1)
    allowed = mask > torch.finfo(mask.dtype).min
    # Masking acts on the transformed scores; a -inf left in the bias would make NaN gradients.
    return mask.masked_fill(~allowed, 0), allowed
