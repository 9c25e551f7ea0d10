"""Runs where linearize is not installed: loads every folder with its own code and compares with the package's numbers.

Usage: python standalone_child.py FOLDER PACKAGE. The sub-folders of FOLDER hold a checkpoint each and
`expected.safetensors`; the last is loaded once more with the package, which lies in the folder PACKAGE.
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)

import transformers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import pipeline  # noqa: E402

assert importlib.util.find_spec("linearize") is None, "linearize is installed here"


def outputs(model, inputs):
    with torch.no_grad():
        return [t for t in model(**inputs).to_tuple() if torch.is_tensor(t)]


def check(folder, head, task, rounds):
    stored = load_file(folder / "expected.safetensors")
    inputs = {key[3:]: value for key, value in stored.items() if key.startswith("in.")}
    expected = [stored[key] for key in sorted(stored) if key.startswith("out.")]
    auto = getattr(transformers, head)
    model = auto.from_pretrained(folder, trust_remote_code=True).eval()
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    got = outputs(model, inputs)
    assert len(got) == len(expected)
    assert all(torch.equal(one, two) for one, two in zip(got, expected, strict=True)), folder.name
    if "generated" in stored:
        made = model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=8)
        assert torch.equal(made, stored["generated"])
    # In memory it has the original's names.
    values = json.loads((folder / "config.json").read_text())
    saved, kind = values["architectures"][0], values["linearize"]["base_model_type"]
    assert values["model_type"] == model.config.to_dict()["model_type"] == "linearize"
    assert model.config.model_type == kind and type(model.config) is not transformers.CONFIG_MAPPING[kind]
    assert model.config.architectures == [type(model).__name__] == [saved.removeprefix("Linearized")]
    if "generated" in stored:
        import peft

        tuned = peft.get_peft_model(auto.from_pretrained(folder, trust_remote_code=True), peft.LoraConfig())
        assert tuned.targeted_module_names
    # A class of transformers named outright does not run it as softmax: it runs our code, if that is allowed.
    named = getattr(transformers, saved.removeprefix("Linearized"))
    try:
        named.from_pretrained(folder)
    except Exception as error:
        assert "linear attention" in str(error) and "load it with an Auto class" in str(error)
    else:
        raise AssertionError("loaded as softmax")
    again = named.from_pretrained(folder, trust_remote_code=True).eval()
    assert type(again) is type(model)
    assert all(torch.equal(one, two) for one, two in zip(outputs(again, inputs), expected, strict=True))
    # A second and a third round, each from the one before.
    targets = (folder / "again", folder / "again" / "and-again") if rounds else ()
    for target in targets:
        model.save_pretrained(target)
        names = {file.name for file in target.glob("*.py")}
        assert names == {file.name for file in folder.glob("*.py")}
        assert json.loads((target / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
        model = auto.from_pretrained(target, trust_remote_code=True).eval()
        assert all(torch.equal(one, two) for one, two in zip(outputs(model, inputs), expected, strict=True))
    if task == "image-classification":
        from PIL import Image

        assert pipeline(task, model=str(folder), trust_remote_code=True)(Image.new("RGB", (40, 40)))[0]["score"] > 0
    elif task:
        assert pipeline(task, model=str(folder), trust_remote_code=True)("a [MASK] dog")


def main(root, package):
    jobs = json.loads((root / "jobs.json").read_text())
    for name, (head, task, rounds) in jobs.items():
        check(root / name, head, task, rounds)
        print(name)
    for more in ({}, {"trust_remote_code": False}):
        try:
            transformers.AutoModel.from_pretrained(root / name, **more)
        except ValueError as error:
            assert "trust_remote_code=True" in str(error)
        else:
            raise AssertionError("loaded without trust")
    # The import alone is enough where the package is.
    sys.path.append(package)
    import linearize  # noqa: F401

    print(type(transformers.AutoModel.from_pretrained(root / name)).__qualname__)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
