"""What `convert` lets one say about stage one's data: mixtures with weights, batches by length, and resuming."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import WORDS
from support.command_lines import run

from linearize.checkpoint.inspect import inspect_checkpoint
from linearize.training.stage_one import observer


def base(folder, root, *arguments):
    options = ["--holdout", 6, "--distill-steps", 8, "--batch-size", 4, "--device", "cpu"]
    return ["convert", root / "gpt2", *options, "--output", folder / "out", *arguments]


def cut_at(monkeypatch, last):
    """Interrupt stage one at a step."""
    real = observer.KernelTrainer.step

    def cut(self, batches, step):
        if step == last:
            raise KeyboardInterrupt
        return real(self, batches, step)

    monkeypatch.setattr(observer.KernelTrainer, "step", cut)


def two_files(folder):
    """Short texts in one file, texts of all lengths in another; names with their weights."""
    short = [json.dumps({"text": f"{WORDS[i % 20]} {WORDS[i % 19]}"}) for i in range(30)]
    (folder / "short.jsonl").write_text("\n".join(short))
    (folder / "mixed.txt").write_text("\n".join(" ".join((WORDS * 3)[i : i + 1 + i % 60]) for i in range(60)))
    return f"{folder}/short.jsonl=0.25,{folder}/mixed.txt=0.75"


def test_a_mixture_is_named_with_its_shares(folders, tmp_path, capsys):
    dataset = two_files(tmp_path)
    code, text, _ = run(capsys, *base(tmp_path, folders, "--dataset", dataset, "--json"))
    assert code == 0
    assert json.loads(text)["data"].startswith(f"mixture of 25% file {tmp_path}/short.jsonl and 75%")


@pytest.mark.parametrize("verb", ["convert", "align"])
def test_pairs_are_read_as_pairs(folders, tmp_path, capsys, verb):
    rows = [json.dumps({"a": WORDS[i % 20], "b": f"{WORDS[i % 19]} {WORDS[i % 7]}"}) for i in range(30)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    line = ["--dataset", tmp_path / "pairs.jsonl", "--text-column", "a,b", "--holdout", 6]
    line += ["--batch-size", 4, "--device", "cpu", "--json", "--output", tmp_path / "out"]
    model = folders / "gpt2"
    if verb == "convert":
        line += ["--distill-steps", 2, "--align-steps", 0]
    else:
        untrained = ["--distill-steps", 0, "--align-steps", 0, "--output", tmp_path / "in"]
        assert run(capsys, "convert", model, *untrained)[0] == 0
        model, line = tmp_path / "in", [*line, "--steps", 2]
    code, text, err = run(capsys, verb, model, *line)
    assert code == 0, err
    assert "24 texts to train on, 6 held out" in json.loads(text)["data"]
    code, _, err = run(capsys, verb, model, *line, "--extra-pairs", 1)
    assert code == 2 and "unknown option '--extra-pairs'" in err
    code, _, err = run(capsys, verb, model, *line[:2], "--text-column", "a,b,c", *line[4:], "--overwrite")
    assert code == 2 and "expected one name, or two with a comma" in err


def test_images_have_no_length(folders, tmp_path, capsys):
    line = ["convert", folders / "vit", "--packing", "--distill-steps", 1, "--output", tmp_path / "out"]
    code, _, err = run(capsys, *line)
    assert (code, "packing" in err and "reads images" in err) == (2, True)


def test_stage_one_without_held_out_rows_names_the_option(folders, tmp_path, capsys):
    code, _, err = run(capsys, *base(tmp_path, folders, "--dataset", folders / "data.jsonl", "--holdout", 0))
    assert code == 2 and "got no held-out batch to measure on; set some rows aside (--holdout)" in err


def test_resuming_with_other_data_is_refused(folders, tmp_path, capsys, monkeypatch):
    line = base(tmp_path, folders, "--dataset", folders / "data.jsonl", "--save-every", 1)
    cut_at(monkeypatch, 3)
    assert run(capsys, *line)[0] == 130
    monkeypatch.undo()
    code, _, err = run(capsys, *line, "--resume", "--batch-size", 8)
    assert (code, "started with data batch_size=4, now it is 8" in err) == (2, True)
    code, _, err = run(capsys, *line, "--resume", "--packing")
    assert (code, "started with data packing=False, now it is True" in err) == (2, True)
    assert run(capsys, *line, "--resume")[0] == 0


@pytest.mark.parametrize(("option", "value", "other"), [("keep-softmax-heads", 2, 3), ("window", "auto:4", "auto:8")])
def test_a_resumed_run_keeps_what_was_chosen(folders, tmp_path, capsys, monkeypatch, option, value, other):
    """Choosing takes minutes, and rounding elsewhere may choose differently, which would refuse to resume."""
    more = ["--align-steps", 0, "--distill-length", 24, *(["--window", 3] if option != "window" else [])]
    line = [*base(tmp_path, folders, "--dataset", folders / "data.jsonl", "--save-every", 1), *more, f"--{option}"]

    def again(*args, **options):
        raise AssertionError("chosen again")

    cut_at(monkeypatch, 3)
    assert run(capsys, *line, value)[0] == 130
    monkeypatch.undo()
    for name in ("jobs.convert.keep_heads", "kernel_search.windows.choose_windows"):
        monkeypatch.setattr(f"linearize.{name}", again)
    code, _, err = run(capsys, *line, other, "--resume")
    assert (code, f"started with {option.replace('-', '_')}={value!r}, now it is {other!r}" in err) == (2, True)
    code, _, err = run(capsys, *line, value, "--resume")
    assert code == 0, err
    assert not (tmp_path / "out.stage1").exists()
    monkeypatch.undo()
    code, text, _ = run(capsys, *line, value, "--output", tmp_path / "whole")
    # The heads are chosen after the plan was printed, and add one line to it.
    kept = re.findall(r"Heads that keep softmax, 2 of 8 \(layer:head\): \d:\d,\d:\d\n", text)
    assert (code, text.count("attentions become linear"), len(kept)) == (0, 1, option == "keep-softmax-heads")
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("out", "whole")]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    plans = [inspect_checkpoint(tmp_path / name).plan for name in ("out", "whole")]
    assert plans[0] == plans[1]


def test_a_kernel_with_nothing_to_learn_says_so(folders, tmp_path, capsys):
    code, text, _ = run(capsys, *base(tmp_path, folders, "--dataset", folders / "data.jsonl", "--kernel", "performer"))
    assert code == 0
    assert "Stage one skipped: no kernel of this plan has anything to learn." in text


def test_the_last_states_are_kept(folders, tmp_path, capsys, monkeypatch):
    cut_at(monkeypatch, 7)
    states = ["--save-every", 1, "--keep-states", 3]
    assert run(capsys, *base(tmp_path, folders, "--dataset", folders / "data.jsonl", *states))[0] == 130
    assert sorted(path.name for path in (tmp_path / "out.stage1").iterdir()) == ["step-4", "step-5", "step-6"]
