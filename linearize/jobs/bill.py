"""`convert --dry-run --device-memory SIZE`: how much memory each stage needs per device, from the model's config alone.

No weight is read: the model is built without memory, and its trial run sees zeros. Counted are, per device:

    stage one:             weights + 20 K + a pass of one block
    with FSDP 2:           (weights of the body) / N + embeddings + two gathered blocks + 20 K + a pass
    quantised:             the body, with 0.5625 or 1 byte per number of a linear map, + one such map + 20 K + a pass
    streamed:              embeddings + one block + 4 K + 16 K of a layer + a pass; or embeddings + head, if larger
    alignment, stage two:  weights + the teacher's copy of what is trained + what training needs

Weights have the checkpoint's dtype. K are the kernels, in fp32: 4 bytes for the weight, and 16 for its gradient, two
moments and the best copy. The alignment also keeps a copy from its start: 20 bytes for each weight that it trains, or
22 in half precision, which is held in fp32 and rounded for a pass. The pass of one block counts what is alive at once:
hidden states, the wider of MLP and attention, and the features of all heads with their gradients. The alignment and
stage two do not count activations, which depend on gradient checkpointing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from linearize.attention.cache import text_config
from linearize.attention.layer import LinearAttention
from linearize.checkpoint.loading import MODALITIES, Loaded, empty_model
from linearize.core.errors import ConfigError, UnsupportedModelError
from linearize.core.registry import Values, make_config
from linearize.fidelity.teacher import body_of
from linearize.jobs.config import ConvertJob
from linearize.jobs.convert import make_plan
from linearize.jobs.presets import AUTO
from linearize.modeling.offload import block_list
from linearize.modeling.plan import Plan
from linearize.modeling.weights import body_prefix
from linearize.training.adapters import LoraConfig
from linearize.training.stage_one.loop import within
from linearize.training.stage_one.loss import CPU_NUMBERS, GPU_NUMBERS

FP32 = 4
STAGE_ONE, TUNED, ALIGNED, ALIGNED_HALF = 16, 12, 20, 22
"""Bytes that a stage needs for each weight that it trains, besides the weight; the last one for half precision."""
QUANTIZED = {"4bit": 0.5 + FP32 / 64, "8bit": 1}
"""Bytes per number of quantised weights; in 4 bits, 64 numbers share a scale."""
BLOCK, ATTENTION = re.compile(r".*?\.\d+"), re.compile(r".*?\.\d+(\.[^.]+)?")
"""The name of a converted attention's block, and of the block's part with the attention."""
MATRICES = 5
"""Matrices of attention weights that the loss of stage one holds at once."""
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_size(text: str) -> int:
    """Read a number of bytes such as 80GB or 24GiB.

    Raises:
        ConfigError: if it cannot be read.
    """
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)\s*([KMGT]?I?)B", text.strip().upper())
    if match is None or match[2] not in UNITS or not float(match[1]):
        raise ConfigError(f"device-memory: got {text!r}, expected a size such as 80GB or 24GiB")
    return int(float(match[1]) * UNITS[match[2]])


@dataclass(frozen=True)
class StageMemory:
    """What one way to run a stage needs.

    Attributes:
        stage: its name.
        bytes: peak bytes per device.
        launch: the command.
        activations: whether `bytes` includes them.
    """

    stage: str
    bytes: int
    launch: str
    activations: bool = False


@dataclass(frozen=True)
class MemoryBill:
    """What the stages of a conversion need per device.

    Attributes:
        model: the model's name.
        parameters: its parameters.
        weights: bytes of its weights.
        kernels: parameters of the kernels.
        rows: rows per batch.
        tokens: tokens per row.
        devices: number of devices.
        memory: bytes of each device.
        stages: what each stage needs.
    """

    model: str
    parameters: int
    weights: int
    kernels: int
    rows: int
    tokens: int
    devices: int
    memory: int | None
    stages: tuple[StageMemory, ...]

    @property
    def fits(self) -> bool:
        """Whether stage one fits in at least one way."""
        first = [stage.bytes for stage in self.stages if stage.stage.startswith("stage one")]
        return self.memory is None or min(first) <= self.memory

    def lines(self) -> list[str]:
        """Return the bill as lines of text."""
        lines = [
            f"{self.model}: {self.parameters / 1e9:,.2f}B parameters in {_gb(self.weights)}, kernels with "
            f"{self.kernels / 1e6:,.1f}M; batches of {self.rows} rows of {self.tokens:,} tokens"
        ]
        for stage in self.stages:
            verdict = "" if self.memory is None else (" fits" if stage.bytes <= self.memory else " does not fit")
            least = "" if stage.activations else " and activations"
            lines += [f"{stage.stage}: {_gb(stage.bytes)}{least} per device{verdict and ',' + verdict}"]
            lines += [f"    {stage.launch}"]
        if self.memory is not None:
            where = f"{self.devices} device{'s' * (self.devices > 1)} of {_gb(self.memory)}"
            lines.append(f"Stage one fits on {where}." if self.fits else f"It does not fit: stage one on {where}.")
        return lines

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        return asdict(self) | {"fits": self.fits}


def _gb(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e9:,.3f} GB"


class _Zeros(TorchFunctionMode):
    """Makes linear maps return zeros: the trial run of a plan needs shapes and masks only."""

    def __torch_function__(
        self, function: Callable[..., object], types: object, args: tuple[Any, ...] = (), kwargs: Values | None = None
    ) -> object:
        if function is nn.functional.linear:
            x, weight = args[:2]
            return x.new_zeros(*x.shape[:-1], weight.shape[0])
        return function(*args, **(kwargs or {}))


def memory_bill(job: ConvertJob, device: str = "cuda", devices: int = 1, memory: int | None = None) -> MemoryBill:
    """Count the memory of a conversion from the model's config.json alone.

    Args:
        job: the conversion.
        device: the type of the devices.
        devices: number of devices.
        memory: bytes of each.

    Raises:
        ConfigError: if the plan cannot be made without the weights.
        LinearizeError: a subclass of it, for a model that cannot be converted.
    """
    if job.kernel == AUTO or job.chooses_windows or job.chooses_heads:
        raise ConfigError(
            "device-memory: got a plan that is chosen by training, expected a kernel, a number to --window and heads "
            "by name: without weights nothing can be chosen"
        )
    model = empty_model(job.model, task=job.task, revision=job.revision)
    sizes = {name: tensor.nbytes for name, tensor in _weights(model)}
    counted = sum(tensor.numel() for _, tensor in _weights(model))
    try:
        blocks = block_list(model, "device-memory")
    except UnsupportedModelError:
        blocks = ""
    tied = tuple(getattr(model, "all_tied_weights_keys", None) or ())
    _fill(model)
    loaded = Loaded(model.eval(), None, MODALITIES.get(model.main_input_name, "other"), job.model)
    with _Zeros():
        _, plan, _ = make_plan(job, loaded)
    tokens, rows = within(loaded, job.distill_length or within(loaded)), job.data.batch_size
    with torch.device("meta"):
        kernels = [sum(p.numel() for p in LinearAttention(*layer.mixer).parameters()) for layer in plan.converted]
    body = {key: size for key, size in sizes.items() if key.startswith(body_prefix(model))}
    names = [f"{blocks}.{name}." for name, _ in model.get_submodule(blocks).named_children()] if blocks else []
    in_blocks = [sum(size for key, size in sizes.items() if key.startswith(name)) for name in names]
    outside = sum(body.values()) - sum(in_blocks)
    whole, learned = sum(sizes.values()), sum(kernels)
    activations = _pass_of_block(model, plan, blocks, rows * tokens, device) + (FP32 + STAGE_ONE) * learned
    alone = f"linearize convert {job.model} --align-steps 0"
    stages = [StageMemory("stage one", whole + activations, alone, True)]
    if devices > 1:
        needed = sum(body.values()) // devices + outside + 2 * max(in_blocks, default=0) + activations
        launch = f"accelerate launch --use_fsdp --fsdp_version 2 --num_processes {devices} --no_python {alone}"
        stages.append(StageMemory("stage one, FSDP 2", needed, launch, True))
    maps = [module.weight for module in body_of(model).modules() if type(module) in (nn.Linear, Conv1D)]
    for how, width in QUANTIZED.items() if maps else ():
        needed = sum(body.values()) + activations + max(weight.nbytes for weight in maps)
        needed += sum(round(width * weight.numel()) - weight.nbytes for weight in maps)
        stages.append(StageMemory(f"stage one, {how}", needed, f"{alone} --quantize-frozen {how}", True))
    if blocks:
        head = sum(size for key, size in sizes.items() if key not in body and key not in tied)
        needed = outside + sum(size for key, size in sizes.items() if key not in body) - head
        # The head is read only for the check of the conversion.
        needed += max(max(in_blocks) + activations - STAGE_ONE * (learned - max(kernels)), head)
        stages.append(
            StageMemory("stage one, streamed", needed, f"linearize convert {job.model} --stream-blocks", True)
        )
    stages += _later_stages(model, plan, whole, learned, str(job.target()))
    return MemoryBill(job.model, counted, whole, learned, rows, tokens, devices, memory, tuple(stages))


def _later_stages(model: PreTrainedModel, plan: Plan, whole: int, kernels: int, target: str) -> Iterator[StageMemory]:
    """Return what the alignment and stage two need without activations, for `whole` bytes of weights."""
    dtype = next((x.dtype for x in model.parameters() if x.is_floating_point()), torch.float32)
    per_weight = ALIGNED if dtype.itemsize >= FP32 else ALIGNED_HALF
    parts, blocks = (_inside(model, plan, pattern) for pattern in (ATTENTION, BLOCK))
    maps = [module for part in parts for module in part.modules() if isinstance(module, nn.Linear)]
    low_rank = sum(LoraConfig().r * (module.in_features + module.out_features) for module in maps)
    trained_modules: dict[str, list[nn.Module]] = {"kernels": [], "lora": [], "attention": parts, "blocks": blocks}
    for trained, modules in trained_modules.items():
        weights = [parameter for module in modules for parameter in module.parameters()]
        needed = whole + (FP32 + ALIGNED) * (kernels + (low_rank if trained == "lora" else 0))
        needed += sum(weight.nbytes + per_weight * weight.numel() for weight in weights)
        if trained != "kernels":
            # Otherwise the student is its own teacher.
            needed += FP32 * kernels
        yield StageMemory(f"alignment, --train {trained}", needed, f"linearize align {target} --train {trained}")
    launch = f"linearize finetune {target} --task TASK --lora r={LoraConfig().r} --gradient-checkpointing"
    yield StageMemory("stage two, --lora", whole + (FP32 + TUNED) * (kernels + low_rank), launch)


def _weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the parameters and the buffers that are saved, by name; tied ones once."""
    saved = set(model.state_dict())
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def _fill(model: nn.Module) -> None:
    """Give a model without weights zeros that need no memory."""
    for module in model.modules():
        own: Any
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None:
                    zeros = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
                    own[name] = nn.Parameter(zeros, requires_grad=False) if isinstance(tensor, nn.Parameter) else zeros


def _inside(model: PreTrainedModel, plan: Plan, pattern: re.Pattern[str]) -> list[nn.Module]:
    """Return the parts around the converted attentions whose names match."""
    found = {layer.module: pattern.match(layer.module) for layer in plan.converted}
    names = dict.fromkeys(match[0] if match else name for name, match in found.items())
    return [model.base_model.get_submodule(name) for name in names]


def _pass_of_block(model: PreTrainedModel, plan: Plan, blocks: str, tokens: int, device: str) -> int:
    """Return the bytes of the largest part of a block's pass in stage one."""
    width = model.dtype.itemsize
    config = text_config(model.config)
    hidden = getattr(config, "hidden_size", None) or getattr(config, "n_embd", None) or 1
    part = model.get_submodule(blocks) if blocks else model
    widest = max((m.out_features for m in part.modules() if isinstance(m, nn.Linear)), default=hidden)
    most = 0
    for layer in plan.converted:
        shape, kernel = layer.shape, LinearAttention(*layer.mixer[:2], layer.shape).mixer.info
        heads, size = shape.heads + shape.key_heads, shape.head_dim
        dim = kernel.feature_dim
        features = size if dim is None else dim(make_config(kernel, layer.arguments), size)
        projected = 2 * (heads + shape.key_heads) * size * width
        # What the map reads, features twice for the graph, their gradient, and the gradient inside the map.
        most = max(most, projected + heads * FP32 * (size + 4 * features))
    matrices = MATRICES * FP32 * (CPU_NUMBERS if device == "cpu" else GPU_NUMBERS)
    return tokens * (hidden * (2 * width + 2 * FP32) + max(most, 3 * widest * width)) + matrices
