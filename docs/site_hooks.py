"""What MkDocs calls while it builds the site: pages that are made of the code, and files from outside docs/."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

import make_api_pages
import make_cli_page
import make_recipe_page
import notebooks
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from fednorms.papers.tables.catalog import known

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
# Files outside docs/ that are pages of the site.
MOVED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "recipes/README.md": "results/recipes.md",
}
_FENCED = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s#:]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the menu: tutorials, the API, and the reports of tables."""
    sections = {title: entries for section in config.nav or [] for title, entries in section.items()}
    sections["Tutorials"] += [{notebooks.title(n): f"tutorials/{n.stem}.md"} for n in _notebooks()]
    _entry(sections["Reference"], "API")[:] = make_api_pages.menu()
    _entry(sections["Results"], "All reports")[:] = [
        {_title(folder): f"results/{folder.name}.md"} for folder in _reports()
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    made: dict[str, str | bytes] = dict(make_api_pages.pages())
    made["reference/cli.md"] = make_cli_page.page()
    made["reference/recipe.md"] = make_recipe_page.page()
    for source, page in MOVED.items():
        made[page] = (REPOSITORY / source).read_text(encoding="utf-8")
    for folder in _reports():
        made[f"results/{folder.name}.md"] = (folder / "RESULTS.md").read_text(encoding="utf-8")
        made |= {f"results/{folder.name}-{picture.name}": picture.read_bytes() for picture in folder.glob("*.png")}
    for notebook in _notebooks():
        text, pictures = notebooks.converted(notebook)
        made[f"tutorials/{notebook.stem}.md"] = text
        made |= {f"tutorials/{name}": data for name, data in pictures.items()}
        if shown := files.get_file_from_path(f"tutorials/{notebook.name}"):
            files.remove(shown)
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    return relinked(markdown, page.file.src_uri)


def relinked(markdown: str, page: str) -> str:
    """The text of a page with the links of the site.

    >>> relinked("[all](docs/methods.md#what), ![one](docs/images/demo.png)", "index.md")
    '[all](methods.md#what), ![one](images/demo.png)'
    >>> relinked("[one](../../recipes/results/fedwon-table-1/RESULTS.md)", "results/index.md")
    '[one](fedwon-table-1.md)'
    """
    source, here = _source(page), posixpath.dirname(page)

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found.groups()
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        return f"{text}({posixpath.relpath(_on_site(file), here or '.')}{anchor or ''})"

    pieces = _FENCED.split(markdown)  # text, code, text, ...
    return "".join(piece if i % 2 else _LINK.sub(link, piece) for i, piece in enumerate(pieces))


def _source(page: str) -> str:
    """The file of the repository that a page shows."""
    if page in MOVED.values():
        return next(source for source, there in MOVED.items() if there == page)
    report = re.fullmatch(r"results/([\w-]+)\.md", page)
    if report and not (HERE / page).exists():
        return f"recipes/results/{report[1]}/RESULTS.md"
    return f"docs/{page}"


def _on_site(file: str) -> str:
    """Where the site has a file of the repository."""
    if file in MOVED:
        return MOVED[file]
    if report := re.fullmatch(r"recipes/results/([\w-]+)/RESULTS\.md", file):
        return f"results/{report[1]}.md"
    if picture := re.fullmatch(r"recipes/results/([\w-]+)/([\w-]+\.png)", file):
        return f"results/{picture[1]}-{picture[2]}"
    if file.endswith(".ipynb"):
        file = file.removesuffix(".ipynb") + ".md"
    return file.removeprefix("docs/")


def _reports() -> list[Path]:
    """The folders of reports, in the papers' order, our own tables last."""
    names = sorted(known(), key=lambda name: name.startswith("beyond"))
    folders = [REPOSITORY / "recipes" / "results" / name for name in names]
    return [folder for folder in folders if (folder / "RESULTS.md").exists()]


def _title(report: Path) -> str:
    """The name of a table: its report's heading, up to the colon."""
    heading = (report / "RESULTS.md").read_text(encoding="utf-8").partition("\n")[0]
    return heading.removeprefix("# ").removeprefix("fednorms ").partition(":")[0]


def _notebooks() -> list[Path]:
    return sorted((HERE / "tutorials").glob("*.ipynb"))


def _entry(section: list[dict[str, list[object]]], title: str) -> list[object]:
    return next(entry[title] for entry in section if isinstance(entry, dict) and title in entry)
