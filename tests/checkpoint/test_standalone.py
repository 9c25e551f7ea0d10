"""A checkpoint runs where linearize is not installed, from the code that it carries, with the same numbers to the bit.

"Not installed" is a fresh virtual environment, which sees this one's torch and transformers through a .pth file.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from support.processes import bare_python
from support.tiny import converted, inputs_of, outputs, stir

import linearize
from linearize.core.errors import CheckpointError
from linearize.core.registry import kernel_info, kernel_infos
from linearize.modeling.portable import ENTRY, TRANSFORMERS, code_files, flat_name, flat_text, source_of

CHILD = Path(__file__).with_name("standalone_child.py")
CHECKOUT = Path(__file__).parents[2]


@pytest.fixture
def python(tmp_path_factory):
    """A virtual environment without linearize."""
    return bare_python(tmp_path_factory.mktemp("bare"))


def run_child(python, root):
    environment = {
        **os.environ,
        "HF_HOME": str(root / "hf"),
        "HF_MODULES_CACHE": str(root / "modules"),
        "TRANSFORMERS_VERBOSITY": "error",
    }
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        [python, CHILD, root, CHECKOUT],
        env=environment,
        cwd=root,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def write_job(root, name, model, head, processor=None):
    """Save a model, load it with the package, and write down what it gives."""
    linearize.save(model, root / name, processor=processor)
    loaded = getattr(transformers, head).from_pretrained(root / name).eval()
    assert type(loaded).__module__ == "linearize.modeling.model"
    inputs = inputs_of(loaded)
    stored = {f"in.{key}": value for key, value in inputs.items()}
    stored |= {f"out.{i}": value.contiguous() for i, value in enumerate(outputs(loaded, inputs))}
    if head == "AutoModelForCausalLM":
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        stored["generated"] = loaded.generate(ids, attention_mask=mask, max_new_tokens=8)
    save_file(stored, root / name / "expected.safetensors")


def needs(info):
    """Return the arguments that a kernel needs, and the additions."""
    return {"max_positions": 64} if info.maximum_positions else {}, {"window": 4} if info.needs_window else {}


def every_kernel():
    """A model with a different kernel in each layer; presets are made of these kernels."""
    layers = {}
    for number, info in enumerate(info for info in kernel_infos() if info.preset is None):
        arguments, near = needs(info)
        layers[number] = info.name, arguments | near
    return converted("bert", "AutoModel", None, layers=layers, config={"num_hidden_layers": len(layers)})


def test_models_run_in_a_bare_environment(python, tmp_path):
    timm = pytest.importorskip("timm")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "dog"]
    tokenizer = transformers.BertTokenizer(vocab={word: index for index, word in enumerate(words)})
    images = transformers.ViTImageProcessor(size={"height": 30, "width": 30})
    torch.manual_seed(0)
    vision = timm.create_model("test_vit", pretrained=False, num_classes=5, img_size=32).eval()
    jobs = {
        "bert": ("AutoModelForMaskedLM", "fill-mask", True),
        "gpt2": ("AutoModelForCausalLM", "", False),
        "llama": ("AutoModelForCausalLM", "", False),
        "vit": ("AutoModelForImageClassification", "image-classification", False),
        "timm": ("AutoModelForImageClassification", "image-classification", True),
        "every-kernel": ("AutoModel", "", False),
    }
    write_job(tmp_path, "bert", converted("bert", "AutoModelForMaskedLM"), "AutoModelForMaskedLM", tokenizer)
    write_job(tmp_path, "gpt2", converted("gpt2", "AutoModelForCausalLM", "flexformer_s"), "AutoModelForCausalLM")
    mixed = converted("llama", "AutoModelForCausalLM", keep_softmax=[1], window=4)
    write_job(tmp_path, "llama", mixed, "AutoModelForCausalLM")
    vit = converted("vit", "AutoModelForImageClassification", layers={0: "hedgehog", 1: "flexformer_n"})
    write_job(tmp_path, "vit", vit, "AutoModelForImageClassification", images)
    write_job(tmp_path, "timm", stir(linearize.convert(vision)), "AutoModelForImageClassification")
    write_job(tmp_path, "every-kernel", every_kernel(), "AutoModel")
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    done = run_child(python, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    words = done.stdout.split()
    assert words[: len(jobs)] == list(jobs) and words[-1] == "LinearizedBertModel"


@pytest.mark.parametrize("version", ["4.57.1", "5.0.0", "5.16.9"])
def test_an_older_transformers_is_told_which_one_is_needed(tmp_path, monkeypatch, version):
    """It ended in a bare FileNotFoundError: before 5, only files that the entry itself imports are copied."""
    linearize.save(converted("bert"), tmp_path / "saved")
    files = {path.name: path.read_text() for path in (tmp_path / "saved").glob("*.py")}
    entry = files.pop(f"{ENTRY}.py")
    assert {f"{name}.py" for name in re.findall(r"^\s*from \.(\w+) import", entry, re.M)} == files.keys()
    # Not the object that this file imported: transformers replaces itself.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.raises(ImportError) as refused:
        exec(compile(entry, ENTRY, "exec"), {"__name__": "transformers_modules.saved.entry"})
    assert str(refused.value) == (
        f"got transformers {version}, but this checkpoint needs {TRANSFORMERS} or newer: pip install -U transformers"
    )
    assert f"It needs transformers {TRANSFORMERS} or newer." in (tmp_path / "saved" / "README.md").read_text()


def test_the_oldest_version_is_that_of_the_package():
    assert f'"transformers>={TRANSFORMERS}"' in (CHECKOUT / "pyproject.toml").read_text()
    assert f"transformers {TRANSFORMERS} or newer" in (CHECKOUT / "README.md").read_text()


@pytest.mark.parametrize("kernel", [info.name for info in kernel_infos()])
def test_the_files_of_a_kernel_import_no_other(kernel):
    arguments, near = needs(kernel_info(kernel))
    files = code_files(linearize.plan(_bert(), kernel, kernel_args=arguments, **near))
    imported = {f"{name}.py" for text in files.values() for name in re.findall(r"^\s*from \.(\w+) import", text, re.M)}
    assert len(imported) > 10 and imported <= files.keys()


def test_shipped_code_is_the_package_but_for_import_lines():
    plan = linearize.plan(converted_source := _bert())
    files = code_files(plan)
    assert converted_source.config.model_type == "bert"
    back = re.compile(r"^(\s*from )\.(linearize\w*)( import\b)", re.MULTILINE)
    seen = 0
    for name, text in files.items():
        if name == "modeling_linearize.py":
            continue
        (module,) = [m for m in _runtime_modules() if flat_name(m) == name.removesuffix(".py")]
        restored = back.sub(lambda m: f"{m[1]}{_unflatten(m[2])}{m[3]}", text)
        assert restored == source_of(module)
        seen += 1
    assert seen >= 15
    assert not re.search(r"^\s*(from|import) linearize\b", "".join(files.values()), re.MULTILINE)


def test_only_the_kernels_in_use_travel():
    names = set(code_files(linearize.plan(_bert(), "hedgehog")))
    kernels = {name for name in names if name.startswith("linearize_kernels_")}
    assert kernels == {"linearize_kernels_base.py", "linearize_kernels_hedgehog.py"}
    both = set(code_files(linearize.plan(_bert(), layers={0: "hedgehog", 1: "flexformer_s"})))
    assert both - names == {"linearize_kernels_flexformer_s.py", "linearize_kernels__spectral.py"}
    assert not [name for name in both if re.search(r"surgery|checkpoint|distill|cli|fidelity|data", name)]


def test_a_kernel_from_elsewhere_is_saved_without_code(tmp_path):
    import dataclasses

    from linearize.core.registry import _KERNELS, register_kernel
    from linearize.kernels.hedgehog import Hedgehog

    class Foreign(Hedgehog):
        pass

    register_kernel(dataclasses.replace(kernel_info("hedgehog"), name="foreign", build=Foreign))
    try:
        with pytest.raises(CheckpointError, match="does not travel"):
            code_files(linearize.plan(_bert(), "foreign"))
        with pytest.warns(UserWarning, match="does not travel"):
            linearize.save(linearize.convert(_bert(), "foreign"), tmp_path / "out")
        assert not list((tmp_path / "out").glob("*.py"))
        assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())
        assert (
            transformers.AutoModel.from_pretrained(tmp_path / "out").config.linearize["layers"][0]["kernel"]
            == "foreign"
        )
    finally:
        del _KERNELS["foreign"]


def test_flat_text_changes_import_lines_only():
    text = "import torch\nfrom linearize.ops.state import (\n    EPS,\n)\n\ndef f():\n    from linearize.a.b import c\n"
    want = (
        "import torch\nfrom .linearize_ops_state import (\n    EPS,\n)\n\ndef f():\n    from .linearize_a_b import c\n"
    )
    assert flat_text(text) == want
    assert flat_text("x = 'from linearize.a import b'") == "x = 'from linearize.a import b'"


def _bert():
    from support.tiny import original

    return original("bert")


def _runtime_modules():
    root = Path(linearize.__file__).parent
    paths = [path.relative_to(root.parent).with_suffix("") for path in root.rglob("*.py")]
    return [".".join(path.parts).removesuffix(".__init__") for path in paths]


def _unflatten(flat):
    (module,) = [m for m in _runtime_modules() if flat_name(m) == flat]
    return module
