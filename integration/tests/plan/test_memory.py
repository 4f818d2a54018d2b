"""Memory items: they add up, grow with the model, and shrink with each contribution."""

from dataclasses import replace

import pytest
from hypothesis import given

from integration.ground.units import GIB
from integration.jobs import catalog
from integration.jobs.catalog import JUPITER_1T, LEONARDO_SMALL
from integration.jobs.cluster import load
from integration.plan import memory
from integration.plan.activations import boundary_bytes
from integration.plan.levers import Levers
from integration.plan.plan import make
from integration.tests.plan.jobs import JUPITER, jobs

ON = Levers()


@given(jobs())
def test_the_items_are_the_total_and_the_worst_rank_is_the_worst(job):
    worst = memory.worst(job, JUPITER, ON)
    for rank in {0, job.ranks // 2, job.ranks - 1}:
        mine = memory.of_rank(job, JUPITER, ON, rank)
        assert mine.hbm_total == pytest.approx(
            max(sum(items.values()) for items in mine.moments.values())
        )
        assert all(size >= 0 for items in mine.moments.values() for size in items.values())
        share = max(mine.hbm_total / JUPITER.gpu.hbm_gib, mine.host_total / JUPITER.host.memory_gib)
        most = max(
            worst.hbm_total / JUPITER.gpu.hbm_gib, worst.host_total / JUPITER.host.memory_gib
        )
        assert share <= most


@given(jobs())
def test_more_layers_never_take_less(job):
    more = job.cut(layers=job.shape.layers + job.layout.pp)
    for rank in {0, job.ranks - 1}:
        before, after = (memory.of_rank(j, JUPITER, ON, rank) for j in (job, more))
        # 15 matrices are one batch of Muon's, 16 are two smaller ones.
        batches = before.hbm.get(memory.MUON_BUFFERS, 0.0)
        staged = before.host.get("Muon's staging, pinned", 0.0)
        assert after.hbm_total >= before.hbm_total - batches
        assert after.host_total >= before.host_total - staged


@given(jobs())
def test_no_contribution_takes_gpu_memory_but_muon(job):
    with_all = memory.worst(job, JUPITER, ON)
    optimizer = with_all.moments["optimizer"]
    muon = sum(optimizer.get(item, 0.0) for item in ("Newton-Schulz", memory.MUON_BUFFERS))
    for name in Levers.names():
        less = memory.of_rank(job, JUPITER, ON.without(name), with_all.rank)
        assert less.hbm_total >= with_all.hbm_total - muon


def test_the_shards_of_all_ranks_are_the_model():
    job = replace(JUPITER_1T, cpu_offload=False)
    states = [memory.of_rank(job, JUPITER, ON, rank).hbm["parameters"] for rank in range(384)]
    assert sum(states) == 4 * job.shape.params


def test_under_pipelining_a_stage_stays_gathered():
    """16 layers of 8 / 4 experts and attention over tp 2, bf16; gradients in fp32 beside them."""
    job = LEONARDO_SMALL
    items = memory.of_rank(job, JUPITER, ON, 0).moments["recomputation"]
    layer = memory.layer_gathered(job)
    embedding = job.shape.embedding_params // 2
    assert items["gathered weights and prefetch"] == 2 * (16 * layer + embedding)
    assert items["gradients being reduced"] == 4 * (17 * layer + embedding)


def test_offload_leaves_three_boundaries():
    on = memory.of_rank(JUPITER_1T, JUPITER, ON, 0)
    off = memory.of_rank(JUPITER_1T, JUPITER, ON.without("activation_offload"), 0)
    one = boundary_bytes(JUPITER_1T)
    assert on.hbm["boundary activations"] == 3 * one
    assert off.hbm["boundary activations"] == 74 * one
    assert on.host["boundary activations, pinned"] == 73 * one  # 768 MiB: not rounded by the pool


def test_what_the_pool_has_no_room_for_stays_on_the_gpu():
    longer = replace(JUPITER_1T, sequences=2)  # 73 inputs of 1.5 GiB, of which 64 GiB hold 42
    memory_of = memory.of_rank(longer, JUPITER, ON, 0)
    one = boundary_bytes(longer)
    assert memory_of.host["boundary activations, pinned"] == 42 * one
    assert memory_of.hbm["boundary activations"] == (74 - 42 + 2) * one


def test_the_1t_job_fits_only_with_activation_offload():
    """As it was: 55 GiB of boundaries, all but three of 74, do not fit beside the rest."""
    need = memory.worst(JUPITER_1T, JUPITER, ON).hbm_total
    without = memory.worst(JUPITER_1T, JUPITER, ON.without("activation_offload")).hbm_total
    assert need < JUPITER.gpu.hbm_gib * GIB < without
    assert (without - need) / GIB == pytest.approx(71 * 0.75)


def test_the_1t_job_fits_only_with_less_memory_in_combine():
    """TorchTitan 0.3.0 saves the routed tokens in fp32, 12 GiB, and in the backward of their scores
    holds three more copies; the patch saves 6 GiB and holds three more such when they arrive."""
    need = memory.worst(JUPITER_1T, JUPITER, ON).hbm_total
    without = memory.worst(JUPITER_1T, JUPITER, ON.without("moe_combine_memory")).hbm_total
    assert need < JUPITER.gpu.hbm_gib * GIB < without
    assert (without - need) / GIB == pytest.approx(4 * 12 - 4 * 6)


def test_every_job_fits_its_cluster():
    for job in catalog.CATALOG.values():
        if not job.fp8:
            assert make(job, load(job.cluster)).fits, job.name
