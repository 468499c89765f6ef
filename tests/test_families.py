"""One battery for every registered family: build, train, save, load, switch, pad, cache, generate, record."""

import pytest
import torch

import ssa_hf
from tests.conftest import norms
from tests.families import DECODERS, FAMILIES, SEQ2SEQ, build, inputs

every = pytest.mark.parametrize("family", list(FAMILIES))
decoders = pytest.mark.parametrize("family", DECODERS)


def attention_count(family):
    return 6 if family in SEQ2SEQ else 2


def logits(model, family, **options):
    with torch.no_grad():
        return model(**inputs(family, **options)).logits


@every
def test_every_head_is_trained(family):
    model = build(family)
    assert len(norms(model)) == attention_count(family)
    assert {norm.num_heads for norm in norms(model)} == ({4, 2} if family == "bart" else {4})
    model(**inputs(family)).loss.backward()
    for name, parameter in model.named_parameters():
        if "ssa_norm" in name:
            assert parameter.grad.isfinite().all(), name
            assert (parameter.grad != 0).all(), name


@every
def test_saving_and_loading(family, tmp_path):
    model = build(family)
    with torch.no_grad():
        for norm in norms(model):
            norm.raw_n += 0.25
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(logits(again, family), logits(model, family))
    half = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert all(norm.n.dtype == torch.float32 and (norm.n == 1.75).all() for norm in norms(half))


@every
def test_switching_both_ways(family):
    eager, ssa = build(family, "eager"), build(family)
    before = logits(eager, family)
    assert not torch.allclose(logits(ssa, family), before, atol=1e-2)
    ssa.set_attn_implementation("eager")
    assert torch.equal(logits(ssa, family), before)
    eager.set_attn_implementation("ssa")
    ssa.set_attn_implementation("ssa")
    assert torch.equal(logits(eager, family), logits(ssa, family))


@every
def test_the_control_scoring_is_the_models_own_softmax(family):
    """Masks, windows, biases, softcaps and scales reach a scoring as they reach the model's eager attention."""
    for padded in (False, True):
        mine, theirs = (logits(build(family, name), family, padded=padded) for name in ("softmax", "eager"))
        if padded and family not in (*SEQ2SEQ, "vit"):
            real = inputs(family, padded=True)["attention_mask"].bool()
            mine, theirs = mine[real], theirs[real]  # what a padded query gives means nothing
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=1e-4)


@every
def test_padding_changes_nothing(family):
    if family == "vit":
        pytest.skip("images are not padded")
    model, batch = build(family), inputs(family, padded=True)
    other = {**batch, "input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 7)}
    if family in SEQ2SEQ:
        batch["labels"] = other["labels"] = inputs(family)["labels"]
    if family in ("roberta", "xlm_roberta"):
        pytest.skip("RoBERTa numbers positions by the padding token")
    with torch.no_grad():
        first, second = model(**batch).logits, model(**other).logits
    real = slice(None) if family in SEQ2SEQ else batch["attention_mask"].bool()
    torch.testing.assert_close(first[real], second[real])


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(family, dtype):
    model = build(family, dtype=dtype)
    batch = inputs(family)
    if family == "vit":
        batch["pixel_values"] = batch["pixel_values"].to(dtype)
    output = model(**batch)
    assert output.logits.dtype == dtype
    output.loss.backward()
    assert all(norm.raw_n.grad.isfinite().all() for norm in norms(model))
    assert all(norm.raw_n.dtype == torch.float32 for norm in norms(model))


@every
def test_attention_weights(family):
    model = build(family)
    with torch.no_grad():
        output = model(**inputs(family), output_attentions=True)
    names = ("encoder_attentions", "decoder_attentions", "cross_attentions") if family in SEQ2SEQ else ("attentions",)
    maps = [weights for name in names for weights in getattr(output, name)]
    assert len(maps) == attention_count(family)
    for weights in maps:
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


@decoders
def test_a_token_sees_no_later_one(family):
    model, batch = build(family), inputs(family)
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][:, 6:] = 5
    with torch.no_grad():
        before, after = model(**batch).logits, model(**changed).logits
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", DECODERS + SEQ2SEQ)
def test_generate_with_a_cache_equals_without(family, cache):
    model, batch = build(family), inputs(family, padded=True)
    del batch["labels"]
    arguments = {"max_new_tokens": 6, "do_sample": False}
    cached = model.generate(**batch, **arguments, cache_implementation=cache)
    assert torch.equal(cached, model.generate(**batch, **arguments, use_cache=False))


def test_the_battery_is_complete():
    assert {family.name for family in ssa_hf.registered_families()} == set(FAMILIES)
