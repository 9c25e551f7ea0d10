"""The verbs `report` and `compare`."""

import json

import pytest
from report_models import make_text, texts

from linearize.cli import main


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("verbs")
    texts(root)
    for kernel in ("hedgehog", "elu"):
        make_text(root / kernel, kernel=kernel)
    return root


def run(capsys, *arguments):
    code = main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def common(made):
    return ["--dataset", made / "texts.jsonl", "--text-column", "text", "--inputs", 2, "--max-length", 16,
            "--device", "cpu"]  # fmt: skip


def test_report(made, tmp_path, capsys):
    out = tmp_path / "report"
    code, text, _ = run(capsys, "report", made / "hedgehog", *common(made), "--lengths", "none", "--output", out)
    assert code == 0
    assert "Kernel against softmax" in text and "Left out: Whole outputs" in text
    assert (out / "index.html").is_file() and (out / "images" / "maps.png").is_file()
    code, _, err = run(capsys, "report", made / "hedgehog", *common(made), "--output", out)
    assert (code, "--overwrite" in err) == (2, True)


def test_compare_prints_json(made, tmp_path, capsys):
    out = tmp_path / "cmp"
    code, text, err = run(
        capsys, "compare", made / "hedgehog", made / "elu", *common(made), "--lengths", "16", "--output", out, "--json"
    )
    assert code == 0
    found = json.loads(text)
    assert [c["kernels"] for c in found["conversions"]] == ["2 x hedgehog", "2 x elu"]
    assert json.loads((out / "comparison.json").read_text())["conversions"] == found["conversions"]
    assert (out / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert "2 x elu" in err


BAD = {
    "lengths": (["report", "DIR", "--lengths", "many"], "expected numbers such as 128,512,2048"),
    "inputs": (["report", "DIR", "--inputs", "0"], "at least 1"),
    "folder": (["report", "./nowhere"], "is no checkpoint"),
    "device": (["report", "DIR", "--device", "cuda:9"], "this machine has"),
    "original": (["report", "DIR", "--original", "./nowhere"], "is no checkpoint"),
    "option": (["report", "DIR", "--datset", "x"], "Did you mean --dataset"),
    "single": (["compare", "DIR"], "two or more"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case, made, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, words = BAD[case]
    code, _, err = run(capsys, *[made / "hedgehog" if a == "DIR" else a for a in arguments])
    assert code == 2
    assert words in err and len(err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
