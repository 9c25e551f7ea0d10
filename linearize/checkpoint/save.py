"""Save a converted model: everything is written to a temporary folder and renamed when complete."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from linearize.checkpoint.card import base_facts, model_card
from linearize.checkpoint.output import atomic_folder
from linearize.checkpoint.provenance import Provenance
from linearize.conversion.plan import set_trained_length
from linearize.core.errors import CheckpointError
from linearize.core.heads import Processor
from linearize.modeling.model import check_checkpoint, is_linearized

OTHER_FILES = 4_000_000
"""Bytes of a checkpoint's other files: tokenizer, code, card."""


def size_of(model: PreTrainedModel) -> int:
    """Return the bytes of a model's checkpoint, within a few per cent; tied weights are written once."""
    sizes = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in model.state_dict().values()}
    return sum(sizes.values()) + OTHER_FILES


def save(
    model: PreTrainedModel,
    target: str | os.PathLike[str],
    *,
    processor: Processor | None = None,
    overwrite: bool = False,
    provenance: dict[str, object] | None = None,
    extra_files: Mapping[str, str | bytes] | None = None,
    **kwargs: Any,
) -> Path:
    """Save a converted model with its tokenizer or image processor, a model card and its own code, all or nothing.

    Args:
        model: a converted model.
        target: folder to make.
        processor: tokenizer, image processor or feature extractor, or a list of them; saved with the model.
        overwrite: whether a folder that linearize wrote, and that holds nothing else, may be replaced.
        provenance: how the model was made, as plain data; kept in config.json (`linearize.checkpoint.provenance`).
        extra_files: further files of the folder, text or bytes by name; names may contain folders.
        **kwargs: for `save_pretrained` (`max_shard_size` ...).

    Returns:
        The folder.

    Raises:
        CheckpointError: if the model is not converted, or the folder cannot be used or written; nothing is left then.
    """
    if not is_linearized(model):
        raise CheckpointError(f"{type(model).__name__} is not converted; convert it first, or use its save_pretrained")
    processors = processor if isinstance(processor, (list, tuple)) else [processor]
    if provenance is not None:
        model.config.linearize = {**model.config.linearize, "provenance": provenance}
        if (longest := Provenance(provenance).longest_row_length) is not None:
            set_trained_length(model, longest)
    card = model_card(model, facts=base_facts(str(model.config.name_or_path or "")), name=Path(target).name)
    with atomic_folder(target, overwrite=overwrite) as folder:
        model.save_pretrained(folder, **kwargs)
        # Refuse what a load would refuse, while the model is still in memory.
        check_checkpoint(folder)
        (folder / "README.md").write_text(card, encoding="utf-8")
        write_files(folder, extra_files or {})
        for item in processors:
            if item is not None:
                item.save_pretrained(folder)
    return Path(target)


def write_files(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Write text or bytes by name into a folder; names may contain folders."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
