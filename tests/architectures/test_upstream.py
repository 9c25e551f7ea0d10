"""The script that runs transformers' own tests: what it counts, explains and lays out; those tests are not run."""

from __future__ import annotations

import json
import re

from architectures import upstream

TABLE = [upstream.Reason(re.compile("test_softmax_.*"), "it is softmax's own")]


def test_only_what_the_original_passes_counts():
    original = {
        "A::test_fine": ("passed", ""),
        "A::test_softmax_dispatch": ("passed", ""),
        "A::test_ours": ("passed", ""),
        "A::test_gone": ("passed", ""),
        "A::test_broken": ("failed", "anyway"),
        "A::test_gpu": ("skipped", "no GPU"),
        f"A::{upstream.NOT_RUN}_00_fp16": ("passed", ""),
    }
    converted = {
        "A::test_fine": ("passed", ""),
        "A::test_softmax_dispatch": ("failed", "no such thing"),
        "A::test_ours": ("skipped", "not today"),
        "A::test_broken": ("failed", "anyway"),
    }
    found = upstream.compare(original, converted, TABLE)
    assert (found["original"], found["converted"]) == (4, 1)
    assert [(one["test"], one["status"], one["reason"]) for one in found["others"]] == [
        ("test_softmax_dispatch", "failed", "it is softmax's own"),
        ("test_ours", "skipped", None),
        ("test_gone", "not run", None),
    ]
    text = upstream.render({"bert": found})
    assert "| bert | 4 | 1 | 3 |" in text
    assert "| it is softmax's own | `test_softmax_dispatch` (bert) |" in text
    assert "| not explained: not today | `test_ours` (bert) |" in text


def test_a_tree_is_laid_out_from_two_versions(tmp_path):
    source, distribution = tmp_path / "source", tmp_path / "work" / f"transformers-{upstream.VERSION}"
    for folder in (source / "tests" / "models", source / "utils", distribution / "tests"):
        folder.mkdir(parents=True)
    for name in ("conftest.py", "pyproject.toml", "tests/test_shared.py"):
        (source / name).write_text("# older\n")
    (distribution / "tests" / "test_shared.py").write_text("from .newer.tools import helper\n")
    tree = upstream.prepare(tmp_path / "work", source)
    assert "newer" in (tree / "tests" / "test_shared.py").read_text()
    assert (tree / "tests" / "newer" / "tools.py").is_file()
    assert (tree / "src" / "transformers" / "modeling_utils.py").is_file()


def test_the_page_is_what_was_found():
    text = upstream.PAGE.read_text(encoding="utf-8")
    found = json.loads(upstream.RESULTS.read_text(encoding="utf-8"))
    assert text.split(upstream.BEGIN)[1].split(upstream.END)[0].strip() == upstream.render(found)


def test_every_reason_has_tests_and_is_a_line():
    table = upstream.reasons()
    assert table and all(one.reason and "\n" not in one.reason for one in table)
