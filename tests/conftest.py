"""Every test runs offline and on one thread: results must not depend on the network or on the machine's load."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The ops in PyTorch are what is tested, whatever was compiled here, unless asked for; tests/native turns the other on.
os.environ.setdefault("LINEARIZE_NATIVE", "0")
# readline, which pytest loads, sets the size of a screen that is not there; tests that want one say so.
os.environ.pop("COLUMNS", None)
os.environ.pop("LINES", None)

import torch

torch.set_num_threads(int(os.environ.get("LINEARIZE_TEST_THREADS", "1")))

pytest_plugins = ["support.native_op", "support.sampling", "pytester"]
