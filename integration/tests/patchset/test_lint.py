"""Every header field is checked; each row breaks one and names the verdict."""

import json

import pytest
from expecttest import assert_expected_inline

from integration.patchset.pins import sha256
from integration.tests.patchset.conftest import MESSAGE, House, line

GOOD = MESSAGE.format(name="one", subject="[fake] Change one", status="pending", requires="")


def found(house: House, message: str) -> list[str]:
    house.add("one", {"fakebase/core.py": line(3, "one")}, message=message)
    return [f"{f.verdict}: {f.found}" for f in house.check()]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Status: pending", "Status: submitted https://example.org/pull/1"),
        ("Status: pending", "Status: upstream https://example.org/fakebase/pull/4530"),
        ("Status: pending", f"Status: upstream https://example.org/fakebase/commit/{'a1' * 20}"),
        ("Status: pending", f"Status: upstream {'a1' * 20}"),
        ("Status: pending", "Status: merged 2.15.0"),
        ("Status: pending", "Status: denied https://example.org/pull/1"),
        ("Status: pending", "Status: local only our job needs it"),
        ("Status: pending", "Status: local a reason that is\n as long as two lines"),
        ("Issue: none it is a test", "Issue: https://example.org/issues/1"),
        ("Numerics: bitwise", "Numerics: changes the sum is taken in another order"),
    ],
)
def test_accepted(house: House, old: str, new: str) -> None:
    assert old in GOOD
    assert found(house, GOOD.replace(old, new)) == []


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ("Status: pending", "Status: done", "malformed field: `Status: done`"),
        ("Status: pending", "Status: submitted", "malformed field: `Status: submitted`"),
        ("Status: pending", "Status: upstream", "malformed field: `Status: upstream`"),
        *(
            ("Status: pending", f"Status: upstream {value}", f"malformed field: `{value}`")
            for value in (
                "#4530",
                "a1b2c3d4",
                "A1" * 20,
                "a1" * 20 + "0",
                "https://example.org/fakebase",
                "https://example.org/fakebase/pull/",
                "https://example.org/fakebase/pull/0",
                "https://example.org/fakebase/pull/4530/files",
                "https://example.org/fakebase/issues/4530",
                "https://example.org/fakebase/commit/a1b2c3d4",
                "https://example.org/fakeapp/pull/4530",
            )
        ),
        (
            "Status: pending",
            f"Status: upstream {'a1' * 20} in part",
            f"malformed field: `Status: upstream {'a1' * 20} in part`",
        ),
        ("Status: pending", "Status: merged soon", "malformed field: `Status: merged soon`"),
        ("Status: pending", "Status: local", "malformed field: `Status: local`"),
        ("Status: pending\n", "", "missing field: none"),
        ("Status: pending", "Status: pending\nStatus: pending", "duplicate field: 2 times"),
        ("Status: pending", "Status: pending\nReason: why", "unknown field: `Reason:`"),
        ("Issue: none it is a test", "Issue: none", "malformed field: `Issue: none`"),
        ("Issue: none it is a test", "Issue: 123", "malformed field: `Issue: 123`"),
        ("Requires:", "Requires: two", "unknown contribution: `two`"),
        ("Requires:", "Requires: one", "cycle: one requires one in turn"),
        ("Requires:\n", "", "missing field: none"),
        ("test_one.py -> ", "test_two.py -> ", "missing test: no such file"),
        ("-> test/test_one.py", "-> ../test_one.py", "malformed field: ../test_one.py"),
        ("Test: test_one.py -> test", "Test: test", "malformed field: `Test: test/test_one.py`"),
        ("Numerics: bitwise", "Numerics: same", "malformed field: `Numerics: same`"),
        (
            "Drop-when: test/test_one.py::Test::test_one",
            "Drop-when:",
            "malformed field: `Drop-when: `",
        ),
        (
            "::Test::test_one",
            "::Test.test_one",
            "malformed field: `test/test_one.py::Test.test_one`",
        ),
        (
            "Drop-when: test/test_one.py",
            "Drop-when: test/o.py",
            "unknown test: test/o.py::Test::test_one",
        ),
        ("Root cause: it was so.\n\n", "", "missing field: none"),
        ("Behaviour change:", "Changes:", "missing field: none"),
        ("Test plan: run the test.\n\n", "", "missing field: none"),
        ("What it does, in one paragraph.\n\n", "", "missing field: none"),
    ],
)
def test_refused(house: House, old: str, new: str, verdict: str) -> None:
    assert old in GOOD
    assert verdict in found(house, GOOD.replace(old, new))


def test_a_finding_says_where_and_what_next(house: House) -> None:
    house.add(
        "one",
        {"fakebase/core.py": line(3, "one")},
        message=GOOD.replace("Status: pending", "Stauts: pending"),
    )
    assert_expected_inline(
        "\n".join(map(str, house.check())),
        """\
one: missing field
  at        patches/pytorch/one.patch:19
  expected  `Status: ...` in the last paragraph
  found     none
  next      integration patches import, `git commit --amend` or rebase, then export
one: unknown field
  at        patches/pytorch/one.patch:14
  expected  one of Status, Issue, Requires, Test, Numerics, Drop-when; did you mean Status?
  found     `Stauts:`
  next      integration patches import, `git commit --amend` or rebase, then export""",
    )


def test_all_faults_are_told(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(3, "one")}, message="Bare\n\nNo fields.\n")
    house.add("two", {"fakebase/core.py": line(30, "two")}, message="Bare\n\nNo fields.\n")
    findings = house.check()
    for name in ("one", "two"):
        missing = "\n".join(f.expected for f in findings if f.patch == name)
        for field in ("Status", "Issue", "Requires", "Test", "Numerics", "Drop-when", "Root cause"):
            assert f"`{field}: ...`" in missing


def test_a_test_that_no_trailer_names(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(3, "one")})
    (house.root / "pytorch_contrib/one/test_more.py").write_text("")
    (finding,) = house.check()
    assert "`Test: test_more.py -> upstream path`" in finding.expected


def test_a_test_that_imports_integration(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(3, "one")})
    test = house.root / "pytorch_contrib/one/test_one.py"
    test.write_text("import os\n\nfrom integration.patchset import overlay\n")
    (finding,) = house.check()
    assert (finding.where, finding.verdict) == (
        "pytorch_contrib/one/test_one.py:3",
        "not upstreamable",
    )


def test_a_path_outside_the_package(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(3, "one"), "setup.py": "x = 1\n"})
    (finding,) = house.check()
    assert (finding.verdict, finding.found) == ("outside the package", "setup.py")


def test_evidence_counts_for_the_patch_it_was_measured_on(house: House) -> None:
    data = house.add("one", {"fakebase/core.py": line(3, "one")})
    evidence = house.root / "pytorch_contrib" / "one" / "evidence"
    evidence.mkdir()
    fresh = {"patch_sha256": sha256(data), "milliseconds": 3}
    (evidence / "bench.json").write_text(json.dumps(fresh))
    assert house.check() == []
    (evidence / "older.json").write_text(json.dumps({"patch_sha256": "0" * 64}))
    (evidence / "unbound.json").write_text("{}")
    (evidence / "broken.json").write_text("{")
    stale = [f for f in house.check() if f.verdict == "stale evidence"]
    assert [f.file.rpartition("/")[2] for f in stale] == [
        "broken.json",
        "older.json",
        "unbound.json",
    ]
