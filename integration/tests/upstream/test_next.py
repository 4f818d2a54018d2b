"""A set for an upstream to come, kept beside today's: made, checked, refused, and taken over."""

from pathlib import Path

import pytest

from integration.cli.main import main
from integration.ground import paths
from integration.patchset import pins, repository
from integration.tests.patchset.conftest import LINES, PRISTINE, House, line, tree
from integration.tests.upstream.conftest import track, wheel
from integration.upstream import rebase

CORE = "fakebase/core.py"
MOVED = LINES.replace("line 15\n", "line 15\nmore\nmore\n")
COMMIT = "c" * 40


@pytest.fixture
def kept(house: House, offline: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    """The house with a set for fakebase 2.0, of which the index has a wheel, in patches/next."""
    house.add("one", {CORE: line(3, "one")})
    house.add("two", {CORE: line(30, "two"), "fakebase/new.py": "new\n"})
    house.add("app", {"fakeapp/train.py": line(5, "app")}, upstream="torchtitan", requires=["one"])
    track(house.root)
    wheel(offline, "fakebase", "2.0", core=MOVED)
    wheel(offline, "fakeapp", "1.0")
    before = tree(house.root / "patches")
    assert move("--onto", "fakebase==2.0", "--commit", f"fakebase=={COMMIT}", "--into", "next") == 0
    after = tree(house.root / "patches")
    assert {path: after[path] for path in before} == before
    monkeypatch.setenv("INTEGRATION_PINS", "")
    return house


def move(*words: str) -> int:
    return verb("patches", "rebase", *words)


def verb(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(words)
    return int(end.value.code or 0)


def test_it_holds_only_what_has_moved(kept: House, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted(tree(kept.root / "patches/next")) == [
        "pins.toml", "pytorch/one.patch", "pytorch/series", "pytorch/two.patch",
    ]  # fmt: skip
    assert kept.check() == []
    monkeypatch.setenv("INTEGRATION_PINS", "next")
    assert {u: pin.version for u, pin in pins.load().items()} == {
        "pytorch": "2.0",
        "torchtitan": "1.0",
    }
    assert list(pins.load()) == ["pytorch", "torchtitan"]
    assert [c.shown for c in repository.load()] == [
        "patches/next/pytorch/one.patch",
        "patches/next/pytorch/two.patch",
        "patches/torchtitan/app.patch",
    ]


def test_check_reads_what_is_published(kept: House, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb("patches", "check", "--pins", "next") == 0
    assert "3 patches" in capsys.readouterr().out
    patch = kept.root / "patches/next/pytorch/two.patch"
    patch.write_text(patch.read_text().replace(" line 29\n", " line 999\n"))
    assert verb("patches", "check", "--pins=next") == 1
    said = capsys.readouterr().out
    assert "two: surroundings changed" in said
    assert "`line 999`" in said


def test_a_change_of_the_original_is_told(kept: House, capsys: pytest.CaptureFixture[str]) -> None:
    patch = kept.patch("two")
    patch.write_text(patch.read_text().replace("Root cause: it was so.", "Root cause: other."))
    assert verb("patches", "check", "--pins", "next") == 1
    said = capsys.readouterr().out
    assert "two: outdated" in said
    assert "one: outdated" not in said


def test_evidence_is_of_todays_set(kept: House, capsys: pytest.CaptureFixture[str]) -> None:
    evidence = kept.root / "pytorch_contrib/one/evidence"
    evidence.mkdir()
    (evidence / "cpu.json").write_text(f'{{"patch_sha256": "{kept.get("one").sha256}"}}')
    assert verb("--pins", "next", "patches", "check") == 0
    capsys.readouterr()


def test_drift_is_of_the_set_in_use(kept: House, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("patches", "drift", "--against", "fakebase==2.0", "--json")
    assert verb(*words) == 0
    assert '"verdict": "applies with offset"' in capsys.readouterr().out
    assert verb(*words, "--pins", "next") == 0
    assert "offset" not in capsys.readouterr().out


def test_test_says_what_to_install(kept: House, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb("test", "--prove", "one", "--pins", "next") == 2
    said = capsys.readouterr().err
    assert "error: expected fakebase 2.0 (patches/next/pins.toml), found 1.0 installed; " in said
    assert said.endswith("-m pip install fakebase==2.0`\n")


def test_an_overlay_on_the_newer_upstream(kept: House, monkeypatch: pytest.MonkeyPatch) -> None:
    from integration.patchset import overlay

    kept.install("fakebase", "2.0")
    (kept.site / CORE).write_text(MOVED)
    monkeypatch.setenv("INTEGRATION_PINS", "next")
    built = overlay.build()
    assert built.path is not None
    text = (built.path / CORE).read_text()
    assert "one\n" in text
    assert "two\n" in text
    assert "more\n" in text


def test_it_becomes_the_set_once_the_other_follows(
    kept: House, offline: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train = PRISTINE["fakeapp/train.py"].replace("line 1\n", "line 0\nline 1\n")
    path = wheel(offline, "fakeapp", "2.0", train=train)
    words = ("--onto", f"fakeapp=={path}", "--commit", f"fakeapp=={COMMIT}")
    assert move(*words, "--pins", "next") == 0
    assert not (kept.root / "patches/next").exists()
    assert not rebase.folder().exists()
    monkeypatch.setenv("INTEGRATION_PINS", "")
    assert {pin.version for pin in pins.load().values()} == {"2.0"}
    for package, stem, text in (("fakebase", "core", MOVED), ("fakeapp", "train", train)):
        kept.install(package, "2.0")
        (kept.site / package / f"{stem}.py").write_text(text)
    assert kept.check() == []
    assert "fakebase: 1.0 -> 2.0" not in capsys.readouterr().out  # moved before


def test_the_other_half_may_be_kept_beside_too(
    kept: House, offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = wheel(offline, "fakeapp", "2.0")
    words = ("--onto", f"fakeapp=={path}", "--commit", f"fakeapp=={COMMIT}")
    assert move(*words, "--pins", "next", "--into", "next") == 0
    assert {pin.version for pin in pins.load().values()} == {"2.0"}
    assert (kept.root / "patches/next/torchtitan/app.patch").is_file()
    monkeypatch.setenv("INTEGRATION_PINS", "")
    assert kept.check() == []


def test_a_name_that_is_a_path_is_refused(
    house: House, capsys: pytest.CaptureFixture[str], offline: Path
) -> None:
    wheel(offline, "fakebase", "2.0")
    assert move("--onto", "fakebase==2.0", "--into", "../next") == 2
    assert "expected --into with a name" in capsys.readouterr().err


def test_a_set_that_is_not_there(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb("patches", "list", "--pins", "nxt") == 2
    assert "patches/nxt/pins.toml" in capsys.readouterr().err


def test_the_set_beside_ours_is_of_the_same_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch's words and place are the same for both; only its lines may differ."""
    today = repository.load()
    for file in sorted(paths.PATCHES.glob("*/pins.toml")):
        monkeypatch.setenv("INTEGRATION_PINS", file.parent.name)
        newer = repository.load()
        for now, then in zip(today, newer, strict=True):
            assert (
                now.data.partition(b"\ndiff --git ")[0] == then.data.partition(b"\ndiff --git ")[0]
            )
