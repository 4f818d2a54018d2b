"""A cluster as data: what one GPU has, and how fast it reaches the others."""

import tomllib
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from integration.ground.errors import UserError, nearest

FOLDER = Path(__file__).parent / "clusters"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU. ``matmul_tflops`` is what a bf16 product reaches, ``peak_tflops`` the data sheet's;
    ``attention_forward_tflops`` and ``attention_backward_tflops`` what attention reaches, of the
    FLOP that each has: the masked half does not count, and backward has 2.5 times forward's."""

    name: str
    hbm_gib: float
    hbm_gb_s: float
    peak_tflops: float
    matmul_tflops: float
    attention_forward_tflops: float
    attention_backward_tflops: float
    context_gib: float
    fp8_tflops: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One GPU's host. ``memory_gib`` and ``newton_schulz_tflops`` (the CPU's rate in that) are one
    GPU's share; ``memory_gb_s`` is that of a memory which ``gpus`` GPUs share, and ``core_gb_s``
    what one core reads of it."""

    memory_gib: float
    memory_gb_s: float
    gpus: float
    core_gb_s: float
    newton_schulz_tflops: float
    base_gib: float

    def gb_s(self, ranks: int) -> float:
        """Return one rank's share of the memory's bandwidth in a job of ``ranks``."""
        return self.memory_gb_s / min(self.gpus, ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """Between a GPU and its host: C2C or PCIe. Both directions at once."""

    name: str
    to_device_gb_s: float
    to_host_gb_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Between GPUs: rate of one GPU in one direction, latency of one hop."""

    name: str
    gb_s: float
    latency_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """All of it, under the names of the file's tables."""

    name: str
    nodes: int
    gpus_a_node: int
    gpu: Gpu
    host: Host
    host_link: HostLink
    node: Link
    network: Link
    nccl_gib_a_group: float


def known() -> list[str]:
    """Return the names of the clusters that come with the planner."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def load(name: str) -> Cluster:
    """Return the cluster called ``name``, or described by the file ``name`` (ending in .toml).

    Raises:
        UserError: no such cluster or file, or a value in it is missing, unknown or not positive.
    """
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not name.endswith(".toml") and name not in known():
        raise UserError(f"unknown cluster {name}{nearest(name, known())}; or name a file.toml")
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise UserError(f"cluster file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"cluster file {path} is not TOML: {error}") from None
    return _cluster(_Table(path, "", values))


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of the file; takes values out by key and names what is wrong with them."""

    path: Path
    prefix: str
    values: dict[str, Any]

    def table(self, key: str) -> "_Table":
        found = self.values.get(key)
        if not isinstance(found, dict):
            raise UserError(f"cluster file {self.path} has no table [{self.prefix}{key}]")
        return _Table(self.path, f"{self.prefix}{key}.", found)

    def value(self, key: str, kind: type, default: Any = MISSING) -> Any:
        where = f"cluster file {self.path}: {self.prefix}{key}"
        if key not in self.values:
            if default is not MISSING:
                return default
            raise UserError(f"{where} is missing")
        found = self.values[key]
        if kind is str:
            if not isinstance(found, str):
                raise UserError(f"{where} must be text, got {found!r}")
            return found
        if isinstance(found, bool) or not isinstance(found, int if kind is int else (int, float)):
            what = "a whole number" if kind is int else "a number"
            raise UserError(f"{where} must be {what}, got {found!r}")
        if not found > 0 or found == float("inf"):  # "not" catches NaN
            raise UserError(f"{where} must be positive and finite, got {found}")
        return kind(found)

    def only(self, keys: set[str]) -> None:
        for key in self.values:
            if key not in keys:
                raise UserError(
                    f"cluster file {self.path}: {self.prefix}{key} is unknown"
                    f"{nearest(key, sorted(keys))}"
                )

    def read(self, into: type) -> Any:
        """Return a dataclass of text and numbers with this table's values."""
        found = {}
        for field in fields(into):
            kind = str if field.type is str else float
            found[field.name] = self.value(field.name, kind, field.default)
        self.only(set(found))
        return into(**found)


def _cluster(file: _Table) -> Cluster:
    file.only({"name", "nodes", "gpus_a_node", "gpu", "host", "link", "nccl"})
    links, nccl = file.table("link"), file.table("nccl")
    links.only({"host", "node", "network"})
    nccl.only({"gib_a_group"})
    return Cluster(
        name=file.value("name", str),
        nodes=file.value("nodes", int),
        gpus_a_node=file.value("gpus_a_node", int),
        gpu=file.table("gpu").read(Gpu),
        host=file.table("host").read(Host),
        host_link=links.table("host").read(HostLink),
        node=links.table("node").read(Link),
        network=links.table("network").read(Link),
        nccl_gib_a_group=nccl.value("gib_a_group", float),
    )
