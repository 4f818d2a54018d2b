"""Ladders put together and in order before anything is drawn.

A ladder of one rung (`--only full`) is a figure with nothing beside it. Those of one job that
differ in TorchTitan's options alone are one record, whose rungs are named by the ladders' labels.
"""

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
# What members of one record may differ in. Not in steps, versions or patches: beside each other,
# their medians are to say what the options do.
FREE = {"command", "date", "label", "measured_patches", "options", "published", "rungs"}


def merged(records: Sequence[Record]) -> list[Record]:
    """Return ladders with those of one rung merged where they can be, in the order to be read.

    A merged record has ``members``, the records that it is made of, and ``alone``, the label that
    their rungs have in common. Each of its rungs has ``options``: those that not all have.
    """
    groups: dict[str, list[Record]] = {}
    for number, record in enumerate(records):
        groups.setdefault(_job(record) or str(number), []).append(record)
    found = [_merge(group) if len(group) > 1 else group[0] for group in groups.values()]
    return sorted(found, key=_place)


def members(record: Record) -> Sequence[Record]:
    """Return the ladders that ``record`` is made of, as they were measured."""
    return record.get("members", [record])


def settings(options: Sequence[str]) -> list[str]:
    """Return each option with its value: ``['--a', 'b', '--c', 'd:e']`` -> ``['--a b', '--c',
    'd:e']``; tyro's choice of a class, ``field:class``, stands alone."""
    found: list[str] = []
    open_flag = False
    for word in options:
        if open_flag and not word.startswith("--") and ":" not in word:
            found[-1] += f" {shlex.quote(word)}"
        else:
            found.append(shlex.quote(word))
        open_flag = word.startswith("--") and "=" not in word
    return found


def _job(record: Record) -> str | None:
    """Return what members of one record have in common, or None for a ladder of several rungs."""
    if len(record["rungs"]) != 1:
        return None
    same = {key: value for key, value in record.items() if key not in FREE}
    return json.dumps([same, record["rungs"][0]["label"]], sort_keys=True)


def _merge(group: Sequence[Record]) -> Record:
    """Return one record of ``group``, the slowest rung first; one that did not run is slowest."""
    found = {id(record): settings(record.get("options", ())) for record in group}
    in_all = Counter(setting for each in found.values() for setting in dict.fromkeys(each))
    rungs = []
    for record in group:
        (rung,) = record["rungs"]
        own = [s for s in found[id(record)] if in_all[s] < len(group)]
        label = record.get("label") or " ".join(found[id(record)]) or rung["label"]
        rungs.append((rung | {"label": label, "options": own}, record))
    rungs.sort(key=lambda pair: pair[0]["median"].get("tokens_s_gpu", 0.0))
    return {
        **group[0],
        "label": "",
        "date": " and ".join(sorted({record["date"] for record in group})),
        "alone": group[0]["rungs"][0]["label"],
        "rungs": [rung for rung, _ in rungs],
        "members": [record for _, record in rungs],
    }


def _place(record: Record) -> tuple[bool, bool, bool]:
    """Order: GPUs before CPUs; then ladders of several rungs, those merged, those of one rung."""
    return not record["machine"]["gpus"], len(record["rungs"]) == 1, "members" in record
