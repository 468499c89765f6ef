"""The in-context learning recipe: its tasks, its model, twins, resuming, and what it reports."""

import json
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import set_seed

from ssa_hf.recipes.icl.__main__ import main
from ssa_hf.recipes.icl.evaluation import attention_map, conditions, error_curves, least_squares, reference_curves
from ssa_hf.recipes.icl.model import InContextLearner, build_model
from ssa_hf.recipes.icl.tasks import TASKS, Prompts, Shift

TINY = ["--config", "icl_small", "--layers", "2", "--heads", "2", "--hidden_size", "16", "--length", "8"]
TINY += ["--per_device_train_batch_size", "8", "--global_batch_size", "8", "--test_prompts", "40"]
TINY += ["--warmup_steps", "2", "--max_steps", "6", "--save_steps", "3", "--logging_steps", "1", "--report_to", "none"]


def prompt(task, seed=0, length=12, shift=None):
    sample = Prompts(task, length, 1, (seed,), shift)[0]
    return sample["values"], sample["labels"]


shifts = st.builds(
    Shift, st.sampled_from([1.0, 30.0]), st.sampled_from([1.0, 10.0]), large_value=st.sampled_from([None, 50.0])
)


@given(seed=st.integers(0, 10**6), length=st.integers(3, 50), shift=shifts)
@settings(max_examples=200, deadline=None)
def test_quantifiers_are_answered_by_definition(seed, length, shift):
    for task, quantifier in (("every", np.all), ("some", np.any)):
        values, labels = prompt(task, seed, length, shift)
        assert values.shape == labels.shape == (length,)
        assert [bool(label) for label in labels] == [quantifier(values[: t + 1] > 0) for t in range(length)]
        if shift.large_value is not None:
            assert (50.0 if task == "every" else -50.0) in values[:-1]


def test_a_large_value_does_not_change_the_answers():
    for seed in range(100):
        for task in ("every", "some"):
            plain, large = (prompt(task, seed, shift=Shift(large_value=value)) for value in (0.5, 1000.0))
            assert (plain[1] == large[1]).all()
            assert (plain[0] != large[0]).sum() == 1


@pytest.mark.parametrize("task", list(TASKS))
def test_context_sigma_leaves_the_last_number(task):
    plain, scaled = prompt(task), prompt(task, shift=Shift(context_sigma=10.0))
    kinds = TASKS[task].kinds
    assert plain[0][-1] == scaled[0][-1]
    assert np.allclose(scaled[0][:-1:kinds], 10 * plain[0][:-1:kinds])
    assert plain[1][-1] == scaled[1][-1]


@given(seed=st.integers(0, 10**6), length=st.integers(1, 30), large=st.sampled_from([None, 20.0]))
@settings(max_examples=100, deadline=None)
def test_linear_prompts_hold_one_function(seed, length, large):
    values, labels = prompt("linear", seed, length, Shift(large_value=large))
    assert values.shape == (2 * length - 1,)
    assert (values[1::2] == labels[:-1]).all()
    if large is not None and length > 1:
        assert large in values[:-1:2]
        assert values[-1] != large
    if length > 2:
        assert np.allclose(labels, np.polyval(np.polyfit(values[::2], labels, 1), values[::2]), atol=1e-3)


@pytest.mark.parametrize("task", ["every", "some"])
def test_answers_are_balanced(task):
    """Half of the whole prompts; the first deciding number is equally often in each quarter of the others."""
    count = 4000
    labels = np.stack([sample["labels"] for sample in (Prompts(task, 40, count, (1,))[i] for i in range(count))])
    assert abs(labels[:, -1].mean() - 0.5) < 5 * 0.5 / count**0.5
    decided = labels[labels[:, -1] == (task == "some")] == (task == "some")
    quarters = np.histogram(decided.argmax(1), bins=4, range=(0, 40))[0] / len(decided)
    assert np.abs(quarters - 0.25).max() < 5 * (0.25 * 0.75 / len(decided)) ** 0.5


def test_training_numbers_are_normal():
    values = np.concatenate([prompt("linear", seed, 40)[0][::2] for seed in range(200)])
    assert abs(values.mean()) < 5 / len(values) ** 0.5
    assert abs(values.std() - 1) < 0.05
    size = np.abs(np.concatenate([prompt("every", seed, 40)[0] for seed in range(200)]))
    assert abs(size.mean() - (2 / np.pi) ** 0.5) < 0.05


def test_a_prompt_depends_on_seed_and_index_alone():
    long, short = Prompts("every", 10, 100, (3,)), Prompts("every", 10, 5, (3,))
    assert (long[4]["values"] == short[4]["values"]).all()
    assert (long[4]["values"] != long[5]["values"]).any()
    assert (long[4]["values"] != Prompts("every", 10, 5, (4,))[4]["values"]).any()


def test_least_squares_is_exact_from_two_examples_on():
    for seed in range(20):
        values, labels = prompt("linear", seed, 5)
        assert least_squares(values) == pytest.approx(labels[-1], rel=1e-3, abs=1e-4)
    assert least_squares(np.array([3.0], np.float32)) == 0
    # Of all lines through (1, 2), a = c = 1 has the smallest norm.
    assert least_squares(np.array([1.0, 2.0, 3.0], np.float32)) == pytest.approx(4)


def test_references_stand_on_the_same_prompts():
    references = reference_curves(8, 300)
    assert (
        set(references["zero"])
        == set(conditions("linear", 8))
        == {
            "length",
            "sigma",
            "context_sigma",
            "function_sigma",
            "large_value",
        }
    )
    zero = {point["value"]: point["error"] for point in references["zero"]["sigma"]}
    labels = torch.tensor([Prompts("linear", 8, 300, (20250820,))[i]["labels"][-1] for i in range(300)])
    assert zero[1.0] == pytest.approx(labels.double().square().mean().item())
    assert zero[100.0] > 1000 * zero[1.0]
    assert all(point["error"] < 1e-3 for point in references["least squares"]["function_sigma"])


def tiny_learner(task, attention="ssa", seed=0):
    set_seed(seed)
    return build_model(attention, TASKS[task], 2, 2, 16, 40).eval()


@pytest.mark.parametrize("attention", ["ssa", "sdpa"])
@pytest.mark.parametrize("task", list(TASKS))
def test_an_answer_sees_no_later_number(task, attention):
    model = tiny_learner(task, attention)
    values = torch.tensor(prompt(task)[0])[None]
    changed = values.clone()
    kinds = TASKS[task].kinds
    changed[:, 5 * kinds + 1 :] += 1  # all after the sixth x
    before, after = model(values).logits, model(changed).logits
    assert before.shape == (1, 12)
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert not torch.isclose(before[:, 6:], after[:, 6:]).any()


def test_x_and_f_of_x_are_told_apart():
    model = tiny_learner("linear")
    assert not torch.equal(*(model.read_in(kind) for kind in torch.eye(2)))
    values = torch.tensor([[1.0, 2.0, 3.0]])
    hidden = {}
    hook = model.decoder.layers[0].register_forward_pre_hook(lambda _, inputs: hidden.update(first=inputs[0]))
    model(values)
    hook.remove()
    weight, bias = model.read_in.weight, model.read_in.bias
    torch.testing.assert_close(hidden["first"][0, 1], 2 * weight[:, 1] + bias)
    torch.testing.assert_close(hidden["first"][0, 2], 3 * weight[:, 0] + bias)


def test_losses_are_cross_entropy_and_squared_error():
    values, labels = (torch.tensor(part)[None] for part in prompt("every"))
    output = tiny_learner("every")(values, labels)
    p = output.logits.sigmoid()
    torch.testing.assert_close(output.loss, -torch.where(labels > 0.5, p, 1 - p).log().mean())
    values, labels = (torch.tensor(part)[None] for part in prompt("linear"))
    output = tiny_learner("linear")(values, labels)
    torch.testing.assert_close(output.loss, (output.logits - labels).square().mean())


@pytest.mark.parametrize("attention", ["ssa", "sdpa"])
def test_a_learner_survives_saving(tmp_path, attention):
    model = tiny_learner("linear", attention)
    model.save_pretrained(tmp_path)
    set_seed(5)
    again = InContextLearner.from_pretrained(tmp_path, attn_implementation=attention).eval()
    values = torch.tensor(prompt("linear")[0])[None]
    assert torch.equal(again(values).logits, model(values).logits)


def test_twins_start_from_the_same_weights():
    ssa, softmax = tiny_learner("every", "ssa", 3).state_dict(), tiny_learner("every", "sdpa", 3).state_dict()
    assert {name for name in ssa if "ssa_norm" not in name} == set(softmax)
    assert all(torch.equal(ssa[name], softmax[name]) for name in softmax)


def test_the_attention_map_is_of_a_large_value_prompt():
    found = attention_map(tiny_learner("every"), "every", 8)
    assert 100.0 in found["prompt"]
    layers = torch.tensor(found["layers"])
    assert layers.shape == (2, 8, 8)
    torch.testing.assert_close(layers.sum(-1), torch.ones(2, 8))


def test_a_preset_reaches_the_model():
    model = build_model("ssa", TASKS["every"], 1, 2, 16, 40, "ssa-2")
    assert model.decoder.layers[0].self_attn.ssa_norm.n.tolist() == [2, 2]


@pytest.mark.parametrize("task", ["every", "linear"])
def test_the_recipe_trains_tests_and_reports(tmp_path, capsys, task):
    command = [*TINY, "--task", task, "--seeds", "1", "2", "--output_dir", str(tmp_path)]
    assert main(command) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert [(run["scoring"], run["seed"]) for run in results["runs"]] == [
        (scoring, seed) for scoring in ("ssa", "softmax") for seed in (1, 2)
    ]
    assert set(results["references"]) == ({"least squares", "zero"} if task == "linear" else set())
    for run in results["runs"]:
        assert set(run["curves"]) == set(conditions(task, 8))
        assert all(np.isfinite(point["error"]) for curve in run["curves"].values() for point in curve)
        assert set(run["attention"]) == {"ordinary", "large_value"}
        assert run["attention"]["ordinary"] != run["attention"]["large_value"]
        assert bool(run["scoring_values"]) == (run["scoring"] == "ssa")
    for name in ("errors", "attention", "scoring_values"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    assert "sigma of x: 100" in capsys.readouterr().out
    seeds = [load_file(tmp_path / f"softmax-{seed}" / "model.safetensors") for seed in (1, 2)]
    assert not torch.equal(seeds[0]["read_out.weight"], seeds[1]["read_out.weight"])
    # The saved models are those that were tested.
    model = InContextLearner.from_pretrained(tmp_path / "ssa-2").eval()
    assert error_curves(model, task, 8, 40) == results["runs"][1]["curves"]


def test_a_killed_experiment_goes_on(tmp_path, capsys):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    command = [*TINY, "--task", "every"]
    assert main([*command, "--output_dir", str(whole)]) == 0
    # As after a kill in the second model's training.
    shutil.copytree(whole, killed)
    shutil.rmtree(killed / "softmax-1" / "checkpoint-6")
    (killed / "softmax-1" / "model.safetensors").unlink()
    (killed / "results.json").unlink()
    assert main([*command, "--output_dir", str(killed)]) == 2
    assert "--resume_from_checkpoint last" in capsys.readouterr().err
    assert main([*command, "--output_dir", str(killed), "--resume_from_checkpoint", "last"]) == 0
    before, after = (json.loads((folder / "results.json").read_text())["runs"] for folder in (whole, killed))
    assert before == after


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ssa", "gpt3"], "Unknown SSA preset"),
        (["--scoring", "softmin"], "softmin"),
        (["--max_steps", "-1"], "--max_steps"),
        (["--heads", "3"], "hidden_size"),
    ],
)
def test_mistakes_are_explained(tmp_path, capsys, options, message):
    assert main([*TINY, "--output_dir", str(tmp_path), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("scoring", ["ssa", "softmax"])
def test_every_is_learned(tmp_path, scoring):
    options = ["--scoring", scoring, "--max_steps", "600", "--save_steps", "600", "--hidden_size", "32"]
    options += ["--per_device_train_batch_size", "32", "--global_batch_size", "32", "--test_prompts", "500"]
    assert main([*TINY, *options, "--output_dir", str(tmp_path)]) == 0
    (run,) = json.loads((tmp_path / "results.json").read_text())["runs"]
    (trained,) = (point for point in run["curves"]["sigma"] if point["value"] == 1)
    assert trained["error"] < 0.1
