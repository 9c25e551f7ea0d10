"""The pages as a site: every page can be reached, the reference is whole, notebooks run, and `make docs` builds it."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys

import pytest
from support.checkpoints import add_embedder, make_original
from support.documents import CHECKOUT, make_cheap, pages
from support.scripts import script

import linearize
from linearize.cli.main import VERBS, build_parser

DOCS = CHECKOUT / "docs"
MODEL = "sentence-transformers/all-MiniLM-L6-v2"
NOTEBOOKS = {
    "convert_and_look": "STEPS = 2",
    "long_documents": "LENGTHS, LONGEST, DOCUMENTS, STEPS = (16, 128), 80, 16, 1",
    "search_documents": f"MODEL, DOCUMENTS, LONGEST, SPAN = '{MODEL}', 3, 512, 128",
    "text_generation": "WINDOW, LENGTHS, NEW = 16, (8, 40), 4",
    "images": "SIDES, STEPS = (16, 32), 1",
    "speech": "SECONDS, STEPS = (1,), 1",
    "tuning": "PAGES, SENTENCES, STEPS, LENGTH = 2, 40, 2, 16",
    "kernel_search": "LENGTH, STEPS = 16, 2",
    "embeddings": "SENTENCES, HELD_OUT, STEPS = 60, 10, 1",
    "own_kernel": "KERNELS, LENGTH, STEPS = ('elu', 'scaled'), 16, 2",
    "onnx_export": "LENGTHS = (8, 100)",
    "serving": "TEXTS, LONGEST, BATCH_TOKENS = 4, 256, 300",
    "large_models": "LAYERS, HIDDEN, HEADS, KEY_HEADS, BLOCKS, STEPS, LENGTH, WINDOW = 2, 64, 2, 1, 2, 2, 32, 8",
    "distributed": "ROWS, STEPS, LENGTH, LONG = 4, 2, 16, 256",
}
"""The notebooks, and what makes them small; it replaces the values of their cell `parameters`."""


def cells(name):
    """The cells of a notebook, as (tags, code)."""
    found = json.loads((DOCS / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return [(c["metadata"].get("tags", []), "".join(c["source"])) for c in found if c["cell_type"] == "code"]


def directives(kind):
    """Return the names after `.. auto<kind>::` in the reference."""
    texts = [path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.rst")]
    return [name for text in texts for name in re.findall(rf"^\.\. auto{kind}:: (\S+)$", text, re.MULTILINE)]


def test_members_named_in_the_reference_exist():
    texts = [path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.rst")]
    found = [x for text in texts for x in re.findall(r"auto(\w+):: (\S+)\n   :members: (.+)", text)]
    assert found
    for kind, name, members in found:
        module, _, attribute = name.rpartition(".")
        owner = (
            importlib.import_module(name) if kind == "module" else getattr(importlib.import_module(module), attribute)
        )
        assert [x for x in members.split(", ") if not hasattr(owner, x)] == [], name


def named(page):
    """The pages in the tables of contents of a page, by their paths in docs without a suffix."""
    text, folder = (DOCS / f"{page}.md").read_text(encoding="utf-8"), (DOCS / page).parent
    trees = re.findall(r"^:::\{toctree\}\n(.*?)^:::$", text, re.MULTILINE | re.DOTALL)
    lines = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    return [(folder / line).relative_to(DOCS).as_posix() for line in lines]


def test_every_page_can_be_reached():
    found = [page for index in ("index", "benchmarks/index") for page in named(index)]
    notebooks = [path.relative_to(CHECKOUT).as_posix() for path in DOCS.rglob("*.ipynb")]
    there = {page.removeprefix("docs/").rpartition(".")[0] for page in [*pages(), *notebooks]}
    assert sorted(found) == sorted({*there, "reference/index"} - {"index"})
    assert named("reference/cli") == ["reference/cli/*"]
    reference = (DOCS / "reference" / "index.rst").read_text(encoding="utf-8").partition("toctree::")[2].split()
    assert sorted(reference) == sorted({p.stem for p in (DOCS / "reference").glob("*.rst")} - {"index"})


def test_the_page_of_a_verb_has_all_its_options():
    conf = script("conf", DOCS)
    for verb in VERBS:
        page = conf.verb_page(verb)
        options = {o for a in build_parser(verb)._actions if a.dest != "help" for o in a.option_strings}
        assert options <= set(re.findall(r"(?<=[` ])--[a-z-]+", page)), verb
        assert page.startswith(f"# linearize {verb}\n") and "examples:" in page


def test_the_reference_names_what_there_is():
    modules = directives("module")
    for name in modules:
        importlib.import_module(name)
    for name in directives("class") + directives("function"):
        module, _, leaf = name.rpartition(".")
        assert callable(getattr(importlib.import_module(module), leaf)), name
    files = (CHECKOUT / "linearize" / "kernels").glob("[a-z]*.py")
    kernels = {f"linearize.kernels.{path.stem}" for path in files}
    assert kernels == {name for name in modules if name.startswith("linearize.kernels.")}


def test_the_notebooks_are_those_that_are_tested():
    assert {path.stem for path in (DOCS / "notebooks").glob("*.ipynb")} == set(NOTEBOOKS)


RIGHT = {
    "convert_and_look": lambda it: 0 < it["found"].mean("kl") < 10 and it["same"] and len(it["maps"]) == 2,
    "long_documents": lambda it: [0 <= side.score <= 100 for side in it["result"].sides] == [True] * 4,
    "search_documents": lambda it: len(it["recalls"]) == 8 and all(0 <= one <= 1 for one in it["recalls"].values()),
    # Within the window all answer as softmax does; after it the window alone does not.
    "text_generation": lambda it: (
        all(it["same"].values())
        and all(error < 1e-4 for (_, length), error in it["errors"].items() if length == 8)
        and it["errors"]["window alone", 40] > 1e-2
    ),
    "images": lambda it: it["trained"].steps == 1 and len(it["maps"]) == 4 and it["answers"],
    "speech": lambda it: it["trained"].steps == 1 and isinstance(it["heard"]["text"], str),
    "tuning": lambda it: it["again"].result.steps == 2 and 0 <= it["found"].score <= 1,
    "kernel_search": lambda it: {x.label for x in it["found"].layers} <= {*it["CANDIDATES"]} and it["close"].outputs,
    "embeddings": lambda it: it["cosines"]["original"] > 0.999 and 0 <= it["agreed"]["trained"] <= 1,
    "own_kernel": lambda it: it["same"] and {*it["close"]} == {"elu", "scaled"},
    "onnx_export": lambda it: it["padded"] < 1e-5 and all(one < 1e-4 for one in it["differences"].values()),
    "serving": lambda it: it["tokens"]["read"] > 0 and all(one < 1e-5 for one in it["differences"].values()),
    "large_models": lambda it: len(it["bill"].stages) == 9 and all(0 < one < 2 for one in it["errors"].values()),
    "distributed": lambda it: it["share"] < 0.01 and it["difference"] < 1e-5 and len(it["parts"]) == 2,
}
"""What has to be true of the names of a notebook at its end."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "convert_and_look" else [pytest.mark.slow]) for name in NOTEBOOKS]
)
def test_a_notebook_runs(name, tmp_path, monkeypatch):
    """All its cells run in order, on a tiny model under the name in the notebook, and the results are numbers."""
    make_cheap(monkeypatch, tmp_path)
    add_embedder(make_original(tmp_path / MODEL))
    monkeypatch.setattr("linearize.jobs.demo.minilm_folder", lambda: tmp_path / MODEL)
    names = {"__name__": "notebook"}
    for number, (tags, text) in enumerate(cells(name)):
        exec(compile(text.replace("%matplotlib inline\n", ""), f"{name}, code cell {number}", "exec"), names)
        if "parameters" in tags:
            changed = NOTEBOOKS[name]
            assert {word.strip() for word in changed.partition("=")[0].split(",")} <= set(names)
            exec(changed, names)
    assert RIGHT[name](names)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_what_a_notebook_shows_came_from_running_it(name):
    """Each cell was run once, in order, without failing; no path of a machine shows, and no time of one."""
    stored = (DOCS / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8")
    code = [cell for cell in json.loads(stored)["cells"] if cell["cell_type"] == "code"]
    counts = [cell["execution_count"] for cell in code]
    if name != "convert_and_look":
        assert "Stored without results" in stored
        assert counts == [None] * len(code) and not any(cell["outputs"] for cell in code)
        return
    assert counts == list(range(1, len(code) + 1))
    kinds = {one["output_type"] for cell in code for one in cell["outputs"]}
    assert kinds <= {"stream", "execute_result", "display_data"}
    assert sum(bool(cell["outputs"]) for cell in code) >= len(code) - 2
    assert not re.search(r"/(home|root|work|tmp|Users)/", stored)


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_in_jupyter(name, tmp_path):
    """In a separate kernel, with magics and rich output, as `make notebooks` runs it."""
    nbformat = pytest.importorskip("nbformat", reason="the extra `docs` is not installed")
    pytest.importorskip("nbclient", reason="the extra `docs` is not installed")
    pytest.importorskip("ipykernel", reason="the extra `docs` is not installed")
    add_embedder(make_original(tmp_path / MODEL))
    notebook = nbformat.read(DOCS / "notebooks" / f"{name}.ipynb", as_version=4)
    first = next(n for n, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", []))
    notebook.cells.insert(first + 1, nbformat.v4.new_code_cell(NOTEBOOKS[name]))
    done = script("run_notebooks").execute(notebook, tmp_path)
    shown = [one for cell in done.cells if cell.cell_type == "code" for one in cell.outputs]
    pictures = [one for one in shown if "image/png" in one.get("data", {})]
    assert shown and len(pictures) == {"convert_and_look": 3, "images": 1}.get(name, 0)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    for package in ("sphinx", "furo", "myst_nb"):
        pytest.importorskip(package, reason="the extra `docs` is not installed")
    # The test above runs the notebooks, and gives a kernel time to start on a busy machine.
    still = ["-D", "nb_execution_mode=off"]
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", *still, "-E", "-b", "html", "docs", tmp_path]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    written = [*map(CHECKOUT.joinpath, pages()), *DOCS.glob("notebooks/*.ipynb"), *DOCS.glob("reference/*.rst")]
    for page in [*written, *(DOCS / "reference" / "cli" / f"{verb}.md" for verb in VERBS)]:
        assert (tmp_path / page.relative_to(DOCS)).with_suffix(".html").is_file(), page
    found = "".join(page.read_text(encoding="utf-8") for page in (tmp_path / "reference").glob("*.html"))
    for name in set(linearize.__all__) - {"__version__"}:
        thing = getattr(linearize, name)
        assert f'id="{thing.__module__}.{name}"' in found or f'id="linearize.{name}"' in found, name
