"""The figures that were published of the 1T run, beside what the plan says, with the arithmetic.

Source of the published ones: the consortium's report of the run on 384 GH200 (90 to about 1,300
tokens/s a GPU).
"""

from dataclasses import dataclass, replace

from integration.ground.units import GIB
from integration.plan import muon, step_time, traffic
from integration.plan.activations import boundary_bytes
from integration.plan.levers import Levers
from integration.plan.memory import rope_bytes
from integration.plan.plan import Plan, make
from integration.plan.traffic import GATHER_BACKWARD, GATHER_FORWARD, NETWORK, REDUCE

GIGA = 1e9
PUBLISHED_TOKENS_PER_SECOND = 1300


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One published number. ``tolerance`` is relative; beyond it, ``why`` says what differs."""

    name: str
    published: float
    planned: float
    unit: str
    tolerance: float
    why: str

    @property
    def difference(self) -> float:
        return self.planned / self.published - 1

    @property
    def agrees(self) -> bool:
        return abs(self.difference) <= self.tolerance


def figures(plan: Plan) -> list[Figure]:
    """Return the published figures of ``jupiter_1t`` that the plan has inputs for."""
    job, cluster, shape = plan.job, plan.cluster, plan.job.shape
    all_on = plan.levers
    on_cpu = all_on.without("muon_gpu_newton_schulz")
    copying = make(job, cluster, all_on.without("fsdp_unshard_async_op"))
    by_gpu = step_time.optimizer_seconds(job, cluster, all_on)
    by_cpu = step_time.optimizer_seconds(job, cluster, on_cpu)
    return [
        Figure(
            name="tokens a step",
            published=25e6,
            planned=job.tokens / job.layout.dp_replicate,
            unit="",
            tolerance=0.01,
            why=f"{job.data_ranks // job.layout.dp_replicate} sequences of {job.seq_len:,}",
        ),
        Figure(
            name="boundary activations",
            published=55.0,
            planned=shape.layers * boundary_bytes(job) / GIB,
            unit="GiB",
            tolerance=0.01,
            why=f"{shape.layers} layers x {job.seq_len:,} tokens x {shape.hidden:,} x 2 B",
        ),
        Figure(
            name="parameters under Muon",
            published=0.995,
            planned=shape.muon_params / shape.params,
            unit="",
            tolerance=0.0016,
            why="all but router, embedding, head and norms",
        ),
        Figure(
            name="experts a rank and layer",
            published=1.0,
            planned=shape.experts / (job.layout.efsdp(job.ranks) * job.layout.ep),
            unit="",
            tolerance=0.0,
            why=f"{shape.experts} experts on efsdp {job.layout.efsdp(job.ranks)} x "
            f"ep {job.layout.ep}",
        ),
        Figure(
            name="RoPE caches before / after",
            published=74.0,
            planned=rope_bytes(job, Levers.of(()), 0) / rope_bytes(job, Levers(), 0),
            unit="",
            tolerance=0.0,
            why=f"{rope_bytes(job, Levers.of(()), 0) / GIB:.2f} GiB to "
            f"{rope_bytes(job, Levers(), 0) / GIB * 1024:.0f} MiB",
        ),
        Figure(
            name="saved by fsdp_unshard_async_op",
            published=13.5,
            planned=(copying.worst.hbm_total - plan.worst.hbm_total) / GIB,
            unit="GiB",
            tolerance=0.10,
            why="two flat all-gather outputs in the copy stream's pool; allocator slack is not "
            "in the plan",
        ),
        Figure(
            name="optimizer on the CPU",
            published=41.7,
            planned=max(by_cpu.values()),
            unit="s",
            tolerance=0.12,
            why=f"{muon.flops(job, on_cpu, 0) / 1e12:.1f} TFLOP of Newton-Schulz at "
            f"{cluster.host.newton_schulz_tflops} TFLOP/s, the rate of 16 x86 cores: that of 72 "
            "Arm cores is not known",
        ),
        Figure(
            name="optimizer on the GPU",
            published=2.2,
            planned=max(by_gpu.values()),
            unit="s",
            tolerance=0.12,
            why="a roofline, in which copies, products and host memory overlap perfectly: an H200 "
            "with PCIe came within a fifth of its own; the published one may count what this does "
            "not",
        ),
        Figure(
            name="tokens/s a GPU",
            published=PUBLISHED_TOKENS_PER_SECOND,
            planned=plan.time.tokens_per_second,
            unit="",
            tolerance=0.12,
            why=f"{plan.time.binds} binds; see the arithmetic below",
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTraffic:
    """Seconds of network that expert weights take in a step, and what would change them."""

    gathers: float  # bytes
    reduction: float  # bytes, fp32
    rate: float  # bytes a second

    @property
    def seconds(self) -> float:
        return (self.gathers + self.reduction) / self.rate

    @property
    def seconds_if_reduced_in_bf16(self) -> float:
        return (self.gathers + self.reduction / 2) / self.rate


def expert_traffic(plan: Plan) -> ExpertTraffic:
    """Return the traffic of two bf16 gathers and one fp32 reduce-scatter of the experts.

    On efsdp 96 one GPU receives ``74 x 96 experts x 33.0 M x 2 B x 95/96 = 464 GB`` a gather.
    """
    gathers, reduction = (
        sum(traffic.total(plan.flows, link=NETWORK, part="experts", cause=c) for c in causes)
        for causes in ((GATHER_FORWARD, GATHER_BACKWARD), (REDUCE,))
    )
    return ExpertTraffic(
        gathers=gathers, reduction=reduction, rate=plan.cluster.network.gb_s * GIGA
    )


def arithmetic(plan: Plan) -> list[str]:
    """Say in sentences what the expert weights cost on the network, and which lever moves it."""
    network, experts = plan.cluster.network, expert_traffic(plan)
    step = plan.time.tokens_per_gpu / PUBLISHED_TOKENS_PER_SECOND
    faster = plan.cluster.with_hardware(network=replace(network, gb_s=2 * network.gb_s))
    at_twice = make(plan.job, faster, plan.levers)
    wider = replace(plan.job, sequences=2 * plan.job.sequences)
    doubled = make(wider, plan.cluster, plan.levers)
    fits = "which fits" if doubled.fits else f"but {doubled.too_large[0]}"
    # Forward, recomputation, and backward of twice the work.
    products, attention = step_time.layers_seconds(plan.job, plan.cluster, 0)
    products *= 4
    attention = 2 * attention + step_time.attention_backward_seconds(attention, plan.cluster)
    moves = sum(
        step_time.moves_seconds(plan.job, plan.cluster, 0, backward=b) for b in (False, True)
    )
    passes = sum(phase.seconds for phase in plan.time.phases[:2])
    return [
        f"Expert weights: two bf16 gathers {experts.gathers / GIGA:,.0f} GB + fp32 reduce-scatter "
        f"{experts.reduction / GIGA:,.0f} GB = {(experts.gathers + experts.reduction) / GIGA:,.0f} "
        f"GB a GPU and step; at {network.gb_s:g} GB/s {experts.seconds:.1f} s.",
        f"Reduced in bf16 it would be {experts.seconds_if_reduced_in_bf16:.1f} s (the pins allow "
        f"float32 alone); at {2 * network.gb_s:g} GB/s {experts.seconds / 2:.1f} s, and "
        f"{at_twice.time.tokens_per_second:,.0f} tokens/s, bound by {at_twice.time.binds}.",
        f"A whole step at {PUBLISHED_TOKENS_PER_SECOND:,} tokens/s is {step:.1f} s: expert "
        f"parallelism inside a node cannot give that at {network.gb_s:g} GB/s, whatever overlaps.",
        f"The GPU takes {products:.1f} s for products, {attention:.1f} s for attention as if each "
        f"sequence were one document (packed ones attend to themselves alone, and cost less) and "
        f"{moves:.1f} s for kernels that only move memory. The other "
        f"{passes - products - attention - moves:.1f} s of forward and backward are the output "
        "head, exchanges of tokens, and the links' first and last layer.",
        f"The lever is tokens a gather: {wider.sequences} sequences a rank give "
        f"{doubled.time.tokens_per_second:,.0f} tokens/s, {fits}.",
    ]
