"""Where things are. Everything that the project writes goes under two git-ignored folders."""

import os
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PATCHES = REPO / "patches"


def cache_dir() -> Path:
    """Overlays, tokenizer and data. ``INTEGRATION_CACHE`` moves it (a shared file system, say)."""
    return Path(os.environ.get("INTEGRATION_CACHE") or REPO / ".cache").absolute()


def outputs_dir() -> Path:
    """Runs: checkpoints, TensorBoard files, logs. ``INTEGRATION_OUTPUTS`` moves it."""
    return Path(os.environ.get("INTEGRATION_OUTPUTS") or REPO / "outputs").absolute()
