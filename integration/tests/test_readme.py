"""README is short, its links lead somewhere, and its table of configs is the catalogue's."""

import re

from integration.ground.paths import REPO
from integration.jobs.catalog import CATALOG

README = (REPO / "README.md").read_text(encoding="utf-8")


def test_it_is_read_in_a_few_minutes():
    assert len(README.splitlines()) <= 200


def test_the_commands_and_a_picture_are_on_the_first_screen():
    first = "\n".join(README.splitlines()[:25])
    assert "make train" in first and "make test" in first and ".svg)" in first


def test_every_link_leads_to_a_file():
    for file in ("README.md", "CONTRIBUTING.md"):
        text = (REPO / file).read_text(encoding="utf-8")
        links = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", text)
        assert [link for link in links if not (REPO / link).exists()] == []
        assert links


def test_the_configs_are_the_catalogue_s():
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", README, re.MULTILINE)
    assert dict(rows) == {job.name: job.about for job in CATALOG.values()}
