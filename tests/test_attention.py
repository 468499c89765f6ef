"""The battery that every backend must pass, against the float64 oracle."""

import itertools
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ssa_hf
from ssa_hf.functional import attend
from ssa_hf.kernels import op
from tests.oracle import oracle, parameter_gradient_scale, relative_rms

# TRITON_INTERPRET=1 replaces the C++ kernel by the Triton one, interpreted: see test_triton_kernel.py.
BACKENDS = ["triton"] if os.environ.get("TRITON_INTERPRET") == "1" else ["reference", "blocked", "cpu"]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def make(batch=2, heads=4, groups=2, q_len=7, k_len=7, dim=8, value_dim=8, dtype=torch.float32, spread=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).mul(spread).to(dtype).requires_grad_()

    query, key = normal(batch, heads, q_len, dim), normal(batch, groups, k_len, dim)
    value = normal(batch, groups, k_len, value_dim)
    b = torch.rand(heads, generator=generator).add(0.3).requires_grad_()
    n = torch.rand(heads, generator=generator).add(1.0).requires_grad_()
    return query, key, value, b, n


def outputs_and_gradients(function, inputs, seed=3):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    output = function(*leaves)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    (output.double() * direction).sum().backward()
    return output.detach(), [leaf.grad for leaf in leaves]


def check(inputs, tolerance, backend, *, oracle_arguments=None, floor=0.0, **arguments):
    actual, actual_grads = outputs_and_gradients(
        lambda *leaves: ssa_hf.ssa_attention(*leaves, backend=backend, **arguments), inputs
    )
    expected_arguments = arguments if oracle_arguments is None else oracle_arguments
    query, key, value, b, n = (tensor.detach().double() for tensor in inputs)
    rows = (*query.shape[:3], 1)
    expected, expected_grads = outputs_and_gradients(
        lambda *leaves: oracle(*leaves, **expected_arguments),
        (query, key, value, b[:, None, None].expand(rows), n[:, None, None].expand(rows)),
    )
    assert actual.dtype == inputs[2].dtype
    assert relative_rms(actual, expected) <= tolerance
    for name, got, want in zip(("query", "key", "value", "b", "n"), actual_grads, expected_grads, strict=True):
        assert torch.isfinite(got).all(), name
        if name in ("b", "n"):
            error = relative_rms(got, want.sum(dim=(0, 2, 3)), max(floor, parameter_gradient_scale(want)))
        else:
            error = relative_rms(got, want, floor)
        assert error <= tolerance, name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        dict(),
        dict(heads=6, groups=6, q_len=63, k_len=63, dim=60, value_dim=60),
        dict(heads=6, groups=1, q_len=13, k_len=37, dim=20, value_dim=12),
        dict(batch=1, heads=2, groups=1, q_len=1, k_len=19, dim=32, value_dim=32),
        dict(batch=3, heads=2, groups=2, q_len=1, k_len=1, dim=4, value_dim=4),
        dict(batch=1, heads=3, groups=3, q_len=111, k_len=111, dim=100, value_dim=100, spread=3.0),
    ],
)
def test_output_and_gradients(backend, dtype, is_causal, shape):
    # With one key its weight is 1, and the gradients of the score cancel from terms of order 1 down to 0.
    floor = 1.0 if shape.get("k_len") == 1 else 0.0
    check(make(dtype=dtype, **shape), TOLERANCE[dtype], backend, floor=floor, is_causal=is_causal)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask_shape", list(itertools.product((1, 2), (1, 4), (1, 7), (9,))))
def test_boolean_mask_with_any_broadcast(backend, mask_shape):
    allowed = torch.rand(mask_shape, generator=torch.Generator().manual_seed(5)) > 0.4
    allowed[..., 0] = True
    check(make(k_len=9), 1e-6, backend, attn_mask=allowed, oracle_arguments=dict(allowed=allowed))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("masked_value", [float("-inf"), torch.finfo(torch.float32).min])
def test_float_mask_is_a_bias_except_where_it_masks(backend, masked_value):
    generator = torch.Generator().manual_seed(6)
    bias = torch.randn(2, 1, 7, 9, generator=generator)
    allowed = torch.rand(2, 1, 7, 9, generator=generator) > 0.3
    allowed[..., 4] = True
    check(
        make(k_len=9),
        1e-6,
        backend,
        attn_mask=bias.masked_fill(~allowed, masked_value),
        scale=0.7,
        oracle_arguments=dict(bias=bias, allowed=allowed, scale=0.7),
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_mask_and_causal_combine(backend):
    allowed = torch.rand(2, 1, 7, 9, generator=torch.Generator().manual_seed(7)) > 0.3
    allowed[..., 0] = True
    check(
        make(k_len=9),
        1e-6,
        backend,
        attn_mask=allowed,
        is_causal=True,
        oracle_arguments=dict(allowed=allowed, is_causal=True),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_packed_documents(backend, is_causal, masked):
    """A query sees its own document only, with causality and a mask on top; ids need not be in order."""
    lengths = torch.tensor([[5, 20, 1, 14], [30, 2, 3, 5]])
    ids = torch.stack([torch.tensor([7, 3, 9, 3]).repeat_interleave(row) for row in lengths])
    same = (ids[:, :, None] == ids[:, None, :])[:, None]
    mask = torch.rand(1, 4, 40, 40, generator=torch.Generator().manual_seed(2)) > 0.2 if masked else None
    check(
        make(q_len=40, k_len=40),
        1e-6,
        backend,
        document_ids=ids,
        attn_mask=mask,
        is_causal=is_causal,
        oracle_arguments=dict(allowed=same if mask is None else same & mask, is_causal=is_causal),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [1, 5, 40, 64, 1000])
def test_sliding_window(backend, window):
    q_len, k_len = 90, 110
    position = torch.arange(q_len)[:, None] + k_len - q_len - torch.arange(k_len)
    allowed = (position >= 0) & (position < window)
    check(
        make(q_len=q_len, k_len=k_len),
        1e-6,
        backend,
        is_causal=True,
        sliding_window=window,
        oracle_arguments=dict(allowed=allowed),
        # A window of 1 leaves one key: the gradients of scores cancel from terms of order 1 down to 0.
        floor=1.0 if window == 1 else 0.0,
    )
    with pytest.raises(ValueError, match="sliding_window"):
        ssa_hf.ssa_attention(*make(), sliding_window=window)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name in ("cpu", "triton")])
@pytest.mark.parametrize("is_causal", [False, True])
def test_dropout_against_the_oracle(backend, is_causal):
    """The pattern is read off with identity values, then used in the oracle, output and gradients."""
    query, key, value, b, n = make(q_len=50, k_len=70, value_dim=9)
    seed = torch.tensor(12345)
    options = (is_causal, 0, 8**-0.5, 0.3)
    ssa_hf.ssa_attention(query, key, value, b, n, backend=backend)  # makes the backend's kernel the operator's
    identity = torch.eye(70).expand(2, 2, 70, 70)
    keep = op.attention(query, key, identity, b, n, None, None, seed, *options)[0] != 0
    seen = torch.ones(50, 70, dtype=torch.bool).tril(20 if is_causal else 70).expand(2, 4, 50, 70)
    assert keep[seen].float().mean().item() == pytest.approx(0.7, abs=0.02)
    actual, actual_grads = outputs_and_gradients(
        lambda *leaves: op.attention(*leaves, None, None, seed, *options)[0], (query, key, value, b, n)
    )
    expected, expected_grads = outputs_and_gradients(
        lambda *leaves: oracle(*leaves, is_causal=is_causal, keep=keep, dropout_p=0.3),
        [tensor.detach().double() for tensor in (query, key, value, b, n)],
    )
    assert relative_rms(actual, expected) < 1e-6
    for got, want in zip(actual_grads, expected_grads, strict=True):
        assert relative_rms(got, want) < 2e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_masked_keys_have_no_weight_and_no_gradient(backend, dtype):
    query, key, value, b, n = make(dtype=dtype, spread=20.0)
    allowed = torch.ones(1, 1, 1, 7, dtype=torch.bool)
    allowed[..., 2] = allowed[..., 6] = False
    mask = torch.zeros(1, 1, 1, 7, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
    for attn_mask in (allowed, mask):
        output, (_, dk, dv, _, _) = outputs_and_gradients(
            lambda *leaves, attn_mask=attn_mask: ssa_hf.ssa_attention(*leaves, attn_mask=attn_mask, backend=backend),
            (query, key, value, b, n),
        )
        for gradient in (dk, dv):
            assert (gradient[:, :, [2, 6]] == 0).all()
            assert (gradient[:, :, 3] != 0).any()
        changed_key, changed_value = key.detach().clone(), value.detach().clone()
        changed_key[:, :, [2, 6]] = 100.0
        changed_value[:, :, [2, 6]] = -100.0
        changed = ssa_hf.ssa_attention(query, changed_key, changed_value, b, n, attn_mask=attn_mask, backend=backend)
        assert torch.equal(output, changed)


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_with_nothing_to_attend_is_zero(backend):
    inputs = make(k_len=9)
    allowed = torch.rand(2, 4, 7, 9, generator=torch.Generator().manual_seed(8)) > 0.3
    allowed[0, :, 3] = False
    allowed[1, 2] = False
    for mask in (allowed, torch.zeros(allowed.shape).masked_fill(~allowed, float("-inf"))):
        check(inputs, 1e-6, backend, attn_mask=mask, oracle_arguments=dict(allowed=allowed))
        output, (dq, *_) = outputs_and_gradients(
            lambda *leaves, mask=mask: ssa_hf.ssa_attention(*leaves, attn_mask=mask, backend=backend), inputs
        )
        assert (output[0, :, 3] == 0).all()
        assert (output[1, 2] == 0).all()
        assert (dq[0, :, 3] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_queries_than_keys_bottom_right(backend):
    """With is_causal and 5 queries on 3 keys, the first two queries see nothing."""
    inputs = make(q_len=5, k_len=3)
    check(inputs, 1e-6, backend, is_causal=True)
    assert (ssa_hf.ssa_attention(*inputs, is_causal=True, backend=backend)[:, :, :2] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 1e4), (torch.bfloat16, 1e30), (torch.float32, 1e30)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_huge_scores_stay_finite(backend, dtype, size, is_causal):
    root = size**0.5
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0])
    query = (torch.ones(1, 2, 5, 1) * root).to(dtype)
    key = (signs.view(1, 1, 5, 1).expand(1, 2, 5, 1) * root).to(dtype)
    value = torch.arange(10, dtype=dtype).view(1, 2, 5, 1)
    output, gradients = outputs_and_gradients(
        lambda *leaves: ssa_hf.ssa_attention(*leaves, scale=1.0, is_causal=is_causal, backend=backend),
        (query, key, value, torch.full((2,), 0.8), torch.full((2,), 1.5)),
    )
    for tensor in (output, *gradients):
        assert torch.isfinite(tensor).all()
    if not is_causal:
        torch.testing.assert_close(output[0, 0, :, 0], torch.full((5,), 1.0, dtype=dtype), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("empty", [dict(batch=0), dict(q_len=0), dict(k_len=0)])
def test_empty_inputs(backend, empty):
    inputs = make(**empty)
    output, gradients = outputs_and_gradients(lambda *leaves: ssa_hf.ssa_attention(*leaves, backend=backend), inputs)
    assert output.shape == (*inputs[0].shape[:3], 8)
    assert (output == 0).all()
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("backend", BACKENDS)
def test_non_contiguous_inputs_and_output_gradients(backend):
    query, key, value, b, n = make(q_len=7, k_len=7)
    check((query, key, value, b, n), 1e-6, backend, is_causal=True)
    plain, plain_grads = outputs_and_gradients(
        lambda *leaves: ssa_hf.ssa_attention(*leaves, is_causal=True, backend=backend),
        (query, key, value, b, n),
    )

    def strided(query, key, value, b, n):
        # (batch, length, heads, dim) storage, as the models hand it over, and a stride of 2 in b and n.
        query, key, value = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value))
        b, n = (torch.stack((t, t), 1)[:, 0] for t in (b, n))
        output = ssa_hf.ssa_attention(query, key, value, b, n, is_causal=True, backend=backend)
        return output.transpose(1, 2).contiguous().transpose(1, 2)

    got, got_grads = outputs_and_gradients(strided, (query, key, value, b, n))
    torch.testing.assert_close(got, plain)
    for actual, expected in zip(got_grads, plain_grads, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_scores(backend):
    """All scores 0: uniform weights, and the gradient of the query is that of slope n·b."""
    query, key, value, b, n = make()
    query = torch.zeros_like(query)
    output, (dq, *_) = outputs_and_gradients(
        lambda *leaves: ssa_hf.ssa_attention(*leaves, backend=backend), (query, key, value, b, n)
    )
    torch.testing.assert_close(output[:, 0], value[:, 0].mean(1, keepdim=True).expand(-1, 7, -1))
    scaled = (query * 1.0, key.detach() * 1.0, value.detach())
    leaf = torch.zeros_like(query, dtype=torch.float64, requires_grad=True)
    slope = (n * b).detach().double()[:, None, None]
    repeated = [t.double().repeat_interleave(2, 1) for t in scaled[1:]]
    softmax = ((leaf @ repeated[0].transpose(-1, -2)) * 8**-0.5 * slope).softmax(-1) @ repeated[1]
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (softmax * direction).sum().backward()
    assert relative_rms(dq, leaf.grad) <= 1e-6


def test_gradcheck_of_attention_in_float64_with_zero_scores():
    query, key, value, b, n = (
        tensor.detach().double() for tensor in make(batch=1, q_len=3, k_len=4, dim=3, value_dim=2)
    )
    query[:, :, 0] = 0
    leaves = [tensor.requires_grad_() for tensor in (query, key, value, b, n)]
    for arguments in (dict(), dict(is_causal=True), dict(attn_mask=torch.tensor([True, False, True, True]))):
        assert torch.autograd.gradcheck(
            lambda *leaves, arguments=arguments: ssa_hf.ssa_attention(*leaves, backend="reference", **arguments),
            leaves,
            eps=1e-7,
            atol=1e-5,
        )


def test_gradient_of_a_trained_bias():
    inputs = [tensor.detach() for tensor in make()]
    bias = torch.randn(1, 4, 7, 7, requires_grad=True, generator=torch.Generator().manual_seed(1))
    ssa_hf.ssa_attention(*inputs, attn_mask=bias).square().sum().backward()
    expected = bias.detach().double().requires_grad_()
    oracle(*inputs, bias=expected).square().sum().backward()
    assert relative_rms(bias.grad, expected.grad) <= 1e-6


def test_weights_and_dropout():
    """Dropout falls on the normalised weights: expectation kept, survivors scaled by 1/(1-p)."""
    query, key, _, b, n = make(q_len=64, k_len=64, dim=8, value_dim=64)
    identity = torch.eye(64).expand(2, 2, 64, 64)
    _, weights = attend(query, key, identity, b, n, is_causal=True, return_weights=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 64))
    assert (weights.triu(1) == 0).all()
    torch.manual_seed(0)
    dropped = ssa_hf.ssa_attention(query, key, identity, b, n, is_causal=True, dropout_p=0.25)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], (weights / 0.75)[kept])
    rate = kept[weights > 0].float().mean().item()
    assert rate == pytest.approx(0.75, abs=0.01)


def test_autocast_does_not_lower_the_precision():
    inputs = make(q_len=33, k_len=33, dim=16, value_dim=16)
    expected = ssa_hf.ssa_attention(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ssa_hf.ssa_attention(*inputs), expected)


def test_mixed_dtypes_follow_the_value():
    query, key, value, b, n = make()
    assert ssa_hf.ssa_attention(query, key, value.bfloat16(), b, n).dtype == torch.bfloat16


def test_scalar_b_and_n():
    query, key, value, *_ = make()
    expected = ssa_hf.ssa_attention(query, key, value, torch.full((4,), 0.8), torch.full((4,), 2.0))
    assert torch.equal(ssa_hf.ssa_attention(query, key, value, 0.8, 2), expected)
    assert torch.equal(ssa_hf.ssa_attention(query, key, value, torch.tensor(0.8), torch.tensor([2.0])), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(query=torch.zeros(2, 4, 7)), "query must be"),
        (dict(query=torch.zeros(2, 4, 7, 8, dtype=torch.long)), "floating point"),
        (dict(key=torch.zeros(1, 2, 7, 8)), "Batch sizes"),
        (dict(key=torch.zeros(2, 2, 6, 8)), "agree in heads and length"),
        (dict(query=torch.zeros(2, 3, 7, 8)), "must divide"),
        (dict(enable_gqa=False), "enable_gqa"),
        (dict(b=torch.ones(3)), "b must be one value or 4"),
        (dict(n=torch.ones(4, 1)), "n must be one value or 4"),
        (dict(attn_mask=torch.ones(3, 7, dtype=torch.bool)), "does not broadcast"),
        (dict(attn_mask=torch.ones(7, 7, dtype=torch.long)), "boolean"),
        (dict(document_ids=torch.zeros(2, 6, dtype=torch.long)), "document_ids must be"),
        (dict(document_ids=torch.zeros(2, 7)), "must be integers"),
        (dict(dropout_p=1.0), "dropout_p"),
        (dict(backend="flash"), "Unknown backend"),
    ],
)
def test_refusals(change, message):
    arguments = dict(zip(("query", "key", "value", "b", "n"), make(), strict=True))
    with pytest.raises(ValueError, match=message):
        ssa_hf.ssa_attention(**{**arguments, **change})


@settings(max_examples=15 if BACKENDS == ["triton"] else 60, deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("backend", BACKENDS)
def test_random_cases(backend, data):
    """Shapes, masks, causality and head counts drawn together."""
    draw = data.draw
    groups, repeats = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    q_len, k_len, dim = draw(st.integers(1, 20)), draw(st.integers(1, 40)), draw(st.integers(1, 33))
    inputs = make(
        batch=draw(st.integers(1, 2)),
        heads=groups * repeats,
        groups=groups,
        q_len=q_len,
        k_len=k_len,
        dim=dim,
        value_dim=draw(st.integers(1, 33)),
        spread=draw(st.sampled_from([0.1, 1.0, 3.0])),
        seed=draw(st.integers(0, 2**31)),
    )
    allowed = torch.rand(inputs[0].shape[0], 1, q_len, k_len, generator=torch.Generator().manual_seed(0)) > 0.5
    masked, causal = draw(st.booleans()), draw(st.booleans())
    mask = allowed if masked else None
    # With few keys and one of them dominating, a gradient is the small rest of larger terms that cancel: hence
    # the floor. Precision is tested above, structure here.
    check(
        inputs,
        3e-5,
        backend,
        floor=1.0,
        attn_mask=mask,
        is_causal=causal,
        oracle_arguments=dict(allowed=mask, is_causal=causal),
    )
