"""The converter from CHILDES transcripts to the AO-CHILDES text."""

import csv
import itertools
import json

import pytest

from ssa_hf.recipes import convert_aochildes
from ssa_hf.recipes.convert_aochildes import COLUMNS, normalise

#: What AO-CHILDES' spelling table does to the words of sample_raw.csv.
SPELLING = {
    "ahhah": "aha",
    "byebye": "bye bye",
    "kitty": "kittie",
    "lets": "let us",
    "uhhuh": "aha",
    "uhhum": "aha",
    "uhuh": "aha",
    "whatcha": "what are you",
}


def row(gloss="hello there", transcript=1, age="400.5", position=1, **changes):
    defaults = {"collection_name": "Eng-NA", "transcript_id": transcript, "target_child_age": age, "gloss": gloss}
    rest = {"utterance_order": position, "speaker_role": "Mother", "type": "declarative", "num_tokens": 2}
    return defaults | rest | changes


def write(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def convert(path, output, *options):
    arguments = ["--transcripts", str(path), "--output", str(output), *options]
    assert convert_aochildes.main(arguments) == 0
    return output.read_text().splitlines(), json.loads(output.with_suffix(".json").read_text())


def test_real_transcripts_give_the_lines_of_aochildes(shared_data, tmp_path):
    spelling = tmp_path / "spelling.txt"
    spelling.write_text("".join(f"{word}\t{replacement}\n" for word, replacement in SPELLING.items()))
    sample = shared_data / "aochildes" / "sample_raw.csv"
    lines, counts = convert(sample, tmp_path / "corpus.txt", "--spelling", str(spelling))
    assert (counts["utterances"], counts["transcripts"]) == (len(lines), 11)
    assert counts["dropped"] == {"unintelligible (xxx, yyy, www)": 25, "no words": 2}
    assert counts["utterances"] + sum(counts["dropped"].values()) == 2000

    # The published corpus has other children's transcripts between these; each of these stands in it whole.
    corpus = (shared_data / "aochildes" / "aochildes.txt").read_text()
    with sample.open(newline="") as file:
        kept = [r for r in csv.DictReader(file) if convert_aochildes.reason_to_drop(r, 2190, "Eng-NA") is None]
    rest = iter(lines)
    for transcript, rows in itertools.groupby(kept, key=lambda r: r["transcript_id"]):
        block = list(itertools.islice(rest, len(list(rows))))
        assert "\n".join(["", *block, ""]) in corpus, transcript


def test_utterances_come_by_age_then_transcript_then_position(tmp_path):
    write(tmp_path / "a.csv", [row("later", age="500"), row("second", transcript=3), row("third", 3, position=2)])
    write(tmp_path / "b.csv", [row("first", transcript=2, position=9), row("youngest", 9, age="99.9")])
    lines, counts = convert(tmp_path, tmp_path / "corpus.txt")
    assert lines == ["youngest .", "first .", "second .", "third .", "later ."]
    assert counts["age_days"] == [99.9, 500.0]
    assert counts["files"] == 2


def test_what_is_dropped_is_counted_with_its_reason(tmp_path, capsys):
    rows = [
        row("kept"),
        row(speaker_role="Target_Child"),
        row(speaker_role="Child"),
        row("what xxx"),
        row("yyy"),
        row("b\N{REPLACEMENT CHARACTER}d"),
        row(num_tokens=0),
        row(" + _ "),
        row(age="NA"),
        row(age="2190.1"),
        row(collection_name="Eng-UK"),
    ]
    write(tmp_path / "a.csv", rows)
    lines, counts = convert(tmp_path / "a.csv", tmp_path / "corpus.txt")
    assert lines == ["kept ."]
    assert counts["dropped"] == {
        "spoken by a child": 2,
        "unintelligible (xxx, yyy, www)": 3,
        "no words": 2,
        "age of the child unknown": 1,
        "child older than 2190 days": 1,
        "not of the collection Eng-NA": 1,
    }
    assert "dropped 2: spoken by a child" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gloss", "kind", "text"),
    [
        ("You're a good Girl", "declarative", "you're a good girl ."),
        ("what is that", "declarative", "what is that ?"),
        ("what a nice hat", "declarative", "what a nice hat ."),
        ("you see it", "yes/no question", "you see it ?"),
        ("come here", "imperative_emphatic", "come here !"),
        ("choo+choo peek_a_boo", "declarative", "choo choo peek a boo ."),
        ("ask mot or FAT about chi", "declarative", "ask mother or father about child ."),
        ("wanna x-ray", "declarative", "want to x-ray ."),
        ("+", "declarative", ""),
    ],
)
def test_normalised_text(gloss, kind, text):
    assert normalise(gloss, kind, {"wanna": "want to"}) == text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("gloss,type\na,b\n", "line 1: no column collection_name, transcript_id"),
        (",".join(COLUMNS) + "\nEng-NA,1,400\n", "line 2: malformed row"),
        (",".join(COLUMNS) + "\nEng-NA,1,old,1,Mother,declarative,hi,1\n", "line 2: malformed row"),
        (",".join(COLUMNS) + "\nEng-NA,1,400,1,Mother,declarative,h\xff,1\n", "line 2: not UTF-8"),
        (",".join(COLUMNS) + '\nEng-NA,1,400,1,Mother,declarative,"hi,1\n', "line 2: unexpected end of data"),
        (",".join(COLUMNS) + "\n", "has no utterances to keep"),
    ],
)
def test_bad_transcripts_are_refused_with_file_and_line(tmp_path, capsys, content, message):
    (tmp_path / "a.csv").write_bytes(content.encode("latin-1"))
    arguments = ["--transcripts", str(tmp_path / "a.csv"), "--output", str(tmp_path / "corpus.txt")]
    assert convert_aochildes.main(arguments) == 2
    error = capsys.readouterr().err
    assert "a.csv" in error
    assert message in error
    assert not (tmp_path / "corpus.txt").exists()


def test_a_bad_spelling_table_is_refused_with_its_line(tmp_path, capsys):
    write(tmp_path / "a.csv", [row()])
    (tmp_path / "spelling.txt").write_text("kitty\tkittie\nwanna want to\n")
    arguments = ["--transcripts", str(tmp_path / "a.csv"), "--output", str(tmp_path / "corpus.txt")]
    assert convert_aochildes.main([*arguments, "--spelling", str(tmp_path / "spelling.txt")]) == 2
    assert "spelling.txt, line 2: must be a word, a TAB" in capsys.readouterr().err
