"""Attention statistics: against the maps themselves, in closed form, and without a trace on the model."""

import math
import weakref

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from ssa_hf.diagnostics import MEASURES, attention_statistics, observed_weights, plot_attention_statistics

from .conftest import VOCAB, tiny_config, tiny_model


def batch(rows=3, length=9, seed=0):
    """Token ids with padding on the left of the second row, on the right of the third."""
    ids = torch.randint(2, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[1, :4] = 0
    mask[2, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def expected(model, inputs):
    """Compute the statistics from whole maps, query by query, in float64."""
    with torch.no_grad():
        maps = model(**inputs, output_attentions=True).attentions
    result = {name: torch.zeros(len(maps), maps[0].shape[1], dtype=torch.float64) for name in MEASURES}
    for layer, weights in enumerate(maps):
        for head in range(weights.shape[1]):
            rows: dict[str, list[float]] = {name: [] for name in MEASURES}
            for row, mask in enumerate(inputs["attention_mask"].bool()):
                real = mask.nonzero()[:, 0].tolist()
                for query in real:
                    w = weights[row, head, query].double()
                    w = w[w > 0]
                    entropy = -(w * w.log()).sum().item()
                    rows["entropy"].append(entropy)
                    rows["largest_weight"].append(w.max().item())
                    rows["context_mass"].append(1 - w.max().item())
                    rows["effective_tokens"].append(math.exp(entropy))
                    if query > real[0]:
                        rows["sink_rate"].append(float(weights[row, head, query, real[0]] > 0.3))
            for name, values in rows.items():
                result[name][layer, head] = sum(values) / len(values)
    return result


@pytest.mark.parametrize("family", ["llama", "nemotron", "roberta"])
@pytest.mark.parametrize("implementation", ["ssa", "eager", "sdpa"])
def test_statistics_are_those_of_the_maps(family, implementation):
    model = tiny_model(family, implementation).eval()
    statistics = attention_statistics(model, [batch()])
    if implementation == "sdpa":
        model.set_attn_implementation("eager")
    for name, values in expected(model, batch()).items():
        torch.testing.assert_close(getattr(statistics, name), values, rtol=1e-5, atol=1e-6)
    assert len(statistics.layers) == 2
    assert all("attn" in layer or "attention" in layer for layer in statistics.layers)


@pytest.mark.parametrize("implementation", ["ssa", "sdpa"])
def test_batches_are_streamed(implementation):
    model = tiny_model("llama", implementation)
    both = {name: torch.cat([value, value.flip(0)]) for name, value in batch().items()}
    parts = ({name: value[rows] for name, value in both.items()} for rows in (slice(0, 1), slice(1, 6)))
    whole, streamed = attention_statistics(model, [both]), attention_statistics(model, parts, progress=True)
    for name in MEASURES:
        torch.testing.assert_close(getattr(whole, name), getattr(streamed, name), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("implementation", ["ssa", "sdpa"])
def test_equal_scores_give_closed_forms(implementation):
    """With queries 0, the t-th position spreads its weight equally over t tokens."""
    model = tiny_model("llama", implementation)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.zero_()
    length = 7
    found = attention_statistics(model, [{"input_ids": torch.randint(2, VOCAB, (2, length))}])
    positions = range(1, length + 1)
    closed = {
        "entropy": sum(math.log(t) for t in positions) / length,
        "largest_weight": sum(1 / t for t in positions) / length,
        "context_mass": 1 - sum(1 / t for t in positions) / length,
        "effective_tokens": sum(positions) / length,
        "sink_rate": 2 / 6,  # 1/2 and 1/3 are above 0.3
    }
    for name, value in closed.items():
        torch.testing.assert_close(
            getattr(found, name), torch.full((2, 4), value, dtype=torch.float64), rtol=1e-5, atol=0
        )


@pytest.mark.parametrize("implementation", ["ssa", "sdpa"])
def test_no_map_outlives_its_layer(implementation):
    model, seen = tiny_model("llama", implementation), []

    def observe(_, weights):
        assert all(earlier() is None for earlier in seen)
        seen.append(weakref.ref(weights))

    with observed_weights(model, observe), torch.no_grad():
        model(**batch())
    assert len(seen) == 2


@pytest.mark.parametrize("implementation", ["ssa", "sdpa"])
def test_the_model_is_left_as_it_was(implementation):
    model = tiny_model("llama", implementation).train()
    before = model(**batch()).logits

    def stop(*_):
        assert not model.training
        raise RuntimeError("stop")

    with observed_weights(model, stop), pytest.raises(RuntimeError, match="stop"):
        model(**batch())
    assert model.training
    assert model.config._attn_implementation == implementation
    attention = model.model.layers[0].self_attn
    assert not attention._forward_hooks
    assert not attention._forward_pre_hooks
    assert torch.equal(model(**batch()).logits, before)


def test_dropout_is_not_measured():
    model = tiny_model("llama", "sdpa", attention_dropout=0.9).train()
    first, second = (attention_statistics(model, [batch()]) for _ in range(2))
    assert torch.equal(first.entropy, second.entropy)


def test_low_precision_is_measured_in_float32():
    found = attention_statistics(tiny_model("llama", "ssa", dtype=torch.bfloat16), [batch()])
    reference = attention_statistics(tiny_model("llama", "ssa"), [batch()])
    torch.testing.assert_close(found.entropy, reference.entropy, rtol=0.05, atol=0)


def test_what_cannot_be_measured_is_refused(monkeypatch):
    config = T5Config(vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(ValueError, match="get_encoder"):
        attention_statistics(T5ForConditionalGeneration(config), [batch()])
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="no batches"):
        attention_statistics(model, [])
    with pytest.raises(ValueError, match=r"\(batch, length\)"):
        attention_statistics(model, [{**batch(), "attention_mask": torch.ones(3, 1, 9, 9)}])
    attention = model.model.layers[0].self_attn
    monkeypatch.setattr(attention, "forward", lambda hidden_states, **kwargs: (hidden_states, None))
    with pytest.raises(ValueError, match="does not return its attention weights"):
        attention_statistics(model, [batch()])


def test_heat_maps_and_json(tmp_path):
    models = {name: attention_statistics(tiny_model("llama", name), [batch()]) for name in ("ssa", "sdpa")}
    plot_attention_statistics(models, tmp_path / "attention.png")
    assert (tmp_path / "attention.png").stat().st_size > 10_000
    content = models["ssa"].to_dict()
    assert content["layers"] == models["ssa"].layers
    assert content["entropy"] == models["ssa"].entropy.tolist()
    assert tiny_config("llama").num_attention_heads == len(content["sink_rate"][0])
