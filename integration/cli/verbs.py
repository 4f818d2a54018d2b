"""The verbs that tie several packages together: plan, dryrun, test and report.

What they need is imported when they run.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from integration.dryrun.request import Request
from integration.ground import options, terminal
from integration.ground.errors import UserError
from integration.ground.options import Config, Experts, Json, Layers, Names, Without


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Show memory, traffic and time of CONFIG, item by item. No GPU is needed.

    The exit code is 3 where the job does not fit the cluster, and 2 for a mistake in the call.
    """

    config: Config
    cluster: str | None = None
    """A known cluster, or a file of your own (FILE.toml); the config's own if none is given."""
    ranks: int | None = None
    """The number of GPUs, one rank each."""
    pp: int | None = None
    """The pipeline parallel degree."""
    replicas: int | None = None
    """The number of data parallel replicas."""
    tp: int | None = None
    """The tensor parallel degree."""
    ep: int | None = None
    """The expert parallel degree."""
    sequences: int | None = None
    """The sequences of one data parallel rank in a step."""
    seq_len: int | None = None
    """The tokens of a sequence."""
    layers: Layers = None
    experts: Experts = None
    without: Without = ()
    html: Path | None = None
    """Also write a page with bars to this file."""
    json: Json = None

    def __post_init__(self) -> None:
        counts = ("ranks", "pp", "replicas", "tp", "ep", "sequences", "seq_len")
        options.at_least(1, self, *counts, "layers", "experts")

    def run(self) -> int:
        from integration.jobs import catalog
        from integration.jobs.cluster import load
        from integration.patchset import repository
        from integration.plan import published, render
        from integration.plan.levers import Levers
        from integration.plan.plan import changes, make
        from integration.report import plan as pages

        options.require_writable(self.json)
        job = catalog.find(self.config, layers=self.layers, experts=self.experts)
        job = job.on(self.ranks) if self.ranks else job
        kept = repository.without(self.without)
        layout = {"pp": self.pp, "dp_replicate": self.replicas, "tp": self.tp, "ep": self.ep}
        job = replace(
            job,
            layout=replace(job.layout, **{k: v for k, v in layout.items() if v is not None}),
            sequences=self.sequences or job.sequences,
            seq_len=self.seq_len or job.seq_len,
        )
        made = make(job, load(self.cluster or job.cluster), Levers.of(kept))
        changed = changes(made)
        run = job.name.startswith("jupiter_1t") and made.cluster.name == "jupiter"
        compared = run and not self.without
        figures = published.figures(made) if compared else []
        arithmetic = published.arithmetic(made) if compared else []

        options.report(
            self.json,
            lambda: {
                "kind": "plan",
                "config": made.job.name,
                **asdict(made),
                "too_large": made.too_large,
                "changes": [asdict(change) for change in changed],
            },
            lambda: render.show(made, changed, figures, arithmetic, terminal.console(120)),
        )
        if self.html is not None:
            pages.write(made, changed, self.html, figures, arithmetic)
            print(f"page: {self.html}")
        return made.exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Dryrun(Request):
    """Build CONFIG as one rank of many, and run a step on fake tensors. No GPU is needed.

    The exit code is 1 where a check is broken or the step fails, 2 for a mistake in the call, and 3
    where the plan differs from what was counted by more than 5 per cent.
    """

    json: Json = None

    def run(self) -> None:
        from integration.dryrun import render, start
        from integration.dryrun.compare import as_json, complaint

        job = self.job()
        options.require_writable(self.json)
        found = start.run(self, debug=options.debugging())
        options.report(
            self.json,
            lambda: as_json(job, self, found),
            # A terminal's width; what goes to a file is not folded.
            lambda: render.show(job, self, found, terminal.console(160)),
        )
        if (error := complaint(found)) is not None:
            raise error


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """Run the tests of each contribution, in a process and on an overlay of its own."""

    names: Names = ()
    prove: bool = False
    """Also prove that a test fails on the pristine pins, and that losses are equal where due."""
    full: bool = False
    """Also run the tests with the full set."""
    record: bool = False
    """Keep the losses that --prove compares as evidence."""
    project: bool = False
    """Also run the project's own tests."""
    upstream: Path | None = None
    """Run instead the tests of this upstream checkout, with the contributions and without."""

    def __post_init__(self) -> None:
        if self.upstream and (self.prove or self.full or self.record or self.project):
            raise UserError(
                "expected --upstream alone, or with names, got another option; nothing was run: "
                "run `integration test` twice"
            )
        if self.record and not self.prove:
            raise UserError(
                "expected --prove with --record, got --record alone; what it keeps is compared by "
                "--prove, and nothing was run: add --prove"
            )

    def run(self) -> int:
        if self.upstream:
            from integration.upstream.unittests import run as run_upstream

            return 0 if run_upstream(self.names, self.upstream) else 1
        from integration.proof.run import run

        passed = run(
            self.names, prove=self.prove, full=self.full, project=self.project, record=self.record
        )
        return 0 if passed else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Write one HTML page of all evidence: ladders, losses, streams, memory, contributions."""

    runs: Annotated[
        Positional[tuple[Path, ...]],
        arg(help="Folders of runs, or JSON files of ladders, to show too.", help_behavior_hint=""),
    ] = ()
    out: Path | None = None
    """The file of the page; report.html in the folder of runs if none is given."""
    pictures: bool = False
    """Write README's pictures anew instead, of what is kept as evidence."""

    def run(self) -> None:
        from integration.ground.paths import outputs_dir
        from integration.report import picture, report

        if self.pictures:
            for file in picture.write_all():
                print(f"picture: {file}")
            return

        target = self.out or outputs_dir() / "report.html"
        if self.out is None:
            target.parent.mkdir(parents=True, exist_ok=True)
        report.write(self.runs, target)
        print(f"page: {target}")
