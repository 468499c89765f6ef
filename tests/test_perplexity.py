"""Perplexity: every token scored once, with the context it should have, by any batch size."""

import json
import math

import pytest
import torch

pytest.importorskip("datasets")

from ssa_hf.recipes import perplexity
from ssa_hf.recipes.tokenizer import train_tokenizer
from tests.conftest import tiny_model

TEXTS = ["the cat sat on the mat, and the dog sat too", "a", "it was the best of times; it was the worst of times"]


@pytest.fixture(params=["ssa", "sdpa"])
def checkpoint(request, tmp_path):
    tokenizer = train_tokenizer(TEXTS, 300)
    tiny_model("nemotron", request.param, vocab_size=len(tokenizer), pad_token_id=None).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def nats(model, tokens, context):
    """-log p of the last token after its context, by one forward pass."""
    logits = model(torch.tensor([context])).logits[0, -1].double()
    return -logits.log_softmax(0)[tokens].item()


@pytest.mark.parametrize(("window", "stride"), [(64, 32), (16, 5), (7, 6), (2, 1)])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_agrees_with_one_forward_pass_a_token(checkpoint, window, stride, batch_size):
    model, tokenizer = perplexity.load(str(checkpoint), "cpu")
    score = perplexity.perplexity(model, tokenizer, iter(TEXTS), window, stride, batch_size)
    expected, count = 0.0, 0
    for text in TEXTS:
        tokens = [tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]
        for position in range(1, len(tokens)):
            # Windows end at window, window + stride, ...
            moves = max(0, math.ceil((position + 1 - window) / stride))
            end = min(len(tokens), window + moves * stride)
            expected += nats(model, tokens[position], tokens[max(0, end - window) : position])
            count += 1
    assert score.tokens == count
    assert score.words == sum(len(text.split()) for text in TEXTS)
    assert score.bytes == sum(len(text) for text in TEXTS)
    assert score.nats == pytest.approx(expected, rel=1e-5)
    assert score.to_dict()["bits_per_byte"] == pytest.approx(expected / math.log(2) / score.bytes, rel=1e-5)


def test_agrees_with_the_evaluate_library(checkpoint):
    """Its metric is per text, and never moves a window."""
    evaluate = pytest.importorskip("evaluate")
    try:
        metric = evaluate.load("perplexity", module_type="metric")
    except (FileNotFoundError, ConnectionError) as error:
        pytest.skip(f"the metric is on the Hub: {error}")
    theirs = metric.compute(predictions=TEXTS[:2], model_id=str(checkpoint), device="cpu")["perplexities"]
    model, tokenizer = perplexity.load(str(checkpoint), "cpu")
    ours = [perplexity.perplexity(model, tokenizer, iter([text]), 64, 32).to_dict()["perplexity"] for text in TEXTS[:2]]
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_the_command_writes_a_table_and_json(checkpoint, tmp_path, capsys):
    (tmp_path / "a.txt").write_text(TEXTS[2])
    output = tmp_path / "results" / "perplexity.json"
    arguments = ["--model", str(checkpoint), "--dataset", str(tmp_path / "a.txt"), "--output", str(output)]
    assert perplexity.main(arguments) == 0
    assert output.with_suffix(".png").stat().st_size > 5_000
    result = json.loads(output.read_text())["results"][str(checkpoint)]
    assert f"{result['perplexity']:.3f}" in capsys.readouterr().out
    assert (result["documents"], result["window"], result["stride"]) == (1, 64, 32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --model"),
        (["--model", "/missing/path"], "cannot load /missing/path"),
        (["--model", "CHECKPOINT", "--stride", "64"], "0 < stride < window <= 64, got a stride of 64"),
        (["--model", "CHECKPOINT", "--window", "65"], "0 < stride < window <= 64"),
    ],
)
@pytest.mark.parametrize("checkpoint", ["ssa"], indirect=True)
def test_wrong_options_are_refused_in_a_line(checkpoint, tmp_path, capsys, arguments, message):
    (tmp_path / "a.txt").write_text(TEXTS[0])
    given = [str(checkpoint) if argument == "CHECKPOINT" else argument for argument in arguments]
    assert perplexity.main([*given, "--dataset", str(tmp_path / "a.txt")]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
