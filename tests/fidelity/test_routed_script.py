"""scripts/routed_blocks.py: what a query of a form sees, and rows with numbers."""

import pytest
import torch
from support.scripts import script

SCRIPT = script("routed_blocks")
SIZES = {"size": 2, "window": 5, "sinks": 1, "blocks": 2}


@pytest.mark.parametrize("score", ["mean", "mass", "channels"])
@pytest.mark.parametrize("group", [1, 4])
def test_what_queries_see(group, score):
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(3, 24, 4, generator=draw) for _ in range(2))
    form = SCRIPT.Form(**SIZES, group=group, score=score, channels=3)
    seen = SCRIPT.visible(q[:, 8:], k, form, 8, 0.5, [0, 2])
    for head in range(3):
        for place in range(8, 24):
            first = place - place % group
            mean = q[head, first : first + group].mean(0)
            largest = mean * (mean.abs() > mean.abs().min())
            judge = {
                "mean": lambda keys, mean=mean: mean @ keys.mean(0),
                "mass": lambda keys, own=q[head, first : first + group]: (0.5 * own @ keys.T).exp().sum(),
                "channels": lambda keys, largest=largest: (keys @ largest).max(),
            }[score]
            scores = {block: judge(k[head, block : block + 2]) for block in range(0, first - 4, 2)}
            best = sorted(scores, key=scores.get)[-2:] if head != 1 else []
            want = {0, *range(place - 4, place + 1), *(key for block in best for key in (block, block + 1))}
            assert set(seen[head, place - 8].nonzero()[:, 0].tolist()) == want


def test_rows_end_with_the_questions():
    def tokenizer(words, **_):
        return {"input_ids": [ord(letter) for letter in words]}

    text = torch.arange(1000, 6000)
    row = SCRIPT.row_with_numbers(tokenizer, text, 2000, torch.Generator().manual_seed(0))
    assert len(row["ids"]) == len(row["text"]) == 2000
    assert row["ids"][row["text"]].tolist() == text[: int(row["text"].sum())].tolist()
    words = "".join(chr(token) for token in row["ids"][~row["text"]])
    for name, (first, last) in zip(SCRIPT.NAMES, row["answers"].tolist(), strict=True):
        answer = "".join(map(chr, row["ids"][first:last].tolist()))
        assert answer.isdecimal() and len(answer) == 5
        assert words.count(f" The secret number of the {name} is {answer}") == 2
