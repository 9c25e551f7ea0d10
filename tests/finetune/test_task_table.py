"""The tables of heads and tasks: what they say of transformers is true, and each type has its class."""

from __future__ import annotations

import dataclasses

import pytest
import transformers
from support.tasks import no_rows

from linearize.core.errors import ConfigError
from linearize.core.heads import HEADS, head_of_class
from linearize.jobs.task_config import TaskChoice
from linearize.training.stage_two.metrics import METRICS
from linearize.training.stage_two.task_types.base import TaskType
from linearize.training.stage_two.tasks import TASKS, task

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
    assert set(TASKS) <= set(said.partition(" (")[0].split(", "))


@pytest.mark.parametrize("name", sorted(set(HEADS) - set(TASKS)))
def test_the_name_of_a_head_leads_to_its_tasks(name):
    """`convert --task text-generation` is right, so people try it with `finetune`; the nearest name is another task."""
    tasks = [known.name for known in TASKS.values() if known.head.name == name] or ["text-classification"]
    with pytest.raises(ConfigError, match=f"which is a head, expected a task such as {', '.join(tasks)}$"):
        task(name)


def test_a_class_without_a_head_has_none():
    assert head_of_class("BertModel") is None
    assert not HEADS["feature-extraction"].is_of("BertModel")


@pytest.mark.parametrize("name", sorted(TASKS))
def test_every_task_has_a_class_that_is_complete(name):
    kind = TASKS[name].type
    assert issubclass(kind, TaskType) and kind.head in HEADS.values()
    for method in ("prepare", "units"):
        assert getattr(kind, method) is not getattr(TaskType, method), method


@pytest.mark.parametrize("name", sorted(TASKS))
def test_every_task_has_metrics_and_columns_that_its_type_reads(name):
    known = TASKS[name]
    assert set(known.metrics) <= set(METRICS)
    assert len(known.columns) <= known.type.columns
    assert known.modality == ("image" if "images" in known.kind else "text")


def test_outputs_of_a_head():
    assert no_rows("cola").num_labels == 2
    assert no_rows("mnli").num_labels == 3
    assert no_rows("stsb").num_labels == 1
    assert no_rows("token-classification", labels=("O", "B-A", "I-A")).num_labels == 3
    for without in ("similarity", "retrieval", "masked-lm", "causal-lm", "copying", "question-answering", "recall"):
        assert no_rows(without).num_labels is None
