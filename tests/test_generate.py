"""generate with every kind of cache: cached equals uncached, a row of a padded batch equals itself alone."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from tests.conftest import tiny_model

DECODERS = ["llama", "nemotron", "mistral"]


def cached_logits(model, tokens, cache, prefill):
    """Feed a prefix, then one token at a time."""
    logits = [model(tokens[:, :prefill], past_key_values=cache, use_cache=True).logits]
    for position in range(prefill, tokens.shape[1]):
        logits.append(model(tokens[:, position : position + 1], past_key_values=cache, use_cache=True).logits)
    return torch.cat(logits, dim=1)


@torch.no_grad()
@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("prefill", [1, 4, 9])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_cached_equals_uncached(family, prefill, kind, tokens):
    """For mistral the window is 6 of 11 tokens, so both caches slide."""
    model = tiny_model(family)
    cache = (
        DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=16)
    )
    uncached = model(tokens, use_cache=False).logits
    torch.testing.assert_close(cached_logits(model, tokens, cache, prefill), uncached, atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_sliding_window_hides_old_tokens(tokens):
    """With a window of 6 in both of 2 layers, the last logits cannot depend on the first token of 13."""
    model = tiny_model("mistral")
    tokens = torch.cat((tokens, tokens[:, :2]), dim=1)
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 5) % 60 + 3
    before, after = model(tokens).logits, model(changed).logits
    assert not torch.allclose(before[:, 5], after[:, 5])
    assert torch.equal(before[:, -1], after[:, -1])


@torch.no_grad()
def test_sliding_window_without_the_mask_function(tokens, monkeypatch):
    from transformers.masking_utils import AttentionMaskInterface

    model = tiny_model("mistral")
    expected = model(tokens).logits
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, "ssa")
    torch.testing.assert_close(model(tokens).logits, expected)


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("cache", ["dynamic", "static", None])
def test_generate_agrees_with_argmax_of_full_forwards(family, cache, tokens):
    model = tiny_model(family)
    arguments = dict(use_cache=False) if cache is None else dict(cache_implementation=cache)
    generated = model.generate(tokens, max_new_tokens=6, do_sample=False, **arguments)
    expected = tokens
    for _ in range(6):
        with torch.no_grad():
            expected = torch.cat((expected, model(expected).logits[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(generated, expected)


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_left_padded_batch_equals_each_row_alone(family, cache, tokens):
    model = tiny_model(family)
    padded, mask = tokens.clone(), torch.ones_like(tokens)
    padded[0, :4], mask[0, :4] = 0, 0
    arguments = dict(
        max_new_tokens=6,
        do_sample=False,
        cache_implementation=cache,
        return_dict_in_generate=True,
        output_logits=True,
    )
    batch = model.generate(padded, attention_mask=mask, **arguments)
    for row, alone in ((0, tokens[:1, 4:]), (1, tokens[1:])):
        single = model.generate(alone, **arguments)
        assert torch.equal(batch.sequences[row, -6:], single.sequences[0, -6:])
        for ours, theirs in zip(batch.logits, single.logits, strict=True):
            torch.testing.assert_close(ours[row], theirs[0], atol=2e-5, rtol=1e-4)


def test_generate_returns_attentions(tokens):
    output = tiny_model("llama").generate(
        tokens, max_new_tokens=2, do_sample=False, return_dict_in_generate=True, output_attentions=True
    )
    assert output.attentions[1][0].shape == (2, 4, 1, 12)
    torch.testing.assert_close(output.attentions[1][0].sum(-1), torch.ones(2, 4, 1))
