"""The time model: hand-computed rates, the measured optimizer, and what can never speed up."""

from dataclasses import replace

import pytest
from hypothesis import given

from integration.job.catalog import JUPITER_1T, SLICE
from integration.plan import step_time, traffic
from integration.plan.levers import Levers
from integration.plan.plan import changes, make
from integration.plan.step_time import newton_schulz_flops, optimizer_seconds
from integration.tests.plan.jobs import H200, JUPITER, jobs

ON = Levers()


def test_newton_schulz_of_an_expert():
    """20 n^2 m + 10 n^3 with n = 1792, m = 6144, as counted by torch's FlopCounter."""
    assert newton_schulz_flops(1792, 6144) == newton_schulz_flops(6144, 1792)
    assert newton_schulz_flops(1792, 6144) / 1e9 == pytest.approx(452.1, abs=0.1)


def test_a_layer_forward():
    """403 M parameters meet a token: 52.8 TFLOP for 65,536; causal attention as much again."""
    experts, other, attention = step_time.layer_flops(JUPITER_1T)
    tokens = JUPITER_1T.seq_len
    assert (experts + other) * tokens / 1e12 == pytest.approx(52.8, rel=0.01)
    assert attention * tokens / 1e12 == pytest.approx(52.8, rel=0.01)


def test_the_roofline_is_below_the_measured_optimizer():
    """222 expert matrices on an H200, weight and momentum on the host: measured 0.81 s; the floor
    is the link's, and what was measured is not far above."""
    job = replace(SLICE, shape=SLICE.shape.cut(layers=74, experts=8))
    busy = optimizer_seconds(job, H200, ON)
    # An eighth of the matrices, which is what one GPU has of the 1T job; dense ones left out.
    experts = 222 * 1792 * 6144
    floor = 12 * experts / (H200.host_link.to_device_gb_s * 1e9)
    assert busy[H200.host_link.name] > floor
    assert floor < 0.81 < 1.6 * floor


@given(jobs())
def test_a_step_is_never_faster_than_any_resource(job):
    plan = make(job, JUPITER)
    resources = {name for phase in plan.time.phases for name in phase.busy}
    for name in resources:
        assert plan.time.seconds >= sum(p.busy.get(name, 0.0) for p in plan.time.phases) * 0.999
    assert 0 < plan.time.mfu < 1


@given(jobs())
def test_a_faster_network_never_slows(job):
    faster = replace(JUPITER, network=replace(JUPITER.network, gb_s=2 * JUPITER.network.gb_s))
    assert make(job, faster).time.seconds <= make(job, JUPITER).time.seconds * 1.000001


@given(jobs())
def test_the_table_of_traffic_has_every_byte(job):
    flows = traffic.flows(job, JUPITER, ON)
    rows = traffic.table(flows)
    for link in traffic.LINKS:
        assert sum(row[link] for row in rows.values()) == pytest.approx(
            traffic.total(flows, link=link)
        )


def test_each_contribution_is_seen_in_what_it_changes():
    found = {change.name: change for change in changes(make(JUPITER_1T, JUPITER))}
    assert set(found) == set(Levers.names())
    assert found["shared_rope_cache"].hbm == 73 * 65_536 * 256 * 4
    assert found["embedding_skip_backward_gather"].network == pytest.approx(0.78e9, rel=0.01)
    assert found["flex_shard_newton_schulz"].seconds > 40
    # The offload moves bytes: what leaves the GPU arrives on the host.
    offload = found["activation_offload"]
    assert offload.hbm > 0 > offload.host


def test_whole_experts_need_no_network_for_muon():
    flows = traffic.flows(JUPITER_1T, JUPITER, ON)
    assert traffic.total(flows, cause=traffic.MUON, part="experts") == 0
    dense = traffic.total(flows, cause=traffic.MUON)
    # 10.1 G parameters in fp32 over 384 ranks, there and back.
    assert dense == pytest.approx(2 * 4 * 10.1e9 / 384, rel=0.03)
