"""The planner's parameters are the model's, and its shards are what FSDP2 cuts."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given

from integration.jobs import catalog
from integration.plan.params import Place, held, kinds, layers_of_stage, local_numel
from integration.ranks.moe import model_spec
from integration.tests.plan.jobs import jobs


@pytest.mark.parametrize("name", ["jupiter_1t", "leonardo_1t"])
def test_names_and_shapes_are_the_built_models(name):
    job = catalog.find(name).cut(layers=1)
    with torch.device("meta"):
        model = model_spec(job.name, job.shape).model.build()
    built = {n.removeprefix("layers.0."): p.shape for n, p in model.named_parameters()}

    def of(kind):
        rows = (kind.rows,) if kind.columns == 1 else (kind.rows, kind.columns)
        short = kind.name.removeprefix("moe.routed_experts.inner_experts.")
        return (kind.matrices, *rows) if short != kind.name else rows

    assert {kind.name: of(kind) for kind in kinds(job)} == {n: tuple(s) for n, s in built.items()}


@given(jobs())
def test_all_ranks_together_hold_each_parameter_once_a_replica(job):
    """Independent of the formula: the sum over all ranks, replicas counted once."""
    for kind in kinds(job):
        expert = kind.role == "expert"
        degree = job.layout.efsdp(job.ranks) if expert else job.layout.dp_shard(job.ranks)
        copies = job.layout.ep if expert else (job.layout.tp if kind.tp else 1)
        total = copies * sum(local_numel(job, kind, index) for index in range(degree))
        assert total == kind.numel


@given(jobs())
def test_the_stages_hold_all_layers(job):
    stages = range(job.layout.pp)
    assert sum(layers_of_stage(job, stage) for stage in stages) == job.shape.layers


def test_torch_cuts_a_dimension_so():
    job = replace(catalog.JUPITER_1T)
    (wqkv,) = (kind for kind in kinds(job) if kind.name.endswith("wqkv.weight"))
    chunks = torch.empty(wqkv.rows, 0).chunk(384)
    sizes = [len(chunk) for chunk in chunks] + [0] * (384 - len(chunks))
    assert [local_numel(job, wqkv, i) // wqkv.columns for i in range(384)] == sizes


def test_an_expert_is_whole_on_one_rank():
    job = catalog.JUPITER_1T
    experts = [h for h in held(job, Place.of(job, 17)) if h.kind.role == "expert"]
    assert [h.numel for h in experts] == [1792 * 6144] * 3
    assert sum(h.count for h in experts) == 222
