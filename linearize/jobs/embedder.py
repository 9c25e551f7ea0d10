"""A sentence embedder that returns vectors of documents and, from the same pass, of their spans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from linearize.attention.interface import linear_attentions
from linearize.checkpoint.loading import MODULES, check_converted, check_device, explained, pooling, sentence_files
from linearize.core.errors import CheckpointError, UnsupportedModelError, unknown_name
from linearize.core.parsing import parse_json, user_path
from linearize.core.registry import Values
from linearize.data.vectors import WHOLE, row_type

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

PART_TOKENS = 2**18
"""Tokens of the documents that are sorted by length together, and whose vectors are kept together for a resume."""
TOKENIZED = 256
"""Documents that are tokenized at a time."""
OWN_MODULES = "sentence_transformers."
Documents = Iterable[tuple[int, str]]
OnBatch = Callable[[int], None]


@dataclass(frozen=True)
class Row:
    """A tokenized document: its fields for the model, the places of its own tokens, and their characters [n, 2]."""

    document: int
    fields: dict[str, list[int]]
    places: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.fields["input_ids"])


class Embedder:
    """Embeds documents with the modules of a converted sentence-transformers folder.

    Args:
        model: folder or Hub name, or what `SentenceTransformer` loaded from one.
        spans: tokens per span; None for no spans.
        prompt: name of the prompt to use; None for the embedder's default.
        device: device of the model; a loaded one stays where it is.

    Raises:
        CheckpointError: if it is not a converted checkpoint, or not an embedder.
        UnsupportedModelError: if it reads one way, or spans cannot be pooled as documents are.
        UnknownNameError: for an unknown prompt.
    """

    def __init__(
        self,
        model: str | SentenceTransformer,
        spans: int | None = None,
        prompt: str | None = None,
        device: str = "auto",
    ) -> None:
        name = model if isinstance(model, str) else str(getattr(model[0].auto_model, "name_or_path", ""))
        how, more = check_embedder(name)
        if isinstance(model, str):
            from sentence_transformers import SentenceTransformer

            with explained(name):
                local = user_path(name)
                model = SentenceTransformer(str(local) if local.exists() else name, device=check_device(device))
        self.model = model.eval()
        layers = linear_attentions(model[0]).values()
        if not layers or any(layer.shape.causal for layer in layers):
            raise UnsupportedModelError(
                f"embed: got {name!r}, whose attention is causal, expected an encoder; use SentenceTransformer for "
                "whole texts"
            )
        if spans is not None and (how != "mean" or any(text.startswith("pooling") for text in more)):
            raise UnsupportedModelError(
                f"spans: {name!r} does not take the mean over its tokens, so a span has no vector of its own; leave "
                "--spans out"
            )
        tokenizer = model.tokenizer
        if not getattr(tokenizer, "is_fast", False):
            raise UnsupportedModelError(
                f"embed: the tokenizer of {name!r} is not a fast one (tokenizer.json), which finds the characters of "
                "tokens; save that with the model"
            )
        self.tokenizer, self.spans = tokenizer, spans
        self.length: int | None = model.max_seq_length
        self.prompt = self._prompt(prompt)
        self._encoder, *self._rest = list(model)

    def _prompt(self, name: str | None) -> str:
        prompts = self.model.prompts
        name = self.model.default_prompt_name if name is None else name
        if name is not None and name not in prompts:
            raise unknown_name("prompt", name, prompts)
        return "" if name is None else str(prompts[name])

    def tokenize(self, documents: Documents) -> Iterator[Row]:
        """Yield tokenized documents, `TOKENIZED` at a time."""
        block: list[tuple[int, str]] = []
        for document in documents:
            block.append(document)
            if len(block) == TOKENIZED:
                yield from self._tokenized(block)
                block = []
        if block:
            yield from self._tokenized(block)

    def _tokenized(self, block: Sequence[tuple[int, str]]) -> Iterator[Row]:
        found = self.tokenizer(
            [self.prompt + text for _, text in block],
            truncation=self.length is not None,
            max_length=self.length,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
            verbose=False,
        )
        for at, (number, _) in enumerate(block):
            offsets = np.array(found["offset_mapping"][at]).reshape(-1, 2) - len(self.prompt)
            # The document's own tokens: neither special ones nor the prompt's.
            places = np.flatnonzero((np.array(found["special_tokens_mask"][at]) == 0) & (offsets[:, 1] > 0))
            fields = {name: found[name][at] for name in self.tokenizer.model_input_names if name in found}
            yield Row(number, fields, places, offsets[places].clip(0))

    def parts(self, rows: Iterable[Row], batch_tokens: int, on_batch: OnBatch) -> Iterator[np.ndarray]:
        """Yield the vectors of documents, in their order, in parts of about `PART_TOKENS` tokens.

        Args:
            rows: tokenized documents.
            batch_tokens: tokens per batch, with padding.
            on_batch: called with the number of documents of every batch.
        """
        part: list[Row] = []
        tokens = 0
        for row in rows:
            part.append(row)
            tokens += len(row)
            if tokens >= PART_TOKENS:
                yield self._part(part, batch_tokens, on_batch)
                part, tokens = [], 0
        if part:
            yield self._part(part, batch_tokens, on_batch)

    def _part(self, part: list[Row], batch_tokens: int, on_batch: OnBatch) -> np.ndarray:
        found: list[np.ndarray] = []
        # The longest first, so that memory runs out at once or never.
        for batch in batches(sorted(part, key=len, reverse=True), batch_tokens):
            found.append(self._batch(batch))
            on_batch(len(batch))
        rows = np.concatenate(found)
        return rows[np.lexsort((rows["span"], rows["document"]))]

    @torch.inference_mode()
    def _batch(self, batch: list[Row]) -> np.ndarray:
        """Return the rows of documents that run through the model together."""
        device = self.model.device
        names = self.tokenizer.pad([row.fields for row in batch], return_tensors="pt")
        inputs: Values = {name: field.to(device) for name, field in names.items()}
        features = self._encoder(dict(inputs))
        states, mask = features["token_embeddings"], features["attention_mask"]
        if self.prompt:
            features["prompt_length"] = self._prompt_length()
        facts = []
        for row in batch:
            end = row.offsets[-1, 1] if len(row.places) else 0
            facts.append((row.document, WHOLE, 0, end, len(row)))
        vectors = [self._pooled(features)]
        if self.spans is not None:
            pieces: list[Tensor] = []
            shifts = mask.argmax(dim=1).tolist()
            for at, row in enumerate(batch):
                for number, begin in enumerate(range(0, len(row.places), self.spans)):
                    places = row.places[begin : begin + self.spans]
                    ends = row.offsets[begin : begin + self.spans]
                    pieces.append(states[at, torch.as_tensor(places + shifts[at], device=device)])
                    facts.append((row.document, number, ends[0, 0], ends[-1, 1], len(places)))
            if pieces:
                lengths = torch.tensor([len(piece) for piece in pieces], device=device)
                padded = pad_sequence(pieces, batch_first=True)
                inside = (torch.arange(padded.shape[1], device=device) < lengths[:, None]).long()
                vectors.append(self._pooled({"token_embeddings": padded, "attention_mask": inside}))
        vector = torch.cat(vectors).float().cpu().numpy()
        rows = np.empty(len(facts), row_type(vector.shape[1]))
        for name, column in zip(rows.dtype.names or (), zip(*facts, strict=True), strict=False):
            rows[name] = column
        rows["vector"] = vector
        return rows

    def _pooled(self, features: Values) -> Tensor:
        """Return the vectors [N, size] that the other modules make of token states [N, T, D]."""
        for module in self._rest:
            features = module(features)
        vectors: Tensor = features["sentence_embedding"]
        return vectors

    def _prompt_length(self) -> int:
        """Return the number of tokens before a document's own, for poolings that leave out the prompt."""
        ends = self.tokenizer(self.prompt, return_special_tokens_mask=True)["special_tokens_mask"]
        return len(ends) - (1 if ends[-1] else 0)


def batches(rows: Sequence[Row], batch_tokens: int) -> Iterator[list[Row]]:
    """Yield batches of at most `batch_tokens` tokens with padding, or one row; the rows are sorted, longest first."""
    begin = 0
    while begin < len(rows):
        count = max(1, batch_tokens // len(rows[begin]))
        yield list(rows[begin : begin + count])
        begin += count


def check_embedder(name: str) -> tuple[str, list[str]]:
    """Check, without loading it, that a folder is a converted embedder; return what `pooling` says of it.

    Raises:
        CheckpointError: if it is not.
    """
    check_converted(name)
    files = sentence_files(name)
    if not files:
        raise CheckpointError(
            f"{name!r} has no {MODULES}, so it is not an embedder and has no pooling; convert a sentence-transformers "
            "folder, or save one of it"
        )
    kinds = [str(module.get("type")) for module in parse_json(files[MODULES])]
    other = next((kind for kind in kinds if not kind.startswith(OWN_MODULES)), None)
    if other is not None:
        raise CheckpointError(
            f"{name!r}: {MODULES} names the module {other!r}, expected modules of sentence-transformers; linearize "
            "runs no other code"
        )
    return pooling(files)
