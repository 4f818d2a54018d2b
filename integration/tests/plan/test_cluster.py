"""Cluster files: each value is checked, and what is wrong is told with file, key and value."""

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
        ("gb_s = 25.0", "gb_s = -25.0", "link.network.gb_s must be positive and finite, got -25.0"),
        ("gb_s = 25.0", "gb_s = 0", "link.network.gb_s must be positive and finite, got 0"),
        ("gb_s = 25.0", "gb_s = nan", "link.network.gb_s must be positive and finite, got nan"),
        ("gb_s = 25.0", "gb_s = inf", "link.network.gb_s must be positive and finite, got inf"),
        ("gb_s = 25.0", 'gb_s = "25"', "link.network.gb_s must be a number, got '25'"),
        ("gb_s = 25.0", "gb_s = true", "link.network.gb_s must be a number, got True"),
        ("gb_s = 25.0 ", " ", "link.network.gb_s is missing"),
        ("gb_s = 25.0", "gb_sec = 25.0", "link.network.gb_s is missing"),
        ("gpus_a_node = 4", "gpus_a_node = 4.5", "gpus_a_node must be a whole number, got 4.5"),
        ("hbm_gib = 95.0", "hbm_gib = 95.0\nhbm_gig = 1", "gpu.hbm_gig is unknown; did you mean"),
        ("[link.node]", "[link.nodes]", "link.nodes is unknown; did you mean node?"),
        ("[host]", "[hosts]", "hosts is unknown; did you mean host?"),
        ('name = "GH200"', "name = 200", "gpu.name must be text, got 200"),
        ("[gpu]", "[gpu", "is not TOML"),
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


def test_a_cluster_that_is_not_there():
    with pytest.raises(UserError, match="unknown cluster jupyter; did you mean jupiter"):
        cluster.load("jupyter")
    with pytest.raises(UserError, match=r"cluster file none\.toml cannot be read"):
        cluster.load("none.toml")
