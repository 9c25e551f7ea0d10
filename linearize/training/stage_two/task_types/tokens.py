"""Tags for words, learned and scored on each word's first piece; and question answering by spans, with SQuAD's columns.

A long text becomes several overlapping rows for one question.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from linearize.checkpoint.fingerprint import data_digest
from linearize.core.errors import DataError
from linearize.core.figures import check_finite
from linearize.core.heads import HEADS
from linearize.data.columns import in_order
from linearize.data.encode import TOKEN_FIELDS, tokenise
from linearize.training.alignment.objective import FAR_BELOW, logits_loss
from linearize.training.stage_two.metrics import agreement, entity_counts
from linearize.training.stage_two.rows import IGNORED, Logits, Outputs, Predictions, Row, row_facts
from linearize.training.stage_two.splits import Given, Splits, need_columns, open_splits
from linearize.training.stage_two.task_types.base import MOST_CLASSES, TaskData, TaskType, class_numbers, first_output

if TYPE_CHECKING:
    from datasets import Dataset

BROKEN = -1
"""The predicted label of a token whose logits have NaN or infinity."""


class TokenLabels(TaskType):
    """Rows in which tokens have labels, `IGNORED` at all others; the prediction is the most likely label."""

    def reduce(self, logits: Logits, labels: Tensor) -> Tensor:
        """Return the predicted labels [B, T] of logits [B, T, C], `BROKEN` where one of these is NaN or infinite."""
        scores: Tensor = first_output(logits)
        # A model may give -infinity to tokens that it never predicts.
        return scores.argmax(dim=-1).masked_fill((scores.isnan() | scores.isposinf()).any(dim=-1), BROKEN)

    def read(self, predictions: Predictions, labels: Predictions) -> tuple[np.ndarray, np.ndarray]:
        """Return predictions and labels [N, T] of the tokens at the same places.

        Raises:
            DataError: if a token with a label has a broken prediction.
        """
        guesses, answers = np.asarray(first_output(predictions)), np.asarray(labels)
        broken = (guesses == BROKEN) & (answers != IGNORED)
        check_finite(f"task {self.task.name}, the model's outputs", np.where(broken, np.nan, 0.0))
        return guesses, answers

    def constant_answers(self, labels: Predictions) -> Iterable[np.ndarray]:
        """Return the most frequent label as the answer everywhere; none if no token has a label."""
        labels = np.asarray(labels)
        known = labels[labels != IGNORED]
        return (np.full_like(labels, np.bincount(known).argmax()),) if len(known) else ()


class TokenClassification(TokenLabels):
    """Words that each have a tag."""

    head = HEADS["token-classification"]

    def prepare(self, given: Given) -> TaskData:
        """Read words and tags.

        Raises:
            DataError: if a column is missing or does not hold lists, or a tag is not among the task's.
            ConfigError: if the tokenizer cannot tell which word a token belongs to.
        """
        self.fast_tokenizer("token classification", "which maps tokens to words")
        splits = open_splits(self.task, given, self.options, raw=True)
        words, label = self.task.columns[0], str(self.task.label)
        need_columns(splits, (words, label), "token classification")
        if self.task.labels is None:
            # The tags of all rows, not only of those within the limits: the rows to measure on may have rarer tags.
            unlimited = dataclasses.replace(self.options, limit=None, validation_limit=None)
            whole = splits if unlimited == self.options else open_splits(self.task, given, unlimited, raw=True)
            self.task = dataclasses.replace(self.task, labels=self._tag_names(whole, label))
        train, validation = self._rows(splits.train), self._rows(splits.validation)
        coded = self.tokenizer(list(splits.validation[words]), is_split_into_words=True, verbose=False)
        facts = row_facts([len(ids) for ids in coded["input_ids"]], self.options)
        return TaskData(self, train, validation, splits.description, facts=facts)

    def units(self, predictions: Predictions, labels: Predictions) -> tuple[np.ndarray, ...]:
        """Return each row's `entity_counts` [N, 5], from tags and labels [N, T]."""
        names = self.task.labels or ()
        counts = []
        for guess, answer in zip(*self.read(predictions, labels), strict=True):
            counts.append(entity_counts(*([names[i] for i in side[answer != IGNORED]] for side in (guess, answer))))
        return (np.array(counts),)

    def _tag_names(self, splits: Splits, label: str) -> tuple[str, ...]:
        """Return the tags in the order of their numbers: those that the column declares, or all that occur in rows."""
        from datasets import ClassLabel

        feature = getattr(splits.train.features[label], "feature", None)
        if isinstance(feature, ClassLabel):
            return tuple(feature.names)
        columns = (*splits.train[label], *splits.validation[label])
        every = [tag for tags in columns for tag in (tags if isinstance(tags, list) else [tags])]
        # Lists of lists are wrong, and cannot be in a set.
        wrong = [tag for tag in every if not isinstance(tag, str | int)]
        tags_found = set() if wrong else set(every)
        if tags_found and all(isinstance(tag, str) for tag in tags_found):
            return in_order(tags_found)
        wrong = wrong or [tag for tag in tags_found if not isinstance(tag, int) or not 0 <= tag < MOST_CLASSES]
        if wrong or not tags_found:
            got = f"tag {repr(wrong[0])[:60]}" if wrong else "no tags"
            raise DataError(
                f"task {self.task.name}: got {got} in column {label!r}, "
                "expected a list of names or of whole numbers from 0 in every row; repair the rows"
            )
        return tuple(str(number) for number in range(int(max(tags_found)) + 1))

    def _rows(self, table: Dataset) -> list[Row]:
        words, label, most = self.task.columns[0], str(self.task.label), self.options.max_length
        names = self.task.labels or ()
        known = class_numbers(names)
        rows = []
        for texts, tags in zip(table[words], table[label], strict=True):
            if not isinstance(tags, list) or not isinstance(texts, list) or not all(isinstance(t, str) for t in texts):
                raise DataError(
                    f"task {self.task.name}: got {str(texts)[:60]!r} with {str(tags)[:60]!r}, expected a list of words "
                    f"in column {words!r} and a list of tags in {label!r}; repair the row"
                )
            unknown = [tag for tag in tags if isinstance(tag, list | dict) or tag not in known]
            if unknown or len(tags) != len(texts):
                problem = f"tag {repr(unknown[0])[:60]}" if unknown else f"{len(tags)} tags for {len(texts)} words"
                raise DataError(f"task {self.task.name}: got {problem}, expected one of {', '.join(names)} per word")
            coded = self.tokenizer(list(texts), is_split_into_words=True, truncation=True, max_length=most)
            owners = coded.word_ids()
            labels = [
                IGNORED if owner is None or owner == before else known[tags[owner]]
                for owner, before in zip(owners, [None, *owners], strict=False)
            ]
            rows.append({**{name: coded[name] for name in TOKEN_FIELDS if name in coded}, "labels": labels})
        return rows


BEST, LONGEST = 20, 30
"""Starts and ends that are tried per row, and the longest answer in tokens, as in the usual SQuAD scripts."""


class QuestionAnswering(TaskType):
    """Questions, each with a text and the answer's span in it."""

    head = HEADS["question-answering"]
    columns = 2
    label_fields = ("start_positions", "end_positions")

    def prepare(self, given: Given) -> TaskData:
        """Read questions, texts and answers.

        Raises:
            DataError: if a column is missing or answers do not have SQuAD's format.
            ConfigError: if the tokenizer does not map tokens to characters.
        """
        self.fast_tokenizer("question answering", "which maps tokens to characters")
        splits = open_splits(self.task, given, self.options, raw=True)
        held = splits.validation
        question, context = self.task.columns
        need_columns(splits, (question, context, str(self.task.label)), "question answering")
        for table in (held, splits.train):
            for row, texts in enumerate(zip(table[question], table[context], strict=True)):
                if not all(isinstance(text, str) for text in texts):
                    raise DataError(
                        f"question answering: got row {row} without {question} or {context}, expected both texts"
                    )
        whole = tokenise(self.tokenizer, held[question], held[context])
        lengths = [len(row["input_ids"]) for row in whole]
        # Rows are padded to this length.
        self.fit_length(max(lengths, default=2))
        validation = self._rows(held)
        self.measured = validation
        self.texts = list(held[context])
        self.answers = [[known for known, _ in self._answers(entry)] for entry in held[str(self.task.label)]]
        facts = row_facts(lengths, self.options)
        # Nothing is cut: a longer text becomes several rows, and its best answer over all of them counts.
        facts = {"questions": facts["rows"], **facts, "rows": len(validation), "cut_share": 0.0}
        facts["split_share"] = round(float(np.mean(np.array(lengths) > self.options.max_length)), 4)
        return TaskData(self, self._rows(splits.train), validation, splits.description, facts=facts)

    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        """Return token fields [B, T], which are already padded, and the answers' places [B]."""
        names = (*TOKEN_FIELDS, *self.label_fields)
        return {name: torch.tensor([row[name] for row in rows]) for name in names if name in rows[0]}

    def units(self, predictions: Predictions, labels: Predictions) -> tuple[np.ndarray, ...]:
        """Return each question's `agreement` [Q, 2], from start and end logits of all rows [R, T]."""
        start, end = (np.asarray(part) for part in predictions[:2])
        check_finite(f"task {self.task.name}, the model's outputs", end)
        guesses = best_answers(start, end, self.measured, self.texts, not all(self.answers))
        return (np.array([agreement(guess, known) for guess, known in zip(guesses, self.answers, strict=True)]),)

    def scored(self, labels: Predictions) -> str:
        """Return the hash of the answers; a text has more rows at a shorter length, but one answer."""
        return data_digest(self.answers)

    @classmethod
    def teacher_loss(
        cls, student: Outputs, teacher: Outputs, inputs: dict[str, Tensor], *, temperature: float = 1.0
    ) -> Tensor:
        """Return the mean divergence of the answers' starts and ends from the teacher's."""
        padded = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])) == 0
        losses = []
        for name in ("start_logits", "end_logits"):
            mine, theirs = (getattr(side, name).masked_fill(padded, FAR_BELOW) for side in (student, teacher))
            losses.append(logits_loss(mine, theirs, temperature=temperature))
        return torch.stack(losses).mean()

    def _rows(self, table: Dataset) -> list[Row]:
        question, context = self.task.columns
        options = self.options
        rows: list[Row] = []
        columns = (table[question], table[context], table[str(self.task.label)])
        for owner, (asked, text, answer) in enumerate(zip(*columns, strict=True)):
            answers = self._answers(answer)
            coded = self.tokenizer(
                asked,
                text,
                truncation="only_second",
                max_length=options.max_length,
                stride=self._overlap(asked),
                return_overflowing_tokens=True,
                return_offsets_mapping=True,
                padding="max_length",
            )
            for piece, offsets in enumerate(coded["offset_mapping"]):
                # The place of each token in the text; None for the question and special tokens.
                parts = zip(offsets, coded.sequence_ids(piece), strict=True)
                spans = [tuple(span) if part == 1 else None for span, part in parts]
                start = end = 0
                if answers:
                    # Blanks around an answer belong to no token.
                    known, first = answers[0]
                    first, last = first + len(known) - len(known.lstrip()), first + len(known.rstrip())
                    begins = [i for i, span in enumerate(spans) if span and span[0] <= first < span[1]]
                    ends = [i for i, span in enumerate(spans) if span and span[0] < last <= span[1]]
                    # If the answer is not entirely inside the row, its span is the first token.
                    if begins and ends:
                        start, end = begins[0], ends[-1]
                fields = {name: coded[name][piece] for name in TOKEN_FIELDS if name in coded}
                places = {"start_positions": start, "end_positions": end}
                rows.append({**fields, **places, "owner": owner, "offsets": spans})
        return rows

    def _answers(self, entry: object) -> list[tuple[str, int]]:
        """Return the texts of a question's answers with their places in its text; blank answers are no answers.

        Raises:
            DataError: if the answers do not have SQuAD's format.
        """
        names = ("text", "answer_start")
        texts, starts = (entry.get(name) if isinstance(entry, dict) else None for name in names)
        if isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts):
            pairs = list(zip(texts, starts, strict=True))
            if all(isinstance(known, str) and isinstance(first, int) for known, first in pairs):
                return [(known, first) for known, first in pairs if known.strip()]
        raise DataError(
            f"question answering: got {self.task.label} {repr(entry)[:80]}, expected text and answer_start, two lists "
            "of the same length; repair the row"
        )

    def _overlap(self, question: str) -> int:
        """Return how many tokens two rows of a text share, fewer than fit next to the question.

        Raises:
            DataError: if the question leaves no room for the text.
        """
        most, stride = self.options.max_length, self.options.stride
        asked = len(self.tokenizer(question, verbose=False, add_special_tokens=False)["input_ids"])
        room = most - asked - self.tokenizer.num_special_tokens_to_add(pair=True)
        if room < 1:
            raise DataError(
                f"question answering: got a question of {asked} tokens ({question[:40]!r}), expected room for the text "
                f"in rows of {most}; raise max_length, or shorten the question"
            )
        return max(0, min(room - stride if stride else min(128, most // 4), room - 1))


def best_answers(start: np.ndarray, end: np.ndarray, rows: list[Row], texts: list[str], empty: bool) -> list[str]:
    """Return the best span of each text over its rows, from start and end logits [R, T].

    `empty` says whether "no answer" is one of the choices, as in SQuAD 2. Its score is the lowest over a text's rows,
    as in the usual SQuAD scripts: a row without the answer says "no answer", although another row may have it.
    """
    best: dict[int, tuple[float, str]] = defaultdict(lambda: (-np.inf, ""))
    nothing: dict[int, float] = defaultdict(lambda: np.inf if empty else -np.inf)
    for place, row in enumerate(rows):
        nothing[row["owner"]] = min(nothing[row["owner"]], float(start[place, 0] + end[place, 0]))
        for first in np.argsort(-start[place])[:BEST]:
            for last in np.argsort(-end[place])[:BEST]:
                pair = row["offsets"][first], row["offsets"][last]
                score = float(start[place, first] + end[place, last])
                if None in pair or not 0 <= last - first < LONGEST or score <= best[row["owner"]][0]:
                    continue
                best[row["owner"]] = (score, texts[row["owner"]][pair[0][0] : pair[1][1]])
    return [best[owner][1] if best[owner][0] > nothing[owner] else "" for owner in range(len(texts))]
