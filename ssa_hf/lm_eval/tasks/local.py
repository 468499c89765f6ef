"""Datasets of the local tasks: files below a folder that is given on the command line."""

from pathlib import Path
from typing import Any

import datasets
from lm_eval.tasks.hellaswag.utils import process_docs as process_hellaswag

from ssa_hf.recipes.sentences import read_pairs

__all__ = ["load_jsonl", "load_pairs", "process_hellaswag"]


def load_jsonl(file: str, data: str | None = None, **_: Any) -> dict[str, datasets.Dataset]:
    """Load a file of JSON lines with the fields that the Hub's dataset has.

    Args:
        file: its path below ``data``, named for its split.
        data: folder, from ``--metadata data=FOLDER``.

    Raises:
        ValueError: if ``data`` is not given.
        FileNotFoundError: if there is no such file.
    """
    path = _find(file, data)
    return {path.stem: datasets.Dataset.from_json(str(path))}


def load_pairs(file: str, data: str | None = None, **_: Any) -> dict[str, datasets.Dataset]:
    """Load one of Zorro's files of minimal pairs, as the split "test".

    Args and errors are those of :func:`load_jsonl`; a malformed file raises ValueError with its line.
    """
    sentences = read_pairs(_find(file, data))
    return {"test": datasets.Dataset.from_dict({"sentence_bad": sentences[::2], "sentence_good": sentences[1::2]})}


def _find(file: str, data: str | None) -> Path:
    if data is None:
        raise ValueError(f"this task reads local files: give --metadata data=FOLDER, the folder that holds {file}.")
    path = Path(data) / file
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: --metadata data=FOLDER must name the folder that holds {file}.")
    return path
