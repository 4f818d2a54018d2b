"""The user's text, or the pins' own source, through TorchTitan's tokenizer and data loader."""

from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pyarrow.compute as pc
from datasets import Dataset, Features, IterableDataset, Value, load_from_disk
from tokenizers import Tokenizer
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import (
    DATASETS,
    HuggingFaceTextDataLoader,
    HuggingFaceTextDataset,
)

from integration.data.source import LONG_DOCUMENT, Source

# Bytes: four to a character at most.
LONGEST_ROW = 4 * LONG_DOCUMENT
# Sequences, at about a token a character, that one piece of a long document has at most. A rank
# holds a piece as text and as a list of tokens, and keeps what is left of it in its checkpoint.
SEQUENCES_A_PIECE = 64


def _load(path: str, *, limit: int, ranks: int) -> Dataset | IterableDataset:
    """Open a folder as ``data.source`` classifies it; files are streamed, never copied.

    A saved data set is taken row by row as it is, but where that would leave ranks without a
    document, or a rank with a document that it cannot hold: then it is cut as files are.
    """
    source = Source.at(Path(path))
    if source.kind == "disk":
        rows = cast(Dataset, load_from_disk(path))
        sizes = pc.call_function("binary_length", [rows.data.column("text")])
        longest = pc.call_function("min_max", [sizes])["max"].as_py()
        if len(rows) >= ranks and longest <= LONGEST_ROW:
            return rows
    return IterableDataset.from_generator(
        source.documents,
        features=Features({"text": Value("string")}),
        gen_kwargs={"limit": limit},
    )


class TextTokenizer(HuggingFaceTokenizer):
    """TorchTitan's tokenizer, without the truncation and padding that a tokenizer.json may hold.

    They are for inference: here each document would be cut, or filled up with a token of no text.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceTokenizer.Config):
        pass

    def _load_tokenizer_from_path(self, tokenizer_path: str) -> Tokenizer:
        tokenizer = super()._load_tokenizer_from_path(tokenizer_path)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer


class TextDataLoader(HuggingFaceTextDataLoader):
    """TorchTitan's text data loader, which refuses data that cannot fill one batch.

    The pin's loader repeats the data until a sequence is full: over an empty share of it, for
    ever. Every rank checks its own share before the first step.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceTextDataLoader.Config):
        dataset: str = "local"

    def __init__(self, config: Config, *, local_batch_size: int, **given: Any) -> None:
        share = {name: given[name] for name in ("dp_rank", "dp_world_size", "seq_len")}
        rank, ranks, seq_len = share.values()
        limit = SEQUENCES_A_PIECE * seq_len
        # TorchTitan's place for data sets of one's own (docs/datasets.md).
        DATASETS["local"] = DatasetConfig(
            path="",
            loader=partial(_load, limit=limit, ranks=ranks),
            sample_processor=lambda row: row["text"],
        )
        once = HuggingFaceTextDataset(
            config.dataset, config.dataset_path, given["tokenizer"], infinite=False, **share
        )
        found = sum(1 for _ in islice(once, local_batch_size))
        if found < local_batch_size:
            raise ValueError(
                f"the data in {config.dataset_path} is smaller than one batch: rank {rank} of "
                f"{ranks} needs {local_batch_size} sequences of {seq_len} tokens and its "
                f"share holds {found}; give more data, fewer ranks or a smaller --training.seq_len"
            )
        super().__init__(config, local_batch_size=local_batch_size, **given)
