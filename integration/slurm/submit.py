"""From ``integration launch`` to a job script in a run's folder, and to the queue."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from integration.data import source as job_data
from integration.ground.errors import UserError
from integration.ground.options import Config, Rest, Without
from integration.ground.paths import outputs_dir
from integration.jobs import catalog
from integration.jobs import cluster as clusters
from integration.jobs.cluster import Cluster, Variable
from integration.patchset import overlay, repository
from integration.plan import plan
from integration.plan.levers import Levers
from integration.slurm.script import SCRIPT_FILE, Script
from integration.train import launch, options
from integration.train.launch import Launch
from integration.train.run import Job, Run
from integration.train.start import own_layout

PLACEHOLDER = "ACCOUNT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Write a Slurm job script that trains CONFIG on a cluster.

    What follows `--` goes to TorchTitan.
    """

    config: Config
    cluster: str | None = None
    """A known cluster, or a file of your own (FILE.toml); the config's own if none is given."""
    nodes: int | None = None
    """The nodes that train; as many as CONFIG is written for if none is given, 1 for mini."""
    ranks_per_node: int | None = None
    """The processes of a node; one a GPU if none is given, or 1 where there is no GPU."""
    spares: int = 0
    """Further nodes, which wait for one to fail."""
    account: str | None = None
    """The account that pays; the cluster's if none is given."""
    time: str | None = None
    """The time limit, [DAYS-]HH:MM:SS; the most that the cluster grants if none is given."""
    max_restarts: int = 3
    """The restarts from the last checkpoint after a rank or a node has died."""
    nccl_max_ctas: int | None = None
    """The most SMs that one collective of NCCL takes; NCCL's choice if none is given."""
    nccl_max_p2p_channels: int | None = None
    """The same for all-to-all, which --nccl-max-ctas does not bound."""
    data: Path | None = None
    """A folder as for `integration train`, on a shared file system."""
    tokenizer: Path | None = None
    """A folder as for `integration train`, on a shared file system."""
    without: Without = ()
    dry: bool = False
    """Print the job script, and write nothing."""
    submit: bool = False
    """Hand the job script to sbatch."""
    options: Rest = ()

    def __post_init__(self) -> None:
        if self.dry and self.submit:
            raise UserError(
                "--dry only prints the job script and --submit runs it; give one of them"
            )

    def run(self) -> None:
        launch_job(self)


def launch_job(request: Request) -> None:
    """Print the job script, or write it into a new run's folder and, if asked, submit it.

    Raises:
        UserError: what the user can mend.
    """
    cluster = _check(request)
    # Said before anything is built: what is wrong with the numbers.
    draft = _script(request, cluster, Run(outputs_dir() / request.config / "RUN"), trainer=("",))
    names = repository.without(request.without)
    _check_fit(request, cluster, draft.nodes * draft.ranks, names)
    if request.submit:
        _require_sbatch(request.account or cluster.slurm.account)

    patched = overlay.build(names)
    tokenizer, dataset = job_data.folders(request.tokenizer, request.data)
    vocab = job_data.tokenizer_size(tokenizer)
    shape = catalog.find(request.config).shape
    if vocab > shape.vocab and not catalog.find(request.config).tokenizer_vocab:
        raise UserError(
            f"the tokenizer in {tokenizer} has {vocab} tokens and {request.config} a vocabulary of "
            f"{shape.vocab}; name a smaller one with --tokenizer"
        )
    job_data.Source.at(dataset).check()
    job = Job(request.config, str(dataset), str(tokenizer), request.options, patched.names)
    run = Run(outputs_dir() / request.config / "DRY-RUN")
    if request.options:
        # A login node has no GPU with FP8, which that config asks for; its options are the same.
        plain = replace(job, config=job.config.removesuffix("_fp8"))
        ranks = draft.nodes * draft.ranks
        options.accepted(Launch(run=run, job=plain, patched=patched, ranks=ranks, vocab=vocab))
    if not request.dry:
        run = Run.new(request.config)
    variables = launch.rank_variables(patched, job, vocab)
    script = _script(
        request,
        cluster,
        run,
        trainer=tuple(launch.trainer_arguments(run, job, color=False)),
        # One without a value, as of an overlay that is none, is as good as one that is not set.
        environment=tuple(Variable(*variable) for variable in variables if variable[1]),
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
        return
    forgotten = sorted(os.environ.keys() - _for_sbatch().keys())
    env = ["env", *(word for name in forgotten for word in ("-u", name))] if forgotten else []
    print(f"submit with: {shlex.join([*env, 'sbatch', str(path)])}")


def _check(request: Request) -> Cluster:
    job = catalog.find(request.config)
    missing = [f"--{name}" for name in ("data", "tokenizer") if getattr(request, name) is None]
    if missing and not job.tokenizer_vocab:
        raise UserError(
            f"expected --data and --tokenizer with {job.name}, got no {' and no '.join(missing)}; "
            "the defaults, the source text of the pins and its 4,096 tokens, are for small "
            "configs, and nothing was written: name folders on the cluster's file system"
        )
    cluster = clusters.load(request.cluster or job.cluster)
    if request.cluster is None and cluster.scheduler is None:
        able = ", ".join(name for name in clusters.known() if clusters.load(name).scheduler)
        raise UserError(
            f"expected --cluster with {job.name}, which is planned for {cluster.name}, where no "
            f"scheduler is known; nothing was written: name one of {able}, or a FILE.toml"
        )
    return cluster


def _for_sbatch() -> dict[str, str]:
    """Return the environment without what sbatch takes options from: the script has its own.

    SBATCH_TIMELIMIT, say, would replace the script's limit.
    """
    options = ("SLURM_CLUSTERS", "SLURM_EXIT_ERROR", "SLURM_HINT", "SLURM_UMASK")
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SBATCH_") and name not in options
    }


def _check_fit(request: Request, cluster: Cluster, ranks: int, names: Sequence[str] | None) -> None:
    """Refuse a job that cannot run; warn of one that does not fit by its plan.

    A plan may be wrong, and TorchTitan's options change sizes: what does not fit is only said. A
    layout of the user's own is TorchTitan's to judge. A cluster whose file says nothing of its
    hardware is not planned.
    """
    job = catalog.find(request.config).on(ranks)
    own = own_layout(request.options)
    if not own:
        job.check()
    if cluster.hardware is None:
        return
    plan.check(job, cluster)
    levers = Levers.of(names)
    if own or not (too_large := plan.make(job, cluster, levers).too_large):
        return
    named = cluster.name if cluster.known else cluster.file
    command = [f"integration plan {job.name} --cluster {named} --ranks {job.ranks}"]
    command += [f"--without {name}" for name in levers.off()]
    print(
        f"warning: {job.name} does not fit by its plan, which leaves TorchTitan's options out: "
        f"{', '.join(too_large)}; see: {' '.join(command)}",
        file=sys.stderr,
    )


def _script(
    request: Request,
    cluster: Cluster,
    run: Run,
    *,
    trainer: tuple[str, ...],
    environment: tuple[Variable, ...] = (),
) -> Script:
    ranks = cluster.gpus_a_node or 1 if request.ranks_per_node is None else request.ranks_per_node
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
        max_ctas=request.nccl_max_ctas,
        max_p2p_channels=request.nccl_max_p2p_channels,
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
    answer = subprocess.run(
        ["sbatch", "--parsable", str(path)], env=_for_sbatch(), capture_output=True, text=True
    )
    if answer.returncode:
        raise UserError(
            f"sbatch refused the job: {' '.join(answer.stderr.split())}; the script is {path}",
            exit_code=1,
        )
    job = answer.stdout.strip().split(";")[0]
    print(
        f"job: {job}; its log: {path.parent / 'logs' / f'slurm-{job}.out'}; end it: scancel {job}"
    )
