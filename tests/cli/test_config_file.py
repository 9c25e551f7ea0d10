"""`--config FILE`: options from a YAML file, checked as strictly as typed ones, with those of the line before them."""

import json
import subprocess
import sys

import pytest
import yaml
from support.checkpoints import make_original, texts

from linearize.cli import main
from linearize.cli._options import config_file, take_options
from linearize.cli.main import VERBS, build_parser
from linearize.jobs.config import ConvertJob
from linearize.jobs.task_config import TuneJob

WITHOUT = {"inspect", "recipes", "completion"}
"""Verbs that have nothing but names and --json."""


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "options.yaml"
        path.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
        return str(path)

    return write


def parse(verb, *words):
    return build_parser(verb).parse_args([str(word) for word in words])


def refused(capsys, *words):
    assert main([str(word) for word in words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("linearize: error: ") and error.count("\n") == 1
    return error


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_that_takes_options_takes_a_file(verb):
    assert ("--config" in build_parser(verb).format_help()) is (verb not in WITHOUT)


def test_a_file_says_what_the_line_would(file):
    said = """
model: ./bert
kernel: performer
kernel-arg: {features: 8, orthogonal: true}
dataset: {a.jsonl: 0.7, b.txt: 0.3}
keep_softmax: [0, 2, 11]
distill_steps: 500
learning_rate: 1e-3
precision: no
report_to: none
resume: true
window: null
"""
    job = take_options(parse("convert", "--config", file(said)), ConvertJob)
    line = "./bert --kernel performer --kernel-arg features=8 --kernel-arg orthogonal=true --keep-softmax 0,2,11"
    line += " --dataset a.jsonl=0.7,b.txt=0.3 --distill-steps 500 --learning-rate 1e-3 --precision no --resume"
    assert job == take_options(parse("convert", *line.split(), "--report-to", "none"), ConvertJob)
    assert job.distill.learning_rate == 1e-3 and job.window is None


def test_the_line_comes_before_the_file_and_the_file_before_the_defaults(file):
    path = file({"model": "a", "distill_steps": 500, "batch_size": 8, "overwrite": True, "kernel_arg": ["a=1"]})
    line = ["b", "--config", path, "--batch-size", "4", "--kernel-arg", "b=2"]
    job = take_options(parse("convert", *line), ConvertJob)
    assert (job.model, job.distill.steps, job.data.batch_size, job.overwrite) == ("b", 500, 4, True)
    assert job.kernel_args == {"b": "2"} and job.distill.patience == 5
    args = parse("compare", f"--config={file({'checkpoints': ['x', 'y'], 'output': 'there'})}")
    assert (args.checkpoints, args.output, args.overwrite) == (["x", "y"], "there", False)
    args = parse(
        "finetune", "--config", file({"model": "m", "task": "cola", "lora": {"r": 4, "alpha": 8}}), "--limit", 9
    )
    assert (args.model, args.task, args.lora, args.limit) == ("m", "cola", "alpha=8,r=4", 9)
    args = parse("bench", "--config", file({"lengths": [8, 16], "kernel": ["elu", "luna"], "memory": False}))
    assert (args.lengths, args.kernel, args.memory) == ("8,16", ["elu", "luna"], False)


@pytest.mark.parametrize(
    "said, words",
    [
        (
            "distil_steps: 5",
            "unknown option 'distil_steps'. Did you mean 'distill_steps'? See: linearize convert --help",
        ),
        ("json: true", "unknown option 'json'"),
        ("bucket_by_length: true", "unknown option 'bucket_by_length'"),
        ("search_memory: false", "unknown option 'search_memory'"),
        ("plot: p.png", "unknown option 'plot'"),
        ("config: other.yaml", "unknown option 'config'"),
        ("distill_steps: many", "distill_steps: got 'many', expected a whole number"),
        ("distill_steps: 2.5", "distill_steps: got 2.5, expected a whole number"),
        ("learning_rate: fast", "learning_rate: got 'fast', expected a number"),
        ("overwrite: 1", "overwrite: got 1, expected true or false"),
        ("distill_steps: [1]", "distill_steps: got a list, expected a whole number"),
        ("batch-size: 1\nbatch_size: 2", "batch_size is given twice"),
        ("batch-size: 1\nkernel: elu\nbatch-size: 2", "cannot be read (line 3, column 1: batch-size is given twice)"),
        ("layers: {0: elu, 0: t2r}", "cannot be read (line 1, column 18: 0 is given twice)"),
        ("- kernel", "holds a list, expected a YAML file of options such as kernel: elu"),
        ("kernel: [", "cannot be read (line 1"),
        ("kernel: !!python/object/apply:os.getcwd []", "cannot be read (line 1"),
        ("kernel: &a [*a]", "refers to itself"),
        ("distill_steps: -1", "stage one, steps: got -1, expected a whole number of at least 0"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(said, words, file, capsys):
    assert words in refused(capsys, "convert", "bert", "--config", file(said))


def test_a_value_in_a_file_is_one_of_the_choices(file, tmp_path, capsys):
    """`format: mk` printed the table, without a word."""
    words = refused(capsys, "results", tmp_path, "--config", file({"format": "mk"}))
    assert "format: unknown value 'mk'. Did you mean 'md'? Known: json, md, table." in words


def test_a_merged_mapping_may_override_a_key(file):
    text = "layers: &all {0: elu, 1: elu}\nkernel-arg: {<<: *all, 1: t2r}"
    assert parse("convert", "bert", "--config", file(text)).kernel_arg == ["0=elu", "1=t2r"]


@pytest.mark.parametrize("seed", [-1, 2**32])
@pytest.mark.parametrize("line", ["init bert --output x", "finetune bert --task cola", "longdoc bert --task cola"])
def test_a_seed_that_numpy_does_not_take_is_refused_in_one_line(line, seed, file, tmp_path, monkeypatch, capsys):
    """After the data was read: "ValueError: Seed must be between 0 and 2**32 - 1", with a traceback."""
    monkeypatch.chdir(tmp_path)
    make_original(tmp_path / "bert")
    capsys.readouterr()
    config = file({"seed": seed, **({"dataset": "d"} if "longdoc" in line else {})})
    words = f"seed: got {seed}, expected a whole number from 0 to 4294967295"
    assert words in refused(capsys, *line.split(), "--config", config)


def test_the_home_folder_in_a_file_and_after_an_equals_sign(file, tmp_path, monkeypatch, capsys):
    """`model: ~/bert` ended in a traceback of the Hub's client, and `--output=~/out` made a folder named "~"."""
    monkeypatch.setenv("HOME", str(tmp_path))
    said = {"model": "~/bert", "dataset": "~/a.jsonl", "kernel-arg": ["a=~/b"], "output": "~/there"}
    job = take_options(parse("convert", "--config", file(said)), ConvertJob)
    assert (job.model, job.data.dataset, job.output) == tuple(f"{tmp_path}/{x}" for x in ("bert", "a.jsonl", "there"))
    assert job.kernel_args == {"a": f"{tmp_path}/b"}
    args = parse("run", "~/r.yaml", "model.name=~/bert", "--output=~/runs", "summary=about ~/x")
    assert (args.recipe, args.output) == (f"{tmp_path}/r.yaml", f"{tmp_path}/runs")
    assert args.changes == [f"model.name={tmp_path}/bert", "summary=about ~/x"]
    make_original(tmp_path / "bert")
    assert main(["inspect", "~/bert", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["architecture"] == "BertModel"


@pytest.mark.parametrize("said, words", [("1:5", "1:5"), ("4:10", "4:10"), ("[4:0, 11:7]", "4:0,11:7")])
def test_a_layer_and_a_head_are_no_number_in_base_60(said, words, file):
    """`keep-softmax-heads: 1:5` kept the 65 best heads of the model, as YAML 1.1 counts like clocks."""
    job = take_options(parse("convert", "bert", "--config", file(f"keep-softmax-heads: {said}")), ConvertJob)
    assert job.keep_softmax_heads == words


def test_a_missing_file_or_option_is_refused(file, tmp_path, capsys):
    assert "expected a YAML file of options" in refused(capsys, "convert", "bert", "--config", tmp_path / "none.yaml")
    assert "expected a YAML file of options" in refused(capsys, "convert", "bert", "--config", tmp_path)
    assert "expected one argument" in refused(capsys, "convert", "bert", "--config")
    assert "required: MODEL" in refused(capsys, "convert", "--config", file(""))
    assert "required: --task" in refused(capsys, "finetune", "bert", "--config", file("epochs: 1"))
    assert take_options(parse("finetune", "bert", "--task", "cola", "--config", file("max_length: 9")), TuneJob)


def test_what_stands_behind_two_dashes_is_no_file():
    assert config_file(["a", "--", "--config", "b"]) is None and config_file(["a", "--conf", "b"]) is None
    assert config_file(["a", "--config", "b"]) == config_file(["--config=b", "a"]) == "b"


def test_parsers_load_nothing_heavy():
    code = (
        "import sys; from linearize.cli.main import VERBS, build_parser; [build_parser(verb).format_help() for verb in "
        "VERBS]; print({'torch', 'transformers', 'numpy', 'datasets', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_conversion_from_a_file_says_its_options(tmp_path, capsys, file):
    texts(tmp_path, 24)
    make_original(tmp_path / "bert")
    data = {"dataset": str(tmp_path / "texts.jsonl"), "text_column": "text", "holdout": 4, "batch_size": 4}
    work = {"distill_steps": 2, "align_steps": 1, "align_train": "kernels", "device": "cpu", "seed": 3}
    path = file({"model": str(tmp_path / "bert"), **data, **work})
    out = tmp_path / "out"
    assert main(["convert", "--config", path, "--distill-steps", "1", "--output", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["distillation"]["steps"] == 1
    text = (out / "config.json").read_text()
    options = json.loads(text)["linearize"]["provenance"]["options"]
    assert options["distill_steps"] == 1 and options["align_train"] == "kernels" and options["seed"] == 3
    # Where something lies on this disk is nobody's business.
    assert options["dataset"] == "texts.jsonl" and str(tmp_path) not in text
    # They are a file of options themselves.
    again = take_options(parse("convert", "--config", file(options), tmp_path / "bert"), ConvertJob)
    assert (again.distill.steps, again.align.train, again.data.batch_size) == (1, "kernels", 4)
