"""The first failure is found among what torchrun and the ranks leave behind."""

import json

import pytest

from integration.train.failure import diagnose

# As torchrun prints it (torch 2.14.1), shortened.
REPORT = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
torchtitan.train FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-29_12:00:01
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 10)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-29_12:00:00
  host      : host
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 11)
  error_file: <N/A>
============================================================
"""


@pytest.fixture
def rank(tmp_path):
    folder = tmp_path / "run_x" / "attempt_0" / "1"
    folder.mkdir(parents=True)
    return folder


def test_a_killed_rank_is_named_with_its_signal(tmp_path, rank):
    failure = diagnose(tmp_path, REPORT.format(code=-9))
    assert failure.rank == 1
    assert failure.sentence.startswith("rank 1 was killed by signal 9")


def test_the_words_of_the_first_rank_count_not_those_of_its_peers(tmp_path, rank):
    peer = rank.parent / "0"
    peer.mkdir()
    for folder, message in ((rank, "ValueError: the cause"), (peer, "RuntimeError: peer closed")):
        (folder / "error.json").write_text(json.dumps({"message": {"message": message}}))
    assert diagnose(tmp_path, REPORT.format(code=1)).sentence == "ValueError: the cause"


# A peer raised in the second before the one in which torchrun saw that rank 1 was killed.
PEER_FIRST = """\
W1129 12:00:01.1 torch/distributed/elastic/agent.py:1] {closed}
------------------------------------------------------------
Failures:
[0]:
  time      : 2026-11-29_12:00:01
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 11)
------------------------------------------------------------
Root Cause (first observed failure):
[1]:
  time      : 2026-11-29_12:00:00
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 10)
"""


@pytest.mark.parametrize(
    ("code", "closed", "first"),
    [
        (-9, "", "rank 1 was killed by signal 9"),
        (-11, "", "rank 1 was killed by signal 11"),
        (-6, "", "RuntimeError: peer"),  # NCCL's watchdog, for which the peer is the reason
        (-9, "Sending process 11 closing signal SIGTERM", "RuntimeError: peer"),
    ],
)
def test_a_killed_rank_comes_before_the_peer_that_noticed(tmp_path, rank, code, closed, first):
    peer = rank.parent / "0"
    peer.mkdir()
    (peer / "error.json").write_text(json.dumps({"message": {"message": "RuntimeError: peer"}}))
    failure = diagnose(tmp_path, PEER_FIRST.format(code=code, closed=closed))
    assert failure.sentence.startswith(first)


def test_a_rank_that_torchrun_stopped_is_not_taken_for_the_cause(tmp_path, rank):
    peer = rank.parent / "0"
    peer.mkdir()
    (peer / "error.json").write_text(json.dumps({"message": {"message": "ValueError: the cause"}}))
    failure = diagnose(tmp_path, REPORT.format(code=-15))
    assert (failure.rank, failure.sentence) == (0, "ValueError: the cause")


def test_a_terminated_rank_without_a_raising_peer_is_named(tmp_path, rank):
    assert diagnose(tmp_path, REPORT.format(code=-15)).sentence == "rank 1 was killed by signal 15"


def test_the_last_exception_of_a_traceback_is_taken(tmp_path, rank):
    (rank / "stderr.log").write_text(
        "Traceback (most recent call last):\n  File x\nKeyError: 'a'\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n  File y\nmodule.BadConfigError: seq_len is wrong\n"
    )
    sentence = diagnose(tmp_path, REPORT.format(code=1)).sentence
    assert sentence == "module.BadConfigError: seq_len is wrong"


def test_a_full_disk_is_said_in_plain_words(tmp_path, rank):
    message = (
        "CheckpointException ranks:dict_keys([0])\nOSError: [Errno 28] No space left on device"
    )
    (rank / "error.json").write_text(json.dumps({"message": message}))
    assert diagnose(tmp_path, REPORT.format(code=1)).sentence == "the disk is full"


def test_the_option_parsers_box_becomes_a_sentence(tmp_path, rank):
    (rank / "stderr.log").write_text(
        "╭─ Parsing error ───╮\n│ Unrecognized options: --nope │\n╰───────────────────╯\n"
    )
    sentence = diagnose(tmp_path, REPORT.format(code=2)).sentence
    assert sentence == "Unrecognized options: --nope"


def test_a_torchrun_that_never_started_ranks_still_says_something(tmp_path):
    output = "Traceback …\nRuntimeError: rendezvous timed out\n"
    assert diagnose(tmp_path, output).sentence == "RuntimeError: rendezvous timed out"
    assert diagnose(tmp_path, "").sentence == "torchrun ended without a word"


# As DCP leaves it where a shard is empty (torch 2.14.1), shortened.
DAMAGED = """\
[rank0]:/site/torch/distributed/tensor/_random.py:45: UserWarning: DTensor random operators may not
[rank0]:  warnings.warn(
[rank0]:Traceback (most recent call last):
[rank0]:  File "/site/torchtitan/train.py", line 65, in main
[rank0]:    trainer.train()
[rank0]:    ^^^^^^^^^^^^^^^
[rank0]:torch.distributed.checkpoint.api.CheckpointException: ranks:dict_keys([0])
[rank0]:Traceback (most recent call last): (RANK 0)
[rank0]:  File "/site/torch/serialization.py", line 1, in load
[rank0]:    raise EOFError
[rank0]:RuntimeError: PytorchStreamReader failed reading zip archive: not a ZIP archive

[rank0]:[W1130 12:00:00.1 ProcessGroupGloo.cpp:1] Warning: destroy_process_group was not called
"""


def test_the_reason_is_found_behind_prefixes_and_is_no_warning(tmp_path, rank):
    (rank / "stderr.log").write_text(DAMAGED)
    assert diagnose(tmp_path, REPORT.format(code=1)).sentence == (
        "RuntimeError: PytorchStreamReader failed reading zip archive: not a ZIP archive"
    )


@pytest.mark.parametrize("raised", ["StopIteration", "my.Odd", "KeyboardInterrupt", "Broken: why"])
def test_an_exception_of_any_name_is_the_reason(tmp_path, rank, raised):
    warned = "/a/b.py:3: UserWarning: mind this\n  warnings.warn(\n"
    (rank / "stderr.log").write_text(f"{warned}Traceback (most recent call last):\n  x\n{raised}\n")
    assert diagnose(tmp_path, REPORT.format(code=1)).sentence == raised


@pytest.mark.parametrize("error", ["", "{", "[]", '{"message": 3}'])
def test_an_unreadable_record_of_an_error_leaves_what_the_rank_said(tmp_path, rank, error):
    (rank / "error.json").write_text(error)
    (rank / "stderr.log").write_text("Traceback (most recent call last):\n  x\nValueError: why\n")
    assert diagnose(tmp_path, REPORT.format(code=1)).sentence == "ValueError: why"


def test_a_warning_alone_is_not_taken_for_the_reason(tmp_path, rank):
    (rank / "stderr.log").write_text("[rank1]:/a/b.py:3: UserWarning: mind\n  warnings.warn(\n")
    assert diagnose(tmp_path, REPORT.format(code=3)).sentence == "rank 1 ended with code 3"
