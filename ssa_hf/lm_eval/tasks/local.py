"""Datasets of the local tasks: files below a folder that is given on the command line."""

from pathlib import Path
from typing import Any

import datasets
from lm_eval.tasks.hellaswag.utils import process_docs as process_hellaswag

__all__ = ["load_jsonl", "load_pairs", "process_hellaswag"]


def load_jsonl(file: str, split: str, data: str | None = None, **_: Any) -> dict[str, datasets.Dataset]:
    """Load a file of JSON lines with the fields that the Hub's dataset has.

    Args:
        file: its path below ``data``.
        split: which split it is.
        data: folder, from ``--metadata data=FOLDER``.

    Raises:
        ValueError: if ``data`` is not given.
        FileNotFoundError: if there is no such file.
    """
    return {split: datasets.Dataset.from_json(str(_find(file, data)))}


def load_pairs(file: str, split: str, data: str | None = None, **_: Any) -> dict[str, datasets.Dataset]:
    """Load one of Zorro's files: in turn a sentence that is ungrammatical and its grammatical partner.

    Args and errors are those of :func:`load_jsonl`; an odd number of lines or a blank one raises ValueError.
    """
    path = _find(file, data)
    lines = path.read_text(encoding="utf-8").splitlines()
    if len(lines) % 2 or not all(map(str.strip, lines)):
        raise ValueError(f"{path}: lines must be pairs of sentences, none blank.")
    return {split: datasets.Dataset.from_dict({"sentence_bad": lines[::2], "sentence_good": lines[1::2]})}


def _find(file: str, data: str | None) -> Path:
    if data is None:
        raise ValueError(f"this task reads local files: give --metadata data=FOLDER, the folder that holds {file}.")
    path = Path(data) / file
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: --metadata data=FOLDER must name the folder that holds {file}.")
    return path
