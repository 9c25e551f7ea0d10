"""New pairs without a label, added to a task's rows: what is learned from them."""

from __future__ import annotations

import pytest
import torch

import linearize
from linearize.checkpoint.loading import load_processor
from linearize.core.errors import ConfigError
from linearize.training.stage_two.config import DataOptions, TuneConfig
from linearize.training.stage_two.load import load_for_task
from linearize.training.stage_two.prepare import check_extra_pairs, hold_out, prepare
from linearize.training.stage_two.rows import IGNORED
from linearize.training.stage_two.tasks import task
from linearize.training.stage_two.tuner import Tuner


def pair_of(folder, data):
    """A teacher, and a converted student with other weights."""
    teacher = load_for_task(folder, data, seed=1)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return teacher, linearize.convert(load_for_task(folder, data, seed=2), "hedgehog")


def test_only_the_teachers_terms_count_for_them(bert, glue, tmp_path):
    chosen = task("mrpc")
    rows = DataOptions(max_length=16, extra_pairs=1)
    data = prepare(chosen, load_processor(bert, chosen.modality), rows, data=str(glue))
    assert len(data.extra) == 64 and all(row["labels"] == IGNORED for row in data.extra)
    assert data.description.endswith(", 64 new pairs")
    data = hold_out(data)
    teacher, student = pair_of(bert, data)
    config = TuneConfig(labels_from=0.0, labels_ramp=0.0, labels_weight=3.0)
    trainer = Tuner(student, data, config, tmp_path / "work", teacher=teacher.eval())
    assert len(trainer.train_dataset) == 52 + len(data.extra) and trainer.label_weight() == 3.0
    for module in student.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    student.train()
    batch = data.collate(data.extra[:6])
    total = trainer.compute_loss(student, batch).item()
    parts = {name: float(part[0]) for name, part in trainer._parts.items()}
    assert parts["task"] == 0.0 and min(parts["hidden"], parts["logits"]) > 1e-5
    assert total == pytest.approx(parts["hidden"] + parts["logits"], rel=1e-6)
    trainer._parts = {}
    mixed = data.collate([*data.extra[:3], *(data.train[place] for place in range(3))])
    labelled = data.collate([data.train[place] for place in range(3)])
    trainer.compute_loss(student, mixed)
    trainer.compute_loss(student, labelled)
    both = [float(part) for part in trainer._parts["task"]]
    assert both[0] == pytest.approx(both[1], rel=1e-5), "the labels' loss is that of the rows that have one"
    alone = Tuner(student, data, config, tmp_path / "work")
    assert len(alone.train_dataset) == 52, "without a teacher they are not used"


def test_a_task_that_reads_images_is_refused():
    with pytest.raises(ConfigError, match=r"extra_pairs: got 1\.0, but task cifar10 reads no pairs"):
        check_extra_pairs(task("cifar10"), DataOptions(extra_pairs=1.0))
