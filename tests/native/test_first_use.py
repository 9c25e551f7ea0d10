"""The first `convert`, `demo` or `bench` compiles the native op and says so; nothing else does; three things say no."""

import shutil

import pytest
from support.checkpoints import make_original, texts

from linearize.attention import native
from linearize.attention.native import build as building
from linearize.attention.native import locate
from linearize.cli.main import main

BENCH = ["bench", "--lengths", "16", "--repeats", "1", "--heads", "1", "--head-dim", "8", "--no-memory"]


@pytest.fixture
def fresh(native_cache, tmp_path, monkeypatch):
    """A user with an empty cache who said nothing; compiling is copying here. Gives the list of what was compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(native.SWITCH, raising=False)
    built = []

    def copied():
        path = locate.record_file()
        building.make_folder(path.parent)
        for file in (native_cache / "linearize").iterdir():
            # A new file, as a build makes it: what is loaded stays as it is.
            (path.parent / file.name).unlink(missing_ok=True)
            shutil.copy(file, path.parent)
        built.append(path)
        native.forget()
        return path

    monkeypatch.setattr(building, "build", copied)
    native.forget()
    yield built
    native.forget()


def lines_about(capsys):
    captured = capsys.readouterr()
    return [line for line in (captured.out + captured.err).splitlines() if line.startswith("Native op:")]


def test_bench_builds_it_once(fresh, capsys):
    assert main(BENCH) == 0
    first = lines_about(capsys)
    assert len(fresh) == 1 and first[0].startswith("Native op: compiled once in ")
    assert first[1:] == ["Native op: used (--no-native turns it off)."]
    assert main(BENCH) == 0
    assert len(fresh) == 1 and lines_about(capsys) == first[1:]


def test_convert_builds_it_when_the_plan_is_made(fresh, tmp_path, capsys):
    texts(tmp_path, 12)
    make_original(tmp_path / "bert")
    convert = ["convert", str(tmp_path / "bert"), "--dataset", str(tmp_path / "texts.jsonl"), "--device", "cpu"]
    convert += ["--distill-steps", "1", "--batch-size", "2", "--holdout", "2", "--output", str(tmp_path / "out")]
    assert main([*convert, "--dry-run"]) == 0
    assert main(["convert", str(tmp_path / "nothing"), "--device", "cpu"]) == 2
    assert fresh == []
    assert main([*convert, "--no-native"]) == 0
    assert fresh == [] and native.engine() is None


def test_convert_says_so_in_one_line(fresh, tmp_path, capsys):
    texts(tmp_path, 12)
    make_original(tmp_path / "bert")
    convert = ["convert", str(tmp_path / "bert"), "--dataset", str(tmp_path / "texts.jsonl"), "--device", "cpu"]
    convert += ["--distill-steps", "1", "--batch-size", "2", "--holdout", "2", "--output", str(tmp_path / "out")]
    assert main(convert) == 0
    assert len(fresh) == 1 and len(lines_about(capsys)) == 1 and native.engine() is not None


@pytest.mark.parametrize("value", ["0", "1"])
def test_the_environment_says_no(value, fresh, monkeypatch, capsys):
    monkeypatch.setenv(native.SWITCH, value)
    assert main(BENCH) == 0
    assert fresh == [] and lines_about(capsys) == ["Native op: not compiled (linearize native --build)."]


def test_the_option_says_no(fresh, capsys, monkeypatch):
    monkeypatch.setenv(native.SWITCH, "")
    assert main([*BENCH, "--no-native"]) == 0
    assert fresh == [] and lines_about(capsys) == ["Native op: not compiled (linearize native --build)."]


def test_without_a_compiler_it_says_so(fresh, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert main(BENCH) == 0
    said, there = lines_about(capsys)
    assert fresh == [] and there == "Native op: not compiled (linearize native --build)."
    assert "not compiled, continuing without it (no C compiler among cc, gcc, clang; install gcc or clang" in said
    assert not (tmp_path / "cache").exists()
    assert main(["native"]) == 0
    assert "none found" in capsys.readouterr().out


def test_what_failed_is_not_tried_again(native_cache, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(native.SWITCH, raising=False)
    monkeypatch.setenv("CC", "false")
    native.forget()
    assert main(BENCH) == 0
    assert "not compiled, continuing without it" in lines_about(capsys)[0]
    assert main(BENCH) == 0
    assert lines_about(capsys) == [
        "Native op: not compiled, continuing without it (it failed before; linearize native --build tries again and "
        "says why).",
        "Native op: not compiled (linearize native --build).",
    ]
    native.forget()


def test_a_folder_that_others_can_write_is_named(fresh, tmp_path, capsys):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    assert main(BENCH) == 0
    said = lines_about(capsys)[0]
    assert fresh == [] and f"{tmp_path / 'cache'} can be written by others (mode 777; chmod go-w" in said


def test_one_that_disagrees_is_not_used(fresh, monkeypatch, capsys):
    monkeypatch.setattr(building, "MOST", 0.0)
    assert main(BENCH) == 0
    assert "differs by" in lines_about(capsys)[0] and native.engine() is None
    assert main(BENCH) == 0
    assert len(fresh) == 1 and "it failed before" in lines_about(capsys)[0]


def test_one_of_several_processes_builds_nothing(fresh, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(BENCH) == 0
    assert fresh == []


def test_a_cut_off_library_is_built_again(fresh, capsys, tmp_path):
    assert main(BENCH) == 0
    library = next((tmp_path / "cache" / "linearize").glob("*.so"))
    library.unlink()
    library.write_bytes(b"")
    native.forget()
    with pytest.warns(RuntimeWarning, match="its size or hash is different"):
        assert main(BENCH) == 0
    assert len(fresh) == 2 and native.engine() is not None


def test_using_the_package_builds_nothing(fresh):
    import torch
    from support.tiny import converted, inputs_of

    model = converted("bert")
    with torch.no_grad():
        model(**inputs_of(model))
    assert fresh == [] and native.engine() is None
