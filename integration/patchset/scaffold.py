"""``integration patches new``: the folder of a contribution, with a test in upstream's style."""

import re
from pathlib import Path

from integration.ground import files, paths
from integration.ground.errors import UserError, nearest
from integration.patchset import pins as pins_module
from integration.patchset import repository
from integration.patchset.exchange import MARK

# Both fail until written: a test that passes on the pristine pin proves nothing.
_PYTORCH = """\
# Owner(s): ["oncall: distributed"]

from torch.testing._internal.common_utils import (
    HardwareClassification,
    run_tests,
    TestCase,
)


class Test{camel}(TestCase):
    hw_classification = HardwareClassification.GENERIC

    def test_{name}(self):
        self.fail("assert here what the pristine pin gets wrong and the patch mends")


if __name__ == "__main__":
    run_tests()
"""
_TORCHTITAN = """\
# Copyright (c) Meta Platforms, Inc. and affiliates.
# All rights reserved.
#
# This source code is licensed under the BSD-style license found in the
# LICENSE file in the root directory of this source tree.

import unittest


class Test{camel}(unittest.TestCase):
    def test_{name}(self):
        self.fail("assert here what the pristine pin gets wrong and the patch mends")


if __name__ == "__main__":
    unittest.main()
"""
_TESTS = {
    "pytorch": (_PYTORCH, "test/distributed/test_{name}.py"),
    "torchtitan": (_TORCHTITAN, "tests/unit_tests/test_{name}.py"),
}
_MESSAGE = """\
Say in the imperative what it changes

What it does and why, in one paragraph: this is the pull request's text.

Root cause: why upstream behaves as it does.

Behaviour change: what users see, or "none".

Test plan: the exact commands, and what they printed.

Status: pending
Issue: none not reported yet
Requires:
Test: test_{name}.py -> {target}
Numerics: bitwise
Drop-when: {target}::Test{camel}::test_{name}
{mark}: {name}
"""


def new(name: str, upstream: str) -> tuple[Path, Path]:
    """Create the contribution's folder and a template of its commit message; return both."""
    contributions = repository.load()
    if not re.fullmatch(repository.NAME_PATTERN, name):
        raise UserError(
            f"expected a name of lower-case letters, digits and underscores (it becomes a file and "
            f"a folder), got {name!r}; nothing was created: choose another"
        )
    upstreams = [upstream for upstream in pins_module.load() if upstream in _TESTS]
    if upstream not in upstreams:
        raise UserError(
            f"unknown upstream {upstream}{nearest(upstream, upstreams)}; nothing was created"
        )
    folder = paths.REPO / f"{upstream}_contrib" / name
    taken = [c.upstream for c in contributions if c.name == name]
    if taken or folder.exists():
        where = f"in patches/{taken[0]}" if taken else f"at {folder.relative_to(paths.REPO)}"
        raise UserError(
            f"expected a new name, found {name} {where} already; nothing was created: choose "
            f"another, or edit that one (`integration patches import`)"
        )
    test, target = _TESTS[upstream]
    camel = "".join(word.capitalize() for word in name.split("_"))
    values = {"name": name, "camel": camel, "target": target.format(name=name), "mark": MARK}
    message = paths.cache_dir() / "messages" / f"{name}.txt"
    message.parent.mkdir(parents=True, exist_ok=True)
    files.write(message, _MESSAGE.format(**values))
    file = (folder / f"test_{name}.py").relative_to(paths.REPO).as_posix()
    try:
        files.replace_all(paths.REPO, {file: test.format(**values).encode()})
    except UserError:
        message.unlink()
        raise
    return folder, message
