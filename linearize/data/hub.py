"""Data sets on the Hugging Face Hub: one short request checks that it answers, then `datasets` does the rest."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from linearize.core.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

PROBE_SECONDS = 3.0
OFFLINE = "HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def unreachable(repo: str) -> str | None:
    """Return why the Hub cannot be reached for a data set.

    Without a network `datasets` retries for more than 20 seconds, so a separate request comes first.

    Args:
        repo: Hub name without a config.

    Returns:
        The reason; None if the Hub answers, even if it has no such data set.
    """
    from datasets import config as datasets_config
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    if datasets_config.HF_HUB_OFFLINE or constants.HF_HUB_OFFLINE:
        return OFFLINE
    try:
        HfApi().dataset_info(repo, timeout=PROBE_SECONDS)
    except HfHubHTTPError:
        return None
    except Exception as error:  # The HTTP client's own classes change between releases of huggingface_hub.
        return f"the Hub does not answer ({type(error).__name__})"
    return None


def load_hub(name: str, split: str, most: int | None = None) -> Dataset:
    """Load one split of a Hub data set, from the local cache if the Hub cannot be reached.

    Args:
        name: ``owner/name`` or ``owner/name:config``.
        split: Name of the split; slices such as ``train[:1000]`` work too.
        most: Rows to read, without loading the rest; None for all.

    Returns:
        The data set.

    Raises:
        DataError: If it is neither a file nor a name on the Hub, or cannot be loaded.
    """
    from datasets import config as datasets_config
    from datasets import load_dataset

    repo, _, config = name.partition(":")
    if not _HUB_NAME.fullmatch(repo):
        raise DataError(f"got data set {name!r}: no such file or folder, and not a Hub name (owner/name); check it.")
    reason, before = unreachable(repo), datasets_config.HF_HUB_OFFLINE
    try:
        # As if its offline variable were set, `datasets` then uses its cache immediately.
        datasets_config.HF_HUB_OFFLINE = before or reason is not None
        table = load_dataset(repo, config or None, split=split, streaming=most is not None)
        return table if most is None else first_rows(table, most)
    except Exception as error:  # Third-party data sets may raise anything.
        if reason is not None:
            remedy = "unset it" if reason == OFFLINE else "connect to the network"
            raise DataError(
                f"got data set {name!r}: no such file or folder, not in the cache, and {reason}; "
                f"pass a local file or folder, or {remedy}."
            ) from error
        raise DataError(
            f"got Hub data set {name!r}, split {split!r}, which cannot be loaded: {cause(error)}"
        ) from error
    finally:
        datasets_config.HF_HUB_OFFLINE = before


def cause(error: BaseException) -> str:
    """Return the innermost cause of an error in one line of at most 300 characters."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": .")[:300]


def first_rows(table: Dataset | IterableDataset, most: int) -> Dataset:
    """Return the first rows of a table that may be a stream; images are not decoded."""
    from datasets import Dataset

    if isinstance(table, Dataset):
        return table.select(range(min(most, len(table))))
    table = table if table.features is None else table.decode(False)
    return Dataset.from_list(list(table.take(most)), features=table.features)
