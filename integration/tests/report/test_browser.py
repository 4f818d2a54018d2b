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
from integration.report import ladder, report, timeline
from integration.tests.report import samples
from integration.tests.report.test_report import run_folder

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; ci/report installs one")

CHARTS = 18  # ladders 8, loss 1, timeline 2, pools 5, budget 2


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
        patch.setattr(timeline, "files", lambda: files)
        patch.setattr(timeline, "_shown", lambda file: file.name)
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
    page.wait_for_function(
        "[...document.querySelectorAll('.chart')].every(d => d.querySelector('.main-svg')"
        f" || ({str(not unfold).lower()} && d.closest('details:not([open])')))"
    )
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
    page.evaluate("document.querySelector('.chart .main-svg').parentElement.innerHTML = ''")
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
          const boxes = [...div.querySelectorAll('.annotation-text')].map(t =>
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


def test_the_keyboard_reaches_numbers_legends_and_tables(browser: Browser, html: Path) -> None:
    page, _ = opened(browser, html)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    summary = page.locator("figure summary").first
    summary.focus()
    page.keyboard.press("Enter")
    assert page.locator("figure details").first.get_attribute("open") is not None
    button = page.locator(".legend button").first
    chart = page.locator(f"#{button.get_attribute('aria-controls')}")
    before = chart.screenshot()
    button.focus()
    page.keyboard.press("Space")
    assert button.get_attribute("aria-pressed") == "false"
    assert chart.screenshot() != before
    page.locator(".scroll").first.focus()
    assert page.evaluate("document.activeElement.getAttribute('role')") == "region"
    page.context.close()


def test_what_is_closed_is_drawn_when_it_is_opened(browser: Browser, html: Path) -> None:
    page, complaints = opened(browser, html, unfold=False)
    closed = page.locator("details.closed", has=page.locator(".chart"))
    assert closed.count() == 1
    chart = closed.locator(".chart")
    assert not chart.is_visible()
    assert chart.locator(".main-svg").count() == 0
    height = page.evaluate("document.documentElement.scrollHeight")
    closed.locator("summary").first.focus()
    page.keyboard.press("Enter")
    chart.locator(".main-svg").first.wait_for()
    assert max(ImageStat.Stat(Image.open(io.BytesIO(chart.screenshot())).convert("RGB")).var) > 100
    box = chart.bounding_box()
    assert box and box["width"] > 900  # not the width that it had while it was closed
    assert page.evaluate("document.documentElement.scrollHeight") > height + 800
    assert complaints == []
    page.context.close()


def test_the_keyboard_opens_commands(browser: Browser, html: Path) -> None:
    page, _ = opened(browser, html)
    command = page.get_by_text("--label compiled").first
    assert not command.is_visible()
    page.locator("summary", has_text="2 commands").first.focus()
    page.keyboard.press("Enter")
    assert command.is_visible()
    page.context.close()


def test_colours_follow_a_change_of_scheme(browser: Browser, html: Path) -> None:
    page, complaints = opened(browser, html)
    fill = "getComputedStyle(document.querySelector('.chart .annotation-text')).fill"
    light = page.evaluate(fill)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"{fill} !== '{light}'")
    assert complaints == []
    page.context.close()


def test_the_plan_s_page_is_drawn_too(browser: Browser, tmp_path: Path) -> None:
    from integration.jobs.catalog import JUPITER_1T
    from integration.jobs.cluster import load
    from integration.plan.plan import changes, make
    from integration.report import plan as pages

    plan = make(JUPITER_1T, load(JUPITER_1T.cluster))
    file = tmp_path / "plan.html"
    pages.write(plan, changes(plan), file)
    page, complaints = opened(browser, file, width=360)
    assert all(variance(page, n) >= 100 for n in range(page.locator(".chart").count()))
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert complaints == []
    page.context.close()
