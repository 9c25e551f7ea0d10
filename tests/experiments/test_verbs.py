"""The verbs finetune, evaluate, init, run, recipes and results, as typed."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from linearize.cli.main import build_parser, main


def out_of(capsys, *arguments):
    code = main([str(one) for one in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("verb", ["finetune", "evaluate", "init", "run", "recipes", "results"])
def test_help(verb, capsys):
    code, out, _ = out_of(capsys, verb, "--help")
    assert code == 0 and "examples:" in out
    for action in build_parser(verb)._actions:
        assert action.help, action


def test_finetune_evaluate_compare(checkpoint, sets, tmp_path, capsys):
    common = ["--task", "cola", "--dataset", sets, "--max-length", 20, "--device", "cpu"]
    target = tmp_path / "tuned"
    tune = ["--epochs", 2, "--batch-size", 16, "--learning-rate", 5e-3, "--output", target, "--lora", "r=2,alpha=4"]
    code, out, err = out_of(capsys, "finetune", checkpoint, *common, *tune, "--json")
    assert code == 0, err
    assert json.loads(out)["metrics"].keys() == {"matthews"}
    # Every measurement is shown once: at its step, or with the kept state if that was not the last.
    steps = re.findall(r"^step (\d+)/.*matthews", " ".join(err.split("\n")).replace(" step ", "\nstep "), re.MULTILINE)
    kept = re.search(r"Kept (step (\d+) of|the initial)[^:]*(: *matthews [-\d.]+)?", err)
    assert steps and len(set(steps)) == len(steps) and (kept[3] is None) == ((kept[2] or "0") == steps[-1])
    code, out, err = out_of(capsys, "evaluate", target, *common, "--compare", target, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["score"] == found["sides"][1]["score"] and found["figures"].keys() == {"matthews"}
    code, out, _ = out_of(capsys, "evaluate", target, *common)
    assert code == 0 and "matthews" in out and "score (matthews)" in out
    code, _, err = out_of(capsys, "finetune", checkpoint, *common, *tune)
    assert code == 2 and "is not empty" in err and err.count("\n") == 1


def test_init(tmp_path, capsys):
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 20}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, err = out_of(
        capsys, "init", tmp_path / "config.json", "--kernel", "elu", "--output", tmp_path / "new", "--json"
    )
    assert code == 0, err
    assert [layer["kernel"] for layer in json.loads(out)["plan"]["layers"]] == ["elu", "elu"]
    code, _, err = out_of(capsys, "init", tmp_path / "nowhere", "--output", tmp_path / "other")
    assert code == 2 and "expected a JSON or YAML file" in err
    # It replaced the model whose tokenizer it had read.
    again = ("init", tmp_path / "config.json", "--tokenizer", tmp_path / "new", "--output", tmp_path / "new")
    code, _, err = out_of(capsys, *again, "--overwrite")
    assert code == 2 and "which is read; choose another folder" in err


def test_init_with_matching_keys(tmp_path, capsys):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config, target = tmp_path / "config.json", tmp_path / "new"
    words = ("init", config, "--kernel", "elu", "--task", "masked-lm", "--output", target)
    for flags, equal in (((), False), (("--matching-keys", "--overwrite"), True)):
        config.write_text(json.dumps({"model_type": "bert", "vocab_size": 20, **sizes}))
        code, _, err = out_of(capsys, *words, *flags)
        assert code == 0, err
        weights = load_file(target / "model.safetensors")
        queries = [name for name in weights if name.endswith("self.query.weight")]
        assert len(queries) == 2
        assert all(torch.equal(weights[x], weights[x.replace("query", "key")]) is equal for x in queries)
    for changes in ({"model_type": "gpt2", "n_embd": 16}, {"model_type": "llama", "num_key_value_heads": 1}):
        config.write_text(json.dumps({"vocab_size": 20, **sizes, **changes}))
        code, _, err = out_of(capsys, *words[:4], "--output", tmp_path / "other", "--matching-keys")
        assert code == 2 and "without separate query and key projections of the same size" in err
        assert not (tmp_path / "other").exists()


def test_recipes(capsys):
    code, out, _ = out_of(capsys, "recipes", "--json")
    facts = {fact["name"]: fact for fact in json.loads(out)}
    assert code == 0 and facts["hedgehog-glue"]["paper"] == "Hedgehog, table 2"
    assert out_of(capsys, "recipes")[1].count("minilm-") == 6
    code, out, _ = out_of(capsys, "recipes", "minilm-glue")
    assert code == 0 and out.startswith("# linearize run minilm-glue data=FOLDER")
    assert out_of(capsys, "recipes", "minilm")[0] == 2


def test_run_and_results(tiny, write, tmp_path, capsys):
    tiny["kernels"] = ["softmax", "elu"]
    name, folder = write(tiny), tmp_path / "run"
    code, out, _ = out_of(capsys, "run", name, "tasks=[cola]", "--dry-run")
    assert code == 0 and "2 cells" in out and "elu-cola-s0: matthews" in out and not folder.exists()
    code, out, _ = out_of(capsys, "run", name, "--dry-run", "--only", "elu-*", "--only", "*-cola-s0")
    assert code == 0 and "3 cells" in out and "softmax-mrpc-s0" not in out
    code, _, err = out_of(capsys, "run", name, "--dry-run", "--only", "cola")
    assert code == 2 and "only: got 'cola', which matches no cell" in err
    code, out, err = out_of(capsys, "run", name, "tasks=[cola]", "--output", folder)
    assert code == 0, err
    assert "[1/2] softmax-cola-s0" in out and "| 58.8" in out
    code, out, _ = out_of(capsys, "results", folder)
    assert code == 0 and "| 58.8" in out
    assert len(json.loads(out_of(capsys, "results", tmp_path, "--json")[1])) == 1
    code, _, err = out_of(capsys, "run", name, "tasks=[cola]", "--output", folder)
    assert code == 2 and "continue with --resume" in err
    assert out_of(capsys, "run", name, "tasks=[cola]", "--output", folder, "--resume")[0] == 0
    code, _, err = out_of(capsys, "run", name, "finetune.epoch=1", "--dry-run")
    assert code == 2 and "Did you mean 'epochs'" in err
    code, _, err = out_of(capsys, "run", name, f"data={tmp_path / 'none'}", "--dry-run")
    assert code == 2 and "does not exist" in err
