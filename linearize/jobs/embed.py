"""`embed`: vectors of documents and, from the same pass, of their spans ("late chunking").

Source: Günther et al., "Late Chunking", https://arxiv.org/abs/2409.04701. With linear attention a document of any
length is one row, so every span is pooled from tokens that have read the whole document.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from linearize.checkpoint.fingerprint import MODEL, fingerprint, model_digest
from linearize.checkpoint.output import claim_file
from linearize.checkpoint.ownership import remove_parts
from linearize.core.errors import CheckpointError, ConfigError, DataError, interrupted_run
from linearize.core.options import recorded
from linearize.core.parsing import check_file, user_path, write_file
from linearize.core.signatures import known_names
from linearize.data.load import open_records
from linearize.data.records import TextRecords, hashed
from linearize.data.vectors import ENDINGS, WHOLE, check_replaceable, read_part, write_vectors
from linearize.jobs.config import EmbedJob
from linearize.jobs.embedder import Documents, Embedder, OnBatch, check_embedder
from linearize.jobs.events import Advanced, Callback, Noted, Started, ignore
from linearize.training.stage_two.save import STARTED, check_started, write_started

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

PARTS = re.compile(r"part-\d+\.npy|\.?started\.json")
FREE = ("batch_tokens",)
"""Options that may differ when a run is resumed: they change results only by rounding."""


@dataclass(frozen=True)
class Vectors:
    """The vectors of documents and spans.

    Attributes:
        rows: structured array with the fields `document`, `span`, `start`, `end`, `tokens` and `vector`
            (`linearize.data.vectors.row_type`), ordered by document; a whole document comes before its spans.
    """

    rows: np.ndarray

    @property
    def documents(self) -> np.ndarray:
        """The rows of whole documents."""
        return self.rows[self.rows["span"] == WHOLE]

    @property
    def spans(self) -> np.ndarray:
        """The rows of spans."""
        return self.rows[self.rows["span"] != WHOLE]


@dataclass(frozen=True)
class EmbedResult:
    """The result of `embed_dataset`.

    Attributes:
        output: the file.
        documents: number of documents.
        spans: number of spans.
        size: size of a vector.
        tokens: tokens that were read, over all documents.
        cut: documents longer than the model reads; their vectors are those of their beginning.
        seconds: duration; after a resume, since then.
    """

    output: str
    documents: int
    spans: int
    size: int
    tokens: int
    cut: int
    seconds: float


@known_names()
def embed(
    model: str | SentenceTransformer,
    dataset: str | Sequence[str],
    *,
    spans: int | None = None,
    prompt: str | None = None,
    text_column: str | None = None,
    batch_tokens: int = EmbedJob.batch_tokens,
    device: str = "auto",
    on_event: Callback = ignore,
) -> Vectors:
    """Embed documents, each as one row, and their spans in the same pass; nothing is written.

    Args:
        model: converted sentence embedder: folder or Hub name, or what `SentenceTransformer` loaded from one.
        dataset: the documents as texts; or a Hub data set, local file or folder.
        spans: tokens per span; None for documents only.
        prompt: name of the embedder's prompt to put before each document; by default the one it uses by default.
        text_column: column of the text, if `dataset` is a name.
        batch_tokens: tokens per batch, with padding.
        device: device of the model, if it is loaded here.
        on_event: called with every event.

    Returns:
        One vector per document, equal to `SentenceTransformer.encode`, and one per span.

    Raises:
        LinearizeError: a subclass of it, for everything the user can correct.
    """
    if isinstance(dataset, str):
        opened = _Opened(EmbedJob.of(model="", dataset=dataset, text_column=text_column))
        numbered: Documents = opened
        total = len(opened)
    else:
        numbered, total = list(enumerate(dataset)), len(dataset)
        if not total or not all(isinstance(text, str) for _, text in numbered):
            raise DataError(
                "embed: got no texts, or something else, expected a list of texts or the name of a data set"
            )
    for option, value in (("spans", spans), ("batch_tokens", batch_tokens)):
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{option}: got {value!r}, expected a whole number of at least 1")
    embedder = Embedder(model, spans, prompt, device)
    _check_spans(embedder, numbered)
    found = list(embedder.parts(embedder.tokenize(numbered), batch_tokens, _counter(on_event, 0, total)))
    return Vectors(np.concatenate(found))


def embed_dataset(job: EmbedJob, on_event: Callback = ignore) -> EmbedResult:
    """Embed documents and write their vectors, and those of their spans, into one file.

    Finished parts are kept in `<output>.parts` until then. With `resume`, an interrupted run continues after them.

    Raises:
        LinearizeError: a subclass of it, for everything the user can correct.
    """
    start = time.perf_counter()
    target, work = job.target(), work_folder(job)
    check_file(str(target), "--output", ENDINGS, overwrite=job.overwrite)
    check_replaceable(target, "--output")
    source = user_path(job.dataset)
    if target.exists() and source.exists() and target.samefile(source):
        raise ConfigError(f"--output: got {str(target)!r}, which is the data set; choose another file")
    check_embedder(job.model)
    with claim_file(target) as beside:
        if work.exists() and not job.resume and not job.overwrite:
            raise interrupted_run(work)
        on_event(Started("reading the documents"))
        documents = _Opened(job)
        embedder = Embedder(job.model, job.spans, job.prompt, job.device)
        _check_spans(embedder, documents)
        continues = _begin(job, work, documents)
        kept = sorted(work.glob("part-*.npy"))
        done = documents.skip(int(read_part(kept[-1])["document"].max())) if kept else 0
        if continues:
            on_event(Noted(f"Continuing after {done:,} of {len(documents):,} documents."))
        on_event(Started("embedding"))
        counter = _counter(on_event, done, len(documents))
        for rows in embedder.parts(embedder.tokenize(documents), job.batch_tokens, counter):
            content = io.BytesIO()
            np.save(content, rows, allow_pickle=False)
            part = work / f"part-{len(kept):06d}.npy"
            write_file(part, "--output", content.getvalue())
            kept.append(part)
        on_event(Started("writing"))
        facts = {"documents": recorded(job), "normalized": any(type(m).__name__ == "Normalize" for m in embedder.model)}
        write_vectors(kept, beside, target.suffix.lower(), facts)
        beside.replace(target)
        result = _summary(job, kept, documents, embedder.length, time.perf_counter() - start)
        with suppress(CheckpointError, OSError):
            _remove(work)
    return result


def work_folder(job: EmbedJob) -> Path:
    """Return the folder of an interrupted run's parts."""
    target = job.target()
    return target.with_name(f"{target.name}.parts")


class _Opened:
    """The documents of a job's data set with their row numbers, read as they are needed.

    Raises:
        DataError: if they cannot be read, or rows have two texts.
    """

    def __init__(self, job: EmbedJob) -> None:
        records, origin = open_records(job.dataset, replace(job.data, dataset=job.dataset), "text")
        assert isinstance(records, TextRecords)
        if records.fetch([0])[0].pair is not None:
            raise DataError(f"{origin}: got rows with two texts, expected one; name its column (--text-column)")
        self._records, self._begin = records, 0

    def __len__(self) -> int:
        return len(self._records.rows)

    def __iter__(self) -> Iterator[tuple[int, str]]:
        places = range(self._begin, len(self))
        for place, example in zip(places, self._records.each(places), strict=True):
            yield int(self._records.rows[place]), example.value

    def text(self, number: int) -> str:
        """Return the text in a row of the data set."""
        text: str = self._records.fetch([int(np.searchsorted(self._records.rows, number))])[0].value
        return text

    def skip(self, number: int) -> int:
        """Leave out the documents up to a row of the data set; return how many they are."""
        self._begin = int(np.searchsorted(self._records.rows, number, side="right"))
        return self._begin


def _check_spans(embedder: Embedder, documents: Documents) -> None:
    """Refuse spans that are longer than the longest document, whose vectors would be nearly the documents'.

    Raises:
        ConfigError: if they are.
    """
    longest = 0
    for row in embedder.tokenize(documents) if embedder.spans is not None else ():
        longest = max(longest, len(row.places))
        if longest >= (embedder.spans or 0):
            return
    if embedder.spans is not None:
        raise ConfigError(
            f"spans: got {embedder.spans}, but the longest document has {longest:,} tokens, so a span would be the "
            "whole document; give fewer tokens, or leave --spans out"
        )


def _counter(on_event: Callback, done: int, total: int) -> OnBatch:
    """Return a function that reports progress when it is called with the number of further documents."""

    def count(more: int) -> None:
        nonlocal done
        done += more
        on_event(Advanced(done, total))

    return count


def _begin(job: EmbedJob, work: Path, documents: Documents) -> bool:
    """Create the folder of parts, or continue in it; tell which.

    Raises:
        ConfigError: if the run was started with another model, other options or other documents.
        CheckpointError: if the folder holds something else.
    """
    options = {name: value for name, value in recorded(job).items() if name not in FREE}
    contents = [hashed(text.encode("utf-8", "surrogatepass")).digest() for _, text in documents]
    started = fingerprint(data=contents, options=options) | {MODEL: model_digest(job.model)}
    if job.resume and (work / STARTED).exists():
        check_started(work, started)
        return True
    _remove(work)
    write_started(work, started)
    return False


def _remove(work: Path) -> None:
    remove_parts(work, PARTS, "an embedding run of linearize", record=STARTED)


def _summary(
    job: EmbedJob, parts: Sequence[Path], documents: _Opened, length: int | None, seconds: float
) -> EmbedResult:
    count = spans = tokens = cut = size = 0
    for part in parts:
        rows = read_part(part)
        whole = rows[rows["span"] == WHOLE]
        count, spans = count + len(whole), spans + len(rows) - len(whole)
        tokens, size = tokens + int(whole["tokens"].sum()), rows["vector"].shape[1]
        full = whole[whole["tokens"] >= (length or np.inf)]
        cut += sum(bool(documents.text(row["document"])[row["end"] :].strip()) for row in full)
    return EmbedResult(str(job.target()), count, spans, size, tokens, cut, seconds)
