"""What holds for all ops: they are PyTorch alone, return output and state, and take few arguments."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import torch

import linearize.attention
from linearize import ops

OPS = Path(ops.__file__).parent
ATTENTION = Path(linearize.attention.__file__).parent


def test_ops_import_torch_alone():
    bad = []
    for path in OPS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            own = ("torch", "linearize.ops", "linearize.core.errors")
            standard = ("__future__", "collections", "dataclasses", "heapq", "math", "typing")
            bad += [f"{path.name}: {name}" for name in names if not name.startswith(own + standard)]
            if isinstance(node, ast.Attribute) and node.attr in ("import_module", "__import__"):
                bad.append(f"{path.name}: {node.attr}")
    assert bad == []


@pytest.mark.parametrize("folder", [OPS, ATTENTION], ids=["ops", "attention"])
def test_no_function_has_more_than_eight_parameters(folder):
    bad = []
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            # What runs on a GPU gets pointers, strides and sizes one by one.
            if isinstance(node, ast.FunctionDef) and not any("triton" in ast.unparse(d) for d in node.decorator_list):
                every = node.args
                given = [*every.posonlyargs, *every.args, *every.kwonlyargs, every.vararg, every.kwarg]
                if sum(one is not None and one.arg not in ("self", "ctx") for one in given) > 8:
                    bad.append(f"{path.name}: {node.name}")
    assert bad == []


@pytest.mark.parametrize("name", [name for name in ops.__all__ if name.endswith("attention")])
def test_every_op_returns_output_and_state(name):
    returned = inspect.signature(getattr(ops, name)).return_annotation
    assert returned.startswith("tuple[Tensor, ") and "State" in returned


def test_shapes_of_output_and_state():
    phi = torch.rand(2, 4, 9, 5)
    out, state = ops.causal_attention(phi, phi, torch.randn(2, 4, 9, 3))
    assert out.shape == (2, 4, 9, 3) and state.kv.shape == (2, 4, 5, 4) and state.log_scale.shape == (2, 4)
