"""Find, check and build the training data and the tokenizer, before any rank starts.

No torch here. The default data is the Python source text of the installed pins, taken from
site-packages and so never from an overlay: the same bytes whatever the set.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import distribution
from itertools import accumulate
from pathlib import Path
from typing import cast

from integration.data.documents import CODECS, READERS, DocumentError, checked, cut, kind, pieces
from integration.ground.errors import UserError
from integration.ground.paths import cache_dir

# Part of the cache key: raise it when the corpus or the tokenizer is built in another way.
FORMAT = 1
PINS = ("torch", "torchtitan")
MINI_VOCAB = 4096
# A BPE of so many tokens needs no more; the whole corpus would take ten times as long.
TOKENIZER_BYTES = 12_000_000
BOS, EOS = "<|begin|>", "<|end|>"

# Characters of a long document, about a million tokens: more than a few steps of any job read.
LONG_DOCUMENT = 4_000_000
# Characters of all files together that are read before a job starts, to find what is wrong.
LOOKED_AT = 2**25
# Files that stand beside data without being any.
BESIDE = ("readme", "license", "licence", "notice", "dataset_infos.json", "dataset_card")


@dataclass(frozen=True, slots=True)
class Source:
    """A folder of text, classified by one rule.

    A data set saved by ``save_to_disk`` is ``"disk"``. Elsewhere each file below the folder is
    data (``"files"``), and one that cannot be read as such is refused by its name. Names that begin
    with a dot or an underscore, and those in ``BESIDE``, are no data. ``files`` are sorted, so that
    every rank sees the same order.
    """

    path: Path
    kind: str
    files: tuple[Path, ...] = ()

    @classmethod
    def at(cls, path: Path) -> "Source":
        """Classify ``path``.

        Raises:
            UserError: it is missing, unreadable, holds no data, or files of unknown or of several
                kinds.
        """
        try:
            if not path.is_dir():
                state = "is a file" if path.exists() else "does not exist"
                raise UserError(f"--data needs a folder, and {path} {state}")
            if (path / "dataset_info.json").exists() and (path / "state.json").exists():
                return cls(path, "disk")
            if (path / "dataset_dict.json").exists():
                raise UserError(
                    f"{path} holds several splits; name one of its folders, {path}/train say"
                )
            files = tuple(sorted(_data_below(path)))
        except PermissionError as error:
            raise UserError(f"--data cannot be read: {error.filename}: permission denied") from None
        known = ", ".join(READERS)
        if not files:
            raise UserError(
                f"{path} holds no {known} file and no Hugging Face data set (dataset_info.json)"
            )
        unknown = [file for file in files if kind(file) is None]
        if unknown:
            more = f" and {len(unknown) - 1} more" if unknown[1:] else ""
            raise UserError(
                f"{path} holds {unknown[0].relative_to(path)}{more}, which cannot be read as data "
                f"({known}; text also as {', '.join(CODECS)}) and would be left out; convert it, "
                f"or move it elsewhere"
            )
        kinds = sorted({kind(file) or "" for file in files})
        if len(kinds) > 1:
            raise UserError(f"{path} mixes {' and '.join(kinds)} files; keep one kind in a folder")
        return cls(path, "files", files)

    def documents(self, limit: int) -> Iterator[dict[str, str]]:
        """Yield rows ``{"text": …}`` of all documents in order, long ones cut at ``limit``.

        Raises:
            DocumentError: as ``documents.pieces``.
        """
        if self.kind == "disk":
            from datasets import load_from_disk

            for number, row in enumerate(load_from_disk(str(self.path)), 1):
                text = checked(cast(dict, row)["text"], f"{self.path}, row {number},")
                yield from ({"text": piece} for piece in cut(text, limit))
        for file in self.files:
            yield from ({"text": piece} for piece in pieces(file, limit))

    def check(self) -> None:
        """Read the beginning of every file, so that bad data is named before any rank starts.

        Raises:
            UserError: nothing in it, not readable, or a document without a text.
        """
        if self.kind == "disk":
            return _check_saved(self.path)
        empty = [f for f in self.files if f.stat().st_size == 0]
        if len(empty) == len(self.files):
            raise UserError(f"the data in {self.path} is empty: {len(empty)} file(s) of 0 bytes")
        documents = 0
        each = LOOKED_AT // len(self.files)
        try:
            for file in self.files:
                read = 0
                for piece in pieces(file, LONG_DOCUMENT):
                    documents += 1
                    read += len(piece)
                    if read >= each:
                        break
        except DocumentError as error:
            raise UserError(f"the data in {self.path} cannot be used: {error}") from error
        if not documents:
            raise UserError(f"the data in {self.path} is empty: no document in it")


def _data_below(path: Path) -> Iterator[Path]:
    """Yield the files below ``path`` that are data by their names; a link counts as its target."""
    for folder, folders, names in os.walk(path, onerror=_raise, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        for name in names:
            if not name.startswith((".", "_")) and not name.lower().startswith(BESIDE):
                yield Path(folder, name)


def _raise(error: OSError) -> None:
    raise error


def _check_saved(path: Path) -> None:
    """Refuse a saved data set without documents, or one of whose texts is missing."""
    import pyarrow as pa
    from datasets import Dataset, disable_progress_bars, load_from_disk

    disable_progress_bars()
    try:
        files = json.loads((path / "state.json").read_text())["_data_files"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path / 'state.json'} cannot be read: {error!r}") from error
    if not files:  # the library cannot open it
        raise UserError(f"the data in {path} is empty: no document in it")
    try:
        rows = cast(Dataset, load_from_disk(str(path)))
    except Exception as error:  # the library raises a type of its own for each mistake
        reason = " ".join(str(error).split()) or repr(error)
        raise UserError(f"the data in {path} cannot be read: {reason}") from error
    if not len(rows):
        raise UserError(f"the data in {path} is empty: no document in it")
    texts = rows.data.column("text") if "text" in rows.column_names else None
    if texts is None or not (
        pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)
    ):
        raise UserError(
            f"the data in {path} needs a column `text` of strings; it has: "
            f"{', '.join(rows.column_names)}"
        )
    if texts.null_count:
        row = texts.is_null().index(True).as_py() + 1
        raise UserError(f"the data in {path} cannot be used: row {row} has no text")


# Tokens that TorchTitan's HuggingFaceTokenizer takes from tokenizer_config.json.
SPECIAL = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")


def tokenizer_size(folder: Path) -> int:
    """Return the vocabulary that a model needs: the highest id that the tokenizer can give, plus 1.

    That is not the number of tokens: ids may have gaps, and TorchTitan adds the special tokens of
    ``tokenizer_config.json`` that ``tokenizer.json`` lacks (``components/tokenizer.py``,
    ``_infer_special_tokens``).

    Raises:
        UserError: no readable ``tokenizer.json``, or no end-of-text token in its config.
    """
    from tokenizers import AddedToken, Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UserError(f"--tokenizer needs a folder with a tokenizer.json, and {file} is missing")
    try:
        tokenizer = Tokenizer.from_file(str(file))
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        ends = [_content(config.get(f"{name}_token")) for name in SPECIAL]
        decoder = [_content(token) for token in config.get("added_tokens_decoder", {}).values()]
        added = [token for token in (*ends, *decoder) if token]
        tokenizer.add_special_tokens([AddedToken(token, special=True) for token in added])
    except FileNotFoundError:
        raise UserError(
            f"{folder} lacks tokenizer_config.json, which names the tokens that begin and end a "
            "document"
        ) from None
    except Exception as error:  # the tokenizers library raises plain Exception
        raise UserError(f"the tokenizer in {folder} cannot be read: {error}") from error
    if not ends[1]:
        raise UserError(f"{folder}/tokenizer_config.json names no eos_token")
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def _content(token: str | dict | None) -> str | None:
    """Return a special token's text; it is stored as such or as a table with ``content``."""
    return token["content"] if isinstance(token, dict) else token


def folders(tokenizer: Path | None, data: Path | None) -> tuple[Path, Path]:
    """Return the folders of tokenizer and data, absolute; None stands for the default's."""
    if tokenizer is None or data is None:
        default_tokenizer, default_data = default_folders()
        tokenizer, data = tokenizer or default_tokenizer, data or default_data
    return tokenizer.absolute(), data.absolute()


def default_folders() -> tuple[Path, Path]:
    """Return the folders of the tokenizer and the data built from the pins, building them once.

    Built beside and renamed into place: a killed build leaves nothing that looks finished, and
    of two builds at once one wins.
    """
    files = _pinned_sources()
    key = hashlib.sha256(json.dumps([FORMAT, MINI_VOCAB, files]).encode()).hexdigest()[:16]
    folder = cache_dir() / "data" / f"pins-{key}"
    if not folder.exists():
        _build(folder, [name for name, _ in files])
    return folder / "tokenizer", folder / "dataset"


def long_documents() -> Path:
    """Return the folder of the same data in long documents, building it once.

    The first sequences of every rank, of up to 65,536 tokens, then lie inside of one document.
    """
    _, dataset = default_folders()
    folder = dataset.with_name(f"{dataset.name}-long")
    if not folder.exists():
        from datasets import Dataset, load_from_disk

        text = "".join(cast(Dataset, load_from_disk(str(dataset)))["text"])
        starts = range(0, len(text), LONG_DOCUMENT)
        documents = [text[start : start + LONG_DOCUMENT] for start in starts]
        with _built_beside(folder) as beside:
            Dataset.from_dict({"text": documents}).save_to_disk(str(beside))
    return folder


@contextmanager
def _built_beside(folder: Path) -> Generator[Path]:
    """Give a folder to build in, renamed to ``folder`` at the end unless another build was first.

    That one has the same bytes.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield beside
        try:
            os.rename(beside, folder)
        except OSError:
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _pinned_sources() -> list[tuple[str, str]]:
    """Return (name, recorded hash) of the pins' Python files, in an order that mixes subjects."""
    found = [
        (str(file), file.hash.value)
        for pin in PINS
        for file in distribution(pin).files or ()
        if file.suffix == ".py" and file.parts[0] == pin and file.hash
    ]
    return sorted(found, key=lambda item: hashlib.sha256(item[0].encode()).digest())


def _build(folder: Path, names: list[str]) -> None:
    from datasets import Dataset, disable_progress_bars
    from rich.console import Console
    from rich.progress import track

    disable_progress_bars()
    with _built_beside(folder) as beside:
        root = Path(str(distribution("torch").locate_file("")))
        texts = [
            (root / name).read_text(encoding="utf-8", errors="replace")
            for name in track(names, description="reading the pins' source")
        ]
        texts = [text for text in texts if text.strip()]
        with Console().status("training the tokenizer"):
            _train_tokenizer(texts, beside / "tokenizer")
        Dataset.from_dict({"text": texts}).save_to_disk(str(beside / "dataset"))


def _train_tokenizer(texts: list[str], folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    before = accumulate(map(len, texts), initial=0)
    tokenizer.train_from_iterator(
        (text for text, size in zip(texts, before, strict=False) if size < TOKENIZER_BYTES),
        trainers.BpeTrainer(
            vocab_size=MINI_VOCAB,
            show_progress=False,
            special_tokens=[BOS, EOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
