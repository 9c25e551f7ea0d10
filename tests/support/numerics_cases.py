"""What the generated tests of numerics share: every kernel, its variants and windows the long way only."""

from __future__ import annotations

import pytest

from support.kernel_cases import CASES, IDS, directions, needed

WINDOW = 5
ENGINES = pytest.mark.parametrize("native", [False, True], ids=["pytorch", "native"])


def _cases():
    for (info, arguments), name in zip(CASES, IDS, strict=True):
        for direction in directions(info):
            for window in (None, WINDOW) if info.windowed else (None,):
                plain = arguments == needed(info) and window is None
                marks = () if plain else pytest.mark.slow
                label = f"{name}-{direction}" + ("-window" if window else "")
                yield pytest.param(info, arguments, direction, window, id=label, marks=marks)


MIXERS = list(_cases())
