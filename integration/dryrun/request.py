"""What a dry run is asked for, as the command hands it to its process. No torch here."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from integration.ground.errors import UserError
from integration.jobs import catalog
from integration.jobs.spec import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One rank of ``config`` on ``world`` ranks, None for those that it is written for.

    ``layers`` and ``experts`` cut the model; ``started`` is seconds since the epoch.
    """

    config: str
    rank: int
    world: int | None
    layers: int | None
    experts: int | None
    without: tuple[str, ...]
    placements_only: bool
    started: float

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
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Request":
        values = json.loads(path.read_text())
        return cls(**values | {"without": tuple(values["without"])})
