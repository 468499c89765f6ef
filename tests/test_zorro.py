"""The Zorro probe: its files, its statistics, and a run."""

import json

import pytest
import torch
from scipy.stats import binomtest

from ssa_hf import cli
from ssa_hf.recipes import probe_zorro
from ssa_hf.recipes.tokenizer import train_masked_lm_tokenizer, train_tokenizer

from .conftest import tiny_model

SENTENCES = ["the dogs runs .", "the dogs run .", "where is the dogs ?", "where is the dog ?"]


@pytest.fixture
def folder(tmp_path):
    data = tmp_path / "zorro"
    data.mkdir()
    for name in ("agreement-one", "agreement-two", "case-three"):
        (data / f"{name}.txt").write_text("\n".join(SENTENCES) + "\n")
    return data


def checkpoint(path, family, seed=0):
    train = train_tokenizer if family == "llama" else train_masked_lm_tokenizer
    tokenizer = train(SENTENCES * 5, 280)
    special = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id}
    tiny_model(family, seed=seed, vocab_size=len(tokenizer), **special).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a .\nb .\nc .\n", "line 3: the last sentence has no partner"),
        (b"a .\n\nb .\nc .\n", "line 2: blank"),
        (b"a .\nb\xff .\n", "line 2: not UTF-8"),
        (b"", "line 0: the last"),
    ],
)
def test_malformed_files_are_refused_with_file_and_line(folder, content, message):
    (folder / "case-bad.txt").write_bytes(content)
    with pytest.raises(ValueError, match=f"case-bad.txt, {message}"):
        probe_zorro.read_paradigms(folder)


def test_statistics():
    first = {"agreement-one": [1.0, 1.0, -1.0, 0.0], "case-gap-two": [1.0, -1.0]}
    second = {"agreement-one": [1.0, -1.0, 1.0, 1.0], "case-gap-two": [1.0, 1e-7]}
    by_model = {"first": first, "second": second}
    summary = probe_zorro.summarise(by_model, "second")
    assert list(summary) == ["agreement-one", "agreement", "case-gap-two", "case-gap", "all"]
    assert summary["agreement-one"] | {"interval": None, "mcnemar_p": None} == {
        "accuracy": 0.75,
        "interval": None,
        "ties": 0,
        "pairs": 4,
        "gained": 2,
        "lost": 1,
        "mcnemar_p": None,
    }
    assert summary["agreement-one"]["mcnemar_p"] == pytest.approx(1.0)
    assert summary["all"]["mcnemar_p"] == pytest.approx(binomtest(2, 3).pvalue)
    assert summary["all"]["ties"] == 1
    # Wilson's interval of 3 in 4, from its formula.
    assert summary["agreement-one"]["interval"] == pytest.approx([0.3006, 0.9544], abs=1e-4)
    assert "mcnemar_p" not in probe_zorro.summarise(by_model, "first")["all"]


def test_a_run_compares_checkpoints_of_all_kinds(folder, tmp_path, capsys):
    models = [
        checkpoint(tmp_path / "one", "roberta"),
        checkpoint(tmp_path / "two", "roberta", seed=1),
        checkpoint(tmp_path / "decoder", "llama"),
    ]
    output = tmp_path / "out"
    assert cli.main(["zorro", "--model", *models, "--data", str(folder), "--output_dir", str(output)]) == 0
    results = json.loads((output / "results.json").read_text())["results"]
    assert set(results) == {"unmasked", "pseudo", "log-likelihood"}
    assert set(results["pseudo"]) == set(models[:2])
    assert results["log-likelihood"][models[2]]["all"]["pairs"] == 6
    assert (output / "accuracy.png").stat().st_size > 10_000
    assert "agreement-one" in capsys.readouterr().out
    # The grammatical sentence is the second one of a pair.
    model, tokenizer = probe_zorro.load(models[0], "cpu")
    losses = []
    with torch.no_grad():
        for sentence in SENTENCES:
            ids = tokenizer(sentence, return_tensors="pt")["input_ids"]
            losses.append(model(ids, labels=ids).loss.item())
    right = (losses[1] < losses[0]) + (losses[3] < losses[2])
    assert results["unmasked"][models[0]]["agreement-one"]["accuracy"] == right / 2


@pytest.mark.parametrize(
    ("options", "message"),
    [([], "give --model"), (["--model", "no/such", "--data", "nowhere"], "nowhere has no files")],
)
def test_errors_are_one_line(options, message, capsys):
    assert cli.main(["zorro", *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_real_files_are_read_whole(shared_data):
    paradigms = probe_zorro.read_paradigms(shared_data / "zorro")
    assert len(paradigms) == 23
    assert all(len(sentences) == 4000 for sentences in paradigms.values())
    assert set(probe_zorro.PAPER) <= set(paradigms)
