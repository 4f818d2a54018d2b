"""A house for records that are bound to patches."""

from integration.tests.patchset.conftest import house, isolated, plain_git

__all__ = ["house", "isolated", "plain_git"]
