"""Copy a converted language model with the weight of its kernels set to 0, to train the copy as a control.

    python scripts/silence_kernel.py DIR COPY

Windows, sinks, exact keys and softmax heads stay, and the key scales still choose the exact keys. The log-scales of the
queries become -10,000, so outside the window every weight is exactly 0 and gets no gradient.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import linearize
from linearize.attention.interface import linear_attentions


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="converted checkpoint with windows and learned scales")
    parser.add_argument("copy", help="folder to make")
    return parser.parse_args(words)


def silence(model: PreTrainedModel) -> None:
    """Set the weight of all kernels to 0, in place; exit with a message if a kernel has no query scales."""
    for name, layer in linear_attentions(model).items():
        mixer: Any = layer.mixer
        if mixer.info.name == "none":
            continue
        if getattr(mixer, "query_scale", None) is None:
            sys.exit(f"{name}: got a kernel without query scales, expected one with a window and scale=linear")
        with torch.no_grad():
            mixer.query_scale.weight.zero_()
            mixer.query_scale.bias.fill_(-1e4)


def main(words: list[str] | None = None) -> None:
    """Write the copy."""
    args = parse(words)
    model = AutoModelForCausalLM.from_pretrained(args.folder)
    silence(model)
    linearize.save(model, args.copy, processor=AutoTokenizer.from_pretrained(args.folder))


if __name__ == "__main__":
    main()
