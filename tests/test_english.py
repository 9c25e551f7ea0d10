"""Plain English: phrases that stop a native reader stay out of docstrings, comments, messages, help and pages."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

import linearize

CHECKOUT = Path(linearize.__file__).parent.parent

INSTEAD = {
    r"nobody": "no user, no caller; or the passive",
    r"go(es)? on|gone on|going on": "continue, resume",
    r"beside": "next to, with, alongside, compared with",
    r"behind": "after, past",
    r"(is|are|was|were) said": "is reported, is printed",
    r"said so": "reported",
    r"of several": "several ...:",
    r"(there )?(is|are) (?-i:none)": "there is no ...",
    r"an? \w+ of (its|their) own": "its own ..., a separate ...",
    r"for a while": "temporarily",
    r"anew": "again",
    r"what is given": "the options given",
    r"unasked": "unless asked, without being asked",
    r"who wants": "if you need",
    r"wherefrom|thereby|whereby": "from where, so",
    r"as (it was|they were)": "unchanged",
    r"held against": "compared with",
    r"without a word": "without warning",
    r"it has not": "it lacks, it does not have",
    r"to be had": "available",
    r"not any more": "no longer",
    r"any more": "no longer",
    r"shall": "should",
    r"taught|teaches": "trained, trains",
    r"(converted|loaded|registered|computed|made) already": "already ...",
    r"so many (tokens|rows|bytes|heads|threads|steps)": "the parameter's name",
    r"name of the one": "name of the first ...",
    r"(one|another) of its children": "a subclass of it",
    r"(is|are) to be": "is, should be",
    r"goes by": "uses",
    r"put right": "correct",
    r"somebody": "the passive",
    r"writ(es?|ten) out": "return, explicit",
    r"takes? [\d.]+ % off": "lowers it by",
    r"(is|are) left of": "remains",
    r"at every of": "at each of",
    r"from start to end": "from start to finish",
    r"which share|likeness|wholly|for ever": "what share, similarity, entirely, endlessly",
    r"distances? of the quartiles": "interquartile range",
    r"(loaded|called) with what happens": "called with every event",
    r"see `[\w.]+`\.?": "say what it does, or drop the docstring",
}
"""Phrase, as a regular expression, and what plain English has in its place."""

CODE = sorted([*Path(linearize.__file__).parent.rglob("*.py"), *(CHECKOUT / "cli").glob("*.py")])
SOURCES = sorted(path for path in Path(linearize.__file__).parent.rglob("*") if path.suffix in (".c", ".h"))
PAGES = sorted(
    [
        *CHECKOUT.glob("*.md"),
        *(CHECKOUT / "docs").rglob("*.md"),
        *(CHECKOUT / "docs").rglob("*.ipynb"),
        *(CHECKOUT / "recipes").glob("*.yaml"),
    ]
)


def prose(path):
    """The lines of a file that people read, as (number, text): of Python code its comments and strings."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), start=1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        # Python 3.12 splits f-strings into parts.
        if token.type in (tokenize.COMMENT, tokenize.STRING) or tokenize.tok_name[token.type] == "FSTRING_MIDDLE":
            yield from enumerate(token.string.splitlines(), start=token.start[0])


def hits(paths):
    """The banned phrases in files, one line each, with what to write."""
    for path in paths:
        for number, line in prose(path):
            for phrase, instead in INSTEAD.items():
                whole = r'^\W*({})(""")?$' if phrase.startswith("see ") else r"\b({})\b"
                match = re.search(whole.format(phrase), line, re.IGNORECASE)
                if match:
                    yield f"{path.relative_to(CHECKOUT)}:{number}: {match[1]!r}; write {instead}"


@pytest.mark.parametrize("paths", [CODE, SOURCES, PAGES], ids=["code", "sources in C", "pages"])
def test_no_phrase_stops_a_native_reader(paths):
    assert paths and list(hits(paths)) == []


def test_phrases_are_found(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "CHECKOUT", tmp_path)
    (tmp_path / "a.py").write_text(
        '"""Nobody goes on."""\n\nanew = 1  # Held against\nraise ValueError("one of several")\n'
    )
    (tmp_path / "b.md").write_text("The run is\nthere is none\n")
    assert [hit.split(":")[1] for hit in hits([tmp_path / "a.py", tmp_path / "b.md"])] == ["1", "1", "3", "4", "2"]
