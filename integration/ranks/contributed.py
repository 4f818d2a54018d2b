"""What contributions add to TorchTitan, or the pin's own where the set leaves them out.

A contribution's field, function or module is there only in sets with that contribution, and the
proofs train with sets that leave some out.
"""

from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torchtitan.components.optimizer import OptimizersContainer, default_adamw
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.utils import device_type

from integration.plan.host import POOL_GIB


def options(config: type, **values: Any) -> dict[str, Any]:
    """Return those of ``values`` that ``config`` has a field for."""
    names = {field.name for field in fields(config)}
    return {name: value for name, value in values.items() if name in names}


def muon(spec: ModelSpec, *, lr: float) -> OptimizersContainer.Config:
    """Muon for the matrices, AdamW for router, embedding, head and norms (``flex_shard_muon``).

    Without that contribution, AdamW for all.
    """
    muon_adamw = find("torchtitan.components.optimizer", "muon_adamw")
    if muon_adamw is None:
        return default_adamw(lr=lr)
    config = muon_adamw(spec, lr=lr, exclude=("router", "embedding", "head"))
    if device_type == "cuda" and find_spec("torchtitan.distributed.flex_shard.newton_schulz"):
        # Half the time of the plain iteration on a Hopper GPU (``flex_shard_newton_schulz``).
        config.optimizer_factory_kwargs_by_name["Muon"]["newton_schulz"] = "gram"
    return config


def offloaded_full_ac() -> FullAC.Config:
    """Full checkpointing with the layers' inputs on the host (``activation_offload``).

    Without that contribution, they stay on the device.
    """
    policy = find("torchtitan.distributed.activation_offload", "FullACOffload")
    if policy is None:
        return FullAC.Config()
    # No lower bound: what the policy picks is block inputs, small ones in `mini`.
    return policy.Config(min_bytes=0, max_host_gib=POOL_GIB)


def find(module: str, name: str) -> Any:
    """Return ``module.name``, or None where the set does not have it."""
    return getattr(import_module(module), name, None) if find_spec(module) else None
