"""The benchmarks and the peers that there are, read from ``benches.toml`` and ``peers.toml``."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from integration.evidence.effect import FORMS, PAIRS
from integration.ground import paths
from integration.ground.errors import UserError
from integration.patchset.patch import Contribution

_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """How one contribution's bench.py is called; the fields are those of benches.toml."""

    name: str
    what: str
    columns: Mapping[str, str]  # field of the JSON -> form
    gpus: int = 0
    least_gpus: int | None = None
    ranks: int | None = None
    base: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    smoke: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.columns.values()) - (set(FORMS) - set(PAIRS))):
            raise ValueError(f"Bench.columns of {self.name} must be forms, got {unknown}")
        if self.gpus < 0 or (self.ranks is not None and self.ranks < 1):
            raise ValueError(f"Bench.gpus and Bench.ranks of {self.name} must count something")
        if self.least_gpus is not None and not 0 < self.least_gpus < self.gpus:
            raise ValueError(
                f"Bench.least_gpus of {self.name} must be from 1 to below its {self.gpus} gpus, "
                f"got {self.least_gpus}"
            )

    @property
    def needs(self) -> str:
        """The machine that it is measured on."""
        if not self.gpus:
            return "CPU"
        fewer = f", or {self.least_gpus}" if self.least_gpus else ""
        return f"{self.gpus} GPU{'s' * (self.gpus > 1)}{fewer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A published package that a benchmark compares with; the fields are those of peers.toml."""

    package: str
    version: str
    bench: str
    needs: Sequence[str] = ()
    arguments: Sequence[str] = ()
    importable: bool = False
    program: str | None = None
    title: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", f"{self.package} {self.version}")
        if bool(self.arguments) + self.importable + bool(self.program) != 1:
            raise ValueError(
                f"Peer {self.package} must have one of arguments, importable and program"
            )

    def folder(self, peers: Path) -> Path:
        """Return where it is installed below the folder of all peers."""
        return peers / self.package


def benches() -> dict[str, Bench]:
    """Return contribution -> its benchmark."""
    return {name: Bench(name=name, **told) for name, told in _read("benches.toml").items()}


def peers() -> tuple[Peer, ...]:
    """Return all peers."""
    return tuple(Peer(package=name, **told) for name, told in _read("peers.toml").items())


def find(contribution: Contribution) -> Bench:
    """Return the contribution's benchmark.

    Raises:
        UserError: it has none; the sentence says what there is instead.
    """
    known = benches()
    if contribution.name in known:
        return known[contribution.name]
    tests = ", ".join(file for file, _ in contribution.tests)
    raise UserError(
        f"{contribution.name} has no benchmark, as it claims no speed of its own: what it does is "
        f"shown by {tests} (`integration test {contribution.name}`), and what it does in the set "
        f"by `integration ladder`"
    )


def default_peers() -> Path:
    """Return where peers are installed unless another folder is named."""
    return paths.cache_dir() / "peers"


def _read(file: str) -> dict[str, dict]:
    return tomllib.loads((_HERE / file).read_text(encoding="utf-8"))
