"""An overlay holds the set, and nothing that is not its own is ever written."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from integration.ground import paths
from integration.ground.errors import UserError
from integration.patchset import overlay
from integration.tests.patchset.conftest import PRISTINE, House, folder, line, tree, user_git


def imported(house: House, built: overlay.Overlay, expression: str, **extra: str) -> str:
    """Import the fake packages in a Python of its own, with bytecode written as usual."""
    env = built.environment(house.environment(**extra))
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-c", f"import fakebase, fakeapp; print({expression})"],
        env=env, capture_output=True, text=True, check=False, cwd=house.root,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_pristine_needs_no_folder(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(3, "one")})
    built = overlay.build([])
    assert (built.path, built.names) == (None, ())
    assert not paths.cache_dir().exists()
    assert built.environment({"A": "b", "PYTHONPATH": ""}) == {"A": "b"}


def test_an_empty_full_set_is_pristine(house: House) -> None:
    assert overlay.build() == overlay.build([])


def test_import_gives_the_patched_files(house: House) -> None:
    house.add("one", {"fakebase/deep/inner/leaf.py": "LEAF = 'one'\n"})
    house.add("two", {"fakebase/deep/fresh/__init__.py": "FRESH = 2\n"})
    house.add("gone", {"fakebase/other/__init__.py": None})
    built = overlay.build()
    code = "__import__('fakebase.deep.inner.leaf').deep.inner.leaf.LEAF, fakebase.VALUE"
    assert imported(house, built, code) == "one pristine"
    assert imported(house, built, "__import__('fakebase.deep.fresh').deep.fresh.FRESH") == "2"
    assert imported(house, built, "fakebase.__file__").startswith(str(built.path))
    assert not (folder(built) / "fakebase/other/__init__.py").exists()
    # A package that no patch touches comes from site-packages itself.
    assert imported(house, built, "fakeapp.__file__").startswith(str(house.site))


def test_only_folders_on_the_way_are_real(house: House) -> None:
    house.add("one", {"fakebase/deep/inner/leaf.py": "LEAF = 'one'\n"})
    path = folder(overlay.build())
    kinds = {
        str(entry.relative_to(path)): "link" if entry.is_symlink() else "real"
        for entry in sorted(path.rglob("*"))
        if entry.parent.resolve().is_relative_to(path)
    }
    assert kinds == {
        "fakebase": "real",
        "fakebase/__init__.py": "link",
        "fakebase/block.py": "link",
        "fakebase/core.py": "link",
        "fakebase/deep": "real",
        "fakebase/deep/__init__.py": "link",
        "fakebase/deep/inner": "real",
        "fakebase/deep/inner/__init__.py": "link",
        "fakebase/deep/inner/leaf.py": "real",
        "fakebase/other": "link",
        "overlay.json": "real",
    }


def test_site_packages_stay_as_they_were(house: House) -> None:
    # As pip leaves it: with bytecode (of what is Python; some fake files are not).
    compile_all = [sys.executable, "-m", "compileall", "-qq", str(house.site)]
    subprocess.run(compile_all, check=False)
    assert list(house.site.glob("fakebase/__pycache__/__init__*.pyc"))
    house.add("one", {path: "CHANGED = 1\n" for path in PRISTINE if path.startswith("fakebase")})
    house.add("two", {"fakeapp/train.py": "CHANGED = 1\n"}, upstream="torchtitan")
    before = tree(house.site)
    imported(house, overlay.build(), "__import__('fakebase.core').core.CHANGED")
    assert tree(house.site) == before


def test_sets_stand_side_by_side_and_are_found_again(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(3, "one")})
    house.add("two", {"fakebase/core.py": line(30, "two")})
    full, one, two = overlay.build(), overlay.build(["one"]), overlay.build(["two"])
    assert len({full.path, one.path, two.path}) == 3
    created = folder(one).stat().st_mtime_ns
    assert overlay.build(["one"]) == one
    assert folder(one).stat().st_mtime_ns == created
    assert overlay.build(["two", "one", "one"]) == full


def test_names_are_closed_over_requires_across_upstreams(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(3, "one")})
    house.add("free", {"fakebase/core.py": line(12, "free")})
    house.add("app", {"fakeapp/train.py": line(5, "app")}, upstream="torchtitan", requires=["one"])
    assert overlay.build(["app"]).names == ("one", "app")
    assert overlay.build(["torchtitan/app"]).names == ("one", "app")


def test_manifest(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(3, "one")})
    built = overlay.build()
    manifest = json.loads((folder(built) / "overlay.json").read_text())
    assert manifest["contributions"] == {"one": house.get("one").sha256}
    assert manifest["pins"]["pytorch"]["version"] == "1.0"
    assert built.path == paths.cache_dir() / "overlays" / built.fingerprint


def test_a_changed_patch_makes_another_overlay(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(3, "one")})
    before = overlay.build()
    house.series().write_text("")
    house.add("one", {"fakebase/core.py": line(3, "uno")})
    assert overlay.build().fingerprint != before.fingerprint


def test_another_patch_leaves_the_fingerprint(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(3, "one")})
    before = overlay.build(["one"])
    house.add("two", {"fakebase/block.py": line(30, "two")})
    assert overlay.build(["one"]) == before


def refusal(*names: str) -> str:
    with pytest.raises(UserError) as caught:
        overlay.build(list(names) or None)
    return textwrap.fill(
        str(caught.value).replace(sys.executable, "python"), 95, break_on_hyphens=False
    )


def test_wrong_version_is_refused(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(3, "one")})
    house.install("fakebase", "2.0")
    assert_expected_inline(
        refusal(),
        """\
expected fakebase 1.0 (patches/pins.toml), found 2.0 installed; its patches do not fit that
version: run `python -m pip install fakebase==1.0`""",
    )


def test_a_package_first_on_pythonpath_is_named_so(house: House, monkeypatch) -> None:
    """Not with the advice to install what is installed, behind it."""
    house.add("one", {"fakebase/core.py": line(3, "one")})
    house.install("fakebase", "2.0")
    monkeypatch.setenv("PYTHONPATH", f"/elsewhere{os.pathsep}{house.site}")
    with pytest.raises(UserError) as refused:
        overlay.build()
    assert str(refused.value) == (
        f"expected fakebase 1.0 (patches/pins.toml), found 2.0 in {house.site}, first by "
        "PYTHONPATH; its patches do not fit that version: take that off PYTHONPATH"
    )


def test_a_cache_that_pythonpath_cannot_hold_is_refused(house: House, monkeypatch) -> None:
    """Python splits its path at the colon, and would import the pins unpatched."""
    house.add("one", {"fakebase/core.py": line(3, "one")})
    cache = paths.cache_dir().with_name("cache:12")
    monkeypatch.setenv("INTEGRATION_CACHE", str(cache))
    with pytest.raises(
        UserError, match=r"cache:12/overlays/\w+ \(INTEGRATION_CACHE\): it has a ':'"
    ):
        overlay.build()
    assert not cache.exists()
    overlay.build([])  # needs no folder


def test_a_process_tells_modules_that_are_not_the_overlays(house: House) -> None:
    house.add("one", {"fakebase/deep/inner/leaf.py": "LEAF = 'one'\n"})
    built = overlay.build()
    check = (
        "__import__('fakebase.deep.inner.leaf') and __import__('integration.patchset.overlay', "
        f"fromlist=['x']).refuse_other_modules(__import__('pathlib').Path({str(built.path)!r}))"
    )
    assert imported(house, built, check) == "None"
    with pytest.raises(
        AssertionError, match=r"expected fakebase\.deep\.inner\.leaf from the overlay"
    ):
        imported(house, overlay.Overlay(None, (), ""), check)


def test_missing_package_is_refused(house: House) -> None:
    (house.site / "fakeapp-1.0.dist-info/METADATA").unlink()
    (house.site / "fakeapp-1.0.dist-info").rmdir()
    assert_expected_inline(
        refusal(),
        """\
expected fakeapp 1.0 (patches/pins.toml), found no fakeapp installed; its patches cannot be
applied: run `python -m pip install fakeapp==1.0`""",
    )


def test_changed_pristine_file_is_refused(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(3, "one")})
    overlay.build()
    (house.site / "fakebase/core.py").write_text(line(40, "changed"))
    assert_expected_inline(
        refusal(),
        """\
expected the pristine fakebase/core.py of fakebase 1.0 (sha256 abf1f49fd095), found
259f452776b0; patches would be applied to unknown code: run `python -m pip install
--force-reinstall --no-deps fakebase==1.0`""",
    )


def test_unknown_name_is_refused(house: House) -> None:
    house.add("shared_rope_cache", {"fakebase/core.py": line(3, "one")})
    assert_expected_inline(
        refusal("shared_rop_cache"),
        """\
unknown contribution shared_rop_cache; did you mean shared_rope_cache? (`integration patches
list` shows all)""",
    )


def test_broken_repository_is_refused(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(3, "one")})
    house.series().write_text("one\ntwo\nthree\n")
    assert_expected_inline(
        refusal(),
        """\
patches/pytorch/series:2: missing: expected a file patches/pytorch/two.patch, found no such
file (and 1 more); no set can be built: run `integration patches check`""",
    )


def test_a_set_that_does_not_apply_is_refused_and_leaves_nothing(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(20, "one")})
    house.add("two", {"fakebase/core.py": line(21, "two")})
    assert_expected_inline(
        refusal(),
        """\
expected the set one, two to apply on fakebase 1.0, found: error: patch failed:
fakebase/core.py:18; no overlay was built: run `integration patches check`""",
    )
    assert list((paths.cache_dir() / "overlays").iterdir()) == []


def test_an_edited_overlay_is_refused(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(3, "one")})
    path = folder(overlay.build())
    (path / "fakebase/core.py").write_text("edited\n")
    message = refusal()
    assert "found fakebase/core.py edited since" in message
    assert str(path) in message


def test_pythonpath_keeps_the_users_own_and_drops_other_overlays(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(3, "one")})
    house.add("two", {"fakeapp/train.py": line(30, "two")}, upstream="torchtitan")
    full, two = overlay.build(), overlay.build(["two"])
    mine = os.pathsep.join(("/mine", str(full.path), "/also"))
    assert two.pythonpath(mine) == os.pathsep.join((str(two.path), "/mine", "/also"))
    assert overlay.build([]).pythonpath(mine) == os.pathsep.join(("/mine", "/also"))


def test_built_from_inside_an_overlay(house: House) -> None:
    """A training job builds overlays, too: it must find the pristine files, not its own."""
    house.add("one", {"fakebase/core.py": line(3, "one")})
    house.add("two", {"fakebase/block.py": line(30, "two")})
    code = "__import__('integration.patchset.overlay').patchset.overlay.build(['two']).path"
    root = f"__import__('pathlib').Path({str(house.root)!r})"
    setting = "__import__('integration.ground.paths').ground.paths.__setattr__"
    settings = f"{setting}('REPO', {root}), {setting}('PATCHES', {root} / 'patches')"
    inside = imported(house, overlay.build(["one"]), f"({settings}, {code})[2]")
    assert inside == str(overlay.build(["two"]).path)


def test_a_cache_inside_a_repository(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """`git apply` below the root of a repository skips every path without a word."""
    user_git(house.root, "init", "-q")
    monkeypatch.setenv("INTEGRATION_CACHE", str(house.root / ".cache"))
    house.add("one", {"fakebase/core.py": line(3, "one")})
    assert (folder(overlay.build()) / "fakebase/core.py").read_text() == line(3, "one")


_BUILD = """
import sys, pathlib, time
from integration.ground import paths
paths.REPO = pathlib.Path(sys.argv[1])
paths.PATCHES = paths.REPO / "patches"
from integration.patchset import overlay
{before}
print(overlay.build().path)
"""


def builder(house: House, before: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _BUILD.format(before=before), str(house.root)],
        env=house.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_two_builds_at_once(house: House) -> None:
    house.add("one", {"fakebase/core.py": line(3, "one")})
    # Both fill their folder before either renames it.
    wait = (
        "fill = overlay._fill\n"
        "def slow(*a):\n"
        "    fill(*a); d = paths.cache_dir() / 'overlays'\n"
        "    while len(list(d.glob('.building-*'))) < 2 and not list(d.glob('[!.]*')):\n"
        "        time.sleep(0.01)\n"
        "    time.sleep(0.2)\n"
        "overlay._fill = slow\n"
    )
    both = [builder(house, wait), builder(house, wait)]
    outputs = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert len(list((paths.cache_dir() / "overlays").iterdir())) == 1
    assert overlay.build().path == Path(outputs[0][0].strip())


def test_a_killed_build_leaves_nothing_half_made(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.add("one", {"fakebase/core.py": line(3, "one")})
    stop = "overlay._link = lambda *a: (print('half', flush=True), time.sleep(60))\n"
    process = builder(house, stop)
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    overlays = paths.cache_dir() / "overlays"
    (half,) = overlays.iterdir()
    monkeypatch.setattr(overlay, "_FORGOTTEN_S", -1.0)

    # While it lives, its folder is left alone, however old.
    built = overlay.build()
    assert half.is_dir()
    folder(built).rename(overlays.parent / "aside")

    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert half.is_dir()
    assert overlay.build() == built
    assert list(overlays.iterdir()) == [built.path]


def test_the_full_set_is_quick(house: House) -> None:
    for number in range(20):
        house.add(f"patch{number}", {f"fakebase/new{number}.py": "x = 1\n"})
    start = time.perf_counter()
    overlay.build()
    assert time.perf_counter() - start < 1.0
