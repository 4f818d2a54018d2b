"""What a layer keeps for its backward pass, in bytes, from reading the pin's forward code.

Notation: ``t`` tokens of a microbatch on one rank (sequence parallelism leaves ``seq / tp``), ``d``
hidden, ``k`` experts a token, ``f`` expert hidden; bf16 is 2 B, fp32 4 B. Routing is taken as
balanced: as many tokens arrive at a rank's experts as leave it.
"""

from integration.jobs.spec import JobSpec
from integration.plan.levers import Levers

BF16, FP32 = 2, 4
# Elements of a chunk: ``CHUNK_NUMEL`` of ``moe_combine_memory``.
COMBINE_CHUNK = 16 * 2**20


def tokens(job: JobSpec) -> int:
    """Tokens of one microbatch on one rank. A sequence is a microbatch under pipelining."""
    sequences = 1 if job.layout.pp > 1 else job.sequences
    return sequences * job.seq_len // job.layout.tp


def microbatches(job: JobSpec) -> int:
    return job.sequences if job.layout.pp > 1 else 1


def boundary_bytes(job: JobSpec) -> int:
    """The input of one layer: ``t d`` in bf16."""
    return tokens(job) * job.shape.hidden * BF16


def attention_bytes(job: JobSpec) -> int:
    """Attention, saved: input of wqkv ``d`` (gathered over tp), q, k, v, rotated q and k, output.

    All bf16, of ``(H + 2 KV) + (H + KV) + H`` heads; the log-sum-exp of each head and the rows of
    the RoPE cache at these positions (cos and sin) are fp32. Source: models/common/attention.py
    and rope.py.
    """
    shape, tp = job.shape, job.layout.tp
    heads = (3 * shape.heads + 3 * shape.kv_heads) * shape.head_dim
    per_token = BF16 * (shape.hidden * tp + heads) + FP32 * (shape.heads + 2 * shape.head_dim * tp)
    return tokens(job) * per_token


def mlp_bytes(job: JobSpec) -> int:
    """Router and shared expert, saved: the residual and its norm ``2 d``, gate and up products,
    SiLU and their product ``4 f``; the router works in fp32, on an fp32 copy of its input, and
    keeps its scores and ``k`` indices of 8 B, twice."""
    shape = job.shape
    shared = 4 * shape.shared_experts * shape.expert_hidden
    router = FP32 * (shape.hidden + shape.experts + 2 * shape.top_k) + 3 * 8 * shape.top_k
    per_token = BF16 * (2 * shape.hidden + shared) + router
    return tokens(job) * per_token


def routed_bytes(job: JobSpec, levers: Levers) -> int:
    """Routed experts, saved: input ``k d``, gate, up, SiLU, product ``4 k f`` in bf16, and the
    output before it is scored, ``k d``: in fp32 (models/common/token_dispatcher.py, ``combine``),
    with ``moe_combine_memory`` in bf16."""
    shape = job.shape
    output = BF16 if levers.moe_combine_memory else FP32
    per_copy = BF16 * (shape.hidden + 4 * shape.expert_hidden) + output * shape.hidden
    return tokens(job) * shape.top_k * per_copy


def combine_bytes(job: JobSpec, levers: Levers) -> int:
    """Alive only while the routed experts' outputs are brought back, beside what they save.

    In the backward of the scores: the incoming gradient and its products with the scores and with
    the outputs, ``k d`` each in fp32. With ``moe_combine_memory``: the gradient coming in and the
    one going out, in bf16, and two fp32 chunks. Then the all-to-all of the forward pass needs more:
    the outputs as computed, as they are sent, and as they arrive, before they are joined to what is
    saved, ``k d`` each in bf16.
    """
    numel = tokens(job) * job.shape.top_k * job.shape.hidden
    if not levers.moe_combine_memory:
        return numel * 3 * FP32
    backward = numel * 2 * BF16 + 2 * FP32 * min(numel, COMBINE_CHUNK)
    return max(backward, numel * 3 * BF16 if job.layout.ep > 1 else 0)


def selective_bytes(job: JobSpec) -> int:
    """Kept by the pin's selective checkpointing beyond the layer's input: attention's output and
    log-sum-exp, and every second linear product, that is wqkv's and the shared expert's gate and
    down products. Grouped products and the list form of all-to-all are not on its list: experts are
    recomputed (distributed/activation_checkpoint.py, ``_get_default_save_ops``)."""
    shape = job.shape
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    shared = (shape.expert_hidden + shape.hidden) if shape.shared_experts else 0
    per_token = BF16 * (qkv + shape.heads * shape.head_dim + shared) + FP32 * shape.heads
    return tokens(job) * per_token
