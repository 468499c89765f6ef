"""Make the text corpus of AO-CHILDES from its transcripts: child-directed speech, by the age of the child.

    python -m ssa_hf.recipes.convert_aochildes --transcripts AOCHILDES/original_transcripts --output aochildes.txt

The transcripts are CHILDES exports, one CSV row an utterance. The text has an utterance a line, lower-cased, with an
end mark; train_babyberta takes it. What was dropped, and why, is printed and written beside it as JSON.
"""

import csv
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import track

from ssa_hf.recipes.arguments import parse
from ssa_hf.recipes.sentences import read_lines

COLUMNS = (
    "collection_name",
    "transcript_id",
    "target_child_age",
    "utterance_order",
    "speaker_role",
    "type",
    "gloss",
    "num_tokens",
)
NO_WORDS = "no words"
CHILDREN = {"Target_Child", "Child"}
#: CHILDES' marks for speech that can't be understood or was not transcribed, and the replacement character.
UNINTELLIGIBLE = re.compile("xxx|yyy|www|\N{REPLACEMENT CHARACTER}")
#: Transcribers mark questions unevenly: these beginnings make one whatever the utterance's type.
QUESTION = re.compile(r"(?!what a )(what|where|how|who|when|you wanna|do you|can you)")
SPEAKERS = {"chi": "child", "mot": "mother", "fat": "father"}


@dataclass
class ConvertArguments:
    """Which transcripts to convert, and where to."""

    transcripts: str = field(metadata={"help": "folder of CSV files, or one of them"})
    output: str = field(metadata={"help": "text file to write"})
    max_age_days: float = field(default=6 * 365, metadata={"help": "drop utterances to older children"})
    collection: str = field(default="Eng-NA", metadata={"help": "CHILDES collection to keep"})
    spelling: str | None = field(
        default=None, metadata={"help": "file of word TAB replacement, as AO-CHILDES' spelling.py lists them"}
    )


@dataclass(frozen=True, order=True)
class Utterance:
    """A line of the corpus and what orders it."""

    age_days: float
    transcript: int
    position: int
    text: str = field(compare=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the recipe; return the exit status."""
    (options,) = parse((ConvertArguments,), arguments, __doc__)
    path = Path(options.transcripts)
    dropped: Counter[str] = Counter()
    try:
        spelling = read_spelling(Path(options.spelling)) if options.spelling else {}
        files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
        utterances = sorted(
            utterance
            for file in track(files, "Reading transcripts", disable=not sys.stderr.isatty())
            for utterance in read_transcripts(file, options.max_age_days, options.collection, spelling, dropped)
        )
        if not utterances:
            raise ValueError(f"{path} has no utterances to keep ({dict(dropped) or 'no CSV files'}).")
    except ValueError as error:
        print(f"convert_aochildes: {error}", file=sys.stderr)
        return 2
    output = Path(options.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(f"{utterance.text}\n" for utterance in utterances), encoding="utf-8", newline="\n")
    counts = {
        "files": len(files),
        "utterances": len(utterances),
        "transcripts": len({utterance.transcript for utterance in utterances}),
        "age_days": [utterances[0].age_days, utterances[-1].age_days],
        "dropped": dict(dropped),
    }
    output.with_suffix(".json").write_text(json.dumps({"options": vars(options), **counts}, indent=2) + "\n")
    print(f"{output}: {len(utterances):,} utterances of {counts['transcripts']:,} transcripts in {len(files)} files")
    for reason, count in dropped.items():
        print(f"  dropped {count:,}: {reason}")
    return 0


def read_transcripts(
    path: Path, max_age_days: float, collection: str, spelling: dict[str, str], dropped: Counter[str]
) -> Iterator[Utterance]:
    """Yield the utterances of a CSV file that are kept; count the others in ``dropped``.

    Raises:
        ValueError: if the file can't be read, lacks a column or has a malformed row, with its line.
    """
    rows = csv.DictReader(read_lines(path), strict=True)
    try:
        missing = [name for name in COLUMNS if name not in (rows.fieldnames or [])]
        if missing:
            raise ValueError(f"{path}, line 1: no column {', '.join(missing)}; is it a CHILDES transcript?")
        for row in rows:
            try:
                reason = reason_to_drop(row, max_age_days, collection)
                text = "" if reason else normalise(row["gloss"], row["type"], spelling)
                if reason or not text:
                    dropped[reason or NO_WORDS] += 1
                    continue
                order = float(row["target_child_age"]), int(row["transcript_id"]), int(row["utterance_order"])
            except (TypeError, ValueError) as error:  # too few fields, or a number that is none
                raise ValueError(f"{path}, line {rows.line_num}: malformed row ({error}).") from error
            yield Utterance(*order, text)
    except csv.Error as error:
        raise ValueError(f"{path}, line {rows.reader.line_num}: {error}.") from error


def reason_to_drop(row: dict[str, str], max_age_days: float, collection: str) -> str | None:
    """Return why a row of a transcript is not kept, or None if it is.

    Raises:
        ValueError: for an age or a number of words that is no number.
    """
    if row["collection_name"] != collection:
        return f"not of the collection {collection}"
    if row["target_child_age"] == "NA":
        return "age of the child unknown"
    if float(row["target_child_age"]) > max_age_days:
        return f"child older than {max_age_days:g} days"
    if row["speaker_role"] in CHILDREN:
        return "spoken by a child"
    if int(row["num_tokens"]) < 1:
        return NO_WORDS
    if UNINTELLIGIBLE.search(row["gloss"]):
        return "unintelligible (xxx, yyy, www)"
    return None


def normalise(gloss: str, kind: str, spelling: dict[str, str]) -> str:
    """Return an utterance lower-cased, compounds split at + and _, with an end mark; empty if it has no words.

    Args:
        gloss: the words as transcribed.
        kind: CHILDES' type of the utterance, such as "question".
        spelling: what to write for a lower-cased word.
    """
    words = []
    for word in gloss.lower().split():
        word = spelling.get(word, word)
        words.append(SPEAKERS.get(word, word).replace("+", " ").replace("_", " "))
    text = " ".join(" ".join(words).split())
    if not text:
        return ""
    mark = "?" if "question" in kind or QUESTION.match(text) else "!" if kind.startswith("imperative") else "."
    return f"{text} {mark}"


def read_spelling(path: Path) -> dict[str, str]:
    """Read a table of words and their replacements.

    Raises:
        ValueError: for a line without exactly one TAB.
    """
    table = {}
    for number, line in enumerate(read_lines(path), start=1):
        word, tab, replacement = line.partition("\t")
        if not tab or "\t" in replacement:
            raise ValueError(f"{path}, line {number}: must be a word, a TAB and its replacement.")
        table[word] = replacement
    return table


if __name__ == "__main__":
    raise SystemExit(main())
