"""The table of heads: their names on the Hub, the classes of transformers that have them, and what they read.

Loading, tuning, recipes and the model card read this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, PreTrainedTokenizerBase, ProcessorMixin

Modality = Literal["text", "image"]
"""What a model reads."""

Processor: TypeAlias = "PreTrainedTokenizerBase | BaseImageProcessor | ProcessorMixin"
"""What makes a model's inputs: a tokenizer, an image processor, or both in one."""


@dataclass(frozen=True)
class Head:
    """A head of a model.

    Attributes:
        name: as users write it.
        auto_class: class of transformers that loads it.
        suffixes: endings of the names of the classes that have it.
        modality: what it reads, "text" or "image".
        per_label: whether it has one output per label.
        own_weights: whether it has weights that a checkpoint without it lacks; a causal language model may use its
            embedding's.
        pipeline: the Hub's name of the head's work, if it is not `name`.
    """

    name: str
    auto_class: str
    suffixes: tuple[str, ...] = ()
    modality: Modality = "text"
    per_label: bool = False
    own_weights: bool = True
    pipeline: str | None = None

    @property
    def pipeline_tag(self) -> str:
        """The Hub's name of the head's work."""
        return self.pipeline or self.name

    def is_of(self, class_name: str) -> bool:
        """Tell whether a class of transformers has this head, by its name."""
        return bool(self.suffixes) and class_name.endswith(self.suffixes)


HEADS: dict[str, Head] = {
    head.name: head
    for head in (
        Head("feature-extraction", "AutoModel", own_weights=False),
        Head("fill-mask", "AutoModelForMaskedLM", ("ForMaskedLM",)),
        Head("text-generation", "AutoModelForCausalLM", ("ForCausalLM", "LMHeadModel"), own_weights=False),
        Head(
            "text2text-generation",
            "AutoModelForSeq2SeqLM",
            ("ForConditionalGeneration",),
            own_weights=False,
            pipeline="text-generation",
        ),
        Head(
            "text-classification", "AutoModelForSequenceClassification", ("ForSequenceClassification",), per_label=True
        ),
        Head("token-classification", "AutoModelForTokenClassification", ("ForTokenClassification",), per_label=True),
        Head("question-answering", "AutoModelForQuestionAnswering", ("ForQuestionAnswering",)),
        Head("multiple-choice", "AutoModelForMultipleChoice", ("ForMultipleChoice",)),
        Head(
            "image-classification",
            "AutoModelForImageClassification",
            ("ForImageClassification",),
            modality="image",
            per_label=True,
        ),
    )
}
"""Every head by its name."""


def head_of_class(class_name: str) -> Head | None:
    """Return the head of a class of transformers (or of its converted form), by its name; None if it has none."""
    return next((head for head in HEADS.values() if head.is_of(class_name)), None)
