"""From what the user asked to a finished run: overlay, data, folder, launch, table."""

import sys
from dataclasses import dataclass
from pathlib import Path

from integration.errors import UserError, nearest
from integration.job import data as job_data
from integration.job import launch, machine, summary
from integration.job.layout import CONFIGS
from integration.job.run import Job, Run
from integration.patchset import overlay, repository


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call of ``integration train``."""

    config: str
    resume: bool
    data: Path | None
    tokenizer: Path | None
    ranks: int | None
    port: int | None
    without: tuple[str, ...]
    options: tuple[str, ...]
    debug: bool


def train(request: Request) -> None:
    """Train, and return once the run came to its end.

    Raises:
        UserError: what the user can mend, or how the run ended before its last step.
    """
    if request.config not in CONFIGS:
        raise UserError(f"unknown config {request.config}{nearest(request.config, list(CONFIGS))}")
    port = machine.free_port(request.port)
    patched = overlay.build(contributions(request.without))
    gpus = machine.gpu_count()
    if gpus:
        machine.require_compiler()
        if request.ranks and request.ranks > gpus:
            raise UserError(f"--ranks {request.ranks} needs as many GPUs, and torch sees {gpus}")
    ranks = request.ranks or gpus or 2

    resumed = Run.latest(request.config) if request.resume else None
    job = _continued(request, resumed.job()) if resumed else _fresh(request)
    # Looked at before a folder is made: a mistake leaves no empty run behind.
    vocab = job_data.tokenizer_size(Path(job.tokenizer))
    job_data.Source.at(Path(job.data)).check()
    run = resumed or Run.new(request.config)
    run.write(Job(job.config, job.data, job.tokenizer, job.options, patched.names))
    run.remove_incomplete()
    run.forget_end()
    done = run.checkpoints()

    print(f"run: {run.folder} ({ranks} rank(s), {'GPU' if gpus else 'CPU'})", flush=True)
    line = launch.command(run, job, ranks=ranks, port=port, color=sys.stdout.isatty())
    env = launch.environment(patched, ranks=ranks, vocab=vocab, tokenizer=job.tokenizer)
    ended = launch.launch(
        run, line, env, show=launch.Show.EVERYTHING if request.debug else launch.Show.TITAN
    )
    failure = launch.explain(run, ended)
    if failure is None or run.end() is not None:
        summary.show(
            run,
            first_step=(done[-1] if done else 0) + 1,
            ranks=ranks,
            contributions=patched.names,
        )
    if failure is not None:
        raise failure


def contributions(without: tuple[str, ...]) -> list[str] | None:
    """Return the names of all contributions but those in ``without``; None for all of them.

    Raises:
        UserError: there is none of that name.
    """
    if not without:
        return None
    known = [c.name for c in repository.load()]
    for name in without:
        if name not in known:
            raise UserError(f"unknown contribution {name}{nearest(name, known)}")
    return [name for name in known if name not in without]


def _fresh(request: Request) -> Job:
    tokenizer, data = job_data.folders(request.tokenizer, request.data)
    return Job(request.config, str(data), str(tokenizer), request.options, ())


def _continued(request: Request, before: Job) -> Job:
    data = str(request.data.absolute()) if request.data else before.data
    tokenizer = str(request.tokenizer.absolute()) if request.tokenizer else before.tokenizer
    return Job(before.config, data, tokenizer, before.options + request.options, ())
