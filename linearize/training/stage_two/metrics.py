"""Metrics.

A metric maps arrays with one entry per unit (a row, a question, a sentence) to numbers by name. Metrics use counts in
numpy, because an interval computes them on 10,000 resamples; scikit-learn's input checks alone would take longer than
all of that.
"""

from __future__ import annotations

import functools
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from linearize.core.figures import check_finite

DEPTHS = (1, 10)
"""The k of every recall at k that `retrieval` returns."""
BLOCK = 1_024
"""Queries that are compared with all texts at a time."""
EDGES = (1, *(64 * 2**power for power in range(15)))
"""Positions where a range begins: 1 to 63 tokens before, 64 to 127, 128 to 255 and so on; the last range is open."""
Result = TypeVar("Result")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def _of_finite(metric: Callable[..., Result]) -> Callable[..., Result]:
    """Return a metric that refuses arguments with NaN or infinity."""

    @functools.wraps(metric)
    def checked(*arrays: np.ndarray | None) -> Result:
        for values in arrays:
            if values is not None:
                check_finite(metric.__name__, values)
        return metric(*arrays)

    return checked


@_of_finite
def accuracy(guess: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Return the share of guesses [N] that equal their reference; NaN without rows."""
    return {"accuracy": np.count_nonzero(guess == true) / len(true) if len(true) else math.nan}


@_of_finite
def f1(guess: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Return the F1 of class 1 [N], as GLUE does for MRPC and QQP; 0 if that class is neither predicted nor occurs."""
    guess, true = guess == 1, true == 1
    total = np.count_nonzero(guess) + np.count_nonzero(true)
    return {"f1": 2 * np.count_nonzero(guess & true) / total if total else 0.0}


@_of_finite
def f1_macro(guess: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Return the mean of the F1 of every class that is predicted or occurs in [N] rows."""
    hits, guesses, truths = _class_counts(guess, true)
    total = guesses + truths
    known = total > 0
    return {"f1_macro": float(np.mean(2 * hits[known] / total[known])) if known.any() else 0.0}


@_of_finite
def multi_label(guess: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Return the F1 of labels over all rows and labels, its mean over labels, and the share of rows without an error.

    Labels that are neither predicted nor occur do not count. Without any label the F1 is 0.

    Args:
        guess: predicted labels, bool [N, C].
        true: labels, bool [N, C].
    """
    hits, total = (guess & true).sum(axis=0), guess.sum(axis=0) + true.sum(axis=0)
    known = total > 0
    return {
        "f1_micro": float(2 * hits.sum() / total.sum()) if known.any() else 0.0,
        "f1_macro": float(np.mean(2 * hits[known] / total[known])) if known.any() else 0.0,
        "subset_accuracy": float((guess == true).all(axis=1).mean()) if len(true) else math.nan,
    }


@_of_finite
def matthews(guess: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Return the correlation of predicted and true classes [N], CoLA's metric; 0 if either of them is constant.

    Source: https://doi.org/10.1016/j.compbiolchem.2004.09.006
    """
    # Python integers until the last step: they stay below N^2 for N rows, and cannot overflow.
    hits, guesses, truths = _class_counts(guess, true)
    rows, right = int(truths.sum()), int(hits.sum())
    spread = [rows**2 - int(counts @ counts) for counts in (guesses, truths)]
    if not all(spread):
        return {"matthews": 0.0}
    return {"matthews": (right * rows - int(guesses @ truths)) / math.sqrt(spread[0] * spread[1])}


def _class_counts(guess: np.ndarray, true: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return how often each class is right, predicted and true, int [C] each."""
    classes = 1 + int(max(guess.max(initial=0), true.max(initial=0)))
    hits, guesses, truths = (np.bincount(values, minlength=classes) for values in (true[guess == true], guess, true))
    return hits, guesses, truths


@_of_finite
def pearson(guess: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Return the linear correlation of two sides [N], STS-B's metric; 0 if either side is constant."""
    return {"pearson": _correlation(guess, true)}


@_of_finite
def spearman(guess: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Return the linear correlation of the ranks of two sides [N], STS-B's metric; 0 if either side is constant."""
    return {"spearman": _correlation(_tied_ranks(guess), _tied_ranks(true))}


@_of_finite
def roc_auc(guess: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Return the area under the ROC: how often a row of class 1 has a larger guess [N] than one of class 0.

    Ties count half (Hanley and McNeil 1982); NaN if a class is missing.
    """
    positive = true > 0
    ones, zeros = np.count_nonzero(positive), np.count_nonzero(~positive)
    if not ones or not zeros:
        return {"roc_auc": math.nan}
    return {"roc_auc": float((_tied_ranks(guess)[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros))}


@_of_finite
def mse(guess: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Return the mean of the squared differences of two sides [N]; NaN without numbers."""
    return {"mse": float(np.mean((guess - true) ** 2)) if len(true) else math.nan}


def _correlation(guess: np.ndarray, true: np.ndarray) -> float:
    sides = [np.asarray(side, np.float64) for side in (guess, true)]
    if any((side == side[:1]).all() for side in sides):
        return 0.0
    # Scaled, so that no square overflows.
    x, y = (centred / np.abs(centred).max() for centred in (side - side.mean() for side in sides))
    return float(np.clip(x @ y / math.sqrt((x @ x) * (y @ y)), -1.0, 1.0))


def _tied_ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks [N], the mean rank for ties."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: np.ndarray = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return ranks


@_of_finite
def perplexity(nll: np.ndarray, tokens: np.ndarray) -> dict[str, float]:
    """Return the exponential of the mean negative log-likelihood per token, from rows' sums (nats) and counts [N]."""
    total, count = float(np.sum(nll)), float(np.sum(tokens))
    mean = total / count if count else math.nan
    return {"perplexity": math.exp(mean) if mean < 700 else math.inf, "nll": mean, "tokens": count}


@_of_finite
def copying(sums: np.ndarray) -> dict[str, float]:
    """Return how well repeated passages are predicted: accuracy and loss of the second reading, loss of the first.

    Args:
        sums: sums of rows [N, 5]: correct first choices and losses (nats) of the second reading, losses of the first,
            tokens of the second, tokens of the first.
    """
    right, again, first, tokens, tokens_first = sums.sum(axis=0, dtype=np.float64)
    return {
        "copy_accuracy": right / tokens if tokens else math.nan,
        "nll_copy": again / tokens if tokens else math.nan,
        "nll_first": first / tokens_first if tokens_first else math.nan,
    }


@_of_finite
def entities(counts: np.ndarray) -> dict[str, float]:
    """Return precision, recall and F1 over entities, and accuracy over tokens; 0 if there is nothing to count.

    Source: https://aclanthology.org/W03-0419

    Args:
        counts: `entity_counts` of every row [N, 5].
    """
    hits, predicted, true, right, tokens = counts.sum(axis=0).tolist()
    return {
        "precision": hits / predicted if predicted else 0.0,
        "recall": hits / true if true else 0.0,
        "entity_f1": 2 * hits / (predicted + true) if predicted + true else 0.0,
        "token_accuracy": right / tokens if tokens else 0.0,
    }


def entity_counts(guess: Sequence[str], answer: Sequence[str]) -> tuple[int, int, int, int, int]:
    """Count a row's entities (right, predicted, true) and its tokens (right, all)."""
    ours, theirs = entities_of(guess), entities_of(answer)
    right = sum(a == b for a, b in zip(guess, answer, strict=True))
    return len(ours & theirs), len(ours), len(theirs), right, len(answer)


def entities_of(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Return (type, first, last + 1) of the entities in a row of tags such as B-PER, I-PER, O.

    An I- that does not continue the entity before it begins a new one, as in CoNLL's script. A tag without a prefix,
    other than O, is an entity of one token.
    """
    result: set[tuple[str, int, int]] = set()
    kind, start = "", 0
    for place, tag in enumerate([*tags, "O"]):
        prefix, dash, name = tag.partition("-")
        if not dash:
            name = "" if tag == "O" else tag
            prefix = "B"
        if kind and (not name or prefix in ("B", "S") or name != kind):
            result.add((kind, start, place))
            kind = ""
        if name and not kind:
            kind, start = name, place
    return result


@_of_finite
def spans(agreements: np.ndarray) -> dict[str, float]:
    """Return exact match and word F1 of answers, the means of `agreement` over questions [Q, 2], as in SQuAD's script.

    Source: https://arxiv.org/abs/1606.05250
    """
    exact, words = agreements.mean(axis=0).tolist()
    return {"exact_match": exact, "span_f1": words}


def agreement(guess: str, answers: Iterable[str]) -> tuple[float, float]:
    """Return exact match and word F1 of a text and the best of its references; no reference means "no answer"."""
    ours, exact, best = normalise(guess).split(), 0.0, 0.0
    for theirs in [normalise(answer).split() for answer in answers] or [[]]:
        same = float(ours == theirs)
        common = sum((Counter(ours) & Counter(theirs)).values())
        exact, best = max(exact, same), max(best, 2 * common / (len(ours) + len(theirs)) if common else same)
    return exact, best


def normalise(text: str) -> str:
    """Lower case, without punctuation, English articles and extra white space."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())


@_of_finite
def retrieval(found: np.ndarray, best: np.ndarray | None = None) -> dict[str, float]:
    """Return recall at 1 and at 10 and the mean of 1 / rank (MRR), from ranks [N] that begin at 1.

    Source: https://nlp.stanford.edu/IR-book/html/htmledition/evaluation-of-ranked-retrieval-results-1.html

    Args:
        found: ranks by the embeddings of whole texts.
        best: ranks by the best pair of parts (`part_ranks`), whose figures begin with `best_`.
    """
    figures = {f"recall_at_{depth}": float(np.mean(found <= depth)) for depth in DEPTHS}
    figures["mrr"] = float(np.mean(1.0 / found))
    return figures if best is None else figures | {f"best_{name}": value for name, value in retrieval(best).items()}


@_of_finite
def ranks(queries: np.ndarray, texts: np.ndarray) -> np.ndarray:
    """Return the rank [N], from 1, of each query's own text among all texts, by the cosine of their embeddings.

    Args:
        queries: [N, D].
        texts: [N, D]; the n-th belongs to the n-th query. A text as near as the query's own counts as nearer.
    """
    queries, texts = (_unit(np.asarray(side, dtype=np.float64)) for side in (queries, texts))
    own_cosines = np.einsum("nd,nd->n", queries, texts)
    result = np.empty(len(queries), dtype=np.int64)
    for begin in range(0, len(queries), BLOCK):
        block = slice(begin, begin + BLOCK)
        cosines = queries[block] @ texts.T
        places = np.arange(begin, begin + len(cosines))
        # Its own text is left out of the count: a product of matrices rounds differently from a product of rows.
        cosines[places - begin, places] = -np.inf
        result[block] = 1 + (cosines >= own_cosines[block, None]).sum(axis=1)
    return result


def part_ranks(queries: np.ndarray, texts: np.ndarray) -> np.ndarray:
    """Return ranks [N] as `ranks` does, but two texts are as near as their nearest parts.

    Args:
        queries: embeddings of the queries' parts [N, P, D]; NaN for a text with fewer parts.
        texts: [N, P, D].
    """
    for side in (queries, texts):
        # A part that is NaN as a whole is missing; every text has at least one part.
        missing = np.isnan(side).all(axis=2) & ~np.isnan(side).all(axis=(1, 2))[:, None]
        check_finite("part_ranks", np.where(missing[..., None], 0.0, side))
    queries, texts = (_unit(np.asarray(side, dtype=np.float64)) for side in (queries, texts))
    found = np.empty(len(queries), dtype=np.int64)
    for place, query in enumerate(queries):
        cosines = np.einsum("pd,nqd->npq", query, texts, optimize=True)
        best = np.nan_to_num(cosines, nan=-np.inf).max(axis=(1, 2))
        found[place] = 1 + np.count_nonzero(np.delete(best, place) >= best[place])
    return found


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), np.finfo(np.float64).tiny)


def label_losses(outputs: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the standard error of the mean loss over rows (`error`), for classes at the best temperature.

    Args:
        outputs: logits of classes [N, C], or numbers [N, 1].
        labels: classes [N]; numbers of a floating-point type [N], whose loss is the squared error; or of every label
            whether a row has it [N, C], whose loss is the binary cross-entropy.

    Returns:
        Also `excess`: how much one temperature for all rows lowers the mean, in nats; 0 for numbers.
    """
    logits, true, excess = torch.as_tensor(outputs).double(), torch.as_tensor(labels), 0.0
    several = true.ndim == 2
    if true.is_floating_point() and not several:
        losses = (logits.reshape(-1) - true).square()
    else:
        true = true.double() if several else true
        low, high = torch.tensor([-7.0, 7.0], dtype=torch.float64)
        # The loss is convex in the factor of the logits, so its derivative tells on which side the best one is.
        for _ in range(40):
            middle = (low + high) / 2
            if several:
                rises = (((middle.exp() * logits).sigmoid() - true) * logits).mean() > 0
            else:
                expected = ((middle.exp() * logits).softmax(dim=-1) * logits).sum(dim=-1)
                rises = (expected - logits.gather(1, true[:, None])[:, 0]).mean() > 0
            low, high = (low, middle) if rises else (middle, high)
        functional = torch.nn.functional
        loss: Callable[..., Tensor] = functional.cross_entropy
        loss = functional.binary_cross_entropy_with_logits if several else loss
        losses = loss(middle.exp() * logits, true, reduction="none")
        excess = float(loss(logits, true) - losses.mean())
        losses = losses.mean(dim=1) if several else losses
    return {"excess": excess, "error": float(losses.std(correction=0)) / math.sqrt(len(losses))}


METRICS: dict[str, Callable[..., dict[str, float]]] = {
    metric.__name__: metric
    for metric in (
        *(accuracy, f1, f1_macro, multi_label, matthews),
        *(pearson, spearman, mse, roc_auc),
        *(perplexity, copying, entities, spans, retrieval),
    )
}
"""Every metric by its name. A task's type decides what its arguments are (`TaskType.units`)."""


@dataclass(frozen=True)
class PositionLoss:
    """The loss of a language model over one range of positions: whether it uses a long context.

    Attributes:
        first: fewest tokens before the predicted one.
        last: most tokens before a predicted one.
        nll: mean negative log-likelihood, nats per token.
        tokens: how many were predicted.
    """

    first: int
    last: int
    nll: float
    tokens: int


def range_sums(nll: Tensor, counted: Tensor) -> Tensor:
    """Sum losses over ranges of positions.

    Args:
        nll: [B, T], of the token at place t + 1, which has t + 1 tokens before it; 0 if it does not count.
        counted: [B, T], 1 if it counts.

    Returns:
        [B, 3 R] for R ranges: sums, counts, and the most tokens before any counted one.
    """
    before = torch.arange(1, nll.shape[1] + 1, device=nll.device)
    owner = torch.bucketize(before, torch.tensor(EDGES, device=nll.device), right=True) - 1
    inside = torch.nn.functional.one_hot(owner, len(EDGES)).to(nll.dtype)
    last = (counted * before)[:, :, None] * inside
    empty = last.new_zeros(len(nll), 1, len(EDGES))
    return torch.cat([nll @ inside, counted.to(nll.dtype) @ inside, torch.cat([last, empty], dim=1).amax(dim=1)], dim=1)


@_of_finite
def losses_by_position(sums: np.ndarray) -> tuple[PositionLoss, ...]:
    """Return the mean loss of every range that has tokens, from the `range_sums` of N rows [N, 3 R]."""
    nll, tokens, last = np.split(np.asarray(sums, dtype=np.float64), 3, axis=1)
    return tuple(
        PositionLoss(EDGES[place], int(last[:, place].max()), float(nll[:, place].sum() / count), int(count))
        for place, count in enumerate(tokens.sum(axis=0))
        if count
    )
