"""The forward kernel: FlashAttention-2's structure, an online maximum and sum over blocks of keys, in base 2."""

import triton
import triton.language as tl

from ssa_hf.kernels.triton.common import apply_mask, dot, dropout_factors, key_range, ssa_logits, visible


@triton.jit
def _block(
    first_key,
    q,
    output,
    top,
    total,
    b,
    n,
    scale,
    key,
    value,
    mask,
    documents,
    seed,
    head,
    queries,
    query_length,
    key_length,
    head_dim,
    value_dim,
    stride_kl,
    stride_kd,
    stride_vl,
    stride_vd,
    stride_mq,
    stride_mk,
    window,
    dropout_p,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    MASK: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    DROPOUT: tl.constexpr,
    BOUNDARY: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST: tl.constexpr,
):
    """Attend to one block of keys. BOUNDARY: some query may not see some key."""
    keys = first_key + tl.arange(0, BLOCK_KEYS)
    dims = tl.arange(0, BLOCK_DIM)
    value_dims = tl.arange(0, BLOCK_VALUE_DIM)
    in_range = keys < key_length
    k = tl.load(
        key + keys[None, :].to(tl.int64) * stride_kl + dims[:, None] * stride_kd,
        mask=in_range[None, :] & (dims[:, None] < head_dim),
        other=0.0,
    )
    x = dot(q, k, PRECISION) * scale
    if BOUNDARY:
        seen = visible(queries, keys, query_length, key_length, CAUSAL, window, WINDOW)
        x, seen = apply_mask(x, seen, mask, documents, queries, keys, key_length, stride_mq, stride_mk, MASK, DOCUMENTS)
    g, _ = ssa_logits(x, b, n, FAST)
    if BOUNDARY:
        g = tl.where(seen, g, float("-inf"))
    new_top = tl.maximum(top, tl.max(g, 1))
    # Rows that have seen nothing yet: any finite reference keeps their weights at 2^-inf = 0.
    reference = tl.where(new_top == float("-inf"), 0.0, new_top)
    w = tl.exp2(g - reference[:, None])
    factor = tl.exp2(top - reference)
    total = total * factor + tl.sum(w, 1)
    if DROPOUT:
        w = w * dropout_factors(seed, head, queries, keys, key_length, dropout_p)
    v = tl.load(
        value + keys[:, None].to(tl.int64) * stride_vl + value_dims[None, :] * stride_vd,
        mask=in_range[:, None] & (value_dims[None, :] < value_dim),
        other=0.0,
    )
    output = output * factor[:, None] + dot(w.to(v.dtype), v, PRECISION)
    return output, new_top, total


@triton.jit
def forward_kernel(
    query,
    key,
    value,
    mask,
    documents,
    b,
    n,
    seed,
    output,
    normaliser,
    scale,
    dropout_p,
    window,
    heads,
    group_size,
    query_length,
    key_length,
    head_dim,
    value_dim,
    stride_qb,
    stride_qh,
    stride_ql,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_kl,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vl,
    stride_vd,
    stride_mb,
    stride_mh,
    stride_mq,
    stride_mk,
    stride_os,
    stride_ob,
    stride_oh,
    stride_ol,
    stride_od,
    SPLITS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    MASK: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST: tl.constexpr,
):
    """One block of queries of one head, on one of SPLITS parts of its keys.

    Grid: (query blocks, batch · heads, SPLITS). With several parts, output is (SPLITS, batch, heads, query_length,
    value_dim) in float32 and normaliser (SPLITS, batch, heads, query_length, 2), for combine_kernel to put together.
    """
    first_query = tl.program_id(0) * BLOCK_QUERIES
    batch_head = tl.program_id(1)
    split = tl.program_id(2)
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    query += batch * stride_qb + head * stride_qh
    key += batch * stride_kb + head // group_size * stride_kh
    value += batch * stride_vb + head // group_size * stride_vh
    mask += batch * stride_mb + head * stride_mh
    documents += batch * key_length
    output += split.to(tl.int64) * stride_os + batch * stride_ob + head * stride_oh
    normaliser += (split.to(tl.int64) * tl.num_programs(1) + batch_head) * query_length * 2
    b = tl.load(b + head)
    n = tl.load(n + head)
    seed = tl.load(seed)

    queries = first_query + tl.arange(0, BLOCK_QUERIES)
    dims = tl.arange(0, BLOCK_DIM)
    value_dims = tl.arange(0, BLOCK_VALUE_DIM)
    rows_64 = queries[:, None].to(tl.int64)
    q = tl.load(
        query + rows_64 * stride_ql + dims[None, :] * stride_qd,
        mask=(queries[:, None] < query_length) & (dims[None, :] < head_dim),
        other=0.0,
    )
    top = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_QUERIES], tl.float32)
    acc = tl.zeros([BLOCK_QUERIES, BLOCK_VALUE_DIM], tl.float32)

    low, high, full_low, full_high = key_range(
        first_query, BLOCK_QUERIES, query_length, key_length, CAUSAL, window, WINDOW, BLOCK_KEYS
    )
    if MASK or DOCUMENTS:
        full_high = full_low
    if SPLITS > 1:
        part = tl.cdiv(tl.cdiv(high - low, BLOCK_KEYS), SPLITS) * BLOCK_KEYS
        low += split * part
        high = tl.minimum(high, low + part)
        full_low = tl.minimum(tl.maximum(full_low, low), tl.maximum(high, low))
        full_high = tl.minimum(tl.maximum(full_high, full_low), tl.maximum(high // BLOCK_KEYS * BLOCK_KEYS, full_low))
    # Blocks before, among and after those that every query sees whole: only the middle ones need no mask work.
    for first_key in range(low, tl.minimum(full_low, high), BLOCK_KEYS):
        acc, top, total = _block(
            first_key, q, acc, top, total, b, n, scale, key, value, mask, documents, seed, batch_head, queries,
            query_length, key_length, head_dim, value_dim, stride_kl, stride_kd, stride_vl, stride_vd, stride_mq,
            stride_mk, window, dropout_p, CAUSAL, WINDOW, MASK, DOCUMENTS, DROPOUT, True, BLOCK_KEYS, BLOCK_DIM,
            BLOCK_VALUE_DIM, PRECISION, FAST,
        )  # fmt: skip
    for first_key in range(full_low, full_high, BLOCK_KEYS):
        acc, top, total = _block(
            first_key, q, acc, top, total, b, n, scale, key, value, mask, documents, seed, batch_head, queries,
            query_length, key_length, head_dim, value_dim, stride_kl, stride_kd, stride_vl, stride_vd, stride_mq,
            stride_mk, window, dropout_p, CAUSAL, WINDOW, MASK, DOCUMENTS, DROPOUT, False, BLOCK_KEYS, BLOCK_DIM,
            BLOCK_VALUE_DIM, PRECISION, FAST,
        )  # fmt: skip
    for first_key in range(full_high, high, BLOCK_KEYS):
        acc, top, total = _block(
            first_key, q, acc, top, total, b, n, scale, key, value, mask, documents, seed, batch_head, queries,
            query_length, key_length, head_dim, value_dim, stride_kl, stride_kd, stride_vl, stride_vd, stride_mq,
            stride_mk, window, dropout_p, CAUSAL, WINDOW, MASK, DOCUMENTS, DROPOUT, True, BLOCK_KEYS, BLOCK_DIM,
            BLOCK_VALUE_DIM, PRECISION, FAST,
        )  # fmt: skip

    factor = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
    in_range = queries < query_length
    tl.store(
        output + rows_64 * stride_ol + value_dims[None, :] * stride_od,
        (acc * factor[:, None]).to(output.dtype.element_ty),
        mask=in_range[:, None] & (value_dims[None, :] < value_dim),
    )
    tl.store(normaliser + queries * 2, tl.where(total > 0, top, 0.0), mask=in_range)
    tl.store(normaliser + queries * 2 + 1, factor, mask=in_range)


@triton.jit
def combine_kernel(
    parts,
    part_normalisers,
    output,
    normaliser,
    heads,
    query_length,
    value_dim,
    stride_ob,
    stride_oh,
    stride_ol,
    stride_od,
    SPLITS: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
):
    """Put the parts of one query of one head together. Grid: (query_length, batch · heads)."""
    query = tl.program_id(0)
    batch_head = tl.program_id(1)
    dims = tl.arange(0, BLOCK_VALUE_DIM)
    row = batch_head.to(tl.int64) * query_length + query
    rows = tl.num_programs(1).to(tl.int64) * query_length
    top = float("-inf")
    for split in tl.static_range(SPLITS):
        at = part_normalisers + (split * rows + row) * 2
        top = tl.where(tl.load(at + 1) > 0, tl.maximum(top, tl.load(at)), top)
    total = 0.0
    acc = tl.zeros([BLOCK_VALUE_DIM], tl.float32)
    for split in tl.static_range(SPLITS):
        at = part_normalisers + (split * rows + row) * 2
        factor = tl.load(at + 1)
        seen = factor > 0
        # A part's sum of weights, relative to 2^top.
        weight = tl.where(seen, tl.exp2(tl.where(seen, tl.load(at) - top, 0.0)) / tl.where(seen, factor, 1.0), 0.0)
        total += weight
        part = tl.load(parts + (split * rows + row) * value_dim + dims, mask=dims < value_dim, other=0.0)
        acc += weight * part
    factor = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    target = output + batch * stride_ob + head * stride_oh + query.to(tl.int64) * stride_ol + dims * stride_od
    tl.store(target, (acc * factor).to(output.dtype.element_ty), mask=dims < value_dim)
    tl.store(normaliser + row * 2, tl.where(total > 0, top, 0.0))
    tl.store(normaliser + row * 2 + 1, factor)
