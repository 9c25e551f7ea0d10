"""Register with transformers once its Auto classes or its models are used.

`import linearize` must be quick, but `from_pretrained` must know converted checkpoints afterwards. So an entry is added
to transformers' config registry after the import of that registry, and loading is extended after the import of models.
"""

from __future__ import annotations

from linearize.modeling.late import when_imported

TARGET = "transformers.models.auto.configuration_auto"
MODELS = "transformers.modeling_utils"


def _register() -> None:
    from linearize.modeling.auto import register

    register()


def _guard_models() -> None:
    from linearize.modeling.auto import guard_models

    guard_models()


def install() -> None:
    """Register now if the Auto classes and models are already loaded, otherwise when they are loaded."""
    when_imported(TARGET, _register)
    when_imported(MODELS, _guard_models)
