"""The user's data and tokenizer are judged before any rank starts; each mistake is one sentence."""

import json
import os

import pytest
from datasets import Dataset

from integration.data import source as data
from integration.data.source import Source
from integration.ground.errors import UserError


def test_parquet_and_a_saved_data_set_are_read(tmp_path):
    rows = Dataset.from_dict({"text": ["one", "two"]})
    (tmp_path / "files").mkdir()
    rows.to_parquet(str(tmp_path / "files" / "a.parquet"))
    rows.save_to_disk(str(tmp_path / "disk"))
    for name, kind in (("files", "files"), ("disk", "disk")):
        source = Source.at(tmp_path / name)
        source.check()
        assert source.kind == kind


def test_files_come_in_one_order_for_every_rank(tmp_path):
    for name in ("b.txt", "a.txt", "c.txt"):
        (tmp_path / name).write_text("x")
    assert [f.name for f in Source.at(tmp_path).files] == ["a.txt", "b.txt", "c.txt"]


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "holds no .jsonl, .parquet, .txt file"),
        ({"README.md": "x", ".hidden.txt": "x"}, "holds no .jsonl, .parquet, .txt file"),
        ({"a.csv": "x"}, "holds a.csv, which cannot be read as data"),
        ({"a.jsonl": '{"text": "x"}', "b.json": "[]"}, "holds b.json, which cannot be read"),
        ({"a.jsonl": '{"text": "x"}', "b.jsonl.lz4": "x"}, "holds b.jsonl.lz4, which cannot"),
        ({"a.txt": "x", "b.jsonl": "{}"}, "mixes .jsonl and .txt files"),
        ({"a.jsonl": ""}, "is empty: 1 file(s) of 0 bytes"),
        ({"a.jsonl": "not json\n"}, "cannot be read"),
        ({"a.jsonl": '{"body": "x"}\n'}, "a.jsonl, line 1, needs a column `text`; it has: body"),
        ({"a.jsonl": '{"text": 7}\n'}, "line 1, needs a text in its column `text`, and has 7"),
        ({"a.jsonl": "[1]\n"}, "line 1, needs a column `text`; it has: a list"),
        ({"a.jsonl": '{"text": "\\ud800"}\n'}, "line 1, is not Unicode"),
        (
            {"a.jsonl": '{"text": "x"}\n' * 19 + '{"text": null}\n'},
            "a.jsonl, line 20, needs a text",
        ),
        ({"a.jsonl": '{"text": "x"}\n', "b.jsonl": '{"content": "x"}\n'}, "b.jsonl, line 1, needs"),
        ({"a.parquet": "not parquet"}, "cannot be read"),
    ],
)
def test_bad_data_is_one_sentence(tmp_path, files, sentence):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as caught:
        Source.at(tmp_path).check()
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_folder_and_a_file_are_told_apart(tmp_path):
    (tmp_path / "file").write_text("x")
    for name, state in (("gone", "does not exist"), ("file", "is a file")):
        with pytest.raises(UserError, match=state):
            Source.at(tmp_path / name)


def test_an_empty_saved_data_set_is_refused(tmp_path):
    Dataset.from_dict({"text": []}).save_to_disk(str(tmp_path))
    with pytest.raises(UserError, match="no document in it"):
        Source.at(tmp_path).check()


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "tokenizer.json is missing"),
        ({"tokenizer.json": "{"}, "cannot be read"),
    ],
)
def test_a_bad_tokenizer_is_one_sentence(tmp_path, files, sentence):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=sentence):
        data.tokenizer_size(tmp_path)


def test_the_default_tokenizer_round_trips_text_it_never_saw(tmp_path):
    """Byte-level: no input is unknown, whatever the corpus held."""
    from tokenizers import Tokenizer

    data._train_tokenizer(["def f(x):\n    return x\n"] * 50, tmp_path / "tokenizer")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    text = "Größe = 'ß' * 3  # \N{SNOWMAN}\n\tpass"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert data.tokenizer_size(tmp_path / "tokenizer") == tokenizer.get_vocab_size()


def test_a_killed_build_leaves_nothing_that_looks_finished(tmp_path, monkeypatch):
    monkeypatch.setenv("INTEGRATION_CACHE", str(tmp_path))

    def killed(texts, folder):
        folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "_train_tokenizer", killed)
    monkeypatch.setattr(data, "_pinned_sources", lambda: [("torch/version.py", "hash")])
    with pytest.raises(KeyboardInterrupt):
        data.default_folders()
    assert list((tmp_path / "data").iterdir()) == []


def test_the_corpus_is_the_pristine_text_whatever_comes_first_on_the_path(tmp_path, monkeypatch):
    """A patched package on PYTHONPATH must not change the data: sets would not compare."""
    fake = tmp_path / "torch"
    fake.mkdir()
    (fake / "version.py").write_text("patched = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("INTEGRATION_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(data, "_pinned_sources", lambda: [("torch/version.py", "hash")])
    _, dataset = data.default_folders()
    text = Dataset.load_from_disk(str(dataset))[0]["text"]
    assert "__version__" in text
    assert "patched" not in text


def test_permissions_are_named(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    (tmp_path / "shut").mkdir(mode=0)
    with pytest.raises(UserError, match="permission denied"):
        Source.at(tmp_path / "shut")


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path):
    data._train_tokenizer(["x"], tmp_path / "t")
    (tmp_path / "t" / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    with pytest.raises(UserError, match="names no eos_token"):
        data.tokenizer_size(tmp_path / "t")
