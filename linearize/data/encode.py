"""Turn examples into tensors, with the model's own tokenizer or image processor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from linearize.core.errors import ConfigError, DataError
from linearize.core.heads import Modality, Processor, RowSet
from linearize.core.registry import Values
from linearize.data.hub import cause
from linearize.data.records import Example

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

PACK_TEXTS = 256
# Longer than any text: we cut rows, so the tokenizer need not warn about long texts.
NO_LIMIT = 10**9
TOKEN_FIELDS = ("input_ids", "attention_mask", "token_type_ids")
"""Fields of a row of text that a model reads, one number per token."""


def copy_tokenizer(tokenizer: Any) -> PreTrainedTokenizerBase:
    """Return a copy that takes texts of any length, and pads with its end token if it has no padding token.

    Raises:
        ConfigError: if it is not a tokenizer or has neither token.
    """
    # Image processors also have `pad`; only tokenizers have this method.
    if not hasattr(tokenizer, "convert_tokens_to_ids"):
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if not hasattr(tokenizer, "convert_tokens_to_ids"):
        raise ConfigError(f"got a {type(tokenizer).__name__} for text, expected a tokenizer; pass the model's own.")
    copied = deepcopy(tokenizer)
    copied.model_max_length = NO_LIMIT
    if copied.pad_token_id is None:
        if copied.eos_token_id is None:
            raise ConfigError("got a tokenizer with neither a padding nor an end token; set its pad_token first.")
        copied.pad_token = copied.eos_token
    return copied


def check_room(tokenizer: PreTrainedTokenizerBase, max_length: int, pair: bool) -> None:
    """Refuse rows too short for the special tokens: tokenizers then ignore the length and cut nothing.

    Raises:
        ConfigError: if it is below their number.
    """
    around = tokenizer.num_special_tokens_to_add(pair=pair)
    if max_length < around:
        raise ConfigError(f"data, max_length: got {max_length}, expected at least the {around} special tokens of a row")


def tokenise(
    tokenizer: PreTrainedTokenizerBase,
    first: Sequence[str],
    second: Sequence[str] | None = None,
    max_length: int | None = None,
) -> list[Values]:
    """Tokenise texts or pairs into rows of at most `max_length` tokens; None keeps them whole."""
    return [row for _, row in coded(tokenizer, first, second, max_length)]


def coded(
    tokenizer: PreTrainedTokenizerBase,
    first: Sequence[str],
    second: Sequence[str] | None,
    max_length: int | None,
    **options: Any,
) -> Iterator[tuple[int, Values]]:
    """Return the rows of `tokenise`, each with the number of its text; `options` go to the tokenizer.

    Raises:
        ConfigError: if the special tokens alone are more than `max_length`.
    """
    if max_length is not None:
        check_room(tokenizer, max_length, second is not None)

    def rows(begin: int) -> list[tuple[int, Values]]:
        fields = tokenizer(
            list(first[begin : begin + 1_000]),
            None if second is None else list(second[begin : begin + 1_000]),
            truncation=max_length is not None,
            max_length=max_length,
            return_attention_mask=True,
            verbose=False,
            **options,
        )
        names = [name for name in TOKEN_FIELDS if name in fields]
        owners = fields.get("overflow_to_sample_mapping") or range(len(fields["input_ids"]))
        values = zip(*[fields[name] for name in names], strict=True)
        return [(begin + owner, dict(zip(names, row, strict=True))) for owner, row in zip(owners, values, strict=True)]

    return chain.from_iterable(map(rows, range(0, len(first), 1_000)))


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the tokens that a tokenizer adds before and after a text."""
    bare, whole = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    for place in range(len(whole) - len(bare) + 1):
        if whole[place : place + len(bare)] == bare:
            return list(whole[:place]), list(whole[place + len(bare) :])
    return [], []


class TextEncoder:
    """Tokenises texts or pairs of texts, or pads rows that are already packed.

    Args:
        tokenizer: The model's tokenizer; it is copied, and a copy without a padding token pads with the end token.
        max_length: Tokens per row.
        packed: Whether the examples are rows of token ids.

    Raises:
        ConfigError: If it is not a tokenizer, or has neither a padding nor an end token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int, packed: bool = False) -> None:
        self.tokenizer = copy_tokenizer(tokenizer)
        self.max_length = max_length
        # Packed rows all have the same length, so no row depends on another.
        self.packed, self.needs_all = packed, not packed

    def __call__(self, examples: Sequence[Example], keep: slice) -> dict[str, Tensor]:
        """Encode texts.

        Returns:
            ``input_ids`` and ``attention_mask`` [B, T], and ``token_type_ids`` [B, T] if the tokenizer has them. T is
            the longest row among all the examples.
        """
        rows = [{"input_ids": example.value} for example in examples] if self.packed else self._tokenise(examples)
        width = max(map(len, [row["input_ids"] for row in rows]))
        kept: Any = rows[keep]
        padded = self.tokenizer.pad(kept, padding="max_length", max_length=width, return_tensors="pt", verbose=False)
        return dict(padded)

    def pack(self, texts: Iterable[str], keep_rest: bool) -> Iterator[np.ndarray]:
        """Join texts, each with its special tokens and an end token, into one stream of tokens, and cut it into rows.

        Args:
            texts: The texts; the iterable may be endless.
            keep_rest: Whether to yield the shorter last row as well.

        Yields:
            Arrays [max_length] of token ids.

        Raises:
            ConfigError: If the tokenizer has no token to put between texts.
        """
        end = self.tokenizer.eos_token_id
        end = self.tokenizer.sep_token_id if end is None else end
        if end is None:
            raise ConfigError("got packing with a tokenizer that has no end or separator token; turn packing off.")
        texts = iter(texts)
        buffer: list[int] = []
        while group := list(islice(texts, PACK_TEXTS)):
            for ids in self.tokenizer(group, return_attention_mask=False)["input_ids"]:
                buffer += ids if ids and ids[-1] == end else [*ids, end]
            full = len(buffer) - len(buffer) % self.max_length
            for begin in range(0, full, self.max_length):
                yield np.array(buffer[begin : begin + self.max_length], dtype=np.int32)
            del buffer[:full]
        if keep_rest and buffer:
            yield np.array(buffer, dtype=np.int32)

    def _tokenise(self, examples: Sequence[Example]) -> list[Values]:
        pairs = [example.pair for example in examples if example.pair is not None]
        if 0 < len(pairs) < len(examples):
            # A tokenizer takes either single texts or pairs, but this mixture has both.
            return [row for example in examples for row in self._tokenise([example])]
        rows = tokenise(self.tokenizer, [example.value for example in examples], pairs or None, self.max_length)
        # A row without tokens would be masked completely, and softmax is undefined for it.
        fillers = {"input_ids": self.tokenizer.pad_token_id, "attention_mask": 1, "token_type_ids": 0}
        return [row if row["input_ids"] else {name: [fillers[name]] for name in row} for row in rows]


class ImageEncoder:
    """Makes batches with the image processor, which resizes, crops and normalises.

    Args:
        processor: The model's image processor, or a processor that has one.

    Raises:
        ConfigError: If it is not an image processor.
    """

    needs_all = False

    def __init__(self, processor: Processor) -> None:
        self.processor = getattr(processor, "image_processor", processor)
        if not callable(self.processor) or hasattr(self.processor, "convert_tokens_to_ids"):
            kind = type(self.processor).__name__
            raise ConfigError(f"got a {kind} for images, expected an image processor; pass the model's own.")
        mean = getattr(self.processor, "image_mean", None)
        self.mode = "L" if isinstance(mean, list | tuple) and len(mean) == 1 else "RGB"

    def __call__(self, examples: Sequence[Example], keep: slice) -> dict[str, Tensor]:
        """Encode images.

        Returns:
            ``pixel_values`` [B, C, H, W], float; if the processor padded smaller images, as DETR's does, also
            ``pixel_mask`` [B, H, W], 0 at padding.

        Raises:
            DataError: If the processor leaves the images at different sizes, or gives something else.
        """
        examples = examples[keep]
        images = [example.value.convert(self.mode) for example in examples]
        try:
            fields = self.processor(images=images, return_tensors="pt")
            pixels = fields["pixel_values"].float()
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            raise DataError(f"the image processor cannot make a batch of these images: {cause(error)}") from error
        if pixels.dim() != 4:
            shape = list(pixels.shape)
            raise DataError(f"got pixel_values of shape {shape} from the image processor, expected [B, C, H, W].")
        mask = fields.get("pixel_mask")
        padded = mask is not None and not bool(mask.all())
        return {"pixel_values": pixels} | ({"pixel_mask": mask} if padded else {})


def longest_input(rows: RowSet) -> int:
    """Return the tokens of the longest of some rows, by number; 0 for rows without tokens."""
    if not len(rows) or not any(name.endswith("input_ids") for name in rows[0]):
        return 0
    every = (rows[number] for number in range(len(rows)))
    return max(len(row[name]) for row in every for name in row if name.endswith("input_ids"))


Encoder: TypeAlias = TextEncoder | ImageEncoder
"""Makes batches of examples. `needs_all`: the shape of a row depends on the others, so a process that encodes only some
rows of a global batch needs all of them."""


def make_encoder(processor: Any, modality: Modality, max_length: int, packed: bool) -> Encoder:
    """Build the encoder of a modality."""
    if modality == "image":
        return ImageEncoder(processor)
    return TextEncoder(processor, max_length, packed)
