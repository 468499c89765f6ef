"""Reading corpora: what is used, what is left out and counted, and what is refused."""

import pytest

pytest.importorskip("datasets")

from ssa_hf.recipes.corpus import CorpusArguments, Counts, open_corpus, texts


def read(path, **options):
    source, counts = CorpusArguments(dataset=str(path), **options), Counts()
    return list(texts(open_corpus(source), source, counts)), counts


def test_null_and_blank_rows_are_counted(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": null}\n{"text": " \\n"}\n{"text": "two"}\n')
    documents, counts = read(tmp_path / "a.jsonl")
    assert documents == ["one", "two"]
    assert counts == Counts(documents=2, null=1, blank=1)
    assert str(counts) == "2 documents; left out 1 null and 1 blank"


def test_a_text_file_is_one_document_and_a_folder_its_files_in_order(tmp_path):
    (tmp_path / "b.txt").write_text("second\n\nfile")
    (tmp_path / "a.txt").write_text("first")
    assert read(tmp_path)[0] == ["first", "second\n\nfile"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"body": "one"}\n', "no column 'text': give --text_column one of body"),
        ("a.jsonl", b'{"text": 3}\n', "holds int, not text"),
        ("a.jsonl", b'{"text": "one"\n', "cannot read .*a.jsonl: .*JSON parse error"),
        ("a.txt", b"abc\xff", "cannot read .*a.txt: UnicodeDecodeError"),
        ("a.txt", b"", "a.txt is an empty file"),
        ("a.parquet", b"PAR1 no parquet", "cannot read .*a.parquet: ArrowInvalid"),
        ("a.docx", b"x", "expected files of one of the types .*, found .docx"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / name)


def test_a_file_corrupt_in_its_middle_is_no_short_corpus(tmp_path, shared_data):
    content = bytearray((shared_data / "fineweb/sample-00000.parquet").read_bytes())
    content[len(content) // 2 : len(content) // 2 + 400] = bytes(400)
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(ValueError, match="corrupt after row"):
        read(tmp_path / "a.parquet")


def test_mixed_and_missing_files_are_refused(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.jsonl").write_text('{"text": "x"}')
    with pytest.raises(ValueError, match=r"found \.jsonl, \.txt"):
        read(tmp_path)
    monkeypatch.setattr("datasets.load_dataset", _unreachable)
    with pytest.raises(ValueError, match="no such file or folder here; is the Hub reachable"):
        read(tmp_path / "missing")


def _unreachable(*args, **kwargs):
    raise ConnectionError("Couldn't reach the Hub")
