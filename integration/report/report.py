"""Put the page together from what is kept as evidence, what is given, and what is planned."""

from collections.abc import Sequence
from datetime import date
from pathlib import Path

from integration.patchset import repository
from integration.report import contributions, ladder, memory, merge, page, runs, streams


def write(given: Sequence[Path], target: Path) -> None:
    """Write the report to ``target``.

    Args:
        given: runs' folders, and JSON files of ladders that are not kept as evidence.

    Raises:
        UserError: what is given is neither, or the page cannot be written.
    """
    ladders = {path: record for path in given if path.is_file() and (record := ladder.load(path))}
    folders = [path for path in given if path not in ladders]
    records = merge.merged([*ladder.recorded(), *ladders.values()])
    patches = repository.load()
    sections = [
        ladder.section(records),
        runs.section(records, folders),
        streams.section(streams.files(), records),
        memory.pools(records, patches),
        memory.budget(),
        contributions.section(patches),
    ]
    lead = (
        f"What was measured, planned and trained with {len(patches)} patches on the pinned PyTorch "
        f"and TorchTitan; {date.today()}."
    )
    page.write(target, "Patches for MoE pretraining: evidence", lead, sections)
