"""TorchTitan's DCP checkpoint manager, which also loads what another number of ranks saved."""

from dataclasses import dataclass

import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpointer.base import DATALOADER
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.tools.logging import logger


class ReshardingCheckpointManager(CheckpointManager):
    """Leaves the data position out when the checkpoint comes from another data-parallel degree.

    Everything else is resharded by DCP. The pin's data loader keeps one position a data-parallel
    rank, which cannot be redistributed (it asserts, or DCP misses a key): the data then starts
    from the beginning, with a warning.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    def _load(self, step: int = -1) -> bool:
        load_step = self._find_load_step() if step == -1 else step
        if load_step > 0 and DATALOADER not in self.exclude_from_loading:
            saved = self._saved_data_ranks(self._create_checkpoint_id(load_step))
            now = self.states[DATALOADER].dp_world_size
            if saved not in (0, now):
                logger.warning(
                    f"The checkpoint of step {load_step} was saved by {saved} data-parallel ranks "
                    f"and is loaded by {now}: all is restored but the position in the data, "
                    "which starts from the beginning."
                )
                self.exclude_from_loading = [*self.exclude_from_loading, DATALOADER]
        return super()._load(step)

    @staticmethod
    def _saved_data_ranks(checkpoint: str) -> int:
        try:
            metadata = dcp.FileSystemReader(checkpoint).read_metadata()
        except FileNotFoundError:  # super()._load says so
            return 0
        prefix = f"{DATALOADER}.dp_rank_"
        return sum(key.startswith(prefix) for key in metadata.state_dict_metadata)
