"""The front door of the room: a config and a processor in, batches out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from linearize.data.builtin import CROPS, DEFAULT_IMAGES, DEFAULT_TEXT, Crops, prose_table
from linearize.data.columns import Modality, class_names, merge_names, uniform
from linearize.data.config import DataConfig
from linearize.data.encode import Encoder, TextEncoder, make_encoder
from linearize.data.feeds import Feed, MapFeed, PackedFeed, StreamFeed, StreamPart
from linearize.data.hub import load_hub, unreachable
from linearize.data.images import ImageFiles, ImageTable
from linearize.data.local import looks_local, open_local
from linearize.data.order import batches, split_off
from linearize.data.records import Example, PackedRecords, Records, TextRecords
from linearize.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import Tensor
