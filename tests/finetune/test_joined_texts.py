"""Texts of language models: start tokens in every row, and end tokens between texts to train on."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from datasets import Dataset
from support.tasks import WORDS, measured, word_tokenizer
from support.tiny import original

from linearize.data.encode import TextEncoder, special_tokens
from linearize.training.stage_two.config import DataOptions, TuneConfig
from linearize.training.stage_two.prepare import prepare
from linearize.training.stage_two.rows import IGNORED
from linearize.training.stage_two.tasks import task
from linearize.training.stage_two.trainer import finetune

START, END = 2, 3
LENGTH = 12
CHANCE = np.random.default_rng(0)
TEXTS = [" ".join(CHANCE.choice(WORDS, count)) for count in (3, 20, 7, 1, 30, 12, 11, 5)]
FORMS = {"none": "$A", "start": "[CLS] $A", "end": "$A [SEP]", "both": "[CLS] $A [SEP]", "two": "[CLS] [CLS] $A"}


def tokenizer_of(form):
    """A tokenizer that adds start tokens, end tokens, both or none to a text; its end token is [SEP]."""
    from tokenizers import processors

    made = word_tokenizer(ends=False)
    post = processors.TemplateProcessing(single=FORMS[form], special_tokens=[("[CLS]", START), ("[SEP]", END)])
    made.backend_tokenizer.post_processor = post
    made.eos_token = "[SEP]"
    return made


def opened(form, name="causal-lm", texts=TEXTS, **options):
    table = Dataset.from_list([{"text": text} for text in texts])
    chosen = DataOptions(max_length=LENGTH, **options)
    return prepare(task(name), tokenizer_of(form), chosen, data={"train": table, "validation": table})


def ids_of(text):
    return tokenizer_of("none")(text)["input_ids"]


@pytest.mark.parametrize("form", FORMS)
def test_special_tokens_are_those_around_a_text(form):
    front, back = special_tokens(tokenizer_of(form))
    assert front == [START] * FORMS[form].count("[CLS]") and back == [END] * FORMS[form].count("[SEP]")


@pytest.mark.parametrize("form", FORMS)
def test_a_tuning_reads_the_stream_of_stage_ones_packing(form):
    data = opened(form)
    front = special_tokens(tokenizer_of(form))[0]
    stream = list(itertools.chain(*TextEncoder(tokenizer_of(form), 1, packed=True).pack(TEXTS, keep_rest=True)))
    assert stream.count(END) == len(TEXTS) and stream[: len(front)] == front
    assert data.type.sizes(stream, []).split()[0] == data.description.rpartition("; ")[2].split()[0]
    step = LENGTH - len(front)
    for place in range(len(data.train)):
        row, window = data.train[place], stream[place * step : (place + 1) * step]
        starts = window[: len(front)] == front
        assert row["input_ids"].tolist() == (window if starts else [*front, *window])
        hidden = 0 if starts else len(front) + (len(front) > 0)
        assert row["labels"].tolist() == [IGNORED] * hidden + row["input_ids"].tolist()[hidden:]
        assert len(row["input_ids"]) <= LENGTH
    assert len(data.train) == len(stream) // step


@pytest.mark.parametrize("stride", [None, 4])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_measured_begins_with_the_start_tokens(form, stride, tmp_path):
    """Every token but the first is predicted once, from start tokens and text; nothing else is predicted."""
    data = opened(form, stride=stride)
    model = original("llama", "AutoModelForCausalLM", vocab_size=17, bos_token_id=START, eos_token_id=END)
    found = measured(model, data, tmp_path)
    front = special_tokens(tokenizer_of(form))[0]
    ids = ids_of("\n".join(TEXTS))
    length, total, known = LENGTH - len(front), 0.0, 1
    assert found["tokens"] == len(ids) - 1
    while known < len(ids):
        end = min(len(ids), length if known == 1 else known + (stride or length - 1))
        window = [*front, *ids[max(0, end - length) : end]]
        with torch.no_grad():
            logits = model(torch.tensor([window])).logits[0].double().log_softmax(-1)
        total -= sum(float(logits[len(window) - 1 - (end - place), ids[place]]) for place in range(known, end))
        known = end
    assert found["nll"] == pytest.approx(total / (len(ids) - 1), rel=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_copies_begin_with_the_start_tokens(form, tmp_path):
    data = opened(form, "copying")
    front, half = special_tokens(tokenizer_of(form))[0], (LENGTH - FORMS[form].count("[CLS]")) // 2
    model, ids = original("llama", "AutoModelForCausalLM", vocab_size=17), ids_of("\n".join(TEXTS))
    first, again = [], []
    for begin in range(0, len(ids) - half + 1, half):
        passage = ids[begin : begin + half]
        with torch.no_grad():
            logits = model(torch.tensor([[*front, *passage, *passage]])).logits[0].double().log_softmax(-1)
        logits = logits[len(front) :]
        first += [-float(logits[place, passage[place + 1]]) for place in range(half - 1)]
        again += [-float(logits[half + place, passage[place + 1]]) for place in range(half - 1)]
    found = measured(model, data, tmp_path)
    assert [found["nll_first"], found["nll_copy"]] == pytest.approx([np.mean(first), np.mean(again)], rel=1e-5)


def test_lines_of_a_longer_text_have_no_end(tmp_path):
    """Lines of a .txt file, and WikiText's rows with their line breaks; a text of several lines is a text."""
    for split in ("train", "validation"):
        (tmp_path / f"{split}.txt").write_text("\n".join(TEXTS))
    chosen = DataOptions(max_length=LENGTH)
    data = prepare(task("causal-lm"), tokenizer_of("none"), chosen, data=str(tmp_path))
    assert (
        np.concatenate([data.train[place]["input_ids"] for place in range(len(data.train))]).tolist()
        == (ids_of("\n".join(TEXTS))[: len(data.train) * LENGTH])
    )
    lines = [" = Title = \n", "", *(f" {text} \n" for text in TEXTS), "\n"]
    joined = opened("none", texts=lines)
    assert END not in np.concatenate([joined.train[place]["input_ids"] for place in range(len(joined.train))])
    texts = opened("none", texts=[*TEXTS, "good film\nbad film\n"])
    assert sum(texts.train[place]["input_ids"].tolist().count(END) for place in range(len(texts.train))) >= 7


def test_a_tokenizer_without_an_end_token_joins_texts():
    made = tokenizer_of("none")
    made.eos_token = made.sep_token = None
    table = Dataset.from_list([{"text": text} for text in TEXTS])
    data = prepare(task("causal-lm"), made, DataOptions(max_length=LENGTH), data={"train": table, "validation": table})
    assert data.train[0]["input_ids"].tolist() == ids_of("\n".join(TEXTS))[:LENGTH]


def test_a_tuned_model_stops(tmp_path):
    """Trained on texts of one word, it ends its answer after one word; before, it went on with the next text."""
    data = opened("start", texts=["film"] * 200)
    model = original("llama", "AutoModelForCausalLM", vocab_size=17, bos_token_id=START, eos_token_id=END)
    finetune(model, data, TuneConfig(learning_rate=1e-2, batch_size=4, steps=12), folder=tmp_path / "work")
    answer = model.generate(torch.tensor([[START, *ids_of("film")]]), max_new_tokens=4, do_sample=False)
    assert answer[0].tolist()[2:] == [END]
