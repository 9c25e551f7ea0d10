"""The default length of rows, and what is reported of it, for every type of task that reads text."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from support.command_lines import run
from support.tasks import WORDS, causal_folder, resampled_scores, word_tokenizer, write
from support.tiny import SMALLER, original
from transformers import AutoModelForCausalLM

import linearize
from linearize.checkpoint.loading import load_processor
from linearize.core.errors import ConfigError, DataError
from linearize.core.events import Noted
from linearize.jobs.evaluate import evaluate_checkpoint, rows_per_batch
from linearize.jobs.finetune import finetune_checkpoint
from linearize.jobs.task_config import EvaluateJob, TuneJob
from linearize.training.stage_two.config import DataOptions, TuneConfig
from linearize.training.stage_two.load import NO_LIMIT, length_limit, load_for_task, whole_length
from linearize.training.stage_two.prepare import prepare
from linearize.training.stage_two.task_types import language
from linearize.training.stage_two.task_types.language import WINDOW
from linearize.training.stage_two.task_types.text import Texts
from linearize.training.stage_two.tasks import TASKS, task
from linearize.training.stage_two.trainer import measure_with_interval
from linearize.training.stage_two.tuner import Tuner


def words(count, start=0):
    return [WORDS[(start + number) % len(WORDS)] for number in range(count)]


def prepared(name, folder, path, length, auto=False, **changes):
    chosen = task(name, **changes)
    options = DataOptions(max_length=length, auto_length=auto)
    return prepare(chosen, load_processor(folder, "text"), options, data=str(path))


@pytest.fixture
def classifier(tmp_path):
    """A tiny BERT with a head, that takes 32 tokens, and reviews of up to 40."""
    folder = tmp_path / "classifier"
    sizes = {"vocab_size": 17, "max_position_embeddings": 32, **SMALLER}
    original("bert", "AutoModelForSequenceClassification", **sizes).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    for split, counts in (("train", [3, 4] * 4), ("validation", [4, 10, 30, 31, 38, 40])):
        rows = [{"text": " ".join(words(count, place)), "label": place % 2} for place, count in enumerate(counts)]
        write(tmp_path / "reviews" / f"{split}.jsonl", rows)
    return str(folder)


def test_the_limit_is_the_smaller_one_of_model_and_tokenizer(bert, gpt2, tmp_path):
    assert length_limit(bert) == length_limit(gpt2) == 32
    original("roberta", max_position_embeddings=66, pad_token_id=1).save_pretrained(tmp_path / "roberta")
    assert length_limit(str(tmp_path / "roberta")) == 64
    tokenizer = word_tokenizer()
    tokenizer.model_max_length = 20
    tokenizer.save_pretrained(tmp_path / "roberta")
    assert length_limit(str(tmp_path / "roberta")) == 20
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "config.json").write_text('{"model_type": "t5"}')
    assert length_limit(str(tmp_path / "none")) is None
    assert whole_length(str(tmp_path / "none"), TASKS["sst2"]) == NO_LIMIT
    assert whole_length(str(tmp_path / "none"), TASKS["causal-lm"]) == WINDOW


def test_evaluate_reads_what_model_and_data_allow(classifier, tmp_path):
    """Rows were cut at 128 tokens, or at what the model takes, without a report."""
    made = EvaluateJob.of(model=classifier, task="text-classification", dataset=str(tmp_path / "reviews"), device="cpu")
    found = evaluate_checkpoint(made)
    # 31, 38 and 40 words are 33, 40 and 42 tokens, of which 32 are read.
    assert found.facts == {"rows": 6, "max_length": 32, "longest_row": 42, "cut_share": 0.5}
    short = tmp_path / "short"
    rows = [{"text": " ".join(words(3 + place % 5)), "label": place % 2} for place in range(20)]
    for split in ("train", "validation"):
        write(short / f"{split}.jsonl", rows)
    facts = evaluate_checkpoint(
        EvaluateJob.of(model=classifier, task="text-classification", dataset=str(short), device="cpu")
    ).facts
    assert facts == {"rows": 20, "max_length": 9, "longest_row": 9, "cut_share": 0.0}


def test_evaluate_tokenises_only_what_it_measures(classifier, tmp_path, monkeypatch):
    """All rows to train on were tokenised, once per side: ten seconds for SST-2's."""
    read = []
    checked = Texts.checked

    def counted(self, first, second=None):
        read.append(len(first))
        return checked(self, first, second)

    monkeypatch.setattr(Texts, "checked", counted)
    made = EvaluateJob.of(model=classifier, task="text-classification", dataset=str(tmp_path / "reviews"), device="cpu")
    found = evaluate_checkpoint(made)
    assert read == [6] and "8 rows to train on, measured on 6 rows" in found.data
    prepared("text-classification", classifier, tmp_path / "reviews", 32)
    assert read == [6, 6, 8]
    # Their labels are read all the same.
    write(tmp_path / "reviews" / "train.jsonl", [{"text": "a", "label": label} for label in (0, 1, 0.5)])
    with pytest.raises(DataError, match=r"got the label 0\.5"):
        evaluate_checkpoint(made)


@pytest.mark.parametrize("name", ["causal-lm", "masked-lm"])
def test_a_corpus_to_train_on_is_not_tokenised_to_measure(bert, tmp_path, monkeypatch, name):
    model, counts, own = causal_folder(tmp_path / "model", 32), [], language.tokens_of
    for split in ("train", "validation"):
        texts = 3 if split == "validation" else 5
        write(tmp_path / "corpus" / f"{split}.jsonl", [{"text": " ".join(words(40, start))} for start in range(texts)])

    def counted(table, *given):
        counts.append(len(table))
        return own(table, *given)

    monkeypatch.setattr(language, "tokens_of", counted)
    options = (DataOptions(max_length=16), DataOptions(max_length=16, trains=False))
    processor = load_processor(str(bert if name == "masked-lm" else model), "text")
    one, two = (prepare(task(name), processor, chosen, data=str(tmp_path / "corpus")) for chosen in options)
    assert len(counts) == 3 and one.facts == two.facts
    before, _, after = one.description.partition("; ")
    train, valid = (int(size) for size in re.match(r"(\d+) and (\d+) tokens, ", after).groups())
    assert train > valid and two.description == f"{before}; {after.removeprefix(f'{train} and ')}"
    assert len(one.validation) == len(two.validation) > 1
    for first, second in zip(one.validation, two.validation, strict=True):
        assert np.array_equal(first["input_ids"], second["input_ids"])


def test_rows_are_measured_from_the_longest_to_the_shortest(classifier, tmp_path):
    data = prepared("text-classification", classifier, tmp_path / "reviews", 32)
    model = load_for_task(classifier, data).eval()
    widths = []
    model.register_forward_pre_hook(lambda m, args, fields: widths.append(fields["input_ids"].shape), with_kwargs=True)
    tuner = Tuner(model, data, TuneConfig(eval_batch_size=2), tmp_path / "work")
    _, predictions, labels = tuner.measure()
    # 4, 10, 30, 31, 38 and 40 words, [CLS] and [SEP], cut at 32.
    assert widths == [(2, 32), (2, 32), (2, 12)]
    assert labels.tolist() == [0, 1, 0, 1, 0, 1]
    with torch.no_grad():
        alone = [model(**data.collate([row])).logits[0] for row in data.validation]
    np.testing.assert_allclose(predictions, torch.stack(alone), atol=1e-6)


def test_the_length_of_the_tuning_comes_first(classifier, tmp_path):
    (tmp_path / "classifier" / "finetuning.json").write_text(json.dumps({"max_length": 12}))
    made = EvaluateJob.of(model=classifier, task="text-classification", dataset=str(tmp_path / "reviews"), device="cpu")
    assert made.data == DataOptions(max_length=12, auto_length=True)
    assert evaluate_checkpoint(made).facts["max_length"] == 12
    asked = EvaluateJob.of(model=classifier, task="text-classification", max_length=10)
    assert asked.data == DataOptions(max_length=10)


def test_a_row_has_room_for_its_special_tokens(bert, glue):
    """The tokenizer then cuts nothing: rows of any length came, and longer ones than the model takes ended it."""
    with pytest.raises(ConfigError, match="max_length: got 2, expected at least the 3 special tokens of a row"):
        prepared("mrpc", bert, glue / "mrpc", 2)
    assert {len(row["input_ids"]) for row in prepared("mrpc", bert, glue / "mrpc", 3).train} == {3}


def test_tags(bert, tmp_path):
    rows = [{"tokens": words(count), "ner_tags": ["O"] * (count - 1) + ["B-X"]} for count in (3, 14, 15, 20) * 3]
    for split in ("train", "validation"):
        write(tmp_path / "tags" / f"{split}.jsonl", rows)
    data = prepared("token-classification", bert, tmp_path / "tags", 16)
    assert data.facts == {"rows": 12, "max_length": 16, "longest_row": 22, "cut_share": 0.5}


def test_a_tag_that_only_rows_to_measure_on_have(bert, tmp_path):
    """A file with a rare tag was refused, if chance put that row among those to measure on.

    With a limit the tag was unknown, and the tuned model was refused without the limit.
    """
    rows = [{"tokens": words(3), "ner_tags": ["O", "B-X", "O"]}] * 9
    for tag in ("B-Y", "O"):
        write(tmp_path / "tags.jsonl", [*rows, {"tokens": words(3), "ner_tags": ["B-X", "O", tag]}])
        for seed in range(9):
            options = DataOptions(max_length=16, seed=seed, limit=3, validation_limit=1)
            made = prepare(
                task("token-classification"), load_processor(bert, "text"), options, data=str(tmp_path / "tags.jsonl")
            )
            assert made.task.labels == (("B-X", "B-Y", "O") if tag == "B-Y" else ("B-X", "O"))


def questions(tmp_path):
    rows = []
    for number in range(12):
        context = " ".join([*words(number), "song", *words(3)])
        answer = {"text": ["song"], "answer_start": [context.index("song")]}
        rows.append({"id": str(number), "question": "is the", "context": context, "answers": answer})
    for split in ("train", "validation"):
        write(tmp_path / "asked" / f"{split}.jsonl", rows)
    return tmp_path / "asked"


def test_questions_are_not_cut_but_split(bert, tmp_path):
    data = prepared("question-answering", bert, questions(tmp_path), 12)
    # [CLS] is the [SEP] context [SEP]: 5 tokens besides the context of 4 to 15 words.
    assert data.facts["questions"] == 12 and data.facts["longest_row"] == 20 and data.facts["max_length"] == 12
    assert data.facts["split_share"] == round(8 / 12, 4) and data.facts["cut_share"] == 0.0
    assert data.facts["rows"] == len(data.validation) > 12
    whole = prepared("question-answering", bert, questions(tmp_path), 32, auto=True)
    assert whole.facts["max_length"] == 20 == len(whole.validation[0]["input_ids"])
    assert whole.facts["rows"] == 12 and whole.facts["split_share"] == 0.0


def test_rows_of_one_text_share_what_the_stride_leaves(bert, tmp_path):
    """The stride was the number of shared tokens, and tokenizers panicked if it did not fit."""
    processor, text = load_processor(bert, "text"), " ".join(words(30))
    answer = (
        {"text": ["song"], "answer_start": [text.index("song")]} if "song" in text else {"text": [], "answer_start": []}
    )

    def starts(asked, stride=None):
        rows = [{"question": " ".join(words(asked)), "context": text, "answers": answer}] * 2
        write(tmp_path / "asked.jsonl", rows)
        options = DataOptions(max_length=20, stride=stride)
        made = prepare(task("question-answering"), processor, options, data=str(tmp_path / "asked.jsonl")).validation
        return [len(text[: next(pair for pair in row["offsets"] if pair)[0]].split()) for row in made]

    # [CLS] question [SEP] context [SEP]: 15 words of context next to a question of two.
    assert starts(2, 6) == [0, 6, 12, 18]
    assert starts(2) == [0, 10, 20]
    assert starts(2, 19) == [0, 15]
    # Three words of context, of which two are shared.
    assert starts(14) == list(range(28))
    with pytest.raises(DataError, match=r"got a question of 17 tokens .* expected room for the text in rows of 20"):
        starts(17)


def test_an_answer_in_one_row_beats_no_answer_in_the_others(bert, tmp_path):
    """The rows without the answer are sure that they lack it, and the surest row decided: 4 of 12 answers got lost."""
    asked = questions(tmp_path)
    without = {"id": "12", "question": "is the", "context": "a film", "answers": {"text": [], "answer_start": []}}
    with (asked / "validation.jsonl").open("a") as file:
        file.write(json.dumps(without) + "\n")
    data = prepared("question-answering", bert, asked, 12)
    logits = [np.full((len(data.validation), 12), -5.0) for _ in range(2)]
    for place, row in enumerate(data.validation):
        for side, name in zip(logits, data.type.label_fields, strict=True):
            side[place, row[name]] = 8.0 if row[name] else 10.0
    assert len(data.validation) > 13
    assert data.type.compute_metrics(tuple(logits), None) == {"exact_match": 1.0, "span_f1": 1.0}


def test_questions_have_an_interval_over_questions(bert, tmp_path):
    """There was none: the answer of a long text is chosen over its rows, which cannot be drawn apart."""
    data = prepared("question-answering", bert, questions(tmp_path), 12)
    found = measure_with_interval(load_for_task(bert, data).eval(), data)
    assert found.units == 12 and found.rows == len(data.validation)
    low, high = found.interval
    assert low <= found.score <= high and found.score == pytest.approx(found.metrics["span_f1"])
    # By hand: means over questions that are drawn with replacement.
    logits = [np.random.default_rng(seed).normal(size=(found.rows, 12)) for seed in (0, 1)]
    units = data.type.units(logits, None)[0][:, 1]
    assert units.mean() == pytest.approx(data.type.compute_metrics(logits, None)["span_f1"]) and 0 < units.mean() < 1
    chance = np.random.default_rng(7)
    expected = [units[chance.integers(12, size=12)].mean() for _ in range(5)]
    assert resampled_scores(data, logits, None, resamples=5, seed=7) == pytest.approx(expected)


def test_language_models(bert, gpt2, tmp_path):
    write(tmp_path / "text.jsonl", [{"text": " ".join(WORDS)} for _ in range(10)])
    for split in ("train", "validation"):
        (tmp_path / "set").mkdir(exist_ok=True)
        (tmp_path / "set" / f"{split}.txt").write_text(" ".join(words(50)))
    masked = prepared("masked-lm", bert, tmp_path / "set", 16)
    # Three windows of 14 tokens besides two special ones: 42 of 50.
    assert masked.facts == {"context": 16, "mask_share": 0.15, "left_out_share": round(8 / 50, 4)}
    causal = prepared("causal-lm", gpt2, tmp_path / "set", WINDOW, auto=True)
    assert causal.facts["context"] == 50 and len(causal.validation) == 1


def test_batches_are_measured_in_tokens():
    assert rows_per_batch({"max_length": 128, "longest_row": 100}) == 32
    assert rows_per_batch({"max_length": 8192, "longest_row": 9000}) == 2
    assert rows_per_batch({"max_length": 8192, "longest_row": 1024}) == 16
    assert rows_per_batch({"context": 1024}) == 16 and rows_per_batch({}) == 32
    assert rows_per_batch({"max_length": 100_000, "longest_row": 100_000}) == 1


def test_a_text_of_zero_tokens_is_refused(bert, tmp_path):
    rows = [{"text": text, "label": place % 2} for place, text in enumerate(["good film", "\u200b", "bad film"] * 4)]
    write(tmp_path / "set.jsonl", rows)
    tokenizer = load_processor(bert, "text")
    assert len(tokenizer("\u200b")["input_ids"]) == 3, "this tokenizer knows no such character, and says so"
    tokenizer.backend_tokenizer.pre_tokenizer = None
    from tokenizers import normalizers

    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\u200b", "")
    with pytest.raises(DataError, match=r"got a text without any token \(number \d+ of \d+, from 0"):
        prepare(task("text-classification"), tokenizer, DataOptions(max_length=8), data=str(tmp_path / "set.jsonl"))


def test_rotary_models_are_measured_beyond_their_length_with_a_note(tmp_path, gpt2):
    """They were refused, though nothing keeps them from reading on; a table of positions does."""
    causal_folder(tmp_path / "llama", 16)
    (tmp_path / "set").mkdir()
    for split in ("train", "validation"):
        (tmp_path / "set" / f"{split}.txt").write_text(" ".join(words(60)))

    def found(model, length):
        options = {"task": "causal-lm", "dataset": str(tmp_path / "set"), "device": "cpu", "max_length": length}
        return evaluate_checkpoint(EvaluateJob.of(model=str(model), **options))

    longer = found(tmp_path / "llama", 24)
    assert longer.facts["context"] == 24 and longer.figures["tokens"] == 59
    assert longer.notes == (
        "Rows have up to 24 tokens, but LlamaForCausalLM was made for 16: its rotary positions continue, but it was "
        "never trained beyond that.",
    )
    assert found(tmp_path / "llama", 16).notes == ()
    with pytest.raises(ConfigError, match="takes at most 32 tokens"):
        found(gpt2, 40)


def test_rows_that_show_nothing_of_the_kernel_are_noted(tmp_path):
    """They keep all of the original's score, with or without the kernel."""
    folder, text = causal_folder(tmp_path / "llama", 64), tmp_path / "text.txt"
    text.write_text("\n".join(" ".join(words(12, place)) for place in range(20)))
    model = linearize.convert(AutoModelForCausalLM.from_pretrained(folder), "hedgehog", window=16, sinks=2)
    linearize.save(model, tmp_path / "linear", processor=load_processor(str(folder), "text"))
    options = {"task": "causal-lm", "dataset": str(text), "device": "cpu", "model": str(tmp_path / "linear")}
    found = [evaluate_checkpoint(EvaluateJob.of(max_length=length, **options)).notes for length in (18, 19)]
    note = "Rows of up to 18 tokens fit into the window, where attention is exact, so they show nothing of the kernel."
    assert found == [(note,), ()]


@pytest.mark.parametrize("kernel", [pytest.param(None, marks=pytest.mark.slow), "hedgehog"])
def test_rotary_models_are_tuned_beyond_their_length_and_take_it_then(tmp_path, gpt2, kernel, capsys):
    """They were refused, and a converted one could not be converted again for longer rows."""
    folder = causal_folder(tmp_path / "llama", 16)
    if kernel is not None:
        original_folder, folder = folder, tmp_path / "linear"
        linearize.convert(AutoModelForCausalLM.from_pretrained(original_folder), kernel).save_pretrained(folder)
        load_processor(str(original_folder), "text").save_pretrained(folder)
    (tmp_path / "set").mkdir()
    for split in ("train", "validation"):
        (tmp_path / "set" / f"{split}.txt").write_text(" ".join(words(60)))
    notes = []

    def tuned(model, length, **more):
        options = {"task": "causal-lm", "dataset": str(tmp_path / "set"), "device": "cpu", "max_length": length, **more}
        job = TuneJob.of(model=str(model), output=str(tmp_path / "tuned"), steps=2, batch_size=1, **options)
        return finetune_checkpoint(job, lambda event: notes.append(event.text) if isinstance(event, Noted) else None)

    line = f"finetune {folder} --task causal-lm --dataset {tmp_path / 'set'} --max-length 24 --device cpu --dry-run"
    code, out, _ = run(capsys, *line.split(), "--steps", "2", "--batch-size", "1")
    target, _ = tuned(folder, 24)
    assert notes == [
        "Rows have up to 24 tokens, LlamaForCausalLM was made for 16: no table; config.max_position_embeddings raised, "
        "rotary frequencies unchanged (no rope scaling)."
    ]
    assert code == 0 and notes[0] in " ".join(out.split())
    assert json.loads((target / "config.json").read_text())["max_position_embeddings"] == 24
    assert load_processor(str(target), "text").model_max_length == 24
    options = {"task": "causal-lm", "dataset": str(tmp_path / "set"), "device": "cpu", "max_length": 24}
    assert evaluate_checkpoint(EvaluateJob.of(model=str(target), **options)).notes == ()
    with pytest.raises(ConfigError, match="takes at most 32 tokens"):
        tuned(gpt2, 40, overwrite=True)
