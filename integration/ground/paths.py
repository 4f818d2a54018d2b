"""Where things are. Everything that the project writes goes under two git-ignored folders."""

import os
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PATCHES = REPO / "patches"


def patches_dir() -> Path:
    """The patches in use: today's, or those for newer upstreams that ``INTEGRATION_PINS`` names."""
    return PATCHES / os.environ.get("INTEGRATION_PINS", "")


def patches_of(upstream: str) -> Path:
    """The patches of one upstream: today's, where the folder in use holds none of it."""
    folder = patches_dir() / upstream
    return folder if folder.is_dir() else PATCHES / upstream


def cache_dir() -> Path:
    """Overlays, tokenizer and data. ``INTEGRATION_CACHE`` moves it (a shared file system, say)."""
    return Path(os.environ.get("INTEGRATION_CACHE") or REPO / ".cache").absolute()


def outputs_dir() -> Path:
    """Runs: checkpoints, TensorBoard files, logs. ``INTEGRATION_OUTPUTS`` moves it."""
    return Path(os.environ.get("INTEGRATION_OUTPUTS") or REPO / "outputs").absolute()
