"""The options of `search`; importing this loads nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from linearize.data.config import DataConfig
from linearize.jobs.config import (
    DATA,
    DEVICES,
    EXAMPLE_INPUTS,
    KEPT,
    LENGTH,
    LOCAL_AS_FULL,
    OF_DATA,
    OVERWRITE_PLAN,
    PLAN_OUT,
    PLOT,
    ROWS_SHOWN,
    SEARCH_STATES,
    TrainingJob,
    data_rows,
    parse_layers,
    search_folder,
)
from linearize.kernel_search.config import SearchConfig
from linearize.options import option, section

OUTPUT = "output"


@dataclass(frozen=True, kw_only=True)
class SearchJob(TrainingJob):
    """Options of `search`."""

    model: str = option(help="Hub name, folder or GGUF file of a model", positional=True, metavar="MODEL")
    seed: int = option(0, "seed of kernels, data order and sampling", metavar="S")
    search: SearchConfig = section(SearchConfig, "search", leave_out=("folder",))
    keep_softmax: tuple[int, ...] | str = option((), f"beside the budget, {KEPT}", metavar="LAYERS", parse=parse_layers)
    example_inputs: str | None = option(None, EXAMPLE_INPUTS, metavar="FILE")
    local_as_full: bool = option(False, LOCAL_AS_FULL)
    task: str | None = option(
        None, "head to load, such as fill-mask; by default the one the checkpoint names", metavar="TASK"
    )
    revision: str | None = option(None, "branch, tag or commit on the Hub", metavar="REV")
    max_length: int | None = option(
        None, "longest input that the conversion shall take, for kernels that depend on it", low=1
    )
    data: DataConfig = section(DataConfig, DATA, only=OF_DATA, shown={"batch_size": ROWS_SHOWN})
    distill_length: int | None = option(None, LENGTH, group=DATA, low=1)
    plan_out: str | None = option(None, PLAN_OUT, group=OUTPUT, metavar="FILE.yaml")
    plot: str | None = option(None, PLOT, group=OUTPUT, metavar="FILE.png")
    overwrite: bool = option(False, OVERWRITE_PLAN, group=OUTPUT)
    device: str = option("auto", DEVICES, group=OUTPUT, metavar="D")

    def target(self) -> str:
        """Return what states, and the plan of an interrupted search, are named after: as `convert` names its output."""
        return search_folder(self.model).removesuffix(SEARCH_STATES)

    @property
    def stage(self) -> SearchConfig:
        """The options that say how states are kept."""
        return self.search

    def state_folders(self) -> list[str]:
        """Return where states are kept."""
        return [search_folder(self.model)]

    @staticmethod
    def derive(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return what follows from other options: the folder of states, and the rows per batch."""
        keeps = values.get("save_every") is not None or values.get("resume")
        folder = search_folder(values["model"]) if keeps else None
        return {"search": {"folder": folder}, "data": data_rows(values, "distill_length")}
