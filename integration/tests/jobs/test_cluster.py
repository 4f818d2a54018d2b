"""Cluster files: each value is checked, and what is wrong is said with file, key and value."""

import pytest

from integration.ground.errors import UserError
from integration.jobs import cluster

GOOD = (cluster.FOLDER / "jupiter.toml").read_text()


@pytest.mark.parametrize("name", ["jupiter", "leonardo", "h200"])
def test_the_files_of_the_repository_load(name):
    assert cluster.load(name).name == name


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("gb_s = 25.0", "gb_s = -25.0", "link.network.gb_s must be a positive and finite number"),
        (
            "gb_s = 25.0",
            "gb_s = 0",
            "link.network.gb_s must be a positive and finite number, got 0",
        ),
        ("gb_s = 25.0", "gb_s = nan", "link.network.gb_s must be a positive and finite number"),
        ("gb_s = 25.0", "gb_s = inf", "link.network.gb_s must be a positive and finite number"),
        ("gb_s = 25.0", 'gb_s = "25"', "link.network.gb_s must be a positive and finite number"),
        ("gb_s = 25.0", "gb_s = true", "link.network.gb_s must be a positive and finite number"),
        ("gb_s = 25.0 ", " ", "link.network.gb_s is missing"),
        ("gb_s = 25.0", "gb_sec = 25.0", "link.network.gb_sec is unknown; did you mean gb_s?"),
        ("gib_a_group = 0.25", "gib_a_group = 0", "nccl_gib_a_group must be a positive"),
        (
            "gpus_a_node = 4",
            "gpus_a_node = 4.5",
            "gpus_a_node must be a whole number of at least 0",
        ),
        ("gpus_a_node = 4", "", "gpus_a_node is missing"),
        ("nodes = 5884", "nodes = 0", "nodes must be a whole number of at least 1, got 0"),
        ("hbm_gib = 95.0", "hbm_gib = 95.0\nhbm_gig = 1", "gpu.hbm_gig is unknown; did you mean"),
        ("[link.node]", "[link.nodes]", "link.nodes is unknown; did you mean link.node?"),
        ("[host]", "[hosts]", "hosts is unknown; did you mean host?"),
        (
            'name = "GH200"',
            "name = 200",
            "gpu.name must be one line of text, and not empty, got 200",
        ),
        ('name = "jupiter"', 'name = "jupiter; id"', "name must be letters, digits"),
        ("[nccl]", "[[nccl]]", "nccl must be a table, got ["),
        ("[gpu]", "[gpu", "is not as it must be: "),
        ("cores = 288\n", "", "slurm.cores is missing"),
        ("cores = 288", "cores = 0", "slurm.cores must be a whole number of at least 1, got 0"),
        ("cores = 288", "cores = true", "slurm.cores must be a whole number"),
        ("cores = 288", "coers = 288", "slurm.coers is unknown; did you mean cores?"),
        ('"booster"', '"gpu; id"', "slurm.partition must be letters"),
        ('"booster"', '"a\\nb"', "slurm.partition must be letters"),
        ('"24:00:00"', '"2 days"', "slurm.time_limit must be a time, [DAYS-]"),
        ('"{host}i"', '"$(id){host}"', "slurm.address must be a host name"),
        ('["GCC", "Python"]', '["a b"]', "slurm.modules must be letters"),
        ('["GCC", "Python"]', '"GCC"', "slurm.modules must be a list, got 'GCC'"),
        ('"ib0"', '"ib0"\noptions = ["--wrap=id;id"]', "options must be one option of sbatch"),
        ('"ib0"', '"ib0"\nlarge_from = 65', "large_from and large_qos must both"),
        ('"ib0"', '"ib0"\nsave_seconds = 5', "save_seconds must be a whole number of at least 60"),
        ('value = "22"', "", "slurm.environment.NCCL_IB_TIMEOUT must hold value and why"),
        ('value = "22"', "value = 22", "slurm.environment.NCCL_IB_TIMEOUT.value must be one line"),
        ("NCCL_IB_TIMEOUT]", "nccl]", "slurm.environment.nccl.name must be capital letters"),
    ],
)
def test_a_bad_value_is_named(tmp_path, old, new, words):
    file = tmp_path / "mine.toml"
    assert old in GOOD
    file.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(UserError) as refused:
        cluster.load(str(file))
    assert words in str(refused.value)
    assert str(file) in str(refused.value)
    assert "\n" not in str(refused.value)


SCHEDULER = GOOD[GOOD.index("[slurm]") :]
LAUNCHED = f'name = "ours"\ngpus_a_node = 0\n{SCHEDULER}'


def test_a_file_needs_only_what_it_is_used_for(tmp_path):
    file = tmp_path / "my cluster.toml"
    file.write_text(LAUNCHED)
    ours = cluster.load(str(file))
    assert ours.slurm == cluster.load("jupiter").slurm
    with pytest.raises(
        UserError, match=r"no plan can be made for ours: .* has no nodes, gpu, host"
    ):
        _ = ours.gpu
    file.write_text(GOOD.removesuffix(SCHEDULER))
    planned = cluster.load(str(file))
    assert planned.planned == cluster.load("jupiter").planned
    with pytest.raises(UserError, match=r"jupiter has no table \[slurm\] in .*my cluster.toml"):
        _ = planned.slurm


def test_what_is_missing_of_the_hardware_is_named(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(GOOD.replace("[nccl]\ngib_a_group = 0.25", "", 1))
    with pytest.raises(UserError, match=r"has no nccl.gib_a_group; add what is missing as in"):
        _ = cluster.load(str(file)).host
    file.write_text(GOOD.replace("gpus_a_node = 4", "gpus_a_node = 0"))
    with pytest.raises(UserError, match="has no GPU a node"):
        _ = cluster.load(str(file)).host
    file.write_text(GOOD.removesuffix(SCHEDULER).replace("gpus_a_node = 4", "gpus_a_node = 0"))
    with pytest.raises(UserError, match="gpus_a_node must be a whole number of at least 1, got 0"):
        cluster.load(str(file))


@pytest.mark.parametrize("name", ["jupitre", "", "../jupiter", "/etc/passwd"])
def test_an_unknown_cluster_names_the_known_ones(name):
    with pytest.raises(UserError, match=r"unknown cluster .*jupiter"):
        cluster.load(name)


def test_a_cluster_that_is_not_there():
    with pytest.raises(UserError, match=r"unknown cluster 'jupyter'; did you mean jupiter\?"):
        cluster.load("jupyter")
    with pytest.raises(UserError, match=r"cluster file none\.toml cannot be read: No such file"):
        cluster.load("none.toml")


@pytest.mark.parametrize(("time", "expected"), [("1-02:03:04", 93784), ("24:00:00", 86400)])
def test_seconds(time, expected):
    assert cluster.seconds(time) == expected
