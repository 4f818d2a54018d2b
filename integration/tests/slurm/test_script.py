"""Job scripts: their text, what bash makes of them, and what they do with how a run ended.

``run`` executes a script with stand-ins for Slurm's commands and for Python, in milliseconds; a
real Slurm runs one in ``tests/slurm/test_cluster_run.py``.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import expecttest
import pytest

from integration.ground import owner
from integration.ground.errors import UserError
from integration.ground.paths import REPO
from integration.jobs import cluster
from integration.jobs.cluster import Variable
from integration.slurm.script import Script

HOSTILE = [
    "two words",
    "it's",
    'say "hi"',
    "$(touch pwned)",
    "`touch pwned`",
    "a;touch pwned",
    "back\\slash",
    "line\nbreak",
    "*",
    "-n",
    "${HOME}",
]


def script(name: str = "jupiter", **changes) -> Script:
    known = cluster.load(name)
    values: dict = {
        "config": "mini",
        "folder": Path("/scratch/outputs/mini/20261129-120000"),
        "python": Path("/project/.venv/bin/python"),
        "cluster": known,
        "nodes": 96,
        "ranks": 4,
        "spares": 0,
        "account": "training2640",
        "time": known.slurm.time_limit,
        "max_restarts": 3,
        "trainer": ("-m", "torchtitan.train", "--config=mini"),
        "environment": (Variable("PYTHONPATH", "/cache/overlay:/project", "the patches first"),),
        "max_ctas": None,
        "max_p2p_channels": None,
    }
    return Script(**{**values, **changes})


def without_gpus(**changes) -> cluster.Cluster:
    leonardo = cluster.load("leonardo")
    scheduler = replace(leonardo.slurm, **changes)
    return replace(leonardo, gpus_a_node=0, hardware=None, scheduler=scheduler)


class TestText(expecttest.TestCase):
    """Snapshots: EXPECTTEST_ACCEPT=1 writes them anew."""

    maxDiff = None

    def test_jupiter(self):
        self.assertExpectedInline(
            script().text(),
            """\
#!/bin/bash
# mini: 96 node(s) of jupiter, 4 rank(s) each.
# Written by integration launch. Run again, it goes on from its newest checkpoint.
#SBATCH --job-name=mini
#SBATCH --partition=booster
#SBATCH --account=training2640
#SBATCH --nodes=96
#SBATCH --ntasks-per-node=1             # torchrun, which starts the ranks
#SBATCH --cpus-per-task=288             # all of a node's
#SBATCH --gres=gpu:4                    # GH200
#SBATCH --exclusive                     # ranks wait for the slowest
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@600               # s before the time is over: save and stop
#SBATCH --requeue                       # after pre-emption and a failed node
#SBATCH --open-mode=append              # a requeued job keeps its log
#SBATCH --output="/scratch/outputs/mini/20261129-120000/logs/slurm-%j.out"

set -u
# Options in the environment that are not of this job: what it runs is what this script says.
for name in ${!SLURM_@} ${!SRUN_@} ${!SQUEUE_@} ${!SCONTROL_@} ${!PET_@}; do
  case $name in
    SLURM_JOB_* | SLURM_JOBID | SLURM_RESTART_COUNT | SLURM_SPANK_*) ;;
    SLURM_CONF | SLURM_WORKING_CLUSTER | SLURM_JWT | SLURM_SACK_*) ;;
    *) unset "$name" ;;
  esac
done
run=/scratch/outputs/mini/20261129-120000
python=/project/.venv/bin/python
module load GCC Python

# 288 cores over 4 rank(s), of which torchrun gives one each
export OMP_NUM_THREADS=72
# stops and checkpoints are agreed on over gloo
export GLOO_SOCKET_IFNAME=ib0
# a store for each restart: a shared one keeps dead ranks' addresses (pytorch#135712)
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# NCCL's ranks find each other on the fast network
export NCCL_SOCKET_IFNAME=ib0
# an expert's tokens differ from step to step: blocks that grow do not fragment
export PYTORCH_ALLOC_CONF=expandable_segments:True
# a hardware queue for each stream: FSDP's, the all-to-all's and the offload's copies overlap
export CUDA_DEVICE_MAX_CONNECTIONS=32
# the longest there is, 4.096 us x 2^22 = 17 s a try: a busy or re-routed link is waited out
export NCCL_IB_TIMEOUT=22
# the patches first
export PYTHONPATH=/cache/overlay:/project
# most SMs of one collective: fewer leave more to the products beside it, and slow it
# export NCCL_MAX_CTAS=16  (off)
# most SMs of send and receive, so of all-to-all, which NCCL_MAX_CTAS does not bound
# export NCCL_MAX_P2P_NCHANNELS=16  (off)

# Nobody else may train in this folder. Its ranks hold it, and clear it of checkpoints cut off.
"$python" -m integration.ground.owner "$run" "Slurm job $SLURM_JOB_ID" || exit
rm -f "$run/end.json"  # how the last attempt ended

host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export endpoint="${host}i:$((20000 + SLURM_JOB_ID % 10000))"
export attempt="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
export run python

node() {  # on each node: its address, its logs, and the rendezvous on the first
  local host=$SLURMD_NODENAME
  local logs="$run/logs/$attempt/node-$SLURM_NODEID" tee=()
  mkdir -p "$logs"
  ((SLURM_NODEID)) || tee=(--tee=0:3)  # its first rank also to the job's own log
  exec "$python" -m torch.distributed.run \\
    --rdzv-endpoint="$endpoint" --rdzv-id="$attempt" \\
    --rdzv-conf="is_host=$((SLURM_NODEID == 0))" --local-addr="${host}i" \\
    --log-dir="$logs" "${tee[@]}" "$@"
}
export -f node

trap : TERM USR1  # for the ranks; this shell waits for them
srun --export=ALL --nodes=96 --ntasks=96 --ntasks-per-node=1 \\
  --cpus-per-task=288 --cpu-bind=none --mem-bind=none \\
  --wait=0 --kill-on-bad-exit=0 \\
  bash -c 'node "$@"' node \\
  --nnodes=96 \\
  --nproc-per-node=4 \\
  --max-restarts=3 \\
  --rdzv-backend=c10d \\
  --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \\
  --shutdown-timeout=570 \\
  --redirects=3 \\
  --numa-binding=node \\
  -m \\
  torchtitan.train \\
  --config=mini
code=$?

if [[ ! -e $run/end.json ]]; then
  echo "error: the job failed before its last step (exit code $code); logs: $run/logs/$attempt" >&2
  exit $((code ? code : 1))
fi
if grep -q '"stopped": true' "$run/end.json"; then
  state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)
  echo "stopped with a checkpoint; the job is $state"
  [[ $state != RUNNING ]] || scontrol requeue "$SLURM_JOB_ID"
fi
""",
        )

    def test_leonardo_head(self):
        text = script("leonardo", nodes=128, spares=2, time="12:00:00").text()
        self.assertExpectedInline(
            text[: text.index("set -u")],
            """\
#!/bin/bash
# mini: 128 node(s) of leonardo and 2 to spare, 4 rank(s) each.
# Written by integration launch. Run again, it goes on from its newest checkpoint.
#SBATCH --job-name=mini
#SBATCH --partition=boost_usr_prod
#SBATCH --account=training2640
#SBATCH --qos=boost_qos_bprod           # the queue of large jobs
#SBATCH --nodes=130
#SBATCH --ntasks-per-node=1             # torchrun, which starts the ranks
#SBATCH --cpus-per-task=32              # all of a node's
#SBATCH --gres=gpu:4                    # A100 64GB
#SBATCH --exclusive                     # ranks wait for the slowest
#SBATCH --time=12:00:00
#SBATCH --signal=USR1@600               # s before the time is over: save and stop
#SBATCH --requeue                       # after pre-emption and a failed node
#SBATCH --open-mode=append              # a requeued job keeps its log
#SBATCH --output="/scratch/outputs/mini/20261129-120000/logs/slurm-%j.out"
#SBATCH --no-kill                       # a failed node does not end the job: a spare joins
#SBATCH --mem=0

""",
        )

    def test_sm_limits(self):
        text = script(max_ctas=16, max_p2p_channels=8).text()
        lines = [line for line in text.splitlines() if "NCCL_MAX" in line]
        self.assertExpectedInline(
            "\n".join(lines),
            """\
export NCCL_MAX_CTAS=16
# most SMs of send and receive, so of all-to-all, which NCCL_MAX_CTAS does not bound
export NCCL_MAX_P2P_NCHANNELS=8""",
        )


@pytest.mark.parametrize("name", ["jupiter", "leonardo"])
@pytest.mark.parametrize("spares", [0, 1])
def test_bash_parses_it(name, spares):
    text = script(name, spares=spares, trainer=("-m", *HOSTILE)).text()
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.fixture
def run(tmp_path):
    """Run a script of a node without GPUs; return the process, and what Slurm and Python saw."""
    commands = tmp_path / "bin"
    commands.mkdir()
    seen = tmp_path / "seen"
    python = commands / "python"

    def write(path: Path, text: str) -> None:
        path.write_text("#!/bin/bash\n" + text)
        path.chmod(0o755)

    write(
        commands / "scontrol",
        f'if [[ $1 = show ]]; then printf "n%d\\n" 1 2; else echo "$*" >> {seen}; fi\n',
    )
    write(commands / "squeue", 'echo "$STATE"\n')
    write(
        commands / "srun",
        f'echo "$*" > {tmp_path}/step\n'
        "while [[ $1 = --* ]]; do shift; done\n"
        'SLURM_NODEID=${NODE:-0} SLURMD_NODENAME=n1 exec "$@"\n',
    )

    def execute(
        *, ends: dict | None, code: int = 0, state: str = "RUNNING", node=0, env=None, **changes
    ):
        folder = changes.pop("folder", tmp_path / "run")
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        end = f"echo '{json.dumps(ends)}' > '{folder}/end.json'" if ends is not None else ""
        argv = tmp_path / "argv.json"
        write(
            python,
            # The owner's module as it is, torchrun as a stand-in.
            f'[[ $2 = torch.* ]] || PYTHONPATH={REPO} exec {sys.executable} "$@"\n'
            f"/usr/bin/env python3 -c 'import json, os, sys; "
            f'json.dump([sys.argv[1:], dict(os.environ)], open("{argv}", "w"))\' "$@"\n'
            f"{end}\nexit {code}\n",
        )
        local = without_gpus(modules=(), address="127.0.0.1")
        text = script(
            cluster=local, nodes=2, ranks=2, folder=folder, python=python, **changes
        ).text()
        done = subprocess.run(
            ["bash"],
            input=text,
            text=True,
            capture_output=True,
            cwd=tmp_path,
            env={
                "PATH": f"{commands}:{os.environ['PATH']}",
                "SLURM_JOB_ID": "71",
                "SLURM_JOB_NODELIST": "n[1-2]",
                "STATE": state,
                "NODE": str(node),
                **(env or {}),
            },
        )
        arguments, environment = json.loads(argv.read_text())
        return done, arguments, environment, seen.read_text() if seen.exists() else ""

    return execute


ENDED = {"step": 60, "stopped": False}
STOPPED = {"step": 31, "stopped": True}


def test_torchrun_gets_the_rendezvous_and_every_argument_untouched(run, tmp_path):
    done, arguments, environment, _ = run(
        ends=ENDED,
        trainer=("-m", "torchtitan.train", *HOSTILE),
        environment=tuple(
            Variable(f"HOSTILE_{i}", value, "a test")
            for i, value in enumerate(HOSTILE)
            if "\n" not in value
        ),
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert arguments[:6] == [
        "-m",
        "torch.distributed.run",
        "--rdzv-endpoint=127.0.0.1:20071",
        "--rdzv-id=71-0",
        "--rdzv-conf=is_host=1",
        "--local-addr=127.0.0.1",
    ]
    assert "--nnodes=2" in arguments
    assert "--nproc-per-node=2" in arguments
    assert not any(argument.startswith("--numa-binding") for argument in arguments)  # no GPU
    assert arguments[-len(HOSTILE) :] == HOSTILE
    hostile = [value for value in HOSTILE if "\n" not in value]
    kept = {int(k[8:]): v for k, v in environment.items() if k.startswith("HOSTILE_")}
    assert [kept[i] for i in sorted(kept)] == hostile
    assert environment["OMP_NUM_THREADS"] == "16"
    assert not (tmp_path / "pwned").exists()


def test_the_environment_of_the_submitting_shell_gives_no_options(run, tmp_path):
    """Each of these changes what srun, squeue or torchrun do, where their options do not say it."""
    options = [
        "SLURM_EXPORT_ENV",
        "SLURM_CPU_BIND",
        "SLURM_MEM_BIND",
        "SLURM_NTASKS",
        "SLURM_TIMELIMIT",
        "SLURM_HINT",
        "SLURM_STDOUTMODE",
        "SLURM_TASK_PROLOG",
        "SRUN_CPUS_PER_TASK",
        "SRUN_EXPORT_ENV",
        "SRUN_OUTPUT",
        "SQUEUE_STATES",
        "SCONTROL_ALL",
        "PET_NNODES",
        "PET_NODE_RANK",
    ]
    kept = {"SLURM_CONF": "/etc/a b", "SLURM_JOB_NAME": "mini", "SLURM_RESTART_COUNT": "2"}
    done, arguments, environment, _ = run(ends=ENDED, env=kept | dict.fromkeys(options, "NONE"))
    assert done.returncode == 0, done.stderr
    assert not set(options) & set(environment)
    assert kept.items() <= environment.items()
    assert "--rdzv-id=71-2" in arguments
    step = (tmp_path / "step").read_text()
    assert step.startswith("--export=ALL --nodes=2 --ntasks=2 --ntasks-per-node=1 ")


def test_only_the_first_node_hosts_the_rendezvous_and_shows_its_log(run):
    _, first, _, _ = run(ends=ENDED)
    _, second, _, _ = run(ends=ENDED, node=1)
    assert "--tee=0:3" in first
    assert "--tee=0:3" not in second
    assert "--rdzv-conf=is_host=0" in second
    assert any(argument.endswith("logs/71-0/node-1") for argument in second)


@pytest.mark.parametrize(
    ("ends", "code", "state", "expected", "requeued"),
    [
        (ENDED, 0, "RUNNING", 0, False),
        (STOPPED, 1, "RUNNING", 0, True),  # torchrun fails when a signal ends it
        (STOPPED, 1, "COMPLETING", 0, False),  # the user cancelled the job
        (None, 7, "RUNNING", 7, False),  # a bug would fail for ever
        (None, 0, "RUNNING", 1, False),  # no last step, whatever torchrun says
    ],
)
def test_a_stopped_job_is_requeued_and_no_other(run, ends, code, state, expected, requeued):
    done, _, _, seen = run(ends=ends, code=code, state=state)
    assert done.returncode == expected, done.stderr
    assert (seen == "requeue 71\n") is requeued
    assert ("the job failed before its last step" in done.stderr) is (ends is None)


def test_a_restart_forgets_the_last_end_and_leaves_checkpoints_to_the_ranks(run, tmp_path):
    folder = tmp_path / "a run"
    (folder / "checkpoint/step-20").mkdir(parents=True)  # cut off
    (folder / "end.json").write_text(json.dumps(STOPPED))
    done, _, _, _ = run(ends=None, code=3, folder=folder)
    assert done.returncode == 3  # not the last attempt's stop
    assert (folder / "checkpoint/step-20").is_dir()


def test_a_folder_has_one_job_at_a_time_and_a_requeued_one_goes_on(run, tmp_path):
    folder = tmp_path / "a run"
    done, _, _, _ = run(ends=ENDED, folder=folder)
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / owner.FILE).read_text())["name"] == "Slurm job 71"
    again, arguments, _, _ = run(ends=ENDED, folder=folder, env={"SLURM_RESTART_COUNT": "1"})
    assert again.returncode == 0, again.stderr
    assert "--rdzv-id=71-1" in arguments
    other, arguments, _, _ = run(ends=STOPPED, folder=folder, env={"SLURM_JOB_ID": "72"})
    assert other.returncode == 1
    assert f"{folder} is in use by Slurm job 71 on " in other.stderr
    assert "--rdzv-id=71-1" in arguments  # torchrun was not started
    assert json.loads((folder / "end.json").read_text()) == ENDED


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"nodes": 0}, r"--nodes must be at least 1, got 0: a job script for no nodes"),
        ({"nodes": -2}, r"--nodes must be at least 1, got -2"),
        ({"spares": -1}, r"--spares must be at least 0, got -1"),
        ({"ranks": 0}, r"--ranks-per-node must be at least 1, got 0"),
        ({"ranks": 5}, r"--ranks-per-node 5 is more than the 4 GPUs that a node of jupiter has"),
        ({"max_restarts": -1}, r"--max-restarts must be at least 0"),
        ({"max_ctas": 0}, r"--nccl-max-ctas must be at least 1"),
        ({"max_p2p_channels": 0}, r"--nccl-max-p2p-channels must be at least 1"),
        ({"time": "25:00:00"}, r"--time 25:00:00 is more than jupiter grants"),
        ({"time": "0:05:00"}, r"--time 0:05:00 must be longer than the 600 s"),
        ({"time": "soon"}, r"--time: a time must be \[DAYS-\]HH:MM:SS, got 'soon'"),
        *(
            ({"account": value}, r"--account must be letters, digits")
            for value in [*HOSTILE, "", "x\n#SBATCH --wrap=id"]
        ),
        *(
            ({"folder": Path("/scratch") / value}, r"a job script cannot hold the path")
            for value in ("100%", 'a"b', "a\nb", "$(id)", "`id`", "a\\b")
        ),
    ],
)
def test_bad_input_is_one_sentence(changes, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        script(**changes)
    assert "\n" not in str(caught.value)


def test_ranks_need_a_core_where_there_is_no_gpu():
    bare = without_gpus()
    with pytest.raises(UserError, match=r"--ranks-per-node 33 is more than the 32 cores"):
        script(cluster=bare, ranks=33)
