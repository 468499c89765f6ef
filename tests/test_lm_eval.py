"""lm-evaluation-harness: model types, tasks, the command line and the comparison."""

import functools
import itertools
import json
import math
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("lm_eval")

import lm_eval
import lm_eval.tasks
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from ssa_hf.lm_eval.models import SSALM, MaskedLM
from ssa_hf.lm_eval.tasks import FOLDER, TaskManager
from ssa_hf.recipes import compare_lm_eval, probe_zorro
from ssa_hf.recipes.tokenizer import train_masked_lm_tokenizer, train_tokenizer

from .conftest import tiny_model

WORDS = ["which", "of", "these", "is", "a", "planet", "stone", "river", "the", "red", "old"]
TEXTS = [" ".join(pair) for pair in itertools.permutations(WORDS, 3)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """An SSA and a softmax decoder, and an SSA masked model, each with its tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, family, implementation in (
        ("ssa", "llama", "ssa"),
        ("softmax", "llama", "sdpa"),
        ("mlm", "roberta", "ssa"),
    ):
        tokenizer = (train_masked_lm_tokenizer if family == "roberta" else train_tokenizer)(TEXTS, 300)
        special = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id}
        model = tiny_model(family, implementation, seed=3, vocab_size=len(tokenizer), **special)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Files of the local tasks and of one Zorro paradigm, six questions each."""
    folder = tmp_path_factory.mktemp("data")
    choices = {"label": ["A", "B", "C"], "text": ["the red planet", "a stone", "the old river of stone"]}
    rows = {
        "arc_easy/test": [{"question": f"{text} ?", "choices": choices, "answerKey": "B"} for text in TEXTS[:6]],
        "boolq/validation": [{"passage": text, "question": text, "label": 1} for text in TEXTS[:6]],
        "hellaswag/validation": [
            {"activity_label": "a", "ctx_a": text, "ctx_b": "the", "endings": choices["text"], "label": "0"}
            for text in TEXTS[:6]
        ],
    }
    rows["arc_challenge/test"] = rows["arc_easy/test"]
    for name, content in rows.items():
        path = folder / f"{name}.jsonl"
        path.parent.mkdir()
        path.write_text("".join(json.dumps(row) + "\n" for row in content))
    (folder / "case-subjective_pronoun.txt").write_text("\n".join(TEXTS[:12]) + "\n")
    return folder


def evaluate(model, tasks, data, **options):
    # Without the harness's own tasks, of which the index takes ten seconds.
    manager = TaskManager(metadata={"data": str(data)}, include_defaults=False)
    return lm_eval.simple_evaluate(
        model=model, tasks=tasks, task_manager=manager, bootstrap_iters=0, device="cpu", **options
    )


def answers(results, task):
    return [[response[0] for response in sample["filtered_resps"]] for sample in results["samples"][task]]


@pytest.mark.parametrize("kind", ["ssa", "softmax"])
def test_log_likelihoods_do_not_depend_on_the_batch_size_and_equal_the_models_own(checkpoints, data, kind):
    path = str(checkpoints / kind)
    model = {"ssa": "ssa", "softmax": "hf"}[kind]
    found = {
        size: answers(
            evaluate(model, ["arc_easy_local"], data, model_args={"pretrained": path}, batch_size=size),
            "arc_easy_local",
        )
        for size in (1, 8, "auto")
    }
    tokenizer, direct = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path).eval()
    assert direct.config._attn_implementation == {"ssa": "ssa", "softmax": "sdpa"}[kind]
    for row, text in enumerate(TEXTS[:6]):
        for column, choice in enumerate(["the red planet", "a stone", "the old river of stone"]):
            context = tokenizer(f"Question: {text} ?\nAnswer:")["input_ids"]
            whole = tokenizer(f"Question: {text} ?\nAnswer: {choice}", return_tensors="pt")["input_ids"]
            with torch.no_grad():
                scores = direct(whole).logits[0, :-1].log_softmax(-1).gather(1, whole[0, 1:, None])[:, 0]
            expected = float(scores[len(context) - 1 :].sum())
            for size in found:
                assert found[size][row][column] == pytest.approx(expected, abs=1e-4)


def test_local_tasks_ask_what_the_harness_asks(data):
    manager = TaskManager(metadata={"data": str(data)})
    tasks = manager.load(["arc_easy_local", "arc_challenge_local", "boolq_local", "hellaswag_local"])["tasks"]
    for name, folder in {
        "arc_easy": "arc",
        "arc_challenge": "arc",
        "boolq": "super_glue",
        "hellaswag": "hellaswag",
    }.items():
        ours = tasks[f"{name}_local"].config
        stock = manager.task_index[name].cfg
        if name == "arc_challenge":
            stock = manager.task_index["arc_easy"].cfg | stock
        for key in ("output_type", "doc_to_text", "doc_to_target", "doc_to_choice"):
            assert getattr(ours, key) == stock[key], (name, key)
        assert folder in str(manager.task_index[name].yaml_path)
        assert {m["metric"] for m in ours.metric_list} == {m["metric"] for m in stock["metric_list"]}


def test_the_papers_benchmark_names_tasks_of_the_harness():
    manager = TaskManager()
    named = manager.task_index["ssa_paper"].cfg["task"]
    assert set(named) <= set(manager.all_tasks)
    assert set(named) == set(compare_lm_eval.PAPER)


def test_zorro_through_the_harness_is_what_the_probe_measures(checkpoints, data):
    sentences = TEXTS[:12]
    for model, name, scoring in ((SSALM, "ssa", "log-likelihood"), (MaskedLM, "mlm", "pseudo")):
        path = str(checkpoints / name)
        loaded = model(pretrained=path, batch_size=4, device="cpu")
        results = evaluate(loaded, ["zorro_case_subjective_pronoun"], data)
        probed = probe_zorro.score(loaded.model, loaded.tokenizer, sentences, scoring, batch_size=4)
        found = answers(results, "zorro_case_subjective_pronoun")
        for row, (good, bad) in enumerate(found):
            assert [bad, good] == pytest.approx(probed[2 * row : 2 * row + 2], abs=1e-4)


def test_every_paradigm_of_zorro_is_a_task(shared_data):
    manager = TaskManager(include_defaults=False)
    files = {path.name for path in (shared_data / "zorro").glob("*-*.txt")}
    tasks = manager.task_index["zorro"].cfg["task"]
    assert len(tasks) == len(files) == 23
    assert {manager.task_index[name].cfg["dataset_kwargs"]["file"] for name in tasks} == files


def run(*command, **environment):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run([sys.executable, "-m", *map(str, command)], env=environment, capture_output=True, text=True)


def read(folder):
    (path,) = folder.rglob("results_*.json")
    return json.loads(path.read_text())["results"]


def test_the_stock_command_evaluates_with_ssa_and_leaves_softmax_alone(checkpoints, data, tmp_path):
    for kind in ("ssa", "softmax"):
        found = {}
        for autoload in ("1", "0"):
            output = tmp_path / kind / autoload
            arguments = ["--model", "hf", "--model_args", f"pretrained={checkpoints / kind}", "--device", "cpu"]
            tasks = ["--tasks", "arc_easy_local", "--include_path", FOLDER, "--metadata", f"data={data}"]
            done = run("lm_eval", *arguments, *tasks, "--output_path", output, SSA_HF_AUTOLOAD=autoload)
            if (kind, autoload) == ("ssa", "0"):
                assert 'attn_implementation="ssa"` is not supported' in done.stderr
                continue
            assert done.returncode == 0, done.stderr[-2000:]
            found[autoload] = read(output)["arc_easy_local"]
        if kind == "softmax":
            assert found["1"] == found["0"]


def test_our_command_under_accelerate_with_two_processes(checkpoints, data, tmp_path):
    arguments = ["--model", "ssa", "--model_args", f"pretrained={checkpoints / 'ssa'}", "--metadata", f"data={data}"]
    arguments += ["--tasks", "ssa_paper_local", "--device", "cpu", "--batch_size", "2"]
    launch = ["accelerate.commands.launch", "--cpu", "--num_processes", "2", "-m"]
    assert run("ssa_hf.lm_eval", *arguments, "--output_path", tmp_path / "one").returncode == 0
    done = run(*launch, "ssa_hf.lm_eval", *arguments, "--output_path", tmp_path / "two")
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = read(tmp_path / "one"), read(tmp_path / "two")
    for task in ("arc_easy_local", "arc_challenge_local", "boolq_local", "hellaswag_local"):
        assert {k: v for k, v in one[task].items() if k.startswith("acc")} == pytest.approx(
            {k: v for k, v in two[task].items() if k.startswith("acc")}
        )


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("ssa", "pretrained=/missing/checkpoint --tasks arc_easy_local", "/missing/checkpoint"),
        ("ssa", "pretrained=SOFTMAX --tasks arc_easy_local", "is no SSA checkpoint"),
        ("ssa", "pretrained=SSA --tasks arc_easy_locale", "Tasks not found: arc_easy_locale"),
        ("ssa", "pretrained=SSA --tasks boolq_local", "give --metadata data=FOLDER"),
        ("ssa", "pretrained=SSA --tasks boolq_local --metadata data=/missing", "boolq/validation.jsonl is missing"),
        ("ssa-mlm", "pretrained=MLM --tasks boolq_local --metadata data=DATA", "scores whole sentences"),
    ],
)
def test_errors_are_a_line_with_the_remedy(checkpoints, data, monkeypatch, capsys, model, arguments, message):
    from ssa_hf.lm_eval.__main__ import main

    for name, path in {
        "SOFTMAX": checkpoints / "softmax",
        "SSA": checkpoints / "ssa",
        "MLM": checkpoints / "mlm",
    }.items():
        arguments = arguments.replace(f"={name} ", f"={path} ")
    arguments = arguments.replace("DATA", str(data))
    command = ["lm_eval", "--model", model, "--device", "cpu", "--model_args", *arguments.split()]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lm_eval.tasks.TaskManager)  # main replaces it
    quick = functools.partial(TaskManager, include_defaults=False)
    monkeypatch.setattr("ssa_hf.lm_eval.tasks.TaskManager", quick)
    assert main() == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("ssa_hf.lm_eval: ")
    assert message in last


def test_without_lm_eval_the_command_says_how_to_install_it(monkeypatch, capsys):
    from ssa_hf.lm_eval import __main__ as command

    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert command.main() == 2
    assert 'pip install "ssa_hf[eval]"' in capsys.readouterr().err


def test_a_softmax_checkpoint_can_be_converted_on_purpose(checkpoints):
    model = SSALM(pretrained=str(checkpoints / "softmax"), convert=True, device="cpu").model
    assert model.config._attn_implementation == "ssa"
    softmax = HFLM(pretrained=str(checkpoints / "softmax"), device="cpu").model
    with pytest.raises(ValueError, match="does not use SSA attention"):
        SSALM(pretrained=softmax)


def test_a_comparison_of_results_files(tmp_path, capsys):
    softmax = {
        "arc_easy_local": {"acc,none": 0.2, "acc_norm,none": 0.30, "acc_norm_stderr,none": 0.03},
        "boolq": {"acc,none": 0.5, "acc_stderr,none": 0.03},
        "wikitext": {"word_perplexity,none": 50.0, "word_perplexity_stderr,none": "N/A"},
        "ssa_paper": {"alias": "ssa_paper"},
        "only_here": {"acc,none": 1.0},
    }
    ssa = {
        "arc_easy_local": {"acc,none": 0.1, "acc_norm,none": 0.40, "acc_norm_stderr,none": 0.04},
        "boolq": {"acc,none": 0.42, "acc_stderr,none": 0.04},
        "wikitext": {"word_perplexity,none": 45.0, "word_perplexity_stderr,none": "N/A"},
        "ssa_paper": {"alias": "ssa_paper"},
    }
    entmax = {**ssa, "arc_easy_local": {"acc_norm,none": 0.31, "acc_norm_stderr,none": 0.04}}
    for name, results in (("softmax", softmax), ("ssa", ssa), ("entmax15", entmax)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"results": results}))
    files = ["--ssa", str(tmp_path / "ssa.json"), "--softmax", str(tmp_path / "softmax.json")]
    files += ["--others", f"entmax15={tmp_path / 'entmax15.json'}"]
    assert compare_lm_eval.main([*files, "--output_dir", str(tmp_path / "out")]) == 0
    rows = {row["task"]: row for row in json.loads((tmp_path / "out" / "comparison.json").read_text())["rows"]}
    assert list(rows) == ["arc_easy_local", "boolq", "wikitext"]
    easy = rows["arc_easy_local"]
    assert (easy["metric"], easy["paper"]) == ("acc_norm", {"softmax": 0.2934, "ssa": 0.5387})
    assert list(easy["scores"]) == ["softmax", "ssa", "entmax15"]
    assert easy["scores"]["ssa"]["difference"] == pytest.approx(0.1)
    assert easy["scores"]["ssa"]["difference_stderr"] == pytest.approx(math.hypot(0.03, 0.04))
    assert easy["scores"]["ssa"]["outside_error"] is True  # 2.0 standard errors
    assert easy["scores"]["entmax15"]["outside_error"] is False
    assert rows["boolq"]["scores"]["ssa"]["outside_error"] is False  # 1.6
    assert rows["wikitext"]["scores"]["ssa"]["outside_error"] is None
    assert (tmp_path / "out" / "comparison.png").stat().st_size > 5_000
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "out" / "comparison.md").read_text()
    ssa_cells = "0.4000 ± 0.0400 | **+0.1000 ± 0.0500**"
    entmax_cells = "0.3100 ± 0.0400 | +0.0100 ± 0.0500"
    assert (
        f"| arc_easy_local | acc_norm | 0.3000 ± 0.0300 | {ssa_cells} | {entmax_cells} | 0.2934 | 0.5387 |" in printed
    )


def test_others_need_a_name_of_their_own(tmp_path, capsys):
    for other in ("runs/entmax", "ssa=runs/entmax", "entmax="):
        assert compare_lm_eval.main(["--ssa", "a.json", "--softmax", "b.json", "--others", other]) == 2
        assert "NAME=CHECKPOINT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "holds no results of lm-eval"), ("{}", "holds no results"), ('{"results": {}}', "no task in common")],
)
def test_a_wrong_results_file_is_refused_in_a_line(tmp_path, capsys, content, message):
    (tmp_path / "a.json").write_text(content)
    assert compare_lm_eval.main(["--ssa", str(tmp_path / "a.json"), "--softmax", str(tmp_path / "a.json")]) == 2
    assert message in capsys.readouterr().err
    assert compare_lm_eval.main(["--ssa", str(tmp_path / "b.json"), "--softmax", str(tmp_path / "a.json")]) == 2
