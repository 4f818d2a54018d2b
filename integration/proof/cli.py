"""``integration test``."""


def test() -> None:
    """Run the contributions' tests."""
