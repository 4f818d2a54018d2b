"""The tables as they are printed, whole."""

import io

import expecttest
from rich.console import Console

from integration.jobs.catalog import JUPITER_1T, LEONARDO_SMALL
from integration.plan import render
from integration.plan.plan import changes, make
from integration.tests.plan.jobs import JUPITER, LEONARDO


def _printed(table) -> str:
    out = io.StringIO()
    Console(file=out, width=110, highlight=False).print(table)
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


class TestTables(expecttest.TestCase):
    maxDiff = None

    def test_memory_of_the_1t_job(self):
        self.assertExpectedInline(
            _printed(render.memory_table(make(JUPITER_1T, JUPITER))),
            """\
memory (GiB)                  ┃ rank 0 ┃ worst rank (0) ┃ there
━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━╇━━━━━━━━━━━━━━━━╇━━━━━━
boundary activations          │   2.25 │           2.25 │
Muon's buffers                │   2.63 │           2.63 │
RoPE caches                   │   0.06 │           0.06 │
NCCL                          │   1.25 │           1.25 │
CUDA context                  │   0.60 │           0.60 │
gathered weights and prefetch │  12.45 │          12.45 │
gradients being reduced       │  12.33 │          12.33 │
recomputation                 │   7.81 │           7.81 │
MoE buffers                   │  37.00 │          37.00 │
GPU, at recomputation         │  76.38 │          76.38 │  95.0
──────────────────────────────┼────────┼────────────────┼──────
process                       │   4.00 │           4.00 │
data loader                   │   0.25 │           0.25 │
parameters, pinned            │  14.04 │          14.04 │
gradients, pinned             │  14.04 │          14.04 │
optimizer state               │   0.06 │           0.06 │
Muon's momentum, pinned       │   9.50 │           9.50 │
Muon's staging, pinned        │   0.75 │           0.75 │
boundary activations, pinned  │  54.75 │          54.75 │
host                          │  97.40 │          97.40 │ 108.0
""",
        )

    def test_traffic_of_the_1t_job(self):
        self.assertExpectedInline(
            _printed(render.traffic_table(make(JUPITER_1T, JUPITER))),
            """\
GB a step and GPU    ┃ InfiniBand NDR200 ┃ NVLink 4 ┃ C2C in ┃ C2C out
━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━╇━━━━━━━━╇━━━━━━━━
all-gather, forward  │            471.03 │    20.09 │        │
reduce-scatter       │            942.06 │    40.17 │        │
all-gather, backward │            470.25 │    17.73 │        │
expert all-to-all    │                   │ 2,145.34 │        │
Muon                 │              0.20 │     0.00 │        │
parameter copies     │                   │          │  19.82 │
gradient copies      │                   │          │        │    9.92
optimizer            │                   │          │  29.65 │   19.76
activation offload   │                   │          │  58.79 │   58.79
─────────────────────┼───────────────────┼──────────┼────────┼────────
all                  │          1,883.54 │ 2,223.32 │ 108.25 │   88.47
""",
        )

    def test_what_each_contribution_changes(self):
        table = render.changes_table(changes(make(JUPITER_1T, JUPITER)))
        self.assertExpectedInline(
            _printed(table),
            """\
without it                     ┃ GPU GiB ┃ host GiB ┃ network GB ┃ seconds a step
━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━╇━━━━━━━━━━╇━━━━━━━━━━━━╇━━━━━━━━━━━━━━━
shared_rope_cache              │   +4.56 │          │            │
fsdp_unshard_async_op          │  +12.33 │          │            │
embedding_skip_backward_gather │         │          │      +0.78 │
activation_offload             │  +53.25 │   -54.75 │            │          -0.01
moe_combine_memory             │  +24.00 │          │            │
cpu_grad_norm                  │         │          │            │          +0.97
flex_shard_muon                │   -2.63 │    +8.16 │      -0.20 │          +0.02
muon_gpu_newton_schulz         │   -2.63 │    -1.05 │            │         +46.07
flex_shard_newton_schulz       │         │          │            │          +0.03
""",
        )

    def test_time_with_a_pipeline(self):
        self.assertExpectedInline(
            _printed(render.time_table(make(LEONARDO_SMALL, LEONARDO))),
            """\
phase         ┃ seconds ┃ bound by ┃ busy beside it
━━━━━━━━━━━━━━╇━━━━━━━━━╇━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━
forward       │    1.21 │ GPU      │ InfiniBand HDR100 0.97, NVLink 3 0.04
backward      │    3.39 │ GPU      │ InfiniBand HDR100 2.07, NVLink 3 0.10
gradient norm │    0.00 │ GPU      │
optimizer     │    0.01 │ GPU      │
bubble        │    0.58 │ pipeline │
──────────────┼─────────┼──────────┼──────────────────────────────────────
step          │    5.20 │ GPU      │ 1,577 tokens/s a GPU, MFU 41.5%
""",
        )
