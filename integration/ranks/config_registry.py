"""Training configurations in TorchTitan's form: functions that return a ``Trainer.Config``.

``python -m torchtitan.train --module integration.ranks --config mini`` works under any launcher
that puts an overlay with ``cpu_device`` first (``integration env`` prints the line). What each
job is stands in ``catalog.py``. Our launcher hands over what is known only at launch through the
environment.
"""

import os
from pathlib import Path

from integration.jobs import catalog
from integration.jobs import handover as layout
from integration.patchset.overlay import refuse_other_modules
from integration.ranks.trainer import JobTrainer
from integration.ranks.trainer_config import trainer_config


def mini() -> JobTrainer.Config:
    return _launched("mini")


def mini_adamw() -> JobTrainer.Config:
    return _launched("mini_adamw")


def slice() -> JobTrainer.Config:
    return _launched("slice")


def jupiter_1t() -> JobTrainer.Config:
    return _launched("jupiter_1t")


def jupiter_1t_hsdp() -> JobTrainer.Config:
    return _launched("jupiter_1t_hsdp")


def leonardo_1t() -> JobTrainer.Config:
    return _launched("leonardo_1t")


def leonardo_1t_fp8() -> JobTrainer.Config:
    return _launched("leonardo_1t_fp8")


def leonardo_small() -> JobTrainer.Config:
    return _launched("leonardo_small")


def leonardo_mini() -> JobTrainer.Config:
    return _launched("leonardo_mini")


def _launched(name: str) -> JobTrainer.Config:
    if folder := os.environ.get(layout.OVERLAY_VARIABLE):
        refuse_other_modules(Path(folder))
    job = catalog.find(
        name, layers=_number(layout.LAYERS_VARIABLE), experts=_number(layout.EXPERTS_VARIABLE)
    ).on(_number("WORLD_SIZE") or 1)
    if job.tokenizer_vocab:
        job = job.cut(vocab=_number(layout.VOCAB_VARIABLE))
    return trainer_config(job, tokenizer=os.environ.get(layout.TOKENIZER_VARIABLE, "./tokenizer"))


def _number(variable: str) -> int | None:
    value = os.environ.get(variable)
    return int(value) if value else None
