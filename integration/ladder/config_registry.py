"""The job's configurations, measured: ``--module integration.ladder --config mini``.

The job itself knows nothing of this: what is off costs nothing.
"""

from collections.abc import Callable
from dataclasses import fields

from integration.jobs import catalog
from integration.ladder.probe import MeasuredTrainer
from integration.ranks import config_registry as job_registry


def __getattr__(name: str) -> Callable[[], MeasuredTrainer.Config]:
    if name not in catalog.CATALOG:
        raise AttributeError(f"module {__name__} has no config {name}")
    return lambda: _measured(name)


def _measured(name: str) -> MeasuredTrainer.Config:
    plain = getattr(job_registry, name)()
    config = MeasuredTrainer.Config(**{f.name: getattr(plain, f.name) for f in fields(plain)})
    config.checkpoint.enable = False
    config.metrics.enable_tensorboard = False
    config.debug.deterministic = True  # rungs are compared bit by bit
    return config
