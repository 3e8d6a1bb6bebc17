"""Tables as aligned text, HTML, Markdown and LaTeX."""

from __future__ import annotations

import html
from collections.abc import Collection, Sequence

Cells = Sequence[Sequence[str]]
Marked = Collection[tuple[int, int]]  # rows and columns of cells in bold, counted from 0 without the header

_LATEX = {
    "\\": r"\textbackslash{}",
    "±": r"$\pm$",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table whose columns are as wide as their widest cell.

    >>> aligned([["", "mean"], ["fedavg", "0.5"]])
    ['        mean', 'fedavg  0.5']
    """
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in table]


def html_table(header: Sequence[str], rows: Cells, *, numbers_from: int = 1, bold: Marked = ()) -> str:
    """An HTML table; columns from `numbers_from` on are aligned right.

    >>> html_table(["site", "test"], [["a < b", "4"]], bold={(0, 1)}).splitlines()[2]
    '<tr><td style="text-align:left">a &lt; b</td><td style="text-align:right"><b>4</b></td></tr>'
    """

    def line(cells: Sequence[str], tag: str, row: int) -> str:
        shown = []
        for j, cell in enumerate(cells):
            text, side = html.escape(cell), "right" if j >= numbers_from else "left"
            text = f"<b>{text}</b>" if (row, j) in bold else text
            shown.append(f'<{tag} style="text-align:{side}">{text}</{tag}>')
        return f"<tr>{''.join(shown)}</tr>"

    lines = [line(header, "th", -1), *(line(row, "td", i) for i, row in enumerate(rows))]
    return "\n".join(["<table>", *lines, "</table>"])


def html_page(title: str, *blocks: str, notes: Sequence[str] = ()) -> str:
    """A heading, blocks of HTML, and notes below them.

    >>> html_page("fedavg", notes=["1 < 2"])
    '<div><p><b>fedavg</b></p><p><small>1 &lt; 2</small></p></div>'
    """
    below = [f"<p><small>{'<br>'.join(map(html.escape, notes))}</small></p>"] if notes else []
    return f"<div><p><b>{html.escape(title)}</b></p>{''.join([*blocks, *below])}</div>"


def markdown_table(header: Sequence[str], rows: Cells, *, numbers_from: int = 1, bold: Marked = ()) -> str:
    r"""A Markdown table; columns from `numbers_from` on are aligned right.

    >>> print(markdown_table(["site", "test"], [["a|b", "4"]], bold={(0, 1)}))
    | site | test |
    | --- | ---: |
    | a\|b | **4** |
    """
    first, *rest = [[c.replace("|", "\\|").replace("*", "\\*").replace("\n", " ") for c in r] for r in [header, *rows]]
    shown = [[f"**{c}**" if (i, j) in bold else c for j, c in enumerate(row)] for i, row in enumerate(rest)]
    rule = ["---:" if j >= numbers_from else "---" for j in range(len(header))]
    return "\n".join("| " + " | ".join(line) + " |" for line in [first, rule, *shown])


def latex_table(header: Sequence[str], rows: Cells, *, numbers_from: int = 1, bold: Marked = ()) -> str:
    r"""A LaTeX `tabular` with the lines of the package booktabs, for your own `table`.

    >>> print(latex_table(["site", "test"], [["a_b", "81 ± 2"]], bold={(0, 1)}))
    \begin{tabular}{lr}
    \toprule
    site & test \\
    \midrule
    a\_b & \textbf{81 $\pm$ 2} \\
    \bottomrule
    \end{tabular}
    """
    plain = [["".join(_LATEX.get(sign, sign) for sign in cell) for cell in row] for row in [header, *rows]]
    body = [[rf"\textbf{{{c}}}" if (i, j) in bold else c for j, c in enumerate(r)] for i, r in enumerate(plain[1:])]
    lines = [" & ".join(row) + r" \\" for row in [plain[0], *body]]
    sides = "l" * numbers_from + "r" * (len(header) - numbers_from)
    begin, end = rf"\begin{{tabular}}{{{sides}}}", r"\end{tabular}"
    return "\n".join([begin, r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule", end])
