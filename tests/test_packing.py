"""Packing: nothing lost, nothing twice, and a stream goes on where it was left."""

import itertools
import json
import pickle
from pathlib import Path

import pytest
import torch

pytest.importorskip("datasets")

from ssa_hf.recipes import packing
from ssa_hf.recipes.corpus import CorpusArguments, open_corpus
from ssa_hf.recipes.packing import PackedBlocks, PackedStream, make_block, pack
from ssa_hf.recipes.tokenizer import train_tokenizer
from tests.conftest import tiny_model

LENGTH = 16


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "CHUNK", 5)
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 60, (43,), generator=generator).tolist()
    lines = [json.dumps({"text": " ".join(f"{row}w{word}" for word in range(size))}) for row, size in enumerate(sizes)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    return CorpusArguments(dataset=str(tmp_path / "corpus.jsonl"))


@pytest.fixture
def tokenizer():
    return train_tokenizer(["w 0 1 2 3 4 5 6 7 8 9"], 300)


def all_tokens(source, tokenizer):
    documents = [json.loads(line)["text"] for line in Path(source.dataset).read_text().splitlines()]
    return [token for text in documents for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]


def blocks_of(source, tokenizer, folder, separate=False):
    return PackedBlocks(pack(open_corpus(source), source, tokenizer, folder, "test"), LENGTH, separate)


def stream_of(source, tokenizer):
    return PackedStream(open_corpus(source), source, tokenizer, LENGTH, separate_documents=True)


def equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_blocks_hold_every_token_in_order(source, tokenizer, tmp_path):
    tokens = all_tokens(source, tokenizer)
    blocks = blocks_of(source, tokenizer, tmp_path / "packed")
    assert len(blocks) == len(tokens) // LENGTH
    assert torch.cat([block["input_ids"] for block in blocks]).tolist() == tokens[: len(blocks) * LENGTH]
    assert blocks.counts["documents"] == 43
    assert blocks.counts["tokens"] == len(tokens)


def test_a_corpus_is_packed_once_and_a_failure_leaves_nothing(source, tokenizer, tmp_path):
    folder = tmp_path / "cache" / "packed"
    written = blocks_of(source, tokenizer, folder)
    assert pack([], source, tokenizer, folder, "test") == folder  # no rows are asked for
    assert equal(pickle.loads(pickle.dumps(written))[3], written[3])
    with pytest.raises(ValueError, match="no documents"):
        pack([], source, tokenizer, folder.with_name("other"), "test")
    assert [path.name for path in folder.parent.iterdir()] == ["packed"]


def test_a_corpus_shorter_than_a_sequence_is_refused(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("w 1")
    with pytest.raises(ValueError, match="less than one sequence of 16"):
        blocks_of(CorpusArguments(dataset=str(tmp_path / "a.txt")), tokenizer, tmp_path / "packed")


def test_a_stream_gives_the_blocks_of_the_cache_and_then_starts_again(source, tokenizer, tmp_path):
    blocks = blocks_of(source, tokenizer, tmp_path / "packed", separate=True)
    stream = list(itertools.islice(stream_of(source, tokenizer), 2 * len(blocks)))
    assert all(equal(ours, theirs) for ours, theirs in zip(stream, blocks, strict=False))
    tokens = all_tokens(source, tokenizer) * 2
    assert torch.cat([block["input_ids"] for block in stream]).tolist() == tokens[: 2 * len(blocks) * LENGTH]


@pytest.mark.parametrize("taken", [0, 1, 20, 57, 130])
def test_a_restored_stream_goes_on_with_the_next_block(source, tokenizer, taken):
    whole = list(itertools.islice(stream_of(source, tokenizer), 200))
    first = stream_of(source, tokenizer)
    list(itertools.islice(first, taken + 7))  # read ahead of training, as a DataLoader does
    second = stream_of(source, tokenizer)
    second.restore(json.loads(json.dumps(first.position(taken))))
    assert all(
        equal(ours, theirs)
        for ours, theirs in zip(itertools.islice(second, 30), whole[taken : taken + 30], strict=True)
    )
    third = stream_of(source, tokenizer)
    third.restore(json.loads(json.dumps(second.position(taken + 11))))
    assert equal(next(iter(third)), whole[taken + 11])


@pytest.mark.parametrize("implementation", ["ssa", "sdpa"])
def test_separate_documents_do_not_see_each_other(implementation):
    model = tiny_model("nemotron", implementation)
    tokens = torch.arange(3, 3 + LENGTH)
    block = make_block(tokens.numpy(), torch.tensor([0, 6]).numpy(), separate_documents=True)
    assert block["position_ids"].tolist() == [*range(6), *range(10)]
    assert block["labels"][6] == -100
    assert block["labels"][7] == tokens[7]
    inputs = {key: block[key][None] for key in ("input_ids", "position_ids")}
    packed = model(**inputs, use_cache=False).logits[0, 6:]
    torch.testing.assert_close(packed, model(tokens[None, 6:]).logits[0], atol=1e-5, rtol=1e-5)
