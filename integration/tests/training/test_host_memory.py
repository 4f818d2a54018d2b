"""A job that the host cannot hold says so on start, before its weights exist."""

import pytest

pytestmark = pytest.mark.timeout(600)

MIB = 2**20


def test_a_limit_below_what_the_job_takes_stops_it_in_one_sentence(trainer, tmp_path):
    """The machine has plenty; the cgroup, as a scheduler makes one for a job, has not."""
    root = tmp_path / "host"
    files = {
        "proc/meminfo": "MemTotal: 99999999 kB\nMemFree: 88888888 kB\nMemAvailable: 88888888 kB\n",
        "proc/self/cgroup": "0::/job_7\n",
        "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        "sys/fs/cgroup/job_7/memory.max": f"{128 * MIB}\n",
        "sys/fs/cgroup/job_7/memory.current": f"{28 * MIB}\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)

    training = trainer.train(expected=1, INTEGRATION_HOST_ROOT=str(root))
    last = training.output.strip().splitlines()[-1]
    assert last.startswith("error: ")
    # Two ranks of half of 9,971,968 fp32 parameters: weights, gradients, one moment of those
    # under Muon (all but embedding, head, routers and norms) and two of the rest; and 0.25 GiB
    # each for the data loader.
    assert "HostMemoryError: 2 rank(s) of " in last
    assert "need 0.62 GiB of host memory, and cgroup v2 /job_7 leaves 0.10; a rank takes" in last
    assert "Traceback" not in training.output
    assert "step:" not in training.output
