import itertools

import pytest
import torch

import ssa_hf


def test_identity_with_the_papers_formula():
    x = torch.linspace(-50, 50, 1001, dtype=torch.float64)
    b, n = torch.tensor(0.8, dtype=torch.float64), torch.tensor(1.5, dtype=torch.float64)
    torch.testing.assert_close(ssa_hf.ssa_logits(x, b, n).exp(), (1 + b * x.abs()) ** (x.sign() * n))


def test_derivatives_by_formula_with_zero():
    x = torch.tensor([-3.0, -1e-3, 0.0, 1e-3, 7.0], dtype=torch.float64, requires_grad=True)
    b = torch.full_like(x, 0.8).requires_grad_()
    n = torch.full_like(x, 1.5).requires_grad_()
    ssa_hf.ssa_logits(x, b, n).sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(x.grad, n * b / (1 + b * x.abs()))
        torch.testing.assert_close(n.grad, x.sign() * torch.log1p(b * x.abs()))
        torch.testing.assert_close(b.grad, n * x / (1 + b * x.abs()))
    assert x.grad[2] == 1.5 * 0.8


def test_gradcheck_with_zero():
    x = torch.tensor([[-2.0, 0.0, 0.3], [0.0, 4.0, -0.1]], dtype=torch.float64, requires_grad=True)
    b = torch.tensor([0.8], dtype=torch.float64, requires_grad=True)
    n = torch.tensor([1.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ssa_hf.ssa_logits, (x, b, n), eps=1e-7, atol=1e-5)


def test_softmax_is_the_limit_at_rate_one_over_m():
    """b = 1/m, n = m: the distance to softmax falls like 1/m."""
    x = torch.randn(64, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2
    ms = [10, 100, 1000, 10000]
    distance = [
        (ssa_hf.ssa_logits(x, torch.tensor(1 / m), torch.tensor(float(m))).softmax(-1) - x.softmax(-1))
        .abs()
        .max()
        .item()
        for m in ms
    ]
    for previous, current in itertools.pairwise(distance):
        assert previous / current == pytest.approx(10, rel=0.35)
    assert distance[-1] * ms[-1] == pytest.approx(distance[-2] * ms[-2], rel=0.02)
