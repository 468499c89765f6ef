"""What goes wrong outside: damaged checkpoints, full disks, reloads, other processes."""

import importlib
import json
import multiprocessing
import subprocess
import sys

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import ssa_hf
from ssa_hf.checkpoint import warn_of_newer_version
from ssa_hf.recipes.training import last_checkpoint
from tests.conftest import VOCAB, norms, tiny_model


@pytest.fixture
def checkpoint(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit_config(checkpoint, **changes):
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["raw_b", "raw_n"])
def test_values_that_are_no_numbers_are_refused(checkpoint, name, value):
    tensors = load_file(checkpoint / "model.safetensors")
    tensors[f"model.layers.1.self_attn.ssa_norm.{name}"][2] = value
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"layers\.1\.self_attn\.ssa_norm\.{name} .* holds NaN or infinite"):
        AutoModelForCausalLM.from_pretrained(checkpoint)


def test_a_truncated_checkpoint_is_refused(checkpoint):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(safetensors.SafetensorError):
        AutoModelForCausalLM.from_pretrained(checkpoint)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"b_init": -0.5}, "b_init > 0"),
        ({"n_init": 0.5}, "n_init >= 1"),
        ({"n_init": "2"}, "finite number"),
        ({"slope": 1.0}, "Unknown SSA option.* slope in config.ssa"),
    ],
)
def test_wrong_options_in_a_checkpoint_are_refused(checkpoint, options, message):
    edit_config(checkpoint, ssa=options)
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(checkpoint)


def test_a_checkpoint_of_a_newer_version_warns(checkpoint, caplog):
    assert json.loads((checkpoint / "config.json").read_text())["ssa_hf_version"] == ssa_hf.__version__
    warn_of_newer_version.cache_clear()
    AutoModelForCausalLM.from_pretrained(checkpoint)
    assert "newer" not in caplog.text
    edit_config(checkpoint, ssa_hf_version="99.1")
    AutoModelForCausalLM.from_pretrained(checkpoint)
    assert caplog.text.count("written by ssa_hf 99.1") == 1


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    data = [{"input_ids": row, "labels": row} for row in torch.randint(3, VOCAB, (8, 12))]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=4, save_steps=2, per_device_train_batch_size=4, use_cpu=True, report_to="none"
    )
    saved = []
    original = type(tiny_model("llama")).save_pretrained

    def save_pretrained(self, folder, *args, **kwargs):
        if saved:
            raise OSError(28, "No space left on device")
        saved.append(folder)
        original(self, folder, *args, **kwargs)

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", save_pretrained)
    with pytest.raises(OSError, match="No space left"):
        Trainer(tiny_model("llama"), arguments, train_dataset=data).train()
    monkeypatch.undo()
    assert last_checkpoint(tmp_path).name == "checkpoint-2"
    trainer = Trainer(tiny_model("llama"), arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=str(last_checkpoint(tmp_path)))
    assert trainer.state.global_step == 4


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_data_loader(method):
    rows = torch.randint(3, VOCAB, (8, 12), generator=torch.Generator().manual_seed(0))
    loader = DataLoader(rows, 4, num_workers=2, multiprocessing_context=multiprocessing.get_context(method))
    model = tiny_model("llama")
    model(rows[:4])  # the kernel's threads are running when the process forks
    with torch.no_grad():
        logits = torch.cat([model(batch).logits for batch in loader])
        torch.testing.assert_close(logits, model(rows).logits)


def test_a_forked_process_computes(tmp_path):
    """OpenMP's threads do not survive a fork; the kernel must not wait for them."""
    script = """
import os, torch, ssa_hf
tensors = [torch.randn(2, 4, 300, 16) for _ in range(3)]
expected = ssa_hf.ssa_attention(*tensors, 0.8, 1.5, is_causal=True)
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    same = torch.allclose(ssa_hf.ssa_attention(*tensors, 0.8, 1.5, is_causal=True), expected, atol=1e-6)
    os._exit(0 if same else 3)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def test_reloading_and_importing_again():
    script = """
import importlib, sys, torch, ssa_hf
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

def build():
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes), attn_implementation="ssa")
    assert [name for name, _ in model.named_parameters() if "ssa_norm" in name].__len__() == 2
    return model(torch.arange(8)[None]).logits

before = build()
importlib.reload(ssa_hf)
assert torch.equal(build(), before)
import ssa_hf.registration
importlib.reload(ssa_hf.registration)
ssa_hf.registration.register()
assert torch.equal(build(), before)
for name in [name for name in sys.modules if name.split(".")[0] == "ssa_hf" and "kernels" not in name]:
    del sys.modules[name]
import ssa_hf
assert torch.equal(build(), before)
ssa_hf.unregister()
assert PreTrainedModel.post_init.__module__ == "transformers.modeling_utils"
assert not hasattr(PreTrainedModel.post_init, "_ssa_hf_original")
try:
    build()
except ValueError as error:
    assert "ssa" in str(error)
else:
    raise AssertionError("softmax was computed")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_reload_keeps_the_models_that_live(tokens):
    model = tiny_model("llama")
    before = model(tokens).logits
    importlib.reload(ssa_hf)
    assert torch.equal(model(tokens).logits, before)
    assert len(norms(model)) == 2
