"""b and n while training: they learn, they stay float32, weight decay leaves them alone."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from tests.conftest import norms, tiny_model


@pytest.mark.parametrize("autocast", [False, True])
def test_small_updates_accumulate_in_a_bfloat16_model(autocast, tokens):
    """1,000 steps of 1e-4 move n by 0.1; in bfloat16 each would round to nothing."""
    model = tiny_model("llama", dtype=torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(tokens, labels=tokens).loss.backward()
    for norm in norms(model):
        assert norm.raw_n.grad.dtype == torch.float32
        optimiser = torch.optim.SGD(norm.parameters(), lr=1e-4)
        for _ in range(1000):
            norm.raw_n.grad = torch.ones_like(norm.raw_n)
            norm.raw_b.grad = torch.ones_like(norm.raw_b)
            optimiser.step()
        torch.testing.assert_close(norm.n, torch.full((4,), 1.4), atol=1e-3, rtol=0)
        torch.testing.assert_close(norm.b, torch.full((4,), 0.7), atol=1e-3, rtol=0)


@pytest.mark.parametrize("family", ["llama", "nemotron", "roberta"])
def test_trainer_keeps_weight_decay_off(family, tmp_path):
    model = tiny_model(family)
    trainer = Trainer(model, TrainingArguments(tmp_path, weight_decay=0.1, report_to=[]))
    decayed = trainer.get_decay_parameter_names(model)
    assert any("mlp" in name or "dense" in name for name in decayed)
    assert not any("ssa_norm" in name for name in decayed)
    groups = trainer.create_optimizer().param_groups
    ours = {id(parameter) for norm in norms(model) for parameter in norm.parameters()}
    assert not ours & {id(parameter) for parameter in groups[0]["params"]}
    assert ours <= {id(parameter) for parameter in groups[1]["params"]}


def test_trainer_trains_saves_and_resumes(tmp_path, tokens):
    data = [{"input_ids": row, "labels": row} for row in tokens.repeat(8, 1)]

    def trainer(steps):
        arguments = TrainingArguments(
            tmp_path,
            max_steps=steps,
            save_steps=4,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        return Trainer(tiny_model("nemotron", ssa="nemotron"), arguments, train_dataset=data)

    whole = trainer(8)
    whole.train()
    trained = [norm.n.detach() for norm in norms(whole.model)]
    assert all((n != 1.5).all() for n in trained)
    resumed = trainer(8)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    for ours, theirs in zip(norms(resumed.model), trained, strict=True):
        torch.testing.assert_close(ours.n, theirs)


@pytest.mark.parametrize("family", ["llama", "nemotron", "roberta"])
def test_gradient_checkpointing_changes_nothing(family, tokens):
    model = tiny_model(family).train()
    model(tokens, labels=tokens).loss.backward()
    plain = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.config.use_cache = False
    model.gradient_checkpointing_enable()
    model(tokens, labels=tokens).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[name])
