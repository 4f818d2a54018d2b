"""What a dry run is asked for, as the command hands it to its process. No torch here."""

import json
import time
from dataclasses import dataclass, field, fields
from pathlib import Path

from tyro.conf import Suppress

from integration.ground.errors import UserError
from integration.ground.options import Config, Without, at_least
from integration.jobs import catalog
from integration.jobs.spec import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One rank of a job, as the command hands it to its process."""

    config: Config
    rank: int = 0
    """The rank that is built."""
    world: int | None = None
    """The number of ranks of the job; the config's own if none is given."""
    layers: int | None = None
    """Build only so many layers, for a quicker look."""
    experts: int | None = None
    """Build only so many experts."""
    placements: bool = False
    """Stop before the step: show how the parameters are placed."""
    without: Without = ()
    started: Suppress[float] = field(default_factory=time.time)  # seconds since the epoch

    def __post_init__(self) -> None:
        at_least(0, self, "rank")
        at_least(1, self, "world", "layers", "experts")

    def job(self) -> JobSpec:
        """Return the job.

        Raises:
            UserError: the config is unknown, the layout impossible, or the rank not there.
        """
        job = catalog.find(self.config)
        job = job.on(self.world or job.ranks)
        job = catalog.cut(job, layers=self.layers, experts=self.experts)
        if job.fp8:
            plain = job.name.removesuffix("_fp8")
            raise UserError(
                f"{job.name} multiplies in FP8, which a CPU has not; its placements and traffic "
                f"are those of {plain}: integration dryrun {plain}"
            )
        job.check()
        if self.rank >= job.ranks:
            raise UserError(
                f"--rank {self.rank} is not there: {job.name} on {job.ranks} ranks has ranks 0 to "
                f"{job.ranks - 1}; name one of them, or more ranks with --world"
            )
        return job

    def write(self, path: Path) -> None:
        """Write what was asked, without the options that a verb adds."""
        asked = {field.name: getattr(self, field.name) for field in fields(Request)}
        path.write_text(json.dumps(asked))

    @classmethod
    def read(cls, path: Path) -> "Request":
        values = json.loads(path.read_text())
        return cls(**values | {"without": tuple(values["without"])})
