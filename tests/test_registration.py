"""Registering, unregistering, and the registry of families."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    AlbertConfig,
    AutoModel,
    AutoModelForCausalLM,
    GraniteConfig,
    MambaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaForCausalLM

import ssa_hf
from ssa_hf import cli
from ssa_hf.families import find_family
from tests.conftest import VOCAB, norms, tiny_config, tiny_model


@pytest.fixture
def registered_again():
    yield
    ssa_hf.register()


def state() -> dict[str, object]:
    found: dict[str, object] = {
        f"{cls.__name__}.{name}": value
        for cls in (PreTrainedModel, PreTrainedConfig, LlamaAttention, LlamaForCausalLM)
        for name, value in vars(cls).items()
    }
    return found | {
        "attention": dict(AttentionInterface._global_mapping),
        "mask": dict(AttentionMaskInterface._global_mapping),
    }


def test_unregister_restores_everything(registered_again):
    tiny_model("llama")  # so that transformers has filled its own caches
    ssa_hf.unregister()
    without = state()
    assert "ssa" not in without["attention"]
    assert not any(getattr(value, "__module__", "") == "ssa_hf.registration" for value in without.values())
    ssa_hf.unregister()
    assert state() == without
    with pytest.raises(ValueError, match='attn_implementation="ssa"` is not supported'):
        tiny_model("llama")
    ssa_hf.register()
    during = state()
    assert during != without
    ssa_hf.register()
    assert state() == during
    ssa_hf.unregister()
    assert state() == without


def test_threads_register_and_unregister(registered_again):
    ssa_hf.unregister()
    without = state()
    ssa_hf.register()
    during = state()

    def work(index):
        for step in range(200):
            (ssa_hf.register if (step + index) % 2 else ssa_hf.unregister)()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ssa_hf.register()
    assert state().keys() == during.keys()
    ssa_hf.unregister()
    assert state() == without


def test_a_model_outlives_unregister_only_with_an_error(tokens, registered_again):
    model = tiny_model("llama")
    ssa_hf.unregister()
    with pytest.raises(KeyError, match="ssa"):
        model(tokens)


def test_unknown_attention_class_is_named_with_the_remedy():
    config = AlbertConfig(
        vocab_size=64,
        embedding_size=8,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=48,
    )
    with pytest.raises(
        ValueError, match=r'AlbertAttention; known families: .*\n    ssa_hf\.register_family\("my-family"'
    ):
        AutoModel.from_config(config, attn_implementation="ssa")
    model = AutoModel.from_config(config, attn_implementation="sdpa")
    with pytest.raises(ValueError, match="AlbertAttention"):
        model.set_attn_implementation("ssa")
    assert model.config._attn_implementation == "sdpa"
    model(torch.ones(1, 4, dtype=torch.long))


def test_model_without_attention_is_refused():
    config = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4)
    with pytest.raises(ValueError, match="MambaModel has no attention module"):
        AutoModel.from_config(config, attn_implementation="ssa")


class OwnSoftmaxAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.projection = config, nn.Linear(4, 4)


# Its module (this one) imports AttentionInterface, the class; an instance is what forward would use.
class OwnConfig(PreTrainedConfig):
    num_attention_heads = 2


class OwnModel(PreTrainedModel):
    config: OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.attention = OwnSoftmaxAttention(config)
        self.post_init()


def test_attention_that_bypasses_the_interface_is_refused():
    ssa_hf.register_family("own", OwnSoftmaxAttention)
    try:
        with pytest.raises(ValueError, match="does not go through transformers' ALL_ATTENTION_FUNCTIONS"):
            OwnModel(OwnConfig(attn_implementation="ssa"))
    finally:
        ssa_hf.families._families.pop("own")


def test_writing_the_config_of_a_live_model_is_refused_at_the_first_forward(tokens):
    model = tiny_model("llama", "sdpa")
    model.config._attn_implementation = "ssa"
    with pytest.raises(ValueError, match="LlamaAttention has no ssa parameters"):
        model(tokens)


def test_what_ssa_cannot_do_is_refused():
    attention = tiny_model("llama").model.layers[0].self_attn
    tensors = (torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), None)
    with pytest.raises(ValueError, match="attention sinks"):
        ssa_hf.attention.attention_forward(ssa_hf.SSAConfig, attention, *tensors, s_aux=torch.ones(4))
    with pytest.raises(ValueError, match="4-D attention mask"):
        ssa_hf.attention.attention_forward(ssa_hf.SSAConfig, attention, *tensors[:3], torch.ones(1, 3))


class MyAttention(LlamaAttention):
    pass


@pytest.fixture
def granite():
    """The README's example of a model outside the shipped list: register it, and build a tiny one."""

    def build(**options):
        ssa_hf.register_family("granite", "transformers.models.granite.modeling_granite.GraniteAttention", **options)
        sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        config = GraniteConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
        return AutoModelForCausalLM.from_config(config, attn_implementation="ssa")

    yield build
    ssa_hf.families._families.pop("granite")


def test_registry(granite, tokens):
    model = granite()
    assert "granite" in {family.name for family in ssa_hf.registered_families()}
    assert find_family(MyAttention).name == "llama"
    assert find_family(nn.Linear) is None
    assert [norm.num_heads for norm in norms(model)] == [4, 4]
    assert torch.isfinite(model(tokens, labels=tokens).loss)
    with pytest.raises(ValueError, match=r"module\.Class"):
        ssa_hf.register_family("bad", "LlamaAttention")


def test_num_heads_of_a_family(granite):
    model = granite(num_heads=lambda attention: attention.q_proj.out_features // attention.head_dim)
    assert norms(model)[0].num_heads == 4


def test_the_readme_has_the_table_of_families(capsys):
    assert cli.main(["families"]) == 0
    assert capsys.readouterr().out in (Path(__file__).parents[1] / "README.md").read_text()


def test_import_does_not_load_model_code():
    script = "import sys, ssa_hf; sys.exit(any('transformers.models.nemotron' in m for m in sys.modules))"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_public_api():
    assert sorted(ssa_hf.__all__) == [
        "Family",
        "PRESETS",
        "SSAConfig",
        "SSANorm",
        "Scoring",
        "WeightScoring",
        "__version__",
        "register",
        "register_family",
        "register_scoring",
        "registered_families",
        "registered_scorings",
        "ssa_attention",
        "ssa_logits",
        "unregister",
    ]
    assert AutoModelForCausalLM.from_config(tiny_config("llama"), attn_implementation="ssa") is not None
