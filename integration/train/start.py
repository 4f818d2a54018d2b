"""From what the user asked to a finished run: overlay, data, folder, launch, table."""

import sys
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

from integration.data import source as job_data
from integration.ground import machine, owner
from integration.ground.errors import UserError
from integration.ground.options import Config, Experts, Layers, Rest, Without, at_least, debugging
from integration.ground.paths import outputs_dir
from integration.ground.terminal import say
from integration.jobs import catalog, checkpoints
from integration.jobs.spec import JobSpec
from integration.patchset import overlay, repository
from integration.train import launch, options, summary
from integration.train.launch import Launch
from integration.train.run import Job, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Train CONFIG under torchrun, on the full set of patches.

    What follows `--` goes to TorchTitan.
    """

    config: Config = "mini"
    resume: bool = False
    """Go on with the newest run of CONFIG that has a checkpoint."""
    data: Path | None = None
    """A folder of .jsonl, .txt or .parquet files, or a data set that was saved to disk."""
    tokenizer: Path | None = None
    """A folder with tokenizer.json and tokenizer_config.json."""
    ranks: int | None = None
    """The number of processes; one a GPU if none is given, or 2 on a CPU."""
    layers: Layers = None
    experts: Experts = None
    without: Without = ()
    options: Rest = ()

    def __post_init__(self) -> None:
        at_least(1, self, "ranks", "layers", "experts")

    def run(self) -> None:
        train(self)


def train(request: Request) -> None:
    """Train, and return once the run came to its end.

    Raises:
        UserError: what the user can mend, or how the run ended before its last step.
    """
    asked = catalog.find(request.config, layers=request.layers, experts=request.experts)
    with ExitStack() as held:
        run = Run.latest(request.config) if request.resume else None
        owned = held.enter_context(closing(owner.take(run.folder))) if run else None
        # What the user can mend is found before a folder is made or changed.
        prepared = _prepare(request, asked, run)
        if run is None or owned is None:
            run = Run.new(request.config)
            owned = held.enter_context(closing(owner.take(run.folder)))
        for sentence in checkpoints.set_damaged_aside(run.checkpoints_folder):
            say(f"warning: {sentence}", error=True)
        checkpoints.remove_cut_off(run.checkpoints_folder)
        run.write(prepared.job)
        run.forget_end()
        done = run.checkpoints()

        ranks = prepared.ranks
        say(f"run: {run.folder} ({ranks} rank(s))")
        ended = launch.launch(
            replace(prepared, run=run),
            show=launch.Show.EVERYTHING if debugging() else launch.Show.TITAN,
            shown_rank=asked.on(ranks).loss_rank,
            owned=owned,
        )
        failure = launch.explain(run, ended)
        if failure is None or run.end() is not None:
            first = (done[-1] if done else 0) + 1
            names = prepared.job.contributions
            summary.show(run, first_step=first, ranks=ranks, contributions=names)
    if failure is not None:
        raise failure


def _prepare(request: Request, asked: JobSpec, resumed: Run | None) -> Launch:
    """Return the start that was asked for, checked as far as it can be without ranks.

    Its run is the one that goes on, or stands for the one to be made.
    """
    before = resumed.job() if resumed else None
    names = repository.without(request.without)
    if before and not request.without:
        names = _as_before(before)
    gpus = machine.gpu_count()
    if gpus:
        machine.require_compiler()
    elif names is not None and CPU_CONTRIBUTION not in names:
        raise UserError(
            f"torch sees no GPU here, and training on a CPU needs {CPU_CONTRIBUTION}, which is "
            "left out; leave out others with --without"
        )
    patched = overlay.build(names)
    ranks = choose_ranks(asked, request.ranks, gpus)
    job = _continued(request, before) if before else _fresh(request)
    if not own_layout(job.options):
        asked.on(ranks).check()
    vocab = job_data.tokenizer_size(Path(job.tokenizer))
    if vocab > asked.shape.vocab and not asked.tokenizer_vocab:
        raise UserError(
            f"the tokenizer in {job.tokenizer} has {vocab} tokens and {asked.name} a vocabulary of "
            f"{asked.shape.vocab}; name a smaller one with --tokenizer"
        )
    job_data.Source.at(Path(job.data)).check()
    prepared = Launch(
        run=resumed or Run(outputs_dir() / request.config / "RUN"),
        job=replace(job, contributions=tuple(patched.names)),
        patched=patched,
        ranks=ranks,
        vocab=vocab,
        color=sys.stdout.isatty(),
    )
    if request.options:
        steps = options.accepted(prepared)["training.steps"]
        whole = checkpoints.newest_whole(resumed.checkpoints_folder) if resumed else None
        if resumed and whole is not None:
            options.refuse_shorter(steps, whole, resumed.checkpoint(whole))
    return prepared


# Without it TorchTitan asks for a driver that is not there.
CPU_CONTRIBUTION = "cpu_device"
# What one CPU machine runs without being told to by --ranks.
CPU_RANKS = 8


def choose_ranks(job: JobSpec, asked: int | None, gpus: int) -> int:
    """Return how many ranks to start: one a GPU, or on a CPU what the job needs, else 2.

    Raises:
        UserError: more ranks than GPUs, or a job for many machines on this one.
    """
    ranks = asked or ((gpus or 2) if job.any_ranks else job.ranks)
    if not asked and not gpus and ranks > CPU_RANKS:
        raise UserError(
            f"{job.name} is written for {ranks} ranks, one a GPU, and torch sees no GPU here; "
            f"see what it needs with: integration plan {job.name}"
        )
    if gpus and ranks > gpus:
        which = f"--ranks {ranks}" if asked else f"{job.name} is written for {ranks} ranks and"
        raise UserError(
            f"{which} needs as many GPUs, one a rank, and torch sees {gpus}; "
            f"see what it needs with: integration plan {job.name}"
        )
    if not gpus and ranks > (cores := machine.cores()):
        say(
            f"warning: {ranks} ranks share {cores} cores: the start and each step take at least "
            f"{ranks / cores:.3g} times as long as with a core for each rank, as --ranks {cores}",
            error=True,
        )
    return ranks


def own_layout(options: tuple[str, ...]) -> bool:
    """Return whether TorchTitan's options ask for another layout, which TorchTitan judges."""
    return any(option.startswith("--parallelism.") for option in options)


def _as_before(before: Job) -> tuple[str, ...]:
    """Return the names of the set that a run was trained on, and say what it leaves out.

    Contributions that have been dropped since are upstream's now, and so are not missing.
    """
    every = [c.name for c in repository.load()]
    names = tuple(name for name in every if name in before.contributions)
    if left_out := [name for name in every if name not in names]:
        print(
            f"left out, as in the run that goes on (--without names others): {', '.join(left_out)}",
            file=sys.stderr,
        )
    return names


def _fresh(request: Request) -> Job:
    tokenizer, data = job_data.folders(request.tokenizer, request.data)
    made = (request.config, str(data), str(tokenizer), request.options, ())
    return Job(*made, request.layers, request.experts)


def _continued(request: Request, before: Job) -> Job:
    for name in ("layers", "experts"):
        now, then = getattr(request, name), getattr(before, name)
        if now is not None and now != then:
            raise UserError(
                f"--resume goes on with a run of {then or 'the default number of'} {name}, and "
                f"--{name} {now} makes another model; leave it out, or start anew without --resume"
            )
    folders = (
        (request.tokenizer or Path(before.tokenizer)).absolute(),
        (request.data or Path(before.data)).absolute(),
    )
    if any(not f.exists() and f.parent.name.startswith("pins-") for f in folders):
        # The default data, of these pins or others; that of these can always be built again.
        default = {f.parts[-2:]: f for f in job_data.default_folders()}
        folders = tuple(default.get(f.parts[-2:], f) for f in folders)
    return replace(
        before,
        tokenizer=str(folders[0]),
        data=str(folders[1]),
        options=options.merged(before.options, request.options),
    )
