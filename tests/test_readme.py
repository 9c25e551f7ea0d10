"""Every command line and every Python block of README.md and docs runs, in the document's order, on tiny inputs.

`support.documents` defines how each line is run.
"""

import json
import re
import shutil

import pytest
from support.documents import (
    CHECKOUT,
    CONVERTED,
    blocks,
    inline,
    lines,
    make_cheap,
    make_place,
    pages,
    run_line,
    run_python,
)
from support.scripts import script

import linearize
from linearize.cli.main import VERBS, build_parser
from linearize.core.registry import kernel_infos
from linearize.jobs.presets import PRESETS

DOCUMENTS = ["README.md", *pages()]
TEXTS = {name: (CHECKOUT / name).read_text(encoding="utf-8") for name in DOCUMENTS}
ALL = "\n".join(TEXTS.values())
FIGURES = [name for name in DOCUMENTS if name.startswith("docs/benchmarks/") or name == "docs/lab-notes.md"]
"""Pages of figures: `make slow` runs their lines, which take long and do much alike."""
GUIDES = [
    f"docs/guides/{name}.md"
    for name in ("embeddings", "long-documents", "text-generation", "tuning", "distributed", "large-models")
]
"""Guides whose verbs README.md and the other guides run as well: `make slow` runs their lines, which are read here."""


@pytest.fixture(scope="session")
def stock(tmp_path_factory):
    """What lies in the working folders of the documents, made once."""
    return make_place(tmp_path_factory.mktemp("stock"))


@pytest.fixture
def place(stock, tmp_path, monkeypatch, request):
    """The working folder of one document; README.md makes its conversions itself."""
    make_cheap(monkeypatch, tmp_path)
    own = CONVERTED if getattr(request, "param", "README.md") == "README.md" else ()
    return shutil.copytree(stock, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*own))


def in_order(name):
    """One document as a case of the test."""
    return pytest.param(name, name, id=name, marks=[pytest.mark.slow] if name in (*FIGURES, *GUIDES) else [])


@pytest.mark.parametrize(
    ("document", "place"), [in_order(name) for name in DOCUMENTS if blocks(TEXTS[name])], indirect=["place"]
)
def test_everything_runs_in_order(document, place, capsys, monkeypatch):
    for number, (language, content) in enumerate(blocks(TEXTS[document])):
        if language == "python":
            run_python(content, f"{document}, block {number}", monkeypatch)
            continue
        for line in lines(content):
            run_line(line, capsys)
    for span in inline(TEXTS[document]) if document in FIGURES else ():
        if len(span.split()) > 2:
            run_line(span, capsys)
    if document == "README.md":
        assert (place / "roberta-base-hedgehog" / "log.jsonl").is_file() and (place / "reviews-long").is_dir()


@pytest.mark.parametrize("document", [*FIGURES, *GUIDES])
def test_lines_of_figures_and_guides_can_be_read(document, capsys):
    for number, (language, content) in enumerate(blocks(TEXTS[document])):
        if language == "python" and document in GUIDES:
            compile(content, f"{document}, block {number}", "exec")
            continue
        assert language == "bash"
        for line in lines(content):
            run_line(line, capsys, parse_only=True)


def test_nothing_got_lost():
    """The documents together say how to use every verb, and show as much as they used to."""
    found = [line.split() for text in TEXTS.values() for language, block in blocks(text) for line in lines(block)]
    assert {words[1] for words in found if words[0] == "linearize"} >= {*VERBS} - {"push", "init", "distill", "demo"}
    assert len(found) > 45 and sum(language == "python" for text in TEXTS.values() for language, _ in blocks(text)) >= 4


def figures_of(name):
    """SmolLM2's perplexity, copying and numbers found in each row of a file of results, as README writes them."""
    columns = json.loads((CHECKOUT / "docs" / "results" / f"{name}.json").read_text(encoding="utf-8"))["columns"]
    for row in columns.values():
        found = f"{row['needle at 1024'].count('1')} of {len(row['needle at 1024'])}"
        yield [f"{row['rows']['perplexity']:.1f}", f"{row['copying']['share']:.1%}".replace("%", " %"), found]


def test_the_figures_of_readme_are_those_of_the_results():
    rows = re.findall(r"^\| .* \| (.*) \| (.*) \| (.*) \|$", TEXTS["README.md"], re.MULTILINE)
    measured = [*figures_of("proof-smollm2"), *figures_of("smollm2-routed-proof")]
    assert len(rows) == 7 and [row for row in rows if [*row] not in measured] == []


@pytest.mark.parametrize("page", ["docs/benchmarks/proof.md", "docs/benchmarks/glue.md", "docs/models.md"])
def test_the_longest_pages_have_few_words(page):
    prose = re.sub(r"^```.*?^```$", "", TEXTS[page], flags=re.MULTILINE | re.DOTALL)
    assert len(re.sub(r"^\|.*", "", prose, flags=re.MULTILINE).split()) <= 1500


def test_readme_begins_with_make_and_has_one_table_of_figures():
    readme = TEXTS["README.md"]
    first = lines(blocks(readme)[0][1])
    assert [line.split()[:2] for line in first] == [["make", "demo"], ["make", "test"]]
    assert len(re.findall(r"^\|-[-:|]*\|$", readme, re.MULTILINE)) == 1
    assert 500 < len(readme.split()) <= 700


def test_commands_in_sentences(place, capsys):
    """Each command in a sentence runs once; those that are also in blocks have been run."""
    figures = {span for name in FIGURES for span in inline(TEXTS[name])}
    shown = {line for text in TEXTS.values() for _, block in blocks(text) for line in lines(block)}
    for span in sorted(set(inline(ALL)) - {line.partition("#")[0].strip() for line in shown}):
        words = span.split()
        if len(words) == 2 and words[0] == "linearize":
            # A verb that is only mentioned.
            assert words[1] in VERBS, f"{span!r} is not a verb"
        else:
            run_line(span, capsys, parse_only=span in figures)


@pytest.mark.parametrize(
    "line",
    [
        "linearize paint roberta-base", "linearize convert roberta-base --colour red", "linearize convert ./nowhere",
        "linearize run luna-glue data=./glue", "linearize kernels hedgehug", "make coffee",
        "pip install -e '.[moon]'", "pip install something-else", "python examples/moon.py roberta-base",
        "docker run linearize",
    ],
)  # fmt: skip
def test_a_line_that_is_not_covered_fails(line, tmp_path, monkeypatch, capsys):
    make_cheap(monkeypatch, tmp_path)
    with pytest.raises((AssertionError, linearize.LinearizeError)):
        run_line(line, capsys)
    with pytest.raises(AssertionError, match="not bash, python or toml"):
        blocks("```sh\nrm -r everything\n```")


def test_the_table_of_verbs():
    """All verbs are in it, and the options that it names are theirs."""
    rows = re.findall(r"^\| ((?:`[a-z]+`(?:, )?)+) \| (.*) \|$", TEXTS["docs/command-line.md"], re.MULTILINE)
    named = [verb for cell, _ in rows for verb in re.findall(r"`([a-z]+)`", cell)]
    assert sorted(named) == sorted(VERBS)
    for cell, text in rows:
        verbs = re.findall(r"`([a-z]+)`", cell)
        known = {o for verb in verbs for action in build_parser(verb)._actions for o in action.option_strings}
        assert set(re.findall(r"`(--[a-z-]+)`", text)) <= known


def test_the_counts_of_kernels_and_presets():
    kernels, presets = map(int, re.search(r"(\d+) kernels and (\d+) presets", TEXTS["README.md"]).groups())
    ours = [info for info in kernel_infos() if info.config.__module__.startswith("linearize.")]
    assert (kernels, presets) == (len(ours), len(PRESETS))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere_and_pictures_are_small_and_described(document):
    folder, text = (CHECKOUT / document).parent, TEXTS[document]
    for words, path in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", text):
        assert len(words) > 40 and (folder / path).stat().st_size < 150_000
    for target in re.findall(r"(?<!!)\[[^\]]*\]\(([^)]+)\)", text):
        assert target.startswith("https://") or (folder / target.partition("#")[0]).exists(), target


def test_the_pictures_are_there():
    assert len(re.findall(r"!\[[^\]]*\]\(", ALL)) >= 4


@pytest.mark.parametrize(("name", "picture"), [("draw_pipeline", "pipeline"), ("draw_quality", "quality-and-speed")])
def test_a_picture_is_drawn_by_its_script(name, picture):
    assert script(name).draw() == (CHECKOUT / "docs" / "images" / f"{picture}.svg").read_text(encoding="utf-8")
