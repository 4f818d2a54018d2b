"""Find, check and build the training data and the tokenizer, before any rank starts.

No torch here. The default data is the Python source text of the installed pins, taken from
site-packages and so never from an overlay: the same bytes whatever the set.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, cast

from integration.ground.errors import UserError
from integration.ground.paths import cache_dir

# Part of the cache key: raise it when the corpus or the tokenizer is built in another way.
FORMAT = 1
PINS = ("torch", "torchtitan")
MINI_VOCAB = 4096
# A BPE of so many tokens needs no more; the whole corpus would take ten times as long.
TOKENIZER_BYTES = 12_000_000
BOS, EOS = "<|begin|>", "<|end|>"

# Ending of a user's file -> builder of the datasets library and its options. A text file is one
# document; the others hold one a line or row, in a column `text`.
BUILDERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
    ".txt": ("text", {"sample_by": "document"}),
}


@dataclass(frozen=True, slots=True)
class Source:
    """A folder of text, classified.

    ``kind`` is ``"disk"`` (a Hugging Face data set saved by ``save_to_disk``) or ``"files"``;
    ``files`` are sorted, so that every rank sees the same order.
    """

    path: Path
    kind: str
    files: tuple[Path, ...] = ()

    @classmethod
    def at(cls, path: Path) -> "Source":
        """Classify ``path``.

        Raises:
            UserError: it is missing, unreadable, holds no file of a known kind, or several kinds.
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
            files = tuple(sorted(f for f in path.rglob("*") if f.suffix in BUILDERS))
        except PermissionError as error:
            raise UserError(f"--data cannot be read: {error.filename}: permission denied") from None
        kinds = sorted({f.suffix for f in files})
        if not kinds:
            raise UserError(
                f"{path} holds no {', '.join(BUILDERS)} file and no Hugging Face data set "
                "(dataset_info.json)"
            )
        if len(kinds) > 1:
            raise UserError(f"{path} mixes {' and '.join(kinds)} files; keep one kind in a folder")
        return cls(path, "files", files)

    @property
    def builder(self) -> str:
        return BUILDERS[self.files[0].suffix][0]

    @property
    def options(self) -> dict[str, Any]:
        return BUILDERS[self.files[0].suffix][1]

    @property
    def names(self) -> list[str]:
        return [str(f) for f in self.files]

    def check(self) -> None:
        """Read the first document, so that bad data is named before any rank starts.

        Raises:
            UserError: nothing in it, not readable, or without a column ``text`` of strings.
        """
        from datasets import disable_progress_bars, load_dataset, load_from_disk

        disable_progress_bars()
        empty = [f for f in self.files if f.stat().st_size == 0]
        if len(empty) == len(self.files) and self.kind == "files":
            raise UserError(f"the data in {self.path} is empty: {len(empty)} file(s) of 0 bytes")
        if self.kind == "disk" and not _saved_files(self.path):
            raise UserError(f"the data in {self.path} is empty: no document in it")
        try:
            rows = (
                load_from_disk(str(self.path))
                if self.kind == "disk"
                else load_dataset(
                    self.builder,
                    data_files=self.names,
                    split="train",
                    streaming=True,
                    **self.options,
                )
            )
            first = next(iter(rows), None)
        except Exception as error:  # the library raises a type of its own for each format
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise UserError(f"the data in {self.path} cannot be read: {reason}") from error
        if first is None:
            raise UserError(f"the data in {self.path} is empty: no document in it")
        if not isinstance(first, dict) or not isinstance(first.get("text"), str):
            raise UserError(
                f"the data in {self.path} needs a column `text` of strings; it has: "
                f"{', '.join(first)}"
            )


def _saved_files(path: Path) -> list:
    """Return the Arrow files of a saved data set; the library cannot open one that has none."""
    try:
        return json.loads((path / "state.json").read_text())["_data_files"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path / 'state.json'} cannot be read: {error!r}") from error


def tokenizer_size(folder: Path) -> int:
    """Return the number of tokens of a tokenizer folder (Hugging Face ``tokenizer.json``).

    Raises:
        UserError: no readable ``tokenizer.json``, or no end-of-text token in its config.
    """
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UserError(f"--tokenizer needs a folder with a tokenizer.json, and {file} is missing")
    try:
        size = Tokenizer.from_file(str(file)).get_vocab_size()
        config = json.loads((folder / "tokenizer_config.json").read_text())
    except FileNotFoundError:
        raise UserError(
            f"{folder} lacks tokenizer_config.json, which names the tokens that begin and end a "
            "document"
        ) from None
    except Exception as error:  # the tokenizers library raises plain Exception
        raise UserError(f"the tokenizer in {folder} cannot be read: {error}") from error
    if not config.get("eos_token"):
        raise UserError(f"{folder}/tokenizer_config.json names no eos_token")
    return size


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


# Characters of a long document, about a million tokens: more than a few steps of any job read.
LONG_DOCUMENT = 4_000_000


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
        beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            Dataset.from_dict({"text": documents}).save_to_disk(str(beside / "dataset"))
            os.rename(beside / "dataset", folder)
        except OSError:
            if not folder.exists():  # else another build was first, with the same bytes
                raise
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return folder


def _pinned_sources() -> list[tuple[str, str]]:
    """Return (name, recorded hash) of the pins' Python files, in an order that mixes subjects."""
    found = []
    for pin in PINS:
        for file in distribution(pin).files or ():
            if file.suffix == ".py" and file.parts[0] == pin and file.hash:
                found.append((str(file), file.hash.value))
    return sorted(found, key=lambda item: hashlib.sha256(item[0].encode()).digest())


def _build(folder: Path, names: list[str]) -> None:
    from datasets import Dataset, disable_progress_bars
    from rich.console import Console
    from rich.progress import track

    disable_progress_bars()
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        root = Path(str(distribution("torch").locate_file("")))
        texts = [
            (root / name).read_text(encoding="utf-8", errors="replace")
            for name in track(names, description="reading the pins' source")
        ]
        texts = [text for text in texts if text.strip()]
        with Console().status("training the tokenizer"):
            _train_tokenizer(texts, beside / "tokenizer")
        Dataset.from_dict({"text": texts}).save_to_disk(str(beside / "dataset"))
        try:
            os.rename(beside, folder)
        except OSError:
            if not folder.exists():  # else another build was first, with the same bytes
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _train_tokenizer(texts: list[str], folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        _first_bytes(texts, TOKENIZER_BYTES),
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


def _first_bytes(texts: list[str], limit: int) -> Iterator[str]:
    for text in texts:
        if limit <= 0:
            return
        yield text
        limit -= len(text)
