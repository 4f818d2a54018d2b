"""The report in a real Chromium, offline: it renders, is not empty, and fits a telephone."""

import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image, ImageStat
from playwright.sync_api import Browser, Page, sync_playwright

from integration.evidence import trace
from integration.report import ladder, report, streams
from integration.tests.report import samples
from integration.tests.report.test_report import run_folder

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; ci/report installs one")

CHARTS = 18  # ladders 8, loss 1, streams 2, pools 5, budget 2


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a report with every chart in it."""
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        files = []
        for name in ("before", "moved"):
            events, _ = trace.trim(samples.profile(name == "moved")["traceEvents"])
            files.append(folder / "integration" / "evidence" / f"trace-{name}.json.gz")
            files[-1].parent.mkdir(parents=True, exist_ok=True)
            files[-1].write_bytes(trace.packed({"patches": {}, "traceEvents": events}))
        patch.setattr(ladder, "recorded", list)  # whatever is kept has a test of its own
        samples.benches(folder, patch)
        patch.setattr(streams, "files", lambda: files)
        patch.setattr(streams, "_shown", lambda file: file.name)
        given = [
            samples.write(folder / "long.json", samples.long()),
            samples.write(folder / "a.json", samples.alone("eager", 0.9)),
            samples.write(folder / "b.json", samples.alone("compiled", 0.6, "--compile.enable")),
            samples.write(folder / "ladder.json", samples.ladder()),
            run_folder(folder / "mini" / "1", [8.5, 8.25, 8.0, 7.9]),
        ]
        report.write(given, folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Root, as in a container, has no sandbox.
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield launched
        launched.close()


def opened(
    browser: Browser,
    html: Path,
    *,
    width: int = 1200,
    scheme: str = "light",
    touch: bool = False,
    unfold: bool = True,
) -> tuple[Page, list[str]]:
    """Open the page offline; return it with what the console said and what it asked for."""
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if scheme == "dark" else "light",
        has_touch=touch,
        offline=True,
    )
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda r: complaints.extend([r.url] * (r.url != html.as_uri())))
    page.goto(html.as_uri())
    if unfold:
        page.evaluate("document.querySelectorAll('.closed').forEach(d => { d.open = true })")
    return page, complaints


def variance(page: Page, chart: int) -> float:
    """Return how much the pixels within a chart's box differ."""
    shot = page.locator(".chart").nth(chart).screenshot()
    return max(ImageStat.Stat(Image.open(io.BytesIO(shot)).convert("RGB")).var)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_chart_is_drawn_without_a_complaint(
    browser: Browser, html: Path, scheme: str
) -> None:
    page, complaints = opened(browser, html, scheme=scheme)
    count = page.locator(".chart").count()
    assert count == CHARTS
    assert [n for n in range(count) if variance(page, n) < 100] == []
    assert complaints == []
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")
    page.context.close()


def test_what_is_kept_is_drawn_without_a_complaint(browser: Browser, tmp_path: Path) -> None:
    report.write([], tmp_path / "report.html")
    page, complaints = opened(browser, tmp_path / "report.html", width=390)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    count = page.locator(".chart").count()
    assert count
    assert [n for n in range(count) if variance(page, n) < 100] == []
    assert complaints == []
    page.context.close()


def test_an_empty_chart_would_be_seen(browser: Browser, html: Path) -> None:
    page, _ = opened(browser, html)
    page.evaluate(
        "document.querySelectorAll('.chart *').forEach(e => e.style.visibility = 'hidden')"
    )
    assert variance(page, 0) < 100
    page.context.close()


def test_a_telephone_scrolls_down_alone(browser: Browser, html: Path) -> None:
    page, complaints = opened(browser, html, width=360, touch=True)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    boxes = [page.locator(".chart").nth(n).bounding_box() for n in range(CHARTS)]
    assert all(box and box["x"] >= 0 and box["x"] + box["width"] <= 360 for box in boxes)
    # Labels and figures above a bar do not run into each other.
    overlaps = page.evaluate(
        """() => [...document.querySelectorAll('.chart')].flatMap(div => {
          const boxes = [...div.querySelectorAll('.words span')].map(t =>
            [t.getBoundingClientRect(), t.textContent]);
          return boxes.flatMap(([a, s], i) => boxes.slice(i + 1)
            .filter(([b]) => a.left < b.right - 1 && b.left < a.right - 1
                          && a.top < b.bottom - 3 && b.top < a.bottom - 3)
            .map(([, t]) => `${s} / ${t}`));
        })"""
    )
    assert overlaps == []
    assert complaints == []
    page.context.close()


def test_the_keyboard_reaches_numbers_and_tables(browser: Browser, html: Path) -> None:
    page, _ = opened(browser, html)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    summary = page.locator("figure summary").first
    summary.focus()
    page.keyboard.press("Enter")
    assert page.locator("figure details").first.get_attribute("open") is not None
    page.locator(".scroll").first.focus()
    assert page.evaluate("document.activeElement.getAttribute('role')") == "region"
    page.context.close()


def test_a_page_as_it_opens_is_short_on_a_telephone(browser: Browser, tmp_path: Path) -> None:
    """What is kept, closed where it is one of several: it had 25,000 pixels."""
    report.write([], tmp_path / "report.html")
    page, _ = opened(browser, tmp_path / "report.html", width=390, touch=True, unfold=False)
    assert page.evaluate("document.documentElement.scrollHeight") < 14_000
    assert not page.locator("details.closed .chart").first.is_visible()
    page.context.close()


def test_a_row_of_words_is_a_card_on_a_telephone(browser: Browser, html: Path) -> None:
    """As a table it showed three letters of a column."""
    page, _ = opened(browser, html, width=360, touch=True)
    cells = page.locator("table.words tbody tr").first.locator("td")
    widths = [box["width"] for n in range(cells.count()) if (box := cells.nth(n).bounding_box())]
    assert min(widths) > 250
    page.context.close()


def test_the_keyboard_opens_commands(browser: Browser, html: Path) -> None:
    page, _ = opened(browser, html)
    command = page.get_by_text("--label compiled").first
    assert not command.is_visible()
    page.locator("summary", has_text="2 commands").first.focus()
    page.keyboard.press("Enter")
    assert command.is_visible()
    page.context.close()


def test_the_plan_s_page_is_drawn_too(browser: Browser, tmp_path: Path) -> None:
    from integration.jobs.catalog import JUPITER_1T
    from integration.jobs.cluster import load
    from integration.plan import published
    from integration.plan.plan import changes, make
    from integration.report import plan as pages

    plan = make(JUPITER_1T, load(JUPITER_1T.cluster))
    file = tmp_path / "plan.html"
    figures = published.figures(plan)
    pages.write(plan, changes(plan), file, figures, published.arithmetic(plan))
    page, complaints = opened(browser, file, width=360)
    assert page.get_by_text(figures[0].name, exact=True).count() == 1
    assert all(variance(page, n) >= 100 for n in range(page.locator(".chart").count()))
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert complaints == []
    page.context.close()
