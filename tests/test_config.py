import json
import math

import pytest

from ssa_hf import PRESETS, SSAConfig


def test_defaults_and_presets():
    assert SSAConfig() == SSAConfig(1.5, 0.8, True, True, True)
    assert PRESETS["nemotron"] == SSAConfig(1.5, 0.8, learn_n=True, learn_b=False, per_head=False)
    assert PRESETS["ssa-1.5"] == SSAConfig(1.5, 0.8, learn_n=False, learn_b=False)
    assert PRESETS["ssa-2"] == SSAConfig(2.0, 0.8, learn_n=False, learn_b=False)
    assert PRESETS["gpt2"] == SSAConfig(math.exp(0.4), math.e)


@pytest.mark.parametrize("preset", PRESETS)
def test_json_round_trip(preset):
    config = PRESETS[preset]
    assert SSAConfig.from_any(json.loads(json.dumps(config.to_dict()))) == config


def test_all_forms():
    assert SSAConfig.from_any(None) == SSAConfig()
    assert SSAConfig.from_any("gpt2") == PRESETS["gpt2"]
    assert SSAConfig.from_any({"preset": "nemotron", "per_head": True}) == SSAConfig(learn_b=False)
    config = SSAConfig(n_init=3.0)
    assert SSAConfig.from_any(config) is config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("ssa-3", "Unknown SSA preset 'ssa-3'; known: nemotron"),
        ({"preset": ["x"]}, "Unknown SSA preset"),
        ({"n": 2}, "Unknown SSA option.* n in config.ssa"),
        ({"n_init": 0.9}, "n_init >= 1"),
        ({"n_init": 1.0}, "gradient vanishes"),
        ({"b_init": 0.0}, "b_init > 0"),
        ({"b_init": -1}, "b_init > 0"),
        ({"b_init": float("nan")}, "finite"),
        ({"n_init": float("inf")}, "finite"),
        ({"n_init": "2"}, "finite number"),
        ({"learn_n": 1}, "true or false"),
        (3, "must be a dict"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        SSAConfig.from_any(options)
