"""Models with attn_implementation="ssa": construction, switching, forward, causality, weights."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import ssa_hf
from tests.conftest import VOCAB, norms, tiny_config, tiny_model
from tests.oracle import oracle, relative_rms
from tests.softmax_run import run

FAMILIES = ["llama", "nemotron", "roberta"]
DECODERS = ["llama", "nemotron"]


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_backward(family, tokens):
    model = tiny_model(family)
    assert len(norms(model)) == 2
    model(tokens, labels=tokens).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        if "ssa_norm" in name:
            assert (parameter.grad != 0).all(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_first_layer_against_the_oracle(family, tokens):
    """Hook the projections of a real model, compute attention with the oracle, compare with what the model used."""
    model = tiny_model(family)
    seen = {}
    interface = sys.modules["ssa_hf.scorings.ssa"]
    original = interface.attend

    def spy(*tensors, **arguments):
        output, weights = original(*tensors, **arguments)
        seen.setdefault("call", (tensors, arguments, output))
        return output, weights

    interface.attend = spy
    try:
        model(tokens)
    finally:
        interface.attend = original
    tensors, arguments, output = seen["call"]
    expected = oracle(*tensors, is_causal=family != "roberta", scale=arguments["scale"])
    assert arguments["is_causal"] == (family != "roberta")
    assert relative_rms(output.detach(), expected.detach()) < 1e-6


def test_every_way_to_build_gives_the_same_model(tokens):
    by_argument = tiny_model("llama")
    config = tiny_config("llama")
    config._attn_implementation = "ssa"
    torch.manual_seed(0)
    direct = LlamaForCausalLM(config).eval()
    torch.manual_seed(0)
    by_config = LlamaForCausalLM(tiny_config("llama", attn_implementation="ssa")).eval()
    torch.manual_seed(0)
    switched = LlamaForCausalLM(tiny_config("llama")).eval()
    switched.set_attn_implementation("ssa")
    expected = by_argument(tokens).logits
    for model in (direct, by_config, switched):
        assert model.config._attn_implementation == "ssa"
        assert model.config.ssa == ssa_hf.SSAConfig().to_dict()
        assert torch.equal(model(tokens).logits, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_twins_share_their_initial_weights(family):
    ssa, softmax = tiny_model(family, "ssa"), tiny_model(family, "sdpa")
    others = {name: value for name, value in ssa.state_dict().items() if "ssa_norm" not in name}
    assert others.keys() == softmax.state_dict().keys()
    assert all(torch.equal(value, softmax.state_dict()[name]) for name, value in others.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_switching_there_and_back(family, tokens, caplog):
    softmax = tiny_model(family, "sdpa")
    before = softmax(tokens).logits
    softmax.set_attn_implementation("ssa")
    with torch.no_grad():
        norms(softmax)[0].raw_n.add_(0.5)
    as_ssa = softmax(tokens).logits
    parameters = [norm.raw_n for norm in norms(softmax)]
    assert not torch.allclose(as_ssa, before)
    softmax.set_attn_implementation("sdpa")
    assert "no longer uses ssa attention: the trained parameters of 2 attention modules" in caplog.text
    assert norms(softmax) == []
    assert not any("ssa" in name for name in softmax.state_dict())
    assert torch.equal(softmax(tokens).logits, before)
    softmax.set_attn_implementation("ssa")
    assert torch.equal(softmax(tokens).logits, as_ssa)
    assert all(a is b.raw_n for a, b in zip(parameters, norms(softmax), strict=True))


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("with_mask", [True, False])
def test_future_tokens_never_change_earlier_logits(family, with_mask, tokens):
    model = tiny_model(family)
    mask = torch.ones_like(tokens) if with_mask else None
    changed = tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 17) % (VOCAB - 3) + 3
    before, after = (model(ids, attention_mask=mask).logits for ids in (tokens, changed))
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


@pytest.mark.parametrize("family", DECODERS)
def test_causal_without_the_mask_function(family, tokens, monkeypatch):
    """A missing mask function makes transformers pass None: causality must not go with it."""
    from transformers.masking_utils import AttentionMaskInterface

    model = tiny_model(family)
    expected = model(tokens).logits
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, "ssa")
    assert torch.equal(model(tokens).logits, expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(family, side, tokens):
    model = tiny_model(family)
    width = tokens.shape[1] + 4
    padded = torch.zeros(2, width, dtype=torch.long)
    mask = torch.zeros(2, width, dtype=torch.long)
    real = slice(4, None) if side == "left" else slice(None, -4)
    padded[:, real], mask[:, real] = tokens, 1
    positions = {} if family == "roberta" else {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    got = model(padded, attention_mask=mask, **positions).logits
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got[:, real], model(tokens).logits, atol=1e-4, rtol=1e-4)


def test_left_padding_has_finite_gradients(tokens):
    model = tiny_model("llama")
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    model(tokens, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100)).loss.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_output_attentions(family, tokens):
    model = tiny_model(family)
    mask = torch.ones_like(tokens)
    mask[0, -3:] = 0
    plain = model(tokens, attention_mask=mask)
    output = model(tokens, attention_mask=mask, output_attentions=True)
    assert plain.get("attentions") is None
    # The weights come from the reference backend, the plain logits from the fused one.
    torch.testing.assert_close(plain.logits, output.logits, atol=1e-4, rtol=1e-4)
    assert len(output.attentions) == 2
    for weights in output.attentions:
        assert weights.shape == (2, 4, 11, 11)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 11))
        assert (weights[0, :, :, -3:] == 0).all()
        if family != "roberta":
            assert (weights.triu(1) == 0).all()
    softmax = tiny_model(family, "eager")(tokens, attention_mask=mask, output_attentions=True)
    assert not torch.allclose(softmax.attentions[0], output.attentions[0], atol=1e-2)


def test_cross_attention_in_a_decoder_roberta(tokens):
    model = tiny_model("roberta", is_decoder=True, add_cross_attention=True)
    assert len(norms(model)) == 4
    encoded = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    output = model(tokens, encoder_hidden_states=encoded, encoder_attention_mask=mask, output_attentions=True)
    crossed = output.cross_attentions[0]
    assert crossed.shape == (2, 4, 11, 5)
    assert (crossed[0, :, :, 3:] == 0).all()
    assert (output.attentions[0].triu(1) == 0).all()
    encoded[0, 3:] = 50.0
    again = model(tokens, encoder_hidden_states=encoded, encoder_attention_mask=mask)
    torch.testing.assert_close(again.logits, output.logits)


def test_parameter_count_of_the_papers_model():
    config = tiny_config(
        "nemotron",
        vocab_size=50_000,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
    )
    config.ssa = "nemotron"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="ssa")
    assert model.num_parameters() == 113_935_872 + 12  # one n per layer; b is fixed


@pytest.mark.parametrize("family", FAMILIES)
def test_softmax_models_are_bit_for_bit_those_without_the_plugin(family, tokens, tmp_path):
    """A fresh process without ssa_hf computes the same logits, gradients and config."""
    script = f"""
import sys, torch
from tests.softmax_run import run
torch.save(run({family!r}), {str(tmp_path / "plain.pt")!r})
assert "ssa_hf" not in sys.modules
"""
    environment = {**os.environ, "SSA_HF_AUTOLOAD": "0"}
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[1], env=environment)
    with_plugin, without = run(family), torch.load(tmp_path / "plain.pt")
    assert with_plugin.keys() == without.keys()
    for name, value in without.items():
        assert value == with_plugin[name] if isinstance(value, str) else torch.equal(value, with_plugin[name]), name
