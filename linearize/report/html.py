"""One self-contained page: no script, nothing from outside, pictures inside as data."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

from linearize.report.sections import Picture, Section, Table

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1.5rem 1rem 4rem; color: #1c2630; background: #fff;
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .4rem; padding-top: .6rem; border-top: 1px solid #d5dbe1; }
p { max-width: 46rem; margin: .4rem 0 .8rem; }
.lead { color: #46535f; }
nav ul { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; list-style: none; padding: 0; margin: 1rem 0; }
a { color: #1b3a5c; }
figure { margin: 1rem 0 1.6rem; }
figure img { display: block; max-width: 100%; height: auto; border: 1px solid #e4e8ec; border-radius: 4px; }
figcaption { color: #46535f; font-size: .9rem; margin-top: .35rem; max-width: 46rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .92rem; margin: .6rem 0 1rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .3rem; max-width: calc(100vw - 2rem); }
th, td { padding: .28rem .8rem .28rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid #e4e8ec; }
th { font-weight: 600; }
td { overflow-wrap: anywhere; }
table.numbers :is(td, th):nth-child(n+2) { text-align: right; padding: .28rem .2rem .28rem 1rem; }
table.numbers :is(td, tbody th) { white-space: nowrap; }
tr.mean { font-weight: 600; }
.notes { background: #f4f6f8; border-left: 4px solid #8a8a8a; padding: .6rem 1rem; margin: 1rem 0; }
.notes ul { margin: .2rem 0; padding-left: 1.2rem; }
footer { margin-top: 3rem; color: #46535f; font-size: .88rem; }
/* On a narrow screen a picture keeps a size that can be read, and is moved sideways like a wide table. */
@media screen and (max-width: 40rem) { figure img { max-width: 44rem; } }
@media print { nav { display: none; } figure, table { break-inside: avoid; } body { max-width: none; } }
"""


def page(
    title: str, lead: str, sections: Sequence[Section], notes: Sequence[str], left_out: Sequence[str], foot: str
) -> str:
    """Write the page.

    Args:
        title: heading.
        lead: one line below it.
        sections: what is shown.
        notes: what the reader has to know.
        left_out: what is not there, and why.
        foot: last line.
    """
    links = "".join(f'<li><a href="#{escape(s.anchor)}">{escape(s.title)}</a></li>' for s in sections)
    body = "".join(_section(section) for section in sections)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # An empty icon: a browser would ask the server for one.
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n'
        f'<header>\n<h1>{escape(title)}</h1>\n<p class="lead">{escape(lead)}</p>\n</header>\n'
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n<main>\n'
        f"{_list('Good to know', notes)}{body}{_list('Left out', left_out)}</main>\n"
        f"<footer>{escape(foot)}</footer>\n</body>\n</html>\n"
    )


def _list(title: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    entries = "".join(f"<li>{escape(line)}</li>" for line in dict.fromkeys(lines))
    return f'<aside class="notes"><strong>{escape(title)}</strong><ul>{entries}</ul></aside>\n'


def _section(section: Section) -> str:
    tables = "".join(_table(table) for table in section.tables)
    pictures = "".join(_picture(picture) for picture in section.pictures)
    return (
        f'<section id="{escape(section.anchor)}">\n<h2>{escape(section.title)}</h2>\n<p>{escape(section.text)}</p>\n'
        f"{tables}{pictures}</section>\n"
    )


def _picture(picture: Picture) -> str:
    data = base64.b64encode(picture.png).decode("ascii")
    return (
        f'<figure><div class="scroll"><img src="data:image/png;base64,{data}" width="{picture.width}" '
        f'height="{picture.height}" alt="{escape(picture.alt)}"></div>'
        f"<figcaption>{escape(picture.caption)}</figcaption></figure>\n"
    )


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    rows = "".join(_row(row) for row in table.rows)
    kind = ' class="numbers"' if len(table.columns) > 2 else ""
    return (
        f'<div class="scroll"><table{kind}><caption>{escape(table.caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>\n"
    )


def _row(row: Sequence[str]) -> str:
    kind = ' class="mean"' if row[0] == "mean" else ""
    cells = "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
    return f'<tr{kind}><th scope="row">{escape(row[0])}</th>{cells}</tr>'
