"""`evaluate --compare`: each side at its own length, chunks, paired differences; numbers against single evaluations."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil

import numpy as np
import pytest
from support.forks import in_forked_process
from support.tasks import WORDS, causal_folder, no_rows, resampled_scores, word_tokenizer, write
from support.tiny import SMALLER, converted, original

import linearize
from linearize.cli import main
from linearize.core.errors import ConfigError, LinearizeError
from linearize.core.events import Advanced
from linearize.evaluation.bench import memory
from linearize.evaluation.report.paired import score_difference
from linearize.jobs import evaluate
from linearize.jobs.evaluate import evaluate_checkpoint
from linearize.jobs.task_config import EvaluateJob, TuneJob
from linearize.training.stage_two import intervals as interval
from linearize.training.stage_two.intervals import Measured
from linearize.training.stage_two.splits import open_splits
from linearize.training.stage_two.tasks import TASKS

HEAD, SIZES = "AutoModelForSequenceClassification", {"vocab_size": 17, "max_position_embeddings": 12, **SMALLER}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """An original of 12 tokens, a conversion of 32, and reviews that the original has to cut."""
    root = tmp_path_factory.mktemp("compare")
    original("bert", HEAD, **SIZES).save_pretrained(root / "original")
    word_tokenizer().save_pretrained(root / "original")
    linear = converted("bert", HEAD, config=SIZES, max_length=32)
    linearize.save(linear, root / "linear", processor=word_tokenizer())
    chance = np.random.default_rng(0)
    rows = [
        {"text": " ".join(chance.choice(WORDS, int(chance.integers(4, 28)))), "label": place % 2} for place in range(40)
    ]
    short = [{"text": " ".join(chance.choice(WORDS, 5)), "label": place % 2} for place in range(20)]
    for split in ("train", "validation"):
        write(root / "long" / f"{split}.jsonl", rows)
        write(root / "short" / f"{split}.jsonl", short)
    return root


@pytest.fixture
def few_draws(monkeypatch):
    """Draw rows 20 times: what is compared does not depend on how often."""
    monkeypatch.setattr(interval.resampled_metrics, "__kwdefaults__", {"resamples": 20, "seed": 0})


def job(place, model="linear", data="long", **more):
    options = {"task": "text-classification", "dataset": str(place / data), "device": "cpu"}
    return EvaluateJob.of(model=str(place / model), **options, **more)


def test_slow_sides_are_timed_in_fewer_turns(place, few_draws, monkeypatch):
    """Seven turns took four times as long as the measurement itself."""
    monkeypatch.setattr(evaluate, "TIMING", 0.0)
    found = evaluate_checkpoint(job(place, compare=str(place / "original"), batch_size=16))
    assert found.times.turns == 3 and (found.times.noisy or "medians of 3 turns" in found.times.text)


def test_each_side_at_its_own_length(place, few_draws):
    original, told = str(place / "original"), []
    found = evaluate_checkpoint(job(place, compare=original, batch_size=16), told.append)
    # 40 rows in three batches, for each of the two sides without chunks.
    counted = [(event.done, event.total) for event in told if isinstance(event, Advanced)]
    assert counted[:6] == 2 * [(1, 3), (2, 3), (3, 3)] and counted[-1][0] == counted[-1][1]
    assert [side.name for side in found.sides] == ["this model", "the original", "the original, chunks averaged"]
    assert [(side.max_length, side.chunks) for side in found.sides][1:] == [(12, False), (12, True)]
    assert found.sides[0].max_length == found.facts["longest_row"] <= 32
    assert found.sides[0].cut_share == found.sides[2].cut_share == 0.0 < found.sides[1].cut_share < 1
    # The same figures as each side by itself.
    for side, alone in zip(found.sides, (job(place), job(place, "original", max_length=12)), strict=False):
        single = evaluate_checkpoint(alone)
        assert side.metrics == pytest.approx(single.figures) and side.interval == pytest.approx(single.interval)
    assert all(one.seconds > 0 for one in found.times.sides) and found.times.turns == 7
    assert [(one.side, one.minus) for one in found.differences] == [
        ("this model", "the original"),
        ("this model", "the original, chunks averaged"),
    ]
    for one, side in zip(found.differences, found.sides[1:], strict=True):
        assert one.value == pytest.approx(found.score - side.score)
        assert one.interval[0] <= one.value <= one.interval[1]
        assert one.within_noise == ("within the noise" in one.sentence)


def test_rows_that_a_seed_was_trained_on_are_not_measured_on(place, few_draws, tmp_path):
    """Without a validation split, models of other seeds than 0 were measured on rows that they had been trained on."""
    write(tmp_path / "rows.jsonl", [{"text": " ".join(WORDS[n % 5 : n % 5 + 4]), "label": n % 2} for n in range(40)])
    for name, seed in (("linear", 3), ("original", 4)):
        shutil.copytree(place / name, tmp_path / name)
        (tmp_path / name / "finetuning.json").write_text(json.dumps({"task": "text-classification", "seed": seed}))
    model, rows = str(tmp_path / "linear"), {"dataset": str(tmp_path / "rows.jsonl"), "device": "cpu"}
    tuned = TuneJob.of(model=model, task="text-classification", seed=3, **rows)
    found = EvaluateJob.of(model=model, task="text-classification", compare=str(tmp_path / "original"), **rows)
    train, validation, _ = open_splits(tuned.task, tuned.dataset, tuned.data)
    measured = open_splits(found.task, found.dataset, dataclasses.replace(found.data, trains=False)).validation
    assert measured.rows.tolist() == validation.rows.tolist() and not {*measured.rows} & {*train.rows}
    assert EvaluateJob.of(model=model, task="text-regression", **rows).data.seed == 0
    notes = [note for note in evaluate_checkpoint(found).notes if "was tuned with" in note]
    assert len(notes) == 1 and notes[0].startswith(
        "'original' was tuned with --seed 4: if on this data, it was trained"
    )


def test_a_model_beside_itself_is_level(place, few_draws):
    found = evaluate_checkpoint(job(place, compare=str(place / "linear"), chunks=False))
    assert found.differences[0].value == 0 and found.differences[0].interval == (0, 0) and len(found.sides) == 2
    assert found.differences[0].sentence == (
        "This model is level with the original (95 % interval of the difference: +0.00 to +0.00): within the noise."
    )


def test_chunks_of_a_length(place, few_draws):
    found = evaluate_checkpoint(job(place, compare=str(place / "original"), chunk_length=8))
    assert found.sides[2].max_length == 8
    with pytest.raises(ConfigError, match=r"chunk_length: got 13, but .* takes at most 12 tokens"):
        evaluate_checkpoint(job(place, compare=str(place / "original"), chunk_length=13))
    for more in ({}, {"compare": "x", "chunks": False}):
        with pytest.raises(ConfigError, match="only an original is read in chunks"):
            job(place, chunk_length=8, **more)


def test_data_whose_longest_row_makes_it_pointless(place, few_draws):
    found = evaluate_checkpoint(job(place, data="short", compare=str(place / "original")))
    assert len(found.sides) == 2 and found.notes == (
        "Not above chance: this model, the original.",
        "The longest row has 7 tokens, and the original reads 12: nothing is cut, so chunks would be whole rows, and "
        "a longer input makes no difference here.",
    )


def test_a_length_that_is_asked_for_is_lowered_for_the_original(place, few_draws):
    found = evaluate_checkpoint(job(place, compare=str(place / "original"), max_length=20, chunks=False))
    assert [side.max_length for side in found.sides] == [20, 12]


def test_tasks_that_are_not_read_as_chunks(place, few_draws):
    """Pairs that are cut have a note; where nothing is cut there is nothing to say."""
    chance = np.random.default_rng(3)
    rows = [
        {"first": " ".join(chance.choice(WORDS, 6)), "second": " ".join(chance.choice(WORDS, 8)), "label": number % 2}
        for number in range(12)
    ]
    for split in ("train", "validation"):
        write(place / "pairs" / f"{split}.jsonl", rows)
    asked = job(place, data="pairs", columns="first,second", compare=str(place / "original"))
    found = evaluate_checkpoint(asked)
    assert len(found.sides) == 2 and found.sides[1].cut_share == 1.0 and "not read one text per row" in found.notes[-1]


def test_windows_of_another_length_are_other_rows(tmp_path, few_draws):
    """Two windows of 20 tokens were paired with two of 12, and a longer window counted as a slower model."""
    causal_folder(tmp_path / "short", 12)
    causal_folder(tmp_path / "long", 20)
    for split in ("train", "validation"):
        write(tmp_path / "set" / f"{split}.jsonl", [{"text": " ".join(WORDS[number % 9] for number in range(21))}])
    options = {"task": "causal-lm", "dataset": str(tmp_path / "set"), "device": "cpu"}
    model, original = str(tmp_path / "long"), str(tmp_path / "short")
    found = evaluate_checkpoint(EvaluateJob.of(model=model, compare=original, max_length=20, **options))
    assert [side.max_length for side in found.sides] == [20, 12] and found.facts["rows"] == 2
    assert found.differences == () and [one.name for one in found.times.sides] == ["this model"]
    assert found.notes[-1] == (
        "The original reads other rows (windows of 12 tokens; this model: 20), so neither differences nor times can be "
        "compared; --max-length 12 gives both the same windows."
    )
    found = evaluate_checkpoint(EvaluateJob.of(model=model, compare=original, max_length=12, **options))
    assert len(found.differences) == 1 and len(found.times.sides) == 2 and found.notes == ()


def test_memory_is_measured_in_a_comparison_only(place):
    """`--memory` without `--compare` measured nothing, without a word."""
    with pytest.raises(ConfigError, match=r"memory: got true, .* give --compare ORIGINAL"):
        job(place, memory=True)


def measured(scores, resampled):
    return Measured(metrics={}, score=scores, rows=10, units=10, resampled=np.array(resampled))


def test_the_paired_difference():
    ours, theirs = measured(0.8, [0.7, 0.8, 0.9]), measured(0.6, [0.5, 0.6, 0.7])
    found = score_difference(TASKS["sst2"], "accuracy", "a", "b", ours, theirs)
    # The scores vary together, so that their difference does not.
    assert found.value == pytest.approx(0.2) and found.interval == pytest.approx((0.2, 0.2)) and not found.within_noise
    assert score_difference(TASKS["sst2"], "accuracy", "a", "b", ours, dataclasses.replace(theirs, units=9)) is None
    # It said "a is nan points worse than b (95 % interval of the difference: +nan to +nan)."
    assert score_difference(TASKS["sst2"], "accuracy", "a", "b", ours, measured(math.nan, [math.nan] * 3)) is None
    noisy = score_difference(TASKS["sst2"], "accuracy", "a", "b", ours, measured(0.7, [0.9, 0.7, 0.6]))
    assert noisy.within_noise and noisy.sentence.endswith("within the noise.")


def test_its_interval_is_that_of_the_mean_of_differences():
    """Of accuracies: the normal interval of the mean of (ours right) - (theirs right)."""
    chance = np.random.default_rng(1)
    labels = chance.integers(2, size=400)
    sides = []
    for right in (0.8, 0.75):
        guesses = np.where(chance.random(400) < right, labels, 1 - labels)
        scores = resampled_scores(no_rows("sst2"), np.eye(2)[guesses], labels, resamples=interval.RESAMPLES)
        share = float(np.mean(guesses == labels))
        sides.append((Measured(metrics={}, score=share, rows=400, units=400, resampled=scores), guesses == labels))
    (ours, mine), (theirs, its) = sides
    found = score_difference(TASKS["sst2"], "accuracy", "a", "b", ours, theirs)
    half = 1.96 * float(np.std(mine.astype(float) - its)) / math.sqrt(400)
    assert found.interval == pytest.approx((found.value - half, found.value + half), abs=0.01)


def test_from_the_command_line(place, few_draws, capsys, monkeypatch):
    monkeypatch.setattr("linearize.jobs.evaluate.peak_of_reading", lambda *what: 3 * 2**20)
    line = ["evaluate", str(place / "linear"), "--task", "text-classification", "--dataset", str(place / "long")]
    line += ["--device", "cpu", "--compare", str(place / "original"), "--memory"]
    assert main(line) == 0
    out = capsys.readouterr().out
    for column in ("side", "length", "rows cut", "score (accuracy)", "95 % interval", "f1 macro", "s per row", "peak"):
        assert column in out, column
    assert "the original, chunks averaged" in out and "95 % interval of the difference" in out
    assert main([*line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["peak_bytes"] for one in found["times"]["sides"]] == [3 * 2**20] * 3 and len(found["differences"]) == 2
    assert main([*line, "--chunk-length", "13"]) == 2
    err = capsys.readouterr().err
    assert "takes at most 12 tokens" in err and err.count("\n") == 1


def test_peak_memory_is_measured_in_a_process_of_its_own(place, monkeypatch):
    # Numbers of a fresh interpreter: tests/bench.
    monkeypatch.setattr(memory, "in_fresh_process", in_forked_process)
    found = memory.peak_of_reading(str(place / "linear"), HEAD, 4, 12)
    assert found is not None and 0 <= found < 10**9

    def failing(*what):
        raise LinearizeError(f"failed on {what}")

    monkeypatch.setattr(memory, "in_fresh_process", failing)
    assert memory.peak_of_reading(str(place / "linear"), HEAD, 4, 12) is None


def renumbered(folder, positions=16):
    """A tiny causal model whose tokenizer has the same words under other numbers: equally many windows."""
    causal_folder(folder, positions)
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text())
    words = values["model"]["vocab"]
    values["model"]["vocab"] |= {word: words[other] for word, other in zip(WORDS, reversed(WORDS), strict=True)}
    file.write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("name", ["causal-lm", "copying", "masked-lm", "text-classification", "retrieval"])
def test_another_tokenizer_has_no_share_where_tokens_are_scored(name, tmp_path, few_draws):
    """The note said that the rows differ, and the share of the original's score was printed beside it."""
    causal_folder(tmp_path / "ours", 16)
    renumbered(tmp_path / "theirs")
    rows = [{"text": " ".join(WORDS[(n + shift) % 12] for n in range(21)), "label": shift % 2} for shift in range(4)]
    for split in ("train", "validation"):
        write(tmp_path / "set" / f"{split}.jsonl", rows)
    kinds = {"masked-lm": "AutoModelForMaskedLM", "text-classification": HEAD, "retrieval": "AutoModel"}
    for side in ("ours", "theirs"):
        if name in kinds:
            sizes = {"vocab_size": 17, "max_position_embeddings": 32, **SMALLER}
            original("bert", kinds[name], **sizes).save_pretrained(tmp_path / side)
    by_text = name in ("text-classification", "retrieval")
    options = {"task": name, "dataset": str(tmp_path / "set"), "device": "cpu", "max_length": 16, "chunks": False}
    options |= {"columns": "text"} if by_text else {}
    for original_side in ("ours", "theirs"):
        found = evaluate_checkpoint(
            EvaluateJob.of(model=str(tmp_path / "ours"), compare=str(tmp_path / original_side), **options)
        )
        assert len({side.max_length for side in found.sides}) == 1
        same = original_side == "ours" or by_text
        assert len(found.differences) == same and len(found.times.sides) == 1 + same
        assert any("other tokens" in note for note in found.notes) != same
        assert found.recovered is None or same
        # An untrained original may not be above chance, but a perplexity has no chance level.
        assert found.recovered is not None or not (same and TASKS[name].lower_is_better)


@pytest.mark.parametrize("name", TASKS)
def test_scores_are_compared_only_on_the_same_labels(name):
    """Every task knows what it scores: other labels are other rows."""
    kind = no_rows(name, **({"labels": ("O", "B-A")} if TASKS[name].label and not TASKS[name].labels else {})).type
    labels = np.array([[1, 0, -100], [0, 1, 1]]) if kind.head.per_label is False else np.array([1, 0, 1])
    other = labels.copy()
    other[0] = 1 - other[0]
    kind.answers = [["a"], ["b"]]
    before = kind.scored(labels)
    assert before == kind.scored(labels.copy())
    kind.answers = [["a"], ["c"]]
    assert before != kind.scored(other)
