"""Dry runs as a user starts them: by the command."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from integration.ground.paths import REPO


@dataclass(frozen=True, slots=True)
class Ended:
    """Exit code, output, and what ``--json`` wrote (empty where it wrote nothing)."""

    code: int
    stdout: str
    stderr: str
    found: dict[str, Any]

    def broken(self) -> set[str]:
        return {check["name"] for check in self.found["checks"] if check["broken"]}

    def received(self, cause: str, part: str | None = None) -> int:
        return sum(
            row["received"]
            for row in self.found["collectives"]
            if row["cause"] == cause and part in (None, row["part"])
        )

    def disagreements(self) -> list[str]:
        """Return what the plan counts otherwise, by more than it may."""
        return self.found["disagreements"]


def dryrun(folder: Path, *arguments: str) -> Ended:
    """Run ``integration dryrun`` with ``arguments``, writing into ``folder``."""
    result = folder / "dryrun.json"
    line = [sys.executable, "-m", "integration", "dryrun", *arguments, "--json", str(result)]
    ended = subprocess.run(line, cwd=REPO, capture_output=True, text=True)
    found = json.loads(result.read_text()) if result.is_file() else {}
    return Ended(ended.returncode, ended.stdout, ended.stderr, found)
