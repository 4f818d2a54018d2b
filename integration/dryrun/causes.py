"""What else the dry run counts beside the planner's causes, and on which mesh axes a cause is."""

from integration.plan import traffic

GATHER_FORWARD, GATHER_BACKWARD = traffic.GATHER_FORWARD, traffic.GATHER_BACKWARD
REDUCE, REPLICAS, EXPERTS = traffic.REDUCE, traffic.REPLICAS, traffic.EXPERTS
TENSOR, PIPELINE, MUON = traffic.TENSOR, traffic.PIPELINE, traffic.MUON

# Too small for the planner to count: 8 B an expert and layer, 4 B a parameter or an expert.
TOKEN_COUNTS = "token counts"
GRADIENT_NORM = "gradient norm"
ROUTER_BALANCE = "router balance"
SMALL = (TOKEN_COUNTS, GRADIENT_NORM, ROUTER_BALANCE)
PLANNED = (
    GATHER_FORWARD,
    GATHER_BACKWARD,
    REDUCE,
    REPLICAS,
    EXPERTS,
    TENSOR,
    PIPELINE,
    MUON,
)

# Axes of equal ranks (``dp_shard`` and ``ep`` of two ranks, say) share a group: the first fits.
AXES = {
    GATHER_FORWARD: ("dp_shard", "efsdp"),
    GATHER_BACKWARD: ("dp_shard", "efsdp"),
    REDUCE: ("dp_shard", "efsdp"),
    REPLICAS: ("dp_replicate",),
    EXPERTS: ("ep",),
    TOKEN_COUNTS: ("ep",),
    TENSOR: ("tp",),
    PIPELINE: ("pp",),
    MUON: ("dp_shard", "efsdp"),
    GRADIENT_NORM: ("dp_shard", "efsdp", "ep", "tp", "pp"),
    ROUTER_BALANCE: ("loss", "tp"),
}
