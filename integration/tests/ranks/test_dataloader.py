"""What a rank reads, by TorchTitan's own loader and tokenizer: long documents, odd tokenizers."""

import json
from typing import cast

import pytest
from datasets import Dataset
from tokenizers import Tokenizer
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset

from integration.data import source
from integration.ranks.dataloader import SEQUENCES_A_PIECE, TextDataLoader, TextTokenizer

SEQ_LEN = 64
# 45 characters, a tenth as many tokens: no end of a piece is an end of the text.
LINE = "def function(argument): return argument + 1\n\n"


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    source._train_tokenizer([LINE] * 50, folder)
    return folder


def loader(path, tokenizer, rank=0, ranks=1):
    return TextDataLoader(
        TextDataLoader.Config(dataset_path=str(path), infinite=False),
        dp_world_size=ranks,
        dp_rank=rank,
        tokenizer=TextTokenizer(tokenizer_path=str(tokenizer)),
        seq_len=SEQ_LEN,
        local_batch_size=2,
    )


def as_text(path, text):
    path.mkdir()
    (path / "a.txt").write_text(text)


def as_rows(path, text):
    Dataset.from_dict({"text": [text]}).save_to_disk(str(path))


@pytest.mark.parametrize("write", [as_text, as_rows])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_one_document_serves_all_ranks(tmp_path, folder, write, ranks):
    """Together they read every token of it but those that fill no last batch."""
    text = LINE * (ranks * 12 * SEQUENCES_A_PIECE * SEQ_LEN // len(LINE))
    write(tmp_path / "data", text)
    rank_tokens = []
    for rank in range(ranks):
        batches = list(loader(tmp_path / "data", folder, rank, ranks))
        rank_tokens.append(sum(inputs["input"].numel() for inputs, _ in batches))
    whole = len(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids)
    assert min(rank_tokens) > 0.8 * max(rank_tokens)
    assert sum(rank_tokens) == pytest.approx(whole, rel=0.05)


def test_a_rank_keeps_little_of_a_long_document(tmp_path, folder):
    """It held all of its tokens, three times, and wrote them into each checkpoint."""
    as_text(tmp_path / "data", LINE * 50_000)
    reading = loader(tmp_path / "data", folder)
    next(iter(reading))
    state = cast(HuggingFaceTextDataset, reading.dataset).state_dict()
    assert len(state["inputs_buffer"]) <= SEQUENCES_A_PIECE * SEQ_LEN


def test_a_saved_data_set_of_many_rows_is_taken_as_it_is(tmp_path, folder):
    Dataset.from_dict({"text": [LINE * 40] * 8}).save_to_disk(str(tmp_path / "data"))
    reading = loader(tmp_path / "data", folder)
    assert isinstance(cast(HuggingFaceTextDataset, reading.dataset)._data, Dataset)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("truncation", dict(max_length=16, strategy="LongestFirst", direction="Right", stride=0)),
        (
            "padding",
            dict(
                strategy={"Fixed": 512}, direction="Right", pad_to_multiple_of=None, pad_id=0,
                pad_type_id=0, pad_token="<|begin|>",
            ),
        ),
    ],
)  # fmt: skip
def test_truncation_and_padding_of_the_tokenizer_do_not_hold(tmp_path, folder, key, value):
    """They are for inference: each document would be cut, or filled with a token of no text."""
    as_text(tmp_path / "data", LINE * 400)
    expected = [inputs["input"].tolist() for inputs, _ in loader(tmp_path / "data", folder)]
    changed = tmp_path / "changed"
    changed.mkdir()
    saved = json.loads((folder / "tokenizer.json").read_text())
    (changed / "tokenizer.json").write_text(json.dumps(saved | {key: value}))
    (changed / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
    found = [inputs["input"].tolist() for inputs, _ in loader(tmp_path / "data", changed)]
    assert found == expected


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"eos_token": "<|not in tokenizer.json|>"},
        {"pad_token": {"content": "<|pad|>"}, "mask_token": "<|mask|>"},
        {"added_tokens_decoder": {"5000": {"content": "<|end|>"}}},
        {"added_tokens_decoder": {"5000": {"content": "<|extra|>"}}},
        {"bos_token": None},
    ],
)
def test_the_vocabulary_covers_every_id_that_the_loader_gives(tmp_path, folder, config):
    """TorchTitan's tokenizer is the oracle: it adds what tokenizer_config.json names."""
    plain = json.loads((folder / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(plain | config))
    theirs = HuggingFaceTokenizer(tokenizer_path=str(tmp_path))
    ids = [*theirs.tokenizer.get_vocab().values(), *theirs.encode("x", add_bos=True, add_eos=True)]
    assert source.tokenizer_size(tmp_path) == max(ids) + 1


def test_ids_with_a_gap_count_to_the_highest(tmp_path, folder):
    saved = json.loads((folder / "tokenizer.json").read_text())
    saved["model"]["vocab"]["zzz"] = 9000
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    (tmp_path / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
    assert source.tokenizer_size(tmp_path) == 9001
