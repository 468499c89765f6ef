"""Saving and loading: nothing about b and n is lost or made up in silence."""

import copy
import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

import ssa_hf
from tests.conftest import norms, tiny_config, tiny_model

FAMILIES = ["llama", "nemotron", "roberta"]


def auto(family):
    return AutoModelForMaskedLM if family == "roberta" else AutoModelForCausalLM


def trained(family, **changes):
    """An SSA model whose b and n are no longer the initial ones."""
    model = tiny_model(family, **changes)
    with torch.no_grad():
        for index, norm in enumerate(norms(model)):
            norm.raw_n.add_(torch.arange(1, 1 + norm.raw_n.numel()) * 0.01 + index)
            norm.raw_b.add_(torch.arange(1, 1 + norm.raw_b.numel()) * 0.003)
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_shard_size", ["50GB", "20KB"])
def test_round_trip_with_no_argument(family, max_shard_size, tokens, tmp_path):
    model = trained(family)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    if max_shard_size == "20KB":
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert json.loads((tmp_path / "config.json").read_text())["attn_implementation"] == "ssa"
    loaded, info = auto(family).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.config._attn_implementation == "ssa"
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_round_trip_keeps_b_and_n_in_float32(family, dtype, tokens, tmp_path):
    model = trained(family, dtype=dtype)
    assert model.dtype == dtype
    model.save_pretrained(tmp_path)
    for how in (dict(), dict(dtype=dtype), dict(dtype="auto"), dict(dtype=torch.float32)):
        loaded = auto(family).from_pretrained(tmp_path, **how)
        for ours, theirs in zip(norms(loaded), norms(model), strict=True):
            assert ours.raw_n.dtype == ours.raw_b.dtype == torch.float32
            assert torch.equal(ours.raw_n, theirs.raw_n)
            assert torch.equal(ours.raw_b, theirs.raw_b)
    halved = auto(family).from_pretrained(tmp_path, dtype=dtype)
    assert torch.equal(halved(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("device_map", [{"": "cpu"}, "cpu", "auto"])
def test_device_map(device_map, tokens, tmp_path):
    model = trained("llama")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map)
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_disk_offload(tokens, tmp_path):
    model = trained("llama")
    model.save_pretrained(tmp_path / "model")
    device_map = {
        "model.embed_tokens": "cpu",
        "lm_head": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
    }
    device_map |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_round_trip_of_a_copy(family, copier, tokens, tmp_path):
    model = copier(trained(family))
    expected = trained(family)(tokens).logits
    assert torch.equal(model(tokens).logits, expected)
    model.save_pretrained(tmp_path)
    assert torch.equal(auto(family).from_pretrained(tmp_path)(tokens).logits, expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [None, "gpt2", {"n_init": 1.75, "b_init": 0.3, "learn_b": False, "per_head": False}]
)
def test_softmax_checkpoint_as_ssa_has_exactly_the_initial_values(family, dtype, options, tokens, tmp_path):
    softmax = tiny_model(family, "sdpa", dtype=dtype)
    softmax.save_pretrained(tmp_path)
    argument = {} if options is None else {"ssa": options}
    model = auto(family).from_pretrained(tmp_path, attn_implementation="ssa", **argument)
    expected = ssa_hf.SSAConfig.from_any(options)
    assert model.config.ssa == expected.to_dict()
    assert len(norms(model)) == 2
    for norm in norms(model):
        assert norm.config == expected
        assert (norm.n == torch.tensor(expected.n_init)).all()
        assert (norm.b == torch.tensor(expected.b_init)).all()
        assert isinstance(norm.raw_b, torch.nn.Parameter) == expected.learn_b
    for name, value in softmax.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    assert torch.isfinite(model(tokens).logits).all()


def test_base_model_and_head_exchange_checkpoints(tokens, tmp_path):
    model = trained("llama")
    model.save_pretrained(tmp_path / "head")
    base = AutoModel.from_pretrained(tmp_path / "head")
    assert torch.equal(base(tokens).last_hidden_state, model.model(tokens).last_hidden_state)
    base.save_pretrained(tmp_path / "base")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert torch.equal(norms(again)[1].raw_n, norms(model)[1].raw_n)


@pytest.mark.parametrize("family", FAMILIES)
def test_sdpa_on_an_ssa_checkpoint_warns_loudly(family, tmp_path, caplog):
    trained(family).save_pretrained(tmp_path)
    auto(family).from_pretrained(tmp_path)
    assert "LOST" not in caplog.text
    model = auto(family).from_pretrained(tmp_path, attn_implementation="sdpa")
    assert norms(model) == []
    (record,) = [record for record in caplog.records if record.name == "ssa_hf.checkpoint"]
    assert record.levelname == "WARNING"
    assert "the learned parameters of 2 attention modules" in record.getMessage()
    assert "are LOST" in record.getMessage()
    # Saved now, it is a softmax checkpoint.
    model.save_pretrained(tmp_path / "softmax")
    assert "attn_implementation" not in json.loads((tmp_path / "softmax" / "config.json").read_text())


@pytest.mark.parametrize("layers", [1, 3])
def test_layer_count_that_does_not_match_is_an_error(layers, tmp_path):
    trained("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"ssa parameters do not match LlamaForCausalLM"):
        AutoModelForCausalLM.from_pretrained(tmp_path, num_hidden_layers=layers)


@pytest.mark.parametrize(
    "change", [dict(num_attention_heads=2, num_key_value_heads=2, head_dim=16), dict(ssa="nemotron")]
)
def test_head_count_that_does_not_match_is_an_error(change, tmp_path):
    trained("llama").save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="size"):
        AutoModelForCausalLM.from_pretrained(tmp_path, **change)


def test_one_lost_tensor_is_an_error(tmp_path):
    trained("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.self_attn.ssa_norm.raw_n"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"of 4 expected tensors 3 are there.*layers\.1\.self_attn\.ssa_norm\.raw_n"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_machine_without_the_plugin_refuses(tmp_path):
    trained("llama").save_pretrained(tmp_path)
    script = f"from transformers import AutoModelForCausalLM as A; A.from_pretrained({str(tmp_path)!r})"
    environment = {**os.environ, "SSA_HF_AUTOLOAD": "0"}
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert process.returncode != 0
    assert 'Specified `attn_implementation="ssa"` is not supported' in process.stderr


def test_config_round_trips_through_dict_and_json(tmp_path):
    model = trained("nemotron")
    again = type(model.config).from_dict(model.config.to_dict())
    assert again._attn_implementation == "ssa"
    assert again.ssa == model.config.ssa
    model.config.save_pretrained(tmp_path)
    rebuilt = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert len(norms(rebuilt)) == 2
    assert "attn_implementation" not in tiny_config("nemotron", attn_implementation="sdpa").to_dict()


@pytest.mark.parametrize("options", ["ssa-2", ssa_hf.SSAConfig(n_init=2.5), {"preset": "nemotron", "n_init": 3.0}])
def test_every_form_of_options_is_saved_as_a_plain_dict(options, tmp_path):
    config = tiny_config("llama")
    config.ssa = options
    model = AutoModelForCausalLM.from_config(config, attn_implementation="ssa")
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["ssa"] == ssa_hf.SSAConfig.from_any(options).to_dict()
    assert norms(AutoModelForCausalLM.from_pretrained(tmp_path))[0].config == ssa_hf.SSAConfig.from_any(options)


def test_bad_options_are_refused_when_the_model_is_built():
    config = tiny_config("llama")
    config.ssa = {"n_init": 0.5}
    with pytest.raises(ValueError, match="n_init >= 1"):
        AutoModelForCausalLM.from_config(config, attn_implementation="ssa")
