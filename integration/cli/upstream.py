"""``integration patches drift|rebase|drop|pr``. What they need is imported when they run."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from integration.ground import options, terminal
from integration.ground.errors import UserError
from integration.ground.options import Json

if TYPE_CHECKING:
    from integration.upstream import drift as drift_module
    from integration.upstream.rebase import Done, Stopped


@contextmanager
def _telling(words: str) -> Generator[Callable[[str], None], None, None]:
    """Show the step under way on stderr; the function yielded names the next one.

    On a terminal it is a moving line that goes away; elsewhere each step is a line.
    """
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("") as status:

        def tell(words: str) -> None:
            if console.is_terminal:
                status.update(words)
            else:
                console.print(words, markup=False, highlight=False, soft_wrap=True)

        tell(words)
        yield tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Say what a newer upstream means for each contribution.

    Exit codes: 0 all patches apply (an offset is nothing to do), 3 one is there already, 4 one is
    there with changes, 5 one needs a rebase; the highest counts.
    """

    against: tuple[str, ...]
    """PACKAGE==VERSION, or PACKAGE==PATH of a newer wheel or checkout."""
    run_drop_when: bool = False
    """Run the Drop-when tests there, without the patches."""
    json: Json = None

    def __post_init__(self) -> None:
        if not self.against:
            raise UserError(
                "expected --against PACKAGE==VERSION, got no newer version; nothing was compared: "
                "`integration patches drift --help` describes it"
            )

    def run(self) -> int:
        from integration.patchset import pins as pins_module
        from integration.patchset import repository
        from integration.upstream import drift, dropwhen, newer

        options.require_writable(self.json)
        pins = pins_module.load()
        others = newer.parse(self.against, pins, "--against")
        contributions = repository.load()
        drifts = drift.drift(contributions, others)
        if self.run_drop_when:
            mine = {c.name: c for c in contributions}
            with _telling("Installing into a throwaway environment") as tell:
                try:
                    with dropwhen.environment(others, pins) as python:
                        for place, d in enumerate(drifts):
                            tell(f"Drop-when of {d.name}, {place + 1} of {len(drifts)}")
                            outcome = dropwhen.run(mine[d.name], str(python))
                            drifts[place] = replace(d, drop_when=dropwhen.words(outcome))
                except UserError as error:
                    drifts = [replace(d, drop_when=f"{drift.NOT_RUN}: {error}") for d in drifts]
        options.report(self.json, lambda: [asdict(d) for d in drifts], lambda: _show(drifts))
        return drift.worst(drifts)


def _show(drifts: "list[drift_module.Drift]") -> None:
    from rich.table import Table

    from integration.patchset.scratch import PRESENT

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("name", "against", "verdict", "Drop-when", "what"):
        table.add_column(column, overflow="fold", no_wrap=column in ("name", "verdict"))
    for d in drifts:
        table.add_row(d.name, d.against, d.verdict.value, d.drop_when.partition(":")[0], d.detail)
    terminal.console().print(table)
    reasons = dict.fromkeys(d.drop_when for d in drifts if ":" in d.drop_when)
    for reason in reasons:
        print(f"\nDrop-when {reason}")
    for d in drifts:
        there = [f.where for f in d.findings if f.verdict == PRESENT]
        if there:
            print(f"\n{d.name}: already present\n  at        " + "\n            ".join(there))
        for finding in d.findings:
            if finding.verdict != PRESENT:
                print(f"\n{finding}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebase:
    """Move the set to a newer pin, three-way. patches/ changes when all is done, and at once."""

    onto: tuple[str, ...] = ()
    """PACKAGE==VERSION, the newer version, or PACKAGE==PATH of a wheel of it."""
    commit: tuple[str, ...] = ()
    """PACKAGE==SHA, the commit of the version, where no tag tells it."""
    into: str = ""
    """Keep the result in this folder below patches/, for --pins, and the set as it is."""
    continue_: Annotated[bool, arg(name="continue")] = False
    """Go on after a conflict has been mended."""
    abort: bool = False
    """Leave everything as it was."""

    def run(self) -> int:
        from integration.patchset import pins as pins_module
        from integration.upstream import newer, rebase

        if [bool(self.onto), self.continue_, self.abort].count(True) != 1:
            raise UserError(
                "expected one of --onto, --continue and --abort; nothing was done: begin with "
                "`integration patches rebase --onto PACKAGE==VERSION`"
            )
        if self.abort:
            rebase.abort()
            print("forgotten; patches/ is as it was")
            return 0
        try:
            if self.continue_:
                result = rebase.go_on()
            else:
                pins = pins_module.load()
                others = newer.parse(self.onto, pins, "--onto")
                result = rebase.start(others, newer.commits(self.commit, others), self.into)
        except KeyboardInterrupt:
            go_on = "--continue`, which takes up what is done, or `--abort`"
            raise UserError(
                "interrupted; patches/ is as it was: run `integration patches rebase "
                + (go_on if rebase.folder().exists() else "--onto …`"),
                exit_code=130,
            ) from None
        if isinstance(result, rebase.Stopped):
            _show_stop(result)
            return 1
        _show_done(result)
        return 0


def _show_stop(stopped: "Stopped") -> None:
    import shlex

    path = shlex.quote(str(stopped.checkout))
    print(
        f"{stopped.upstream} stopped at {stopped.name}:\n{stopped.complaint}\n\n"
        f"look      git -C {path} show REBASE_HEAD\n"
        f"mend      edit {', '.join(stopped.files) or 'the files'} there, then "
        f"git -C {path} add -A\n"
        f"go on     integration patches rebase --continue\n"
        f"or        integration patches rebase --abort\n\n"
        f"patches/ is as it was until all is done"
    )


def _show_naming(text: str) -> None:
    """Print the files that name what has gone, for a person to mend."""
    from integration.ground import paths
    from integration.patchset import git

    # Evidence tells what was measured then: it is measured again, never edited.
    line = ["grep", "--fixed-strings", "--word-regexp", "-l", text, "--", ":!*/evidence/*"]
    naming = git.attempt(line, paths.REPO).text.splitlines()
    there = [name for name in naming if (paths.REPO / name).is_file()]
    if there:
        print(f"  still naming {text}: {', '.join(there)}")


def _show_done(done: "Done") -> None:
    print("\n".join(done.said))
    for old, new in done.moved:
        print(f"{old.package}: {old.version} -> {new.version} ({new.tag}, {new.commit[:12]})")
        if not done.into:
            _show_naming(old.version)
    if done.into:
        print(f"\nnext      integration patches check --pins {done.into}")
        return
    package = " ".join(f"{new.package}=={new.version}" for _, new in done.moved)
    shown = ", ".join(f"{new.package} {new.version}" for _, new in done.moved)
    print(
        f"""
next      mend the files named above, and ci/lock for the exact versions
          pip install {package}
          integration patches readme --write && integration patches check
commit    git add -A && git commit -m "Move the pin to {shown}"
evidence  of a changed patch is stale: measure again, in commits of its own"""
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Let NAME go, if its Drop-when test passes on the unpatched pin."""

    name: Positional[str]
    """The contribution."""

    def run(self) -> None:
        from integration.upstream.drop import drop

        with _telling(f"Running the Drop-when test of {self.name}"):
            file = drop(self.name)
        print(f"{self.name}: upstream no longer needs it; recorded in {file}")
        _show_naming(self.name)
        print(
            "next: integration patches readme --write, mend the files named above, then "
            "integration patches check, then commit"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRequest:
    """Prepare NAME as a pull request: a branch in a clone, and pr.md. A person submits it."""

    name: Positional[str]
    """The contribution."""
    checkout: Path
    """A clone of the upstream."""
    base: str | None = None
    """The commit where the branch begins; the clone's main branch if none is given."""
    test: bool = True
    """Leave out the tests: the contribution's for the counts in pr.md, and its Drop-when test."""

    def run(self) -> None:
        import shlex

        from integration.upstream.pr import look, prepare

        asked = (self.name, self.checkout, self.base)
        reading = f"Reading what upstream has done since the pin to the lines of {self.name}"
        with _telling(reading) as tell:
            looked = look(*asked, test=self.test, tell=tell)
            # It is worth most where the patch no longer fits, and the branch cannot be made.
            print("upstream  " + "\n          ".join(looked.lines))
            tell(f"Making the branch {self.name}")
            prepared = prepare(*asked, looked=looked, test=self.test, tell=tell)
        branch = prepared.branch
        path = shlex.quote(str(self.checkout))
        print(f"branch    {branch.name} of {self.checkout}: on {branch.base[:12]}")
        print("          " + ", ".join(c.name for c in branch.contributions))
        for item in prepared.linted:
            words = {True: "clean", False: "finds something", None: "not run"}[item.clean]
            reason = "" if item.clean else f": {item.reason}"
            print(f"lint      {item.command.split()[0]}: {words}{reason}")
        print(f"text      {prepared.text}")
        print(
            f"""
read      git -C {path} log -p {branch.base[:12]}..{branch.name}
own       git -C {path} rebase {branch.base[:12]} {branch.name} \\
            --exec 'git commit --amend --no-edit --reset-author'
submit    push and open it yourself, once every TODO and box of pr.md is done"""
        )
