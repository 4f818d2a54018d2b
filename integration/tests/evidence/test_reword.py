"""Evidence follows a patch whose words change, and no other."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from integration.evidence import readme, trace
from integration.evidence.check import DIGITS
from integration.ground import files as atomic
from integration.ground.errors import UserError
from integration.patchset import repository
from integration.tests.patchset.conftest import House, line, tree, user_git
from integration.upstream import checkout

OWN = "pytorch_contrib/one/evidence/parity-cpu.json"  # parity wants no effect.toml
LADDER = "integration/evidence/ladder-mini-cpu.json"
TRACES = ("pytorch_contrib/one/evidence/trace-a.json.gz", "integration/evidence/trace-b.json.gz")
FILES = (OWN, LADDER, *TRACES)
WORDS = ("it was so", "it was not so")
ROW = "| {} | 8 | equal | `{}` |"


class Bench:
    """Two measured contributions; `one` is the checkout's last commit, to be amended."""

    def __init__(self, house: House, work: Path) -> None:
        self.house, self.root, self.work = house, house.root, work
        house.add("two", {"fakebase/deep/inner/leaf.py": "LEAF = 'two'\n"})
        house.add("one", {"fakebase/core.py": line(3, "one")})
        self.first = self.sha("one")
        now = {name: self.sha(name) for name in ("two", "one")}
        self.put(OWN, {"patch_sha256": self.first, "command": "x", "verdict": "equal"})
        self.put(LADDER, {"patches": now, "ranks": 2})
        for file, patches in zip(TRACES, ({"one": self.first}, now), strict=True):
            self.put(file, {"patches": patches, "traceEvents": [{"ph": "X", "ts": 1.5}]})
        rows = "\n".join(ROW.format(name, digest[:DIGITS]) for name, digest in now.items())
        # Outside of the proof the same line is no row of it.
        text = f"{rows}\n{readme.PROOF_BEGIN}\n{rows}\n{readme.PROOF_END}\n"
        (self.root / "CONTRIBUTING.md").write_text(text)
        assert house.check() == []
        checkout.import_set(work)

    def sha(self, name: str) -> str:
        return self.house.get(name).sha256

    def put(self, file: str, record: dict[str, Any]) -> None:
        path = self.root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(record, indent=1) + "\n"
        path.write_bytes(trace.packed(record) if path.suffix == ".gz" else text.encode())

    def get(self, file: str) -> dict[str, Any]:
        data = (self.root / file).read_bytes()
        return json.loads(gzip.decompress(data) if file.endswith(".gz") else data)

    def amend(self, old: str, new: str) -> list[str]:
        """Change the message of `one`, export, and return what was said."""
        repo = self.work / "pytorch"
        message = user_git(repo, "log", "-1", "--format=%B")
        assert message.count(old) == 1
        text = message.replace(old, new)
        user_git(repo, "commit", "-q", "--amend", "--allow-empty", "-F", "-", stdin=text)
        return checkout.export_set(self.work)

    def stale(self) -> set[str]:
        return {f.file for f in self.house.check() if f.verdict.startswith("stale")}


@pytest.fixture
def bench(house: House, tmp_path: Path) -> Bench:
    return Bench(house, tmp_path / "work")


def test_words_change_and_the_evidence_follows(bench: Bench) -> None:
    before = tree(bench.root)
    said = bench.amend(*WORDS)
    old, new, two = bench.first, bench.sha("one"), bench.sha("two")
    assert old != new
    assert said[-1] == (
        f"one: only its words changed; {new[:8]} now stands in 4 files of evidence and its row of "
        f"the proof"
    )
    both = {"two": two, "one": new}
    assert [*bench.get(OWN).items()] == [
        ("patch_sha256", new), ("measured_patch_sha256", old), ("command", "x"),
        ("verdict", "equal"),
    ]  # fmt: skip
    ladder = {"patches": both, "measured_patches": {"one": old}, "ranks": 2}
    assert [*bench.get(LADDER).items()] == [*ladder.items()]
    assert [bench.get(file)["patches"] for file in TRACES] == [{"one": new}, both]
    assert {bench.get(file)["measured_patches"]["one"] for file in TRACES} == {old}
    outside, _, proof = (bench.root / "CONTRIBUTING.md").read_text().partition(readme.PROOF_BEGIN)
    rows = [ROW.format("two", two[:8]), ROW.format("one", new[:8])]
    assert proof.split("\n")[1:3] == rows
    assert outside.encode() in before["CONTRIBUTING.md"]
    assert bench.house.check() == []
    after = tree(bench.root)
    changed = {file for file in after if before.get(file) != after[file]}
    assert changed == {*FILES, "CONTRIBUTING.md", "patches/pytorch/one.patch"}


@pytest.mark.parametrize(
    "words",
    [
        ("[fake] Change one", "[fake] Alter one"),
        ("Status: pending", "Status: submitted https://example.org/1"),
        ("Issue: none it is a test", "Issue: https://example.org/2"),
    ],
)
def test_subject_status_and_issue_are_words(bench: Bench, words: tuple[str, str]) -> None:
    assert "only its words changed" in bench.amend(*words)[-1]
    assert bench.stale() == set()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Requires:", "Requires: two"),
        ("Test: test_one.py -> test/test_one.py", "Test: test_one.py -> test/test_1.py"),
        ("Numerics: bitwise", "Numerics: changes sums"),
        ("Drop-when: test/test_one.py::Test::test_one", "Drop-when: test/test_one.py::Test"),
    ],
)
def test_a_trailer_that_says_what_was_run_is_no_word(bench: Bench, old: str, new: str) -> None:
    before = tree(bench.root)
    key = old.partition(":")[0]
    assert bench.amend(old, new)[-1] == (
        f"one: more than words changed ({key}:); measure again: 4 files of evidence and its row of "
        f"the proof"
    )
    after = tree(bench.root)
    assert [after[file] for file in FILES] == [before[file] for file in FILES]
    assert bench.stale() == {*FILES, "CONTRIBUTING.md"}


def test_a_byte_of_the_diff_is_no_word(bench: Bench) -> None:
    core = bench.work / "pytorch/fakebase/core.py"
    core.write_text(core.read_text().replace("one\n", "One\n"))
    user_git(bench.work / "pytorch", "add", "-A")
    before = tree(bench.root)
    said = bench.amend(*WORDS)[-1]
    assert said.startswith("one: more than words changed (diff); measure again: 4 files of")
    after = tree(bench.root)
    assert [after[file] for file in FILES] == [before[file] for file in FILES]
    assert bench.stale() == {*FILES, "CONTRIBUTING.md"}


def test_what_was_stale_stays_stale(bench: Bench) -> None:
    other = "0" * 64
    bench.put(OWN, {"patch_sha256": other})
    bench.put(LADDER, {"patches": {"two": bench.sha("two"), "one": other}})
    bench.put(TRACES[0], {"patches": {"one": other}})
    (bench.root / TRACES[1]).write_bytes(gzip.compress(b"")[:10] + b"\xff" * 20)
    text = (bench.root / "CONTRIBUTING.md").read_text()
    (bench.root / "CONTRIBUTING.md").write_text(text.replace(bench.first[:8], other[:8]))
    before = tree(bench.root)
    assert bench.amend(*WORDS)[-1] == "pytorch/one: changed"
    after = tree(bench.root)
    assert {f for f in after if before[f] != after[f]} == {"patches/pytorch/one.patch"}
    assert bench.stale() == {*FILES, "CONTRIBUTING.md"}


def test_a_ladder_that_another_patch_made_stale_is_not_made_fresh(bench: Bench) -> None:
    bench.put(LADDER, {"patches": {"two": "0" * 64, "one": bench.first}})
    bench.amend(*WORDS)
    assert bench.stale() == {LADDER}


def test_reworded_twice_was_measured_once(bench: Bench) -> None:
    before = tree(bench.root)
    bench.amend(*WORDS)
    second = bench.sha("one")
    assert "only its words" in bench.amend(WORDS[1], "it is unclear")[-1]
    assert bench.get(OWN)["patch_sha256"] == bench.sha("one") not in (bench.first, second)
    assert bench.get(OWN)["measured_patch_sha256"] == bench.first
    for file in FILES[1:]:
        assert bench.get(file)["patches"]["one"] == bench.sha("one")
        assert bench.get(file)["measured_patches"] == {"one": bench.first}
    assert bench.stale() == set()
    bench.amend("it is unclear", WORDS[0])  # its first words again: no trace of the others
    assert tree(bench.root) == before


@pytest.mark.parametrize("indent", [None, 1, 2])
@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("ascii", [True, False])
def test_the_layout_of_a_file_stays(
    bench: Bench, indent: int | None, end: str, ascii: bool
) -> None:
    record = {"what": "5 µs", "s": [1e-05, 2.0], "patch_sha256": bench.first, "verdict": "equal"}
    text = json.dumps(record, indent=indent, ensure_ascii=ascii) + end
    (bench.root / OWN).write_text(text, encoding="utf-8")
    bench.amend(*WORDS)
    noted = {"what": "5 µs", "s": [1e-05, 2.0], "patch_sha256": bench.sha("one")}
    noted |= {"measured_patch_sha256": bench.first, "verdict": "equal"}
    expected = json.dumps(noted, indent=indent, ensure_ascii=ascii) + end
    assert (bench.root / OWN).read_text(encoding="utf-8") == expected


def test_a_trace_is_packed_as_it_was_written(bench: Bench) -> None:
    bench.amend(*WORDS)
    for file in TRACES:
        assert (bench.root / file).read_bytes() == trace.packed(bench.get(file))


def test_two_patches_reworded_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    two, repo = bench.sha("two"), bench.work / "pytorch"
    monkeypatch.setenv("GIT_SEQUENCE_EDITOR", "sed -i s/^pick/reword/")
    monkeypatch.setenv("GIT_EDITOR", "sed -i 's/it was so/it was not/'")
    user_git(repo, "rebase", "-q", "-i", "pin")
    for key in ("GIT_SEQUENCE_EDITOR", "GIT_EDITOR"):
        monkeypatch.delenv(key)
    said = checkout.export_set(bench.work)[-2:]
    assert [line.partition(" stands in ")[2] for line in said] == [
        "2 files of evidence and its row of the proof",
        "4 files of evidence and its row of the proof",
    ]
    assert bench.get(LADDER)["measured_patches"] == {"two": two, "one": bench.first}
    assert bench.house.check() == []


def test_where_nothing_was_measured_nothing_is_said(bench: Bench) -> None:
    for file in (*FILES, "CONTRIBUTING.md"):
        (bench.root / file).unlink()
    assert bench.amend(*WORDS)[-1] == "pytorch/one: changed"
    (bench.root / "CONTRIBUTING.md").write_text(
        f"{readme.PROOF_BEGIN}\n{ROW.format('one', bench.sha('one')[:8])}\n{readme.PROOF_END}"
    )
    said = bench.amend(WORDS[1], "so it was")[-1]
    assert said.endswith(f"{bench.sha('one')[:8]} now stands in its row of the proof")


@pytest.mark.parametrize("fails_at", range(1, 9))
def test_patches_and_evidence_change_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    before, replace, calls = tree(bench.root), os.replace, []

    def breaks(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == fails_at:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(atomic.os, "replace", breaks)
    with pytest.raises(UserError, match=r"No space left on device; nothing was changed"):
        bench.amend(*WORDS)
    assert tree(bench.root) == before


def test_the_other_upstream_is_left_alone(bench: Bench) -> None:
    """A checkout of one upstream exports no patch of the other; its evidence is not looked at."""
    bench.house.add("app", {"fakeapp/train.py": line(5, "app")}, upstream="torchtitan")
    sha = bench.sha("app")
    bench.put("torchtitan_contrib/app/evidence/parity-cpu.json", {"patch_sha256": sha})
    (bench.work / "torchtitan").rename(bench.work / "away")
    bench.amend(*WORDS)
    assert bench.get("torchtitan_contrib/app/evidence/parity-cpu.json") == {"patch_sha256": sha}
    assert {c.name for c in repository.load()} == {"app", "one", "two"}
