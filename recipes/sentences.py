"""Sentences for masked language modelling, one an input, masked as BabyBERTa masks them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, without their ends.

    Raises:
        ValueError: if the file can't be read; for bytes that are not UTF-8, with the number of the line.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield line.decode("utf-8").rstrip("\r\n")
                except UnicodeDecodeError as error:
                    raise ValueError(f"{path}, line {number}: not UTF-8 ({error.reason}).") from error
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}.") from error


def read_pairs(path: Path) -> list[str]:
    """Read minimal pairs, Zorro's format: each ungrammatical sentence before its grammatical partner.

    Raises:
        ValueError: with file and line, for no or an odd number of lines, a blank line or bytes that are not UTF-8.
    """
    sentences = []
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            raise ValueError(f"{path}, line {number}: blank; every line must be a sentence.")
        sentences.append(line.strip())
    if not sentences or len(sentences) % 2:
        raise ValueError(f"{path}, line {len(sentences)}: the last sentence has no partner; lines must be pairs.")
    return sentences


@dataclass
class SentenceCounts:
    """What became of the lines of a corpus."""

    sentences: int = 0
    blank: int = 0
    too_long: int = 0

    def __str__(self) -> str:
        return f"{self.sentences:,} sentences; {self.blank:,} blank lines left out; {self.too_long:,} too long"


class Sentences(Dataset[dict[str, Any]]):
    """Tokenised sentences in the order of the file, gone through once for each mask pattern.

    Sample ``pattern * number of sentences + sentence`` is a sentence's own: its index seeds its mask, so that masks
    do not depend on model, batch, process or resuming.

    Args:
        path: text, a sentence a line.
        tokenizer: adds the special tokens.
        max_length: tokens an input, special tokens included.
        long_sentences: what to do with longer ones: "drop" (as BabyBERTa) or "truncate"; they are counted.
        patterns: mask patterns of each sentence.

    Raises:
        ValueError: if the file can't be read or no sentence is left.
    """

    def __init__(
        self, path: Path, tokenizer: PreTrainedTokenizerBase, max_length: int, long_sentences: str, patterns: int
    ) -> None:
        lines = list(read_lines(path))
        texts = [line for line in lines if line.strip()]
        encoded = (
            tokenizer(texts, truncation=False, return_attention_mask=False, verbose=False)["input_ids"] if texts else []
        )
        self.counts = SentenceCounts(
            blank=len(lines) - len(texts), too_long=sum(len(ids) > max_length for ids in encoded)
        )
        if long_sentences == "drop":
            self.sentences = [ids for ids in encoded if len(ids) <= max_length]
        else:
            # The last token, which ends the sentence, stays.
            self.sentences = [ids if len(ids) <= max_length else [*ids[: max_length - 1], ids[-1]] for ids in encoded]
        self.counts.sentences = len(self.sentences)
        self.patterns = patterns
        if not self.sentences:
            raise ValueError(f"{path} has no sentences to train on ({self.counts}).")

    def __len__(self) -> int:
        return len(self.sentences) * self.patterns

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.sentences[index % len(self.sentences)], "index": index}


@dataclass
class SentenceMasking(DataCollatorForLanguageModeling):
    """BabyBERTa's masking: 0.15 of the tokens are predicted, 0.9 of these masked and 0.1 replaced by a random token.

    None is left unmasked, and at least one token of each sentence is predicted. ``index`` of a sample and ``seed``
    alone determine its mask.
    """

    mask_replace_prob: float = 0.9
    random_replace_prob: float = 0.1
    seed: int | None = 0
    _special: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._special = torch.tensor(self.tokenizer.all_special_ids)

    def torch_call(self, examples: list[Any]) -> dict[str, Any]:
        """Mask each sentence, then pad them on the right."""
        masked = [self._mask(example) for example in examples]
        batch = self.tokenizer.pad({"input_ids": [ids.tolist() for ids, _ in masked]}, return_tensors="pt")
        labels = [label for _, label in masked]
        batch["labels"] = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
        return dict(batch)

    def _mask(self, example: dict[str, Any]) -> tuple[Tensor, Tensor]:
        # PyTorch's CPU generator takes 32 bits of its seed.
        mixed = np.random.SeedSequence((self.seed or 0, example["index"])).generate_state(1)
        self.generator = torch.Generator().manual_seed(int(mixed[0]))
        sentence = torch.tensor([example["input_ids"]])
        while True:
            ids, labels = self.torch_mask_tokens(sentence.clone())
            if (labels != -100).any():
                break
        # A random token may turn out a special one, which never stands inside a sentence.
        ids[torch.isin(ids, self._special) & (labels != -100)] = self.tokenizer.mask_token_id
        return ids[0], labels[0]
