"""Options are defined once: checks on construction, sections of a job, what follows from other options."""

from __future__ import annotations

import dataclasses

import pytest

from linearize.core.errors import ConfigError, UnknownNameError
from linearize.core.options import build, check, effective, make, name_of, option, options_of, recorded
from linearize.core.parsing import parse_yaml
from linearize.core.registry import Hybrid, kernel_info, make_config
from linearize.evaluation.options import BenchOptions, CompareOptions, ReportOptions
from linearize.jobs.config import AlignJob, ConvertJob, DistillJob, InitJob
from linearize.jobs.task_config import EvaluateJob, TuneJob
from linearize.training.alignment.config import AlignConfig
from linearize.training.stage_one.config import DistillConfig
from linearize.training.stage_two.config import DataOptions, TuneConfig

JOBS = [AlignJob, ConvertJob, DistillJob, EvaluateJob, InitJob, TuneJob, BenchOptions, CompareOptions, ReportOptions]
CONFIGS = [DistillConfig, AlignConfig, TuneConfig, DataOptions]


@dataclasses.dataclass(frozen=True)
class Example:
    """All kinds of limits."""

    count: int = option(1, "a count", low=1, high=9)
    rate: float | None = option(None, "a rate", above=0, below=1)
    word: str = option("a", "a word", choices=("a", "b"))
    flag: bool = option(False, "a flag")
    other: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check(self, "example")


@pytest.mark.parametrize(
    "values, words",
    [
        ({"count": 0}, "example, count: got 0, expected a whole number from 1 to 9"),
        ({"count": 10}, "from 1 to 9"),
        ({"count": 1.0}, "got 1.0, expected a whole number"),
        ({"count": True}, "got True, expected a whole number"),
        ({"count": None}, "got None"),
        ({"rate": 0}, "example, rate: got 0, expected a number above 0 and below 1"),
        ({"rate": 1.0}, "above 0 and below 1"),
        ({"rate": float("nan")}, "got nan"),
        ({"rate": 10**400}, "expected a number above 0 and below 1"),
        ({"rate": "0.5"}, "got '0.5'"),
        ({"word": "c"}, "got 'c', expected one of a, b"),
        ({"flag": 1}, "got 1, expected true or false"),
    ],
)
def test_a_value_that_is_not_allowed_is_named(values, words):
    with pytest.raises(ConfigError) as caught:
        Example(**values)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_number_too_large_for_a_float_is_refused_in_files_and_kernels():
    with pytest.raises(ConfigError, match="expected a number"):
        build(Example, {"rate": 10**400}, "file")
    with pytest.raises(ConfigError, match="kernel polaformer, alpha"):
        make_config(kernel_info("polaformer"), {"alpha": 10**400})


def test_what_is_allowed_passes():
    Example(count=9, rate=0.5, word="b", flag=True, other=("not", "checked"))
    Example(rate=None)


@pytest.mark.parametrize("config", [*JOBS, *CONFIGS], ids=lambda config: config.__name__)
def test_every_option_has_a_help(config):
    for name, one in options_of(config).items():
        assert len(one.metadata["help"]) > 3 and not one.metadata["help"].endswith("."), name


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_every_number_has_a_range(config):
    free = {"seed", "betas"}
    for name, one in options_of(config).items():
        limits = {"low", "high", "above", "below"} & set(one.metadata)
        assert limits or one.kind not in (int, float) or name in free, name


def test_one_option_sets_all_the_fields_that_share_it():
    job = ConvertJob.of(
        model="a/b", seed=5, save_every=3, keep_states=4, precision="bf16", gradient_accumulation=2, batch_size=8
    )
    assert (job.seed, job.data.seed, job.distill.seed, job.align.seed) == (5, 5, 5, 5)
    assert (job.distill.keep, job.align.keep, job.data.batch_size) == (4, 4, 8)
    assert (job.distill.precision, job.align.precision) == ("bf16", "bf16")
    assert (job.distill.gradient_accumulation, job.align.gradient_accumulation) == (2, 2)
    assert (job.distill.folder, job.align.folder) == ("b-hedgehog.stage1", "b-hedgehog.align")


def test_what_follows_from_other_options_gives_way_to_what_is_said():
    assert ConvertJob.of(model="a").align.steps == 400 and ConvertJob.of(model="a").distill.folder is None
    assert ConvertJob.of(model="a", distill_steps=50).align.steps == 20
    assert ConvertJob.of(model="a", distill_steps=50, align_steps=7).align.steps == 7
    assert AlignJob.of(model="x/y", resume=True).align.folder == "y-aligned.align"
    assert DistillJob.of(model="x/y", output="z", save_every=1).distill.folder == "z.stage1"


def test_text_is_parsed_and_values_are_taken_as_they_are():
    typed = ConvertJob.of(model="a", kernel_arg=["activation=exp"], keep_softmax="0-2,5", dataset="a=1,b=3")
    assert (typed.kernel_args, typed.keep_softmax) == ({"activation": "exp"}, (0, 1, 2, 5))
    assert typed.data.sources == (("a", 1.0), ("b", 3.0))
    for kept in ((0, 1, 2, 5), [0, 1, 2, 5]):
        plain = ConvertJob.of(model="a", kernel_arg={"activation": "exp"}, keep_softmax=kept)
        assert (plain.kernel_args, plain.keep_softmax) == (typed.kernel_args, typed.keep_softmax)


def test_unknown_missing_and_wrong_options_are_refused():
    with pytest.raises(UnknownNameError, match="Did you mean 'distill_steps'"):
        ConvertJob.of(model="a", distil_steps=3)
    with pytest.raises(ConfigError, match="model: got nothing"):
        ConvertJob.of(kernel="elu")
    with pytest.raises(ConfigError, match="stage one, steps: got 'many', expected a whole number of at least 0"):
        ConvertJob.of(model="a", distill_steps="many")
    with pytest.raises(ConfigError, match="options, max_length: got '4'"):
        ConvertJob.of(model="a", max_length="4")


def test_effective_options_make_the_same_job_again():
    job = ConvertJob.of(model="a", kernel="elu", distill_steps=30, align_train="kernels", keep_softmax="1", holdout=9)
    found = effective(job)
    assert found["distill_steps"] == 30 and found["align_steps"] == 12 and found["learning_rate"] is None
    assert ConvertJob.of(**{name: tuple(one) if isinstance(one, list) else one for name, one in found.items()}) == job


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_precision_no_is_a_word_in_yaml(precision):
    values = parse_yaml(f"precision: {precision}\nlearning_rate: 0.001")
    assert build(TuneConfig, values, "finetune").precision == precision
    with pytest.raises(ConfigError, match="got true"):
        build(TuneConfig, parse_yaml("precision: yes"), "finetune")


def test_the_current_folder_is_recorded_by_its_name(tmp_path, monkeypatch):
    (tmp_path / "bert" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "bert" / "inner")
    assert [name_of(name) for name in (".", "..", str(tmp_path / "bert") + "/", "org/bert")] == [
        *("inner", "bert", "bert", "org/bert")
    ]
    assert recorded(ReportOptions("."))["checkpoint"] == "inner"


def test_files_of_one_name_in_several_folders_are_all_recorded(tmp_path):
    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rows.txt").write_text("x")
    data = f"{tmp_path}/a/rows.txt=1,{tmp_path}/b/rows.txt=2"
    assert recorded(make(DistillJob, {"model": "m", "dataset": data}))["dataset"] == [("rows.txt", 1), ("rows.txt", 2)]


def test_a_single_softmax_head_may_be_a_number():
    assert Hybrid.of({"softmax_heads": 0}) == Hybrid.of({"softmax_heads": "0"}) == Hybrid(softmax_heads=(0,))
