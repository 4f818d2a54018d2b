"""One contribution's patch: its header, its trailers, and the files that it changes."""

import email.header
import email.parser
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from integration.ground import paths
from integration.patchset.pins import sha256

if TYPE_CHECKING:
    from unidiff import PatchedFile

_TRAILER = re.compile(r"^([A-Z][A-Za-z-]*):(?:\s+(.*))?$")


class MalformedPatchError(ValueError):
    """The bytes are not one `git format-patch` commit. ``line`` is 1-based in the file."""

    def __init__(self, line: int, expected: str, found: str) -> None:
        super().__init__(f"line {line}: expected {expected}, found {found}")
        self.line = line
        self.expected = expected
        self.found = found


@dataclass(frozen=True, slots=True)
class Trailer:
    """``key: value``, with the line of the patch file that it stands on."""

    key: str
    value: str
    line: int


@dataclass(frozen=True)
class Contribution:
    """One patch = one upstream pull request, as stored in ``patches/<upstream>/<name>.patch``."""

    name: str
    upstream: str
    path: Path
    data: bytes
    subject: str
    body: str  # without the trailers
    trailers: tuple[Trailer, ...]
    files: "tuple[PatchedFile, ...]"

    @cached_property
    def sha256(self) -> str:
        """Evidence and overlays are bound to this."""
        return sha256(self.data)

    @property
    def diff(self) -> bytes:
        """All that is not header and message, byte for byte."""
        return self.data[self.data.index(b"\ndiff --git ") + 1 :]

    @property
    def folder(self) -> Path:
        """Where the contribution's tests, benchmark and evidence are."""
        return paths.REPO / f"{self.upstream}_contrib" / self.name

    @property
    def shown(self) -> str:
        """The path of the patch below the repository's root."""
        return self.path.relative_to(paths.REPO).as_posix()

    def values(self, key: str) -> tuple[str, ...]:
        """Return the values of every trailer ``key``."""
        return tuple(trailer.value for trailer in self.trailers if trailer.key == key)

    @property
    def status(self) -> str:
        """Return the first word of ``Status:``, or ``?`` where there is none."""
        return next(iter(" ".join(self.values("Status")).split()), "?")

    @property
    def on_main(self) -> str:
        """Return the pull request or commit of ``Status: upstream``, empty for another status."""
        word, _, change = " ".join(self.values("Status")).partition(" ")
        return change.strip() if word == "upstream" else ""

    @property
    def requires(self) -> tuple[str, ...]:
        """Names that ``Requires:`` declares; not closed."""
        names = (name.strip() for value in self.values("Requires") for name in value.split(","))
        return tuple(name for name in names if name)

    @property
    def tests(self) -> tuple[tuple[str, str], ...]:
        """``(file in the contribution's folder, path in the upstream repository)`` a test file."""
        pairs = (value.partition("->") for value in self.values("Test"))
        return tuple((left.strip(), right.strip()) for left, _, right in pairs)

    @cached_property
    def old_paths(self) -> frozenset[str]:
        """Paths that must exist on the pin: changed, removed, or moved away from."""
        return frozenset(
            strip_prefix(file.source_file) for file in self.files if file.source_file != "/dev/null"
        )

    @cached_property
    def paths(self) -> frozenset[str]:
        """Every path that the patch reads or writes, new files included."""
        new = {
            strip_prefix(file.target_file) for file in self.files if file.target_file != "/dev/null"
        }
        return self.old_paths | new

    @property
    def added(self) -> int:
        """Lines that the patch adds."""
        return sum(file.added for file in self.files)

    @property
    def removed(self) -> int:
        """Lines that the patch removes."""
        return sum(file.removed for file in self.files)


def parse(name: str, upstream: str, path: Path, data: bytes) -> Contribution:
    """Read a stored patch.

    Raises:
        MalformedPatchError: with the line, what was expected there, and what was found.
    """
    from unidiff import PatchSet, UnidiffParseError

    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise MalformedPatchError(line, "UTF-8 text", f"byte {data[error.start]:#04x}") from None
    lines = text.split("\n")
    if not re.match(r"From [0-9a-f]{40} ", lines[0]):
        raise MalformedPatchError(
            1, "the first line of `git format-patch`: From <commit> ...", repr(lines[0])
        )
    diff = next((n for n, line in enumerate(lines) if line.startswith("diff --git ")), None)
    if diff is None:
        raise MalformedPatchError(len(lines), "a diff (a line `diff --git ...`)", "end of file")
    binary = next((n for n, s in enumerate(lines) if s.startswith("GIT binary patch")), None)
    if binary is not None:
        raise MalformedPatchError(binary + 1, "changes of text files only", "a binary patch")

    subject, message, first = _message("\n".join(lines[1:diff]))
    body, trailers = split_trailers(message, first + 1)
    try:
        files = tuple(PatchSet("\n".join(lines[diff:])))
    except UnidiffParseError as error:
        raise MalformedPatchError(*_broken_hunk(lines, diff), f"{error}") from None
    return Contribution(
        name=name,
        upstream=upstream,
        path=path,
        data=data,
        subject=subject,
        body=body,
        trailers=trailers,
        files=files,
    )


def pristine_paths(contributions: Sequence[Contribution]) -> set[str]:
    """Return the paths that ``contributions``, in series order, want of the pin itself.

    A file that one patch creates and a later one changes is not among them.
    """
    made: set[str] = set()
    wanted: set[str] = set()
    for contribution in contributions:
        wanted |= contribution.old_paths - made
        made |= contribution.paths - contribution.old_paths
    return wanted


def without_requirements(message: str, names: Collection[str]) -> str:
    """Return the message, or header of a patch, with ``names`` taken out of its ``Requires:``."""

    def kept(match: re.Match[str]) -> str:
        required = " ".join(match[1].split()).split(",")
        left = [name.strip() for name in required if name.strip() not in names]
        return f"Requires: {', '.join(left)}".rstrip()

    return re.sub(r"^Requires:(.*(?:\n[ \t]+.*)*)$", kept, message, count=1, flags=re.MULTILINE)


def strip_prefix(path: str) -> str:
    """Return the path of a diff's ``---`` or ``+++`` line: ``a/torch/x.py`` -> ``torch/x.py``.

    Git quotes a path beyond ASCII: ``"a/torch/\\303\\251.py"`` -> ``torch/é.py``.
    """
    if path.startswith('"'):
        path = path.strip('"').encode().decode("unicode_escape").encode("latin-1").decode()
    return path.split("/", 1)[1] if path[:2] in ("a/", "b/") else path


def _message(text: str) -> tuple[str, list[str], int]:
    """Split header and message: the subject, the message's lines, the 1-based first of them."""
    header, _, message = text.partition("\n\n")
    mail = email.parser.HeaderParser().parsestr(header + "\n\n")
    subject = re.sub(r"\n(?=[ \t])", "", mail.get("Subject", ""))
    subject = str(email.header.make_header(email.header.decode_header(subject)))
    return subject.strip(), message.split("\n"), header.count("\n") + 3


def split_trailers(message: list[str], first: int) -> tuple[str, tuple[Trailer, ...]]:
    """Cut off the last paragraph if it is made of trailers; an indented line continues one."""
    end = len(message)
    while end and message[end - 1].strip() in ("", "---"):
        end -= 1
    start = end
    while start and message[start - 1].strip():
        start -= 1
    trailers: list[Trailer] = []
    for number in range(start, end):
        line = message[number]
        if match := _TRAILER.match(line):
            trailers.append(Trailer(match[1], (match[2] or "").strip(), first + number))
        elif trailers and line[:1] in (" ", "\t"):
            last = trailers.pop()
            trailers.append(Trailer(last.key, f"{last.value} {line.strip()}".strip(), last.line))
        else:  # a paragraph of prose: the message has no trailers
            return "\n".join(message[:end]).strip(), ()
    return "\n".join(message[:start]).strip(), tuple(trailers)


_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")


def _broken_hunk(lines: list[str], diff: int) -> tuple[int, str]:
    """Return the line, and what was expected there, of the first hunk whose counts are wrong."""
    for start in range(diff, len(lines)):
        match = _HUNK.match(lines[start])
        if not match:
            continue
        old, new = (int(count or 1) for count in match.groups())
        for number in range(start + 1, len(lines) + 1):
            mark = lines[number][:1] if number < len(lines) else ""
            if old <= 0 and new <= 0:
                break
            if mark not in (" ", "-", "+", "\\") or (number == len(lines) - 1 and not mark):
                counts = f"{old} more old and {new} more new lines of the hunk at line {start + 1}"
                return number + 1, counts
            old -= mark in (" ", "-")
            new -= mark in (" ", "+")
    return diff + 1, "a diff that can be parsed"
