"""``integration ladder``: climb it, in rounds, save after each rung, print the table. No torch."""

import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from tyro.conf import Suppress

from integration.data import source as job_data
from integration.evidence import record as evidence
from integration.ground import machine, terminal
from integration.ground.errors import UserError
from integration.ground.options import Config, Experts, Layers, Rest, at_least
from integration.ground.paths import REPO, outputs_dir
from integration.jobs import catalog
from integration.jobs.spec import JobSpec
from integration.ladder import numbers, rungs, table
from integration.ladder.keep import keep
from integration.ladder.measure import RungFailedError, Session, measure
from integration.ladder.mfu import mfu
from integration.ladder.order import Place
from integration.ladder.result import Ladder
from integration.ladder.rungs import Only, Rung
from integration.patchset import repository
from integration.train.run import Job
from integration.train.start import choose_ranks

TRACES = "traces"
EVIDENCE = REPO / "integration" / "evidence"
# What the ladder itself decides, and by which option of its own.
OURS = {
    "--training.steps": "--steps",
    "--checkpoint.enable": "nothing: a ladder saves no weights",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Train CONFIG from pristine to the full set, contribution by contribution, and compare.

    What follows `--` goes to TorchTitan.
    """

    config: Config = "mini"
    only: Only = Only.ALL
    """Add one by one up to the full set, leave one out of it, both, or only the full set."""
    names: tuple[str, ...] = ()
    """Add and leave out only these contributions."""
    steps: int = 4
    """The measured steps of a run."""
    warmup: int = 2
    """The steps before them."""
    rounds: int = 1
    """The runs of a rung: up the ladder, down, up, and so on."""
    timeout: float = 180
    """The seconds after which a run is taken to hang."""
    stop_after: float | None = None
    """The minutes after which no further run is started."""
    ranks: int | None = None
    """The number of processes; one a GPU if none is given, or 2 on a CPU."""
    layers: Layers = None
    experts: Experts = None
    whole_documents: bool = False
    """Fill each sequence with one document, and report the model FLOP utilisation."""
    traces: bool = False
    """On a GPU: keep a Chrome trace and the allocator's history of a step of each rung."""
    record: bool = False
    """Keep the result in integration/evidence."""
    label: str = ""
    """What sets this ladder apart from others of CONFIG, in its file's name and the report."""
    resume: Path | None = None
    """Go on with the ladder of this JSON file."""
    retry: bool = False
    """With --resume: also try again what could not run."""
    options: Rest = ()
    command: Suppress[str] = ""  # the whole command line

    def __post_init__(self) -> None:
        at_least(1, self, "steps", "rounds", "timeout", "ranks", "layers", "experts")
        at_least(0, self, "warmup", "stop_after")
        if not re.fullmatch(r"[a-z0-9-]*", self.label):
            raise UserError(
                f"--label must be of a-z, 0-9 and hyphens, as part of a file's name, got "
                f"{self.label!r}; nothing was run"
            )
        if self.retry and self.resume is None:
            raise UserError(
                "expected --resume FILE with --retry, got --retry alone; only a ladder that goes "
                "on has rungs to try again, and nothing was run: add --resume FILE"
            )

    @property
    def whole_command(self) -> str:
        """The command that makes the whole ladder: without what goes on or stops half-way."""
        return re.sub(r" --(resume|stop-after)[ =]\S+| --retry\b", "", self.command)

    def run(self) -> int:
        return 0 if run(self) else 1


def run(request: Request) -> bool:
    """Climb; return whether all numbers are as promised.

    Raises:
        UserError: what the user can mend, or no rung ran.
    """
    job = catalog.find(request.config, layers=request.layers, experts=request.experts)
    job = _with_seq_len(job, request.options)
    _refuse(request, pipeline=job.layout.pp)
    gpus = machine.gpu_count()
    if gpus:
        machine.require_compiler()
    ranks = choose_ranks(job, request.ranks, gpus)
    job.on(ranks).check()
    contributions = repository.load()
    place = Place.of(job, gpu=bool(gpus), ranks=ranks, options=request.options)
    wanted = rungs.climb(contributions, place, only=request.only, names=request.names)
    tokenizer, dataset = job_data.default_folders()
    if request.whole_documents:
        dataset = job_data.long_documents()
    path = request.resume or _new_file(job.name)
    # One step more on a GPU, under the profiler; another one for the allocator's history.
    profiled = 1 if gpus else 0
    recorded = 1 if gpus and request.traces else 0
    own = (
        f"--training.steps={request.warmup + request.steps + profiled}",
        f"--warmup={request.warmup}",
        f"--profiled={profiled}",
        f"--recorded={recorded}",
    )
    # The user's last: a subcommand (activation_checkpoint:selective) takes all that follows.
    options = (*own, *request.options)
    session = Session(
        job=Job(
            job.name, str(dataset), str(tokenizer), options, (), request.layers, request.experts
        ),
        ranks=ranks,
        vocab=job_data.tokenizer_size(tokenizer),
        timeout=request.timeout,
        traces=path.parent / TRACES if request.traces else None,
    )
    ladder = Ladder(
        config=job.name,
        layers=request.layers,
        experts=request.experts,
        options=list(request.options),
        ranks=ranks,
        steps=request.steps,
        warmup=request.warmup,
        rounds=request.rounds,
        machine=evidence.machine(),
        torch=version("torch"),
        torchtitan=version("torchtitan"),
        patches={c.name: c.sha256 for c in contributions},
        command=request.whole_command,
        whole_documents=request.whole_documents,
        label=request.label,
        date=date.today().isoformat(),
    )
    if request.resume:
        ladder.go_on_from(request.resume, retry=request.retry)
    ladder.arrange(wanted)

    def save() -> None:
        ladder.compare(wanted, contributions, place)
        if request.whole_documents:
            ladder.utilise(partial(mfu, job, ladder.machine))
        ladder.save(path)

    # A scheduler's stop ends the ranks too, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = terminal.console(180)
    console.print(f"{len(wanted)} rung(s), {ranks} rank(s): {path}", markup=False, soft_wrap=True)
    if request.traces and not gpus:
        console.print("--traces keeps nothing here: traces are of a GPU, and there is none")
    try:
        _climb(ladder, session, wanted, path.parent, request.stop_after, save, console)
    except KeyboardInterrupt:
        if not path.exists():  # no rung has ended
            raise
        raise UserError(
            f"interrupted; what was measured is kept: go on with the same command and --resume "
            f"{path}",
            exit_code=130,
        ) from None
    save()
    table.show(ladder, wanted, console)
    return _conclude(ladder, wanted, path, request.record, console)


def _with_seq_len(job: JobSpec, options: Sequence[str]) -> JobSpec:
    """Return ``job`` with the last ``--training.seq_len`` among TorchTitan's ``options``."""
    words = [part for option in options for part in option.split("=", 1)]
    for name, value in pairwise(words):
        if name.replace("-", "_") == "__training.seq_len" and value.isdigit() and int(value):
            job = replace(job, seq_len=int(value))
    return job


def _refuse(request: Request, *, pipeline: int) -> None:
    if pipeline > 1:
        raise UserError(
            f"the ladder tells forward from backward, which pipeline stages mix, and "
            f"{request.config} has {pipeline} of them; take a config without, mini say"
        )
    for option in request.options:
        name = option.partition("=")[0].replace("_", "-").replace(".no-", ".")
        if name in OURS:
            raise UserError(
                f"after -- comes what the ladder leaves to TorchTitan, and {option} is decided by "
                f"{OURS[name]}"
            )


def _climb(
    ladder: Ladder,
    session: Session,
    wanted: Sequence[Rung],
    folder: Path,
    stop_after: float | None,
    save: Callable[[], None],
    console: Console,
) -> None:
    """Run every rung once a round; each second round downwards, so that a drift cancels."""
    begin = time.monotonic()
    for number in range(ladder.rounds):
        for rung in wanted[:: -1 if number % 2 else 1]:
            row = ladder.row(rung)
            if row.status == "failed" or len(row.runs) > number:
                continue
            if stop_after is not None and time.monotonic() - begin > 60 * stop_after:
                console.print(f"stopped after {stop_after:g} minutes, as asked")
                return
            at = time.monotonic()
            try:
                result = measure(session, rung, folder / rung.slug)
                row.add(result, ranks=session.ranks)
                ladder.tokens_a_step = result["tokens_a_step"]
            except RungFailedError as error:
                row.fail(str(error))
            save()
            console.print(
                f"round {number + 1}  {rung.label}: {table.outcome(row)}"
                f"  ({time.monotonic() - at:.0f} s)",
                markup=False,
                highlight=False,
            )


def _new_file(config: str) -> Path:
    start = datetime.now().strftime("%Y%m%d-%H%M%S")
    return outputs_dir() / "ladder" / f"{config}-{start}" / "ladder.json"


def _conclude(
    ladder: Ladder, wanted: Sequence[Rung], path: Path, record: bool, console: Console
) -> bool:
    rows = [ladder.row(rung) for rung in wanted]
    if not any(row.runs for row in rows):
        raise UserError(
            f"no rung ran; the first one says: {rows[0].reason or 'nothing yet'}", exit_code=1
        )
    if not ladder.complete:
        console.print(
            f"not complete; go on with the same command and --resume {path}", soft_wrap=True
        )
    elif record:
        for kept in keep(ladder, wanted, path.parent / TRACES, EVIDENCE):
            console.print(f"evidence: {kept.relative_to(REPO)}", soft_wrap=True)
    bad = [row for row in rows if row.numbers == numbers.DIFFER]
    for row in bad:
        console.print(
            f"DIFFER: {row.label} against {row.compared_with}, though equal numbers were promised: "
            f"{row.difference}",
            style="red",
            markup=False,
            soft_wrap=True,
        )
    return not bad
