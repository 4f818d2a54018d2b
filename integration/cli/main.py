"""The command line: the verbs, and how one of them is called.

Only the module of the verb that is called is imported, so that ``--help`` answers at once.
"""

import errno
import inspect
import os
import re
import shlex
import sys
import textwrap
import types
from collections.abc import Sequence
from dataclasses import fields, replace
from importlib import import_module
from typing import Any, Union, get_args

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from integration.ground import terminal
from integration.ground.errors import UserError, nearest
from integration.ground.options import STDOUT, Verb, debugging

ABOUT = "Patches for pinned PyTorch and TorchTitan, their proofs, and the 1T MoE training job."
# Verb -> the dataclass that holds its options, and what the verb does.
VERBS = {
    "train": ("integration.train.start:Request", "Train a config on this machine."),
    "plan": ("integration.cli.verbs:Plan", "Show the memory, traffic and time of a config."),
    "dryrun": ("integration.cli.verbs:Dryrun", "Run one rank of a config on fake tensors."),
    "launch": ("integration.slurm.submit:Request", "Write a job script that trains a config."),
    "test": ("integration.cli.verbs:Test", "Run the tests and proofs of the contributions."),
    "ladder": ("integration.ladder.run:Request", "Measure what each contribution is worth."),
    "bench": ("integration.bench.run:Request", "Measure one contribution beside its peers."),
    "report": ("integration.cli.verbs:Report", "Write one page of all that was measured."),
    "env": ("integration.cli.patches:Env", "Print the line that puts the patches first."),
    "patches list": ("integration.cli.patches:List", "Show every contribution."),
    "patches check": ("integration.cli.patches:Check", "Check each patch alone and in the set."),
    "patches apply": ("integration.cli.patches:Apply", "Apply the set to a checkout."),
    "patches import": ("integration.cli.patches:Import", "Make checkouts with the set as commits."),
    "patches export": ("integration.cli.patches:Export", "Store these commits as patches."),
    "patches new": ("integration.cli.patches:New", "Begin a contribution."),
    "patches readme": ("integration.cli.patches:Readme", "Print the README's table."),
    "patches drift": ("integration.cli.upstream:Drift", "Say what a newer upstream means."),
    "patches rebase": ("integration.cli.upstream:Rebase", "Move the set to a newer pin."),
    "patches drop": ("integration.cli.upstream:Drop", "Let a contribution go."),
    "patches pr": ("integration.cli.upstream:PullRequest", "Prepare an upstream pull request."),
}
GROUPS = {"patches": "Read, check, apply and edit the patches."}
HELP = ("-h", "--help")
REGISTRY = ConstructorRegistry()
STYLE = (
    tyro.conf.FlagCreatePairsOff,  # --resume without a --no-resume beside it
    tyro.conf.UseAppendAction,  # --without A mini: mini is the config
    tyro.conf.EnumChoicesFromValues,
    tyro.conf.PositionalMetavarFromFieldName,
)

# What the machine refuses, and what mends it.
REFUSALS = {
    errno.EACCES: "make it accessible to you",
    errno.EPERM: "make it accessible to you",
    errno.EROFS: "mount it for writing",
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of your quota",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one verb; end with its exit code, and with one sentence for what the user can mend."""
    terminal.never_fail()
    argv = list(sys.argv[1:] if argv is None else argv)
    split = argv.index("--") if "--" in argv else len(argv)
    ours, rest = argv[:split], argv[split + 1 :]
    if "--debug" in ours:  # before or after the verb
        ours.remove("--debug")
        os.environ["INTEGRATION_DEBUG"] = "1"
    try:
        name, words = _verb(ours)
        code = _read(name, words, rest).run()
        sys.stdout.flush()
        sys.exit(code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except (UserError, OSError) as error:
        told = _refused(error) if isinstance(error, OSError) else error
        if told is None or debugging():
            raise
        print(f"error: {told}", file=sys.stderr)
        sys.exit(told.exit_code)


def _verb(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the verb that ``words`` begin with, and the words after it.

    Raises:
        UserError: there is no such verb.
        SystemExit: help was asked for, or no verb was named; they are listed then.
    """
    name, left = "", list(words)
    while name not in VERBS:
        below = [verb for verb in VERBS if verb.startswith(name)]
        choices = list(dict.fromkeys(verb.removeprefix(name).split()[0] for verb in below))
        if not left or left[0] in HELP:
            _list(name, choices)
            raise SystemExit(0 if left else 2)
        word = left.pop(0)
        if word not in choices:
            raise UserError(
                f"expected a verb after `integration{name and f' {name.strip()}'}`, got {word}"
                f"{nearest(word, choices)}; nothing was run"
            )
        name += word if name + word in VERBS else f"{word} "
    return name, left


def _list(group: str, choices: Sequence[str]) -> None:
    """Print what the verbs do, or those of a group."""
    print(f"usage: integration {group}VERB [OPTIONS]\n")
    print(f"{GROUPS.get(group.strip(), ABOUT)}\n")
    for word in choices:
        print(f"  {word:9}{GROUPS.get(word) or VERBS[group + word][1]}")
    print(
        f"\n`integration {group}VERB --help` describes a verb. With --debug, a verb shows every "
        "line\nof output and the stack trace of an error."
    )


def _read(name: str, words: Sequence[str], rest: Sequence[str]) -> Verb:
    """Return the verb with its options, of which ``rest`` are those after ``--``.

    Raises:
        UserError: an option of TorchTitan's stands before ``--``, or something stands after it
            that the verb does not take, or a value is refused.
        SystemExit: help was asked for, or the options cannot be read; tyro says why.
    """
    module, _, options = VERBS[name][0].partition(":")
    verb = getattr(import_module(module), options)
    takes = {field.name for field in fields(verb)}
    if {"config", "options"} <= takes:
        _require_separator(name, words, rest)
    elif rest and "options" not in takes:
        raise UserError(
            f"expected nothing after `--`, which `integration {name}` does not hand on, got "
            f"{shlex.join(rest)}; nothing was run"
        )
    found = tyro.cli(
        verb,
        prog=f"integration {name}",
        description=_description(verb, with_configs="config" in takes),
        args=_with_json_file(words),
        config=STYLE,
        registry=REGISTRY,
    )
    command = shlex.join(["integration", *name.split(), *words, *(["--", *rest] if rest else [])])
    given: dict[str, Any] = {"options": tuple(rest), "command": command}
    return replace(found, **{name: value for name, value in given.items() if name in takes})


def _with_json_file(words: Sequence[str]) -> list[str]:
    """Give ``--json`` a value where no file follows: `--json mini` prints, and is of mini.

    A file's name has a dot or a slash, which no config and no contribution has; `--json=FILE` takes
    any.
    """
    following = [*words[1:], ""]
    return [
        f"{word}={STDOUT}" if word == "--json" and not re.match(r"[^-].*[./]|[./]", after) else word
        for word, after in zip(words, following, strict=False)
    ]


@REGISTRY.primitive_rule
def _optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Read ``X | None`` as X: an option that is not given is None, and no word stands for that."""
    inner = [each for each in get_args(info.type) if each is not type(None)]
    if info.type_origin not in (Union, types.UnionType) or len(inner) != 1:
        return None
    spec = REGISTRY.get_primitive_spec(PrimitiveTypeInfo.make(inner[0], info.markers))
    if not isinstance(spec, PrimitiveConstructorSpec):
        return None
    return replace(
        spec,
        is_instance=lambda value: value is None or spec.is_instance(value),
        str_from_instance=lambda value: (
            ["none"] if value is None else spec.str_from_instance(value)
        ),
    )


def _description(verb: type, *, with_configs: bool) -> str:
    paragraphs = (inspect.getdoc(verb) or "").split("\n\n")
    text = "\n\n".join(textwrap.fill(paragraph, 80) for paragraph in paragraphs)
    if not with_configs:
        return text
    from integration.jobs.catalog import CATALOG

    lines = [
        textwrap.fill(job.about, 80, initial_indent=f"  {name:17}", subsequent_indent=" " * 19)
        for name, job in CATALOG.items()
    ]
    return "\n".join([text, "", "Configs:", *lines])


def _require_separator(name: str, words: Sequence[str], rest: Sequence[str]) -> None:
    """Refuse an option with a dot in its name, as only TorchTitan's have, before ``--``."""
    ours: list[str] = []
    theirs: list[str] = []
    takes_value = False
    for word in words:
        dotted = word.startswith("--") and "." in word.partition("=")[0]
        is_value = takes_value and not word.startswith("-")
        (theirs if dotted or is_value else ours).append(word)
        takes_value = dotted and "=" not in word
    if theirs:
        command = shlex.join(["integration", name, *ours, "--", *theirs, *rest])
        raise UserError(
            f"{theirs[0]} is TorchTitan's, whose options come after `--`; nothing was run: "
            f"{command}"
        )


def _refused(error: OSError) -> UserError | None:
    """Say in a sentence what the machine refused; None where it is not of ``REFUSALS``."""
    # Only a write can find a disk full, and then the error has no name of a file.
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    if error.errno not in REFUSALS or not (error.filename or full):
        return None
    return UserError(
        f"expected to read and write {error.filename or 'a file'}, found: {error.strerror}; what "
        f"was under way has stopped: {REFUSALS[error.errno]}, or name other folders with "
        f"INTEGRATION_OUTPUTS (runs) and INTEGRATION_CACHE (overlays, data)",
        exit_code=1,
    )
