"""Re-paired texts: free rows without a label, for a teacher to label."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from linearize.data.records import Example, Records, text_digest

NEIGHBOURS = 6
"""The hard partner is drawn from so many nearest second texts."""
CANDIDATES = 20_000
"""Second texts that are searched, so that a large set costs no more than a medium one."""
_STREAM = 0x9A12


def paired_anew(firsts: Sequence[str], seconds: Sequence[str], count: int, seed: int) -> list[tuple[int, int]]:
    """Pair first texts with other rows' second texts: half at random, half with one that shares words with it.

    Random partners are mostly unrelated; partners with common words (cosine of TF-IDF) are near misses, for which a
    model must compare the texts. First texts stay first, as the columns of a pair may have different meanings.

    Args:
        firsts: first texts [N].
        seconds: second texts [N].
        count: pairs to make.
        seed: of the choice; the same seed gives the same pairs.

    Returns:
        `count` pairs (row of the first text, row of the second text), never of the same row or with the second text of
        the first one's row. Empty if there are fewer than two rows or all second texts are the same.
    """
    total = len(firsts)
    if count < 1 or total < 2 or len(set(seconds)) < 2:
        return []
    chance = np.random.default_rng([seed, _STREAM])
    turns = -(-count // total)
    anchors = np.concatenate([chance.permutation(total) for _ in range(turns)])[:count]
    hard = np.arange(count) % 2 == 0
    near = _near(firsts, seconds, anchors[hard], chance)
    made = []
    for place, anchor in enumerate(anchors.tolist()):
        fitting = [other for other in near.get(anchor, ()) if seconds[other] != seconds[anchor] and other != anchor]
        if hard[place] and fitting:
            made.append((anchor, fitting[int(chance.integers(len(fitting)))]))
            continue
        other = anchor
        while seconds[other] == seconds[anchor]:
            other = int(chance.integers(total))
        made.append((anchor, other))
    return made


class PairedAnew:
    """Re-paired texts of some rows of records, as records without labels.

    Args:
        records: rows with pairs of texts.
        rows: [N] which of them.
        extra: pairs to make, per row.
        seed: of the choice.
    """

    def __init__(self, records: Records, rows: np.ndarray, extra: float, seed: int) -> None:
        examples = records.fetch(rows.tolist())
        firsts, seconds = [example.value for example in examples], [str(example.pair) for example in examples]
        made = paired_anew(firsts, seconds, round(extra * len(rows)), seed)
        self.pairs = [(firsts[first], seconds[second]) for first, second in made]
        self.sizes = np.array([len(first.strip()) + len(second.strip()) for first, second in self.pairs], np.int32)
        self.skipped = 0
        self.names = records.names

    def fetch(self, rows: Sequence[int]) -> list[Example]:
        return [Example(*self.pairs[row]) for row in rows]

    def digests(self, rows: Sequence[int]) -> Iterator[bytes]:
        return (text_digest(*self.pairs[row]) for row in rows)


def _near(
    firsts: Sequence[str], seconds: Sequence[str], anchors: np.ndarray, chance: np.random.Generator
) -> dict[int, list[int]]:
    """Return for the first texts of some rows the rows of the nearest second texts; empty if there are no words."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.neighbors import NearestNeighbors

    asked = np.unique(anchors)
    searched = np.arange(len(seconds))
    if len(searched) > CANDIDATES:
        searched = np.sort(chance.choice(searched, CANDIDATES, replace=False))
    vectors = TfidfVectorizer(token_pattern=r"(?u)\b\w+\b")
    try:
        table = vectors.fit_transform([seconds[place] for place in searched.tolist()])
    except ValueError:  # There is not a single word.
        return {}
    queries = vectors.transform([firsts[place] for place in asked.tolist()])
    index = NearestNeighbors(n_neighbors=min(NEIGHBOURS, len(searched)), metric="cosine", algorithm="brute").fit(table)
    found = index.kneighbors(queries, return_distance=False)
    return {int(anchor): searched[row].tolist() for anchor, row in zip(asked, found, strict=True)}
