"""A cluster as Slurm sees it: launch settings, read from a TOML file.

The files beside this module are the known clusters; ``--cluster`` also takes a file of one's own.
Every text of a file ends up in a shell script, so each must be of a form that needs no quoting;
the values and reasons of environment variables are free, but are one line each.
"""

import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from integration.ground.errors import UserError, nearest

KNOWN = Path(__file__).parent

WORD = re.compile(r"[A-Za-z0-9][\w.:@+-]*")
_FORMS = {
    "word": WORD,
    "module": re.compile(r"[A-Za-z0-9][\w.+/-]*"),
    "option": re.compile(r"--[a-z][a-z-]*(=[\w.,:/@%+-]+)?"),
    "address": re.compile(r"[\w.-]*(\{host\})?[\w.-]*"),
    "name": re.compile(r"[A-Z_][A-Z0-9_]*"),
    "line": re.compile(r"[^\x00-\x1f\x7f]+"),
}


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable and why it is set."""

    name: str
    value: str
    why: str

    def __post_init__(self) -> None:
        _require("name of an environment variable", self.name, "name")
        _require(f"value of {self.name}", self.value, "line")
        _require(f"reason of {self.name}", self.why, "line")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What a job script must know of a cluster. Counts are of one node."""

    name: str
    partition: str
    account: str
    gpu: str  # "" where nodes have none
    gpus: int
    cores: int
    time_limit: str  # the longest that the partition grants
    interface: str  # of the fast network
    address: str = "{host}"  # a node's name on the fast network
    save_seconds: int = 600  # a step and a checkpoint, before Slurm ends the job
    modules: tuple[str, ...] = ()
    options: tuple[str, ...] = ()  # further ones of sbatch
    large_from: int = 0  # nodes from which on the queue of large jobs is asked for; 0: never
    large_qos: str = ""
    environment: tuple[Variable, ...] = ()

    def __post_init__(self) -> None:
        for field in ("name", "partition", "account", "interface"):
            _require(field, getattr(self, field), "word")
        for field in ("gpu", "large_qos"):
            if getattr(self, field):
                _require(field, getattr(self, field), "word")
        _require("address", self.address, "address")
        for module in self.modules:
            _require("modules", module, "module")
        for option in self.options:
            _require("options", option, "option")
        for field, least in (("gpus", 0), ("cores", 1), ("save_seconds", 60), ("large_from", 0)):
            value = getattr(self, field)
            if type(value) is not int or value < least:
                raise ValueError(f"{field} must be an integer of at least {least}, got {value!r}")
        if bool(self.gpus) != bool(self.gpu):
            raise ValueError(f"gpus and gpu must both be given, got {self.gpus} and {self.gpu!r}")
        if bool(self.large_from) != bool(self.large_qos):
            raise ValueError(
                "large_from and large_qos must both be given, "
                f"got {self.large_from} and {self.large_qos!r}"
            )
        seconds(self.time_limit)


def seconds(time: str) -> int:
    """Return Slurm's ``[D-]HH:MM:SS`` in seconds.

    Raises:
        ValueError: it is of another form.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", time)
    if match is None:
        raise ValueError(f"a time must be [DAYS-]HH:MM:SS, got {time!r}")
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def known() -> list[str]:
    """Return the names of the clusters whose files are beside this module."""
    return sorted(file.stem for file in KNOWN.glob("*.toml"))


def load(name: str) -> Cluster:
    """Return the known cluster ``name``, or the one of the file ``name``.

    Raises:
        UserError: there is none, or the file is not as it must be.
    """
    path = Path(name) if name.endswith(".toml") else KNOWN / f"{name}.toml"
    if not name.endswith(".toml") and name not in known():
        raise UserError(
            f"unknown cluster {name!r}{nearest(name, known())}; a file of your own ends in .toml"
        )
    try:
        return _cluster(tomllib.loads(path.read_text()))
    except (OSError, ValueError) as error:  # TOML's and Unicode's errors are ValueErrors
        raise UserError(f"{path} is not a cluster file: {error}") from None


def _cluster(values: dict[str, Any]) -> Cluster:
    names = {field.name for field in fields(Cluster)}
    required = {"name", "partition", "account", "gpu", "gpus", "cores", "time_limit", "interface"}
    if missing := sorted(required - set(values)):
        raise ValueError(f"{', '.join(missing)} is missing")
    for name in sorted(set(values) - names):
        raise ValueError(f"{name} is unknown{nearest(name, sorted(names))}")
    variables = values.pop("environment", {})
    arguments: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    return Cluster(
        **arguments,
        environment=tuple(_variable(name, entry) for name, entry in variables.items()),
    )


def _variable(name: str, entry: Any) -> Variable:
    if not isinstance(entry, dict) or set(entry) != {"value", "why"}:
        raise ValueError(f"environment.{name} must hold value and why, got {entry!r}")
    return Variable(name, entry["value"], entry["why"])


def _require(what: str, value: object, form: str) -> None:
    if not isinstance(value, str) or not _FORMS[form].fullmatch(value):
        raise ValueError(f"{what} must be {_IN_WORDS[form]}, got {value!r}")


_IN_WORDS = {
    "word": "letters, digits and _.:@+- only",
    "module": "letters, digits and _.+/- only",
    "option": "one option of sbatch, --NAME or --NAME=VALUE without spaces or quotes",
    "address": "a host name, in which {host} stands for the node's own",
    "name": "capital letters, digits and _ only",
    "line": "one line of text, and not empty",
}
