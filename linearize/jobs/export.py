"""`export`: write a converted checkpoint as graphs for other programs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from linearize.attention.interface import linear_attentions
from linearize.attention.parts import HEADS, NEAR, SCALED, check_parts
from linearize.checkpoint.loading import load_converted
from linearize.checkpoint.output import atomic_folder, claim
from linearize.checkpoint.save import write_files
from linearize.conversion.positions import text_length
from linearize.core.errors import UnsupportedModelError
from linearize.core.options import name_of
from linearize.jobs.config import ExportJob
from linearize.jobs.events import Callback, Noted, Started, ignore

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from linearize.export.onnx import Checked

RECORD = "export.json"
"""Output file that describes the inputs and outputs of the graphs."""
CHECKED_TOKENS = 150
"""The maximum number of tokens in the rows for checking an export: more than one chunk of the causal op."""


@dataclass(frozen=True)
class ExportResult:
    """The result of an export.

    Attributes:
        output: the folder.
        graphs: inputs and outputs of each graph, by file name; dynamic sizes have names.
        checked: difference of each graph from PyTorch.
    """

    output: str
    graphs: dict[str, dict[str, object]]
    checked: dict[str, Checked]


def export_checkpoint(job: ExportJob, on_event: Callback = ignore) -> ExportResult:
    """Write a converted checkpoint as ONNX, compare it with PyTorch in onnxruntime, and keep it only if they agree.

    The folder gets `model.onnx`, for causal models also `step.onnx` (`linearize.export.graphs`), one file with the
    weights of both in fp32, the tokenizer or image processor, and `export.json`, which describes the graphs. That of a
    text encoder also gets the original's config.json and the files of a sentence embedder, which servers read.

    Raises:
        LinearizeError: a subclass of it, for everything the user can correct.
    """
    # Imported here, so that the error about a missing package names the extra to install.
    from linearize.export import onnx
    from linearize.export.graphs import graphs_of

    if job.onnxruntime_op:
        onnx.check_op()
    with claim(job.output, overwrite=job.overwrite, sources=[job.model]):
        loaded = load_converted(job.model)
        model = loaded.model.float().eval()
        # None if the inputs are not tokens, or their length is not limited.
        longest = text_length(model) if model.main_input_name == "input_ids" else None
        for layer in linear_attentions(model).values():
            check_parts(layer.hybrid, NEAR | SCALED | HEADS, "export", UnsupportedModelError)
        graphs = graphs_of(model, last_logits=job.last_logits)
        if job.last_logits and len(graphs) == 1:
            raise UnsupportedModelError(
                f"last-logits: {job.model!r} decodes nothing, so its one graph has all outputs; leave the option out"
            )
        models = {}
        for graph in graphs:
            on_event(Started(f"writing {graph.name}.onnx"))
            models[graph.name] = onnx.to_onnx(graph, own_op=job.onnxruntime_op)
        with atomic_folder(job.output, overwrite=job.overwrite) as folder:
            onnx.write(models, folder)
            on_event(Started("comparing with PyTorch in onnxruntime"))
            checked = onnx.check(graphs, model, folder, min(CHECKED_TOKENS, longest or CHECKED_TOKENS))
            for name, check in checked.items():
                on_event(Noted(f"{name}.onnx differs from PyTorch by {check.difference:.1e} of {check.largest:.1e}"))
            described: dict[str, dict[str, object]] = {}
            for graph in graphs:
                inputs = {
                    name: {
                        "dtype": str(x.dtype).removeprefix("torch."),
                        "shape": [graph.sizes[name].get(axis, size) for axis, size in enumerate(x.shape)],
                    }
                    for name, x in graph.inputs.items()
                }
                described[f"{graph.name}.onnx"] = {"inputs": inputs, "outputs": list(graph.outputs)}
            record = {"model": name_of(job.model), "weights": onnx.WEIGHTS, "graphs": described}
            (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            if len(graphs) == 1 and model.main_input_name == "input_ids":
                files: dict[str, str | bytes] = {**loaded.embedder, "config.json": _config(model)}
                write_files(folder, files)
            if loaded.processor is not None:
                loaded.processor.save_pretrained(folder)
        return ExportResult(job.output, described, checked)


def _config(model: PreTrainedModel) -> str:
    """Return config.json with the original's names.

    A checkpoint's has names of its own, so that nothing loads it as softmax; here are no weights that could be loaded.
    """
    from transformers import PreTrainedConfig

    values = PreTrainedConfig.to_dict(model.config) | {"architectures": [type(model).__name__]}
    values = {key: value for key, value in values.items() if key not in ("linearize", "auto_map")}
    return json.dumps(values, indent=2, sort_keys=True) + "\n"
