"""ssa_attention: scaled_dot_product_attention with SSA in the place of softmax."""

import torch
from torch import Tensor

from ssa_hf.kernels import reference

BACKENDS = ("auto", "reference")


def ssa_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    b: Tensor | float,
    n: Tensor | float,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
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
        scale: factor on query·key, 1/sqrt(head_dim) by default.
        dropout_p: chance of dropping a normalised weight (applied whenever above 0, as in PyTorch).
        enable_gqa: allow key_heads < query_heads.
        backend: "auto" or "reference".

    Returns:
        (batch, query_heads, query_length, value_dim) in value's dtype, accumulated in float32 (float64 for
        float64 inputs).

    Raises:
        ValueError: for shapes, dtypes or options that do not fit together.
    """
    output, _ = attend(
        query,
        key,
        value,
        b,
        n,
        attn_mask=attn_mask,
        is_causal=is_causal,
        scale=scale,
        dropout_p=dropout_p,
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
    scale: float | None = None,
    dropout_p: float = 0.0,
    enable_gqa: bool = True,
    backend: str = "auto",
    return_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Do what :func:`ssa_attention` does and, if asked, return the weights before dropout as well.

    Weights have the shape (batch, query_heads, query_length, key_length); only the reference backend
    forms them.
    """
    if backend not in BACKENDS:
        raise ValueError(f"Unknown backend {backend!r}; choose from {', '.join(BACKENDS)}.")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}.")
    _check_shapes(query, key, value, enable_gqa)
    bias, allowed = _split_mask(attn_mask, query, key)
    output, weights = reference.attention(
        query,
        key,
        value,
        _per_head(b, "b", query),
        _per_head(n, "n", query),
        bias=bias,
        allowed=allowed,
        is_causal=is_causal,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        dropout_p=dropout_p,
    )
    return output, weights if return_weights else None


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
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
    allowed = mask > torch.finfo(mask.dtype).min
    # Masking acts on the transformed scores; a -inf left in the bias would make NaN gradients.
    return mask.masked_fill(~allowed, 0), allowed
