"""Pictures that take little time: one small one in place of each, or their texts where they fall."""

import pytest
from support.pictures import cheap_pictures


@pytest.fixture(autouse=True, scope="module")
def laid_out(request):
    """Draw without laying out, and in most modules not at all; gives the function that lays out."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    real = ConstrainedLayoutEngine.execute
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConstrainedLayoutEngine, "execute", lambda self, figure: None)
        if not request.module.__name__.endswith("test_page"):
            cheap_pictures(patch)
        yield real
