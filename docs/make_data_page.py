"""Write docs/data.md from the readers: what each data set is, where it is published, and which folders are accepted.

python docs/make_data_page.py
"""

from __future__ import annotations

from pathlib import Path

from fednorms.data.readers import READERS
from fednorms.data.readers.reader import Reader
from fednorms.data.registry import federations

PAGE = Path(__file__).with_name("data.md")
HEAD = """\
# Data

Written by `python docs/make_data_page.py` from the readers; a test compares it with the code. Messages about missing
data say the same.

Some federations come with the package, so the first run needs no download:

| federation | what it is |
| --- | --- |
{embedded}

Every other data set is yours to get: **nothing is downloaded**. Give its folder as `root=FOLDER` in Python or `--root
FOLDER` on the command line. `fednorms data check FOLDER` opens every image and says which data set a folder holds,
whether it is complete, what must be fixed, and which published tables use it. [Use your own images](own-data.md) shows
how to bring your own.

Licenses are given as far as we know them. The page of the publisher decides: read it before you use the data.

| federation | images | license |
| --- | ---: | --- |
{overview}
"""


def page() -> str:
    """The text of the page."""
    known = federations()
    embedded = [f"| `{name}` | {known[name]} |" for name in known if name not in READERS and ":" not in name]
    overview = [
        f"| [{name}](#{name}) | {_total(reader)} | {reader.published.license} |"
        for name, reader in READERS.items()
        if reader.published.links
    ]
    return HEAD.format(embedded="\n".join(embedded), overview="\n".join(overview)) + "".join(
        _section(reader) for reader in READERS.values()
    )


def _section(reader: Reader) -> str:
    published = reader.published
    lines = ["", f"## {reader.name}", "", published.what, ""]
    if published.links:
        lines += [f"- **Published at** {', '.join(f'[{name}]({url})' for name, url in published.links.items())}"]
        lines += [f"- **License:** {published.license}"]
    lines += [f"- **Folder:** {_code(reader.expected)}"]
    if reader.folders:
        lines += [f"- **Found inside ROOT as** {', '.join(f'`{name}/`' for name in reader.folders)}"]
    if published.counts:
        lines += [f"- **Images:** {'; '.join(f'{domain} {_count(n)}' for domain, n in published.counts.items())}"]
    lines += ["", "| protocol | split |", "| --- | --- |"]
    lines += [f"| `{name}` | {what} |" for name, what in reader.protocols.items()]
    return "\n".join(lines) + "\n"


def _total(reader: Reader) -> str:
    total = sum(n if isinstance(n, int) else sum(n) for n in reader.published.counts.values())
    return f"{total:,}" if total else ""


def _count(n: int | tuple[int, int]) -> str:
    return f"{n:,}" if isinstance(n, int) else f"{n[0]:,} training, {n[1]:,} test"


def _code(expected: str) -> str:
    """Paths are code, which keeps Markdown from reading their braces and stars.

    >>> _code("ROOT/{a,b}/*.jpg, or a file")
    '`ROOT/{a,b}/*.jpg`, or a file'
    """
    words = [_marked(word) for word in expected.split(" ")]
    return " ".join(words).replace("` `", " ")


def _marked(word: str) -> str:
    core = word.lstrip("(").rstrip(";,)")
    return word.replace(core, f"`{core}`") if "`" not in core and any(sign in core for sign in "/*{_") else word


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
