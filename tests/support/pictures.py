"""Reports without the time that their pictures take."""

from __future__ import annotations

import pytest


def cheap_pictures(patch: pytest.MonkeyPatch) -> None:
    """Save one small picture in place of every figure of a report; tests/report and tests/fidelity draw them."""
    from linearize.fidelity.plots_style import new_figure, to_png

    small = to_png(new_figure(1, 1), dpi=30)
    patch.setattr("linearize.evaluation.report.page.to_png", lambda figure: small)
