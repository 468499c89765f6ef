"""An independent float64 oracle, written straight from the paper's formula, and error measures."""

import torch
from torch import Tensor


def oracle(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    b: Tensor,
    n: Tensor,
    *,
    bias: Tensor | None = None,
    allowed: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Weigh each key by (1 + b|x|)^(sgn(x)·n), normalise, and average the values, all in float64.

    ``b`` and ``n`` are (heads,), or (batch, heads, query_length, 1) to see each query's share of their gradients.
    ``keep`` is the dropout mask on the normalised weights.
    """
    query, key, value = query.double(), key.double(), value.double()
    b, n = (p.double()[:, None, None] if p.dim() == 1 else p.double() for p in (b, n))
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    x = torch.einsum("bhqd,bhkd->bhqk", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        x = x + bias.double()
    weight = (1 + b * x.abs()) ** (x.sign() * n)
    if is_causal:
        q_len, k_len = x.shape[-2:]
        later = torch.arange(k_len)[None, :] > torch.arange(q_len)[:, None] + k_len - q_len
        weight = weight * (~later)
    if allowed is not None:
        weight = weight * allowed
    total = weight.sum(-1, keepdim=True)
    weight = weight / torch.where(total > 0, total, 1)
    if keep is not None:
        weight = weight * keep / (1 - dropout_p)
    return torch.einsum("bhqk,bhkd->bhqd", weight, value)


def relative_rms(actual: Tensor, expected: Tensor, scale: float = 0.0) -> float:
    """Root mean square of the error over that of the expected values, or over ``scale`` if that is larger.

    Values below 1e-6 count as zero.
    """
    error = (actual.double() - expected.double()).square().mean().sqrt()
    return float(error / expected.double().square().mean().sqrt().clamp(min=max(scale, 1e-6)))


def parameter_gradient_scale(shares: Tensor) -> float:
    """The size that the gradient of b or n has if the shares of its queries are independent.

    It is a sum over batch and queries that may cancel down to nothing, while the rounding of its summands
    stays: errors are measured against this size. ``shares`` is (batch, heads, query_length, 1).
    """
    return float(shares.square().sum(dim=(0, 2, 3)).mean().sqrt())
