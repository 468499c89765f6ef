"""What the Triton kernels share: the score transform, visibility and dropout, for one block of queries and keys."""

import triton
import triton.language as tl


@triton.jit
def dot(left, right, PRECISION: tl.constexpr):
    """Matrix product in float32. PRECISION "ieee" multiplies in float32 as well: for float32, and the interpreter."""
    if PRECISION == "ieee":
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, input_precision=PRECISION)


@triton.jit
def ssa_logits(x, b, n, FAST: tl.constexpr):
    """g(x) = n·sgn(x)·log2(1 + b|x|), and 1 / (1 + b|x|).

    FAST takes NVIDIA's lg2.approx, one instruction with an error of 2^-22 (absolute near 1, else relative), where
    tl.log2 is a polynomial of some twenty.
    """
    magnitude = 1.0 + b * tl.abs(x)
    if FAST:
        log = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [magnitude], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        log = tl.log2(magnitude)
    g = n * log
    return tl.where(x < 0, -g, g), 1.0 / magnitude


@triton.jit
def visible(queries, keys, query_length, key_length, CAUSAL: tl.constexpr, window, WINDOW: tl.constexpr):
    """Which keys (columns) each query (rows) sees by its length, causality and window."""
    seen = (queries[:, None] < query_length) & (keys[None, :] < key_length)
    position = queries[:, None] + (key_length - query_length)
    if CAUSAL:
        seen = seen & (keys[None, :] <= position)
    if WINDOW:
        seen = seen & (keys[None, :] > position - window)
    return seen


@triton.jit
def apply_mask(
    x,
    seen,
    mask,
    documents,
    queries,
    keys,
    length,
    stride_query,
    stride_key,
    MASK: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """Heed documents (ids of the ``length`` positions) and an explicit mask.

    MASK is 0 for none, 1 for boolean (uint8), 2 for additive (float32, -inf masks).
    """
    if DOCUMENTS:
        own = tl.load(documents + queries, mask=queries < length, other=-1)
        others = tl.load(documents + keys, mask=keys < length, other=-1)
        seen = seen & (own[:, None] == others[None, :])
    if MASK:
        mask = mask + queries[:, None].to(tl.int64) * stride_query + keys[None, :].to(tl.int64) * stride_key
    if MASK == 1:
        seen = seen & (tl.load(mask, mask=seen, other=0) != 0)
    if MASK == 2:
        bias = tl.load(mask, mask=seen, other=float("-inf"))
        seen = seen & (bias != float("-inf"))
        x = tl.where(seen, x + bias, 0.0)
    return x, seen


@triton.jit
def dropout_factors(seed, head, queries, keys, key_length, dropout_p):
    """0 or 1/(1-p), by Philox at (seed, head, query, key): the backward pass meets the same ones."""
    offsets = queries[:, None] * key_length + keys[None, :]
    kept = tl.rand(seed + head.to(tl.int64) * 0x9E3779B97F4A7C1, offsets) >= dropout_p
    return tl.where(kept, 1.0 / (1.0 - dropout_p), 0.0)


@triton.jit
def key_range(
    first_query, rows, query_length, key_length, CAUSAL: tl.constexpr, window, WINDOW: tl.constexpr, BLOCK: tl.constexpr
):
    """The keys that some query of a block sees, [low, high), and those that all see, [full_low, full_high).

    All but ``high`` are multiples of BLOCK.
    """
    shift = key_length - query_length
    low = 0
    high = key_length
    full_low = 0
    full_high = key_length // BLOCK * BLOCK
    if CAUSAL:
        high = tl.minimum(key_length, tl.maximum(0, first_query + rows + shift))
        full_high = tl.minimum(full_high, tl.maximum(0, first_query + shift + 1) // BLOCK * BLOCK)
    if WINDOW:
        low = tl.maximum(0, first_query + shift + 1 - window) // BLOCK * BLOCK
        full_low = tl.cdiv(tl.maximum(0, first_query + rows + shift - window), BLOCK) * BLOCK
    full_low = tl.maximum(full_low, low)
    full_high = tl.maximum(full_high, full_low)
    return low, high, full_low, full_high
