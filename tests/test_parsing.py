"""Alias bombs, deep brackets and other texts that must end in one line, quickly; and names that are no markup."""

import json

import pytest
import yaml
from support.tiny import converted

import linearize
from linearize.checkpoint.save import base_facts
from linearize.cli import main
from linearize.core import parsing
from linearize.core.parsing import parse_json, parse_yaml

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
DEEP = 100_000
BAD_YAML = {
    "bomb": BOMB,
    "deep lists": "[" * DEEP,
    "deep mappings": "{a: " * DEEP,
    "closed": "[" * 500 + "]" * 500,
    "itself": "a: &a [*a]",
    "many aliases": "a: &a 1\nb: [" + "*a, " * 500 + "]",
    "long": "a: " + "x" * 2_000_000,
    "date": "a: 2001-99-99",
    "number": "a: " + "9" * 10_000,
    "unhashable": "? [a]\n: 1",
    "python": "!!python/object/apply:os.system [echo]",
    "control": "a: \x00",
}


@pytest.mark.parametrize("loader", ["SafeLoader", "CSafeLoader"])
@pytest.mark.parametrize("name", BAD_YAML)
def test_bad_yaml_is_one_line(name, loader, tmp_path, capsys, monkeypatch):
    if not hasattr(yaml, loader):
        pytest.skip("PyYAML was built without libyaml")
    monkeypatch.setattr(parsing, "_FAST", getattr(yaml, loader))
    with pytest.raises(ValueError) as caught:
        parse_yaml(BAD_YAML[name])
    assert "\n" not in str(caught.value)
    (tmp_path / "recipe.yaml").write_text(BAD_YAML[name])
    assert main(["run", str(tmp_path / "recipe.yaml"), "--dry-run"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("linearize: error: recipe recipe cannot be read (") and err.count("\n") == 1
    (tmp_path / "README.md").write_text(f"---\n{BAD_YAML[name]}\n---\n")
    assert base_facts(str(tmp_path)) == {}


def test_a_change_on_the_command_line_too(capsys):
    assert main(["run", "minilm-glue", f"tasks={'[' * 1000}", "--dry-run"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("depth", [65, 900, 100_000])
@pytest.mark.parametrize("verb", ["inspect", "convert"])
def test_deep_json_is_one_line(verb, depth, tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "bert", "x": ' + "[" * depth + "]" * depth + "}")
    assert main([verb, str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "nested too deeply" in err and err.count("\n") == 1


@pytest.mark.parametrize("name", BAD_YAML)
def test_the_recipe_in_a_run_and_a_config_too(name, tmp_path, capsys):
    """`run --resume` reads the recipe it wrote back, `init` a config of the user's."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text(BAD_YAML[name])
    config = tmp_path / "config.yaml"
    config.write_text(BAD_YAML[name])
    for words, named in (
        (["run", "minilm-glue", "--output", str(run), "--resume"], "recipe.yaml' cannot be read ("),
        (["init", str(config), "--output", str(tmp_path / "out")], "config.yaml' cannot be read ("),
    ):
        assert main(words) == 2
        err = capsys.readouterr().err
        assert named in err and err.count("\n") == 1 and "nested too deeply; expected fewer" not in err
    assert [path.name for path in run.iterdir()] == ["recipe.yaml"] and not (tmp_path / "out").exists()


@pytest.mark.parametrize("depth", [65, 100_000])
def test_a_deep_config_for_init(depth, tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "bert", "x": ' + "[" * depth + "]" * depth + "}")
    assert main(["init", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert "expected at most 64 levels); expected a JSON or YAML file" in err and err.count("\n") == 1


def test_what_is_good_is_read():
    text = "a: &a {x: 1}\nb: *a\nc: [*a, *a]\n"
    assert parse_yaml(text) == yaml.safe_load(text)
    assert parse_json('{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}
    assert parse_json("[" * 64 + "]" * 64) == json.loads("[" * 64 + "]" * 64)


EVIL = "<img src=x onerror=alert(1)>`|**b** [x](javascript:y)\x1b[31m\n# H"


def test_names_are_no_markup_in_a_card(tmp_path):
    provenance = {"base_model": EVIL, "dataset": EVIL, "distillation": {"steps": 1, "stopped": EVIL}}
    linearize.save(converted("bert"), tmp_path / "out", provenance=provenance)
    text = (tmp_path / "out" / "README.md").read_text()
    assert "\x1b" not in text and "\n# H" not in text
    title = next(line for line in text.splitlines() if line.startswith("# "))
    assert "<img" not in title and "&lt;img" in title and "\\[x\\]" in title and "\\*\\*b" in title
    row = next(line for line in text.splitlines() if line.startswith("| stage one |"))
    assert "<img" not in row and row.replace("\\|", "").count("|") == 3
    code = next(line for line in text.splitlines() if line.startswith("The softmax attention of"))
    assert code.startswith("The softmax attention of ``<img src=x onerror=alert(1)>`\\|**b**")


def test_an_originals_card_gives_names_only(tmp_path):
    front = {"license": "mit", "language": ["en", "de"], "base_model": {"x": [1]}, "license_name": "x" * 1000}
    (tmp_path / "README.md").write_text(f"---\n{yaml.safe_dump(front)}---\n")
    assert base_facts(str(tmp_path)) == {"license": "mit", "language": ["en", "de"]}
