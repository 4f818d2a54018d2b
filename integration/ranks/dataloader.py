"""The user's text, or the pins' own source, through TorchTitan's text data loader."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import cast

from datasets import Dataset, IterableDataset, load_dataset, load_from_disk
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import (
    DATASETS,
    HuggingFaceTextDataLoader,
    HuggingFaceTextDataset,
)

from integration.data.source import Source


def _load(path: str) -> Dataset | IterableDataset:
    """Open a folder as ``data.Source`` classifies it; text files are streamed, never copied."""
    source = Source.at(Path(path))
    if source.kind == "disk":
        return cast(Dataset, load_from_disk(path))
    return load_dataset(
        source.builder, data_files=source.names, split="train", streaming=True, **source.options
    )


# TorchTitan's place for data sets of one's own (docs/datasets.md).
DATASETS["local"] = DatasetConfig(path="", loader=_load, sample_processor=lambda row: row["text"])


class TextDataLoader(HuggingFaceTextDataLoader):
    """TorchTitan's text data loader, which refuses data that cannot fill one batch.

    The pin's loader repeats the data until a sequence is full: over an empty share of it, for
    ever. Every rank checks its own share before the first step.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceTextDataLoader.Config):
        dataset: str = "local"

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer,
        seq_len: int,
        local_batch_size: int,
        **kwargs,
    ) -> None:
        once = HuggingFaceTextDataset(
            config.dataset,
            config.dataset_path,
            tokenizer,
            seq_len=seq_len,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            infinite=False,
        )
        found = sum(1 for _ in islice(once, local_batch_size))
        if found < local_batch_size:
            raise ValueError(
                f"the data in {config.dataset_path} is smaller than one batch: rank {dp_rank} of "
                f"{dp_world_size} needs {local_batch_size} sequences of {seq_len} tokens and its "
                f"share holds {found}; give more data, fewer ranks or a smaller --training.seq_len"
            )
        super().__init__(
            config,
            dp_world_size=dp_world_size,
            dp_rank=dp_rank,
            tokenizer=tokenizer,
            seq_len=seq_len,
            local_batch_size=local_batch_size,
            **kwargs,
        )
