"""Text, text pairs and images, from the Hub, local files or Python itself, as batches for a model.

    source = load_source(DataConfig(dataset="reviews.jsonl.gz"), tokenizer, "text")
    for batch in source.train_batches():
        ...

Importing this loads nothing heavy; `datasets` and `torch` are imported when data is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from linearize.data.config import DataConfig, parse_mixture

if TYPE_CHECKING:
    from linearize.data.columns import Modality
    from linearize.data.load import load_source
    from linearize.data.source import Source

__all__ = ["DataConfig", "Modality", "Source", "load_source", "parse_mixture"]

_HOMES = {"Modality": "columns", "Source": "source", "load_source": "load"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
