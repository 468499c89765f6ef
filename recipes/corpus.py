"""Text corpora: a data set of the Hugging Face Hub, or local parquet, JSON lines and text files."""

import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets

logger = logging.getLogger(__name__)

_LOADERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text"}


@dataclass
class CorpusArguments:
    """Which documents to read."""

    dataset: str = field(
        default="HuggingFaceFW/fineweb",
        metadata={
            "help": "Hub data set, or a local parquet, jsonl or txt file (a txt file is one document), or a folder"
        },
    )
    dataset_config: str | None = field(
        default=None, metadata={"help": "its configuration on the Hub, such as sample-10BT"}
    )
    split: str = field(default="train", metadata={"help": "split of a Hub data set"})
    text_column: str = field(default="text", metadata={"help": "column with the documents"})


@dataclass
class Counts:
    """What was read: documents used, and rows left out because their text is null or blank."""

    documents: int = 0
    null: int = 0
    blank: int = 0

    def __str__(self) -> str:
        left_out = f"; left out {self.null:,} null and {self.blank:,} blank" if self.null or self.blank else ""
        return f"{self.documents:,} documents{left_out}"

    def to_dict(self) -> dict[str, int]:
        """Return the counts by name."""
        return dataclasses.asdict(self)


def open_corpus(source: CorpusArguments, streaming: bool = True) -> datasets.Dataset | datasets.IterableDataset:
    """Open a corpus with one column, of documents.

    Args:
        source: what to read.
        streaming: read while iterating; false downloads a Hub data set first.

    Raises:
        ValueError: if there is no such data set, file, configuration, split or column, or it can't be read.
    """
    try:
        if Path(source.dataset).exists():
            kind, files = _local_files(Path(source.dataset))
            extra = {"sample_by": "document"} if kind == "text" else {}
            dataset = datasets.load_dataset(kind, data_files=files, split="train", streaming=streaming, **extra)
        else:
            dataset = datasets.load_dataset(
                source.dataset, source.dataset_config, split=source.split, streaming=streaming
            )
        columns = dataset.column_names or list(next(iter(dataset)))
    except StopIteration:
        raise ValueError(f"{source.dataset} is empty.") from None
    except (datasets.exceptions.DatasetsError, ValueError, OSError) as error:
        hint = "" if Path(source.dataset).exists() else " There is no such file or folder here; is the Hub reachable?"
        raise ValueError(f"cannot read {source.dataset}: {_first_line(error)}{hint}") from error
    if source.text_column not in columns:
        raise ValueError(
            f"{source.dataset} has no column {source.text_column!r}: give --text_column one of {', '.join(columns)}."
        )
    return dataset.select_columns(source.text_column)


def texts(rows: Any, source: CorpusArguments, counts: Counts) -> Iterator[str]:
    """Yield the documents of an open corpus, and count them and what is left out.

    Raises:
        ValueError: if a file is corrupt, or a text is no string.
    """
    iterator = iter(rows)
    while True:
        try:
            row = next(iterator)
        except StopIteration:
            return
        except (datasets.exceptions.DatasetsError, ValueError, OSError) as error:
            seen = counts.documents + counts.null + counts.blank
            raise ValueError(f"{source.dataset} is corrupt after row {seen:,}: {_first_line(error)}") from error
        text = row[source.text_column]
        if text is None:
            counts.null += 1
        elif not isinstance(text, str):
            raise ValueError(f"{source.dataset}: column {source.text_column!r} holds {type(text).__name__}, not text.")
        elif not text.strip():
            counts.blank += 1
        else:
            counts.documents += 1
            yield text


def _local_files(path: Path) -> tuple[str, list[str]]:
    files = sorted(file for file in path.rglob("*") if file.suffix in _LOADERS) if path.is_dir() else [path]
    kinds = {_LOADERS.get(file.suffix) for file in files}
    if len(kinds) != 1 or None in kinds:
        found = ", ".join(sorted({file.suffix or file.name for file in files})) or "nothing"
        raise ValueError(f"expected files of one of the types {', '.join(_LOADERS)}, found {found}.")
    if empty := [str(file) for file in files if not file.stat().st_size]:
        raise ValueError(f"{empty[0]} is an empty file.")
    return str(kinds.pop()), [str(file) for file in files]


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}".splitlines()[0]
