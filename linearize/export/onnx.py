"""ONNX: graphs with open sizes, in a folder with one file of weights for all of them.

Every graph is run in onnxruntime at other sizes than it was exported with, and compared with PyTorch.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import onnxruntime
import onnxscript.optimizer
import torch
from onnx_ir.passes import common
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema
from torch import Tensor
from transformers import PreTrainedModel

from linearize.core.errors import UnsupportedModelError
from linearize.export.graphs import AFTER, BATCH, BEFORE, TOKENS, Graph
from linearize.ops import causal
from linearize.ops.state import State

WEIGHTS = "model.onnx_data"
"""Name of the file of weights: readers of the Hub download it with model.onnx."""
LARGE = 1024
"""Bytes of the smallest tensor in that file: smaller ones are shapes and constants that onnxruntime reads early."""
ALIGNED = 4096
"""Weights begin at multiples of this many bytes, so that they can be mapped into memory."""
TOLERANCE = 1e-3
"""Largest difference from PyTorch that counts as rounding, as a share of the output's largest number."""
STEPS = 3
"""Tokens that the check reads one by one."""


@dataclass(frozen=True)
class Checked:
    """A graph compared with PyTorch.

    Attributes:
        difference: largest difference of an output.
        largest: largest magnitude of that output in PyTorch.
    """

    difference: float
    largest: float


DOMAIN, OP = "com.microsoft", "LinearAttention"
"""onnxruntime's own op."""


def check_op() -> None:
    """Check that the installed onnxruntime has its own op.

    Raises:
        UnsupportedModelError: if not.
    """
    if (DOMAIN, OP) not in {(schema.domain, schema.name) for schema in get_all_operator_schema()}:
        raise UnsupportedModelError(
            f"onnxruntime-op: got onnxruntime {onnxruntime.__version__}, expected one with the op {OP}; upgrade it or "
            "leave the option out"
        )


def _one_token(
    phi_q: Tensor, phi_k: Tensor, values: Tensor, scale: Tensor | None, state: State
) -> tuple[Tensor, Tensor, State]:
    """Do what `linearize.ops.causal` does for one token by `OP`: S + k v, or exp(g) S + k v with log-scales."""
    kv, level = state
    rule, gate = "linear", list[Tensor]()
    if scale is not None:
        level = torch.maximum(level, scale[..., 0])
        rule, gate = "gated", [(state.log_scale - level)[:, None]]
        values = values * torch.exp(scale - level[..., None])[..., None]
    heads, (batch, key_heads, _, width) = phi_q.shape[1], kv.shape
    packed = [x.float().transpose(1, 2).flatten(2) for x in (phi_q, phi_k, values)]
    mixed, kv = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{OP}",
        [*packed, kv, *gate],
        {"q_num_heads": heads, "kv_num_heads": key_heads, "update_rule": rule, "scale": 1.0},
        dtypes=[torch.float32, torch.float32],
        shapes=[[batch, 1, heads * width], list(kv.shape)],
        version=1,
    )
    return mixed.unflatten(-1, (heads, width)).transpose(1, 2), level[..., None], State(kv, level)


@contextlib.contextmanager
def _steps_by_op() -> Iterator[None]:
    """Export steps of causal attention as `OP`."""
    names = vars(causal)
    plain = names["_one_token"]
    try:
        names["_one_token"] = _one_token
        yield
    finally:
        names["_one_token"] = plain


def to_onnx(graph: Graph, *, own_op: bool = False) -> onnx_ir.Model:
    """Translate a graph to ONNX.

    Args:
        graph: the graph.
        own_op: whether steps use onnxruntime's own op (`check_op`).

    Raises:
        UnsupportedModelError: if torch.export or torch.onnx cannot translate it.
    """
    with _steps_by_op() if own_op else contextlib.nullcontext():
        program = graph.program()
    levels = {name: logging.getLogger(name).level for name in ("torch.onnx", "onnxscript")}
    try:
        for name in levels:
            logging.getLogger(name).setLevel(logging.ERROR)
        with warnings.catch_warnings(action="ignore"):
            exported: Any = torch.onnx.export(program, dynamo=True, optimize=False, verbose=False)
            # Compute constants, and each repeated operation once. The optimizer does so last, and before that compares
            # all pairs of nodes, which takes minutes for deep models.
            common.InlinePass()(exported.model)
            onnxscript.optimizer.fold_constants(exported.model)
            common.RemoveUnusedNodesPass()(exported.model)
            common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(exported.model)
            common.CommonSubexpressionEliminationPass()(exported.model)
            exported.optimize()
    except Exception as error:
        cause = " ".join(str(error.__cause__ or error).split())
        raise UnsupportedModelError(
            f"{graph.name}: torch.onnx has no translation for something in this model ({cause[:300]}); choose another "
            "kernel"
        ) from error
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
    model: onnx_ir.Model = exported.model
    # Only now: before, an input that is returned unchanged is one value with the output.
    for value, name in zip((*model.graph.inputs, *model.graph.outputs), (*graph.inputs, *graph.outputs), strict=True):
        value.name = name
    # The open sizes get the names of the graph, in all shapes, instead of those of torch.export (s26, s95 + 1).
    inputs = [(value.shape, graph.sizes[str(value.name)]) for value in model.graph.inputs]
    names = {str(shape[axis]): name for shape, open_ in inputs if shape for axis, name in open_.items()}
    for value in (*model.graph.inputs, *(output for node in model.graph for output in node.outputs)):
        if value.shape is not None:
            sizes = [re.sub(r"\w+", lambda word: names.get(word[0], word[0]), str(size)) for size in value.shape]
            value.shape = onnx_ir.Shape([int(size) if size.isdecimal() else size for size in sizes])
    return model


def write(models: Mapping[str, onnx_ir.Model], folder: Path) -> None:
    """Write graphs as `<name>.onnx`, and their weights, each once, as `WEIGHTS` into the same folder."""
    places: dict[tuple[str, str], tuple[int, int]] = {}
    with open(folder / WEIGHTS, "wb") as file:
        for model in models.values():
            for value in model.graph.initializers.values():
                tensor = value.const_value
                if tensor is None or tensor.nbytes < LARGE:
                    continue
                data = tensor.tobytes()
                key = hashlib.sha256(data).hexdigest(), str(tensor.dtype)
                if key not in places:
                    file.write(b"\0" * (-file.tell() % ALIGNED))
                    places[key] = file.tell(), len(data)
                    file.write(data)
                value.const_value = onnx_ir.ExternalTensor(
                    WEIGHTS,
                    *places[key],
                    tensor.dtype,
                    shape=onnx_ir.Shape(tensor.shape.numpy()),
                    name=str(value.name),
                    base_dir=folder,
                )
    for name, model in models.items():
        onnx_ir.save(model, folder / f"{name}.onnx")


def session(file: Path, threads: int | None = None) -> onnxruntime.InferenceSession:
    """Open a graph in onnxruntime on the CPU.

    Args:
        file: the graph; its weights are in the same folder.
        threads: CPU threads; None leaves the choice to onnxruntime.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def run(opened: onnxruntime.InferenceSession, inputs: Mapping[str, Tensor | np.ndarray]) -> dict[str, np.ndarray]:
    """Run a graph on inputs by name and return its outputs by name; inputs that it lacks are left out."""
    known = {value.name for value in opened.get_inputs()}
    feed = {name: x.numpy() if torch.is_tensor(x) else x for name, x in inputs.items() if name in known}
    names = [value.name for value in opened.get_outputs()]
    return dict(zip(names, opened.run(names, feed), strict=True))


def check(graphs: list[Graph], model: PreTrainedModel, folder: Path, tokens: int) -> dict[str, Checked]:
    """Run written graphs at other sizes, with padding, and compare them with PyTorch.

    A model that generates text reads all tokens but the last `STEPS` as a prompt, then those one by one; the outputs of
    every step are compared with one pass of the model over the whole text.

    Args:
        graphs: the graphs before they were written.
        model: the model.
        folder: the folder that they were written to.
        tokens: tokens of a row.

    Raises:
        UnsupportedModelError: if one differs by more than rounding.
    """
    opened = {graph.name: session(folder / f"{graph.name}.onnx") for graph in graphs}
    inputs = resized(graphs[0], {BATCH: 3, TOKENS: tokens})
    checked = {graphs[0].name: _compare(graphs[0], inputs, run(opened[graphs[0].name], inputs))}
    if len(graphs) > 1:
        ids, mask, output = inputs["input_ids"], inputs["attention_mask"], graphs[0].outputs[0]
        with torch.no_grad():
            positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
            whole = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, return_dict=True)
        outputs = run(opened["model"], {"input_ids": ids[:, :-STEPS], "attention_mask": mask[:, :-STEPS]})
        pairs = [(torch.from_numpy(outputs[output][:, -1]), whole[output][:, -STEPS - 1])]
        for step in range(-STEPS, 0):
            outputs = run(opened["step"], {"input_ids": ids[:, step, None], **state_of(outputs)})
            pairs.append((torch.from_numpy(outputs[output][:, -1]), whole[output][:, step]))
        checked["step"] = _worst(pairs)
    for name, result in checked.items():
        # NaN in PyTorch counts as a difference.
        if not result.difference <= TOLERANCE * result.largest:
            raise UnsupportedModelError(
                f"{name}.onnx differs from PyTorch by {result.difference:.1e} of {result.largest:.1e} in onnxruntime, "
                f"expected at most {TOLERANCE} of that; nothing was kept: choose another kernel"
            )
    return checked


def resized(graph: Graph, sizes: Mapping[str, int], *, padded: bool = True) -> dict[str, Tensor]:
    """Return a graph's example inputs at other sizes; with `padded`, the first row gets padding on the left."""
    inputs = {}
    for name, x in graph.inputs.items():
        for axis, size in graph.sizes[name].items():
            wanted = sizes[size]
            repeats = [-(-wanted // x.shape[axis]) if i == axis else 1 for i in range(x.ndim)]
            x = x.repeat(repeats).narrow(axis, 0, wanted)
        inputs[name] = x.clone()
    mask = inputs.get("attention_mask")
    if mask is not None and padded:
        mask[0, : mask.shape[1] // 3] = 0
    return inputs


def _compare(graph: Graph, inputs: dict[str, Tensor], outputs: Mapping[str, np.ndarray]) -> Checked:
    """Return the difference of the output that differs most; values at padding do not count."""
    mask = inputs.get("attention_mask")
    real = None if mask is None else mask.bool()
    pairs = []
    for name, expected in graph.run(inputs).items():
        got = torch.from_numpy(outputs[name])
        if real is not None and expected.shape[:2] == real.shape and not name.startswith(AFTER):
            expected, got = expected[real], got[real]
        elif expected.ndim > 2 and real is not None and expected.shape[2] == real.shape[1]:
            expected, got = (x.movedim(2, 1)[real] for x in (expected, got))
        pairs.append((got, expected))
    return _worst(pairs)


def state_of(outputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the state in a graph's outputs under the names of the next step's inputs."""
    return {BEFORE + name.removeprefix(AFTER): x for name, x in outputs.items() if name.startswith(AFTER)}


def _worst(pairs: list[tuple[Tensor, Tensor]]) -> Checked:
    differences = []
    for got, expected in pairs:
        got, expected = got.double(), expected.double()
        difference = (got - expected).abs().nan_to_num(nan=torch.inf, posinf=torch.inf).max().item()
        differences.append(Checked(difference, expected.abs().max().item()))
    return max(differences, key=lambda checked: checked.difference / max(checked.largest, 1e-30))
