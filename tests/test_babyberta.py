"""The BabyBERTa recipe: masking, the corpus and its order, twins, resuming, and its tokenizers."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoTokenizer

from ssa_hf.recipes import train_babyberta
from ssa_hf.recipes.arguments import parse
from ssa_hf.recipes.sentences import SentenceMasking, Sentences
from ssa_hf.recipes.tokenizer import train_masked_lm_tokenizer
from ssa_hf.recipes.train_babyberta import BabyBertaArguments, load_tokenizer
from ssa_hf.recipes.training import RecipeArguments

LINES = [f"look at the w{first} and w{second} ." for first in range(12) for second in range(10)]
TINY = ["--layers", "1", "--hidden_size", "32", "--heads", "4", "--ffn_size", "32", "--vocab_size", "320"]
TINY += ["--max_length", "32"]
SHORT = ["--logging_steps", "1", "--warmup_steps", "2", "--max_steps", "6", "--save_steps", "3"]
SHORT += ["--use_cpu", "true", "--report_to", "none"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("\n".join(LINES) + "\n")
    return path


@pytest.fixture(scope="module")
def tokenizer():
    return train_masked_lm_tokenizer(LINES, 320)


def command_line(corpus, output, *options, config="babyberta_ssa_trained"):
    return ["--config", config, *TINY, *SHORT, "--corpus", str(corpus), "--output_dir", str(output), *options]


def test_masking_has_the_probabilities_of_babyberta(tokenizer):
    """Of 40,000 tokens, 6,000 are predicted: the bounds are five standard deviations."""
    vocabulary = len(tokenizer)
    word = tokenizer("look", add_special_tokens=False)["input_ids"][0]
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    examples = [{"input_ids": [begin, *[word] * 100, end], "index": index} for index in range(400)]
    batch = SentenceMasking(tokenizer, seed=1)(examples)
    predicted = batch["labels"] != -100
    assert not predicted[:, [0, -1]].any()  # special tokens
    assert torch.equal(batch["labels"][predicted], torch.full((int(predicted.sum()),), word))
    assert (batch["input_ids"][~predicted] == torch.tensor([r["input_ids"] for r in examples])[~predicted]).all()
    count = int(predicted.sum())
    assert abs(count / 40_000 - 0.15) < 5 * (0.15 * 0.85 / 40_000) ** 0.5
    inputs = batch["input_ids"][predicted]
    assert abs((inputs == tokenizer.mask_token_id).float().mean() - 0.9) < 5 * (0.09 / count) ** 0.5
    # A token stays itself only if chance replaces it by itself.
    assert (inputs == word).float().mean() < 5 * 0.1 / vocabulary
    assert not torch.isin(inputs, torch.tensor([begin, end, tokenizer.pad_token_id])).any()


def test_every_sentence_has_something_to_predict(tokenizer):
    ids = tokenizer("look")["input_ids"]
    batch = SentenceMasking(tokenizer, seed=0)([{"input_ids": ids, "index": index} for index in range(200)])
    assert (batch["labels"] != -100).any(-1).all()


def test_a_mask_depends_on_index_and_seed_alone(tokenizer):
    examples = [{"input_ids": tokenizer(line)["input_ids"], "index": index} for index, line in enumerate(LINES[:40])]
    together = SentenceMasking(tokenizer, seed=3)(examples)
    alone = [SentenceMasking(tokenizer, seed=3)([example]) for example in reversed(examples)][::-1]
    for row, single in enumerate(alone):
        length = single["input_ids"].shape[1]
        assert torch.equal(together["input_ids"][row, :length], single["input_ids"][0])
        assert torch.equal(together["labels"][row, :length], single["labels"][0])
    other = SentenceMasking(tokenizer, seed=4)(examples)
    assert not torch.equal(other["labels"], together["labels"])


def test_padding_is_neither_seen_nor_predicted(tokenizer):
    examples = [{"input_ids": tokenizer(text)["input_ids"], "index": 0} for text in ("look", "look at the w1 .")]
    batch = SentenceMasking(tokenizer, seed=0)(examples)
    shorter = len(examples[0]["input_ids"])
    assert batch["attention_mask"][0].tolist() == [1] * shorter + [0] * (batch["input_ids"].shape[1] - shorter)
    assert (batch["labels"][0, shorter:] == -100).all()
    assert (batch["input_ids"][0, shorter:] == tokenizer.pad_token_id).all()


def test_the_corpus_keeps_its_order_and_goes_through_every_pattern(corpus, tokenizer):
    sentences = Sentences(corpus, tokenizer, 32, "drop", patterns=3)
    assert len(sentences) == 360
    texts = [tokenizer.decode(sentences[index]["input_ids"], skip_special_tokens=True).strip() for index in range(360)]
    assert texts == LINES * 3
    assert [sentences[index]["index"] for index in range(360)] == list(range(360))


@pytest.mark.parametrize(("policy", "kept"), [("drop", 2), ("truncate", 3)])
def test_long_sentences_and_blank_lines_are_counted(tmp_path, tokenizer, policy, kept):
    (tmp_path / "corpus.txt").write_text(f"look at .\n\n{'look ' * 40}\n  \nlook .\n")
    sentences = Sentences(tmp_path / "corpus.txt", tokenizer, 16, policy, patterns=1)
    assert (sentences.counts.sentences, sentences.counts.blank, sentences.counts.too_long) == (kept, 2, 1)
    assert len(sentences) == kept
    if policy == "truncate":
        ids = sentences[1]["input_ids"]
        assert len(ids) == 16
        assert ids[-1] == tokenizer.eos_token_id


def test_twins_start_from_the_same_weights_and_see_the_same_batches(corpus, tmp_path, monkeypatch):
    seen = {}
    for config in ("babyberta_softmax", "babyberta_ssa_2"):
        first: list = []
        batches: list = []
        step = train_babyberta.RecipeTrainer.training_step

        def record(self, model, inputs, *args, first=first, batches=batches, step=step, **kwargs):
            if not first:
                first.append({name: value.clone() for name, value in model.state_dict().items()})
            batches.append({name: value.clone() for name, value in inputs.items()})
            return step(self, model, inputs, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(train_babyberta.RecipeTrainer, "training_step", record)
            assert train_babyberta.main(command_line(corpus, tmp_path / config, config=config)) == 0
        seen[config] = first[0], batches
    (softmax, softmax_batches), (ssa, ssa_batches) = seen.values()
    assert {name for name in ssa if "ssa_norm" not in name} == softmax.keys()
    assert all(torch.equal(ssa[name], softmax[name]) for name in softmax)
    assert len(ssa_batches) == 6
    for ours, theirs in zip(ssa_batches, softmax_batches, strict=True):
        assert ours["input_ids"].shape[0] == 16
        assert ours.keys() == theirs.keys() == {"input_ids", "attention_mask", "labels"}
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_saves_what_transformers_loads_and_resumes_exactly(corpus, tmp_path):
    whole = command_line(corpus, tmp_path / "whole")
    assert train_babyberta.main(whole) == 0
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["steps"] == 6
    assert (tmp_path / "whole" / "training.png").stat().st_size > 10_000
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "whole")
    assert model.config._attn_implementation == "ssa"
    assert AutoTokenizer.from_pretrained(tmp_path / "whole")("Look .")["input_ids"][0] == model.config.bos_token_id

    # As if killed before its last steps.
    (tmp_path / "part").mkdir()
    (tmp_path / "whole" / "checkpoint-3").rename(tmp_path / "part" / "checkpoint-3")
    (tmp_path / "part" / "run.json").write_text((tmp_path / "whole" / "run.json").read_text())
    resumed = command_line(corpus, tmp_path / "part", "--resume_from_checkpoint", "last")
    assert train_babyberta.main(resumed) == 0
    ours, theirs = (load_file(tmp_path / run / "model.safetensors") for run in ("part", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_tokenizer_file_of_babyberta_loads_unchanged(shared_data):
    path = str(shared_data / "babyberta_tokenizer" / "tokenizer.json")
    tokenizer = load_tokenizer(BabyBertaArguments(corpus="", tokenizer=path))
    assert len(tokenizer) == 8192
    ids = tokenizer("Look at the doggie !")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "Ġlook", "Ġat", "Ġthe", "Ġdoggie", "Ġ!", "</s>"]
    assert len({tokenizer.mask_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id, *ids[:1], *ids[-1:]}) == 5


def test_the_real_corpus_fits(shared_data):
    path = str(shared_data / "babyberta_tokenizer" / "tokenizer.json")
    tokenizer = load_tokenizer(BabyBertaArguments(corpus="", tokenizer=path))
    sentences = Sentences(shared_data / "aochildes" / "aochildes.txt", tokenizer, 128, "drop", patterns=10)
    assert (sentences.counts.sentences, sentences.counts.blank, sentences.counts.too_long) == (162_129, 0, 0)


@pytest.mark.parametrize("name", ["softmax", "ssa_1.5", "ssa_2", "ssa_trained"])
def test_shipped_configurations_are_babyberta(name, tmp_path):
    given = ["--config", f"babyberta_{name}", "--corpus", "a", "--use_cpu", "true", "--output_dir", str(tmp_path)]
    options, training = parse((BabyBertaArguments, RecipeArguments), given)
    assert (options.layers, options.heads, options.hidden_size, options.ffn_size) == (8, 8, 256, 1024)
    assert (options.max_length, options.patterns, options.vocab_size, options.long_sentences) == (128, 10, 8192, "drop")
    assert (training.samples_per_step, training.learning_rate, training.warmup_steps) == (16, 1e-4, 24_000)
    assert training.weight_decay == 0
    assert training.train_sampling_strategy == "sequential"
    assert options.attention == ("sdpa" if name == "softmax" else "ssa")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ssa", "ssa-3"], "Unknown SSA preset 'ssa-3'"),
        (["--tokenizer", "/missing"], "cannot load the tokenizer /missing"),
        (["--corpus", "/missing.txt"], "cannot read /missing.txt"),
        (["--max_length", "2"], "has no sentences to train on"),
    ],
)
def test_wrong_options_are_refused_in_a_line(corpus, tmp_path, capsys, options, message):
    assert train_babyberta.main(command_line(corpus, tmp_path / "run", *options)) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
