"""Every document of every file is read once, whatever its name, its form and its length."""

import bz2
import gzip
import json
import lzma

import pytest
import zstandard
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from integration.data.documents import CODECS, DocumentError, cut, kind, pieces
from integration.data.source import Source

COMPRESS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}


def row(text):
    return json.dumps({"text": text}) + "\n"


def texts(source, limit=1000):
    return [document["text"] for document in source.documents(limit)]


@pytest.mark.parametrize(
    "name", ["shard[1]", "a*", "what?", "a::b", "{x}", "file:", "~", "a b", "%20"]
)
def test_a_name_is_no_pattern(tmp_path, name):
    """Beside files that a pattern of the same name would find."""
    for number, stem in enumerate((name, "shard1", "ab", "whats", "x")):
        (tmp_path / f"{stem}.jsonl").write_text(row(f"document {number}"))
    found = texts(Source.at(tmp_path))
    assert sorted(found) == [f"document {number}" for number in range(5)]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("ending", [".jsonl", ".txt"])
def test_compressed_files_are_read_beside_others(tmp_path, codec, ending):
    """Of two parts, as `cat` joins them: the second is data too."""
    first, second = (row("one"), row("two")) if ending == ".jsonl" else ("one", "two")
    (tmp_path / f"part-0{ending}").write_text(row("zero") if ending == ".jsonl" else "zero")
    packed = COMPRESS[codec](first.encode()) + COMPRESS[codec](second.encode())
    (tmp_path / f"part-1{ending}{codec}").write_bytes(packed)
    source = Source.at(tmp_path)
    source.check()
    assert "".join(texts(source)) == "zeroonetwo"


@pytest.mark.parametrize("codec", CODECS)
def test_a_file_that_is_cut_short_is_named(tmp_path, codec):
    file = tmp_path / f"a.jsonl{codec}"
    file.write_bytes(COMPRESS[codec](row("x" * 1000).encode())[:-6])
    with pytest.raises(DocumentError, match=r"a\.jsonl.* cannot be read"):
        list(pieces(file, 1000))


def test_rows_of_parquet_and_their_faults(tmp_path):
    file = tmp_path / "a.parquet"
    Dataset.from_dict({"text": ["one", "two"], "more": [1, 2]}).to_parquet(str(file))
    assert list(pieces(file, 1000)) == ["one", "two"]
    Dataset.from_dict({"text": ["one"] * 300 + [None]}).to_parquet(str(file))
    with pytest.raises(DocumentError, match=r"a\.parquet, row 301, needs a text"):
        list(pieces(file, 1000))
    Dataset.from_dict({"content": ["one"]}).to_parquet(str(file))
    with pytest.raises(DocumentError, match="needs a column `text`; it has: content"):
        list(pieces(file, 1000))


def test_bytes_that_are_no_text_are_named_with_their_line(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(row("x").encode() + b'{"text": "\xff"}\n')
    with pytest.raises(DocumentError, match=r"a\.jsonl.*UTF-8"):
        list(pieces(file, 1000))
    (tmp_path / "b.txt").write_bytes(b"x" * 100_000 + b"\xff")
    with pytest.raises(DocumentError, match=r"b\.txt cannot be read: .*utf-8"):
        list(pieces(tmp_path / "b.txt", 1000))


def test_endings_decide_whatever_their_case(tmp_path):
    assert [kind(tmp_path / n) for n in ("A.JSONL.GZ", "b.Txt", "c.parquet.gz", "d")] == [
        ".jsonl", ".txt", None, None,
    ]  # fmt: skip


@given(st.text(alphabet="ab \n", max_size=60), st.integers(1, 20))
def test_the_pieces_joined_are_the_document(text, limit):
    found = list(cut(text, limit))
    assert "".join(found) == text
    assert all(0 < len(piece) <= limit for piece in found) or found == [""]


@given(text=st.text(alphabet="ab \n\u2603", max_size=200), limit=st.integers(1, 20))
def test_a_text_file_is_streamed_whole(tmp_path_factory, text, limit):
    file = tmp_path_factory.mktemp("text") / "a.txt"
    file.write_text(text, newline="")
    found = list(pieces(file, limit))
    assert "".join(found) == text
    assert all(0 < len(piece) <= limit for piece in found)
