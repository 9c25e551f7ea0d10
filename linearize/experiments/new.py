"""A recipe to start from: every key, explained, with values that run on a CPU."""

from __future__ import annotations

from pathlib import Path

from linearize.errors import ConfigError
from linearize.experiments.recipe import SUFFIXES
from linearize.experiments.schema import FLOWS

TEMPLATE = """\
# linearize run {name} --output runs/{stem}      (--dry-run checks it and lists its cells; docs/recipes.md has all keys)
summary: one line about this experiment
# finetuned: tune the softmax model, convert it, distil and align it, tune it again. Others: {others}.
flow: finetuned

# Rows of the table. softmax is the original; a section gives a row another name, arguments or a window.
kernels:
  - softmax
  - hedgehog
  - {{name: flexformer_n, label: flexformer_n F128, args: {{frequencies: 64}}}}

# Columns. A task of the package (cola, sst2, mrpc, stsb, text-classification ...), or your own name with what differs.
tasks:
  cola: {{}}
  # mine: {{task: text-classification, dataset: reviews.jsonl, columns: [text], label: label, finetune: {{epochs: 5}}}}

# The whole table once per seed; `linearize results` gives mean and deviation.
seeds: [0, 1, 2]

# A name on the Hub or a folder.
model: {{name: bert-base-uncased}}

# A folder with one folder per task (or one data set); without it the tasks' own data sets on the Hub.
# data: ./glue

# The options of `linearize finetune`, `distill` and `align`, under their names with underscores.
rows: {{max_length: 128}}
teacher: {{learning_rate: 5.0e-5, batch_size: 16, epochs: 3}}
distil: {{steps: 300, batch_size: 32, eval_every: 50}}
align: {{steps: 120, batch_size: 16, eval_every: 30}}
finetune: {{teacher: true, learning_rate: 5.0e-5, batch_size: 16, epochs: 2}}

# What a paper has, to stand beside ours: figures by row and task, in points.
# paper: {{title: Hedgehog, url: "https://arxiv.org/abs/2402.04347", table: table 2}}
# figures: {{softmax: {{cola: 58.8}}}}
"""


def new_recipe(file: str) -> Path:
    """Write a recipe to start from; nothing is replaced.

    Raises:
        ConfigError: if the file has no name of a YAML file, is there already, or cannot be written.
    """
    path = Path(file).expanduser()
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--new: got {file!r}, expected the name of a .yaml file")
    text = TEMPLATE.format(name=file, stem=path.stem, others=", ".join(FLOWS[1:]))
    try:
        with path.open("x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise ConfigError(f"--new: {file!r} is there already; choose another name") from None
    except OSError as error:
        raise ConfigError(f"--new: {file!r} cannot be written ({error.strerror}); choose another folder") from error
    return path
