"""The table of heads and task types: it says of transformers what is true, and each type has its module."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import transformers

from linearize.finetune.metrics import METRICS
from linearize.finetune.prepared import TaskData
from linearize.finetune.tasks import TASK_TYPES, TASKS, task
from linearize.heads import HEADS, head_of_class
from linearize.jobs.task_config import TaskChoice

CLASSES = {
    "BertForMaskedLM": ("fill-mask", "fill-mask"),
    "GPT2LMHeadModel": ("text-generation", "text-generation"),
    "LinearizedLlamaForCausalLM": ("text-generation", "text-generation"),
    "BartForConditionalGeneration": ("text2text-generation", "text-generation"),
    "RobertaForSequenceClassification": ("text-classification", "text-classification"),
    "LinearizedBertForTokenClassification": ("token-classification", "token-classification"),
    "BertForQuestionAnswering": ("question-answering", "question-answering"),
    "BertForMultipleChoice": ("multiple-choice", "multiple-choice"),
    "ViTForImageClassification": ("image-classification", "image-classification"),
}


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_class_has_the_head_that_its_auto_class_loads(name):
    head = head_of_class(name)
    assert (head.name, head.pipeline_tag) == CLASSES[name]
    mapping = getattr(transformers, head.auto_class)._model_mapping
    known = {
        part for names in mapping._model_mapping.values() for part in ([names] if isinstance(names, str) else names)
    }
    assert name.removeprefix("Linearized") in known


def test_the_help_names_every_task():
    said = next(field for field in dataclasses.fields(TaskChoice) if field.name == "task").metadata["help"]
    assert sorted(said.replace("; to measure alone: ", ", ").split(", ")) == sorted(TASKS)


def test_a_class_without_a_head_has_none():
    assert head_of_class("BertModel") is None
    assert not HEADS["feature-extraction"].is_of("BertModel")


@pytest.mark.parametrize("name", sorted(TASK_TYPES))
def test_every_type_has_a_module_and_a_task(name):
    assert callable(importlib.import_module(TASK_TYPES[name].module).prepare)
    assert any(one.type is TASK_TYPES[name] for one in TASKS.values())


@pytest.mark.parametrize("name", sorted(TASKS))
def test_every_task_has_metrics_and_columns_that_its_type_reads(name):
    known = TASKS[name]
    assert set(known.metrics) <= set(METRICS)
    assert len(known.columns) <= known.type.columns
    assert known.modality == ("image" if "image" in known.type.name else "text")


def outputs(name, **changes):
    return TaskData(task(name, **changes), [], [], len, len, "no rows").num_labels


def test_outputs_of_a_head():
    assert outputs("cola") == 2
    assert outputs("mnli") == 3
    assert outputs("stsb") == 1
    assert outputs("token-classification", labels=("O", "B-A", "I-A")) == 3
    for without in ("similarity", "retrieval", "masked-lm", "causal-lm", "copying", "question-answering", "recall"):
        assert outputs(without) is None
