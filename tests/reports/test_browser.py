"""Reports in a browser: charts are drawn, tables sort, nothing is loaded or logged, and pages are not cut off."""

from __future__ import annotations

import re

import pytest

import fednorms as fn
from fednorms.reports.run import run_page
from tests.reports.test_pages import QUICK, crowd, hospitals
from tests.support.pages import CHROMIUM

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")]
A4 = 688  # pixels between the margins of a printed page
LONG = "a-name-without-a-single-space-" * 4


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Reports of a run with long names and images, a comparison with names of markup, a table, and a crowd."""
    folder = tmp_path_factory.mktemp("reports")
    data = hospitals(classes=(LONG, "dog", "x" * 90), names=(LONG, "b" * 120, "c"))
    (folder / "crowd.html").write_text(run_page(crowd(120, 60)).html())
    run = fn.run("fedbn", data, **QUICK, out=folder / "run")
    comparison = fn.compare(
        ["fedavg", "fedbn", "fedavg + fedprox(mu=0.125)"], hospitals(), **QUICK, seeds=2, out=folder / "c"
    )
    return [
        fn.report(run, folder / "run.html", images=True, federation=data),
        fn.report(comparison, folder / "comparison.html"),
        fn.report("beyond-digits", folder / "table.html"),
        folder / "crowd.html",
    ]


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def show(browser):
    """Open a file in a new page; loading anything else, a message or an error fails the test."""
    said, pages = [], []

    def only_files(route):
        if route.request.url.startswith(("file:", "data:")):
            route.continue_()
        else:
            said.append(route.request.url)
            route.abort()

    def opened(file, width=1280, script=True):
        context = browser.new_context(viewport={"width": width, "height": 800}, java_script_enabled=script)
        page = context.new_page()
        pages.append(context)
        page.set_default_timeout(300_000)  # only what hangs takes so long
        page.route("**/*", only_files)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
        page.goto(file.as_uri())
        return page

    yield opened
    for context in pages:
        context.close()
    assert said == []


BOXES = """() => [...document.querySelectorAll('svg.chart')].map(svg => {
  const box = svg.getBoundingClientRect();
  const marks = [...svg.querySelectorAll('path, rect, circle, text')].map(m => m.getBoundingClientRect());
  return [box.width, box.height, marks.filter(m => m.width > 0 || m.height > 0).length];
})"""


def test_charts_are_drawn(files, show):
    for file in files:
        boxes = show(file).evaluate(BOXES)
        assert boxes
        assert all(width > 20 and height > 20 and marks for width, height, marks in boxes)


def test_a_click_on_a_heading_sorts(files, show):
    page = show(files[2])
    table = page.locator("table.sortable").first
    head = table.locator("thead th").nth(1)

    def column():
        values = table.locator("tbody tr").evaluate_all("rows => rows.map(row => row.cells[1].dataset.value)")
        return [float(v) for v in values if v]

    before = column()
    head.locator("button").click()
    assert column() == sorted(before, reverse=True)
    assert head.get_attribute("aria-sort") == "descending"
    head.locator("button").click()
    assert column() == sorted(before)
    assert len(before) > 5
    table.locator("thead th button").first.click()  # names
    assert head.get_attribute("aria-sort") is None


def test_hovering_shows_a_value(files, show):
    page = show(files[1])
    page.locator("svg.chart .hit").last.scroll_into_view_if_needed()
    page.locator("svg.chart .hit").last.hover()
    tip = page.locator("#tip")
    assert tip.is_visible()
    assert "%" in tip.inner_text()


def test_without_script_everything_is_there(files, show):
    page, plain = show(files[1]), show(files[1], script=False)
    text, static = (p.locator("main").inner_text() for p in (page, plain))
    assert text.split() == static.split()
    assert plain.locator("svg.chart title").count()  # the browser's own tips


OUTSIDE = """(width) => [...document.querySelectorAll('main *')].filter(e => {
  if (e.closest('svg') && e.tagName !== 'svg' && e.tagName !== 'text') return false;
  const box = e.getBoundingClientRect();
  return box.width > 0 && (box.right > width + 1 || box.left < -1);
}).map(e => e.tagName + ' ' + e.textContent.slice(0, 60))"""


@pytest.mark.parametrize("width", [1280, 420])
def test_nothing_is_wider_than_the_window(files, show, width):
    for file in files:
        page = show(file, width)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, file.name


def test_nothing_is_cut_off_on_paper(files, show, tmp_path):
    for file in files:
        page = show(file, A4)
        page.emulate_media(media="print")
        assert page.evaluate(OUTSIDE, A4) == [], file.name
        assert page.locator("nav").is_hidden()
        printed = page.pdf(path=tmp_path / "r.pdf", prefer_css_page_size=True)
        assert printed.startswith(b"%PDF")
        printed_pages = [part for part in printed.split(b"endobj") if re.search(rb"/Type ?/Page\b(?!s)", part)]
        assert len(printed_pages) > 1
        assert all(b"/Font" in part for part in printed_pages), "a page has no text"
