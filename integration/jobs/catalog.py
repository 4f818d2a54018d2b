"""The jobs, as data. No torch here.

The sizes of ``jupiter_1t`` are the published run's (951.9 B parameters, 32.8 B active) but for
the attention, which was not published: 48 query and 16 key-value heads of 128, with one shared
expert, give 951.80 B and 32.77 B.
"""

from dataclasses import replace

from integration.ground.errors import UserError, nearest
from integration.jobs.shapes import MoEShape
from integration.jobs.spec import JobSpec, Layout

JUPITER_1T = JobSpec(
    name="jupiter_1t",
    about="952 B parameters on 96 nodes of 4 GH200: FSDP 384, EP 4 inside a node, all offloaded",
    shape=MoEShape(
        layers=74,
        hidden=6144,
        heads=48,
        kv_heads=16,
        head_dim=128,
        experts=384,
        top_k=8,
        expert_hidden=1792,
        shared_experts=1,
        vocab=256_000,
        max_seq_len=65_536,
    ),
    layout=Layout(ep=4),
    ranks=384,
    sequences=1,
    seq_len=65_536,
    # 2,048 tokens at a time: 2 GB of fp32 logits instead of 67.
    loss_chunks=32,
    optimizer="muon",
    lr=2e-4,
    activation_offload=True,
    cpu_offload=True,
)

JUPITER_1T_HSDP = replace(
    JUPITER_1T,
    name="jupiter_1t_hsdp",
    about="jupiter_1t in 4 replicas, on 384 nodes",
    layout=Layout(dp_replicate=4, ep=4),
    ranks=4 * 384,
)

MINI = replace(
    JUPITER_1T,
    name="mini",
    about="the 1T model in small: 60 steps in under three minutes on two CPU cores",
    shape=MoEShape(
        layers=4,
        hidden=256,
        heads=4,
        kv_heads=2,
        head_dim=64,
        experts=8,
        top_k=2,
        expert_hidden=256,
        shared_experts=1,
        vocab=4096,
        max_seq_len=4096,
    ),
    layout=Layout(),
    ranks=1,
    sequences=4,
    seq_len=256,
    loss_chunks=2,
    # Of 1e-3, 2e-3 and 4e-3: mean loss of the last ten steps 5.98, 5.49 and 5.14.
    lr=4e-3,
    cpu_offload=False,
    cluster="h200",
    steps=60,
    any_ranks=True,
    tokenizer_vocab=True,
)

MINI_ADAMW = replace(
    MINI,
    name="mini_adamw",
    about="mini with AdamW for all parameters: what bitwise parity compares",
    optimizer="adamw",
    # Of 2e-3 and 4e-3: 5.92 and 6.19.
    lr=2e-3,
)

# One layer as in jupiter_1t; how many, and of how many experts, is the user's.
SLICE = replace(
    JUPITER_1T,
    name="slice",
    about="true layers of jupiter_1t, fewer of them, for one or two GPUs (--layers, --experts)",
    shape=JUPITER_1T.shape.cut(layers=4, experts=16, vocab=4096),
    layout=Layout(),
    ranks=1,
    seq_len=8192,
    loss_chunks=8,
    cluster="h200",
    steps=20,
    any_ranks=True,
    tokenizer_vocab=True,
)

LEONARDO_1T = JobSpec(
    name="leonardo_1t",
    about="1.1 T parameters on 128 nodes of 4 A100: TP 4 inside a node, EP and FSDP across",
    shape=MoEShape(
        layers=64,
        hidden=7168,
        heads=56,
        kv_heads=56,
        head_dim=128,
        experts=64,
        top_k=2,
        expert_hidden=12_288,
        shared_experts=0,
        vocab=128_256,
        max_seq_len=8192,
    ),
    layout=Layout(tp=4, ep=64),
    ranks=512,
    sequences=2,
    seq_len=8192,
    loss_chunks=8,
    optimizer="adamw",
    lr=2e-4,
    checkpointing="selective",
    cluster="leonardo",
)

LEONARDO_1T_FP8 = replace(
    LEONARDO_1T,
    name="leonardo_1t_fp8",
    about="leonardo_1t with FP8 matrix products, on GPUs that have them (not on an A100)",
    fp8=True,
)

LEONARDO_SMALL = JobSpec(
    name="leonardo_small",
    about="47 B parameters on 16 nodes of 4 A100: TP 2 x PP 2 x EP 4 and FSDP",
    shape=MoEShape(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        experts=8,
        top_k=2,
        expert_hidden=14_336,
        shared_experts=0,
        vocab=128_256,
        max_seq_len=4096,
    ),
    layout=Layout(pp=2, tp=2, ep=4),
    ranks=64,
    sequences=8,
    seq_len=4096,
    loss_chunks=8,
    optimizer="adamw",
    lr=3e-4,
    checkpointing="selective",
    cluster="leonardo",
)

LEONARDO_MINI = replace(
    LEONARDO_SMALL,
    name="leonardo_mini",
    about="leonardo_small in small; trains on 8 CPU ranks",
    shape=MoEShape(
        layers=4,
        hidden=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        experts=8,
        top_k=2,
        expert_hidden=64,
        shared_experts=0,
        vocab=4096,
        max_seq_len=4096,
    ),
    ranks=8,
    sequences=2,
    seq_len=128,
    loss_chunks=2,
    lr=2e-3,
    steps=20,
    tokenizer_vocab=True,
)

CATALOG = {
    job.name: job
    for job in (
        MINI,
        SLICE,
        JUPITER_1T,
        JUPITER_1T_HSDP,
        LEONARDO_1T,
        LEONARDO_1T_FP8,
        LEONARDO_SMALL,
        LEONARDO_MINI,
        MINI_ADAMW,
    )
}


def find(name: str, *, layers: int | None = None, experts: int | None = None) -> JobSpec:
    """Return the job called ``name``; only ``slice`` can be cut.

    Raises:
        UserError: there is none, it cannot be cut, or not so.
    """
    if name not in CATALOG:
        raise UserError(f"unknown config {name}{nearest(name, list(CATALOG))}")
    if layers is None and experts is None:
        return CATALOG[name]
    if name != SLICE.name:
        raise UserError(f"--layers and --experts cut the config slice, and {name} was asked for")
    return cut(SLICE, layers=layers, experts=experts)


def cut(job: JobSpec, *, layers: int | None, experts: int | None) -> JobSpec:
    """Return ``job`` with fewer layers or experts; None keeps a size.

    Raises:
        UserError: it cannot be cut so.
    """
    if experts is not None and experts < job.shape.top_k:
        raise UserError(
            f"--experts must be at least {job.shape.top_k}, as each token goes to that many, got "
            f"{experts}"
        )
    try:
        return job.cut(layers=layers, experts=experts)
    except ValueError as error:
        raise UserError(f"{job.name} cannot be cut so: {error}") from None
