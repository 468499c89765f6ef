"""The backward kernels: delta, then queries (with b and n), then keys and values. Weights are recomputed."""

import triton
import triton.language as tl

from ssa_hf.kernels.triton.common import apply_mask, dot, dropout_factors, key_range, ssa_logits, visible


@triton.jit
def delta_kernel(
    output,
    grad_output,
    delta,
    heads,
    query_length,
    value_dim,
    stride_ob,
    stride_oh,
    stride_ol,
    stride_od,
    stride_gb,
    stride_gh,
    stride_gl,
    stride_gd,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
):
    """delta = sum over the value dimension of output · grad_output. Grid: (query blocks, batch · heads)."""
    queries = tl.program_id(0) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    batch_head = tl.program_id(1)
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    dims = tl.arange(0, BLOCK_VALUE_DIM)
    rows = queries[:, None].to(tl.int64)
    in_range = (queries[:, None] < query_length) & (dims[None, :] < value_dim)
    output += batch * stride_ob + head * stride_oh
    grad_output += batch * stride_gb + head * stride_gh
    o = tl.load(output + rows * stride_ol + dims[None, :] * stride_od, mask=in_range, other=0.0).to(tl.float32)
    g = tl.load(grad_output + rows * stride_gl + dims[None, :] * stride_gd, mask=in_range, other=0.0).to(tl.float32)
    target = delta + batch_head.to(tl.int64) * query_length + queries
    tl.store(target, tl.sum(o * g, 1), mask=queries < query_length)


@triton.jit
def _gradients(
    q,
    k,
    v,
    grad,
    shift,
    normalise,
    delta,
    b,
    n,
    scale,
    mask,
    documents,
    seed,
    head,
    queries,
    keys,
    query_length,
    key_length,
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
    PRECISION: tl.constexpr,
    FAST: tl.constexpr,
):
    """Weights after dropout, weights, dg, dx, g and x/(1 + b|x|) of a block, from q, grad (rows) and k, v (columns)."""
    x = dot(q, tl.trans(k), PRECISION) * scale
    if BOUNDARY:
        seen = visible(queries, keys, query_length, key_length, CAUSAL, window, WINDOW)
        x, seen = apply_mask(x, seen, mask, documents, queries, keys, key_length, stride_mq, stride_mk, MASK, DOCUMENTS)
    g, inverse = ssa_logits(x, b, n, FAST)
    weight = tl.exp2(g - shift[:, None]) * normalise[:, None]
    if BOUNDARY:
        weight = tl.where(seen, weight, 0.0)
    dweight = dot(grad, tl.trans(v), PRECISION)
    dropped = weight
    if DROPOUT:
        factors = dropout_factors(seed, head, queries, keys, key_length, dropout_p)
        dweight = dweight * factors
        dropped = weight * factors
    dg = weight * (dweight - delta[:, None])
    return dropped, weight, dg, dg * (n * b * inverse), g, x * inverse


@triton.jit
def _query_block(
    first_key,
    sums,
    q,
    grad,
    shift,
    normalise,
    delta,
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
    """What one block of keys adds to the queries' gradient and to the five sums that make those of b and n."""
    dq, dg_sum, dg_g, dg_c, mean_g, mean_c = sums
    keys = first_key + tl.arange(0, BLOCK_KEYS)
    dims = tl.arange(0, BLOCK_DIM)
    value_dims = tl.arange(0, BLOCK_VALUE_DIM)
    rows = keys[:, None].to(tl.int64)
    k = tl.load(
        key + rows * stride_kl + dims[None, :] * stride_kd,
        mask=(keys[:, None] < key_length) & (dims[None, :] < head_dim),
        other=0.0,
    )
    v = tl.load(
        value + rows * stride_vl + value_dims[None, :] * stride_vd,
        mask=(keys[:, None] < key_length) & (value_dims[None, :] < value_dim),
        other=0.0,
    )
    _, weight, dg, dx, g, c = _gradients(
        q, k, v, grad, shift, normalise, delta, b, n, scale, mask, documents, seed, head, queries, keys, query_length,
        key_length, stride_mq, stride_mk, window, dropout_p, CAUSAL, WINDOW, MASK, DOCUMENTS, DROPOUT, BOUNDARY,
        PRECISION, FAST,
    )  # fmt: skip
    dq += dot(dx.to(k.dtype), k, PRECISION)
    dg_sum += tl.sum(dg, 1)
    dg_g += tl.sum(dg * g, 1)
    dg_c += tl.sum(dg * c, 1)
    mean_g += tl.sum(weight * g, 1)
    mean_c += tl.sum(weight * c, 1)
    return dq, dg_sum, dg_g, dg_c, mean_g, mean_c


@triton.jit
def query_kernel(
    query,
    key,
    value,
    mask,
    documents,
    b,
    n,
    seed,
    normaliser,
    grad_output,
    delta,
    grad_query,
    grad_b,
    grad_n,
    most_blocks,
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
    stride_gb,
    stride_gh,
    stride_gl,
    stride_gd,
    stride_dqb,
    stride_dqh,
    stride_dql,
    stride_dqd,
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
    """Gradient of one block of queries, and its share of those of b and n. Grid: (query blocks, batch · heads).

    With c = x / (1 + b|x|), dL/db = n·sum(dg·c) and dL/dn = ln(2)·sum(dg·g) / n. As dg sums to 0 over a query's keys
    but for rounding, sum(dg)·mean(c) is taken off: it is that rounding, and drowns the rest where scores are large.
    """
    block = tl.program_id(0)
    first_query = block * BLOCK_QUERIES
    batch_head = tl.program_id(1)
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    query += batch * stride_qb + head * stride_qh
    key += batch * stride_kb + head // group_size * stride_kh
    value += batch * stride_vb + head // group_size * stride_vh
    mask += batch * stride_mb + head * stride_mh
    documents += batch * key_length
    grad_output += batch * stride_gb + head * stride_gh
    grad_query += batch * stride_dqb + head * stride_dqh
    row_64 = batch_head.to(tl.int64) * query_length
    b = tl.load(b + head)
    n = tl.load(n + head)
    seed = tl.load(seed)

    queries = first_query + tl.arange(0, BLOCK_QUERIES)
    in_range = queries < query_length
    dims = tl.arange(0, BLOCK_DIM)
    value_dims = tl.arange(0, BLOCK_VALUE_DIM)
    rows = queries[:, None].to(tl.int64)
    q_mask = in_range[:, None] & (dims[None, :] < head_dim)
    q = tl.load(query + rows * stride_ql + dims[None, :] * stride_qd, mask=q_mask, other=0.0)
    grad = tl.load(
        grad_output + rows * stride_gl + value_dims[None, :] * stride_gd,
        mask=in_range[:, None] & (value_dims[None, :] < value_dim),
        other=0.0,
    )
    shift = tl.load(normaliser + (row_64 + queries) * 2, mask=in_range, other=0.0)
    normalise = tl.load(normaliser + (row_64 + queries) * 2 + 1, mask=in_range, other=0.0)
    row_delta = tl.load(delta + row_64 + queries, mask=in_range, other=0.0)
    zeros = tl.zeros([BLOCK_QUERIES], tl.float32)
    sums = (tl.zeros([BLOCK_QUERIES, BLOCK_DIM], tl.float32), zeros, zeros, zeros, zeros, zeros)

    low, high, full_low, full_high = key_range(
        first_query, BLOCK_QUERIES, query_length, key_length, CAUSAL, window, WINDOW, BLOCK_KEYS
    )
    if MASK or DOCUMENTS:
        full_high = full_low
    for first_key in range(low, tl.minimum(full_low, high), BLOCK_KEYS):
        sums = _query_block(
            first_key, sums, q, grad, shift, normalise, row_delta, b, n, scale, key, value, mask, documents, seed,
            batch_head, queries, query_length, key_length, head_dim, value_dim, stride_kl, stride_kd, stride_vl,
            stride_vd, stride_mq, stride_mk, window, dropout_p, CAUSAL, WINDOW, MASK, DOCUMENTS, DROPOUT, True,
            BLOCK_KEYS, BLOCK_DIM, BLOCK_VALUE_DIM, PRECISION, FAST,
        )  # fmt: skip
    for first_key in range(full_low, full_high, BLOCK_KEYS):
        sums = _query_block(
            first_key, sums, q, grad, shift, normalise, row_delta, b, n, scale, key, value, mask, documents, seed,
            batch_head, queries, query_length, key_length, head_dim, value_dim, stride_kl, stride_kd, stride_vl,
            stride_vd, stride_mq, stride_mk, window, dropout_p, CAUSAL, WINDOW, MASK, DOCUMENTS, DROPOUT, False,
            BLOCK_KEYS, BLOCK_DIM, BLOCK_VALUE_DIM, PRECISION, FAST,
        )  # fmt: skip
    for first_key in range(full_high, high, BLOCK_KEYS):
        sums = _query_block(
            first_key, sums, q, grad, shift, normalise, row_delta, b, n, scale, key, value, mask, documents, seed,
            batch_head, queries, query_length, key_length, head_dim, value_dim, stride_kl, stride_kd, stride_vl,
            stride_vd, stride_mq, stride_mk, window, dropout_p, CAUSAL, WINDOW, MASK, DOCUMENTS, DROPOUT, True,
            BLOCK_KEYS, BLOCK_DIM, BLOCK_VALUE_DIM, PRECISION, FAST,
        )  # fmt: skip

    dq, dg_sum, dg_g, dg_c, mean_g, mean_c = sums
    tl.store(
        grad_query + rows * stride_dql + dims[None, :] * stride_dqd,
        (dq * scale).to(grad_query.dtype.element_ty),
        mask=q_mask,
    )
    share = batch_head.to(tl.int64) * most_blocks + block
    tl.store(grad_b + share, n * tl.sum(tl.where(in_range, dg_c - dg_sum * mean_c, 0.0), 0))
    ln2 = 0.6931471805599453
    tl.store(grad_n + share, ln2 / n * tl.sum(tl.where(in_range, dg_g - dg_sum * mean_g, 0.0), 0))


@triton.jit
def _key_block(
    first_query,
    dk,
    dv,
    k,
    v,
    b,
    n,
    scale,
    query,
    grad_output,
    normaliser,
    delta,
    mask,
    documents,
    seed,
    head,
    keys,
    query_length,
    key_length,
    head_dim,
    value_dim,
    stride_ql,
    stride_qd,
    stride_gl,
    stride_gd,
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
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST: tl.constexpr,
):
    """What one block of queries of one head adds to the gradients of a block of keys and values.

    Past the end, queries have a normaliser of 0, and keys are not stored: neither makes a boundary.
    """
    queries = first_query + tl.arange(0, BLOCK_QUERIES)
    in_range = queries < query_length
    dims = tl.arange(0, BLOCK_DIM)
    value_dims = tl.arange(0, BLOCK_VALUE_DIM)
    rows = queries[:, None].to(tl.int64)
    q = tl.load(
        query + rows * stride_ql + dims[None, :] * stride_qd,
        mask=in_range[:, None] & (dims[None, :] < head_dim),
        other=0.0,
    )
    grad = tl.load(
        grad_output + rows * stride_gl + value_dims[None, :] * stride_gd,
        mask=in_range[:, None] & (value_dims[None, :] < value_dim),
        other=0.0,
    )
    shift = tl.load(normaliser + queries * 2, mask=in_range, other=0.0)
    normalise = tl.load(normaliser + queries * 2 + 1, mask=in_range, other=0.0)
    row_delta = tl.load(delta + queries, mask=in_range, other=0.0)
    dropped, _, _, dx, _, _ = _gradients(
        q, k, v, grad, shift, normalise, row_delta, b, n, scale, mask, documents, seed, head, queries, keys,
        query_length, key_length, stride_mq, stride_mk, window, dropout_p, CAUSAL, WINDOW, MASK, DOCUMENTS, DROPOUT,
        BOUNDARY, PRECISION, FAST,
    )  # fmt: skip
    dv += dot(tl.trans(dropped.to(grad.dtype)), grad, PRECISION)
    dk += dot(tl.trans(dx.to(q.dtype)), q, PRECISION)
    return dk, dv


@triton.jit
def key_kernel(
    query,
    key,
    value,
    mask,
    documents,
    b,
    n,
    seed,
    normaliser,
    grad_output,
    delta,
    grad_key,
    grad_value,
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
    stride_gb,
    stride_gh,
    stride_gl,
    stride_gd,
    stride_dkb,
    stride_dkh,
    stride_dkl,
    stride_dkd,
    stride_dvb,
    stride_dvh,
    stride_dvl,
    stride_dvd,
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
    """Gradients of one block of keys and values, over all query heads that share them.

    Grid: (key blocks, batch · key/value heads).
    """
    first_key = tl.program_id(0) * BLOCK_KEYS
    groups = heads // group_size
    batch = (tl.program_id(1) // groups).to(tl.int64)
    group = (tl.program_id(1) % groups).to(tl.int64)
    keys = first_key + tl.arange(0, BLOCK_KEYS)
    dims = tl.arange(0, BLOCK_DIM)
    value_dims = tl.arange(0, BLOCK_VALUE_DIM)
    key_rows = keys[:, None].to(tl.int64)
    k_mask = (keys[:, None] < key_length) & (dims[None, :] < head_dim)
    v_mask = (keys[:, None] < key_length) & (value_dims[None, :] < value_dim)
    key += batch * stride_kb + group * stride_kh
    value += batch * stride_vb + group * stride_vh
    k = tl.load(key + key_rows * stride_kl + dims[None, :] * stride_kd, mask=k_mask, other=0.0)
    v = tl.load(value + key_rows * stride_vl + value_dims[None, :] * stride_vd, mask=v_mask, other=0.0)
    seed = tl.load(seed)
    dk = tl.zeros([BLOCK_KEYS, BLOCK_DIM], tl.float32)
    dv = tl.zeros([BLOCK_KEYS, BLOCK_VALUE_DIM], tl.float32)

    # Queries that see some key of the block, [low, high), and those that see all, [full_low, full_high).
    position = first_key - (key_length - query_length)
    low = 0
    high = query_length
    full_low = 0
    full_high = query_length
    if CAUSAL:
        low = tl.maximum(0, position) // BLOCK_QUERIES * BLOCK_QUERIES
        full_low = tl.cdiv(tl.maximum(0, position + BLOCK_KEYS - 1), BLOCK_QUERIES) * BLOCK_QUERIES
    if WINDOW:
        high = tl.minimum(high, tl.maximum(0, position + BLOCK_KEYS - 1 + window))
        full_high = tl.minimum(full_high, tl.maximum(0, position + window) // BLOCK_QUERIES * BLOCK_QUERIES)
    full_high = tl.maximum(full_high, full_low)
    if MASK or DOCUMENTS:
        full_high = full_low

    for member in range(group_size):
        head = group * group_size + member
        batch_head = batch * heads + head
        head_b = tl.load(b + head)
        head_n = tl.load(n + head)
        q_head = query + batch * stride_qb + head * stride_qh
        grad_head = grad_output + batch * stride_gb + head * stride_gh
        mask_head = mask + batch * stride_mb + head * stride_mh
        documents_head = documents + batch * key_length
        normaliser_head = normaliser + batch_head * query_length * 2
        delta_head = delta + batch_head * query_length
        for first_query in range(low, tl.minimum(full_low, high), BLOCK_QUERIES):
            dk, dv = _key_block(
                first_query, dk, dv, k, v, head_b, head_n, scale, q_head, grad_head, normaliser_head, delta_head,
                mask_head, documents_head, seed, batch_head.to(tl.int32), keys, query_length, key_length, head_dim,
                value_dim, stride_ql, stride_qd, stride_gl, stride_gd, stride_mq, stride_mk, window, dropout_p, CAUSAL,
                WINDOW, MASK, DOCUMENTS, DROPOUT, True, BLOCK_QUERIES, BLOCK_DIM, BLOCK_VALUE_DIM, PRECISION, FAST,
            )  # fmt: skip
        for first_query in range(full_low, tl.minimum(full_high, high), BLOCK_QUERIES):
            dk, dv = _key_block(
                first_query, dk, dv, k, v, head_b, head_n, scale, q_head, grad_head, normaliser_head, delta_head,
                mask_head, documents_head, seed, batch_head.to(tl.int32), keys, query_length, key_length, head_dim,
                value_dim, stride_ql, stride_qd, stride_gl, stride_gd, stride_mq, stride_mk, window, dropout_p, CAUSAL,
                WINDOW, MASK, DOCUMENTS, DROPOUT, False, BLOCK_QUERIES, BLOCK_DIM, BLOCK_VALUE_DIM, PRECISION, FAST,
            )  # fmt: skip
        for first_query in range(full_high, high, BLOCK_QUERIES):
            dk, dv = _key_block(
                first_query, dk, dv, k, v, head_b, head_n, scale, q_head, grad_head, normaliser_head, delta_head,
                mask_head, documents_head, seed, batch_head.to(tl.int32), keys, query_length, key_length, head_dim,
                value_dim, stride_ql, stride_qd, stride_gl, stride_gd, stride_mq, stride_mk, window, dropout_p, CAUSAL,
                WINDOW, MASK, DOCUMENTS, DROPOUT, True, BLOCK_QUERIES, BLOCK_DIM, BLOCK_VALUE_DIM, PRECISION, FAST,
            )  # fmt: skip

    grad_key += batch * stride_dkb + group * stride_dkh
    grad_value += batch * stride_dvb + group * stride_dvh
    tl.store(
        grad_key + key_rows * stride_dkl + dims[None, :] * stride_dkd,
        (dk * scale).to(grad_key.dtype.element_ty),
        mask=k_mask,
    )
    tl.store(
        grad_value + key_rows * stride_dvl + value_dims[None, :] * stride_dvd,
        dv.to(grad_value.dtype.element_ty),
        mask=v_mask,
    )
