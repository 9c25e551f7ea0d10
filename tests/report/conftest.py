"""Pictures whose texts stay where they fall: to lay them out is half of what a picture takes."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def laid_out():
    """Draw without laying out; gives the function that lays out, for the tests that want it."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    real = ConstrainedLayoutEngine.execute
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConstrainedLayoutEngine, "execute", lambda self, figure: None)
        yield real
