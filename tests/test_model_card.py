"""The README.md beside a saved model."""

import torch
from transformers import AutoModelForCausalLM

from ssa_hf.model_card import model_card
from tests.conftest import norms, tiny_model


def test_a_saved_model_has_a_card_with_its_values(tmp_path):
    model = tiny_model("llama")
    with torch.no_grad():
        norms(model)[1].raw_n.copy_(torch.tensor([1.25, 2.5, 3.0, 4.0]))
    model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "- ssa_hf\n- ssa\n" in card
    assert "| model.layers.0.self_attn | 0.8 0.8 0.8 0.8 | 1.5 1.5 1.5 1.5 |" in card
    assert "| model.layers.1.self_attn | 0.8 0.8 0.8 0.8 | 1.25 2.5 3 4 |" in card
    assert "n_init = 1.5" in card
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "ssa"


def test_a_card_is_never_overwritten(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    tiny_model("llama").save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_what_trains_nothing_has_no_table_and_softmax_no_card(tmp_path):
    tiny_model("llama", "sigmoid").save_pretrained(tmp_path / "sigmoid")
    assert "arXiv 2409.04431" in (tmp_path / "sigmoid" / "README.md").read_text()
    assert "|" not in (tmp_path / "sigmoid" / "README.md").read_text()
    tiny_model("llama", "sdpa").save_pretrained(tmp_path / "softmax")
    assert not (tmp_path / "softmax" / "README.md").exists()


def test_other_processes_write_none(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path, is_main_process=False)
    tiny_model("llama").save_pretrained(tmp_path, False)
    assert not (tmp_path / "README.md").exists()


def test_values_that_are_elsewhere_are_left_out(tmp_path):
    model = tiny_model("llama").to("meta")
    assert "Learned values" not in model_card(model)
