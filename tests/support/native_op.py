"""Fixtures: the native op, compiled once for the tests of this code and processor, into a cache of their own.

`LINEARIZE_TEST_FLAGS` stands for `-march=native`: "-mavx2 -mfma" or "-msse2" compile what other processors get
(for test_attention.py, test_features.py and test_gradients.py: processes of their own do not know of it).
"""

import os
from pathlib import Path

import pytest
from filelock import FileLock

from linearize.attention import native
from linearize.attention.native import locate
from linearize.attention.native.build import build, compiler

if flags := os.environ.get("LINEARIZE_TEST_FLAGS"):
    locate.NATIVE_FLAGS = tuple(flags.split())


@pytest.fixture(scope="session")
def native_cache():
    if compiler() is None:
        pytest.skip("no C compiler")
    # Workers and later runs share it: it takes a while to compile. The name of the record says what is compiled.
    folder = Path(__file__).parents[2] / "build" / locate.record_file().stem
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, FileLock(folder / "lock"):
        patch.setenv("XDG_CACHE_HOME", str(folder))
        if not any(folder.rglob("*.so")):
            build()
    return folder


@pytest.fixture
def switch(native_cache, monkeypatch):
    """Turn the native op on or off; on at the start."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(native_cache))

    def turn(on):
        monkeypatch.setenv(native.SWITCH, "1" if on else "0")
        assert (native.engine() is not None) == on

    native.forget()
    turn(True)
    yield turn
    native.forget()


@pytest.fixture
def watch(switch, monkeypatch):
    """Write down which of the engine's methods are called: otherwise comparisons would compare a thing with itself."""

    def start(*methods):
        calls = []
        for method in methods:
            real = getattr(type(native.engine()), method)
            spy = lambda self, *a, real=real, method=method, **kw: calls.append(method) or real(self, *a, **kw)  # noqa: E731
            monkeypatch.setattr(type(native.engine()), method, spy)
        return calls

    return start
