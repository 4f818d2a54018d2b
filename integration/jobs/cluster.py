"""A cluster, one TOML file: its hardware, and how its scheduler is asked for nodes.

The files in ``clusters`` are the known clusters; ``--cluster`` also takes a file of one's own,
which needs only the tables of what it is used for. Every text of ``[slurm]`` ends up in a shell
script, so each must be of a form that needs no quoting; the values and reasons of environment
variables are free, but are one line each.
"""

import math
import re
import tomllib
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from integration.ground.errors import UserError, nearest

FOLDER = Path(__file__).parent / "clusters"

WORD = re.compile(r"[A-Za-z0-9][\w.:@+-]*")
# What a text must match, and that in words.
_FORMS = {
    "line": (re.compile(r"[^\x00-\x1f\x7f]+"), "one line of text, and not empty"),
    "word": (WORD, "letters, digits and _.:@+- only"),
    "module": (re.compile(r"[A-Za-z0-9][\w.+/-]*"), "letters, digits and _.+/- only"),
    "name": (re.compile(r"[A-Z_][A-Z0-9_]*"), "capital letters, digits and _ only"),
    "time": (re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)"), "a time, [DAYS-]HH:MM:SS"),
    "option": (
        re.compile(r"--[a-z][a-z-]*(=[\w.,:/@%+-]+)?"),
        "one option of sbatch, --NAME or --NAME=VALUE without spaces or quotes",
    ),
    "address": (
        re.compile(r"[\w.-]*(\{host\})?[\w.-]*"),
        "a host name, in which {host} stands for the node's own",
    ),
}
Line, Word, Name = Annotated[str, "line"], Annotated[str, "word"], Annotated[str, "name"]
Module, Option = Annotated[str, "module"], Annotated[str, "option"]
Natural, Count = Annotated[int, 0], Annotated[int, 1]


class _Checked:
    """A dataclass that checks each value by its field's type, but for defaults.

    Raises:
        ValueError: one sentence, which begins with the field's name.
    """

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            if value != each.default:
                _check(each.name, value, each.type)


def _check(name: str, value: Any, kind: Any) -> None:
    base, *rule = get_args(kind) or (kind,)
    if base is str:
        pattern, words = _FORMS[rule[0]]
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise ValueError(f"{name} must be {words}, got {value!r}")
    elif base is int:
        if type(value) is not int or value < rule[0]:
            raise ValueError(f"{name} must be a whole number of at least {rule[0]}, got {value!r}")
    elif base is float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:  # NaN is in no range
            raise ValueError(f"{name} must be a positive and finite number, got {value!r}")
    elif get_origin(kind) is tuple:
        if not isinstance(value, tuple):
            raise ValueError(f"{name} must be a list, got {value!r}")
        for one in value:
            _check(name, one, base)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu(_Checked):
    """One GPU. ``matmul_tflops`` is what a bf16 product reaches, ``peak_tflops`` the data sheet's;
    ``attention_forward_tflops`` and ``attention_backward_tflops`` what attention reaches, of the
    FLOP that each has: the masked half does not count, and backward has 2.5 times forward's."""

    name: Line
    hbm_gib: float
    hbm_gb_s: float
    peak_tflops: float
    matmul_tflops: float
    attention_forward_tflops: float
    attention_backward_tflops: float
    context_gib: float
    fp8_tflops: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Host(_Checked):
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
class HostLink(_Checked):
    """Between a GPU and its host: C2C or PCIe. Both directions at once."""

    name: Line
    to_device_gb_s: float
    to_host_gb_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(_Checked):
    """Between GPUs: rate of one GPU in one direction, latency of one hop."""

    name: Line
    gb_s: float
    latency_us: float


@dataclass(frozen=True, slots=True)
class Variable(_Checked):
    """One environment variable and why it is set."""

    name: Name
    value: Line
    why: Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm(_Checked):
    """What a job script must know. ``cores`` are a node's."""

    partition: Word
    account: Word
    cores: Count
    time_limit: Annotated[str, "time"]  # the longest that the partition grants
    interface: Word  # of the fast network
    address: Annotated[str, "address"] = "{host}"  # a node's name on the fast network
    save_seconds: Annotated[int, 60] = 600  # a step and a checkpoint, before Slurm ends the job
    modules: tuple[Module, ...] = ()
    options: tuple[Option, ...] = ()  # further ones of sbatch
    large_from: Natural = 0  # nodes from which on the queue of large jobs is asked for; 0: never
    large_qos: Word = ""
    environment: tuple[Variable, ...] = ()

    def __post_init__(self) -> None:
        _Checked.__post_init__(self)
        if bool(self.large_from) != bool(self.large_qos):
            raise ValueError(
                "large_from and large_qos must both be given, "
                f"got {self.large_from} and {self.large_qos!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware(_Checked):
    """What the planner counts with."""

    nodes: Count
    gpu: Gpu
    host: Host
    host_link: HostLink
    node: Link
    network: Link
    nccl_gib_a_group: float


# Where the file has what is not a key or table of the field's name.
_KEYS = {
    "host_link": "link.host",
    "node": "link.node",
    "network": "link.network",
    "nccl_gib_a_group": "nccl.gib_a_group",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(_Checked):
    """A cluster; ``gpus_a_node`` is 0 where nodes have none.

    The attributes of ``hardware`` are read from here, and ``slurm`` is the scheduler: each raises a
    UserError where the file lacks it, so a plan needs no scheduler and a launch no hardware.
    """

    name: Word
    file: Path
    gpus_a_node: Natural
    hardware: Hardware | None
    scheduler: Slurm | None
    lacks: tuple[Line, ...]  # what a plan needs and the file has not

    @property
    def known(self) -> bool:
        """Whether ``--cluster`` takes its name."""
        return self.file.parent == FOLDER

    @property
    def slurm(self) -> Slurm:
        if self.scheduler is None:
            raise UserError(
                f"{self.name} has no table [slurm] in {self.file}: jobs can be planned for it, and "
                f"not launched; add one as in {FOLDER / 'jupiter.toml'}"
            )
        return self.scheduler

    @property
    def planned(self) -> Hardware:
        if self.hardware is None:
            raise UserError(
                f"no plan can be made for {self.name}: {self.file} has no "
                f"{', '.join(self.lacks)}; add what is missing as in {FOLDER / 'jupiter.toml'}"
            )
        return self.hardware

    def with_hardware(self, **changes: Any) -> "Cluster":
        return replace(self, hardware=replace(self.planned, **changes))

    @property
    def nodes(self) -> int:
        return self.planned.nodes

    @property
    def gpu(self) -> Gpu:
        return self.planned.gpu

    @property
    def host(self) -> Host:
        return self.planned.host

    @property
    def host_link(self) -> HostLink:
        return self.planned.host_link

    @property
    def node(self) -> Link:
        return self.planned.node

    @property
    def network(self) -> Link:
        return self.planned.network

    @property
    def nccl_gib_a_group(self) -> float:
        return self.planned.nccl_gib_a_group


def seconds(time: str) -> int:
    """Return Slurm's ``[D-]HH:MM:SS`` in seconds.

    Raises:
        ValueError: it is of another form.
    """
    match = _FORMS["time"][0].fullmatch(time)
    if match is None:
        raise ValueError(f"a time must be [DAYS-]HH:MM:SS, got {time!r}")
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def known() -> list[str]:
    """Return the names of the clusters that come with the package."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def load(name: str) -> Cluster:
    """Return the cluster called ``name``, or described by the file ``name`` (ending in .toml).

    Raises:
        UserError: no such cluster or file, or a value in it is missing, unknown or not as it must
            be. What only a plan or only a launch needs may be left out.
    """
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not name.endswith(".toml") and name not in known():
        raise UserError(
            f"unknown cluster {name!r}{nearest(name, known())}; a file of your own ends in .toml"
        )
    try:
        return _cluster(path, tomllib.loads(path.read_text()))
    except OSError as error:
        raise UserError(f"cluster file {path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # TOML's and Unicode's errors are ValueErrors
        raise UserError(f"cluster file {path} is not as it must be: {error}") from None


def _cluster(path: Path, values: dict[str, Any]) -> Cluster:
    for table in ("link", "nccl"):
        inside = values.pop(table, {})
        values |= {f"{table}.{key}": value for key, value in _table(table, inside).items()}
    needs = {_KEYS.get(each.name, each.name): each for each in fields(Hardware)}
    _only(values, {"name", "gpus_a_node", "slurm", *needs}, "")
    lacks = tuple(key for key in needs if key not in values)
    scheduler = _slurm(values["slurm"]) if "slurm" in values else None
    for key in ("name", "gpus_a_node"):
        if key not in values:
            raise ValueError(f"{key} is missing")
    _check("gpus_a_node", values["gpus_a_node"], Natural if scheduler else Count)
    hardware = None
    if not lacks and values["gpus_a_node"]:
        read = {
            each.name: values[key] if each.name in _PLAIN else _read(each.type, values[key], key)
            for key, each in needs.items()
        }
        hardware = Hardware(**read)
    return Cluster(
        name=values["name"],
        file=path,
        gpus_a_node=values["gpus_a_node"],
        hardware=hardware,
        scheduler=scheduler,
        lacks=lacks or ("GPU a node",),
    )


_PLAIN = ("nodes", "nccl_gib_a_group")


def _slurm(values: Any) -> Slurm:
    values = dict(_table("slurm", values))
    entries = _table("slurm.environment", values.pop("environment", {}))
    variables = []
    for name, entry in entries.items():
        if not isinstance(entry, dict) or set(entry) != {"value", "why"}:
            raise ValueError(f"slurm.environment.{name} must hold value and why, got {entry!r}")
        variables.append(_read(Variable, {"name": name, **entry}, f"slurm.environment.{name}"))
    return _read(Slurm, {**values, "environment": tuple(variables)}, "slurm")


def _read(into: Any, values: Any, where: str) -> Any:
    """Return the dataclass ``into`` with the values of the table ``where``."""
    values = _table(where, values)
    _only(values, {each.name for each in fields(into)}, f"{where}.")
    for each in fields(into):
        if each.name not in values and each.default is MISSING:
            raise ValueError(f"{where}.{each.name} is missing")
    try:
        lists = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
        return into(**lists)
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from None


def _table(where: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ValueError(f"{where} must be a table, got {values!r}")
    return values


def _only(values: dict[str, Any], keys: set[str], prefix: str) -> None:
    for key in values:
        if key not in keys:
            raise ValueError(f"{prefix}{key} is unknown{nearest(key, sorted(keys))}")
