"""Resume: what a run depends on is held against what it was started with, and what differs is named."""

import itertools
import os
import shutil
import signal

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.command_lines import line_of, without
from support.tiny import converted, inputs_of, original

import linearize
from linearize.checkpoint.fingerprint import (
    ROWS,
    check_same,
    data_digest,
    fingerprint,
    model_digest,
    rows_digest,
    weights_digest,
)
from linearize.checkpoint.provenance import read_log
from linearize.core.errors import ConfigError
from linearize.jobs import stages
from linearize.training.stage_one import DistillConfig, observer
from linearize.training.stage_one.loop import distill
from linearize.training.states import StateFolder


def test_a_fingerprint_changes_with_every_part():
    model = converted("bert")
    rows = [{"input_ids": [1, 2, 3], "label": 0.5}, {"input_ids": [4], "label": None}]
    first = fingerprint(model=model, data=rows, options={"rate": 0.1, "betas": (0.9, 0.95)})
    check_same(first, fingerprint(model=converted("bert"), data=rows, options={"rate": 0.1, "betas": [0.9, 0.95]}))
    assert set(first) == {"rate", "betas", "data contents", "kernels", "model weights", "kernel weights"}
    with torch.no_grad():
        next(iter(model.parameters()))[0, 0] += 1e-6
    with pytest.raises(ConfigError, match="started with model weights='"):
        check_same(first, fingerprint(model=model, data=rows, options={"rate": 0.1, "betas": (0.9, 0.95)}))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"options": {"rate": 0.2}}, r"rate=0\.1, now it is 0\.2"),
        ({"options": {"rate": 0.1, "more": 1}}, "does not record the more that"),
        ({"options": {}}, r"rate=0\.1, which is missing now"),
        ({"data": [[1, 2], [3, 5]]}, "data contents='"),
    ],
)
def test_what_differs_is_named(change, named):
    given = {"data": [[1, 2], [3, 4]], "options": {"rate": 0.1}}
    with pytest.raises(ConfigError, match=named):
        check_same(fingerprint(**given), fingerprint(**given | change))


def test_a_value_that_only_one_of_two_long_mappings_has_is_named():
    """Also if it is None, such as a new option that is off."""
    long = {f"option {number}": number for number in range(30)}
    with pytest.raises(ConfigError, match=r"job=\{\}, now it is \{'new': None\}"):
        check_same(fingerprint(options={"job": long}), fingerprint(options={"job": {**long, "new": None}}))


def test_an_option_of_an_earlier_version_may_have_been_off():
    """`layers_at_a_time`, say: a run that did not use it can be resumed without it."""
    now = fingerprint(options={"rate": 0.1})
    for off in (None, False):
        check_same(fingerprint(options={"rate": 0.1, "gone": off}), now)
    with pytest.raises(ConfigError, match="started with gone=1, which is missing now"):
        check_same(fingerprint(options={"rate": 0.1, "gone": 1}), now)


@pytest.mark.parametrize("change", [{"kernel": "t2r"}, {"kernel_args": {"activation": "exp"}}, {"window": 4}])
def test_kernels_are_compared_by_their_arguments(change):
    """Also where the weights are the same numbers, as those of two activations are."""
    first = fingerprint(model=linearize.convert(original("bert"), **{"kernel": "hedgehog"}))
    other = fingerprint(model=linearize.convert(original("bert"), **{"kernel": "hedgehog"} | change))
    with pytest.raises(ConfigError, match=r"started with kernels=\{'encoder\.layer\.0"):
        check_same(first, other)


def test_kernels_are_compared_by_their_sinks():
    """Sinks have no weights of their own: a run with others would have gone on as the same one."""
    first, other = (
        fingerprint(model=linearize.convert(original("bert"), "hedgehog", window=4, sinks=sinks)) for sinks in (2, 3)
    )
    with pytest.raises(ConfigError, match=r"started with kernels="):
        check_same(first, other)


@pytest.mark.parametrize("ending", ["safetensors", "bin", "gguf"])
def test_the_weights_of_a_folder_are_hashed_in_every_format(ending, tmp_path):
    """Other weights in a .bin file were not noticed."""
    (tmp_path / "config.json").write_text("{}")
    digests = set()
    for content in (b"a", b"b"):
        (tmp_path / f"model.{ending}").write_bytes(content)
        digests.add(model_digest(str(tmp_path)))
    assert len(digests) == 2


def test_no_two_values_have_one_hash():
    values = [
        [], [[]], "", b"", [""], ["ab", "c"], ["a", "bc"], {"a": 1}, {"a": 1.0}, {"a": True}, {"a": None}, [1, 2],
        [[1], [2]], [1, 2, 0], np.zeros(2), np.zeros(2, dtype=np.int64), np.zeros((2, 1)), torch.zeros(2),
        torch.zeros(2, dtype=torch.bfloat16), torch.zeros(1, 2), [2**70], [2**70 + 1],
    ]  # fmt: skip
    assert len({data_digest([value]) for value in values}) == len(values)
    assert data_digest({"b": 1, "a": 2}) == data_digest({"a": 2, "b": 1})
    with pytest.raises(TypeError, match="got object"):
        data_digest([object()])


def test_many_rows_are_sampled_and_counted():
    class Many:
        def __init__(self, count):
            self.count = count

        def __len__(self):
            return self.count

        def __getitem__(self, place):
            return {"input_ids": [place % 7]}

    digests = {rows_digest(Many(count)) for count in (1, ROWS, ROWS + 1, 10**9)}
    assert len(digests) == 4


def test_weights_of_any_type_are_hashed():
    model = torch.nn.Module()
    for name, dtype in (("b", torch.bfloat16), ("i", torch.int8)):
        model.register_buffer(name, torch.ones(3, 2).to(dtype))
    model.register_buffer("scalar", torch.tensor(2.0))
    first = weights_digest(model)
    model.scalar += 1
    assert weights_digest(model) != first


def interrupt(*_args, **_options):
    raise KeyboardInterrupt


def stop_stage_one(monkeypatch, step):
    """Have Ctrl-C come in a step of stage one, before anything has moved."""
    real = observer.KernelTrainer.step

    def cut(self, batches, number):
        return interrupt() if number == step else real(self, batches, number)

    return monkeypatch.setattr(observer.KernelTrainer, "step", cut)


def stop_stage_two(monkeypatch, step):
    real = transformers.Trainer.training_step

    def cut(self, *args, **options):
        return interrupt() if self.state.global_step == step - 1 else real(self, *args, **options)

    return monkeypatch.setattr(transformers.Trainer, "training_step", cut)


@pytest.fixture
def cut(models, tmp_path, cli):
    """Run a line until Ctrl-C in a step, on models and data of its own, and return it with --resume."""

    def interrupted(verb, step, *more):
        root = shutil.copytree(models, tmp_path / "mine", dirs_exist_ok=True)
        line = line_of(verb, root, tmp_path / "out", *more)
        with pytest.MonkeyPatch.context() as patch:
            (stop_stage_two if verb == "finetune" else stop_stage_one)(patch, step)
            assert cli(line)[0] == 130
        return root, [*line, "--resume"]

    return interrupted


def edit(file, old, new):
    text = file.read_text()
    assert old in text and len(old) == len(new)
    file.write_text(text.replace(old, new, 1))


def other_weights(folder):
    file = folder / "model.safetensors"
    state = load_file(file)
    name = next(name for name in state if name.endswith("query.weight"))
    save_file(state | {name: state[name] + 1e-3}, file, metadata={"format": "pt"})


CHANGES = {
    "data": (lambda root: edit(root / "data.jsonl", "cat sat", "sat cat"), [], "data contents="),
    "rate": (None, ["--learning-rate", 1e-4], "learning_rate="),
    "seed": (None, ["--seed", 5], "seed=0, now it is 5"),
    "batch": (None, ["--batch-size", 16], "batch_size="),
    "rows": (None, ["--limit", 20], "data limit=None, now it is 20"),
    "length": (None, ["--max-length", 12], "data max_length=16, now it is 12"),
    "schedule": (None, ["--schedule", "linear"], "schedule='cosine', now it is 'linear'"),
    "steps": (None, ["--epochs", 3], "epochs=2.0, now it is 3.0"),
    "weights": (lambda root: other_weights(root / "hedgehog"), [], "model weights="),
}


def check_refusals(changes, root, line, cli):
    """Each change is refused by name; a refused line changes nothing, so all of them follow one interrupted run."""
    for name, (do, more, named) in changes.items():
        files = [root / "data.jsonl", *root.glob("*/model.safetensors")]
        before = [file.read_bytes() for file in files]
        if do is not None:
            do(root)
        code, _, err = cli([*line, *more])
        assert code == 2 and len(err.splitlines()) == 1, name
        assert "resume: the run was started with" in err and named in err, name
        for file, content in zip(files, before, strict=True):
            file.write_bytes(content)


def test_finetune_goes_on_with_the_same_only(cut, cli, tmp_path):
    check_refusals(CHANGES, *cut("finetune", 4), cli)
    assert list((tmp_path / "out.training").glob("checkpoint-*"))


STAGE_ONE = {
    "activation": (None, ["--kernel-arg", "activation=exp"], "kernels="),
    "window": (None, ["--window", 4], "kernels="),
    "kernel": (None, ["--kernel", "t2r"], "kernels="),
    "base": (lambda root: other_weights(root / "bert"), [], "model weights="),
    "data": (lambda root: edit(root / "data.jsonl", "cat sat", "sat cat"), [], "data contents="),
    "rate": (None, ["--learning-rate", 1e-4], "learning_rate=None, now it is 0.0001"),
    "rows": (None, ["--holdout", 4], "data holdout=8, now it is 4"),
}


def test_convert_goes_on_with_the_same_only(cut, cli, tmp_path):
    check_refusals(STAGE_ONE, *cut("convert", 4, "--save-every", 2), cli)
    assert list((tmp_path / "out.stage1").glob("step-*"))


def test_states_of_older_versions_are_not_trusted(cut, cli, tmp_path):
    _, line = cut("finetune", 4)
    (tmp_path / "out.training" / "started.json").unlink()
    code, _, err = cli(line)
    # Nothing says whose they are: they are neither resumed nor removed.
    assert code == 2 and "is not part of a tuning run of linearize" in err and len(err.splitlines()) == 1


# Item 11.
def test_the_logged_train_loss_is_that_of_the_whole_run(models, cut, cli, tmp_path):
    whole = tmp_path / "whole"
    assert cli(line_of("finetune", models, whole))[0] == 0
    _, line = cut("finetune", 6)
    assert cli(line)[0] == 0
    one, two = (
        next(entry["train_loss"] for entry in read_log(folder) if "train_loss" in entry)
        for folder in (whole, tmp_path / "out")
    )
    assert two == pytest.approx(one, rel=1e-6)
    weights = [load_file(folder / "model.safetensors") for folder in (whole, tmp_path / "out")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_run_resumed_after_its_last_step_logs_its_train_loss_too(models, cli, tmp_path):
    """The result could not be written, or was not yet; the line is made after the last state."""
    whole, line = tmp_path / "whole", line_of("finetune", models, tmp_path / "out")
    assert cli(line_of("finetune", models, whole))[0] == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("linearize.training.stage_two.save.save_model", interrupt)
        assert cli(line)[0] == 130
    assert cli([*line, "--resume"])[0] == 0
    one, two = (
        [(entry["train_loss"], entry["step"]) for entry in read_log(folder) if "train_loss" in entry]
        for folder in (whole, tmp_path / "out")
    )
    assert len(one) == 1 and two == [pytest.approx(one[0], rel=1e-6)]


@pytest.mark.parametrize("verb", ["convert", "finetune"])
def test_a_finished_run_has_nothing_to_resume(verb, models, cli, tmp_path):
    """It was told to overwrite the result, which "exists and is not empty"."""
    line = line_of(verb, models, tmp_path / "out")
    assert cli(line)[0] == 0
    code, _, err = cli([*without(line, "--overwrite"), "--resume"])
    assert (
        code == 2 and f"output {str(tmp_path / 'out')!r} holds a finished model, so there is nothing to resume" in err
    )
    assert len(err.splitlines()) == 1


# Item 20.
@pytest.mark.sampled("one")
@pytest.mark.parametrize("step", [2, 5])
def test_ctrl_c_before_the_first_state_keeps_what_was_learned(step, models, cut, cli, tmp_path):
    _, line = cut("convert", step, "--save-every", 100)
    assert [path.name for path in (tmp_path / "out.stage1").iterdir()] == [f"step-{step - 1}"]
    steps = []
    with pytest.MonkeyPatch.context() as patch:
        real = observer.KernelTrainer.step
        patch.setattr(
            observer.KernelTrainer, "step", lambda self, b, number: steps.append(number) or real(self, b, number)
        )
        assert cli(line)[0] == 0
    assert steps == list(range(step, 7))
    assert cli(line_of("convert", models, tmp_path / "whole"))[0] == 0
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_ctrl_c_after_stage_one_keeps_it(models, cli, tmp_path):
    """The alignment measures its start for minutes; what stage one had learned was lost, without --save-every."""
    root = shutil.copytree(models, tmp_path / "mine")
    more = ["--align-steps", 2]
    line = line_of("convert", root, tmp_path / "out", *more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "align", interrupt)
        code, _, err = cli(line)
    assert code == 130 and f"the state of step 6 is in {tmp_path / 'out'}.stage1; resume with the same line" in err
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observer.KernelTrainer, "step", interrupt)
        assert cli([*line, "--resume"])[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "out"]
    assert cli(line_of("convert", models, tmp_path / "whole", *more))[0] == 0
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out"))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture
def ctrl_c_counts():
    """A background job's children ignore Ctrl-C; here it shall raise, wherever the tests were started."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_in_a_half_done_step_waits_for_its_end(tmp_path, ctrl_c_counts):
    """The signal comes while the optimizer moves the kernels; the state that is kept is that of a whole step."""
    real, seen = torch.optim.AdamW.step, []

    def slow(self, *args, **options):
        seen.append(1)
        found = real(self, *args, **options)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return found

    def run(folder, resume=False):
        model = linearize.convert(original("bert"), "hedgehog")
        given = DistillConfig(steps=6, eval_every=3, query_sample=5, save_every=100, folder=str(folder), resume=resume)
        return model, distill(model, Fixed(model), given)

    whole, expected = run(tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", slow)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "cut")
    assert StateFolder(tmp_path / "cut", 1).steps() == [3]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    again, result = run(tmp_path / "cut", resume=True)
    assert [report.losses for report in result.history] == [report.losses for report in expected.history]
    assert all(map(torch.equal, whole.state_dict().values(), again.state_dict().values()))


class Fixed:
    """Ever the same batches."""

    def __init__(self, model):
        self.batches = [inputs_of(model, tokens=9 + number) for number in range(3)]

    def train_batches(self, start=0, rank=0, world_size=1):
        return itertools.islice(itertools.cycle(self.batches), start, None)

    def holdout_batches(self):
        return self.batches[:1]
