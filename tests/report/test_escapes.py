"""Names and metadata come from whoever made a checkpoint: in the written page they are text, and steer nothing."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest
from support.checkpoints import log_lines, texts, tokenizer
from support.tiny import converted

import linearize
from linearize.evaluation.options import InputOptions, ReportOptions
from linearize.evaluation.report.page import Picture, Section, template, write_report

MARKUP = "<img src=x onerror=\"alert('1')\"></style></title><script>alert(1)</script>"
STEERING = "\x1b[31mred\x1b]0;title\x07\x9b2J\u202etxt"
EVIL = f"{MARKUP}{STEERING}\n{{{{ 7 * 7 }}}}{{% include 'x' %}}&lt;"


class Reader(HTMLParser):
    """What a browser sees: every tag with its attributes, and the text of title and cells."""

    def __init__(self):
        super().__init__()
        self.tags, self.text = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text.append(data)


def read(text):
    reader = Reader()
    reader.feed(text)
    return reader


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("evil")
    folder = root / "<b onclick=\"x('1')\">name\x1b[31m"
    provenance = {
        "base_model": EVIL,
        "dataset": EVIL,
        "distillation": {"steps": 1, "stopped": EVIL},
        "finetuning": {"task": EVIL, "data": EVIL, "steps": 1, "metrics": {EVIL: 0.5}},
    }
    model = converted("bert")
    linearize.save(model, folder, processor=tokenizer(), provenance=provenance, extra_files={"log.jsonl": log_lines()})
    inputs = InputOptions(str(texts(root)), "text", inputs=2, max_length=16)
    write_report(ReportOptions(str(folder), inputs=inputs, lengths=(), device="cpu"), str(root / "out"))
    return root / "out"


def test_the_written_page_shows_names_as_text(written):
    text = (written / "index.html").read_text(encoding="utf-8")
    found = read(text)
    assert not {"script", "b"} & {tag for tag, _ in found.tags}
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on")]
    assert all(values["src"].startswith("data:image/png;base64,") for tag, values in found.tags if tag == "img")
    assert not {"\x1b", "\x9b", "\x07", "\u202e"} & set(text)
    shown = "".join(found.text)
    assert "<b onclick=\"x('1')\">name\ufffd[31m: report" in shown
    assert MARKUP in shown and "{{ 7 * 7 }}" in shown and "&lt;" in shown
    assert text.count("&lt;b onclick=&#34;x(&#39;1&#39;)&#34;&gt;name") >= 2


def test_the_numbers_beside_it_steer_no_terminal(written):
    text = (written / "report.json").read_text(encoding="utf-8")
    assert json.loads(text)
    assert not {"\x1b", "\x9b", "\x07", "\u202e"} & set(text)


def test_every_place_of_the_page_is_escaped():
    """Also those that today's makers fill with words of their own."""
    picture = Picture("p", EVIL, EVIL, b"\x89PNG", 3, 4)
    section = Section(EVIL, EVIL, EVIL, [picture], EVIL, [EVIL] * 3, [[EVIL] * 3])
    texts = dict.fromkeys(("title", "lead", "what", "foot"), EVIL)
    text = template().render(**texts, sections=[section], notes=[EVIL], left_out=[EVIL])
    found = read(text)
    assert [tag for tag, _ in found.tags].count("img") == 1 and "script" not in {tag for tag, _ in found.tags}
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on")]
    assert not {"\x1b", "\x9b", "\x07", "\u202e"} & set(text)
    attributes = {name: value for _, values in found.tags for name, value in values.items()}
    assert MARKUP in attributes["alt"] and MARKUP in attributes["id"]
