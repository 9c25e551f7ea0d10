"""The functions of verbs: the options of the command line by name, and the same results."""

import ast
import functools
import inspect
from collections.abc import Sequence

import pytest
from support.checkpoints import WORDS, make_original, make_text
from support.scripts import script

import linearize
from linearize.cli.main import VERBS, build_parser
from linearize.core.errors import ConfigError, MissingPackageError, UnknownNameError, UnsupportedModelError
from linearize.core.options import make, options_of
from linearize.core.signatures import by_name
from linearize.evaluation.options import BenchOptions
from linearize.jobs import verbs
from linearize.jobs.config import ConvertJob
from linearize.jobs.convert import ConvertResult
from linearize.modeling.plan import Plan

PRINTS = {"run", "recipes", "results", "kernels", "native", "demo", "completion"}
"""Verbs without a function there: those of recipes (`linearize.jobs.recipes`) and those that print."""
OF_A_TERMINAL = {"help", "json", "dry_run", "no_native", "explain_backend"}
FUNCTIONS = {name: getattr(verbs, name) for name in VERBS if name not in PRINTS}


@pytest.mark.parametrize("verb", FUNCTIONS)
def test_the_options_of_a_function_are_those_of_its_verb(verb):
    typed = {action.dest for action in build_parser(verb)._actions} - OF_A_TERMINAL
    own = set(inspect.signature(FUNCTIONS[verb]).parameters) - {"on_event"}
    # What else a terminal offers: option files, the bill of `convert` and its upload, the plot of `bench`.
    more = {"config", "devices", "device_memory", "push_to_hub", "private", "plot", "overwrite"}
    assert own <= typed and typed - own <= more, typed ^ own


def test_a_function_gives_the_result_of_its_verb(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_original(tmp_path / "bert")
    (tmp_path / "rows.txt").write_text("".join(f"{' '.join(WORDS[n % 11 :])} {n}\n" for n in range(40)))
    seen = []
    small = {"distill_steps": 1, "distill_length": 16, "holdout": 4, "align_steps": 0, "device": "cpu"}
    found = verbs.convert("bert", kernel="elu", dataset="rows.txt", output="out", on_event=seen.append, **small)
    assert isinstance(found, ConvertResult) and seen and (tmp_path / "out" / "config.json").is_file()
    info = verbs.inspect("out")
    assert isinstance(info.plan, Plan) and {layer.kernel for layer in info.plan.layers} == {"elu"}


def test_one_text_is_a_list_of_one_where_an_option_may_be_repeated():
    assert make(BenchOptions, {"kernel": "elu"}).kernels == ("elu",)
    for config in (BenchOptions, ConvertJob):
        given = {} if config is BenchOptions else {"model": "bert", "output": "out", "kernel": "hedgehog"}
        one, other = (make(config, {**given, "kernel_arg": value}) for value in ("a=1", ["a=1"]))
        assert one.kernel_args == other.kernel_args == {"a": "1"}


def test_bad_input(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownNameError, match="Did you mean 'kernel'"):
        verbs.convert("bert", kernal="elu")
    with pytest.raises(UnknownNameError, match="Did you mean 'output'"):
        verbs.report("bert", outputs="page")
    with pytest.raises(ConfigError, match="model: got nothing"):
        verbs.convert(kernel="elu")
    with pytest.raises(ConfigError, match="convert: got 2 values without a name, expected 1"):
        verbs.convert("bert", "elu")
    with pytest.raises(ConfigError, match="model: got it twice"):
        verbs.convert("bert", model="bert")
    make_text(tmp_path / "there")
    with pytest.raises(ConfigError, match="batch_size: got 0, expected a whole number"):
        verbs.evaluate("there", task="cola", dataset="nowhere", batch_size=0)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_missing_package_is_named_with_its_extra():
    @by_name(BenchOptions)
    def broken(options):
        raise ModuleNotFoundError("no", name="matplotlib")

    with pytest.raises(MissingPackageError, match=r"linearize\[report\]"):
        broken()


def test_signatures_show_defaults_and_what_must_be_given():
    shown = inspect.signature(verbs.convert).parameters
    assert shown["model"].default is inspect.Parameter.empty and shown["kernel"].default == "hedgehog"
    assert shown["kernel_arg"].default is ... and next(iter(shown)) == "model"
    # They depend on the steps of stage one, and on the model.
    depends = (shown["align_steps"], inspect.signature(verbs.evaluate).parameters["max_length"])
    assert [parameter.default for parameter in depends] == [..., ...]
    assert shown["dataset"].annotation == str | Sequence[tuple[str, float]] | None
    assert shown["keep_softmax"].annotation == Sequence[int] | str
    assert set(shown) == {*options_of(ConvertJob), "on_event"}


def test_editors_know_the_options():
    """The stub is what `python scripts/write_stub.py` writes, and names all options."""
    write_stub = script("write_stub")
    written = write_stub.STUB.read_text(encoding="utf-8")
    assert written == write_stub.stub(), "run python scripts/write_stub.py"
    functions = {node.name: node.args for node in ast.parse(written).body if isinstance(node, ast.FunctionDef)}
    for name, given in functions.items():
        assert {*inspect.signature(FUNCTIONS[name]).parameters} == {x.arg for x in given.args + given.kwonlyargs}
    assert functions.keys() == FUNCTIONS.keys()


WRONG = {"align": "techer", "apply": "plam", "convert": "kernal", "distill": "modle", "embed": "span"}
WRONG |= {"plan": "windwo", "save": "procesor", "search": "max_lenght"}


@pytest.mark.parametrize("name", WRONG)
def test_functions_on_models_refuse_unknown_options(name):
    with pytest.raises(UnknownNameError, match=f"unknown option '{WRONG[name]}'. Did you mean"):
        getattr(linearize, name)(None, None, **{WRONG[name]: None})


def test_a_field_of_a_config_is_not_an_option_by_itself():
    for function, config in ((linearize.distill, "Distill"), (linearize.align, "Align"), (linearize.search, "Search")):
        with pytest.raises(UnknownNameError, match=rf"got option 'steps' by itself, expected {config}Config\(steps="):
            function(None, None, steps=3)


def test_verbs_that_linearize_lacks_are_named():
    attribute = functools.partial(getattr, linearize)
    for name in FUNCTIONS:
        if hasattr(linearize, name) and not inspect.ismodule(getattr(linearize, name)):
            continue
        assert name in linearize._VERBS
    with pytest.raises(AttributeError, match=r"the verb is linearize.jobs.verbs.evaluate$"):
        attribute("evaluate")
    with pytest.raises(AttributeError, match=r"no attribute 'evaluat'$") as caught:
        attribute("evaluat")
    assert caught.value.obj is linearize
    with pytest.raises(UnsupportedModelError, match=r"got str, .* with linearize.jobs.verbs.convert$"):
        linearize.convert("bert")
