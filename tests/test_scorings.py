"""Every scoring against its oracle: masks, GQA, gradients, extreme scores, precision; and in models."""

import copy
import dataclasses
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, DynamicCache, Trainer, TrainingArguments

import ssa_hf
from ssa_hf.diagnostics import attention_statistics
from ssa_hf.parameters import ScoringParameters
from ssa_hf.recipes.training import scoring_values
from ssa_hf.scorings import find_scoring
from tests.conftest import VOCAB, tiny_config, tiny_model
from tests.oracle import relative_rms
from tests.scoring_oracles import attention

NAMES = [scoring.name for scoring in ssa_hf.registered_scorings()]
VARIANTS = [(name, {}) for name in NAMES] + [("sa_softmax", {"normalised": False}), ("cosformer", {"max_length": 20})]
TRAINED = {"ssa": 2, "temperature": 1, "scalable_softmax": 1, "alpha_entmax": 1}
FAMILIES = ["llama", "nemotron", "roberta"]


def make(name, options, heads=4, dtype=torch.float32):
    """Return a scoring and its parameters, different ones for each head."""
    scoring = find_scoring(name).from_any(options)
    parameters = scoring.parameters(heads, torch.device("cpu"))
    with torch.no_grad():
        for value in parameters.parameters():
            value += torch.linspace(0, 0.4, heads)
    return scoring, parameters


def values_of(name, parameters):
    if name == "ssa":
        return {"b": parameters.b.tolist(), "n": parameters.n.tolist()}
    return {key: value.tolist() for key, value in parameters.named_parameters()}


def tensors(queries=7, keys=9, dtype=torch.float64, seed=0, batch=2):
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, 4, queries, 6), (batch, 2, keys, 6), (batch, 2, keys, 5)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) * 2 for shape in shapes]


def padding(keys=9):
    """Left padding in the first row, all of the second row padded, right padding in the third."""
    allowed = torch.ones(3, keys, dtype=torch.bool)
    allowed[0, :3] = False
    allowed[1] = False
    allowed[2, 6:] = False
    return allowed


def attend(scoring, parameters, query, key, value, allowed=None, is_causal=False, **arguments):
    """Attend under a padding mask (batch, keys) in the form the scoring takes it."""
    defaults = {"sliding_window": None, "scale": None, "dropout_p": 0.0, "softcap": None, "return_weights": False}
    arguments = defaults | arguments
    mask = allowed
    if allowed is not None and scoring.mask_dim == 4:
        mask = allowed[:, None, None].expand(-1, 1, query.shape[2], -1)
        if is_causal:
            mask, is_causal = mask & causal(query.shape[2], key.shape[2]), False
    return scoring.attend(parameters, query, key, value, attn_mask=mask, is_causal=is_causal, **arguments)


def causal(queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


@pytest.mark.parametrize("return_weights", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("queries", "is_causal"), [(9, True), (9, False), (4, True), (1, True)])
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_against_the_oracle(name, options, queries, is_causal, masked, return_weights):
    scoring, parameters = make(name, options)
    query, key, value = tensors(queries, batch=3)
    allowed = padding() if masked else None
    visible = torch.ones(3, queries, 9, dtype=torch.bool) if allowed is None else allowed[:, None].repeat(1, queries, 1)
    if is_causal:
        visible &= causal(queries, 9)
    output, weights = attend(
        scoring, parameters, query, key, value, allowed, is_causal=is_causal, return_weights=return_weights
    )
    values = values_of(name, parameters)
    expected, expected_weights = attention(name, query, key, value, visible, values, scoring.to_dict())
    # Trained values are float32, and α-entmax is found by bisection.
    assert relative_rms(output, expected) < 1e-6
    assert (weights is not None) == return_weights
    if return_weights:
        assert relative_rms(weights, expected_weights) < 1e-6
        assert (weights[~visible[:, None].expand_as(weights)] == 0).all()
    if masked:
        assert (output[1] == 0).all()


@pytest.mark.parametrize("length", [1, 127, 128, 300])
@pytest.mark.parametrize("is_causal", [True, False])
def test_cosformer_in_linear_time_equals_its_weights(length, is_causal):
    scoring, parameters = make("cosformer", {})
    query, key, value = tensors(length, length)
    linear, none = attend(scoring, parameters, query, key, value, is_causal=is_causal)
    formed, weights = attend(scoring, parameters, query, key, value, is_causal=is_causal, return_weights=True)
    assert none is None
    assert weights.shape == (2, 4, length, length)
    torch.testing.assert_close(linear, formed)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_gradients(name, options, is_causal):
    """Against finite differences in float64, with a fully masked row, for query, key, value and what is trained."""
    scoring, parameters = make(name, options)
    allowed = padding(5)
    inputs = [tensor.requires_grad_() for tensor in tensors(5, 5, batch=3)]
    trained = [value.detach().double().requires_grad_() for value in parameters.parameters()]
    names = [key for key, _ in parameters.named_parameters()]

    def run(query, key, value, *trained_values):
        module = copy.deepcopy(parameters)
        for attribute, trained_value in zip(names, trained_values, strict=True):
            del module._parameters[attribute]
            setattr(module, attribute, trained_value)
        return attend(scoring, module, query, key, value, allowed, is_causal=is_causal)[0]

    assert len(trained) == TRAINED.get(name, 0)
    # The package's α-entmax stops its bisection at float precision of its threshold.
    tolerance = 1e-3 if name == "alpha_entmax" else 1e-5
    assert torch.autograd.gradcheck(run, (*inputs, *trained), atol=tolerance, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [0.0, 1.0, 1e3])
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_extreme_scores_are_finite(name, options, factor, dtype):
    scoring, parameters = make(name, options)
    if options == {"normalised": False} and dtype == torch.float16:
        factor = min(factor, 1)  # its weights grow with the scores, beyond what float16 can hold
    query, key, value = (tensor.requires_grad_() for tensor in tensors(9, dtype=dtype, batch=3))
    output, _ = attend(scoring, parameters, query * factor, key, value, padding(), is_causal=True)
    assert output.dtype == dtype
    output.float().square().sum().backward()
    for tensor in (output, query.grad, key.grad, value.grad, *(value.grad for value in parameters.parameters())):
        assert torch.isfinite(tensor).all()


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_low_precision_accumulates_in_float32(name, options):
    scoring, parameters = make(name, options)
    low = tensors(9, dtype=torch.bfloat16)
    output, _ = attend(scoring, parameters, *low, is_causal=True)
    expected, _ = attend(scoring, parameters, *(tensor.double() for tensor in low), is_causal=True)
    assert relative_rms(output, expected) < 2**-8
    with torch.autocast("cpu", torch.bfloat16):
        autocast, _ = attend(scoring, parameters, *low, is_causal=True)
    assert torch.equal(autocast, output)


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_dropout_falls_on_the_weights(name, options):
    """With as many keys as channels and an identity for value, the output is the weights."""
    scoring, parameters = make(name, options)
    query, key, _ = tensors(20, 20)
    value = torch.eye(20, dtype=torch.float64).expand(2, 2, -1, -1)
    torch.manual_seed(0)
    dropped, weights = attend(scoring, parameters, query, key, value, dropout_p=0.25, return_weights=True)
    kept = (dropped != 0) & (weights != 0)
    torch.testing.assert_close(dropped[kept], weights[kept] / 0.75)
    assert abs(kept.sum() / (weights != 0).sum() - 0.75) < 0.05


def scoring_modules(model):
    return [module for module in model.modules() if isinstance(module, ScoringParameters)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", NAMES)
def test_models_save_load_and_switch(name, family, tokens, tmp_path):
    model = tiny_model(family, name)
    assert len(scoring_modules(model)) == 2
    with torch.no_grad():
        for module in scoring_modules(model):
            for value in module.parameters():
                value += 0.25
    logits = model(tokens).logits
    model.save_pretrained(tmp_path)
    auto = AutoModelForMaskedLM if family == "roberta" else AutoModelForCausalLM
    again = auto.from_pretrained(tmp_path)
    assert again.config._attn_implementation == name
    assert torch.equal(again.eval()(tokens).logits, logits)
    for module in scoring_modules(auto.from_pretrained(tmp_path, dtype=torch.bfloat16)):
        assert all(value.dtype == torch.float32 for value in module.parameters())
    # Away and back, the trained values are there again.
    model.set_attn_implementation("sdpa")
    softmax = model(tokens).logits
    assert not scoring_modules(model)
    model.set_attn_implementation("temperature" if name != "temperature" else "ssa")
    model.set_attn_implementation(name)
    assert torch.equal(model(tokens).logits, logits)
    assert torch.allclose(softmax, logits, atol=1e-5) == (name == "softmax")


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_of_another_scoring_warns_loudly(name, tmp_path, caplog):
    tiny_model("llama", "ssa").save_pretrained(tmp_path)
    caplog.clear()
    AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
    assert ("trained with ssa attention" in caplog.text) == (name != "ssa")


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_a_cache_and_left_padding_change_nothing(name, tokens):
    model = tiny_model("llama", name)
    whole = model(tokens, use_cache=False).logits
    cache = DynamicCache(config=model.config)
    parts = [model(tokens[:, part], past_key_values=cache).logits for part in (slice(0, 5), slice(5, 6), slice(6, 11))]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=2e-5, rtol=1e-4)
    padded = torch.cat([torch.zeros(2, 4, dtype=torch.long), tokens], 1)
    mask = (padded != 0).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(padded, attention_mask=mask, position_ids=positions).logits[:, 4:]
    torch.testing.assert_close(logits, whole, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", NAMES)
def test_generate(name, cache, tokens):
    model = tiny_model("llama", name)
    arguments = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache}
    if name == "cosformer" and cache == "static":
        with pytest.raises(ValueError, match="dynamic cache"):
            model.generate(tokens, **arguments)
        return
    generated = model.generate(tokens, **arguments)
    expected = tokens
    for _ in range(4):
        with torch.no_grad():
            expected = torch.cat((expected, model(expected).logits[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(generated, expected)


@pytest.mark.parametrize("family", ["llama", "roberta"])
@pytest.mark.parametrize("name", NAMES)
def test_200_steps_converge(name, family, tmp_path):
    """Repeated sequences are learned by heart, with Trainer, in training mode and with dropout where a model has it."""
    torch.manual_seed(0)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(3, VOCAB, (8, 12))]
    model = tiny_model(family, name, initializer_range=0.05)
    before = {key: value.clone() for key, value in model.state_dict().items() if f"{name}_norm" in key}
    arguments = TrainingArguments(
        str(tmp_path), max_steps=200, learning_rate=1e-2, per_device_train_batch_size=8, use_cpu=True, report_to="none",
        save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    batch = torch.stack([sample["input_ids"] for sample in data])
    losses = [model(batch, labels=batch).loss.item()]
    Trainer(model, arguments, train_dataset=data).train()
    losses.append(model.eval()(batch, labels=batch).loss.item())
    assert losses[0] > 3
    # Only a decoder's first token cannot be known from those before it.
    assert losses[1] < 0.3
    assert all((model.state_dict()[key] != value).all() for key, value in before.items())
    assert bool(before) == (name in TRAINED)


@pytest.mark.parametrize("name", NAMES)
def test_diagnostics_take_every_scoring(name, tokens):
    statistics = attention_statistics(tiny_model("llama", name), [{"input_ids": tokens}])
    assert statistics.largest_weight.shape == (2, 4)
    assert torch.isfinite(statistics.largest_weight).all()


@pytest.mark.parametrize("name", NAMES)
def test_logs_name_what_is_trained(name):
    values = scoring_values(tiny_model("llama", name))
    assert len(values) == TRAINED.get(name, 0) * 2 * 4
    assert all(key.startswith(f"{name}/") and "/layer" in key for key in values)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("temperature", {"temperature_init": 0.0}, "temperature_init must be above 0"),
        ("alpha_entmax", {"alpha_init": 2.5}, "between 1 and 2"),
        ("cosformer", {"max_length": 0}, "at least 1"),
        ("sigmoid", {"bias": 1.0}, "Unknown option.* bias in config.sigmoid_attention; known: none"),
        ("temperature", "hot", "must be a dict"),
    ],
)
def test_wrong_options_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        tiny_model("llama", name, **{f"{name}_attention": options})


def test_cosformer_refuses_what_it_cannot_do(tokens):
    with pytest.raises(ValueError, match="sequences up to 8"):
        tiny_model("llama", "cosformer", cosformer_attention={"max_length": 8})(tokens)
    with pytest.raises(ValueError, match="no sliding windows"):
        tiny_model("mistral", "cosformer")(tokens)
    packed = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]]).expand(2, -1)
    with pytest.raises(ValueError, match="packed"):
        tiny_model("llama", "cosformer")(tokens, position_ids=packed, use_cache=False)


def test_a_scoring_of_ones_own(tokens, tmp_path):
    """The README's example: options, a trained value a head, and everything else comes with it."""

    @ssa_hf.register_scoring
    @dataclasses.dataclass(frozen=True)
    class ReluAttention(ssa_hf.WeightScoring):
        name: ClassVar[str] = "relu_attention"
        source: ClassVar[str] = "this test"
        shift_init: float = 0.5

        def initial(self):
            return {"shift": self.shift_init}

        def weights(self, scores, allowed, parameters):
            positive = (scores + parameters["shift"]).relu()
            if allowed is not None:
                positive = positive.masked_fill(~allowed, 0)
            return positive / positive.sum(-1, keepdim=True).clamp(min=1e-6)

    try:
        model = tiny_model("llama", "relu_attention", relu_attention_attention={"shift_init": 0.75})
        assert [module.shift.tolist() for module in scoring_modules(model)] == [[0.75] * 4] * 2
        model(tokens, labels=tokens).loss.backward()
        assert all(module.shift.grad.abs().min() > 0 for module in scoring_modules(model))
        model.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(again.eval()(tokens).logits, model(tokens).logits)
        assert again.config.relu_attention_attention == {"shift_init": 0.75}
        ssa_hf.unregister()
        with pytest.raises(ValueError, match="relu_attention"):
            AutoModelForCausalLM.from_config(tiny_config("llama"), attn_implementation="relu_attention")
    finally:
        ssa_hf.unregister()
        ssa_hf.scorings._scorings.pop("relu_attention")
        ssa_hf.register()


def test_the_readme_lists_every_scoring_and_option():
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    for scoring in ssa_hf.registered_scorings():
        if scoring.name == "ssa":
            continue
        (row,) = [line for line in readme.splitlines() if line.startswith(f"| `{scoring.name}` |")]
        assert all(f"`{option}`" in row for option in scoring.from_any(None).to_dict())
        assert f"arxiv.org/abs/{scoring.source.split('arXiv ')[1].split(',')[0]}" in row


@pytest.mark.parametrize(("name", "message"), [("sdpa", "already"), ("eager", "already"), ("two words", "identifier")])
def test_names_that_cannot_be_are_refused(name, message):
    scoring = type("Mine", (ssa_hf.scorings.softmax.Softmax,), {"name": name})
    with pytest.raises(ValueError, match=message):
        ssa_hf.register_scoring(scoring)
    assert find_scoring(name) is None
