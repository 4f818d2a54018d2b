"""``integration train``."""


def train() -> None:
    """Train a config."""
