"""Which link an axis crosses, and that no byte is lost between the links."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from integration.jobs.catalog import JUPITER_1T, JUPITER_1T_HSDP, LEONARDO_1T
from integration.jobs.spec import Layout
from integration.plan import topology
from integration.plan.topology import Axis
from integration.tests.plan.jobs import JUPITER, LEONARDO, jobs


@pytest.mark.parametrize(
    ("job", "cluster", "name", "local", "nodes"),
    [
        (JUPITER_1T, JUPITER, "ep", 4, 1),
        (JUPITER_1T, JUPITER, "dp_shard", 4, 96),
        (JUPITER_1T, JUPITER, "efsdp", 1, 96),
        (JUPITER_1T_HSDP, JUPITER, "dp_replicate", 1, 4),
        (LEONARDO_1T, LEONARDO, "tp", 4, 1),
        (LEONARDO_1T, LEONARDO, "ep", 4, 16),
        (LEONARDO_1T, LEONARDO, "dp_shard", 1, 128),
        # Three ranks: the group of ranks 3 to 5 straddles two nodes of four.
        (replace(JUPITER_1T, layout=Layout(ep=3)), JUPITER, "ep", 1, 3),
    ],
)
def test_an_axis_sits_on_nodes(job, cluster, name, local, nodes):
    axis = topology.axes(job, cluster)[name]
    assert (axis.local, axis.nodes) == (local, nodes)


def test_a_chatty_axis_on_the_network_is_told():
    assert topology.warnings(JUPITER_1T, JUPITER) == []
    (warning,) = topology.warnings(replace(JUPITER_1T, layout=Layout(ep=8)), JUPITER)
    assert warning.startswith("ep 8 spans 2 nodes of 4:")
    assert "InfiniBand NDR200, 18 times slower than NVLink 4" in warning


@given(jobs(), st.floats(1, 1e12))
def test_every_byte_crosses_one_link(job, size):
    for axis in topology.axes(job, JUPITER).values():
        received = size * (axis.degree - 1) / axis.degree
        assert sum(axis.gather(size)) == pytest.approx(received)
        assert sum(axis.all_to_all(size)) == pytest.approx(received)
        assert axis.crosses_network or axis.gather(size)[1] == 0


def test_a_node_takes_in_once_what_is_outside():
    """Four ports share it: 95/96 of the gathered size, a quarter each."""
    axis = Axis(name="dp_shard", degree=384, stride=1, local=4)
    assert axis.gather(384.0)[1] * 4 == pytest.approx(384 * 95 / 96)
