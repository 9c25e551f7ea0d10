"""Every file that a resume reads: cut off, replaced or of another run, it ends in one line."""

from __future__ import annotations

import json
import shutil
import tempfile
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import make_text, texts
from support.command_lines import run
from support.training import Fixed, batches, sharp

import linearize
from linearize.checkpoint.loading import load_processor
from linearize.core.errors import CheckpointError, ConfigError, LinearizeError
from linearize.training.alignment.config import AlignConfig
from linearize.training.stage_one.config import DistillConfig
from linearize.training.stage_two.config import DataOptions, TuneConfig
from linearize.training.stage_two.load import load_for_task
from linearize.training.stage_two.prepare import prepare
from linearize.training.stage_two.save import last_checkpoint
from linearize.training.stage_two.tasks import task
from linearize.training.stage_two.trainer import finetune

STAGES = {"stage one": (linearize.distill, DistillConfig), "alignment": (linearize.align, AlignConfig)}


def run_stage(stage, folder, resume=False):
    model = sharp("bert")
    call, config = STAGES[stage]
    options = {"steps": 4, "eval_every": 2, "save_every": 2, "keep": 1, "folder": str(folder), "resume": resume}
    call(model, Fixed(batches(model, 2)), config(**options))


@pytest.fixture(scope="module", params=STAGES)
def states(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("states") / "run"
    run_stage(request.param, folder)
    return request.param, folder


def resized(tensors):
    return {name: torch.zeros(1) for name in tensors}


def moments_resized(tensors):
    return {name: torch.zeros(3, 2) if "exp_avg" in name else x for name, x in tensors.items()}


TENSORS = {
    "cut": None,
    "none": lambda tensors: {"a": torch.zeros(1)},
    "resized": resized,
    "moments": moments_resized,
    "names": lambda tensors: {f"x{name}": tensor for name, tensor in tensors.items()},
}
RECORDS = {
    "list": lambda record: [],
    "text": lambda record: "text",
    "step": lambda record: {**record, "step": "two"},
    "another step": lambda record: {**record, "step": 1},
    "history": lambda record: {**record, "history": [{"a": 1}]},
    **{
        f"no {key}": lambda record, key=key: {k: v for k, v in record.items() if k != key}
        for key in ("step", "progress")
    },
    "progress": lambda record: {**record, "progress": {"a": 1}},
    "fingerprint": lambda record: {**record, "fingerprint": [1]},
}


@pytest.mark.sampled("values")
@pytest.mark.parametrize("change", [*TENSORS, *RECORDS])
def test_a_damaged_state_of_the_first_stages_is_one_line(states, change, tmp_path):
    stage, made = states
    shutil.copytree(made, tmp_path / "run")
    path = max((tmp_path / "run").glob("step-*"))
    if change in RECORDS:
        record = RECORDS[change](json.loads((path / "state.json").read_text()))
        (path / "state.json").write_text(json.dumps(record))
    elif TENSORS[change] is None:
        (path / "state.safetensors").write_bytes((path / "state.safetensors").read_bytes()[:-40])
    else:
        save_file(TENSORS[change](load_file(path / "state.safetensors")), path / "state.safetensors")
    with pytest.raises(CheckpointError, match=r"cannot be read .*remove that folder") as refused:
        run_stage(stage, tmp_path / "run", resume=True)
    assert "\n" not in str(refused.value)


@pytest.fixture(scope="module")
def tuning(tmp_path_factory):
    root = tmp_path_factory.mktemp("tuning")
    texts(root, 32)
    make_text(root / "linear", head="AutoModelForSequenceClassification")

    def stop(step):
        if step.step == 3:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        tune(root, root / "work", on_step=stop)
    assert last_checkpoint(root / "work").name == "checkpoint-2"
    return root


def tune(root, folder, **more):
    name = str(root / "linear")
    data = prepare(
        task("text-classification", columns=("text",)), load_processor(name, "text"), DataOptions(max_length=16),
        data=str(root / "texts.jsonl"),
    )  # fmt: skip
    config = TuneConfig(batch_size=8, steps=4, eval_every=2, save_every=2, selection_rows=4)
    return finetune(load_for_task(name, data), data, config, folder=folder, **more)


def other_sizes(path):
    state = torch.load(path, weights_only=True)
    for moments in state["state"].values():
        moments["exp_avg"] = torch.zeros(3, 2)
    torch.save(state, path)


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(b"garbage" * 50),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-50]),
    "list": lambda path: torch.save([1], path) if path.suffix in (".pt", ".pth") else path.write_text("[]"),
    "mapping": lambda path: torch.save({"a": 1}, path) if path.suffix in (".pt", ".pth") else path.write_text("{}"),
    "sizes": other_sizes,
}
FILES = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "model.safetensors", "started.json")


@pytest.mark.sampled("values")
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_state_of_a_tuning_is_one_line_or_not_used(tuning, name, damage, tmp_path):
    if damage == "sizes" and name != "optimizer.pt":
        pytest.skip("a file without moments")
    shutil.copytree(tuning / "work", tmp_path / "work")
    DAMAGE[damage](tmp_path / "work" / ("" if name == "started.json" else "checkpoint-2") / name)
    try:
        # A state without its record is incomplete, as after a kill: the run starts from the one before.
        assert tune(tuning, tmp_path / "work", resume=True).steps == 4 and name in (
            "trainer_state.json",
            "scheduler.pt",
        )
    except LinearizeError as error:
        assert "\n" not in str(error)


def resumed(folder):
    """What `choose` needs of a run that is resumed from a folder."""
    stage = SimpleNamespace(folder=str(folder), resume=True, keep=1)
    return SimpleNamespace(
        job=SimpleNamespace(keeps_states=True, endings={"stage": "stage1"}, stage=stage),
        source=SimpleNamespace(options={}, digest=lambda: "x"),
        plan=SimpleNamespace(to_dict=dict),
        loaded=SimpleNamespace(model=torch.nn.Linear(2, 2)),
        choosing={},
        choices={},
    )


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"window": 3}', '{"window": {"plan": {}}}', '{"window": []}'])
def test_a_damaged_choice_is_made_again(content, tmp_path):
    from linearize.jobs.stages import choose
    from linearize.training.states import StateFolder

    context = resumed(tmp_path)
    StateFolder(tmp_path, 1).save_choices({})
    (tmp_path / "choices" / "state.json").write_text(content)
    made = choose(context, "window", "auto", lambda: {"plan": {"made": "again"}})
    assert made["plan"] == {"made": "again"} and context.choices["window"] is made


def test_a_choice_for_other_weights_is_not_kept(tmp_path):
    """A model that was replaced between the choice and the first state kept the choice of the one before."""
    from linearize.jobs.stages import choose, keep_choices

    context = resumed(tmp_path)
    choose(context, "window", "auto", lambda: {"plan": {"of": "the first"}})
    keep_choices(context)
    assert choose(context, "window", "auto", dict)["plan"] == {"of": "the first"}
    context.loaded.model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="resume: the run was started with model weights="):
        choose(context, "window", "auto", dict)
    # A run of an earlier version did not record them.
    del context.choices["window"]["fingerprint"]["model weights"]
    keep_choices(context)
    assert choose(context, "window", "auto", dict)["plan"] == {"of": "the first"}


def test_no_temporary_folder_is_one_line(tuning, monkeypatch, capsys):
    """Under `ulimit -f 0`, Python finds no folder in which it can write a temporary file."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    line = "evaluate", tuning / "linear", "--task", "text-classification", "--dataset", tuning / "texts.jsonl"
    code, _, err = run(capsys, *line, "--columns", "text", "--device", "cpu")
    lines = [text for text in err.splitlines() if text.startswith("linearize: error: ")]
    assert code == 2 and len(lines) == 1 and "set TMPDIR to another folder" in lines[0] and "Traceback" not in err
