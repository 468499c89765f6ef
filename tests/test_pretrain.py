"""The pretraining recipe: twins, resuming after a kill, several processes, and its files."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

pytest.importorskip("datasets")

from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ssa_hf.recipes import pretrain_fineweb
from ssa_hf.recipes.arguments import CONFIGS, parse
from ssa_hf.recipes.pretrain_fineweb import DataArguments, ModelArguments
from ssa_hf.recipes.training import RecipeArguments

TINY = [
    "--layers",
    "1",
    "--hidden_size",
    "32",
    "--heads",
    "4",
    "--kv_heads",
    "2",
    "--ffn_size",
    "32",
    "--sequence_length",
    "32",
    "--vocab_size",
    "300",
]
SHORT = [
    "--logging_steps",
    "1",
    "--eval_strategy",
    "no",
    "--global_batch_size",
    "8",
    "--per_device_train_batch_size",
    "4",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    words = torch.randint(100, (400, 40), generator=torch.Generator().manual_seed(0)).tolist()
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("\n".join(json.dumps({"text": " ".join(f"w{word}" for word in row)}) for row in words))
    return path


def command_line(corpus, output, *options, steps=6):
    data = ["--dataset", str(corpus), "--held_out_documents", "20", "--cache_dir", str(corpus.parent / "cache")]
    training = ["--output_dir", str(output), "--max_steps", str(steps), "--use_cpu", "true", "--report_to", "none"]
    return ["--config", "tiny_cpu", *TINY, *SHORT, *data, *training, *options]


def losses(output):
    last = max(output.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    history = json.loads((last / "trainer_state.json").read_text())["log_history"]
    return [record["loss"] for record in history if "loss" in record]


@pytest.fixture
def environment():
    """Of a run in a process of its own: with one thread, as this process has, since more round sums otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    torch.set_num_threads(threads)


def test_a_run_leaves_model_log_plot_and_summary(corpus, tmp_path):
    assert pretrain_fineweb.main(command_line(corpus, tmp_path / "run", "--ssa_per_head", "true")) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 6
    assert summary["held_out_loss"] < 6
    assert summary["tokens_per_second"] > 0
    assert len([name for name in summary["scoring_values"] if name.startswith("ssa/n/layer0/head")]) == 4
    assert (tmp_path / "run" / "training.png").stat().st_size > 10_000
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert model.config._attn_implementation == "ssa"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    assert (
        model.generate(**tokenizer("w1 w2", return_tensors="pt", return_token_type_ids=False), max_new_tokens=3)[0, -1]
        >= 0
    )


def test_twins_start_from_the_same_weights_and_see_the_same_batches(corpus, tmp_path, monkeypatch):
    seen = {}
    for attention in ("ssa", "sdpa"):
        batches = seen[attention] = []
        step = pretrain_fineweb.RecipeTrainer.training_step

        def record(self, model, inputs, *args, batches=batches, step=step, **kwargs):
            batches.append(inputs["input_ids"].clone())
            if len(batches) == 1:
                batches.insert(0, {name: value.clone() for name, value in model.state_dict().items()})
            return step(self, model, inputs, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(pretrain_fineweb.RecipeTrainer, "training_step", record)
            run = command_line(corpus, tmp_path / attention, "--attention", attention, steps=3)
            assert pretrain_fineweb.main(run) == 0
    weights = {name: value for name, value in seen["ssa"].pop(0).items() if "ssa_norm" not in name}
    softmax = seen["sdpa"].pop(0)
    assert weights.keys() == softmax.keys()
    assert all(torch.equal(weights[name], softmax[name]) for name in weights)
    assert len(seen["ssa"]) == 6
    assert torch.equal(torch.cat(seen["ssa"]), torch.cat(seen["sdpa"]))


@pytest.mark.parametrize("streaming", ["false", "true"])
def test_a_killed_run_resumes_to_the_losses_of_an_unbroken_one(corpus, tmp_path, environment, streaming):
    options = ["--streaming", streaming, "--save_steps", "10"]
    assert pretrain_fineweb.main(command_line(corpus, tmp_path / "whole", *options, steps=60)) == 0

    killed = command_line(corpus, tmp_path / "killed", *options, steps=60)
    process = subprocess.Popen(
        [sys.executable, "-m", "ssa_hf.recipes.pretrain_fineweb", *killed],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "killed" / "checkpoint-10" / "trainer_state.json").exists():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "killed" / "summary.json").exists()
    # A checkpoint that was being written when the process died.
    (tmp_path / "killed" / "checkpoint-59").mkdir()

    assert pretrain_fineweb.main(killed) == 2
    assert pretrain_fineweb.main([*killed, "--resume_from_checkpoint", "last"]) == 0
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    ours, theirs = (load_file(tmp_path / run / "model.safetensors") for run in ("killed", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("streaming", ["false", "true"])
def test_two_processes_train_as_one(corpus, tmp_path, environment, streaming):
    options = ["--streaming", streaming, "--save_steps", "6"]
    assert pretrain_fineweb.main(command_line(corpus, tmp_path / "one", *options)) == 0
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    launch += [
        str(CONFIGS / "accelerate" / "cpu.yaml"),
        "--num_processes",
        "2",
        "-m",
        "ssa_hf.recipes.pretrain_fineweb",
    ]
    run = subprocess.run(
        [*launch, *command_line(corpus, tmp_path / "two", *options)], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ssa", "nemo"], "Unknown SSA preset 'nemo'"),
        (["--heads", "5"], "5 heads must divide the width 32"),
        (["--tokenizer", "/missing"], "cannot load the tokenizer /missing"),
        (["--held_out_documents", "0"], "must be at least 1"),
        (["--held_out_documents", "400"], "no documents"),
        (["--dataset", "/missing.jsonl"], "cannot read /missing.jsonl"),
    ],
)
def test_wrong_options_are_refused_in_a_line(corpus, tmp_path, capsys, options, message):
    assert pretrain_fineweb.main(command_line(corpus, tmp_path / "run", *options)) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_other_settings_do_not_continue_a_run(corpus, tmp_path, capsys):
    run = command_line(corpus, tmp_path / "run", "--save_steps", "3", steps=3)
    assert pretrain_fineweb.main(run) == 0
    resumed = [*run, "--resume_from_checkpoint", "last"]
    assert pretrain_fineweb.main([*resumed, "--attention", "sdpa", "--seed", "7"]) == 2
    assert "other settings (attention, seed)" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("nemotron*.yaml")))
def test_shipped_configurations_parse(name, tmp_path):
    options = ["--config", name, "--bf16", "false", "--use_cpu", "true", "--output_dir", str(tmp_path)]
    model, data, training = parse((ModelArguments, DataArguments, RecipeArguments), options)
    assert (model.layers, model.hidden_size, data.sequence_length) == (12, 768, 1024)
    assert training.samples_per_step == training.global_batch_size == 768
    assert training.seed == 1234


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers: 3\nlayer: 2\n", "unknown option(s)"),
        ("- a\n", "must be a mapping"),
        ("a: [\n", "is not YAML"),
        ("global_batch_size: 7\n", "global_batch_size 7 is no multiple of the 8 samples"),
    ],
)
def test_a_wrong_configuration_is_refused_in_a_line(tmp_path, capsys, text, message):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(SystemExit) as stopped:
        parse((ModelArguments, RecipeArguments), ["--config", str(tmp_path / "a.yaml"), "--use_cpu", "true"])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[0]


def test_the_command_line_overrides_a_configuration_and_that_its_base(tmp_path):
    (tmp_path / "base.yaml").write_text("layers: 3\nheads: 4\nhidden_size: 64\nlearning_rate: 1e-3\n")
    (tmp_path / "a.yaml").write_text("base: base.yaml\nheads: 8\nhidden_size: 96\n")
    given = ["--config", str(tmp_path / "a.yaml"), "--hidden_size", "128", "--use_cpu", "true"]
    model, training = parse((ModelArguments, RecipeArguments), given)
    assert (model.layers, model.heads, model.hidden_size, training.learning_rate) == (3, 8, 128, 1e-3)
