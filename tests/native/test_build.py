"""Compiling, finding and removing the native op; a checkpoint's own code goes without it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.generation import GREEDY, generate_and_check

from linearize.attention import native
from linearize.attention.native import build as building
from linearize.attention.native import calls, locate, structures
from linearize.attention.native.build import native_kernels
from linearize.cli.main import main
from linearize.core.errors import ConfigError


def test_nothing_is_built_unasked(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(native.SWITCH, "1")
    native.forget()
    assert native.engine() is None and list(tmp_path.iterdir()) == []
    native.forget()


def test_without_a_compiler(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    assert building.compiler() is None
    assert main(["native", "--build"]) == 2
    assert "no C compiler" in capsys.readouterr().err
    monkeypatch.setenv("CC", "false")
    with pytest.raises(ConfigError, match="failed; everything works without it"):
        building.build()
    assert list((tmp_path / "linearize").iterdir()) == []


def test_the_name_depends_on_code_and_processor(monkeypatch):
    folder = Path(locate.__file__).parent
    assert set(locate.SOURCES) == {file.name for file in (*folder.glob("*.c"), *folder.glob("*.h"))}
    name = locate.record_file().name
    monkeypatch.setattr(locate, "processor", lambda: "flags : fma other")
    assert locate.record_file().name != name


@pytest.mark.parametrize("change", ["relu given", "given relu "])
def test_numbers_mean_the_same_on_both_sides(switch, monkeypatch, change):
    """The library says which maps, types and results it has, in order; another order is another code."""
    path = native.engine().path
    monkeypatch.setattr(structures, "NAMES", structures.NAMES.replace("given relu ", change))
    if change == "given relu ":
        assert calls.Engine(path).path == path
        return
    with pytest.raises(OSError, match="built from other code"):
        calls.Engine(path)


def test_verb(switch, tmp_path, monkeypatch, capsys):
    assert main(["native", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["built"] and facts["used"] and facts["library"].endswith(".so") and facts["agreement"] == []
    switch(False)
    assert main(["native"]) == 0
    assert "is not used: LINEARIZE_NATIVE=0" in capsys.readouterr().out
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(native.SWITCH, "1")
    # The op as it is compiled for users is tested elsewhere; -O3 takes ten times as long.
    monkeypatch.setattr(locate, "FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in locate.FLAGS))
    assert main(["native", "--build", "--remove"]) == 2
    assert "expected one of them" in capsys.readouterr().err and list(tmp_path.iterdir()) == []
    assert main(["native", "--build", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["agreement"]) == 6 * len(native_kernels())
    assert main(["native", "--remove"]) == 0
    assert "removed" in capsys.readouterr().out and list((tmp_path / "linearize").iterdir()) == []


def by_clang():
    """Tell whether the compiler is Clang: its OpenMP calls are not those of torch's library, gcc's are."""
    done = subprocess.run([building.compiler(), "--version"], capture_output=True, text=True, check=True)
    return "clang" in done.stdout


def test_threads_are_torchs(switch, capsys):
    """A second OpenMP library would have separate threads, which compete with torch's."""
    code = (
        "import pathlib, sys, torch; torch.ones(512, 512) @ torch.ones(512, 512); "
        "from linearize.attention.native.calls import Engine; found = Engine(pathlib.Path(sys.argv[1])); "
        "maps = open('/proc/self/maps').read(); "
        "print(found.parallel, len({line.split()[-1] for line in maps.splitlines() if 'gomp' in line}))"
    )
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    command = [sys.executable, "-c", code, str(native.engine().path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(not by_clang()), "1"]
    assert main(["native"]) == 0
    assert ("It runs in one thread" in capsys.readouterr().out) == by_clang()


def test_generation_equals_that_in_pytorch(switch):
    from transformers import GPT2Config, GPT2LMHeadModel

    import linearize

    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=50, n_positions=64, bos_token_id=0, eos_token_id=0)
    model = linearize.convert(GPT2LMHeadModel(config).eval(), "hedgehog")
    prompt = torch.randint(1, 50, (2, 9))
    mask = torch.ones_like(prompt)
    mask[0, :4] = 0
    for native_op in (True, False):
        switch(native_op)
        generate_and_check(model, {"input_ids": prompt, "attention_mask": mask}, **GREEDY | {"max_new_tokens": 20})
