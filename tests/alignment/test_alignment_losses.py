"""Losses of the alignment: their numbers, what padding may not do, chunks."""

from __future__ import annotations

import pytest
import torch

from linearize.training.alignment import objective


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(0)
    return lambda *size: torch.randn(*size, generator=generator)


def test_hidden_state_loss_is_the_unexplained_share(draw):
    teacher = draw(3, 5, 8) * 4 + 2
    mean = teacher.flatten(0, 1).mean(dim=0).expand_as(teacher)
    assert objective.hidden_state_loss([teacher], [teacher], None) == 0
    torch.testing.assert_close(objective.hidden_state_loss([mean], [teacher], None), torch.tensor(1.0))
    half = (teacher + mean) / 2
    # The mean of a layer at 0.25 and one at 1.
    found = objective.hidden_state_loss([half, mean], [teacher, teacher], None)
    torch.testing.assert_close(found, torch.tensor(0.625))


def test_padding_changes_nothing(draw):
    teacher, student = draw(2, 6, 4), draw(2, 6, 4)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    spoiled_teacher, spoiled = teacher.clone(), student.clone().requires_grad_()
    spoiled_teacher[0, 4:] = 1e6
    with torch.no_grad():
        spoiled[0, 4:] = float("nan")
    found = objective.hidden_state_loss([spoiled], [spoiled_teacher], mask)
    torch.testing.assert_close(found, objective.hidden_state_loss([student], [teacher], mask))
    found.backward()
    assert (spoiled.grad[0, 4:] == 0).all() and spoiled.grad.isfinite().all()
    torch.testing.assert_close(objective.pooled(teacher, mask)[0], teacher[0, :4].mean(dim=0))
    for side in (mask, mask.flip(1)):
        for how, number in (("first", 0), ("last", -1)):
            expected = torch.stack([row[kept.bool()][number] for row, kept in zip(teacher, side, strict=True)])
            assert torch.equal(objective.pooled(teacher, side, how), expected)
    assert torch.equal(objective.pooled(teacher, None, "last"), teacher[:, -1])
    logits = objective.logits_loss(spoiled, spoiled_teacher, mask=mask)
    torch.testing.assert_close(logits, objective.logits_loss(student, teacher, mask=mask))


def test_logits_loss(draw):
    student, teacher = draw(7, 11), draw(7, 11)
    p, q = (teacher / 2).softmax(-1), (student / 2).softmax(-1)
    expected = (p * (p.log() - q.log())).sum() / 7 * 4
    torch.testing.assert_close(objective.logits_loss(student, teacher, temperature=2.0), expected)
    found = objective.logits_loss(student[:, :1], teacher[:, :1], regression=True)
    torch.testing.assert_close(found, (student[:, 0] - teacher[:, 0]).square().mean())


def test_chunks_over_rows_change_neither_value_nor_gradient(draw, monkeypatch):
    student, teacher = draw(2, 5, 13).double(), draw(2, 5, 13).double()
    whole = student.clone().requires_grad_()
    objective.logits_loss(whole, teacher).backward()
    monkeypatch.setattr(objective, "LOGITS_AT_ONCE", 40)
    parts = student.clone().requires_grad_()
    found = objective.logits_loss(parts, teacher)
    found.backward()
    torch.testing.assert_close(found, objective.logits_loss(student, teacher))
    torch.testing.assert_close(parts.grad, whole.grad)


def test_pooled_loss(draw):
    one = draw(4, 6)
    torch.testing.assert_close(objective.pooled_loss(one * 3, one), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(objective.pooled_loss(-one, one), torch.tensor(8.0))
