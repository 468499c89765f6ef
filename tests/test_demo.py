import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import ssa_hf.cli
from ssa_hf.recipes import demo
from tests.conftest import norms

SMALL = ["--steps", "10", "--batch-size", "4", "--sequence-length", "32", "--layers", "1", "--width", "64"]


def test_demo_on_the_shipped_text(tmp_path, capsys):
    assert ssa_hf.cli.main(["demo", *SMALL, "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "SSA held-out" in printed
    assert "ALICE'S ADVENTURES" in printed
    results = json.loads((tmp_path / "results.json").read_text())
    first, last = results["history"][0], results["history"][-1]
    assert last["step"] == 10
    for name in ("ssa_train", "sdpa_train"):
        assert last[name] < first[name]
    (norm,) = norms(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert (norm.n != 1.5).all()
    torch.testing.assert_close(norm.n, torch.tensor(results["b_and_n"][0]["n"]))


def test_demo_is_repeatable(tmp_path):
    for run in ("one", "two"):
        demo.main([*SMALL, "--output", str(tmp_path / run)])
    one, two = (json.loads((tmp_path / run / "results.json").read_text()) for run in ("one", "two"))
    assert one["history"] == two["history"]
    assert one["b_and_n"] == two["b_and_n"]


@pytest.mark.parametrize("data", ["wikitext2", "aochildes/aochildes.txt"])
def test_demo_on_real_text(data, shared_data, tmp_path):
    assert demo.main([*SMALL, "--data", str(shared_data / data), "--output", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no text at"), (b"\xff\xfe\xff", "is not UTF-8"), (b"too short", "the text is too short")],
)
def test_demo_refuses_with_one_line(content, message, tmp_path, capsys):
    if content is not None:
        (tmp_path / "text.txt").write_bytes(content)
    assert demo.main(["--data", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_command_line(capsys):
    assert ssa_hf.cli.main(["--version"]) == 0
    assert ssa_hf.cli.main(["--help"]) == 0
    assert "ssa-hf COMMAND" in capsys.readouterr().out
    assert ssa_hf.cli.main([]) == ssa_hf.cli.main(["nonsense"]) == 2
    with pytest.raises(SystemExit, match="0"):
        ssa_hf.cli.main(["demo", "--help"])
    with pytest.raises(SystemExit, match="2"):
        ssa_hf.cli.main(["demo", "--width", "100"])
