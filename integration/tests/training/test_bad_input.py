"""What only the ranks can find out still reaches the user as one sentence."""

import json

import pytest

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    ("documents", "found"),
    # One short document: the second rank's share is empty, over which the pin's loader never ends.
    [(["word " * 40], "its share holds 0"), (["word"] * 8, "its share holds 0")],
)
def test_data_smaller_than_a_batch_is_refused(trainer, tmp_path, documents, found):
    data = tmp_path / "data"
    data.mkdir()
    lines = [json.dumps({"text": text}) for text in documents]
    (data / "a.jsonl").write_text("\n".join(lines) + "\n")
    training = trainer.train("--data", str(data), expected=1)
    assert "is smaller than one batch" in training.output
    assert found in training.output
    assert "Traceback" not in training.output


def test_a_users_text_and_options_are_taken(trainer, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for i in range(8):
        (data / f"{i}.txt").write_text(f"document {i} says {i * 7919 % 1000}. " * 800)
    training = trainer.train("--data", str(data), "--", "--training.steps", "2")
    assert "step:  2  loss: " in training.output
