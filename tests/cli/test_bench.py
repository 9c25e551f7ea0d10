"""`linearize bench` on tiny sizes: what it prints, and how it refuses."""

import json

import pytest

from linearize.cli import main

TINY = ["--lengths", "8,16", "--heads", "2", "--head-dim", "8", "--repeats", "1", "--no-memory"]


def test_table_picture_and_json(tmp_path, capsys):
    picture = tmp_path / "speed.png"
    code = main(["bench", *TINY, "--kernel", "elu", "--kernel", "luna", "--json", "--plot", str(picture)])
    streams = capsys.readouterr()
    assert code == 0 and picture.stat().st_size > 1000
    data = json.loads(streams.out)
    assert [row["tokens"] for row in data["rows"]] == [8, 16, 8, 16]
    assert all(row["sides"][side]["seconds"] > 0 for row in data["rows"] for side in ("softmax", "linear"))
    assert "too_noisy" in data["noise"]
    assert streams.err.count("Faster than softmax ") == 2 and "Noise:" in streams.err


@pytest.mark.parametrize(
    "options",
    [
        ["--causal", "--backward"],
        ["--kernel", "hedgehog", "--kernel-arg", "activation=exp", "--window", "4"],
    ],
)
def test_what_can_be_measured(options, capsys):
    assert main(["bench", *TINY, *options]) == 0
    assert "medians (spread)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, text",
    [
        (["--decode", "--causal"], "leave --causal out"),
        (["--decode", "bert-base", "--heads", "3"], "leave --heads out"),
        (["--decode", "--image-size", "8"], "leave --image-size out"),
        (["--decode"], "--decode needs a MODEL such as gpt2; for attention layers alone, run python -m benchmarks."),
        (["--image-size", "many"], "--image-size: got 'many'"),
        (["--train"], "unknown option '--train'"),
        (["--stage-one"], "unknown option '--stage-one'"),
        (["--alignment", "--kernel", "elu"], "unknown option '--alignment'"),
        (["--goals"], "unknown option '--goals'"),
        (["--batch-tokens", "64"], "unknown option '--batch-tokens'"),
        (["bert-base", "--heads", "3"], "leave --heads out"),
        (["--layers", "3"], "leave --layers out"),
        (["--features-given", "16"], "unknown option '--features-given'"),
        (["--kernel", "hedgehog", "--sinks", "3"], "sinks: got 3 without a window"),
        (["--lengths", "many"], "--lengths: got 'many'"),
        (["--lengths", "none"], "lengths: got none"),
        (["--plot", "speed.pdf"], "expected the name of a .png file"),
        (["--device", "cuda:9"], "this machine has"),
        (["--kernel-arg", "x"], "expected NAME=VALUE"),
        (["nowhere/at-all/here"], "neither a folder nor a Hub name"),
    ],
)
def test_refusals_are_one_line(options, text, capsys):
    assert main(["bench", *options]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1 and "Traceback" not in error
