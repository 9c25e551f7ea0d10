"""Register with transformers once its Auto classes are used.

`import linearize` must be quick, but `AutoModel.from_pretrained` must know converted checkpoints afterwards. So an
entry is added to transformers' config registry after the import of that registry.
"""

from __future__ import annotations

from linearize.modeling.late import when_imported

TARGET = "transformers.models.auto.configuration_auto"


def _register() -> None:
    from linearize.modeling.auto import register

    register()


def install() -> None:
    """Register now if the Auto classes are already loaded, otherwise when they are loaded."""
    when_imported(TARGET, _register)
