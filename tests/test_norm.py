import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssa_hf import PRESETS, SSAConfig, SSANorm
from ssa_hf.norm import KNEE


def norm(**options) -> SSANorm:
    return SSANorm(4, SSAConfig(**options))


@given(
    b=st.floats(min_value=KNEE, max_value=1e4, exclude_min=True, width=32),
    n=st.floats(min_value=1 + KNEE, max_value=1e4, exclude_min=True, width=32),
)
def test_initial_values_round_trip_exactly(b, n):
    module = norm(b_init=b, n_init=n)
    assert (module.b == b).all()
    assert (module.n == n).all()


@given(b=st.floats(min_value=1e-8, max_value=KNEE), n=st.floats(min_value=1.0, max_value=1 + KNEE))
def test_initial_values_near_the_bounds_round_trip_to_rounding(b, n):
    module = norm(b_init=b, n_init=n, learn_n=False)
    torch.testing.assert_close(module.b, torch.full((4,), b), rtol=5e-6, atol=0)
    torch.testing.assert_close(module.n, torch.full((4,), n), rtol=2e-7, atol=0)


@pytest.mark.parametrize("push", [1e-3, 1.0, 1e3, 1e20])
def test_bounds_hold_after_any_optimiser_step(push):
    module = norm()
    optimiser = torch.optim.SGD(module.parameters(), lr=push)
    for _ in range(20):
        optimiser.zero_grad()
        (module.b + module.n).sum().backward()
        optimiser.step()
        assert (module.b > 0).all()
        assert (module.n >= 1).all()


def test_crossing_the_knee_is_smooth():
    module = norm()
    for at in (KNEE, 1 + KNEE):
        raw = torch.tensor([at - 1e-3, at, at + 1e-3], dtype=torch.float32).repeat(2)[:4]
        with torch.no_grad():
            (module.raw_b if at < 1 else module.raw_n).copy_(raw)
        value = module.b if at < 1 else module.n
        gradient = torch.autograd.grad(value.sum(), module.raw_b if at < 1 else module.raw_n)[0]
        torch.testing.assert_close(gradient[:3], torch.ones(3), atol=0.02, rtol=0)
        torch.testing.assert_close(value[:3], raw[:3], atol=1e-4, rtol=0)


@pytest.mark.parametrize("convert", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.double()])
def test_stays_float32(convert):
    module = convert(torch.nn.ModuleDict({"ssa_norm": norm(n_init=1.5001), "linear": torch.nn.Linear(2, 2)}))
    assert module["linear"].weight.dtype != torch.float32
    assert module["ssa_norm"].raw_n.dtype == module["ssa_norm"].raw_b.dtype == torch.float32
    assert (module["ssa_norm"].n == torch.tensor(1.5001)).all()
    assert module["ssa_norm"].to("meta").raw_n.device.type == "meta"
    assert module["ssa_norm"].to_empty(device="cpu").raw_n.device.type == "cpu"


def test_per_layer_has_one_pair():
    module = norm(per_head=False)
    assert module.raw_b.shape == module.raw_n.shape == (1,)
    assert module.b.shape == module.n.shape == (4,)


def test_fixed_values_are_no_parameters():
    module = SSANorm(4, PRESETS["ssa-2"])
    assert list(module.parameters()) == []
    assert set(module.state_dict()) == {"raw_b", "raw_n"}
    assert (module.requires_grad_(True).n == 2).all()


def test_copies():
    module = norm(n_init=1.7)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(copied.n, module.n)
        assert copied.config == module.config
