"""Documents as token blocks of one length: written once to a cache, or packed while streaming.

Documents are joined end to end, each closed by the tokenizer's end-of-text token, and cut into blocks. No token is
left out but those of the last, incomplete block.
"""

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from rich.progress import track
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from ssa_hf.recipes.corpus import CorpusArguments, Counts, texts

CHUNK = 256  # documents tokenised at once, on all cores
Block = dict[str, Tensor]


class PackedBlocks(Dataset[Block]):
    """Blocks of a packed corpus on disk.

    Args:
        folder: what :func:`pack` returned.
        length: tokens a block.
        separate_documents: keep attention within documents, see :func:`make_block`.

    Raises:
        ValueError: if there is less than one block.
    """

    def __init__(self, folder: Path, length: int, separate_documents: bool = False) -> None:
        self.folder, self.counts = folder, json.loads((folder / "meta.json").read_text())
        self.length, self.separate_documents = length, separate_documents
        self._tokens = np.memmap(folder / "tokens.bin", dtype=self.counts["dtype"], mode="r")
        self._starts = np.load(folder / "starts.npy", mmap_mode="r")
        if len(self._tokens) < length:
            raise ValueError(
                f"the corpus has {len(self._tokens):,} tokens, less than one sequence of {length}: give more data."
            )

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker process opens the files itself: pickling would send it their contents.
        return PackedBlocks, (self.folder, self.length, self.separate_documents)

    def __len__(self) -> int:
        return len(self._tokens) // self.length

    def __getitem__(self, index: int) -> Block:
        if not 0 <= index < len(self):
            raise IndexError(index)
        begin = index * self.length
        first, last = np.searchsorted(self._starts, (begin, begin + self.length))
        starts = self._starts[first:last] - begin
        return make_block(self._tokens[begin : begin + self.length], starts, self.separate_documents)


class PackedStream(IterableDataset[Block]):
    """Blocks packed from a stream without end: after its last document, a corpus starts again.

    Its position can be saved and restored without reading again what came before. Only the process that feeds the
    others iterates over it (accelerate dispatches the batches of iterable data sets), in no worker process.

    Args:
        rows: open corpus, streaming.
        source: its description.
        tokenizer: ends each document with its ``eos_token``.
        length: tokens a block.
        separate_documents: keep attention within documents, see :func:`make_block`.
    """

    def __init__(
        self,
        rows: datasets.IterableDataset,
        source: CorpusArguments,
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        separate_documents: bool = False,
    ) -> None:
        self.rows, self.source, self.tokenizer = rows, source, tokenizer
        self.length, self.separate_documents = length, separate_documents
        self.counts = Counts()
        self._beginning = rows.state_dict()
        self._skip = 0
        # Where a chunk of documents begins: blocks before it, tokens and document starts left over, the source's state.
        self._positions: list[dict[str, Any]] = [{"blocks": 0, "tokens": [], "starts": [], "rows": None}]

    def position(self, blocks: int) -> dict[str, Any]:
        """Return where to go on after the first ``blocks`` blocks, as data for JSON; forget earlier positions."""
        while len(self._positions) > 1 and self._positions[1]["blocks"] <= blocks:
            del self._positions[0]
        return {**self._positions[0], "skip": blocks - self._positions[0]["blocks"]}

    def restore(self, position: dict[str, Any]) -> None:
        """Go on from a :meth:`position` at the next iteration."""
        self._skip = position["skip"]
        self._positions = [{key: value for key, value in position.items() if key != "skip"}]
        if position["rows"] is not None:
            self.rows.load_state_dict(position["rows"])

    def __iter__(self) -> Iterator[Block]:
        return itertools.islice(self._blocks(), self._skip, None)

    def _blocks(self) -> Iterator[Block]:
        blocks = self._positions[-1]["blocks"]
        tokens = np.array(self._positions[-1]["tokens"], dtype=np.int64)
        starts = np.array(self._positions[-1]["starts"], dtype=np.int64)
        while True:
            for chunk in tokenized_chunks(self.rows, self.source, self.tokenizer, self.counts):
                lengths = np.array([len(document) for document in chunk])
                starts = np.concatenate([starts, len(tokens) + np.cumsum(lengths) - lengths])
                tokens = np.concatenate([tokens, *chunk])
                whole = len(tokens) // self.length * self.length
                for begin in range(0, whole, self.length):
                    inside = starts[(starts >= begin) & (starts < begin + self.length)] - begin
                    yield make_block(tokens[begin : begin + self.length], inside, self.separate_documents)
                blocks += whole // self.length
                tokens, starts = tokens[whole:], starts[starts >= whole] - whole
                self._positions.append(
                    {
                        "blocks": blocks,
                        "tokens": tokens.tolist(),
                        "starts": starts.tolist(),
                        "rows": self.rows.state_dict(),
                    }
                )
            if not self.counts.documents and not blocks:
                raise ValueError(f"{self.source.dataset} has no documents to train on.")
            self.rows.load_state_dict(self._beginning)


def make_block(tokens: np.ndarray, starts: np.ndarray, separate_documents: bool) -> Block:
    """Make a training example of a block.

    Args:
        tokens: token ids, (length,).
        starts: where in the block a document starts, ascending.
        separate_documents: count positions from each document's start, by which Transformers models keep attention
            within a document, and predict no document's first token from the one before.

    Returns:
        ``input_ids``, ``labels`` (not shifted), and ``position_ids`` for separate documents; int64, (length,).
    """
    input_ids = torch.from_numpy(tokens.astype(np.int64))
    if not separate_documents:
        return {"input_ids": input_ids, "labels": input_ids}
    positions = np.arange(len(tokens))
    labels = input_ids.clone()
    for start in starts:
        positions[start:] = np.arange(len(tokens) - start)
        labels[start] = -100
    return {"input_ids": input_ids, "labels": labels, "position_ids": torch.from_numpy(positions)}


def tokenized_chunks(
    rows: Iterable[Any], source: CorpusArguments, tokenizer: PreTrainedTokenizerBase, counts: Counts
) -> Iterator[list[list[int]]]:
    """Yield the token ids of documents, up to ``CHUNK`` at once, each closed by the end-of-text token.

    Raises:
        ValueError: if the tokenizer has no ``eos_token``, or from :func:`ssa_hf.recipes.corpus.texts`.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no eos_token, which must end each document.")
    documents = texts(rows, source, counts)
    while chunk := list(itertools.islice(documents, CHUNK)):
        encoded = tokenizer(chunk, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        yield [[*ids, tokenizer.eos_token_id] for ids in encoded]


def pack(
    rows: Iterable[Any], source: CorpusArguments, tokenizer: PreTrainedTokenizerBase, folder: Path, description: str
) -> Path:
    """Tokenise a corpus into a folder, unless it is there: token ids, where documents start, and counts.

    The folder appears only when it is complete, so that a killed run leaves nothing that looks like a cache.

    Returns:
        The folder.

    Raises:
        ValueError: if the corpus can't be read or has no documents.
    """
    if folder.exists():
        return folder
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True, exist_ok=True)
    try:
        dtype = "uint16" if len(tokenizer) <= 2**16 else "uint32"
        counts, starts, written = Counts(), [0], 0
        with (partial / "tokens.bin").open("wb") as file:
            chunks = tokenized_chunks(rows, source, tokenizer, counts)
            for chunk in track(chunks, description=description, total=None):
                for document in chunk:
                    np.array(document, dtype=dtype).tofile(file)
                    written += len(document)
                    starts.append(written)
        if not counts.documents:
            raise ValueError(f"{source.dataset} has no documents for {description} ({counts}).")
        np.save(partial / "starts.npy", np.array(starts[:-1], dtype=np.int64))
        (partial / "meta.json").write_text(json.dumps({"dtype": dtype, "tokens": written, **counts.to_dict()}))
        if not folder.exists():
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def cache_key(*parts: Any) -> str:
    """Return a short hash of what determines a cached file."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]
