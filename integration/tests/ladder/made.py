"""Made-up contributions and measurements for the tests of the ladder."""

from types import SimpleNamespace
from typing import Any, cast

from integration.ladder.order import Place
from integration.patchset.patch import Contribution

PLACE = Place(gpu=False, cpu_offload=False, muon=True)


def contribution(
    name: str, requires: tuple[str, ...] = (), numerics: str = "bitwise"
) -> Contribution:
    values = {"Numerics": (numerics,)}
    made = SimpleNamespace(
        name=name, upstream="x", requires=requires, values=values.get, sha256=name * 8
    )
    return cast(Contribution, made)


CHAIN = (
    contribution("cpu_device"),
    contribution("a"),
    contribution("changing", numerics="changes sums in another order"),
    contribution("b"),
)


def measured(**changed: Any) -> dict[str, Any]:
    """One run of two measured steps after one to warm up, on a CPU."""
    forward = changed.pop("forward", [0.1, 0.1])
    run = {
        "loss": [9.0, 5.0, 3.0],
        "grad_norm": [1.0, 2.0, 3.0],
        "step_s": [1.0, 1.0],
        "phases": {
            "exposed_communication_s": None,
            "exposed_copies_s": None,
            "forward_s": forward,
            "backward_s": [0.5, 0.5],
            "optimizer_s": [0.2, 0.2],
        },
        "peak_allocated": None,
        "peak_reserved": None,
        "alloc_retries": None,
        "pools": {},
        "peak_host": 7,
        "tokens_a_step": 1024,
        "start_s": 9.0,
    }
    return {**run, **changed}
