"""pytest plugin of `upstream.py`: writes outcomes down and, where asked to, has every model class built converted.

`UPSTREAM_OUTCOMES` names the file of outcomes; `UPSTREAM_FAMILY` the modeling module whose classes are converted.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel

import linearize
from linearize.modeling.compat import use_linear_attention
from linearize.modeling.config import MODEL_TYPE, config_class
from linearize.modeling.model import LinearizedModel, model_class

ASKS_BY_THE_WAY = re.compile(r"padding_matches_padding_free_with_position_ids")
"""Tests of something else that name an implementation of softmax: they get the converted model's own."""

_HERE = threading.local()
_PLANS: dict[tuple[type, str], dict[str, Any]] = {}
_OUTCOMES: dict[str, tuple[str, str]] = {}


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Build the classes inside as they are: parts of a converted model, and the original that a plan is made from."""
    before = getattr(_HERE, "plain", False)
    _HERE.plain = True
    try:
        yield
    finally:
        _HERE.plain = before


def section(base: type[PreTrainedModel], config: PreTrainedConfig) -> dict[str, Any]:
    """Plan the conversion of a class with a config, on an original of its own, and return what config.json gets."""
    key = base, config.to_json_string(use_diff=False)
    if key not in _PLANS:
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            # Numbers drawn here are none of the test's.
            with plain(), torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.enable_grad():
                model = linearize.convert(base(copy.deepcopy(config)).eval())
        finally:
            torch.set_default_dtype(dtype)
        _PLANS[key] = copy.deepcopy(model.config.linearize)
    return copy.deepcopy(_PLANS[key])


def converted_config(base: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of a converted model; the test's own stays what it is."""
    if getattr(config, "linearize", None):
        return config
    made: Any = copy.deepcopy(config)
    values = section(base, config)
    made.__class__ = config_class(type(config))
    made.linearize = {"format_version": 1, **values}
    use_linear_attention(made)
    return made


def convert_family(module: str) -> None:
    """Have every model class of a modeling module give converted models, from configs and from converted folders."""
    load, build = PreTrainedModel.from_pretrained.__func__, LinearizedModel.__init__  # type: ignore[attr-defined]

    def new(cls: Any, *args: object, **kwargs: object) -> object:
        ours = cls.__module__ == module and not issubclass(cls, LinearizedModel)
        if not ours or getattr(_HERE, "plain", False):
            return object.__new__(cls)
        return object.__new__(model_class(cls, config_class(cls.config_class)))

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        base = type(self).__mro__[type(self).__mro__.index(LinearizedModel) + 1]
        made = config if getattr(_HERE, "plain", False) else converted_config(base, config)
        with plain():
            build(self, made, *args, **kwargs)

    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        own = cls.__module__ == module and not issubclass(cls, LinearizedModel)
        name, config = args[0] if args else kwargs.get("pretrained_model_name_or_path"), kwargs.get("config")
        if own and (name is None or _says_converted(Path(name) / kwargs.get("subfolder", ""))):
            if isinstance(config, PreTrainedConfig):
                kwargs["config"] = converted_config(cls, config)
            if ASKS_BY_THE_WAY.search(os.environ.get("PYTEST_CURRENT_TEST", "")):
                kwargs.pop("attn_implementation", None)
            return model_class(cls, config_class(cls.config_class)).from_pretrained(*args, **kwargs)
        return load(cls, *args, **kwargs)

    PreTrainedModel.__new__ = staticmethod(new)  # type: ignore[method-assign,assignment]
    PreTrainedModel.from_pretrained = classmethod(from_pretrained)  # type: ignore[assignment]
    LinearizedModel.__init__ = init  # type: ignore[method-assign]


def _says_converted(folder: Path) -> bool:
    file = folder / "config.json"
    return file.is_file() and json.loads(file.read_text(encoding="utf-8")).get("model_type") == MODEL_TYPE


def pytest_configure(config: pytest.Config) -> None:
    """Patch transformers before the tests are imported."""
    if family := os.environ.get("UPSTREAM_FAMILY"):
        convert_family(family)


def pytest_runtest_logreport(report: Any) -> None:
    """Note how a test, or one of its subtests, ended; the worst of them counts."""
    name = report.nodeid.split("::", 1)[-1]
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        lines = str(crash.message if crash is not None else report.longrepr).strip().splitlines()
        # Of a test with subtests the first that failed says more than the test itself.
        if _OUTCOMES.get(name, ("",))[0] != "failed":
            _OUTCOMES[name] = "failed", " ".join(lines[:3])[:400]
    elif report.skipped and _OUTCOMES.get(name, ("",))[0] != "failed":
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        _OUTCOMES[name] = "skipped", why.removeprefix("Skipped: ")[:400]
    elif report.when == "call" and not hasattr(report, "context"):
        _OUTCOMES.setdefault(name, ("passed", ""))


def pytest_sessionfinish() -> None:
    """Write the outcomes."""
    Path(os.environ["UPSTREAM_OUTCOMES"]).write_text(json.dumps(_OUTCOMES, indent=1), encoding="utf-8")
