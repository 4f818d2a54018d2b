"""Run one contribution's benchmark on its overlay; say and keep what it measured, and on what."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.table import Table
from tyro.conf import Positional

from integration.bench import peers as installed
from integration.bench.catalog import Bench, Peer, default_peers, find, peers
from integration.evidence import record as evidence
from integration.evidence.effect import FORMS
from integration.ground import files, paths, terminal
from integration.ground.errors import UserError
from integration.ground.machine import gpu_count
from integration.ground.options import Rest
from integration.patchset import overlay, repository
from integration.patchset.patch import Contribution


@dataclass(frozen=True, slots=True)
class Request:
    """Measure the contribution NAME on its overlay, beside the published packages of its kind.

    What follows `--` goes to its bench.py.
    """

    name: Positional[str | None] = None
    """The contribution."""
    options: Rest = ()
    smoke: bool = False
    """Run on tiny sizes on a CPU, to see whether the benchmark runs. It proves nothing."""
    record: bool = False
    """Keep the figures as evidence of the contribution."""
    label: str | None = None
    """With --record: the name of the evidence file; the machine's if none is given."""
    list: bool = False
    """Show all benchmarks and peers instead."""
    install_peers: bool = False
    """Install the packages that are compared with instead: those of NAME, or all."""

    def __post_init__(self) -> None:
        if self.name is None and not (self.list or self.install_peers):
            raise UserError(
                "expected the name of a contribution, got none; nothing was measured: "
                "`integration bench --list` shows all benchmarks"
            )
        if self.label and not self.record:
            raise UserError(
                f"expected --record with --label {self.label}, got --label alone; it names the "
                "evidence file, and none would be written: add --record"
            )
        if self.smoke and self.record:
            raise UserError(
                f"expected --smoke or --record, got both; a try of {self.name} on tiny sizes "
                "proves nothing and was not started: leave one out"
            )

    def run(self) -> None:
        if self.list:
            installed.show(default_peers())
        if self.install_peers:
            installed.install_all(self.name, default_peers())
        if not self.list and not self.install_peers:
            run(self)


def run(request: Request) -> None:
    """Measure, print one table, and keep the figures; as evidence where that was asked for.

    Raises:
        UserError: no such benchmark, the wrong machine for it, or it failed.
    """
    (contribution,) = repository.find(repository.load(), [request.name or ""])
    bench = find(contribution)
    gpus = _gpus(bench, request)
    folder = default_peers()
    mine = [peer for peer in peers() if peer.bench == bench.name]
    reasons = {peer.title: installed.why_not(peer, folder) for peer in mine}
    usable = [peer for peer in mine if not reasons[peer.title] and not request.smoke]

    measured = _measure(contribution, bench, request, usable, folder, gpus)
    # Peers that cannot share bench.py's process run on the pinned packages, not on our overlay: as
    # they are published.
    others = {
        p.title: _call(
            [sys.executable, str(contribution.folder / p.program)],
            {**os.environ, "PYTHONPATH": str(p.folder(folder))},
        )
        for p in usable
        if p.program
    }
    took_part = "left out of a try" if request.smoke else "took part"
    results = {
        "patches": {c.name: c.sha256 for c in repository.select(repository.load(), [bench.name])},
        "peers": {title: reason or took_part for title, reason in reasons.items()}
        | {title: told for title, told in others.items() if isinstance(told, str)},
        "environment": dict(bench.environment),
        **measured,
        **{title: told for title, told in others.items() if not isinstance(told, str)},
    }
    _show(contribution, bench, request, results)


def _gpus(bench: Bench, request: Request) -> int:
    """Return how many GPUs it is measured on, and say so where it is meant for more.

    Raises:
        UserError: it cannot run with those that are here.
    """
    if request.smoke and bench.smoke is None:
        raise UserError(
            f"{bench.name} measures kernels that only a GPU has, and there is no try of it "
            f"without one: run `integration bench {bench.name}` on a machine with a GPU"
        )
    there = gpu_count()
    if not request.smoke and there < (bench.least_gpus or bench.gpus):
        instead = f", or try `integration bench {bench.name} --smoke` here" if bench.smoke else ""
        raise UserError(
            f"{bench.name} is measured on {bench.needs} (CUDA), and torch finds {there or 'none'} "
            f"here; nothing was measured: run it on such a machine{instead}"
        )
    if not request.smoke and there < bench.gpus:
        print(f"{bench.name} is meant for {bench.gpus} GPUs; it is measured on the {there} here")
    return min(there, bench.gpus)


def command(
    contribution: Contribution,
    bench: Bench,
    request: Request,
    usable: Sequence[Peer],
    folder: Path,
    fields: Mapping[str, Path | int],
) -> list[str]:
    """Return the line that starts bench.py; what the user adds comes last, so it wins.

    Args:
        fields: what stands for ``{overlay}``, ``{base}`` and ``{gpus}`` in benches.toml.
    """
    script = str(contribution.folder / "bench.py")
    line = [sys.executable]
    if bench.ranks:
        line += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={bench.ranks}"]
    given = (bench.smoke or ()) if request.smoke else bench.arguments
    given = [part.format_map(fields) for part in given]
    for peer in usable:
        given += [part.format(folder=peer.folder(folder)) for part in peer.arguments]
    return [*line, script, *given, *request.options]


def _measure(
    contribution: Contribution,
    bench: Bench,
    request: Request,
    usable: Sequence[Peer],
    folder: Path,
    gpus: int,
) -> dict:
    patched = overlay.build([bench.name])
    built = {"overlay": patched, "base": overlay.build([bench.base]) if bench.base else patched}
    fields = {key: o.path for key, o in built.items() if o.path} | {"gpus": gpus}
    line = command(contribution, bench, request, usable, folder, fields)
    behind = [str(peer.folder(folder)) for peer in usable if peer.importable]
    env = {
        **os.environ,
        **bench.environment,
        "PYTHONPATH": patched.pythonpath(os.pathsep.join(behind)),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "HF_HUB_OFFLINE": "1",
    }
    told = _call(line, env)
    if isinstance(told, str):
        raise UserError(
            f"expected one JSON object from {bench.name}'s bench.py, found: {told}; nothing was "
            f"measured: repeat it with PYTHONPATH={patched.path} {shlex.join(line)}",
            exit_code=1,
        )
    return told


def _call(line: Sequence[str], env: Mapping[str, str]) -> dict | str:
    """Run a script to its end, its progress on this terminal; return its JSON, or what went wrong.

    The object is the last thing on its standard output; libraries may have said something before.
    """
    done = subprocess.run(
        line, env=env, stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        return f"exit code {done.returncode}, and what it said above"
    start = done.stdout.find("\n{") + 1 if not done.stdout.startswith("{") else 0
    try:
        return dict(json.loads(done.stdout[start:]))
    except (ValueError, TypeError) as error:
        return f"{error!r} in `{done.stdout[:200]}`"


def _show(contribution: Contribution, bench: Bench, request: Request, results: dict) -> None:
    told = ["integration bench", bench.name, *["--smoke"] * request.smoke]
    told += ["--", shlex.join(request.options)] if request.options else []
    record = evidence.record(contribution, " ".join(told), results)
    console = terminal.console(160)
    console.print(f"[bold]{bench.name}[/]: {bench.what}", soft_wrap=True)
    console.print(table(results, bench.columns))
    machine = record["machine"]
    gpus = f"{machine['gpus']} x {machine['gpu']}" if machine["gpus"] else "no GPU"
    console.print(
        f"{gpus}, {machine['cores']} cores, torch {record['torch']}, "
        f"patch {contribution.sha256[:12]}"
    )
    for title, state in [*results["peers"].items(), *cannot(results)]:
        console.print(f"{title}: {state}", soft_wrap=True)
    if request.record:
        file = evidence.write(
            contribution,
            request.label or f"bench-{evidence.short(machine)}",
            record["command"],
            results,
        )
        console.print(f"evidence: {file.relative_to(paths.REPO)}", soft_wrap=True)
        return
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    file = paths.outputs_dir() / "bench" / f"{bench.name}-{stamp}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(file, record, indent=1)
    console.print(f"figures: {file}", soft_wrap=True)


def cannot(results: object) -> Iterator[tuple[str, str]]:
    """Yield ``(who, why)`` of what a bench.py tried and could not run, wherever it says so."""
    if isinstance(results, dict):
        for key, value in results.items():
            if key in ("cannot_run", "failed") and isinstance(value, dict):
                yield from value.items()
            else:
                yield from cannot(value)
    elif isinstance(results, list):
        for item in results:
            yield from cannot(item)


def table(results: Any, columns: Mapping[str, str]) -> Table:
    """Return a row for each object in ``results`` that has one of ``columns``."""
    found = list(rows(results, tuple(columns)))
    # What all rows share says nothing.
    shared = set.intersection(*(set(path) for path, _ in found)) if found else set()
    used = [c for c in columns if any(c in figures for _, figures in found)]
    shown = Table("")
    for column in used:
        shown.add_column(column, justify="right")
    for path, figures in found:
        label = " · ".join(part for part in path if part not in shared) or "measured"
        cells = (figures.get(column) for column in used)
        shown.add_row(
            label,
            *(
                "" if value is None else FORMS[columns[column]](value)
                for column, value in zip(used, cells, strict=True)
            ),
        )
    return shown


def rows(node: Any, columns: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], dict[str, float]]]:
    """Yield ``(where it stands, its figures)`` for each object that has one of ``columns``.

    A column may also be an object of its own, ``{"seconds": {"ours": 1.0, "theirs": 2.0}}``: then
    each of its entries is a row.
    """
    if isinstance(node, list):
        for item in node:
            for path, figures in rows(item, columns):
                yield (_title(item), *path), figures
    elif isinstance(node, dict):
        figures = {c: node[c] for c in columns if _is_number(node.get(c))}
        if figures:
            yield (), figures
        for key, value in node.items():
            if key in columns and isinstance(value, dict):
                for name, single in value.items():
                    if _is_number(single):
                        yield (name,), {key: single}
            else:
                for path, inner in rows(value, columns):
                    yield (key, *path), inner


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _title(item: Any) -> str:
    """Name an item of a list by its whole numbers: ``8 x 1792 x 6144``."""
    values = item.values() if isinstance(item, dict) else ()
    return " x ".join(str(v) for v in values if isinstance(v, int) and not isinstance(v, bool))
