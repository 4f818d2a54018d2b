"""``check`` holds on a sound repository, and names every fault of a broken one."""

from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from integration.evidence import readme
from integration.ground import paths
from integration.ground.errors import UserError
from integration.patchset import repository, scratch
from integration.tests.patchset.conftest import BLOCK, LINES, House, line, user_git


def verdicts(house: House) -> list[tuple[str, str]]:
    return [(finding.patch, finding.verdict) for finding in house.check()]


def shown(house: House) -> str:
    return "\n".join(str(finding) for finding in house.check())


def test_an_empty_repository_holds(house: House) -> None:
    assert house.check() == []


def test_a_sound_repository_holds(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(3, "one")})
    house.add("two", {"fakebase/core.py": line(20, "two"), "fakebase/new/mod.py": "x = 1\n"})
    house.add("three", {"fakebase/core.py": line(21, "three", line(20, "two"))}, requires=["two"])
    house.add("gone", {"fakebase/other/__init__.py": None})
    house.add("app", {"fakeapp/train.py": line(5, "app")}, upstream="torchtitan", requires=["one"])
    assert house.check() == []


def test_subject_and_text_beyond_ascii_round_trip(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(3, "größer ✓")}, subject="[fake] Größer ✓ " * 6)
    assert house.check() == []
    assert house.get("one").subject == ("[fake] Größer ✓ " * 6).strip()


def test_crlf_is_named_once(house: House) -> None:
    """Hundreds of findings would follow from it, none of which names the cause."""
    for name in ("one", "two"):
        house.add(name, {f"fakebase/{name}.py": "x = 1\n"})
    for file in [house.get(name).path for name in ("one", "two")]:
        file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    with pytest.raises(UserError, match=r"one\.patch, found CRLF.*config core\.autocrlf false"):
        house.check()


def test_a_clone_with_autocrlf_has_the_stored_line_ends(tmp_path: Path, plain_git: None) -> None:
    """`bash` cannot read a script with CRLF, nor `patches check` a patch."""
    stored = {f: (paths.REPO / f).read_bytes() for f in (".gitattributes", "ci/venv", "Makefile")}
    stored["patches/pytorch/series"] = (paths.REPO / "patches/pytorch/series").read_bytes()
    scratch.write(tmp_path / "origin", stored)
    user_git(tmp_path, "init", "-q", "origin")
    user_git(tmp_path / "origin", "-c", "core.autocrlf=false", "add", "-A")
    user_git(tmp_path / "origin", "commit", "-qm", "Stored")
    user_git(tmp_path, "clone", "-q", "-c", "core.autocrlf=true", "origin", "clone")
    assert scratch.read(tmp_path / "clone", stored) == stored


def test_the_users_git_configuration_changes_nothing(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GIT_CONFIG_GLOBAL")
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as a hook of another repository has it
    data = house.add("one", {"fakebase/core.py": line(20, "one")})
    assert b"X-Mine" not in data
    assert house.check() == []


@pytest.mark.parametrize(
    "text",
    [
        LINES.rstrip("\n"),  # no newline at the end of the file
        LINES.replace("line 7\n", "line 7   \n"),  # white space that apply.whitespace=fix takes off
        LINES.replace("line 7\n", "line 7\r\n"),  # a carriage return that `git am` takes off
        LINES.replace("line 7\n", "line 7\x0c\n"),  # str.splitlines would split here
        LINES.replace("line 7\n", "From 0123 Mon Sep 17 00:00:00 2001\n---\n"),  # mbox's own words
    ],
)
def test_awkward_texts_round_trip(house: House, text: str) -> None:
    house.add("one", {"fakebase/core.py": text})
    assert house.check() == []


def test_corrupt_patch(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(3, "one")})
    house.add("two", {"fakebase/core.py": line(30, "two")})
    file = house.patch("one")
    file.write_bytes(file.read_bytes().replace(b" line 4\n", b""))
    assert_expected_inline(
        shown(house),
        """\
one: malformed
  at        patches/pytorch/one.patch:32
  expected  1 more old and 1 more new lines of the hunk at line 25
  found     Hunk is shorter than expected
  next      git checkout patches/pytorch/one.patch; edit by import and export""",
    )


def test_binary_patch_is_malformed(house: House) -> None:
    data = house.add("one", {"fakebase/core.py": line(3, "one")})
    house.patch("one").write_bytes(data + b"GIT binary patch\n")
    assert verdicts(house) == [("one", "malformed")]


def test_unlisted_missing_and_duplicate(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(3, "one")})
    house.add("two", {"fakebase/core.py": line(30, "two")})
    house.series().write_text("two\nthree\ntwo\n")
    assert_expected_inline(
        shown(house),
        """\
three: missing
  at        patches/pytorch/series:2
  expected  a file patches/pytorch/three.patch
  found     no such file
  next      git checkout patches/pytorch/three.patch, or remove the line
two: duplicate
  at        patches/pytorch/series:3
  expected  a name that is listed once
  found     already listed in patches/pytorch/series:1
  next      remove the line, or rename one of the patches, in patches/pytorch/series
one: unlisted
  at        patches/pytorch/one.patch
  expected  its name in patches/pytorch/series
  found     not listed
  next      add one to patches/pytorch/series, or delete the file""",
    )


def test_names_are_unique_across_upstreams(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(3, "one")})
    house.patch("one", "torchtitan").write_bytes(house.patch("one").read_bytes())
    house.series("torchtitan").write_text("one\n")
    assert ("one", "duplicate") in verdicts(house)


def test_changed_pristine_file(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(3, "one")})
    (house.site / "fakebase/core.py").write_text(line(4, "another line 4"))
    found = [(f.verdict, f.file, f.line, f.expected, f.found) for f in house.check()]
    assert ("surroundings changed", "fakebase/core.py", 4, "`line 4`", "`another line 4`") in found
    assert "pristine file changed" in [verdict for verdict, *_ in found]


def test_upstream_has_it_already(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(3, "one"), "fakebase/new.py": "new\n"})
    (house.site / "fakebase/core.py").write_text(line(3, "one"))
    (house.site / "fakebase/new.py").write_text("new\n")
    found = [f for f in house.check() if f.verdict == "already present"]
    assert {f.file for f in found} == {"fakebase/core.py", "fakebase/new.py"}


def test_every_hunk_that_does_not_fit_is_named(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(3, "one", line(30, "uno"))})
    (house.site / "fakebase/core.py").write_text(line(4, "!", line(29, "?")))
    lines = {f.line for f in house.check() if f.verdict == "surroundings changed"}
    assert lines == {4, 29}


def test_wrong_installed_version(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(3, "one")})
    house.install("fakebase", "1.1")
    (finding,) = house.check()
    assert (finding.verdict, finding.expected) == ("wrong version", "fakebase 1.0 installed")
    assert finding.found.startswith("1.1 installed")
    assert finding.next.endswith("-m pip install fakebase==1.0")


def test_a_local_version_is_the_pinned_one(house: House) -> None:
    house.install("fakebase", "1.0+cpu")
    assert house.check() == []


def test_hashes_follow_the_patches(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(3, "one")})
    digest = house.hashes["pytorch"].pop("fakebase/core.py")
    house.hashes["pytorch"]["fakebase/block.py"] = digest
    house.write_pins()
    assert [f.verdict for f in house.check()] == [
        "pristine file changed",
        "not pinned",
        "pinned in vain",
    ]


def test_pair_that_collides(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(20, "one")})
    house.add("two", {"fakebase/core.py": line(21, "two")})
    found = [(f.patch, f.line, f.expected, f.found, f.next) for f in house.check()]
    assert (
        "two after one",
        20,
        "`line 20`",
        "`one`",
        "move the hunks apart, or let two require one",
    ) in found
    assert "one after two" in [patch for patch, *_ in found]


def test_pair_whose_order_matters(house: House) -> None:
    # "grow" copies the block to a place nearer to where "edit" expects it. Both apply in either
    # order without fuzz, but "edit" lands in the copy when it comes second.
    block = house.root.parent / "site/fakebase/block.py"
    before = block.read_text()
    house.add("edit", {"fakebase/block.py": before.replace("block 5", "edited")})
    house.add("grow", {"fakebase/block.py": before.replace("line 35\n", f"line 35\n{BLOCK}")})
    assert ("edit + grow", "order matters") in verdicts(house)


def test_undeclared_requirement(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(20, "one")})
    data = house.add(
        "two", {"fakebase/core.py": line(21, "two", line(20, "one"))}, requires=["one"]
    )
    assert house.check() == []
    house.patch("two").write_bytes(data.replace(b"Requires: one", b"Requires:"))
    assert ("two", "surroundings changed") in verdicts(house)


def test_stale_hunk_positions_are_not_canonical(house: House) -> None:
    data = house.add("one", {"fakebase/core.py": line(20, "one")})
    house.patch("one").write_bytes(data.replace(b"@@ -17,7 +17,7 @@", b"@@ -18,7 +18,7 @@"))
    (finding,) = house.check()
    assert finding.verdict == "not canonical"
    assert finding.expected == "`@@ -17,7 +17,7 @@ line 16`, what export writes"
    assert finding.found == "`@@ -18,7 +18,7 @@ line 16`"


def test_abbreviated_index_is_not_canonical(house: House) -> None:
    import re

    data = house.add("one", {"fakebase/core.py": line(20, "one")})
    house.patch("one").write_bytes(
        re.sub(rb"(index \w{7})\w{33}\.\.(\w{7})\w{33}", rb"\1..\2", data)
    )
    assert verdicts(house) == [("one", "not canonical")]


def test_cycle(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(3, "one")}, requires=["two"])
    house.add("two", {"fakebase/core.py": line(30, "two")}, requires=["one"])
    assert verdicts(house) == [("one", "cycle"), ("two", "cycle")]


def test_required_patch_comes_first(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(3, "one")})
    house.add("two", {"fakebase/core.py": line(30, "two")}, requires=["one"])
    house.series().write_text("two\none\n")
    assert ("two", "wrong order") in verdicts(house)


def test_stale_table(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(3, "one")})
    file = house.root / "README.md"
    file.write_text(f"# Title\n\n{readme.BEGIN}\n{readme.END}\n\nText.\n")
    assert verdicts(house) == [("(table)", "stale table")]
    assert readme.write(repository.load())
    assert house.check() == []
    assert file.read_text().endswith("\n\nText.\n")
    assert readme.table(repository.load()).split("\n") == [
        "| contribution | upstream | status | what it changes | measured effect | requires "
        "| tests |",
        "|---|---|---|---|---|---|---|",
        "| [one](patches/pytorch/one.patch) | pytorch | pending | [fake] Change one "
        "| no figures: tests only |  | [test_one.py](pytorch_contrib/one/test_one.py) |",
    ]
