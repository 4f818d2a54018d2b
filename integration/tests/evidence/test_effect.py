"""The measured effect: every figure from the evidence, and what is not there is refused."""

import gzip
import json
from pathlib import Path

import pytest

from integration.evidence import effect, readme
from integration.ground.errors import UserError
from integration.patchset import repository
from integration.tests.patchset.conftest import House, line

SLOWER = """\
sentence = "{n} layers: {step} time, {kept}, {faster} faster {where}"
[n]
file = "bench.json"
at = "/layers/0"
as = "number"
[step]
file = "bench.json"
at = "/new/a~1b.c"
than = "/old/a~1b.c"
as = "change"
[kept]
file = "other.json"
at = "/bytes"
as = "bytes"
[faster]
file = "bench.json"
at = "/new/a~1b.c"
than = "/old/a~1b.c"
as = "times"
[where]
file = "other.json"
at = "/shape"
as = "shape"
"""


@pytest.fixture
def evidence(house: House) -> Path:
    house.add("one", {"fakebase/core.py": line(3, "one")})
    sha = house.get("one").sha256
    folder = house.root / "pytorch_contrib/one/evidence"
    folder.mkdir()
    bench = {"layers": [74], "new": {"a/b.c": 3.0}, "old": {"a/b.c": 2.0}, "patch_sha256": sha}
    (folder / "bench.json").write_text(json.dumps(bench))
    other = {"bytes": 805306368, "shape": [4, 2], "patch_sha256": sha}
    (folder / "other.json").write_text(json.dumps(other))
    (folder / effect.FILE).write_text(SLOWER)
    (house.root / "README.md").write_text(f"{readme.BEGIN}\n{readme.END}\n")
    return folder


def test_figures_are_the_evidence_s_own_also_bad_ones(house: House, evidence: Path) -> None:
    told = effect.markdown(house.get("one"))
    at = "pytorch_contrib/one/evidence"
    assert told == (
        "74 layers: 50.0 % more time, 768 MiB, 0.667 times faster 4 x 2 "
        f"([bench]({at}/bench.json), [other]({at}/other.json))"
    )
    assert readme.write(repository.load())
    assert house.check() == []


def test_a_new_measurement_makes_the_table_stale(house: House, evidence: Path) -> None:
    readme.write(repository.load())
    bench = json.loads((evidence / "bench.json").read_text())
    bench["layers"] = [73]
    (evidence / "bench.json").write_text(json.dumps(bench))
    assert [f.verdict for f in house.check()] == ["stale table"]


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("/layers/0", "/layers/1", "/layers/1 (at 1)"),
        ("/old/a~1b.c", "/old/a", "/old/a (at a)"),
        ("{n} layers", "74 layers", "a typed figure"),
        ("{n} layers", "{m} layers", "'m'"),
        ('file = "other.json"', 'file = "gone.json"', "gone.json"),
        ('as = "bytes"', 'as = "byte"', "'byte'"),
        ('than = "/old/a~1b.c"', "", "`than` is for change and times"),
        ("sentence", "sentences", "'sentence'"),
        ("[n]", "[n", "TOMLDecodeError"),
    ],
)
def test_what_the_evidence_does_not_hold(
    house: House, evidence: Path, old: str, new: str, found: str
) -> None:
    (evidence / effect.FILE).write_text(SLOWER.replace(old, new))
    (finding,) = house.check()
    assert (finding.patch, finding.verdict) == ("(table)", "no effect")
    assert found in finding.found


def test_figures_want_a_sentence_and_parity_does_not(house: House, evidence: Path) -> None:
    (evidence / effect.FILE).unlink()
    with pytest.raises(UserError, match=r"expected .*effect.toml beside bench.json, found none"):
        effect.sentence(house.get("one"))
    for file in evidence.glob("*.json"):
        file.rename(file.with_name(f"parity-{file.name}"))
    assert effect.sentence(house.get("one")) == effect.NONE


def test_evidence_of_the_set_is_stale_with_any_of_its_patches(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(3, "one")})
    house.add("two", {"fakebase/core.py": line(20, "two")})
    now = {name: house.get(name).sha256 for name in ("one", "two")}
    ladders = house.root / "integration/evidence"
    traces = house.root / "pytorch_contrib/one/evidence"
    for folder in (ladders, traces):
        folder.mkdir(parents=True)

    def put(file: str, record: object) -> None:
        (ladders / file).write_text(json.dumps(record))

    def trace(file: str, record: object) -> None:
        (traces / file).write_bytes(gzip.compress(json.dumps(record).encode()))

    put("ladder-mini-cpu.json", {"patches": now})
    trace("trace-one.json.gz", {"patches": {"one": now["one"]}})
    (ladders / "ladder-mini-cpu.full-set.snapshot.pickle.gz").write_bytes(b"")
    assert house.check() == []

    put("a.json", {"patches": now | {"two": "0" * 64}})
    put("b.json", {"patches": {"one": now["one"]}})
    put("c.json", {"patches": now | {"three": "0" * 64}})
    put("d.json", {})
    (ladders / "e.json").write_text("{")
    trace("trace-old.json.gz", {"patches": {"one": "0" * 64}})
    (traces / "trace-torn.json.gz").write_bytes(b"\x1f\x8b")
    (ladders / "of-no-ladder.snapshot.pickle.gz").write_bytes(b"")
    found = [(f.file.rpartition("/")[2], f.expected) for f in house.check()]
    assert {f.verdict for f in house.check()} == {"stale evidence"}
    assert found == [
        ("a.json", f"two {now['two']}"),
        ("b.json", "all 2 patches of the set"),
        ("c.json", "three not in the set"),
        ("d.json", '`"patches": {name: sha256}`'),
        ("e.json", '`"patches": {name: sha256}`'),
        ("trace-old.json.gz", f"one {now['one']}"),
        ("trace-torn.json.gz", '`"patches": {name: sha256}`'),
        ("of-no-ladder.snapshot.pickle.gz", '`"patches": {name: sha256}`'),
    ]
