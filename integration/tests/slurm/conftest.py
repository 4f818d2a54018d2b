"""A Slurm of two nodes on this machine: munged, slurmctld and two slurmd, as this user.

Nothing of the machine's own Slurm is read or written: all is in a temporary folder, on free ports
of 127.0.0.1. Only processes that were started here are ended.
"""

import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

DAEMONS = ("munged", "slurmctld", "slurmd")
CLIENTS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
# Daemons are in folders that only root has on its PATH.
PATH = f"{os.environ['PATH']}:/usr/local/sbin:/usr/sbin:/sbin"
MISSING = [name for name in (*DAEMONS, *CLIENTS) if shutil.which(name, path=PATH) is None]

# No cgroups, no systemd, no database: a container's root can run it, and so can a user.
CONF = """\
ClusterName=gate
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# A requeued job waits until no node can hold a credential of its last run: 2 minutes by default.
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=10
NodeName=gate[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]},{ports[2]} CPUs=1
PartitionName=gate Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

# As job scripts see it: gate1 and gate2 are no host names.
CLUSTER = """\
name = "gate"
gpus_a_node = 0

[slurm]
partition = "gate"
account = "nobody"
cores = 1
time_limit = "1:00:00"
interface = "lo"
address = "127.0.0.1"
save_seconds = 120
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class Slurm:
    """A running Slurm, and the cluster file that describes it."""

    folder: Path
    daemons: list[subprocess.Popen] = field(default_factory=list)

    @property
    def cluster(self) -> Path:
        return self.folder / "gate.toml"

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PATH": PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def ask(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    def start(self, *command: str) -> None:
        name = f"{Path(command[0]).name}-{len(self.daemons)}"
        with open(self.folder / f"{name}.out", "w") as output:
            self.daemons.append(
                subprocess.Popen(
                    command,
                    env=self.environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                )
            )

    def job(self, number: str) -> dict[str, str]:
        """Return ``scontrol show job`` as a mapping."""
        words = self.ask("scontrol", "show", "job", "--oneliner", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def logs(self) -> str:
        files = [*self.folder.glob("*.out"), *self.folder.glob("*.log")]
        return "\n".join(f"== {f.name}\n{f.read_text()[-3000:]}" for f in sorted(files))

    def stop(self) -> None:
        try:
            for job in self.ask("squeue", "--noheader", "--format=%A").split():
                self.ask("scancel", job)
            _until(lambda: not self.ask("squeue", "--noheader"), "the queue is empty", self, 40)
        finally:
            for daemon in reversed(self.daemons):
                daemon.terminate()
            for daemon in self.daemons:
                try:
                    daemon.wait(20)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()


def _until(what, name: str, slurm: Slurm, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not what():
        dead = [daemon.args for daemon in slurm.daemons if daemon.poll() is not None]
        assert not dead, f"{dead} ended\n{slurm.logs()}"
        assert time.monotonic() < end, f"not in {seconds:.0f} s: {name}\n{slurm.logs()}"
        time.sleep(0.2)


@pytest.fixture
def slurm():
    if MISSING:
        pytest.skip(f"Slurm is not installed ({', '.join(MISSING)} missing); ci/slurm installs it")
    # Not tmp_path: a socket's path has at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    made = Slurm(folder)
    try:
        _configure(folder)
        munge = folder / "munge"
        made.start(
            "munged",
            "--foreground",
            f"--key-file={munge / 'key'}",
            f"--socket={munge / 'socket'}",
            f"--pid-file={munge / 'pid'}",
            f"--log-file={munge / 'log'}",
            f"--seed-file={munge / 'seed'}",
        )
        _until((munge / "socket").exists, "munged listens", made, 30)
        made.start("slurmctld", "-D")
        for node in ("gate1", "gate2"):
            made.start("slurmd", "-D", "-N", node)
        states = ("sinfo", "--noheader", "--Node", "--format=%T")
        _until(lambda: _nodes(made, *states) == ["idle", "idle"], "two idle nodes", made, 60)
        yield made
    finally:
        try:
            made.stop()
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _nodes(slurm: Slurm, *command: str) -> list[str]:
    """Slurmctld does not answer before it has read its state."""
    done = subprocess.run(command, env=slurm.environment, capture_output=True, text=True)
    return done.stdout.split()


def _configure(folder: Path) -> None:
    # munged wants folders that no one else writes to, and a socket that all may reach.
    folder.chmod(0o755)
    for name in ("munge", "state", "spool-gate1", "spool-gate2"):
        (folder / name).mkdir(mode=0o755)
    key = folder / "munge/key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    ports: list[int] = []
    while len(ports) < 3:
        port = _free_port()
        if port not in ports:
            ports.append(port)
    conf = CONF.format(
        host=socket.gethostname(), user=getpass.getuser(), folder=folder, ports=ports
    )
    (folder / "slurm.conf").write_text(conf)
    (folder / "gate.toml").write_text(CLUSTER)
