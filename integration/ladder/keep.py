"""Keep a ladder as evidence, with what the lowest and the full set did in a step. No torch."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from integration.evidence import snapshot, trace
from integration.ground.files import replace_all
from integration.ladder.layout import KEPT_SNAPSHOT, KEPT_TRACE
from integration.ladder.result import Ladder
from integration.ladder.rungs import SETS, Rung


def keep(ladder: Ladder, wanted: Sequence[Rung], traces: Path, folder: Path) -> list[Path]:
    """Write the ladder to ``folder``, and trim two rungs' ``traces`` beside it; return the files.

    The rungs are the first set that ran and the largest. Traces name the patches that they were
    made on; snapshots are bound by the ladder, with whose name theirs begins.

    Raises:
        UserError: a trace or snapshot cannot be read or trimmed, or nothing can be written.
    """
    name = "-".join(filter(None, ("ladder", ladder.config, ladder.label, where(ladder))))
    files = {f"{name}.json": ladder.packed()}
    for rung in _ends(ladder, wanted):
        recorded = traces / KEPT_TRACE.format(rung=rung.slug)
        if recorded.is_file():
            patches = {patch: ladder.patches[patch] for patch in rung.names}
            trimmed = trace.trimmed(recorded, patches, f"{ladder.command}: {rung.label}")
            files[f"trace-{name}-{rung.slug}.json.gz"] = trace.packed(trimmed)
        history = traces / KEPT_SNAPSHOT.format(rung=rung.slug)
        if history.is_file():
            trimmed = snapshot.trim(snapshot.read(history))
            files[f"{name}.{rung.slug}.snapshot.pickle.gz"] = snapshot.packed(trimmed)
    replace_all(folder, files)
    return [folder / file for file in files]


def _ends(ladder: Ladder, wanted: Sequence[Rung]) -> Iterator[Rung]:
    ran = [rung for rung in wanted if rung.kind in SETS and ladder.row(rung).status == "ok"]
    if ran:
        most = max(ran, key=lambda rung: len(rung.names))
        yield from dict.fromkeys((ran[0], most))


def where(ladder: Ladder) -> str:
    """Return the machine's short name: ``cpu``, or ``h200x2`` for two ranks on H200s."""
    if not ladder.machine.get("gpus"):
        return "cpu"
    model = str(ladder.machine["gpu"]).partition(",")[0].lower()
    words = [word for word in re.split(r"[\s-]+", model) if re.search(r"\d", word)]
    return f"{words[0] if words else 'gpu'}x{ladder.ranks}"
