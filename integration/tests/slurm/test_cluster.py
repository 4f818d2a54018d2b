"""Cluster files: the known ones load, and a bad one is one sentence that names what is wrong."""

import pytest

from integration.ground.errors import UserError
from integration.slurm import cluster

GOOD = """
name = "mine"
partition = "gpu"
account = "me"
gpu = "H200"
gpus = 8
cores = 96
time_limit = "2-00:00:00"
interface = "ib0"
"""


@pytest.mark.parametrize("name", ["jupiter", "leonardo"])
def test_known_clusters_load(name):
    assert cluster.load(name).name == name


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "my cluster.toml"
    path.write_text(GOOD + '[environment.NCCL_DEBUG]\nvalue = "WARN"\nwhy = "to see"\n')
    mine = cluster.load(str(path))
    assert mine.gpus == 8
    assert mine.environment == (cluster.Variable("NCCL_DEBUG", "WARN", "to see"),)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("gpus = 8\n", "", "gpus is missing"),
        ("gpus = 8", "gpus = -8", "gpus must be an integer of at least 0, got -8"),
        ("gpus = 8", "gpus = true", "gpus must be an integer"),
        ("gpus = 8", "gpus = 0", "gpus and gpu must both be given"),
        ("cores = 96", "cores = 0", "cores must be an integer of at least 1, got 0"),
        ("cores = 96", "coers = 96", "cores is missing"),
        ("cores = 96", "cores = 96\nlimit = 3", "limit is unknown"),
        ('"gpu"', '"gpu; id"', "partition must be letters"),
        ('"gpu"', '"a\\nb"', "partition must be letters"),
        ('"2-00:00:00"', '"2 days"', "a time must be"),
        ('"ib0"', '"ib0"\naddress = "$(id){host}"', "address must be a host name"),
        ('"ib0"', '"ib0"\nmodules = ["a b"]', "modules must be letters"),
        ('"ib0"', '"ib0"\noptions = ["--wrap=id;id"]', "options must be one option of sbatch"),
        ('"ib0"', '"ib0"\nlarge_from = 65', "large_from and large_qos must both"),
        ('"ib0"', '"ib0"\nsave_seconds = 5', "save_seconds must be an integer of at least 60"),
        ('"ib0"', '"ib0"\n[environment.A]\nvalue = "1"', "environment.A must hold value and why"),
        ('"ib0"', '"ib0"\n[environment.a]\nvalue = "1"\nwhy = "x"', "name of an environment"),
        ('"ib0"', '"ib0"\n[environment.A]\nvalue = "1"\nwhy = "x\\ny"', "reason of A must be one"),
        ('name = "mine"', "name = ", "is not a cluster file"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path, old, new, sentence):
    path = tmp_path / "bad.toml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(UserError, match=sentence) as caught:
        cluster.load(str(path))
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["jupitre", "", "../jupiter", "/etc/passwd"])
def test_an_unknown_cluster_names_the_known_ones(name):
    with pytest.raises(UserError, match=r"unknown cluster .*jupiter"):
        cluster.load(name)


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(UserError, match=r"none\.toml is not a cluster file: .*No such file"):
        cluster.load(str(tmp_path / "none.toml"))


@pytest.mark.parametrize(("time", "expected"), [("1-02:03:04", 93784), ("24:00:00", 86400)])
def test_seconds(time, expected):
    assert cluster.seconds(time) == expected
