"""The paper's theorems as checks: context mass decays exponentially in softmax, as a power in SSA."""

import json

import pytest
import torch
from torch.nn import functional as F

import ssa_hf
from ssa_hf.recipes import saturation

LARGE = torch.logspace(4, 6, 20, dtype=torch.float64)


def attend(raw, b=None, n=None):
    """Return the weights (factors, keys) that attention itself gives to raw scores, of SSA or of softmax."""
    query = torch.ones(len(raw), 1, 1, 1, dtype=raw.dtype)
    key = raw[:, None, :, None]
    value = torch.eye(raw.shape[1], dtype=raw.dtype).expand(len(raw), 1, -1, -1)
    if b is None:
        return F.scaled_dot_product_attention(query, key, value, scale=1.0)[:, 0, 0]
    return ssa_hf.ssa_attention(query, key, value, b, n, scale=1.0)[:, 0, 0]


def slope(x, y):
    return torch.linalg.lstsq(torch.stack([x, torch.ones_like(x)], -1), y[:, None]).solution[0, 0].item()


@pytest.mark.parametrize(("b", "n"), [(0.8, 1.5), (2.718, 1.49), (0.3, 2.0), (5.0, 1.0)])
@pytest.mark.parametrize(("others", "power"), [((0.0, -1.0), 1), ((-0.5, -1.0), 2)])
def test_magnified_scores_lose_context_as_a_power(b, n, others, power):
    """Theorem 1: λ^-n for a runner-up at 0, λ^-2n for a negative one."""
    weights = attend(LARGE[:, None] * torch.tensor((2.0, *others), dtype=torch.float64), b, n)
    found = slope(LARGE.log(), weights[:, 1:].sum(-1).log())
    assert found == pytest.approx(-power * n, rel=0.02)


@pytest.mark.parametrize(("b", "n"), [(0.8, 1.5), (2.718, 1.49), (0.3, 2.0)])
def test_magnified_scores_keep_the_context_of_a_positive_runner_up(b, n):
    """The weights of x1 > x2 > 0 tend to the constant ratio (x2/x1)^n."""
    weights = attend(LARGE[:, None] * torch.tensor((2.0, 1.0, -1.0), dtype=torch.float64), b, n)
    assert torch.allclose(weights[:, 1] / weights[:, 0], torch.full_like(LARGE, 0.5**n), rtol=0.02)


@pytest.mark.parametrize(("b", "n"), [(0.8, 1.5), (2.718, 1.49), (0.3, 2.0)])
def test_one_dominating_score_takes_context_as_a_power(b, n):
    """Theorem 2."""
    others = torch.tensor((1.0, 0.0, -2.0), dtype=torch.float64).expand(len(LARGE), -1)
    weights = attend(torch.cat([LARGE[:, None], others], -1), b, n)
    assert slope(LARGE.log(), weights[:, 1:].sum(-1).log()) == pytest.approx(-n, rel=0.02)


def test_softmax_loses_context_exponentially():
    factors = torch.linspace(10, 100, 20, dtype=torch.float64)
    magnified = attend(factors[:, None] * torch.tensor((2.0, 1.0, -1.0), dtype=torch.float64))
    assert slope(factors, magnified[:, 1:].sum(-1).log()) == pytest.approx(-1.0, rel=0.02)
    others = torch.tensor((0.5, -1.0), dtype=torch.float64).expand(len(factors), -1)
    dominated = attend(torch.cat([factors[:, None], others], -1))
    assert slope(factors, dominated[:, 1:].sum(-1).log()) == pytest.approx(-1.0, rel=0.02)


@pytest.mark.parametrize("n", [1.0, 1.5, 3.0])
def test_the_command_fits_what_it_derives(tmp_path, capsys, n):
    assert saturation.main(["--n", str(n), "--b", "0.5", "--output_dir", str(tmp_path)]) == 0
    rates = json.loads((tmp_path / "saturation.json").read_text())["rates"]
    assert len(rates) == 4
    for row in rates.values():
        assert row["ssa"] == pytest.approx(row["ssa_derived"], rel=0.02, abs=0.02)
        assert row["softmax"] == pytest.approx(row["softmax_derived"], rel=0.02)
    assert (tmp_path / "saturation.png").stat().st_size > 10_000
    assert "one score" in capsys.readouterr().out


def test_the_command_refuses_what_is_not_ssa(tmp_path, capsys):
    assert saturation.main(["--n", "0.5", "--output_dir", str(tmp_path / "none")]) == 2
    assert "n >= 1" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
