"""Shapes at the borders of a pipeline stage, which a fake group cannot ask its neighbour for."""

from typing import cast

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import _StageMeta, extract_tensor_metas
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from integration.jobs.spec import JobSpec


def describe_stages(schedule: PipelineScheduleSingle, job: JobSpec) -> None:
    """Tell this rank's stage what it gets and gives: tokens, or hidden states in bf16.

    Hidden states are cut by tensor parallelism between layers (sequence parallelism), and whole
    behind the last norm, in front of the chunked loss.
    """
    stage = cast(PipelineStage, schedule._stage)
    hidden = (1, job.seq_len // job.layout.tp, job.shape.hidden)
    inside = torch.empty(hidden, dtype=torch.bfloat16, device="meta", requires_grad=True)
    tokens = torch.empty((1, job.seq_len), dtype=torch.int64, device="meta")
    last = torch.empty(
        (1, job.seq_len, job.shape.hidden), dtype=torch.bfloat16, device="meta", requires_grad=True
    )
    stage._user_meta = _StageMeta(
        inputs=extract_tensor_metas((tokens if stage.is_first else inside,)),
        outputs=extract_tensor_metas((last if stage.is_last else inside,)),
    )
