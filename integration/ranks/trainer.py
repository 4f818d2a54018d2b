"""TorchTitan's trainer, which also ends at a step boundary when the scheduler asks for it."""

import os
import signal
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from integration.ground import files, owner, processes
from integration.ground.errors import UserError
from integration.ground.machine import peak_resident_set
from integration.jobs import checkpoints
from integration.jobs.handover import END_FILE, OVERLAY_VARIABLE
from integration.patchset import overlay
from integration.ranks.host_check import check_host_memory, checked

# What schedulers send. Where ranks were sent different ones, the higher number is named.
STOPS = (signal.SIGTERM, signal.SIGUSR1)
# What ranks have to save once torchrun, which would end them, is gone itself.
ORPHAN_SECONDS = 60


class JobTrainer(Trainer):
    """Adds to ``Trainer``: an agreed stop with a checkpoint, a record of how the run ended, a look
    at host memory before any is taken, a hold on the run's folder, and checks that the newest
    checkpoint is whole and the code the overlay's.

    SIGTERM and SIGUSR1 only set a flag. Before each step all ranks reduce the flag over a gloo
    group of their own, on the host: no device is synchronised, and a dead peer breaks the reduction
    at once. So a checkpoint is written only where every rank is alive and at the same step. (When a
    peer dies, torchrun sends SIGTERM to the survivors as well: their next reduction fails, and
    they end without saving.)
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def __init__(self, config: Config) -> None:
        self._stop_asked = 0  # the signal's number
        self._stopped = False
        self._start_step: int | None = None
        # The dry-run modes of TorchTitan have one process and no peer to agree with: no group.
        self._control: dist.ProcessGroup | None = None
        for signum in STOPS:
            signal.signal(signum, self._ask_stop)
        self._hold = owner.join(Path(config.dump_folder))
        first = os.environ.get("RANK", "0") == "0"
        renew = self._hold.renew if self._hold and first else lambda: None
        processes.end_with_parent(ORPHAN_SECONDS, renew)
        if config.model_spec is not None:
            config.model_spec = checked(
                config.model_spec,
                pipeline=config.parallelism.pipeline_parallel_degree > 1,
                check=lambda parts: check_host_memory(parts, config, self._control),
            )
        super().__init__(config)

    def init_distributed(self) -> ParallelDims:
        parallel_dims = super().init_distributed()
        if self.config.comm.mode == "default":
            timeout = timedelta(seconds=self.config.comm.init_timeout_seconds)
            self._control = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))
        self._clear_folder()
        return parallel_dims

    def _clear_folder(self) -> None:
        """Remove what an attempt has left that torchrun or a scheduler stopped and starts anew.

        Raises:
            UserError: there are checkpoints, and none is whole. On all ranks.
        """
        said: list[list[str] | UserError] = [[]]
        if dist.get_rank() == 0:
            run = Path(self.config.dump_folder)
            (run / END_FILE).unlink(missing_ok=True)
            folder = run / getattr(self.config.checkpoint, "folder", "checkpoint")
            try:
                said[0] = checkpoints.set_damaged_aside(folder)
                checkpoints.remove_cut_off(folder)
            except UserError as error:
                said[0] = error
        if self._control is not None:
            dist.broadcast_object_list(said, src=0, group=self._control)
        if isinstance(said[0], UserError):
            raise said[0]
        for sentence in said[0] if dist.get_rank() == 0 else ():
            logger.warning(sentence)

    def _ask_stop(self, signum: int, frame: object) -> None:
        self._stop_asked = signum

    def should_continue_training(self) -> bool:
        if self._start_step is None:  # asked first after a checkpoint was loaded
            self._start_step = self.step
            if folder := os.environ.get(OVERLAY_VARIABLE):
                overlay.refuse_other_modules(Path(folder))
        if not super().should_continue_training():
            return False
        if not self._stop_agreed():
            return True
        self._stopped = True
        self._save_where_stopped()
        return False

    def _stop_agreed(self) -> bool:
        flag = torch.tensor(self._stop_asked, dtype=torch.int32)
        if self._control is not None:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._control)
        self._stop_asked = int(flag)
        return self._stop_asked != 0

    def _save_where_stopped(self) -> None:
        checkpoint = self.config.checkpoint
        # A checkpoint is never written over itself: cut off, it would take the last good one along.
        saved = (
            self.step == self._start_step
            or self.step % checkpoint.interval == 0
            or (self.step == 1 and checkpoint.enable_first_step_checkpoint)
        )
        if checkpoint.enable and not saved:
            # A run that is to go on needs all of its state, whatever the config keeps at the end.
            manager = cast(CheckpointManager, self.checkpointer)
            manager.last_save_model_only = False
            manager.save(self.step, last_step=True)
        logger.info(f"Stopped by {signal.Signals(self._stop_asked).name} after step {self.step}.")

    def train(self) -> None:
        """Train; write the last step, whether it was a stop, and each rank's peak host memory."""
        super().train()
        peak = peak_resident_set()
        peaks = [peak] * dist.get_world_size()
        if self._control is not None:
            dist.all_gather_object(peaks, peak, group=self._control)
        if dist.get_rank() == 0:
            end = {"step": self.step, "stopped": self._stopped, "peak_host_bytes": peaks}
            files.write_json(Path(self.config.dump_folder) / END_FILE, end)
