"""The table of heads: their names on the Hub, the transformers classes that have them, and their inputs.

Loading, tuning, recipes and the model card read this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from linearize.core.registry import Values

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

Modality = Literal["text", "image"]
"""The kind of input that a model reads."""

Processor: TypeAlias = "PreTrainedTokenizerBase | BaseImageProcessor | ProcessorMixin"
"""Prepares a model's inputs: a tokenizer, an image processor, or both in one."""


Row = Values
"""A row that is prepared for a model, by field name: numbers, lists of them, arrays, an image."""


class RowSet(Protocol):
    """Rows by number: a list of them, or an object that makes them."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def __getitem__(self, place: int, /) -> Row:
        """Return one row."""


@dataclass(frozen=True)
class Head:
    """A head of a model.

    Attributes:
        name: the name that users write.
        auto_class: transformers class that loads it.
        ending: ending of the names of the classes that have it, if it differs from that of `auto_class`.
        modality: its input, "text" or "image".
        per_label: whether it has one output per label.
        own_weights: whether it has weights that a checkpoint without the head lacks; a causal language model may
            share those of its embedding.
        pipeline: its task on the Hub, if that is not `name`.
    """

    name: str
    auto_class: str
    ending: str | None = None
    modality: Modality = "text"
    per_label: bool = False
    own_weights: bool = True
    pipeline: str | None = None

    @property
    def pipeline_tag(self) -> str:
        """The head's task on the Hub."""
        return self.pipeline or self.name

    def is_of(self, class_name: str) -> bool:
        """Tell from its name whether a transformers class has this head."""
        endings = (self.auto_class.removeprefix("AutoModel"), self.ending)
        return class_name.endswith(tuple(filter(None, endings)))


HEADS: dict[str, Head] = {
    head.name: head
    for head in (
        Head("feature-extraction", "AutoModel", own_weights=False),
        Head("fill-mask", "AutoModelForMaskedLM"),
        Head("text-generation", "AutoModelForCausalLM", "LMHeadModel", own_weights=False),
        Head(
            "text2text-generation",
            "AutoModelForSeq2SeqLM",
            "ForConditionalGeneration",
            own_weights=False,
            pipeline="text-generation",
        ),
        Head("text-classification", "AutoModelForSequenceClassification", per_label=True),
        Head("token-classification", "AutoModelForTokenClassification", per_label=True),
        Head("question-answering", "AutoModelForQuestionAnswering"),
        Head("multiple-choice", "AutoModelForMultipleChoice"),
        Head("image-classification", "AutoModelForImageClassification", modality="image", per_label=True),
    )
}
"""Every head by its name."""


def head_of_class(class_name: str) -> Head | None:
    """Return the head of a transformers class (or of its converted form) by the class name; None if it has no head."""
    return next((head for head in HEADS.values() if head.is_of(class_name)), None)


def fit_tokenizer(model: PreTrainedModel, processor: Processor | None) -> None:
    """Set the padding token in a model's config if it has none; GPT's classifiers read the last token before it."""
    from transformers import PreTrainedTokenizerBase

    if isinstance(processor, PreTrainedTokenizerBase) and getattr(model.config, "pad_token_id", 0) is None:
        padding = processor.pad_token_id
        model.config.pad_token_id = processor.eos_token_id if padding is None else padding
