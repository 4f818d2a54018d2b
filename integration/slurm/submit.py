"""From ``integration launch`` to a job script in a run's folder, and to the queue."""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from integration.data import source as job_data
from integration.ground.errors import UserError, nearest
from integration.ground.paths import outputs_dir
from integration.jobs import catalog
from integration.jobs import cluster as clusters
from integration.jobs.cluster import Cluster, Variable
from integration.patchset import overlay
from integration.slurm import fit
from integration.slurm.script import SCRIPT_FILE, Script
from integration.train import launch
from integration.train.run import Job, Run
from integration.train.start import contributions, own_layout

SCHEDULERS = ("slurm",)
PLACEHOLDER = "ACCOUNT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call of ``integration launch``. None stands for the cluster's own value."""

    config: str
    scheduler: str
    cluster: str
    nodes: int | None  # None: as many as the job is written for
    ranks: int | None
    spares: int
    account: str | None
    time: str | None
    max_restarts: int
    max_ctas: int | None
    max_p2p_channels: int | None
    data: Path | None
    tokenizer: Path | None
    without: tuple[str, ...]
    options: tuple[str, ...]
    dry: bool
    submit: bool


def launch_job(request: Request) -> None:
    """Print the job script, or write it into a new run's folder and, if asked, submit it.

    Raises:
        UserError: what the user can mend.
    """
    cluster = _check(request)
    # Said before anything is built: what is wrong with the numbers.
    draft = _script(request, cluster, Run(outputs_dir() / request.config / "RUN"), trainer=("",))
    names = contributions(request.without)
    _check_fit(request, cluster, draft.nodes * draft.ranks, names)
    if request.submit:
        _require_sbatch(request.account or cluster.slurm.account)

    patched = overlay.build(names)
    tokenizer, dataset = job_data.folders(request.tokenizer, request.data)
    vocab = job_data.tokenizer_size(tokenizer)
    job_data.Source.at(dataset).check()
    job = Job(request.config, str(dataset), str(tokenizer), request.options, patched.names)
    if request.dry:
        run = Run(outputs_dir() / request.config / "DRY-RUN")
    else:
        run = Run.new(request.config)
    variables = launch.rank_variables(patched, vocab=vocab, tokenizer=job.tokenizer)
    script = _script(
        request,
        cluster,
        run,
        trainer=tuple(launch.trainer_arguments(run, job, color=False)),
        environment=tuple(Variable(*variable) for variable in variables),
    )
    if request.dry:
        print(script.text(), end="")
        return
    run.write(job)
    (run.folder / "logs").mkdir()  # Slurm opens its log before the script runs
    path = run.folder / SCRIPT_FILE
    path.write_text(script.text())
    print(f"run: {run.folder}", flush=True)
    if request.submit:
        _submit(path)
    else:
        print(f"submit with: sbatch {path}")


def _check(request: Request) -> Cluster:
    catalog.find(request.config)
    if request.scheduler not in SCHEDULERS:
        raise UserError(
            f"unknown scheduler {request.scheduler}{nearest(request.scheduler, list(SCHEDULERS))}"
        )
    if request.dry and request.submit:
        raise UserError("--dry only prints the job script and --submit runs it; give one of them")
    return clusters.load(request.cluster)


def _check_fit(request: Request, cluster: Cluster, ranks: int, names: list[str] | None) -> None:
    doubt = fit.check(
        catalog.find(request.config).on(ranks),
        cluster,
        names=names,
        own_layout=own_layout(request.options),
    )
    if doubt:
        print(f"warning: {doubt}", file=sys.stderr)


def _script(
    request: Request,
    cluster: Cluster,
    run: Run,
    *,
    trainer: tuple[str, ...],
    environment: tuple[Variable, ...] = (),
) -> Script:
    ranks = cluster.gpus_a_node or 1 if request.ranks is None else request.ranks
    job = catalog.find(request.config)
    nodes = request.nodes
    if nodes is None:
        nodes = 1 if job.any_ranks or ranks < 1 else -(-job.ranks // ranks)
    return Script(
        config=request.config,
        folder=run.folder,
        python=Path(sys.executable),
        cluster=cluster,
        nodes=nodes,
        ranks=ranks,
        spares=request.spares,
        account=request.account or cluster.slurm.account,
        time=request.time or cluster.slurm.time_limit,
        max_restarts=request.max_restarts,
        trainer=trainer,
        environment=environment,
        max_ctas=request.max_ctas,
        max_p2p_channels=request.max_p2p_channels,
    )


def _require_sbatch(account: str) -> None:
    if account == PLACEHOLDER:
        raise UserError("--submit needs the account that pays for the job: --account NAME")
    if shutil.which("sbatch") is None:
        raise UserError(
            "--submit needs sbatch, and it is not on the PATH; submit on a login node of the "
            "cluster, or leave --submit out to write the job script only"
        )


def _submit(path: Path) -> None:
    answer = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True)
    if answer.returncode:
        raise UserError(
            f"sbatch refused the job: {' '.join(answer.stderr.split())}; the script is {path}",
            exit_code=1,
        )
    job = answer.stdout.strip().split(";")[0]
    print(
        f"job: {job}; its log: {path.parent / 'logs' / f'slurm-{job}.out'}; end it: scancel {job}"
    )
