"""scripts/routed_scores.py: scores that are exact where they have all numbers, and the chosen keys."""

import torch
from support.scripts import script

script("routed_blocks")
SCRIPT = script("routed_scores")


def test_directions_are_the_closest_products():
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(400, 6, generator=draw) @ torch.randn(6, 6, generator=draw) for _ in range(2))
    middle = k - k.mean(dim=0)
    for count in (2, 6):
        queries, keys = SCRIPT.directions(q, k, count)
        products = q @ middle.T
        error = (q @ queries.T) @ (middle @ keys.T).T - products
        # The products have rank 6: their singular values beyond the first ones are the least error.
        least = torch.linalg.svdvals(products)[count:].square().sum()
        torch.testing.assert_close(error.square().sum(), least, rtol=1e-3, atol=1e-6 * float(products.square().sum()))


def test_scores_with_all_channels_are_products():
    draw = torch.Generator().manual_seed(0)
    q, k, old_q, old_k = (torch.randn(*shape, 16, generator=draw) for shape in ((2, 3), (32,), (2, 40), (40,)))
    found = SCRIPT.scores(q, k, old_q, old_k)
    for name in ("all channels", "the query's 16 largest channels"):
        torch.testing.assert_close(found[name][1], q @ k.T)
    part = found["the query's 4 largest channels"][1][1, 2]
    best = q[1, 2].abs().argsort()[-4:]
    torch.testing.assert_close(part, k[:, best] @ q[1, 2, best])
    torch.testing.assert_close(found["mean key of 4"][1][0, 0, 5], q[0, 0] @ k[4:8].mean(0))


def test_chosen_keys_fill_blocks():
    score = torch.tensor([[[0.0, 5.0, 1.0, 1.0, 9.0, 9.0, 3.0, 4.0]]])
    candidates = torch.tensor([[True] * 4 + [False] * 2 + [True] * 2])
    assert SCRIPT.chosen(score, candidates, 2, 4)[0, 0].tolist() == [True, True, False, False, False, False, True, True]
    assert SCRIPT.chosen(score, candidates, 1, 2)[0, 0].nonzero()[:, 0].tolist() == [1, 7]
