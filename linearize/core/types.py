"""Types that several parts of the package name in their annotations; importing this loads nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, PreTrainedTokenizerBase, ProcessorMixin

Processor: TypeAlias = "PreTrainedTokenizerBase | BaseImageProcessor | ProcessorMixin"
"""What makes a model's inputs: a tokenizer, an image processor, or both in one."""
