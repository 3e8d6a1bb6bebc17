"""The documentation site: it builds without a warning, and a browser shows it from disk without a network."""

import doctest
import html
import os
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fednorms

pytest.importorskip("mkdocs", reason="needs the extra docs")
from mkdocs.utils import yaml_load

from docs import make_api_pages

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "mkdocs.yml"
NOTEBOOKS = sorted((ROOT / "docs/tutorials").glob("*.ipynb"))
FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s:#]+)(?:#[^)\s]*)?\)")
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)


def pages(nav):
    """The files that a menu names."""
    for entry in nav:
        title_or_file = next(iter(entry.values())) if isinstance(entry, dict) else entry
        if isinstance(title_or_file, str):
            yield title_or_file
        else:
            yield from pages(title_or_file)


@pytest.fixture(scope="module")
def config():
    with CONFIG.open(encoding="utf-8") as file:
        return yaml_load(file)


def test_the_menu_has_the_sections_that_a_newcomer_looks_for(config):
    named = [next(iter(entry)) for entry in config["nav"]]
    assert named == ["Start", "Tutorials", "How-to", "Reference", "Data", "Results", "Architecture"]
    [start] = [entry["Start"] for entry in config["nav"] if "Start" in entry]
    assert {"install.md", "troubleshooting.md", "upgrading.md"} <= set(pages(start))


def test_every_page_of_the_repository_is_in_the_menu(config):
    written = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert written <= set(pages(config["nav"]))


def test_nothing_is_configured_to_come_from_the_network(config):
    assert config["strict"] is True
    assert config["theme"]["font"] is False
    assert not re.findall(r"https?://", CONFIG.read_text(encoding="utf-8"))
    assert any("iframe-worker" in script for script in config["extra"]["polyfills"])  # in place of the plugin's own


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as `make docs` builds it."""
    place = tmp_path_factory.mktemp("site")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(place)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return place


@pytest.mark.slow
def test_the_site_has_every_public_name_once(site):
    anchors = [
        a for page in site.rglob("*.html") for a in re.findall(r'<h\d id="(fednorms\.[\w.]+)"', page.read_text("utf-8"))
    ]
    for name in fednorms.__all__:
        assert anchors.count(f"fednorms.{name}") == 1, name


@pytest.mark.slow
def test_pages_load_nothing_from_the_network(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe)[^>]*\ssrc="([^"]+)"', text)
        loaded += re.findall(r'<link[^>]*rel="(?:stylesheet|preload|preconnect|icon)"[^>]*href="([^"]+)"', text)
        assert not [url for url in loaded if url.startswith(("http:", "https:", "//"))], page.name


@pytest.mark.slow
def test_links_lead_to_pages_and_headings_that_exist(site):
    text = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html") if page.name != "404.html"}
    headings = {page: set(re.findall(r'\bid="([^"]+)"', found)) for page, found in text.items()}
    for page, found in text.items():
        for link in map(html.unescape, set(re.findall(r'<a [^>]*href="([^":]+)"', found))):
            path, _, heading = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{page.name}: {link}"
            assert not heading or heading in headings[target], f"{page.name}: {link}"


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")
def test_a_browser_shows_the_site_from_disk_and_searches_it(site):
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    refused, errors = [], []

    def only_files(route):
        if route.request.url.startswith(("file:", "data:", "blob:")):
            route.continue_()
        else:
            refused.append(route.request.url)
            route.abort()

    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(600_000)  # only what hangs takes so long
        page.route("**/*", only_files)
        page.on("pageerror", lambda error: errors.append(str(error)))
        for name, seen in {
            "index.html": "Federated image classification when clients differ",
            "methods.html": "fedbn",
            "reference/api/training.html": "compare",
            "reference/cli.html": "fednorms reproduce",
            "results/index.html": "Digits-Five (32 of 36 cells)",
            "data.html": "camelyon17",
        }.items():
            page.goto((site / name).as_uri())
            assert seen in page.locator("article").inner_text()
        for file in sorted(site.rglob("*.html")):
            page.goto(file.as_uri())
        page.goto((site / "index.html").as_uri())
        page.locator(".md-search__input").focus()
        page.keyboard.type("scaffold")
        found = page.locator(".md-search-result__item").first
        found.wait_for(state="visible")
        assert "scaffold" in found.inner_text().lower()
        browser.close()
    assert not refused
    assert not errors


def test_links_of_the_repository_become_links_of_the_site(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")  # MkDocs loads the hooks from there
    import site_hooks

    assert doctest.testmod(site_hooks) == (0, 2)
    for page, text, seen in (
        ("index.md", "[a](docs/methods.md#what)", "[a](methods.md#what)"),
        ("index.md", "![a](docs/images/demo.png)", "![a](images/demo.png)"),
        ("results/advise.md", "[a](../judge.md)", "[a](../judge.md)"),
        ("results/index.md", "[a](../../recipes/results/fedwon-table-1/RESULTS.md)", "[a](fedwon-table-1.md)"),
        ("results/fedwon-table-1.md", "![a](results.png)", "![a](fedwon-table-1-results.png)"),
        ("results/recipes.md", "[a](../docs/reproduce.md)", "[a](../reproduce.md)"),
        ("upgrading.md", "[a](../CHANGELOG.md)", "[a](changelog.md)"),
        ("tutorials/index.md", "[a](01-first.ipynb)", "[a](01-first.md)"),
        ("methods.md", "[a](https://example.org/README.md)", "[a](https://example.org/README.md)"),
        ("results/recipes.md", "```\nx[0](README.md)\n```", "```\nx[0](README.md)\n```"),
    ):
        assert site_hooks.relinked(text, page) == seen


def test_links_of_every_page_lead_to_the_site(monkeypatch, config):
    """What the strict build refuses, without building."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    import site_hooks

    texts = {str(p.relative_to(ROOT / "docs")): p.read_text("utf-8") for p in (ROOT / "docs").rglob("*.md")}
    texts |= {page: (ROOT / source).read_text("utf-8") for source, page in site_hooks.MOVED.items()}
    for folder in site_hooks._reports():
        texts[f"results/{folder.name}.md"] = (folder / "RESULTS.md").read_text("utf-8")
    there = {*texts, *pages(config["nav"]), *(f"tutorials/{n.stem}.md" for n in NOTEBOOKS)}
    pictures = {f"results/{p.parent.name}-{p.name}" for p in (ROOT / "recipes/results").glob("*/*.png")}
    there |= pictures | {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.png")}
    there |= {f"reference/api/{theme}.md" for theme in make_api_pages.THEMES}
    missing = [
        f"{page}: {link}"
        for page, text in texts.items()
        for link in LINK.findall(FENCED.sub("", site_hooks.relinked(text, page)))
        if posixpath.normpath(posixpath.join(posixpath.dirname(page), link)) not in there
    ]
    assert not missing


def test_a_notebook_becomes_a_page(tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="needs the extra docs")
    from docs import notebooks

    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    shown = nbformat.v4.new_output("display_data", data={"image/png": pixel})
    printed = nbformat.v4.new_output("stream", text="accuracy 0.9\n")
    cells = [nbformat.v4.new_markdown_cell("# First steps\n\nText."), nbformat.v4.new_code_cell("fn.run()")]
    cells[1].outputs = [printed, shown]
    file = tmp_path / "01-first.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), file)
    text, pictures = notebooks.converted(file)
    assert notebooks.title(file) == "First steps"
    assert "# First steps" in text
    assert "```python\nfn.run()\n```" in text
    assert "accuracy 0.9" in text
    [name] = pictures
    assert f"]({name})" in text
    assert pictures[name].startswith(b"\x89PNG")
