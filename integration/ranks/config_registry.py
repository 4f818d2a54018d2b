"""Training configurations in TorchTitan's form: functions that return a ``Trainer.Config``.

``python -m torchtitan.train --module integration.ranks --config mini`` works under any launcher
that puts an overlay with ``cpu_device`` first (``integration env`` prints the line). Each job of
``catalog.py`` is a config by its name. Our launcher hands over what is known only at launch through
the environment.
"""

import os
from collections.abc import Callable
from pathlib import Path

from integration.jobs import catalog, handover
from integration.patchset.overlay import refuse_other_modules
from integration.ranks.trainer import JobTrainer
from integration.ranks.trainer_config import trainer_config


def __getattr__(name: str) -> Callable[[], JobTrainer.Config]:
    if name not in catalog.CATALOG:
        raise AttributeError(f"module {__name__} has no config {name}")
    return lambda: _launched(name)


def __dir__() -> list[str]:  # TorchTitan names them where it knows none of a name
    return list(catalog.CATALOG)


def _launched(name: str) -> JobTrainer.Config:
    if folder := os.environ.get(handover.OVERLAY_VARIABLE):
        refuse_other_modules(Path(folder))
    job = catalog.find(
        name, layers=_number(handover.LAYERS_VARIABLE), experts=_number(handover.EXPERTS_VARIABLE)
    ).on(_number("WORLD_SIZE") or 1)
    if job.tokenizer_vocab:
        job = job.cut(vocab=_number(handover.VOCAB_VARIABLE))
    return trainer_config(job, tokenizer=os.environ.get(handover.TOKENIZER_VARIABLE, "./tokenizer"))


def _number(variable: str) -> int | None:
    value = os.environ.get(variable)
    return int(value) if value else None
