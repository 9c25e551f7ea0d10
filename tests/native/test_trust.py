"""A library is loaded only if the user or root owns it, no one else can write it, and it is the one that was built."""

import json
import os
import shutil
import subprocess
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from support import forks

from linearize.attention import native
from linearize.attention.native import build as building
from linearize.attention.native import locate
from linearize.attention.native.locate import describe, objection
from linearize.cli.main import main


@pytest.fixture
def home(native_cache, tmp_path, monkeypatch):
    """A cache of this test's own with the built library in it, in use; gives the folder."""
    shutil.copytree(native_cache / "linearize", tmp_path / "cache" / "linearize")
    (tmp_path / "cache").chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(native.SWITCH, "1")
    native.forget()
    yield tmp_path / "cache" / "linearize"
    native.forget()


def refused():
    """Ask for the engine twice; return the one warning."""
    native.forget()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert native.engine() is None and native.engine() is None
    assert len(caught) == 1 and "\n" not in str(caught[0].message)
    return str(caught[0].message)


def places(home):
    library, record = next(home.glob("*.so")), next(home.glob("*.json"))
    return {"folder": home, "above": home.parent, "library": library, "record": record}


def test_what_was_built_is_loaded(home):
    assert native.engine() is not None
    assert sorted(file.suffix for file in home.iterdir()) == [".json", ".so"]
    for file in [home, *home.iterdir()]:
        assert objection(file) == ""
        assert file.stat().st_mode & 0o022 == 0


@pytest.mark.parametrize("what", ["folder", "library", "record", "above"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_can_write_is_not_loaded(what, mode, home):
    path = places(home)
    path[what].chmod(path[what].stat().st_mode | mode)
    assert "can be written by others" in refused()


@pytest.mark.parametrize("what", ["folder", "library", "record", "above"])
def test_what_others_own_is_not_loaded(what, home, monkeypatch):
    """Another owner is given by the eyes of `lstat`: only root can give a file away."""
    path = places(home)
    real = os.lstat

    def lstat(file, *args, **kwargs):
        found = real(file, *args, **kwargs)
        if str(file) != str(path[what]):
            return found
        return os.stat_result((*found[:4], 54321, *found[5:]))

    monkeypatch.setattr(os, "lstat", lstat)
    assert "belongs to another user (number 54321)" in refused()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give a file away")
def test_a_planted_library_does_not_run(home, tmp_path):
    """The original attack: a foreign folder, found through XDG_CACHE_HOME, with a library in it that writes a file."""
    source, mark = tmp_path / "evil.c", tmp_path / "it-ran"
    code = '__attribute__((constructor)) void f(void) { fclose(fopen("MARK", "w")); }'
    source.write_text(f"#include <stdio.h>\n{code}\n".replace("MARK", str(mark)))
    library = next(home.glob("*.so"))
    subprocess.run([building.compiler(), "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    record = next(home.glob("*.json"))
    record.write_text(json.dumps(describe(library)))
    for file in (home, library, record):
        os.chown(file, 54321, 54321)
    assert "another user" in refused()
    assert not mark.exists()
    for file in (home, library, record):
        os.chown(file, 0, 0)
    native.forget()
    with warnings.catch_warnings(record=True):
        native.engine()
    # Only to show that the library would have run: root's own word is taken.
    assert mark.exists()


def test_a_link_is_not_loaded(home, tmp_path):
    library = next(home.glob("*.so"))
    library.rename(tmp_path / "elsewhere.so")
    library.symlink_to(tmp_path / "elsewhere.so")
    assert "is a link" in refused()


@pytest.mark.parametrize("keep", [0, 100, 5000, -1])
def test_a_library_cut_off_is_not_loaded(keep, home):
    """Mapped into memory it would kill the process (SIGBUS) at the first page that is not there."""
    library = next(home.glob("*.so"))
    library.write_bytes(library.read_bytes()[:keep])
    assert "its size or hash is different" in refused()


def test_a_library_with_other_bytes_is_not_loaded(home):
    library = next(home.glob("*.so"))
    data = bytearray(library.read_bytes())
    data[len(data) // 2] ^= 1
    library.write_bytes(bytes(data))
    assert "its size or hash is different" in refused()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"file": 3}', '{"file": "../x.so", "size": 1}', "[" * 9000])
def test_a_damaged_record_loads_nothing(text, home):
    next(home.glob("*.json")).write_text(text)
    assert "native op: not used" in refused()


def test_a_missing_library_is_said(home):
    next(home.glob("*.so")).unlink()
    assert "No such file" in refused()


def test_nothing_is_built_where_others_can_write(home, capsys):
    shutil.rmtree(home)
    home.mkdir()
    home.chmod(0o777)
    assert main(["native", "--build"]) == 2
    assert "can be written by others" in capsys.readouterr().err
    assert list(home.iterdir()) == []


def test_a_build_under_an_open_umask_is_closed(tmp_path, monkeypatch, native_cache):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new" / "cache"))
    before = os.umask(0o000)
    try:
        building.make_folder(folder := locate.record_file().parent)
    finally:
        os.umask(before)
    assert all(made.stat().st_mode & 0o777 == 0o700 for made in (folder, folder.parent))


def test_verb_says_what_is_wrong(home, capsys):
    next(home.glob("*.so")).write_bytes(b"")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(["native", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert not facts["built"] and not facts["used"] and "its size or hash is different" in facts["problem"]


NOBODY = """
import os, torch
from unittest import mock
os.environ.pop("HOME", None), os.environ.pop("XDG_CACHE_HOME", None)
os.environ["LINEARIZE_NATIVE"] = "1"
import pwd
with mock.patch.object(pwd, "getpwuid", side_effect=KeyError("no such user")):
    from linearize.attention.native import engine
    from linearize.attention.native.build import remove, worth_building
    from linearize.attention.native.locate import record_file
    print(engine(), record_file(), worth_building(), remove())
    from linearize.attention.call import AttentionCall
    from linearize.attention.factory import build_mixer
    from linearize.attention.shape import HeadShape
    mixer = build_mixer("hedgehog", {}, HeadShape(2, 2, 8, 8, False))
    mixer.reset_parameters(torch.Generator().manual_seed(0))
    x = torch.randn(1, 2, 5, 8)
    print(mixer(AttentionCall(x, x, x, 1.0))[0].shape)
"""


def test_a_user_without_home_and_name():
    done = forks.python(NOBODY)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["None None False []", "torch.Size([1, 2, 5, 8])"]


@pytest.mark.parametrize("value", ["cache", "./cache", "../x"])
def test_a_relative_cache_folder_is_ignored(value, monkeypatch, tmp_path):
    """It would be another one in every working folder, as one that somebody else unpacked."""
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate.cache_folder() == tmp_path / ".cache" / "linearize"


BUILD = """
import warnings
warnings.simplefilter("error", RuntimeWarning)
import linearize.attention.native.build as building
# What the compiler makes of it is not the question here, and -O3 takes ten times as long.
building.locate.FLAGS = tuple("-O0" if flag == "-O3" else flag for flag in building.locate.FLAGS)
building.build()
from linearize.attention.native import engine
print(engine().path)
"""


def test_two_builds_at_once_delete_what_a_killed_one_left(tmp_path, native_cache):
    left = tmp_path / "linearize" / ".build-killed"
    left.mkdir(mode=0o700, parents=True)
    (left / "half.o").write_text("half")
    os.utime(left, (0, 0))
    tmp_path.joinpath("linearize").chmod(0o700)
    environment = {"XDG_CACHE_HOME": str(tmp_path), native.SWITCH: "1"}
    both = [partial(forks.python, BUILD, environment=environment) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = [future.result() for future in [pool.submit(one) for one in both]]
    assert [done.returncode for done in found] == [0, 0], found
    assert all(done.stdout.strip().endswith(".so") for done in found)
    assert {file.suffix for file in (tmp_path / "linearize").iterdir()} == {".json", ".so"}
