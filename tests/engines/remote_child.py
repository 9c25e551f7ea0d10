"""Runs where linearize is not installed: generates from, or embeds, the inputs that `compare.py` left in a folder.

Usage: python remote_child.py FOLDER, which holds checkpoints, and their inputs in `NAME.inputs`.
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)

import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

assert importlib.util.find_spec("linearize") is None, "linearize is installed here"

root = Path(sys.argv[1])
for name, (head, options) in json.loads((root / "jobs.json").read_text()).items():
    inputs = load_file(root / f"{name}.inputs")
    model = getattr(transformers, head).from_pretrained(root / name, trust_remote_code=True).eval()
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    with torch.no_grad():
        if options:
            out = model.generate(**inputs, **options, return_dict_in_generate=True, output_logits=True)
            found = {"sequences": out.sequences, "values": torch.stack(out.logits, dim=1)}
        else:
            found = {"values": model(**inputs).last_hidden_state}
    save_file({key: x.contiguous() for key, x in found.items()}, root / f"{name}.found")
