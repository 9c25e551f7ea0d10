"""`longdoc` end to end on a tiny model, resumed, and what it refuses; numbers against single evaluations."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from support.tasks import WORDS, word_tokenizer, write
from support.tiny import SMALLER, original

from linearize.checkpoint.fingerprint import UNKNOWN_INPUTS
from linearize.checkpoint.inspect import inspect_checkpoint
from linearize.core.errors import ConfigError, DataError, LinearizeError
from linearize.core.options import effective
from linearize.jobs import events, task_config
from linearize.jobs.evaluate import SideDifference, SideResult, SideTime, Times, evaluate_checkpoint
from linearize.jobs.longdoc import Lengths, begin, examine, in_batches, run_longdoc, verdict, write_texts
from linearize.jobs.task_config import EvaluateJob, LongdocJob
from linearize.training.stage_two.config import TuneConfig

FEW = {"distill_steps": 2, "align_steps": 2, "steps": 4, "batch_size": 8, "batch_tokens": 64, "save_every": 1}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """An original of 12 tokens, and documents of up to 26."""
    root = tmp_path_factory.mktemp("longdoc")
    sizes = {"vocab_size": 17, "max_position_embeddings": 12, **SMALLER, "num_hidden_layers": 1}
    original("bert", **sizes).save_pretrained(root / "bert")
    word_tokenizer().save_pretrained(root / "bert")
    chance = np.random.default_rng(0)
    for split, count in (("train", 32), ("validation", 12)):
        documents = []
        for number in range(count):
            words = list(chance.choice(WORDS[2:], int(chance.integers(14, 24))))
            documents.append({"text": " ".join([*words, WORDS[number % 2]]), "label": number % 2})
        write(root / "documents" / f"{split}.jsonl", documents)
    return root


def job(place, output="long", **more):
    options = {
        "model": str(place / "bert"), "task": "text-classification", "dataset": str(place / "documents"),
        "max_length": 32, "memory": False, "device": "cpu", "output": str(place / output), **FEW,
    }  # fmt: skip
    return LongdocJob.of(**(options | more))


@pytest.fixture(scope="module")
def done(place):
    seen = []
    return run_longdoc(job(place), seen.append), seen


def test_from_end_to_end(place, done):
    result, seen = done
    assert [side.name for side in result.sides] == [
        "original at 12", "original, chunks of 12 averaged", "linear at 12", "linear at 32",
    ]  # fmt: skip
    assert [(side.model, side.max_length, side.chunks) for side in result.sides] == [
        ("original", 12, False), ("original", 12, True), ("linear", 12, False), ("linear", 32, False),
    ]  # fmt: skip
    assert [side.cut_share for side in result.sides] == [1.0, 0.0, 1.0, 0.0]
    assert [(one.side, one.minus) for one in result.differences] == [
        ("linear at 32", side.name) for side in result.sides[:3]
    ]
    assert result.rows == 12 and 17 <= result.longest_row <= 26 and result.chance == 0.5
    steps = [event.what for event in seen if isinstance(event, events.Started) and event.what.startswith("step")]
    assert [step.partition(":")[0] for step in steps] == [f"step {number} of 5" for number in range(1, 6)]
    assert not (place / "long.work").exists() and str(place) not in (place / "long" / "results.json").read_text()
    saved = json.loads((place / "long" / "results.json").read_text())
    assert saved["sides"][3]["score"] == result.sides[3].score and saved["verdict"] == result.verdict
    assert saved["options"]["max_length"] == 32 and saved["options"]["task"] == "text-classification"
    # Everything timed is in a separate file.
    times = json.loads((place / "long/times.json").read_text())
    assert "seconds" not in json.dumps(saved) and set(times) == {"times", "seconds"}
    assert [one["name"] for one in times["times"]["sides"]] == [side.name for side in result.sides]
    assert all(one["seconds"] > 0 and one["spread"] >= 0 for one in times["times"]["sides"])


def test_its_figures_are_those_of_evaluate(place, done):
    for name, length, side in (("original", 12, 0), ("linear", 32, 3)):
        options = {"task": "text-classification", "dataset": str(place / "documents"), "device": "cpu"}
        found = evaluate_checkpoint(EvaluateJob.of(model=str(place / "long" / name), max_length=length, **options))
        assert found.figures == pytest.approx(done[0].sides[side].metrics)


def test_both_are_tuned_alike(place, done):
    records = [json.loads((place / "long" / name / "finetuning.json").read_text()) for name in ("original", "linear")]
    for name in ("learning_rate", "epochs", "steps", "seed", "warmup", "weight_decay", "schedule"):
        assert records[0]["options"][name] == records[1]["options"][name], name
    sizes = [(one["options"]["batch_size"], one["options"]["gradient_accumulation"]) for one in records]
    assert sizes == [(4, 2), (2, 4)] and [one["max_length"] for one in records] == [12, 32]
    provenance = json.loads((place / "long" / "linear" / "config.json").read_text())["linearize"]["provenance"]
    assert provenance["alignment"]["steps"] == 2 and provenance["distillation"]["steps"] == 2


def test_an_interrupted_run_resumes(place, done):
    def stop(event):
        if isinstance(event, events.Started) and event.what.startswith("step 4"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_longdoc(job(place, "cut"), stop)
    work = place / "cut.work"
    assert {path.name for path in work.iterdir() if path.is_dir()} == {"original", "converted", "aligned"}
    assert not (place / "cut").exists()
    with pytest.raises(ConfigError, match="holds an interrupted run"):
        run_longdoc(job(place, "cut"))
    with pytest.raises(ConfigError, match="the run was started with distill_steps=2, now it is 3"):
        run_longdoc(job(place, "cut", resume=True, distill_steps=3))
    seen = []
    result = run_longdoc(job(place, "cut", resume=True, save_every=7), seen.append)
    started = [event.what[:6] for event in seen if isinstance(event, events.Started)]
    assert [what for what in started if what.startswith("step")] == ["step 4", "step 5"]
    assert [side.metrics for side in result.sides] == [side.metrics for side in done[0].sides]
    assert not work.exists() and (place / "cut" / "results.json").is_file()
    for name in ("original/model.safetensors", "linear/model.safetensors"):
        assert (place / "cut" / name).read_bytes() == (place / "long" / name).read_bytes(), name


def test_a_taste_says_that_it_is_one_and_keeps_what_is_asked(place):
    """Positions are stretched, and the window is as wide as asked."""
    asked = {"positions": "interpolate", "preset": "encoder", "window": 8}
    result = run_longdoc(job(place, "stretched", quick=True, limit=16, validation_limit=8, **asked))
    assert result.notes[0] == (
        "A quick look, not a measurement: 8 rows to measure on, 16 to train on, 2 steps of stage one and 2 of "
        "alignment. Leave --quick out for a real result."
    )
    assert result.verdict.startswith("Only a quick look: ") and result.rows == 8
    config = json.loads((place / "stretched" / "linear" / "config.json").read_text())
    assert config["linearize"]["provenance"]["options"]["positions"] == "interpolate"
    assert config["max_position_embeddings"] == 32
    layers = inspect_checkpoint(place / "stretched" / "linear").plan.layers
    assert {(layer.kernel, layer.hybrid.window, layer.hybrid.sinks) for layer in layers} == {("hedgehog", 8, 4)}


def test_what_is_refused(place, tmp_path, done):
    cases = [
        ({"max_length": None}, r"rows have up to \d+ tokens and .* takes 12; say .* --max-length 32"),
        ({"max_length": 8}, "already takes 12 tokens"),
        ({"chunk_length": 13}, "chunk_length: got 13, but .* takes at most 12 tokens"),
        ({"kernel": "hedgehug"}, "hedgehug"),
        ({"preset": "causal"}, "is bidirectional; use --preset encoder"),
        ({"preset": "decoder"}, "unknown preset 'decoder'"),
        ({"positions": "stretch"}, "unknown position method 'stretch'"),
        ({"model": str(place / "long" / "linear")}, "is already converted"),
        ({"dataset": str(tmp_path / "nowhere")}, "does not exist"),
    ]
    for changes, message in cases:
        with pytest.raises(LinearizeError, match=message):
            run_longdoc(job(place, "refused", **changes))
    for name in ("cifar10", "causal-lm", "token-classification", "similarity"):
        with pytest.raises(ConfigError, match="expected one that predicts a class or a number"):
            job(place, task=name)
    with pytest.raises(LinearizeError, match="is not empty"):
        run_longdoc(job(place))
    assert not (place / "refused").exists() and not (place / "refused.work").exists()


def test_a_document_of_zero_tokens_is_refused(place, tmp_path):
    from tokenizers import normalizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(place / "bert")
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\u200b", "")
    original("bert", vocab_size=17, max_position_embeddings=12, **SMALLER).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    rows = [{"text": text, "label": place % 2} for place, text in enumerate(["good film", "\u200b"] * 10)]
    write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match="got a text without any token"):
        run_longdoc(job(place, model=str(tmp_path / "bert"), dataset=str(tmp_path / "rows.jsonl"), output="zero"))


def test_data_that_cannot_decide_is_reported_and_not_refused(place, tmp_path):
    rows = [{"text": f"good film {number}", "label": number % 2} for number in range(20)]
    write(tmp_path / "short.jsonl", rows)
    _, lengths = examine(job(place, dataset=str(tmp_path / "short.jsonl")))
    assert lengths.longest == 5 and lengths.notes == (
        "The longest row has 5 tokens, which the original reads whole (12): a longer input makes no difference here.",
    )
    _, lengths = examine(job(place, max_length=20))
    assert "of the rows are longer than 20 tokens and are cut there" in lengths.notes[0]


def test_no_text_to_measure_on_is_learned_from(place, tmp_path):
    rows = [{"text": f"film {number}", "label": number % 2} for number in range(40)]
    write(tmp_path / "one.jsonl", rows)
    asked = job(place, dataset=str(tmp_path / "one.jsonl"))
    data, _ = examine(asked)
    file, columns, count = write_texts(asked, tmp_path)
    texts = [json.loads(line)["text"] for line in file.read_text().splitlines()]
    assert columns == "text" and count == len(texts) == 36 == len(data.train) and len(data.validation) == 4
    # `film` and a number that is unknown: the rows are told apart by what was held out.
    assert len(set(texts)) == 36 and set(texts) < {row["text"] for row in rows}


def test_optimizer_steps_have_the_same_rows_at_every_length():
    for length, rows in ((128, 32), (512, 32), (1024, 16), (3000, 4), (8192, 2), (40_000, 1)):
        found = in_batches(TuneConfig(batch_size=32, seed=3), length, 16_384)
        assert (found.batch_size, found.batch_size * found.gradient_accumulation) == (rows, 32), length
        assert found.seed == 3 and found.eval_batch_size == rows


def test_a_taste_is_sized_by_the_model_and_given_options_stay(place, monkeypatch):
    def sized(parameters, **given):
        monkeypatch.setattr(task_config, "_parameters", lambda model: parameters)
        needed = {"model": str(place / "bert"), "task": "text-classification", "dataset": str(place / "documents")}
        return LongdocJob.of(**needed, **given)

    assert sized(65_792).rows.limit is None
    monkeypatch.setattr("linearize.training.stage_two.load.length_limit", lambda name: 512)
    sizes = {}
    for name, parameters in (("minilm", 10_646_784), ("bert-base", 85_054_464)):
        found = sized(parameters, quick=True)
        sizes[name] = (found.max_length, found.rows.limit, found.rows.validation_limit, found.distill_steps)
        assert (found.tune.batch_size, found.tune.epochs, found.batch_tokens) == (8, 1.0, 4096)
        spent = 6 * parameters * found.rows.limit * (512 + found.max_length)
        assert spent <= task_config.QUICK * 0.5 or found.rows.limit == 16
    assert sizes["minilm"][0] == 1024 and sizes["minilm"][1] > 4 * sizes["bert-base"][1] >= 64
    # An option that is given as its default was taken for one that is not given.
    for stays in (
        {"limit": 20, "validation_limit": 7, "distill_steps": 3, "max_length": 600, "batch_size": 4},
        {"distill_steps": 1000, "align_steps": 400, "batch_size": 32, "epochs": 3.0, "batch_tokens": 16_384},
    ):
        found = effective(sized(10_646_784, quick=True, **stays))
        assert {name: found[name] for name in stays} == stays
    # A tiny model got 2,968 and 1,669 steps: more than without `quick`.
    found = sized(65_792, quick=True)
    assert (found.distill_steps, found.align_steps) == (1000, 400)
    with pytest.raises(LinearizeError):
        run_longdoc(LongdocJob.of(model="nowhere", task="text-classification", dataset="x", quick=True))


def test_a_quick_run_refuses_an_unknown_architecture_in_one_line(tmp_path):
    """Its size is computed when the options are read, before the model is checked."""
    (tmp_path / "config.json").write_text('{"model_type": "nothing", "max_position_embeddings": 8}')
    with pytest.raises(LinearizeError, match="does not recognize this architecture"):
        run_longdoc(
            LongdocJob.of(
                model=str(tmp_path), task="text-classification", dataset="x", quick=True, output=str(tmp_path / "out")
            )
        )


def compared(name, value, by="accuracy"):
    within = (-0.2, 0.2) if value == 0 else (value - 0.05, value + 0.05)
    return SideDifference("linear at 32", name, by, value, within, value == 0, "")


def sides_of(*learned):
    names = ["original at 12", "chunks", "linear at 12", "linear at 32"]
    return tuple(
        SideResult(name, "", 12, name == "chunks", 0.0, 0.5, None, {}, learned=known)
        for name, known in zip(names, learned, strict=True)
    )


@pytest.mark.parametrize(
    ("cut", "chunks", "expected"),
    [
        (0.1, 0.1, "Read at 32 tokens, the linear model is better than the original cut at 12, and better than its"),
        (0.1, 0.0, "better than the original cut at 12, and within the noise of its averaged chunks."),
        (0.1, -0.1, "better than the original cut at 12, and worse than its averaged chunks."),
        (0.0, -0.1, "is within the noise of the original cut at 12, and worse than its chunks; 64 rows cannot show"),
        (-0.1, 0.1, "is worse than the original cut at 12."),
        (0.1, None, "Longer inputs help: read at 32 tokens, the linear model is better than the original cut at 12."),
    ],
)  # fmt: skip
def test_the_verdict(place, cut, chunks, expected):
    sides = sides_of(True, True, True, True)
    if chunks is None:
        sides = (sides[0], *sides[2:])
    values = {"original at 12": cut, "chunks": chunks, "linear at 12": 0.0}
    differences = tuple(compared(side.name, values[side.name]) for side in sides[:-1])
    text = verdict(job(place), sides, differences, Lengths(12, 32, 26), 64, 0.5)
    assert expected in text and "Time" not in text
    assert "cannot show" in verdict(job(place), sides, differences, Lengths(12, 32, 12), 64, 0.5)


def test_the_verdict_says_first_that_nothing_was_learned(place):
    """All four intervals held the majority class's share, and the verdict said "within the noise of the original"."""
    lengths, differences = Lengths(12, 32, 26), (compared("original at 12", 0.0),)
    text = verdict(job(place), sides_of(False, False, False, False), differences, lengths, 64, 0.625)
    assert text == (
        "Nothing was learned: no side is above chance (62.50). Give more steps or rows; 64 rows cannot show "
        "differences below about 20 points."
    )
    # All sides answered alike, so no difference varied: "differences below about 0 points", it said.
    same = tuple(replace(one, interval=(0.0, 0.0)) for one in differences)
    guesses = tuple(replace(one, interval=(0.338, 0.5634)) for one in sides_of(False, False, False, False))
    text = verdict(job(place), guesses, same, lengths, 71, 0.5493)
    assert text.endswith("71 rows cannot show differences below about 16 points.")
    text = verdict(job(place), sides_of(True, True, True, False), (compared("original at 12", -0.1),), lengths, 64, 0.5)
    assert text.startswith("No gain is shown") and text.endswith("Not above chance: linear at 32.")


def test_macro_f1_decides_alongside_accuracy(place):
    sides, lengths = sides_of(True, True, True, True), Lengths(12, 32, 26)

    def said(accuracy, balanced):
        differences = [compared(sides[0].name, accuracy), compared(sides[0].name, balanced, "f1_macro")]
        return verdict(job(place), (sides[0], *sides[2:]), tuple(differences), lengths, 64, 0.6)

    assert "is better than the original cut at 12 (by accuracy: within the noise and f1_macro: better)." in said(0, 0.1)
    assert "is worse than the original cut at 12 (by accuracy: within the noise and f1_macro: worse)." in said(0, -0.1)
    assert "No gain is shown" in said(0.1, -0.1) and "better than the original cut at 12." in said(0.1, 0.1)


@pytest.mark.slow
def test_two_runs_with_one_seed_give_one_result(place, done):
    """To the bit: what was measured, and the weights; a resumed run shows it by default."""
    run_longdoc(job(place, "again/long"))
    for name in ("results.json", "original/model.safetensors", "linear/model.safetensors"):
        assert (place / "again/long" / name).read_bytes() == (place / "long" / name).read_bytes(), name


def test_times_of_a_noisy_machine_are_no_verdict():
    sides = (SideTime("original at 12", 0.25, 0.5), SideTime("linear at 32", 0.3, 0.1))
    assert Times(sides, 8, 7, "quiet (1 %)", False).text == (
        "Time per row, medians of 7 turns over 8 rows: 0.25 s (original at 12), 0.3 s (linear at 32)."
    )
    assert Times(sides, 8, 7, "too noisy (50 %)", True).text == (
        "No verdict on speed, the machine was too noisy (50 %)."
    )


def test_resume_refuses_a_model_that_changed_under_the_same_name(place, tmp_path):
    """The tuned original was of the old weights, and the conversion of the new ones."""
    shutil.copytree(place / "bert", tmp_path / "bert")
    asked, told = job(place, "changed", model=str(tmp_path / "bert"), resume=True), []
    data, work = examine(asked)[0], tmp_path / "work"
    begin(asked, work, data, told.append)
    begin(asked, work, data, told.append)
    file = tmp_path / "bert" / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ConfigError, match="resume: the run was started with model contents="):
        begin(asked, work, data, told.append)
    assert told == []
    # A run of an earlier version has no record of the model's contents.
    started = json.loads((work / "started.json").read_text())
    (work / "started.json").write_text(json.dumps({k: v for k, v in started.items() if k != "model contents"}))
    begin(asked, work, data, told.append)
    assert [one.text for one in told] == [UNKNOWN_INPUTS]
