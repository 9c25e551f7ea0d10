"""scripts/attention_shape.py: entropy and order of weights, on rows whose figures are known."""

import math

import pytest
import torch
from support.scripts import script

SCRIPT = script("attention_shape")


def test_entropy_of_known_rows():
    rows = torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0], [0.5, 0.5, -3.0, 0.0]])
    expected = (math.log(4), 0.0, math.log(2))
    for row, figure in zip(rows, expected, strict=True):
        assert SCRIPT.entropy(row).item() == pytest.approx(figure)
    assert SCRIPT.entropy(rows).item() == pytest.approx(sum(expected) / 3)


@pytest.mark.parametrize("name", ["attention_shape", "closeness_by_length"])
def test_folders_are_named_once_and_names_may_have_equals_signs(name, tmp_path, capsys):
    """Of two folders with one name, only the second was measured."""
    parse, more = script(name).parse, ["--text", "a.txt", "--output", str(tmp_path / "a.json")]
    line = ["--converted"] if name == "closeness_by_length" else []
    more += ["bert"] * len(line)
    found = parse([*line, "rate=0.1=runs/a", "elu=b", *more]).converted
    assert found == {"rate=0.1": "runs/a", "elu": "b"}
    with pytest.raises(SystemExit):
        parse([*line, "elu=a", "elu=b", *more])
    assert "converted: elu is given twice" in capsys.readouterr().err


def test_order_is_that_of_the_ranks():
    scores = torch.randn(2, 5, 30, generator=torch.Generator().manual_seed(0))
    softmax = scores.softmax(dim=-1)
    assert SCRIPT.order(scores * 0.01, softmax).item() == pytest.approx(1.0)
    assert SCRIPT.order(-scores, softmax).item() == pytest.approx(-1.0)
    # By the formula of ranks without ties: 1 - 6 sum d^2 / (n (n^2 - 1)).
    swapped = torch.tensor([[0.1, 0.2, 0.4, 0.3]])
    assert SCRIPT.order(swapped, torch.tensor([[0.1, 0.2, 0.3, 0.4]])).item() == pytest.approx(1 - 12 / 60)
