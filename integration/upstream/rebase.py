"""Move the set to a newer pin: `integration patches rebase --onto`.

The set lies as commits on the pin's sources in a scratch repository an upstream; git rebases them
onto the newer sources, and stops where a person has to decide. ``patches/`` changes once, when
every commit is there and has been exported: the set itself, or the one that is kept beside it for
an upstream whose other half has not followed yet.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from integration.ground import paths
from integration.ground.errors import UserError
from integration.ground.files import replace_all
from integration.patchset import exchange, git, repository, scratch
from integration.patchset import pins as pins_module
from integration.patchset.exchange import Exported
from integration.patchset.patch import Contribution, pristine_paths, without_requirements
from integration.patchset.pins import Pin
from integration.upstream import checkout, history, index
from integration.upstream.newer import Newer

_ONTO = "onto"  # the tag of the newer sources
# Stands while git rebases. Found before, git was killed: what lies in the checkout is half of
# something, and nobody's work.
_RUNNING = Path(".git") / "integration-running"


@dataclass(frozen=True, slots=True)
class Stopped:
    """A patch that a person has to mend: in which checkout, and what git says."""

    upstream: str
    name: str
    checkout: Path
    files: tuple[str, ...]
    complaint: str


@dataclass(frozen=True, slots=True)
class Done:
    """The set stands on the newer pins."""

    moved: tuple[tuple[Pin, Pin], ...]  # old, new
    said: tuple[str, ...]  # one line a patch
    into: str = ""  # the folder below patches/ that keeps it beside the set


def folder() -> Path:
    """Return where a rebase under way lies."""
    return paths.cache_dir() / "rebase"


def start(onto: Mapping[str, Newer], commits: Mapping[str, str], into: str = "") -> Stopped | Done:
    """Begin to move the pins of the upstreams in ``onto``.

    Args:
        into: the folder below patches/ that keeps the result; empty for the set itself, which then
            also takes what a folder in use holds.
        commits: upstream to the commit of its newer version, where neither package nor tag tell.
    """
    if into and not re.fullmatch(repository.NAME_PATTERN, into):
        raise UserError(
            f"expected --into with a name of lower-case letters, digits and underscores, got "
            f"{into!r}; nothing was done: name it `next`, say"
        )
    if folder().exists():
        raise UserError(
            f"expected no rebase under way, found one in {folder()}; it would be lost: run "
            f"`integration patches rebase --continue` or `--abort`"
        )
    pins = pins_module.load()
    contributions = repository.load()
    moved = {upstream: _pin_of(newer, commits.get(upstream)) for upstream, newer in onto.items()}
    folder().parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="rebase-", dir=folder().parent) as temporary:
        building = Path(temporary) / "rebase"
        for upstream, newer in onto.items():
            mine = [c for c in contributions if c.upstream == upstream]
            _prepare(building / upstream, pins[upstream], mine, newer.sources())
        state = {
            "patches": {c.name: c.sha256 for c in contributions},
            "pins": os.environ.get("INTEGRATION_PINS", ""),
            "into": into,
            "onto": {u: [pin.version, pin.tag, pin.commit] for u, pin in moved.items()},
        }
        (building / "state.json").write_text(json.dumps(state, indent=2))
        building.rename(folder())
    return go_on()


def go_on() -> Stopped | Done:
    """Take up a rebase where it stopped, whether at a conflict or because it was killed."""
    state = _state()
    for upstream in state["onto"]:
        here = folder() / upstream
        if (here / _RUNNING).exists():
            todo = _rest(here)
        elif (here / ".git" / "rebase-merge").is_dir():
            _refuse_unresolved(here)
            _commit_resolution(here)
            todo = ["--continue"]
        elif git.attempt(["merge-base", "--is-ancestor", _ONTO, "HEAD"], here).code:
            todo = ["--onto", _ONTO, exchange.BASE, "main"]
        else:
            todo = []
        (here / _RUNNING).touch()
        done = git.attempt(["rebase", *todo], here) if todo else None
        (here / _RUNNING).unlink()
        if done and done.code:
            return _stopped(upstream, here, done)
    return _finish(state)


def abort() -> None:
    """Forget the rebase; the patches have not been touched."""
    _state()
    shutil.rmtree(folder())


def _state() -> dict:
    file = folder() / "state.json"
    if not file.is_file():
        raise UserError(
            "expected a rebase under way, found none; there is nothing to continue or abort: "
            "begin with `integration patches rebase --onto PACKAGE==VERSION`"
        )
    state = json.loads(file.read_text())
    os.environ["INTEGRATION_PINS"] = state["pins"]  # the set that it began with
    return state


def _pin_of(newer: Newer, commit: str | None) -> Pin:
    pin = newer.pin
    if newer.shown == pin.version:
        raise UserError(
            f"expected another version of {pin.package} than the pin, got {newer.shown}, which it "
            f"is; there is nothing to move: see what there is with `pip index versions "
            f"{pin.package}`"
        )
    if newer.url is None:
        raise UserError(
            f"expected a published version of {pin.package}, or a wheel, got the checkout "
            f"{newer.shown}; a pin must be installable: see what is to come with `integration "
            f"patches drift --against {pin.package}=={newer.shown}`"
        )
    tag = pin.tag.replace(pin.version, newer.shown)
    version_file = f"{pin.package}/version.py"
    told = newer.read([version_file]).get(version_file, b"").decode("utf-8", "replace")
    match = re.search(r"^git_version\s*=\s*['\"]([0-9a-f]{40})", told, re.MULTILINE)
    commit = commit or (match[1] if match else index.commit_of(pin.repository, tag))
    if not commit:
        raise UserError(
            f"expected the commit of {pin.package} {newer.shown} in its version.py or as tag {tag} "
            f"of {pin.repository}, found neither; the pin would not say what it is: give it with "
            f"--commit {pin.package}==SHA"
        )
    return replace(pin, version=newer.shown, tag=tag, commit=commit, files={})


def _prepare(
    here: Path, pin: Pin, contributions: Sequence[Contribution], newer: scratch.Files
) -> None:
    """Make a repository of the pin's sources, the set on them, and the newer sources beside."""
    pins_module.refuse_changed(pin, pin.site(), pin.files)
    exchange.create(here, checkout.sources(pin))
    complaint = exchange.commit_all(here, exchange.mailbox(contributions, marked=True))
    if complaint:
        raise UserError(
            f"expected the patches of {pin.upstream} to apply on {pin.package} {pin.version}, "
            f"found: {complaint.splitlines()[0]}; nothing was changed: run `integration patches "
            f"check`"
        )
    with scratch.folder_with(newer) as files, TemporaryDirectory() as temporary:
        env = {"GIT_INDEX_FILE": f"{temporary}/index", "GIT_WORK_TREE": str(files)}
        env["GIT_DIR"] = str((here / ".git").resolve())
        git.run(["add", "--all", "--force", "."], files, env=env)
        tree = git.run(["write-tree"], files, env=env).text
    arguments = ["commit-tree", tree, "-p", exchange.BASE, "-m", "The newer sources"]
    git.run(["tag", _ONTO, git.run(arguments, here).text], here)
    checkout.for_people(here)


def _rest(here: Path) -> list[str]:
    """Return what `git rebase` has still to do; clear away what a killed one has left.

    Each commit that it had made is kept: its HEAD stands on the last of them.
    """
    head = git.run(["rev-parse", "HEAD"], here).text
    shutil.rmtree(here / ".git" / "rebase-merge", ignore_errors=True)
    for lock in ("index.lock", "HEAD.lock"):
        (here / ".git" / lock).unlink(missing_ok=True)
    git.run(["checkout", "--quiet", "--force", "main"], here)
    git.run(["clean", "--quiet", "--force", "-d"], here)  # files of a checkout that came half-way
    if not git.attempt(["merge-base", "--is-ancestor", _ONTO, "main"], here).code:
        return []
    if git.attempt(["merge-base", "--is-ancestor", _ONTO, head], here).code:
        return ["--onto", _ONTO, exchange.BASE, "main"]
    made = _marks(here, f"{_ONTO}..{head}")
    before = _marks(here, f"{exchange.BASE}..main")
    last = before[next(reversed(made))] if made else exchange.BASE
    return ["--onto", head, last, "main"]


def _marks(here: Path, span: str) -> dict[str, str]:
    """Return the names of the patches of ``span`` with their commits, oldest first."""
    log = git.run(["log", "--reverse", "--format=%x00%H%n%B", span], here).text
    marked = re.compile(rf"^{exchange.MARK}: (.*)$", re.MULTILINE)
    records = log.split("\0")[1:]
    return {marked.findall(r)[-1]: r.partition("\n")[0] for r in records if marked.search(r)}


def _commit_resolution(here: Path) -> None:
    """Commit what a person has resolved, so that no interruption of what follows can lose it."""
    amending = (here / ".git" / "rebase-merge" / "amend").exists()  # a person's `edit` of a commit
    if not amending and git.attempt(["diff", "--cached", "--quiet", "HEAD"], here).code:
        git.run(["commit", "--quiet", "--no-verify", "--reuse-message", "REBASE_HEAD"], here)


def _refuse_unresolved(here: Path) -> None:
    """Refuse what git would commit as it stands: conflicts, markers, or leave out: edits."""
    unmerged = git.run(["diff", "--name-only", "--diff-filter=U"], here).text.splitlines()
    marked = git.attempt(["diff", "--check", "--cached", "HEAD"], here).text.splitlines()
    marked = [s.partition(": ")[0] for s in marked if "leftover conflict marker" in s]
    unstaged = git.run(["diff", "--name-only"], here).text.splitlines()
    for places, what in (
        (unmerged, "in conflict"),
        (unstaged, "edited and not added"),
        (marked, "with a conflict marker"),
    ):
        if places:
            raise UserError(
                f"expected every conflict resolved in {here}, found {places[0]} {what}; nothing "
                f"was continued: edit it, `git -C {here} add -A`, and repeat"
            )


def _stopped(upstream: str, here: Path, done: git.Result) -> Stopped:
    message = git.attempt(["log", "-1", "--format=%B", "REBASE_HEAD"], here)
    name = re.findall(rf"^{exchange.MARK}: (.*)$", message.text, re.MULTILINE)
    files = git.run(["diff", "--name-only", "--diff-filter=U"], here).text.splitlines()
    conflicts = [s for s in f"{done.text}\n{done.err}".splitlines() if s.startswith("CONFLICT")]
    complaint = "\n".join(conflicts) or done.err or done.text
    return Stopped(upstream, name[-1] if name else "?", here, tuple(files), complaint)


def _finish(state: dict) -> Done:
    root, into = paths.REPO, paths.PATCHES / state["into"]
    stored = repository.load()
    if {c.name: c.sha256 for c in stored} != state["patches"]:
        raise UserError(
            "expected the patches that the rebase began with, found others in patches/; they would "
            "be overwritten: `integration patches rebase --abort`, and begin again"
        )
    pins = pins_module.load()
    onto = state["onto"]
    gone = _emptied(onto, stored)
    moved = {
        upstream: replace(pins[upstream], version=version, tag=tag, commit=commit)
        for upstream, (version, tag, commit) in onto.items()
    }
    new: dict[str, bytes | None] = {}
    used = paths.patches_dir()
    if into == paths.PATCHES != used:  # what is kept beside becomes the set
        moved = {
            u: pin for u, pin in pins.items() if root / pin.stated != into / "pins.toml"
        } | moved
        new |= {f.relative_to(root).as_posix(): None for f in used.rglob("*") if f.is_file()}
    said: list[str] = []
    hashes: dict[str, Mapping[str, str]] = {}
    for upstream in moved:
        mine = [Exported(c.name, c.data) for c in stored if c.upstream == upstream]
        hashes[upstream] = moved[upstream].files
        here = folder() / upstream
        if upstream in onto:
            if gone:
                exchange.forget(here, gone)
            names = {commit.name for commit in exchange.commits(here)}
            elsewhere = sorted({c.name for c in stored} - names - set(gone))
            mine = exchange.export(here, elsewhere=elsewhere)
        exported = checkout.parsed(mine, upstream, into / upstream)
        if upstream in onto:
            hashes[upstream] = {
                path: pins_module.sha256(git.run(["show", f"{exchange.BASE}:{path}"], here).out)
                for path in sorted(pristine_paths(exported))
            }
        said += checkout.changes(into / upstream, stored, exported, new)
        if (
            into != paths.PATCHES == used
        ):  # what each was made of: `check` tells when that has changed
            origins = {c.name: state["patches"].get(c.name, "a new one") for c in exported}
            lines = [f"{name}  # from {origin}\n" for name, origin in origins.items()]
            new[(into / upstream / "series").relative_to(root).as_posix()] = "".join(lines).encode()
    for c in stored if into == paths.PATCHES else ():
        if c.upstream not in onto and set(c.requires) & set(gone):
            head, diff, rest = c.data.decode().partition("\ndiff --git ")
            new[(into / c.upstream / c.path.name).relative_to(root).as_posix()] = (
                without_requirements(head, gone) + diff + rest
            ).encode()
            said.append(f"{c.upstream}/{c.name}: changed, no longer requires what upstream has")
    file = into / "pins.toml"
    text = pins_module.with_files(hashes, file, moved=moved.values())
    new[file.relative_to(root).as_posix()] = text.encode()
    if into == paths.PATCHES:
        at = {pin.upstream: f"{pin.package} {pin.version}" for pin in moved.values()}
        going = [c for c in stored if c.name in gone]
        why = {c.name: f"Nothing of it was left on {at[c.upstream]}" for c in going}
        new |= history.retire(going, why)
    replace_all(root, new)
    shutil.rmtree(folder())
    os.environ["INTEGRATION_PINS"] = state["into"]
    return Done(tuple((pins[u], pin) for u, pin in moved.items()), tuple(said), state["into"])


def _emptied(onto: Mapping[str, object], stored: Sequence[Contribution]) -> list[str]:
    """Move the base tags; return the patches that no commit is left of."""
    left: set[str] = set()
    for upstream in onto:
        here = folder() / upstream
        checkout.refuse_unfinished(here)
        git.run(["tag", "--force", exchange.BASE, _ONTO], here)
        left |= {commit.name for commit in exchange.commits(here)}
    return [c.name for c in stored if c.upstream in onto and c.name not in left]
