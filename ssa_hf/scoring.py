"""The scoring function of Scaled Signed Averaging (Naim et al., arXiv 2508.14685)."""

import torch
from torch import Tensor


def ssa_logits(scores: Tensor, b: Tensor, n: Tensor) -> Tensor:
    """Map raw attention scores x to g(x) = n·sgn(x)·log1p(b|x|), so that SSA weights are softmax(g).

    The paper weighs a key by w(x) = (1 + b|x|)^(sgn(x)·n) and normalises over the keys. As
    w(x) = exp(g(x)), the normalised weights are a softmax of g: nothing overflows, and every
    technique made for softmax (online log-sum-exp, masking with -inf) carries over.

    Args:
        scores: raw scores, already scaled by the attention scale, floating point, any shape.
        b: slope, > 0, broadcastable to ``scores``.
        n: exponent, >= 1, broadcastable to ``scores``.

    Returns:
        g, in the shape of ``scores``. Its derivatives are dg/dx = n·b / (1 + b|x|) (at x = 0 as
        well: n·b), dg/dn = sgn(x)·log1p(b|x|) and dg/db = n·x / (1 + b|x|).
    """
    # Zero counts as positive. torch.sign and torch.abs both have derivative 0 at x = 0, and the
    # product rule would then lose the n·b that g has there.
    positive = scores >= 0
    magnitude = torch.where(positive, scores, -scores)
    sign = torch.where(positive, 1.0, -1.0).to(scores.dtype)
    return n * sign * torch.log1p(b * magnitude)
