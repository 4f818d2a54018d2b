"""``integration patches …`` and ``integration env``. What they need is imported when they run."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from integration.ground import options, terminal
from integration.ground.errors import UserError
from integration.ground.options import Json, Names

if TYPE_CHECKING:
    from integration.patchset.patch import Contribution

Folder = Annotated[
    Positional[Path | None], arg(help="The folder of the checkouts; .cache/checkout if not given.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class List:
    """Show every contribution: its status, size, requirements, tests and evidence."""

    json: Json = None

    def run(self) -> None:
        from integration.patchset import repository

        options.require_writable(self.json)
        rows = [_row(contribution) for contribution in repository.load()]
        options.report(self.json, lambda: rows, lambda: _show(rows))


def _row(contribution: "Contribution") -> dict[str, Any]:
    from integration.patchset import lint

    return {
        "name": contribution.name,
        "upstream": contribution.upstream,
        "status": " ".join(contribution.values("Status")) or "?",
        "files": len(contribution.files),
        "added": contribution.added,
        "removed": contribution.removed,
        "requires": list(contribution.requires),
        "tests": [file for file, _ in contribution.tests],
        "evidence": len(list((contribution.folder / "evidence").glob("*.json"))),
        "stale": len(list(lint.evidence(contribution))),  # measured on another version
        "sha256": contribution.sha256,
    }


def _show(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("name", "upstream", "status", "files", "lines", "requires", "tests", "evidence"):
        table.add_column(column, overflow="fold", no_wrap=column in ("name", "lines"))
    for row in rows:
        stale = f", {row['stale']} stale" if row["stale"] else ""
        table.add_row(
            row["name"],
            row["upstream"],
            row["status"],
            str(row["files"]),
            f"+{row['added']} -{row['removed']}",
            ", ".join(row["requires"]) or "-",
            " ".join(row["tests"]) or "-",
            f"{row['evidence']}{stale}" if row["evidence"] else "-",
        )
    # Into a file or a pipe, a row stays one line, whatever the width of a terminal would be.
    terminal.console().print(table)
    if not rows:
        print("no contributions yet: `integration patches new NAME --upstream pytorch|torchtitan`")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Check that every patch stands alone, and that all of them stand together."""

    json: Json = None

    def run(self) -> int:
        import time
        from dataclasses import asdict

        from integration.evidence.check import check
        from integration.patchset import repository
        from integration.patchset.check import installed
        from integration.upstream import newer

        options.require_writable(self.json)
        start = time.perf_counter()
        # Of a set for upstreams to come, the files are read where they are published.
        findings = check(newer.pristine if options.pins() else installed)
        seconds = time.perf_counter() - start
        count = 0 if findings else len(repository.load())

        def tell() -> None:
            for finding in findings:
                print(f"{finding}\n")
            if findings:
                plural = "problem" if len(findings) == 1 else "problems"
                print(f"{len(findings)} {plural} found in {seconds:.1f} s")
            else:
                print(
                    f"{count} patches: header, series, pins, each alone, every pair, full set, "
                    f"reverse and round trip hold ({seconds:.1f} s)"
                )

        options.report(self.json, lambda: [asdict(finding) for finding in findings], tell)
        return 1 if findings else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Apply the set, or NAMES and what they require, to an upstream checkout: all or nothing."""

    names: Names = ()
    to: Path
    """The root of the checkout."""
    reverse: bool = False
    """Take the patches off instead."""
    commits: bool = False
    """Make one commit a patch."""
    three_way: Annotated[bool, arg(name="3way")] = False
    """Merge into files that differ from the pin."""

    def run(self) -> None:
        from integration.patchset import apply

        if self.reverse and self.commits:
            raise UserError(
                "expected --reverse or --commits, got both; commits are undone by git: run "
                f"`git -C {self.to} revert COMMIT`, or `git -C {self.to} reset --keep COMMIT`"
            )
        names = self.names or None
        if self.reverse:
            lines = apply.take_off(self.to, names, three_way=self.three_way)
        else:
            lines = apply.apply(self.to, names, commits=self.commits, three_way=self.three_way)
        print("\n".join(lines or ["nothing to do: no contribution belongs to this checkout"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """Make a checkout of each pin with the set as commits, to edit with git."""

    folder: Folder = None

    def run(self) -> int:
        import shlex

        from rich.console import Console

        from integration.upstream.checkout import default_folder, import_set

        folder = (self.folder or default_folder()).absolute()
        with Console(stderr=True).status("Copying the pinned sources and committing the patches"):
            made = import_set(folder)
        for checkout in made:
            print(f"{checkout.upstream}: {checkout.path}")
        for checkout in made:
            if checkout.stopped:
                path = shlex.quote(str(checkout.path))
                print(
                    f"\n{checkout.upstream} stopped at a patch that does not fit:\n"
                    f"{checkout.stopped}\n"
                    f"look      git -C {path} am --show-current-patch\n"
                    f"mend      edit the files, then git -C {path} add -A\n"
                    f"go on     git -C {path} am --continue\n"
                    f"store     integration patches export {shlex.quote(str(folder))}"
                )
        if any(checkout.stopped for checkout in made):
            return 1
        path = shlex.quote(str(made[0].path))
        print(
            f"""
look      git -C {path} log --oneline pin..
edit      git -C {path} rebase -i pin, or commit with --fixup and rebase -i --autosquash pin
add       commit with a last line `Patch-Name: NAME` in the message (integration patches new NAME)
drop      remove the commit
store     integration patches export {shlex.quote(str(folder))}"""
        )
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Store the commits of an imported checkout as patches again."""

    folder: Folder = None

    def run(self) -> None:
        from integration.upstream import checkout

        folder = (self.folder or checkout.default_folder()).absolute()
        print("\n".join(checkout.export_set(folder)))
        print("next: integration patches readme --write, then integration patches check")


@dataclass(frozen=True, slots=True, kw_only=True)
class New:
    """Begin a contribution: its folder, a test that fails, and a template of the message."""

    name: Positional[str]
    """The name of the contribution."""
    upstream: str
    """The upstream that it belongs to: pytorch or torchtitan."""

    def run(self) -> None:
        import shlex

        from integration.patchset import scaffold
        from integration.upstream import checkout

        folder, message = scaffold.new(self.name, self.upstream)
        path = shlex.quote(str(checkout.default_folder() / self.upstream))
        print(
            f"""created {folder}

1. write the test, and see it fail on the pristine pin
2. integration patches import            (unless {path} is there)
3. edit the sources in {path}
4. git -C {path} add -A
   git -C {path} commit -e -F {shlex.quote(str(message))}
5. integration patches export
6. integration patches readme --write
7. integration patches check && integration test {self.name} --prove"""
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Readme:
    """Print the README's table of contributions, made from headers and evidence of the patches."""

    write: bool = False
    """Write the tables into README.md and CONTRIBUTING.md."""

    def run(self) -> None:
        from integration.evidence import readme
        from integration.patchset import repository

        contributions = repository.load()
        if not self.write:
            print(readme.table(contributions))
        elif changed := readme.write(contributions):
            print(f"{' and '.join(changed)}: table written")
        else:
            print("The tables are up to date.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Env:
    """Print the line that puts the overlay of the set first, for a launcher of your own.

    Use it as: eval "$(integration env)". NAMES are taken with what they require.
    """

    names: Names = ()

    def run(self) -> None:
        import os
        import shlex

        from integration.patchset import overlay

        path = overlay.build(self.names or None).pythonpath(os.environ.get("PYTHONPATH", ""))
        print(f"export PYTHONPATH={shlex.quote(path)}")
