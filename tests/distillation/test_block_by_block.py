"""Stage one, block after block, from weights files: equal to a run of the whole model to the bit, and resumable."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file
from support.tiny import inputs_of, original
from support.training import SCORES, Fixed

import linearize
from linearize.checkpoint.loading import load_model
from linearize.core.errors import CheckpointError, ConfigError, UnsupportedModelError
from linearize.modeling.weights import is_offloaded
from linearize.training.stage_one import DistillConfig, streamed
from linearize.training.stage_one.loop import distill

STEPS = {"steps": 6, "eval_every": 2, "seed": 3}
QUICK = ("llama, sampled queries", "a softmax layer between")
"""Cases of the fast tests; the others are slow."""
HOSTS = {
    # What is saved, how it is converted, and options of stage one.
    "bert": ("bert", {}, {}),
    "llama, sampled queries": ("llama", {}, {"query_sample": 5, "gradient_accumulation": 2}),
    "llama, windows": ("llama", {"window": 3}, {}),
    "gpt2, both losses": ("gpt2", {}, {"loss": "both"}),
    "a softmax layer between": ("qwen2", {"keep_softmax": [1], "config": {"num_hidden_layers": 3}}, {}),
    "a softmax layer first": ("mistral", {"keep_softmax": [0], "config": {"num_hidden_layers": 3}}, {}),
    "images": ("vit", {}, {}),
    "early stopping": ("llama", {}, {"learning_rate": 30.0, "patience": 1, "eval_every": 1}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the folder of a tiny model in bf16 and in many files; its softmax is far from flat."""
    root = tmp_path_factory.mktemp("saved")

    def folder(name, **config):
        path = root / f"{name}-{len(config)}"
        if not path.exists():
            model = original(name, **config).to(torch.bfloat16)
            with torch.no_grad():
                for key, parameter in model.named_parameters():
                    if any(part in key for part in SCORES):
                        parameter.mul_(8)
            model.save_pretrained(path, max_shard_size="8KB")
        return str(path)

    return folder


def data(model, count=4):
    generator, made = torch.Generator().manual_seed(0), []
    for number in range(count):
        batch = inputs_of(model, batch=5, tokens=12)
        if "input_ids" in batch:
            batch["input_ids"] = torch.randint(2, 90, (5, 12 - number % 2), generator=generator)
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            batch["attention_mask"][1, 8:] = 0
        else:
            batch["pixel_values"] = torch.randn(batch["pixel_values"].shape, generator=generator)
        made.append(batch)
    return Fixed(made, made[:2])


def run(folder, states=None, *, stream, convert, on_step=None, **options):
    model = load_model(folder, stream=stream).model
    assert is_offloaded(model) is stream
    linearize.convert(model, **convert)
    config = DistillConfig(**{**STEPS, **options}, folder=None if states is None else str(states))
    result = distill(model, data(model), config, on_step=on_step)
    return model, result


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in HOSTS]
)
def test_streamed_equals_resident_to_the_bit(case, saved, tmp_path):
    name, convert, options = HOSTS[case]
    folder = saved(name, **convert.pop("config", {}))
    (whole, expected), (blocks, got) = (
        run(folder, tmp_path / "states" if stream else None, stream=stream, convert=convert, **options)
        for stream in (False, True)
    )
    kernels = {key: x for key, x in whole.state_dict().items() if ".linear_attention." in key}
    own = blocks.state_dict()
    assert kernels and all(torch.equal(own[key], x) for key, x in kernels.items())
    assert (got.steps, got.best_step, got.held_out, got.stopped) == (
        expected.steps, expected.best_step, expected.held_out, expected.stopped
    )  # fmt: skip
    for left, right in zip(got.history, expected.history, strict=True):
        assert {**asdict(left), "seconds": 0} == {**asdict(right), "seconds": 0}
    assert (got.before, got.after) == (expected.before, expected.after)
    assert (expected.stopped == "early stopping") is (case == "early stopping")
    for model, target in ((whole, "whole"), (blocks, "blocks")):
        linearize.save(model, tmp_path / target)
    again, other = (weights_in(tmp_path / target) for target in ("whole", "blocks"))
    assert again.keys() == other.keys()
    assert all(torch.equal(again[key], other[key]) and again[key].dtype == other[key].dtype for key in again)


def weights_in(folder):
    return {key: x for file in folder.glob("*.safetensors") for key, x in load_file(file).items()}


class Stop(Exception):
    """What ends a run in the middle."""


def stop_at(step):
    def on_step(report):
        if report.step == step:
            raise Stop

    return on_step


@pytest.mark.parametrize("step", [9, *(pytest.param(step, marks=pytest.mark.slow) for step in (1, 18))])
def test_an_interrupted_run_resumes_after_its_last_finished_block(step, saved, tmp_path):
    """Of three layers with six steps each."""
    folder = saved("qwen2", num_hidden_layers=3)
    whole, expected = run(folder, tmp_path / "whole", stream=True, convert={})
    options = {"stream": True, "convert": {}}
    with pytest.raises(Stop):
        run(folder, tmp_path / "cut", on_step=stop_at(step), **options)
    done = (step - 1) // 6
    assert sorted(path.name for path in (tmp_path / "cut").glob("block-*")) == [f"block-{n}" for n in range(done)]
    if done == 1:
        with pytest.raises(ConfigError, match="--resume"):
            run(folder, tmp_path / "cut", **options)
        with pytest.raises(ConfigError, match="was started with learning_rate"):
            run(folder, tmp_path / "cut", resume=True, learning_rate=0.5, **options)
    ran = []
    blocks, got = run(folder, tmp_path / "cut", resume=True, on_step=lambda report: ran.append(report.step), **options)
    assert ran == list(range(6 * done + 1, 19))
    assert all(torch.equal(x, blocks.state_dict()[key]) for key, x in whole.state_dict().items() if "linear_att" in key)
    assert [x.losses for x in got.history] == [x.losses for x in expected.history]
    # The rows of the last finished block are all that is left of the hidden states.
    assert not list((tmp_path / "cut").rglob("train-*"))


@pytest.mark.slow
def test_the_rows_on_disk_are_those_between_two_blocks(saved, tmp_path):
    with pytest.raises(Stop):
        run(saved("qwen2", num_hidden_layers=3), tmp_path, stream=True, convert={}, on_step=stop_at(13))
    assert {path.parent.parent.name for path in tmp_path.rglob("*-*.safetensors")} == {"block-1"}
    assert len(list((tmp_path / "block-1" / streamed.FOLDER).glob("train-*"))) == 6


def test_a_disk_without_room_for_the_rows_is_refused_before_the_first_step(saved, tmp_path, monkeypatch):
    """What is asked for is what two folders of rows take, to the headers of their files."""
    folder, needed, there = saved("qwen2", num_hidden_layers=3), [], {}
    check, write = streamed.check_disk, streamed.BlockTrainer.write
    monkeypatch.setattr(streamed, "check_disk", lambda states, size: needed.append(size) or check(states, size))

    def weigh(trainer, *given):
        write(trainer, *given)
        rows = [path for path in tmp_path.rglob("*-*.safetensors") if path.parent.name == streamed.FOLDER]
        there[len(rows)] = sum(sum(x.nbytes for x in load_file(path).values()) for path in rows)

    monkeypatch.setattr(streamed.BlockTrainer, "write", weigh)
    with pytest.raises(Stop):
        run(folder, tmp_path / "cut", stream=True, convert={}, on_step=stop_at(13))
    # Batches have 12 and 11 tokens in turn; the first one is taken for all.
    assert max(there.values()) <= needed[0] <= 12 / 11 * max(there.values())
    run(folder, tmp_path / "cut", stream=True, convert={}, resume=True)
    # The third block is the last one: nothing is written after it.
    assert len(needed) == 1
    monkeypatch.setattr(streamed, "free_disk", lambda path: needed[0] - 1)
    with pytest.raises(CheckpointError, match=r"the hidden states of all rows need .* GB, but .* free; make room"):
        run(folder, tmp_path / "none", stream=True, convert={})
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_damaged_block_is_refused(saved, tmp_path):
    folder = saved("qwen2", num_hidden_layers=3)
    with pytest.raises(Stop):
        run(folder, tmp_path, stream=True, convert={}, on_step=stop_at(9))
    for path in (tmp_path / "block-0" / streamed.FOLDER).glob("train-3*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="block-0"):
        run(folder, tmp_path, stream=True, convert={}, resume=True)
    (tmp_path / "block-0" / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="block-0"):
        run(folder, tmp_path, stream=True, convert={}, resume=True)


@pytest.mark.parametrize(
    ("options", "named"), [({"feed": "student"}, "feed"), ({"save_every": 2}, "save_every"), ({}, "folder")]
)
def test_options_that_need_the_whole_model_are_refused(options, named, saved, tmp_path):
    states = None if named == "folder" else tmp_path / "states"
    with pytest.raises(ConfigError, match=named):
        run(saved("bert"), states, stream=True, convert={}, **options)
    assert not (tmp_path / "states").exists()


def save_as_pickle(folder):
    original("bert").save_pretrained(folder)
    weights = folder / "model.safetensors"
    torch.save(weights_in(folder), folder / "pytorch_model.bin")
    weights.unlink()


@pytest.mark.parametrize("case", ["bart", "pickle", "clip", "doubled"])
def test_hosts_that_are_not_a_chain_are_refused(case, saved, tmp_path):
    """An encoder-decoder, a pickle, two towers, and blocks whose hidden state is changed in between."""
    if case == "pickle":
        save_as_pickle(tmp_path)
        folder = str(tmp_path)
    else:
        folder = saved("bert" if case == "doubled" else case)
    with pytest.raises(UnsupportedModelError, match=r"stream-blocks: .*expected"):
        model = load_model(folder, stream=True).model
        if case == "doubled":
            model.encoder.layer[1].register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
        linearize.convert(model)
        distill(model, data(model), DistillConfig(**STEPS, folder=str(tmp_path / "states")))
