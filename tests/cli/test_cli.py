"""The command line on tiny models: what it prints, what it writes, and how it refuses."""

import json
import subprocess
import sys

import pytest
import torch
import transformers
from support import forks
from support.checkpoints import FAMILIES, tokenizer
from support.command_lines import run
from support.tiny import original
from transformers import pipeline

import linearize
from linearize.cli import main
from linearize.cli.main import VERBS, build_parser
from linearize.modeling.model import is_linearized
from linearize.training.stage_one import observer


def logits(model, name):
    with torch.no_grad():
        if name == "vit":
            return model(torch.linspace(-1, 1, 2 * 3 * 900).reshape(2, 3, 30, 30)).logits
        return model(torch.arange(20).reshape(2, 10)).logits


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("gpt2", "llama"))) for name in FAMILIES]
)
def test_convert_saves_what_stock_transformers_loads(name, folders, tmp_path, capsys, monkeypatch):
    head, task = FAMILIES[name]
    kept = {}
    # What the conversion holds in memory just before it saves, to compare with what comes back.
    import linearize.jobs.stages as save_module

    real = save_module.save

    def spy(model, *args, **kwargs):
        kept["logits"] = logits(model.eval(), name)
        return real(model, *args, **kwargs)

    monkeypatch.setattr(save_module, "save", spy)
    data = [] if name == "vit" else ["--dataset", folders / "data.jsonl", "--text-column", "sentence"]
    out = tmp_path / "out"
    code, text, _ = run(
        capsys, "convert", folders / name, "--kernel", "hedgehog", *data, "--distill-steps", 3, "--holdout", 8,
        "--batch-size", 4, "--output", out, "--device", "cpu",
    )  # fmt: skip
    assert code == 0
    assert "2 of 2 attentions become linear" in text
    assert "Saved" in text
    loaded = getattr(transformers, head).from_pretrained(out)
    for parameter in loaded.parameters():
        parameter.data = parameter.data.clone()
    assert torch.equal(logits(loaded, name), kept["logits"])
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [(line["stage"], line["step"]) for line in log] == [
        *(("distillation", step) for step in (1, 2, 3)),
        ("alignment", 1),
    ]
    assert is_linearized(pipeline(task, str(out), device="cpu").model)


def test_longer_inputs_and_json(folders, tmp_path, capsys):
    out = tmp_path / "long"
    code, text, _ = run(
        capsys, "convert", folders / "gpt2", "--max-length", 200, "--distill-steps", 2, "--dataset",
        folders / "data.jsonl", "--output", out, "--json", "--device", "cpu", "--holdout", 8,
    )  # fmt: skip
    assert code == 0
    result = json.loads(text)
    assert result["positions"]["new_length"] == 200
    assert result["distillation"]["steps"] == 2
    assert result["parameters_added"] == 2 * 4 * (8 * 8 + 8)
    assert result["distillation"]["after"]["mean"]["kl"] < result["distillation"]["before"]["mean"]["kl"]
    assert transformers.AutoTokenizer.from_pretrained(out).model_max_length == 200
    model = transformers.AutoModel.from_pretrained(out)
    with torch.no_grad():
        assert model(torch.randint(0, 90, (1, 200))).last_hidden_state.shape[1] == 200


def test_larger_images_are_asked_for_in_pixels(folders, tmp_path, capsys):
    """In tokens one had to know the patches, and the class token."""
    line = ["convert", folders / "vit", "--distill-steps", 0, "--align-steps", 0, "--device", "cpu"]
    code, text, _ = run(capsys, *line, "--image-size", 50, "--output", tmp_path / "large", "--json")
    assert code == 0
    assert json.loads(text)["positions"] | {"changed": [], "note": ""} == {
        "old_length": 10, "new_length": 26, "method": "bicubic", "changed": [], "note": "", "image_size": [50, 50]
    }  # fmt: skip
    size = transformers.AutoImageProcessor.from_pretrained(tmp_path / "large").size
    assert (size["height"], size["width"]) == (50, 50)
    model = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "large")
    with torch.no_grad():
        assert model(torch.zeros(1, 3, 50, 50)).logits.shape == (1, 2)
    for size, words in ((45, "multiples of (10, 10)"), (20, "not below (30, 30)"), (0, "at least 1")):
        assert words in run(capsys, *line, "--image-size", size)[2]
    assert "drop one of them" in run(capsys, *line, "--image-size", 50, "--max-length", 26)[2]
    code, _, err = run(capsys, "convert", folders / "gpt2", "--image-size", 50)
    assert code == 2 and "reads text; give --max-length, in tokens" in err


def test_dry_run_prints_the_plan_and_writes_nothing(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = ["--dataset", folders / "data.jsonl", "--text-column", "sentence"]
    code, text, _ = run(capsys, "convert", folders / "llama", "--dry-run", "--keep-softmax", "0", *data)
    assert code == 0
    assert "1 of 2 attentions become linear" in text
    assert "kept on request" in text
    assert list(tmp_path.iterdir()) == []
    code, text, _ = run(capsys, "convert", folders / "llama", "--dry-run", "--json", "--distill-steps", 2)
    assert [layer["kernel"] for layer in json.loads(text)["layers"]] == ["hedgehog", "hedgehog"]


def test_default_output_is_model_and_kernel(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, _ = run(capsys, "convert", folders / "gpt2", "--kernel", "flexformer_n", "--distill-steps", 0)
    assert code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["gpt2-flexformer_n"]


BAD = {
    "kernel": (["--kernel", "hedghog"], "Did you mean 'hedgehog'"),
    "argument": (["--kernel-arg", "activatoin=exp"], "Did you mean 'activation'"),
    "value": (["--kernel-arg", "activation=tanh"], "expected one of softmax, exp"),
    "pair": (["--kernel-arg", "activation"], "expected NAME=VALUE"),
    "twice": (["--kernel-arg", "bias=true", "--kernel-arg", "bias=false"], "given twice"),
    "kept": (["--keep-softmax", "0,1"], "nothing is left to convert"),
    "layer": (["--keep-softmax", "7"], "layer 7 does not exist"),
    "ranges": (["--keep-softmax", "one"], "expected layer numbers"),
    "task": (["--task", "fil-mask"], "Did you mean 'fill-mask'"),
    "length": (["--max-length", "3"], "64"),
    "column": (["--dataset", "DATA", "--text-column", "txet"], "sentence"),
    "empty": (["--dataset", "EMPTY"], "empty"),
    "missing": (["--dataset", "./nowhere.jsonl"], "nowhere.jsonl"),
    "device": (["--device", "cuda:9"], "this machine has cpu"),
    "precision": (["--precision", "int4"], "expected one of no, bf16, fp16"),
    "loss": (["--loss", "l2"], "expected one of auto, weights, output, both"),
    "steps": (["--distill-steps", "-1"], "at least 0"),
    "option": (["--kernal", "hedgehog"], "Did you mean --kernel"),
    "number": (["--batch-size", "many"], "invalid int value"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(case, folders, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    extra, words = BAD[case]
    places = {"DATA": folders / "data.jsonl", "EMPTY": folders / "empty.jsonl"}
    code, _, err = run(capsys, "convert", folders / "gpt2", *[places.get(a, a) for a in extra])
    assert code == 2
    assert err.startswith("linearize: error: ")
    assert len(err.strip().splitlines()) == 1
    assert words in err
    assert list(tmp_path.iterdir()) == []


def test_models_that_cannot_be_had(folders, tmp_path, capsys):
    for name, words in (
        (folders, "is not a checkpoint: expected a folder with a config.json"),
        ("nobody/nothing", "HF_HUB_OFFLINE"),
        ("./not-here", "does not exist"),
    ):
        code, _, err = run(capsys, "convert", name)
        assert code == 2
        assert words in err
        assert len(err.strip().splitlines()) == 1
    (tmp_path / "config.json").write_text('{"model_type": "bert", ')
    code, _, err = run(capsys, "convert", tmp_path)
    assert (code, "cannot be loaded, its config.json: Expecting" in err) == (2, True)


def test_output_that_holds_something_is_refused_unless_overwritten(folders, tmp_path, capsys):
    (tmp_path / "precious.txt").write_text("keep me")
    arguments = ["convert", folders / "gpt2", "--distill-steps", 0, "--output", tmp_path]
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert "--overwrite" in err
    assert (tmp_path / "precious.txt").read_text() == "keep me"
    # A folder that linearize did not write is not replaced at all; one that it wrote is.
    code, _, err = run(capsys, *arguments, "--overwrite")
    assert code == 2 and "'precious.txt'" in err
    assert (tmp_path / "precious.txt").read_text() == "keep me" and not (tmp_path / "config.json").exists()
    ours = [*arguments[:-1], tmp_path / "ours"]
    assert run(capsys, *ours)[0] == 0
    assert run(capsys, *ours)[0] == 2 and run(capsys, *ours, "--overwrite")[0] == 0


def test_interrupt_leaves_nothing_behind(folders, tmp_path, capsys, monkeypatch):
    def interrupt(self, *args):
        raise KeyboardInterrupt

    monkeypatch.setattr(observer.KernelTrainer, "step", interrupt)
    out = tmp_path / "out"
    code, _, err = run(
        capsys, "convert", folders / "gpt2", "--dataset", folders / "data.jsonl", "--output", out, "--holdout", 8
    )
    assert code == 130
    assert "interrupted" in err
    assert list(tmp_path.iterdir()) == []


def test_nan_in_stage_one_names_the_layer(folders, tmp_path, capsys):
    model = original("gpt2", "AutoModelForCausalLM")
    with torch.no_grad():
        # Every weight is a number, but the scores are none.
        model.transformer.h[0].attn.c_attn.weight.mul_(1e25)
    model.save_pretrained(tmp_path / "model")
    tokenizer(ends=False).save_pretrained(tmp_path / "model")
    out = tmp_path / "out"
    capsys.readouterr()
    code, _, err = run(
        capsys, "convert", tmp_path / "model", "--dataset", folders / "data.jsonl", "--output", out, "--holdout", 8
    )
    assert code == 2
    # The measurement before the first step sees it.
    assert "layer transformer.h.0.attn" in err and "NaN or infinity in 4 of 4 heads" in err
    assert len(err.strip().splitlines()) == 1
    assert not out.exists()


def test_a_full_disk_leaves_no_half_checkpoint(folders, tmp_path, capsys, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "save_pretrained", full)
    code, _, err = run(capsys, "convert", folders / "gpt2", "--distill-steps", 0, "--output", tmp_path / "out")
    assert code == 2
    assert "No space left on device" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 33554432 bytes"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ],
)
def test_memory_that_runs_out_is_one_line(error, folders, tmp_path, capsys, monkeypatch):
    """It was a traceback and code 1, while a dry run said it in one line."""

    def full(*args, **kwargs):
        raise error

    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "save_pretrained", full)
    code, _, err = run(capsys, "convert", folders / "gpt2", "--distill-steps", 0, "--output", tmp_path / "out")
    assert code == 2
    assert err.startswith("linearize: error: memory ran out (") and len(err.splitlines()) == 1
    assert str(error) in err
    assert list(tmp_path.iterdir()) == []


def test_a_kill_during_the_save_leaves_no_half_checkpoint(folders, tmp_path):
    """The process dies inside save_pretrained: only a hidden folder may be left, never the final name."""
    code = (
        "import os, sys, transformers\n"
        "from linearize.cli import main\n"
        "transformers.PreTrainedTokenizerFast.save_pretrained = lambda *a, **k: os._exit(9)\n"
        "main(sys.argv[1:])"
    )
    arguments = ["convert", folders / "gpt2", "--distill-steps", "0", "--output", tmp_path / "out"]
    done = forks.python(code, *arguments)
    assert done.returncode == 9
    assert not (tmp_path / "out").exists()
    assert all(path.name.startswith((".new-out-", ".lock-out")) for path in tmp_path.iterdir())
    # What it left is cleared by the next.
    assert main([str(word) for word in arguments]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_kernels_table_one_and_json(capsys):
    code, text, _ = run(capsys, "kernels")
    assert code == 0
    assert "hedgehog" in text and "599,040" in text
    code, text, _ = run(capsys, "kernels", "--json")
    facts = {f["name"]: f for f in json.loads(text)}
    assert facts["hedgehog"]["feature_size"] == 128
    # 12 layers, 12 heads: d^2 + d; n d + n + d; 2 n d + d with n = d = 64.
    assert facts["hedgehog"]["extra_parameters_bert_base"] == 144 * (64 * 64 + 64)
    assert facts["flexformer_s"]["extra_parameters_bert_base"] == 144 * (64 * 64 + 2 * 64)
    assert facts["flexformer_n"]["extra_parameters_bert_base"] == 144 * (2 * 64 * 64 + 64)
    assert facts["flexformer_n"]["positive"] and not facts["rfa"]["positive"]
    assert facts["flexformer_n"]["stage_one"]["negative_penalty"] == 0
    code, text, _ = run(capsys, "kernels", "flexformer_n")
    assert "cos a_i.x cos b_i.x" in text and "init_scale" in text and "2606.27748" in text
    code, _, err = run(capsys, "kernels", "hedgheog")
    assert (code, "Did you mean 'hedgehog'" in err) == (2, True)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself_with_an_example(verb, capsys):
    assert main([verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert "examples:" in text
    assert f"linearize {verb}" in text.split("examples:")[1]
    build_parser(verb)


def test_top_level(capsys):
    assert main([]) == 2
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {verb} " in text for verb in VERBS)
    assert main(["--version"]) == 0
    assert linearize.__version__ in capsys.readouterr().out
    assert main(["convret"]) == 2
    assert "Did you mean 'convert'" in capsys.readouterr().err


def test_help_is_quick_and_loads_nothing_heavy():
    code = (
        "import sys; from linearize.cli import main; main(['convert', '--help']); "
        "sys.exit(3 if 'torch' in sys.modules or 'transformers' in sys.modules else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_states_resume_and_going_on(folders, tmp_path, capsys, monkeypatch):
    """A run cut off in the middle goes on with --resume and ends like an uninterrupted one; `distill` goes further."""
    base = [
        "convert", folders / "gpt2", "--dataset", folders / "data.jsonl", "--holdout", 8, "--batch-size", 4,
        "--distill-steps", 6, "--save-every", 2, "--device", "cpu", "--align-train", "kernels",
    ]  # fmt: skip
    assert run(capsys, *base, "--output", tmp_path / "whole")[0] == 0
    real = observer.KernelTrainer.step

    def cut(self, batches, step):
        if step == 4:
            raise KeyboardInterrupt
        return real(self, batches, step)

    monkeypatch.setattr(observer.KernelTrainer, "step", cut)
    code, _, err = run(capsys, *base, "--output", tmp_path / "cut")
    assert (code, "resume with the same line and --resume" in err) == (130, True)
    assert [path.name for path in sorted((tmp_path / "cut.stage1").iterdir())] == ["step-2", "step-3"]
    monkeypatch.undo()
    assert run(capsys, *base, "--output", tmp_path / "cut", "--resume")[0] == 0
    assert not (tmp_path / "cut.stage1").exists()
    one, two = (transformers.AutoModel.from_pretrained(tmp_path / name) for name in ("whole", "cut"))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))

    further = ["distill", tmp_path / "cut", "--dataset", folders / "data.jsonl", "--holdout", 8, "--distill-steps", 5]
    code, text, _ = run(capsys, *further, "--output", tmp_path / "more", "--json", "--device", "cpu")
    assert code == 0
    result = json.loads(text)
    assert result["distillation"]["after"]["mean"]["kl"] < result["distillation"]["before"]["mean"]["kl"]
    more = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "more")
    assert more.config.linearize["provenance"]["base_model"] == "gpt2"
    code, _, err = run(capsys, "distill", folders / "gpt2")
    assert (code, "is not a converted checkpoint" in err) == (2, True)
