"""A contribution's measured effect in one sentence, whose every figure is read from its evidence.

``evidence/effect.toml`` holds the sentence and says where its figures stand::

    sentence = "the step takes {step} than without, and keeps {memory}"

    [step]
    file = "h200.json"          # beside effect.toml
    at = "/patched/seconds"     # JSON pointer, RFC 6901
    than = "/pristine/seconds"  # what it is compared with, for `change` and `times`
    as = "change"               # one of FORMS

No figure is typed (a digit in the sentence is refused), so it cannot say other than the evidence.
Bad results are told as good ones are.
"""

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from integration.ground.errors import UserError
from integration.ground.units import change, seconds, size
from integration.patchset.patch import Contribution

NONE = "no figures: tests only"
FILE = "effect.toml"
PARITY = "parity-"  # evidence that nothing changed: no effect


FORMS: dict[str, Callable[[Any], str]] = {
    "bytes": size,
    "seconds": seconds,
    "milliseconds": lambda value: seconds(value / 1e3),
    "number": lambda value: f"{value:.4g}",
    "integer": lambda value: f"{value:.0f}",
    "shape": lambda value: " x ".join(map(str, value)),
    # Of a pair: at / than, and the other way round where less is better.
    "change": change,
    "times": lambda ratio: f"{1 / ratio:.3g} times",
}
PAIRS = ("change", "times")


def sentence(contribution: Contribution) -> str:
    """Return the sentence, or ``NONE`` where nothing but tests and parity was recorded.

    Raises:
        UserError: figures without a sentence, or one that names what is not in the evidence.
    """
    text, _ = _filled(contribution)
    return text


def markdown(contribution: Contribution) -> str:
    """Return the sentence with links to the evidence that its figures are from."""
    text, files = _filled(contribution)
    folder = f"{contribution.upstream}_contrib/{contribution.name}/evidence"
    links = ", ".join(f"[{Path(file).stem}]({folder}/{file})" for file in files)
    return f"{text} ({links})" if links else text


def at(document: Any, pointer: str) -> Any:
    """Return what a JSON pointer names; KeyError with the pointer where it names nothing."""
    found = document
    for part in pointer.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(part)] if isinstance(found, list) else found[part]
        except (KeyError, IndexError, ValueError, TypeError):
            raise KeyError(f"{pointer} (at {part})") from None
    return found


def _filled(contribution: Contribution) -> tuple[str, list[str]]:
    folder = contribution.folder / "evidence"
    shown = f"{contribution.upstream}_contrib/{contribution.name}/evidence"
    if not (folder / FILE).is_file():
        measured = [f.name for f in folder.glob("*.json") if not f.name.startswith(PARITY)]
        if measured:
            raise UserError(
                f"expected {shown}/{FILE} beside {min(measured)}, found none; the README cannot "
                f"say what was measured: write it, as integration/evidence/effect.py describes"
            )
        return NONE, []
    try:
        told = tomllib.loads((folder / FILE).read_text(encoding="utf-8"))
        text = told.pop("sentence")
        if re.search(r"\b\d", text):  # H200 is a name
            raise ValueError(f"a typed figure in `{text}`")
        read = {
            file: json.loads((folder / file).read_text(encoding="utf-8"))
            for file in {figure["file"] for figure in told.values()}
        }
        figures = {name: _figure(figure, read[figure["file"]]) for name, figure in told.items()}
        return text.format_map(figures), list(dict.fromkeys(f["file"] for f in told.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"expected {shown}/{FILE} to name figures of the evidence beside it, found: "
            f"{type(error).__name__}: {error}; the README cannot say what was measured: mend it, "
            f"then run `integration patches readme --write`"
        ) from None


def _figure(figure: dict[str, str], document: Any) -> str:
    form, value = figure["as"], at(document, figure["at"])
    if (form in PAIRS) != ("than" in figure):
        raise ValueError(f"`than` is for {' and '.join(PAIRS)}, and `as` is {form}")
    return FORMS[form](value / at(document, figure["than"]) if form in PAIRS else value)
