"""Training and deployment stacks around a model: adapters, averaging, offloading, scaling, export, sharding."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import AutoModelForCausalLM

from ssa_hf.diagnostics import attention_statistics
from tests.conftest import VOCAB, norms, tiny_model


@pytest.mark.parametrize("trained", [True, False])
def test_lora_freezes_b_and_n_or_trains_and_saves_them(trained, tokens, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["ssa_norm"] if trained else None)
    model = peft.get_peft_model(tiny_model("llama"), config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.1)
    for _ in range(3):
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    logits = model(tokens).logits
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(tiny_model("llama"), tmp_path)
    torch.testing.assert_close(again(tokens).logits, logits)
    values = {name: value for name, value in again.named_parameters() if "ssa_norm" in name and "original" not in name}
    assert len(values) == 4
    for name, value in values.items():
        assert ((value - (0.8 if name.endswith("b") else 1.5)).abs() > 0.01).all() == trained
    assert attention_statistics(again, [{"input_ids": tokens}]).entropy.isfinite().all()


@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.5)])
def test_averaged_models(average, tokens):
    model = tiny_model("llama")
    averaged = AveragedModel(model, multi_avg_fn=average)
    averaged.update_parameters(model)
    with torch.no_grad():
        norms(model)[0].raw_n += 1.0
    averaged.update_parameters(model)
    torch.testing.assert_close(norms(averaged)[0].n, torch.full((4,), 2.0))
    assert averaged(tokens).logits.isfinite().all()


def test_gradient_scaling_with_autocast(tokens):
    model = tiny_model("llama").train()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=1)
    values = []
    for _ in range(40):
        with torch.autocast("cpu", torch.float16):
            loss = model(tokens, labels=tokens).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        values.append(norms(model)[0].raw_n.detach().clone())
    # Overflows were met first, and their steps left out.
    assert (values[0] == 1.5).all()
    assert all(value.isfinite().all() for value in values)
    assert (values[-1] != 1.5).all()


def test_offloading(tokens, tmp_path):
    model = tiny_model("llama")
    expected = model(tokens).logits
    model.save_pretrained(tmp_path / "model")
    device_map = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    device_map |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    offloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    assert norms(offloaded)[1].raw_n.is_meta
    torch.testing.assert_close(offloaded(tokens).logits, expected)


@pytest.mark.parametrize("name", ["ssa", "temperature"])
def test_torch_export(name, tokens):
    model = tiny_model("llama", name)
    dims = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    exported = torch.export.export(
        model, (), {"input_ids": tokens, "use_cache": False}, dynamic_shapes={"input_ids": dims, "use_cache": None}
    )
    longer = torch.randint(3, VOCAB, (3, 17))
    for ids in (tokens, longer):
        torch.testing.assert_close(exported.module()(input_ids=ids, use_cache=False).logits, model(ids).logits)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "roberta"])
def test_onnx(family, tokens, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = tiny_model(family)
    if family == "llama":
        model.config.use_cache = False
    dims = {0: "batch", 1: "length"}
    program = torch.onnx.export(model, (tokens,), dynamo=True, dynamic_shapes={"input_ids": dims}, verbose=False)
    program.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for ids in (tokens, torch.randint(3, VOCAB, (3, 17))):
        (logits,) = session.run(None, {"input_ids": ids.numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), model(ids).logits, atol=1e-4, rtol=1e-4)


def test_fsdp2_trains_as_one_process(tmp_path):
    """Two processes, each with half of every parameter, b and n among them."""
    script = tmp_path / "train.py"
    script.write_text("""
import sys, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from tests.conftest import VOCAB, tiny_model

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
tokens = torch.randint(3, VOCAB, (4, 11), generator=torch.Generator().manual_seed(0))
models = [tiny_model("llama").train() for _ in range(2)]
for layer in models[1].model.layers:
    fully_shard(layer)
fully_shard(models[1])
for model, batch in zip(models, (tokens, tokens[2 * rank :][:2]), strict=True):
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(3):
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
for (name, one), sharded in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
    torch.testing.assert_close(sharded.full_tensor(), one, msg=lambda text: f"{name}: {text}", atol=1e-5, rtol=1e-4)
norm = models[0].model.layers[0].self_attn.ssa_norm
assert (norm.n != 1.5).all() and (norm.b != 0.8).all()
dist.destroy_process_group()
""")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*command, "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", str(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
