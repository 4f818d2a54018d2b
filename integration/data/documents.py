"""Read documents out of files, one after the other, none of them held whole if it is long.

A document is a line of a .jsonl file, a row of a .parquet file (both have their text in a column
``text``), or all of a .txt file. Text forms may be compressed.
"""

import bz2
import gzip
import io
import json
import lzma
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import IO, Any, cast

# Rows of a .parquet file that are decoded at once.
ROWS = 256


class DocumentError(ValueError):
    """A document cannot be read. The message names file and row."""


def kind(file: Path) -> str | None:
    """Return the ending that says how ``file`` is read, or None where it is of no known kind.

    >>> kind(Path("a.jsonl.gz")), kind(Path("a.TXT")), kind(Path("a.parquet.gz"))
    ('.jsonl', '.txt', None)
    """
    name = file.name.lower()
    codec = Path(name).suffix
    plain = name.removesuffix(codec) if codec in CODECS else name
    ending = Path(plain).suffix
    known = ending in READERS and (ending in TEXT or plain == name)
    return ending if known else None


def pieces(file: Path, limit: int) -> Iterator[str]:
    """Yield the documents of ``file`` in their order, those longer than ``limit`` in pieces.

    A piece has at most ``limit`` characters and ends at a line or a word, where there is an end in
    its second half. The pieces of a document, joined, are the document.

    Raises:
        DocumentError: a document that cannot be read, or has no text.
    """
    reader = READERS[kind(file) or ""]
    try:
        yield from reader(file, limit)
    except DocumentError:
        raise
    except Exception as error:  # every format and codec has error types of its own
        reason = " ".join(str(error).split()) or repr(error)
        raise DocumentError(f"{file} cannot be read: {reason}") from error


def cut(text: str, limit: int) -> Iterator[str]:
    """Yield ``text`` in pieces, as ``pieces`` does.

    >>> list(cut("one two three", 8))
    ['one two ', 'three']
    """
    start = 0
    while len(text) - start > limit:
        end = start + limit
        middle = start + (limit + 1) // 2
        found = text.rfind("\n", middle, end) + 1 or text.rfind(" ", middle, end) + 1
        end = found or end
        yield text[start:end]
        start = end
    if start < len(text) or not text:
        yield text[start:]


def checked(value: Any, where: str) -> str:
    """Return a document's text.

    Raises:
        DocumentError: it is no text, or no Unicode (a lone surrogate, which JSON can spell).
    """
    if not isinstance(value, str):
        raise DocumentError(
            f"{where} needs a text in its column `text`, and has {json.dumps(value)[:40]}"
        )
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DocumentError(f"{where} is not Unicode: {error}") from None
    return value


class _Zstd(io.RawIOBase):
    """All frames of a zstd file, one after the other, as gzip.open reads members.

    The reader of the package ends without a word after the first frame or in the middle of one.
    """

    def __init__(self, file: Path) -> None:
        self._packed = open(file, "rb")  # noqa: SIM115 - closed by close
        self._ready = self._waiting = b""
        self._frame: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        import zstandard

        while not self._ready:
            self._waiting = self._waiting or self._packed.read(2**17)
            if not self._waiting:
                if self._frame is not None:
                    raise EOFError("the file ends inside of a frame")
                return 0
            self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            self._ready = self._frame.decompress(self._waiting)
            self._waiting = self._frame.unused_data if self._frame.eof else b""
            self._frame = None if self._frame.eof else self._frame
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size

    def close(self) -> None:
        self._packed.close()
        super().close()


def _open_zstd(file: Path) -> IO[bytes]:
    return cast(IO[bytes], io.BufferedReader(_Zstd(file), 2**17))


CODECS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstd,
}


@contextmanager
def _open(file: Path) -> Generator[IO[str]]:
    plain = partial(open, mode="rb")
    with CODECS.get(file.suffix.lower(), plain)(file) as stream:
        yield io.TextIOWrapper(stream, encoding="utf-8-sig")


def _lines(file: Path, limit: int) -> Iterator[str]:
    with _open(file) as stream:
        for number in count(1):
            where = f"{file}, line {number},"
            try:
                line = stream.readline()
            except UnicodeDecodeError as error:
                raise DocumentError(f"{where} is not UTF-8: {error.reason}") from None
            if not line:
                return
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DocumentError(f"{where} cannot be read as JSON: {error}") from None
            except RecursionError:
                raise DocumentError(f"{where} cannot be read as JSON: too deep") from None
            if not isinstance(row, dict) or "text" not in row:
                has = ", ".join(row) if isinstance(row, dict) else f"a {type(row).__name__}"
                raise DocumentError(f"{where} needs a column `text`; it has: {has or 'nothing'}")
            yield from cut(checked(row["text"], where), limit)


def _whole(file: Path, limit: int) -> Iterator[str]:
    with _open(file) as stream:
        rest = ""
        while block := stream.read(limit):
            *ready, rest = cut(rest + block, limit)
            yield from ready
        if rest:
            yield rest


def _rows(file: Path, limit: int) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet

    # A stream: a name given to pyarrow could be taken for an address.
    with open(file, "rb") as stream, pa.parquet.ParquetFile(stream) as table:
        schema = table.schema_arrow
        names = ", ".join(schema.names)
        if "text" not in schema.names:
            raise DocumentError(f"{file} needs a column `text`; it has: {names}")
        batches = table.iter_batches(batch_size=ROWS, columns=["text"])
        values = chain.from_iterable(batch.column(0).to_pylist() for batch in batches)
        for number, value in enumerate(values, 1):
            yield from cut(checked(value, f"{file}, row {number},"), limit)


READERS: dict[str, Callable[[Path, int], Iterator[str]]] = {
    ".jsonl": _lines,
    ".parquet": _rows,
    ".txt": _whole,
}
TEXT = (".jsonl", ".txt")
