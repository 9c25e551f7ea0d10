"""linearize: any pretrained Transformer with linear attention, as an ordinary HuggingFace model.

    import linearize
    model = linearize.convert(model, kernel="hedgehog")

Importing only registers a hook: once transformers' Auto classes are used, they can load converted checkpoints.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from linearize._hook import install as _install

__version__ = "0.1.0"

# Public name -> module, loaded on first use.
_PUBLIC = {
    "Plan": "linearize.modeling.plan",
    "LinearizeError": "linearize.core.errors",
    "align": "linearize.training.alignment.loop",
    "apply": "linearize.conversion.plan",
    "context_parallel": "linearize.modeling.context_parallel",
    "convert": "linearize.conversion.plan",
    "distill": "linearize.training.stage_one.loop",
    "embed": "linearize.jobs.embed",
    "kernel_info": "linearize.core.registry",
    "kernel_infos": "linearize.core.registry",
    "plan": "linearize.conversion.plan",
    "register_kernel": "linearize.core.registry",
    "save": "linearize.checkpoint.save",
    "search": "linearize.kernel_search.loop",
}

_VERBS = ("bench", "compare", "evaluate", "export", "finetune", "init", "inspect", "longdoc", "push", "report")
"""Verbs whose function works on folders alone, so it is not here."""

if TYPE_CHECKING:
    from linearize.checkpoint.save import save as save
    from linearize.conversion.plan import apply as apply
    from linearize.conversion.plan import convert as convert
    from linearize.conversion.plan import plan as plan
    from linearize.core.errors import LinearizeError as LinearizeError
    from linearize.core.registry import kernel_info as kernel_info
    from linearize.core.registry import kernel_infos as kernel_infos
    from linearize.core.registry import register_kernel as register_kernel
    from linearize.jobs.embed import embed as embed
    from linearize.kernel_search.loop import search as search
    from linearize.modeling.context_parallel import context_parallel as context_parallel
    from linearize.modeling.plan import Plan as Plan
    from linearize.training.alignment.loop import align as align
    from linearize.training.stage_one.loop import distill as distill

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        where = f"; the verb is linearize.jobs.verbs.{name}" if name in _VERBS else ""
        # With the name and the module, Python adds the nearest name.
        raise AttributeError(
            f"module 'linearize' has no attribute {name!r}{where}", name=name, obj=sys.modules[__name__]
        )
    try:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    except ModuleNotFoundError as error:
        from linearize.core.errors import missing_package

        raise missing_package(error) or error from error


def __dir__() -> list[str]:
    return sorted(__all__)


_install()
