"""The text of a job script: one torchrun a node, one rank a GPU.

[Note: How a job stops and goes on]
Some time before the time limit, and at pre-emption, Slurm signals every process of the job's step.
Torchrun hands the signal to its ranks (one it does not handle would end it), and they agree on a
step, save and end (``JobTrainer``). The script then asks for a requeue, if the job still counts as
running: one that the user cancelled does not. A requeued job runs the same script, and TorchTitan
goes on from the newest checkpoint of the run's folder. A rank that dies takes the others of its
attempt along; torchrun starts all of them anew, from the same checkpoint, up to ``max_restarts``
times. A node that dies is replaced by a spare, if there is one: spares wait in the rendezvous. If
there is none, Slurm requeues the job.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from integration.ground.errors import UserError
from integration.jobs.cluster import WORD, Cluster, Variable, seconds
from integration.jobs.handover import END_FILE

SCRIPT_FILE = "job.sh"
# Seconds kept from what the ranks have to save, for torchrun and the script to end.
ENDING_SECONDS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """All that a job script says. ``text()`` is a function of these values alone.

    ``trainer`` is what follows torchrun's own options: the module and its arguments.

    Raises:
        UserError: no nodes, more ranks than GPUs, a value that a job script cannot hold.
    """

    config: str
    folder: Path  # of the run
    python: Path
    cluster: Cluster
    nodes: int
    ranks: int  # a node
    spares: int
    account: str
    time: str
    max_restarts: int
    trainer: tuple[str, ...]
    environment: tuple[Variable, ...]
    max_ctas: int | None  # the most SMs that one NCCL collective takes
    max_p2p_channels: int | None  # the most SMs that NCCL's send and receive take

    def __post_init__(self) -> None:
        _at_least("--nodes", self.nodes, 1, "a job script for no nodes starts nothing")
        _at_least("--ranks-per-node", self.ranks, 1, "a node without a rank does nothing")
        _at_least("--spares", self.spares, 0, "it counts nodes")
        _at_least("--max-restarts", self.max_restarts, 0, "0 ends the job with its first dead rank")
        for option, limit in (
            ("--nccl-max-ctas", self.max_ctas),
            ("--nccl-max-p2p-channels", self.max_p2p_channels),
        ):
            if limit is not None:
                _at_least(option, limit, 1, "leave it out for NCCL's own choice")
        self._check_ranks()
        self._check_time()
        if not WORD.fullmatch(self.account):
            raise UserError(
                f"--account must be letters, digits and _.:@+- only, got {self.account!r}"
            )
        for path in (self.folder, self.python):
            _check_path(path)

    def _check_ranks(self) -> None:
        cluster, slurm = self.cluster, self.cluster.slurm
        most, what = (
            (cluster.gpus_a_node, "GPUs") if cluster.gpus_a_node else (slurm.cores, "cores")
        )
        if self.ranks > most:
            raise UserError(
                f"--ranks-per-node {self.ranks} is more than the {most} {what} that a node of "
                f"{cluster.name} has, and each rank needs one of its own; give {most} or fewer"
            )

    def _check_time(self) -> None:
        slurm = self.cluster.slurm
        try:
            asked = seconds(self.time)
        except ValueError as error:
            raise UserError(f"--time: {error}") from None
        if asked > seconds(slurm.time_limit):
            raise UserError(
                f"--time {self.time} is more than {self.cluster.name} grants "
                f"({slurm.time_limit}); the job goes on by itself when its time is over"
            )
        if asked <= slurm.save_seconds:
            raise UserError(
                f"--time {self.time} must be longer than the {slurm.save_seconds} s kept at "
                "its end for a checkpoint (save_seconds of the cluster file)"
            )

    def text(self) -> str:
        return "\n".join([*self._head(), *self._environment(), *self._body()]) + "\n"

    def _head(self) -> Iterator[str]:
        cluster, slurm = self.cluster, self.cluster.slurm
        spares = f" and {self.spares} to spare" if self.spares else ""
        yield "#!/bin/bash"
        nodes = f"{self.nodes} node(s) of {cluster.name}{spares}"
        yield f"# {self.config}: {nodes}, {self.ranks} rank(s) each."
        yield "# Written by integration launch. Run again, it goes on from its newest checkpoint."
        directives = [
            (f"--job-name={self.config}", ""),
            (f"--partition={slurm.partition}", ""),
            (f"--account={self.account}", ""),
            (f"--nodes={self.nodes + self.spares}", ""),
            ("--ntasks-per-node=1", "torchrun, which starts the ranks"),
            (f"--cpus-per-task={slurm.cores}", "all of a node's"),
            ("--exclusive", "ranks wait for the slowest"),
            (f"--time={self.time}", ""),
            (f"--signal=USR1@{slurm.save_seconds}", "s before the time is over: save and stop"),
            ("--requeue", "after pre-emption and a failed node"),
            ("--open-mode=append", "a requeued job keeps its log"),
            (f'--output="{self.folder}/logs/slurm-%j.out"', ""),
        ]
        if cluster.gpus_a_node:
            gpu = cluster.hardware.gpu.name if cluster.hardware else ""
            directives.insert(6, (f"--gres=gpu:{cluster.gpus_a_node}", gpu))
        if slurm.large_from and self.nodes + self.spares >= slurm.large_from:
            directives.insert(3, (f"--qos={slurm.large_qos}", "the queue of large jobs"))
        if self.spares:
            directives.append(("--no-kill", "a failed node does not end the job: a spare joins"))
        directives += [(option, "") for option in slurm.options]
        for option, why in directives:
            yield f"#SBATCH {option:<30}  # {why}" if why else f"#SBATCH {option}"

    def _environment(self) -> Iterator[str]:
        yield ""
        yield "set -u"
        yield from _FORGOTTEN.splitlines()
        yield f"run={shlex.quote(str(self.folder))}"
        yield f"python={shlex.quote(str(self.python))}"
        if self.cluster.slurm.modules:
            yield f"module load {' '.join(self.cluster.slurm.modules)}"
        yield ""
        for variable in (
            *self._own_variables(),
            *self.cluster.slurm.environment,
            *self.environment,
        ):
            yield f"# {variable.why}"
            yield f"export {variable.name}={shlex.quote(variable.value)}"
        yield from _limit(
            "NCCL_MAX_CTAS",
            self.max_ctas,
            "most SMs of one collective: fewer leave more to the products beside it, and slow it",
        )
        yield from _limit(
            "NCCL_MAX_P2P_NCHANNELS",
            self.max_p2p_channels,
            "most SMs of send and receive, so of all-to-all, which NCCL_MAX_CTAS does not bound",
        )

    def _own_variables(self) -> Iterator[Variable]:
        cluster, slurm = self.cluster, self.cluster.slurm
        threads = max(1, slurm.cores // self.ranks)
        yield Variable(
            "OMP_NUM_THREADS",
            str(threads),
            f"{slurm.cores} cores over {self.ranks} rank(s), of which torchrun gives one each",
        )
        yield Variable(
            "GLOO_SOCKET_IFNAME", slurm.interface, "stops and checkpoints are agreed on over gloo"
        )
        yield Variable(
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
            "1",
            "a store for each restart: a shared one keeps dead ranks' addresses (pytorch#135712)",
        )
        if not cluster.gpus_a_node:
            return
        yield Variable(
            "NCCL_SOCKET_IFNAME",
            slurm.interface,
            "NCCL's ranks find each other on the fast network",
        )
        yield Variable(
            "PYTORCH_ALLOC_CONF",
            "expandable_segments:True",
            "an expert's tokens differ from step to step: blocks that grow do not fragment",
        )
        yield Variable(
            "CUDA_DEVICE_MAX_CONNECTIONS",
            "32",
            "a hardware queue for each stream: FSDP's, the all-to-all's and the offload's copies "
            "overlap",
        )

    def _body(self) -> Iterator[str]:
        slurm = self.cluster.slurm
        address = slurm.address.replace("{host}", "${host}")
        torchrun = [
            f"--nnodes={self.nodes}",
            f"--nproc-per-node={self.ranks}",
            f"--max-restarts={self.max_restarts}",
            "--rdzv-backend=c10d",
            "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
            f"--shutdown-timeout={slurm.save_seconds - ENDING_SECONDS}",
            "--redirects=3",
        ]
        if self.cluster.gpus_a_node:
            # By the PCI address of GPU number LOCAL_RANK, with numactl; torchrun stops without it.
            torchrun.append("--numa-binding=node")
        yield from f"""
# Nobody else may train in this folder. Its ranks hold it, and clear it of checkpoints cut off.
"$python" -m integration.ground.owner "$run" "Slurm job $SLURM_JOB_ID" || exit
rm -f "$run/{END_FILE}"  # how the last attempt ended

host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export endpoint="{address}:$((20000 + SLURM_JOB_ID % 10000))"
export attempt="$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}"
export run python

node() {{  # on each node: its address, its logs, and the rendezvous on the first
  local host=$SLURMD_NODENAME
  local logs="$run/logs/$attempt/node-$SLURM_NODEID" tee=()
  mkdir -p "$logs"
  ((SLURM_NODEID)) || tee=(--tee=0:3)  # its first rank also to the job's own log
  exec "$python" -m torch.distributed.run \\
    --rdzv-endpoint="$endpoint" --rdzv-id="$attempt" \\
    --rdzv-conf="is_host=$((SLURM_NODEID == 0))" --local-addr="{address}" \\
    --log-dir="$logs" "${{tee[@]}}" "$@"
}}
export -f node

trap : TERM USR1  # for the ranks; this shell waits for them
""".splitlines()
        # All that a step takes from the environment otherwise. torchrun binds the ranks, and ends
        # the node's when one dies; --export: the job may have been submitted with NONE.
        nodes = self.nodes + self.spares
        yield f"srun --export=ALL --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 \\"
        yield f"  --cpus-per-task={self.cluster.slurm.cores} --cpu-bind=none --mem-bind=none \\"
        yield f"  --wait=0 --kill-on-bad-exit=0{' --no-kill' if self.spares else ''} \\"
        yield "  bash -c 'node \"$@\"' node \\"
        yield from _continued([*torchrun, *self.trainer])
        yield from f"""code=$?

if [[ ! -e $run/{END_FILE} ]]; then
  echo "error: the job failed before its last step (exit code $code); logs: $run/logs/$attempt" >&2
  exit $((code ? code : 1))
fi
if grep -q '"stopped": true' "$run/{END_FILE}"; then
  state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)
  echo "stopped with a checkpoint; the job is $state"
  [[ $state != RUNNING ]] || scontrol requeue "$SLURM_JOB_ID"
fi""".splitlines()


# Slurm's commands and torchrun also take options from the environment of the shell that submitted
# the job: SLURM_CPU_BIND, SRUN_OUTPUT, SQUEUE_STATES, PET_NNODES. The names kept are those that
# sbatch sets itself for each job, and those that reach and authenticate with its controller.
_FORGOTTEN = """\
# Options in the environment that are not of this job: what it runs is what this script says.
for name in ${!SLURM_@} ${!SRUN_@} ${!SQUEUE_@} ${!SCONTROL_@} ${!PET_@}; do
  case $name in
    SLURM_JOB_* | SLURM_JOBID | SLURM_RESTART_COUNT | SLURM_SPANK_*) ;;
    SLURM_CONF | SLURM_WORKING_CLUSTER | SLURM_JWT | SLURM_SACK_*) ;;
    *) unset "$name" ;;
  esac
done
"""


def _continued(arguments: Sequence[str]) -> Iterator[str]:
    *first, last = (shlex.quote(argument) for argument in arguments)
    for argument in first:
        yield f"  {argument} \\"
    yield f"  {last}"


def _limit(name: str, value: int | None, why: str) -> Iterator[str]:
    yield f"# {why}"
    yield f"export {name}={value}" if value is not None else f"# export {name}=16  (off)"


def _at_least(option: str, value: int, least: int, why: str) -> None:
    if value < least:
        raise UserError(f"{option} must be at least {least}, got {value}: {why}")


def _check_path(path: Path) -> None:
    """sbatch replaces ``%`` in the name of the log and reads quotes and backslashes its own way."""
    if any(character in '%"\\$`' or not character.isprintable() for character in str(path)):
        raise UserError(
            f'a job script cannot hold the path {str(path)!r}: it has one of %"\\$` or a control '
            "character; move it (INTEGRATION_OUTPUTS names the folder of runs)"
        )
