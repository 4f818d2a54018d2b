"""Small jobs and the clusters for the planner's tests."""

from dataclasses import replace

from hypothesis import strategies as st

from integration.jobs.catalog import JUPITER_1T
from integration.jobs.cluster import load
from integration.jobs.spec import JobSpec, Layout

JUPITER, LEONARDO, H200 = load("jupiter"), load("leonardo"), load("h200")


degrees = st.sampled_from([1, 2, 4])


@st.composite
def jobs(draw) -> JobSpec:
    """Jobs whose layout is possible, sizes far from the published ones."""
    pp, tp, ep, replicas = (draw(degrees) for _ in range(4))
    shard = draw(st.sampled_from([4, 8, 16, 32]))
    shape = replace(
        JUPITER_1T.shape,
        layers=draw(st.integers(pp, 12)),
        hidden=256 * draw(st.integers(1, 4)),
        expert_hidden=256,
        experts=32,
        vocab=draw(st.integers(500, 5000)) * 4,
        max_seq_len=4096,
    )
    job = replace(
        JUPITER_1T,
        shape=shape,
        layout=Layout(pp=pp, dp_replicate=replicas, tp=tp, ep=ep),
        ranks=pp * replicas * shard * tp,
        seq_len=4096,
        sequences=draw(st.integers(1, 8)),
        cpu_offload=draw(st.booleans()),
        checkpointing=draw(st.sampled_from(["full", "selective"])),
        optimizer=draw(st.sampled_from(["muon", "adamw"])),
    )
    job.check()
    return job
