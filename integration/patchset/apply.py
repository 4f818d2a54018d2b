"""Apply contributions to an upstream checkout, or take them off: all of them or none.

Everything happens in a temporary repository first. The checkout is touched once, when the result
is there: by renaming files into place, or by a fast-forward with ``commits``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from integration.ground.errors import UserError
from integration.ground.files import replace_all
from integration.patchset import exchange, git, graft, repository, scratch
from integration.patchset import pins as pins_module
from integration.patchset.patch import Contribution
from integration.patchset.pins import Pin, sha256


@dataclass(frozen=True, slots=True)
class _State:
    """A checkout: its files on the touched paths, the pin's, and which contributions are on."""

    checkout: Path
    everything: tuple[Contribution, ...]  # of the upstreams that the checkout holds
    files: scratch.Files
    pristine: scratch.Files
    applied: frozenset[str]
    bare: scratch.Files  # the files with those taken off

    def changed(self, contributions: Sequence[Contribution]) -> list[str]:
        """Return the paths of ``contributions`` that neither the pin nor a patch explains."""
        touched = sorted(scratch.touched(contributions))
        return [path for path in touched if self.bare.get(path) != self.pristine.get(path)]


def apply(
    checkout: Path,
    names: Sequence[str] | None = None,
    *,
    commits: bool = False,
    three_way: bool = False,
) -> list[str]:
    """Apply ``names`` (all for None), with what they require, to an upstream checkout.

    Args:
        commits: make one commit a patch on the checkout's branch, with the patch's message.
        three_way: accept files that differ from the pin and merge, where that has no conflict.

    Returns:
        One line for each thing that was done or found done.

    Raises:
        UserError: nothing was changed then.
    """
    contributions = repository.load()
    chosen = repository.select(contributions, names)
    pins = _pins_of(checkout, chosen if names is None else repository.find(contributions, names))
    state = _look(checkout, pins, contributions)
    mine = [c for c in chosen if c.upstream in pins]
    said = [f"{c.name}: belongs to {c.upstream}, not here" for c in chosen if c not in mine]
    said += [f"{c.name}: already applied" for c in mine if c.name in state.applied]
    todo = [c for c in mine if c.name not in state.applied]
    if not todo:
        return said
    _refuse_crlf(state, todo)
    if commits or three_way:
        _refuse_dirty(checkout, todo)
    if not three_way:
        _refuse_changed(state, pins, todo)

    touched = scratch.touched(todo)
    with TemporaryDirectory(prefix="integration-") as temporary:
        folder = Path(temporary) / "checkout"
        folder.mkdir()
        env = graft.repository_at(folder, checkout, "HEAD", touched) if commits else {}
        if not commits:
            exchange.create(folder, state.files)
        if three_way:
            graft.store_ancestors(folder, env, state.pristine, contributions, todo)
        start = git.run(["rev-parse", "HEAD"], folder, env=env).text
        box = exchange.mailbox(todo, marked=False)
        complaint = exchange.commit_all(folder, box, three_way=three_way, env=env)
        if complaint:
            raise _refused(checkout, complaint, three_way)
        span = ["--format=%s", f"{start}..HEAD"]
        made = git.run(["log", *span], folder, env=env).text.split("\n")
        if commits:
            _forward(checkout, git.run(["rev-parse", "HEAD"], folder, env=env).text, state, todo)
        else:
            _write(checkout, state.files, scratch.read(folder, touched), todo)
    done = "committed" if commits else "applied"
    return said + [f"{c.name}: {done if c.subject in made else 'already present'}" for c in todo]


def take_off(
    checkout: Path, names: Sequence[str] | None = None, *, three_way: bool = False
) -> list[str]:
    """Undo ``apply``: exactly ``names`` (all for None), and not what they require.

    Raises:
        UserError: one of them is there in part or in another state, or is required by one that
            stays; nothing was changed then.
    """
    contributions = repository.load()
    chosen = repository.find(contributions, names)
    pins = _pins_of(checkout, chosen if names is not None else contributions)
    state = _look(checkout, pins, contributions)
    mine = [c for c in chosen if c.upstream in pins]
    absent = [c for c in mine if c.name not in state.applied]
    if partly := [c for c in absent if state.changed([c])]:
        _, findings = scratch.apply(state.bare, partly[-1:], reverse=True)
        raise UserError(
            f"expected {partly[-1].name} in {checkout} exactly as it is stored, found another "
            f"state: {findings[0].sentence()}; nothing was changed: take it off with git "
            f"(`git -C {checkout} diff`, or `git -C {checkout} revert` where it is a commit)"
        )
    said = [f"{c.name}: not applied" for c in absent]
    todo = [c for c in mine if c.name in state.applied]
    if not todo:
        return said
    going = {c.name for c in todo}
    staying = [c for c in state.everything if c.name in state.applied - going]
    for dependent in repository.close(contributions, [c.name for c in staying]):
        needed = sorted(set(dependent.requires) & going)
        if dependent in staying and needed:
            raise UserError(
                f"expected {needed[0]} to be unused, but {dependent.name}, which is applied, "
                f"requires it; nothing was changed: take off both, `integration patches apply --to "
                f"{checkout} --reverse {needed[0]} {dependent.name}`"
            )
    if not three_way:
        _refuse_changed(state, pins, todo)
    after, findings = scratch.apply(state.files, todo, reverse=True)
    if findings:
        raise UserError(
            f"{findings[0].sentence()}; nothing was changed: run `git -C {checkout} diff`"
        )
    _write(checkout, state.files, after, todo)
    return said + [f"{c.name}: taken off" for c in todo]


def _pins_of(checkout: Path, wanted: Sequence[Contribution]) -> dict[str, Pin]:
    """Return the pins whose package ``checkout`` holds; refuse a folder that no patch fits."""
    pins = pins_module.load()
    if not checkout.is_dir():
        raise UserError(
            f"expected a folder at {checkout}, found none; nothing was applied: clone an upstream "
            f"there, or make a scratch checkout with `integration patches import`"
        )
    held = {upstream: pin for upstream, pin in pins.items() if (checkout / pin.package).is_dir()}
    if not held:
        folders = " or ".join(f"{pin.package}/" for pin in pins.values())
        raise UserError(
            f"expected {checkout} to hold {folders}, found neither; nothing was applied: give the "
            f"root of an upstream checkout"
        )
    for contribution in wanted:
        if contribution.upstream not in held and len(wanted) == 1:
            raise UserError(
                f"expected a checkout of {contribution.upstream} for {contribution.name}, found "
                f"one of {', '.join(held)} at {checkout}; nothing was applied: give the root of a "
                f"{contribution.upstream} checkout"
            )
    for pin in held.values():
        if pin.site() == checkout.resolve():
            raise UserError(
                f"expected an upstream checkout, found the installed packages at {checkout}; they "
                f"stay pristine: use `integration env`, which needs no change to them"
            )
    return held


def _look(checkout: Path, pins: dict[str, Pin], contributions: Sequence[Contribution]) -> _State:
    everything = tuple(c for c in contributions if c.upstream in pins)
    paths = scratch.touched(everything)
    files = scratch.read(checkout, paths)
    pristine: dict[str, bytes] = {}
    for pin in pins.values():
        pristine.update(scratch.read(pin.site(), paths))
    bare: dict[str, bytes] = dict(files)
    applied = set()
    if bare != pristine:
        for contribution in reversed(everything):
            without, findings = scratch.apply(bare, [contribution], reverse=True)
            if not findings:
                applied.add(contribution.name)
                bare = without
    return _State(checkout, everything, files, pristine, frozenset(applied), bare)


def _refuse_changed(state: _State, pins: dict[str, Pin], todo: Sequence[Contribution]) -> None:
    changed = state.changed(todo)
    if not changed:
        return
    path = changed[0]
    pin = next(pin for pin in pins.values() if path.startswith(f"{pin.package}/"))
    expected = sha256(state.pristine[path])[:12] if path in state.pristine else "no such file"
    found = sha256(state.bare[path])[:12] if path in state.bare else "no such file"
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    raise UserError(
        f"expected {path} of {pin.package} {pin.version} (sha256 {expected}) in {state.checkout}, "
        f"found {found}{more}; nothing was changed: check out {pin.tag}, or merge with --3way"
    )


def _refuse_crlf(state: _State, todo: Sequence[Contribution]) -> None:
    """Name the cause where git has given a checkout the line ends of another system."""
    for path in state.changed(todo):
        found, pristine = state.bare.get(path, b""), state.pristine.get(path)
        if b"\r\n" in found and found.replace(b"\r\n", b"\n") == pristine:
            raise UserError(
                f"expected {path} with the pin's line ends, found CRLF in {state.checkout}; "
                f"nothing was changed: run `git -C {state.checkout} config core.autocrlf false` "
                f"and check the files out again"
            )


def _refuse_dirty(checkout: Path, todo: Sequence[Contribution]) -> None:
    if git.attempt(["rev-parse", "--verify", "--quiet", "HEAD"], checkout).code:
        raise UserError(
            f"expected the root of a git checkout with a commit at {checkout}, found none; "
            f"--commits and --3way need one: leave them out, or commit there first"
        )
    paths = sorted(scratch.touched(todo))
    arguments = ["status", "--porcelain", "--untracked-files=all", "--", *paths]
    dirty = git.run(arguments, checkout).text
    if dirty:
        raise UserError(
            f"expected no uncommitted change in the files that the patches touch, found "
            f"{dirty.splitlines()[0][3:]} changed; it could be lost: run `git -C {checkout} stash`"
        )


def _refused(checkout: Path, complaint: str, three_way: bool) -> UserError:
    lines = complaint.splitlines()
    conflicts = [line for line in lines if line.startswith("CONFLICT")]
    errors = [line for line in lines if line.startswith("error: ")]
    which = [line for line in lines if line.startswith("Patch failed at ")]
    told = "; ".join([*which, *(conflicts or errors[:1] or lines[:1])])
    expected = "a merge without conflict" if three_way else "patches that apply without fuzz"
    return UserError(
        f"expected {expected}, found: {told}; nothing was changed in {checkout}: check out the "
        f"pin's tag, or rebase the patch (`integration patches import`)"
    )


def _forward(checkout: Path, commit: str, state: _State, todo: Sequence[Contribution]) -> None:
    """Move the checkout's branch to ``commit``; put the files back if git stops half-way."""
    done = git.attempt(["merge", "--ff-only", "--quiet", commit], checkout)
    if done.code:
        now = scratch.read(checkout, scratch.touched(todo))
        _write(checkout, now, state.files, todo)
        raise UserError(
            f"expected git to move {checkout} to the patched commit, found: "
            f"{(done.err or done.text).splitlines()[0]}; nothing was changed: mend that and repeat"
        )


def _write(
    checkout: Path, old: scratch.Files, new: scratch.Files, todo: Sequence[Contribution]
) -> None:
    paths = sorted(scratch.touched(todo))
    replace_all(checkout, {p: new.get(p) for p in paths if old.get(p) != new.get(p)})
