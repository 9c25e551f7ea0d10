"""What is tried with one model: plan, conversion, reload, gradients, padding, generation; the first failure ends it."""

from __future__ import annotations

import importlib
import inspect
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from architectures.overrides import CLASS, INPUTS, OVERRIDES
from architectures.shrink import main_classes, tiny_config, tiny_model
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

import linearize
from linearize.attention.interface import linear_attentions
from linearize.conversion.attentions import trial_runs
from linearize.conversion.check import record
from linearize.conversion.inputs import candidates
from linearize.conversion.layers import ConversionConfig
from linearize.conversion.plan import convert_model
from linearize.core.errors import LinearizeError, UnsupportedModelError
from linearize.modeling.plan import Plan

WORKS, REFUSED, FAILED, UNTRIED = "works", "refused", "failed", "not tried"


@dataclass
class Result:
    """How it went.

    Attributes:
        name: of the architecture: its folder in transformers, or timm's name of a model.
        model: class that was tried.
        status: one of the four above.
        step: at which it ended.
        message: why.
        kept: how many attentions stay softmax beside those that were converted.
        converted: how many were.
    """

    name: str
    model: str = ""
    status: str = UNTRIED
    step: str = ""
    message: str = ""
    converted: int = 0
    kept: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def build(module_name: str) -> PreTrainedModel:
    """Build a tiny model of a modeling file: the first of its classes that can be built.

    Raises:
        ValueError: saying why none can.
    """
    module = importlib.import_module(f"transformers.models.{module_name}")
    special = OVERRIDES.get(module_name.partition(".")[0], {})
    values = {key: x for key, x in special.items() if key != CLASS}
    reasons = []
    classes = [getattr(module, special[CLASS])] if CLASS in special else main_classes(module)[:6]
    for cls in classes:
        for filled in (False, True):
            try:
                return _runs(tiny_model(cls, tiny_config(cls.config_class, filled, values)))
            except Exception as error:
                reasons.append(f"{cls.__name__}: {type(error).__name__}: {_line(error)}")
    raise ValueError(reasons[0] if reasons else "no model classes")


def _runs(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model that runs on text alone where it takes nothing else; sizes that do not fit show only then.

    Raises:
        Exception: if it does not run.
    """
    names = set(inspect.signature(model.forward).parameters)
    if "input_ids" in names and not any(
        name.startswith(("pixel_", "input_f", "input_v", "decoder_")) for name in names
    ):
        failures = []
        try:
            batches = list(candidates(model))
        except UnsupportedModelError:
            # Nothing can be made up for it, so that parts of it are run by themselves.
            return model
        for made in batches:
            try:
                with torch.no_grad():
                    model(**made)
                return model
            except Exception as error:
                failures.append(error)
        raise failures[0]
    return model


def example_inputs(module_name: str) -> dict[str, Tensor] | None:
    """Return the example inputs of a modeling file that has to be handed some."""
    draw = torch.Generator().manual_seed(0)
    shapes = INPUTS.get(module_name.partition(".")[0])
    return shapes and {key: torch.randn(shape, generator=draw) for key, shape in shapes.items()}


def try_model(name: str, make: Callable[[], Any], inputs: dict[str, Tensor] | None = None) -> Result:
    """Try everything with a model that `make` builds; `inputs` are handed over where it is asked for them."""
    result = Result(name)
    try:
        model = make()
    except Exception as error:
        result.message = _line(error)
        return result
    result.model = type(model).__name__
    trial = _Trial(model, inputs, make)
    for step in (
        trial.plan,
        trial.convert,
        trial.forward,
        trial.reload,
        trial.gradients,
        trial.padding,
        trial.generation,
    ):
        result.step = step.__name__
        try:
            step()
        except LinearizeError as error:
            early = step.__name__ in ("plan", "convert")
            result.status, result.message = (REFUSED if early else FAILED), _line(error)
            return result
        except Exception as error:
            result.status, result.message = FAILED, f"{type(error).__name__}: {_line(error)}"
            return result
        finally:
            result.converted, result.kept = trial.counts
    result.status, result.step, result.message = WORKS, "", trial.note
    return result


def _called(model: PreTrainedModel, batch: dict[str, Any]) -> set[Any]:
    """Return the modules that run in a forward."""
    ran: set[Any] = set()
    handles = [one.register_forward_pre_hook(lambda one, args: ran.add(one)) for one in model.modules()]
    try:
        with torch.no_grad():
            model(**batch)
    finally:
        for handle in handles:
            handle.remove()
    return ran


class _Trial:
    def __init__(
        self, model: PreTrainedModel, inputs: dict[str, Tensor] | None, make: Callable[[], PreTrainedModel]
    ) -> None:
        self.model, self.make = model, make
        self.offered, self.inputs = inputs, None
        self.batch: dict[str, Any] = {}
        self.counts = (0, 0)
        self.planned: Any = None
        self.note = ""
        self.generates = False
        self.module: Any = None
        self.prompt: Any = None

    def plan(self) -> None:
        """Plan it on made-up inputs."""
        plan = self._plan()
        self.planned = plan
        self.counts = len(plan.converted), len(plan.layers) - len(plan.converted)
        self.generates = self._original_generates()
        # Where it cannot be run whole, its parts were.
        recorded = record(trial_runs(self.model, self.inputs)[0], padded=self.inputs is None)
        assert recorded, "it gives nothing that could be compared"
        hosts = {self.model.base_model.get_submodule(layer.module) for layer in plan.converted}
        inside = ((part, batch) for part, batch, _ in recorded if hosts & set(part.modules()))
        self.module, self.batch = max(inside, key=lambda one: len(hosts & _called(*one)))

    def _plan(self) -> Plan:
        """Plan it, with whatever options a refusal names."""
        options: dict[str, Any] = {}
        while True:
            try:
                return linearize.plan(self.model, "hedgehog", example_inputs=self.inputs, **options)
            except UnsupportedModelError as error:
                if "--local-as-full" in str(error) and not options:
                    options["local_as_full"] = True
                    self.note = f"{self.note} and `--local-as-full`" if self.note else "with `--local-as-full`"
                elif "--example-inputs" in str(error) and self.offered is not None and self.inputs is None:
                    self.inputs, self.note = self.offered, "with `--example-inputs`"
                else:
                    raise

    def convert(self) -> None:
        """Convert it, which compares it with the original."""
        convert_model(self.model, self.planned, ConversionConfig(example_inputs=self.inputs))
        self.model.eval()

    def forward(self) -> None:
        """Run it."""
        assert all(bool(torch.isfinite(x).all()) for x in self.outputs()), "outputs are not finite"

    def reload(self) -> None:
        """Save it, load it, and compare to the bit."""
        expected = self.outputs()
        try:
            with tempfile.TemporaryDirectory() as folder:
                linearize.save(self.model, f"{folder}/out")
                loaded = type(self.model).from_pretrained(f"{folder}/out").eval()
        except Exception:
            if self._original_reloads():
                raise
            self.note += "; transformers cannot reload the original either"
            return
        mine, theirs = self.model.state_dict(), loaded.state_dict()
        assert mine.keys() == theirs.keys(), f"other tensors after a reload: {sorted(mine.keys() ^ theirs.keys())[:3]}"
        lost = [key for key, x in mine.items() if not torch.equal(x, theirs[key])]
        assert not lost, f"{len(lost)} tensors are not those that were saved: {lost[0]}"
        name = next(name for name, one in self.model.named_modules() if one is self.module)
        # A weight that lies askew in a file's pages may be summed in another order.
        for parameter in loaded.parameters():
            parameter.data = parameter.data.clone()
        for old, new in zip(expected, self.outputs(loaded.get_submodule(name)), strict=True):
            assert torch.equal(old, new), f"differs by {float((old - new).abs().max()):.2g} after a reload"

    def _original_reloads(self) -> bool:
        """Whether transformers can load what it saved of the original."""
        with tempfile.TemporaryDirectory() as folder:
            original = self.make()
            original.save_pretrained(folder)
            try:
                type(original).from_pretrained(folder)
            except Exception:
                return False
        return True

    def gradients(self) -> None:
        """Send a gradient to every kernel."""
        ran: set[Any] = set()
        for layer in linear_attentions(self.model).values():
            layer.register_forward_pre_hook(lambda layer, args: ran.add(layer))
        with torch.enable_grad():
            # By noise: the squares of what a normalisation gives have no gradient.
            draw = torch.Generator().manual_seed(0)
            found = [x.float() for x in self.outputs(gradient=True) if x.requires_grad]
            loss = sum((x * torch.randn(x.shape, generator=draw)).nan_to_num(0, 0, 0).mean() for x in found)
            assert torch.is_tensor(loss) and loss.requires_grad, "outputs have no gradient"
            loss.backward()
        layers = linear_attentions(self.model)
        for name, layer in layers.items():
            grads = [x.grad for x in layer.parameters()]
            if layer not in ran:
                continue
            assert all(x is not None and bool(torch.isfinite(x).all()) for x in grads), f"{name} has no gradient"
        assert any(float(x.grad.abs().max()) > 0 for one in ran for x in one.parameters()), "all are zero"

    def padding(self) -> None:
        """Leave padding out, and get the same at real tokens."""
        mask = self.batch.get("attention_mask")
        if mask is None or bool(mask.all()) or len(mask) != len(self.batch["input_ids"]):
            return
        ids, count = self.batch["input_ids"], int(mask[1].sum())
        alone = self.batch | {"input_ids": ids[1:, :count], "attention_mask": mask[1:, :count]}
        alone |= {key: x[1:] for key, x in alone.items() if torch.is_tensor(x) and len(x) == 2}
        for together, single in zip(self.outputs(), self.outputs(batch=alone), strict=True):
            if together.shape[:2] == mask.shape and together.ndim == 3:
                gap = float((together[1:, :count] - single).abs().max() / single.abs().max().clamp_min(1e-6))
                assert gap < 1e-3, f"padding changes outputs by {gap:.2g} of the largest"

    def generation(self) -> None:
        """Generate a few tokens, as full forwards would."""
        if self.generates:
            gap = self._cache_gap()
            assert gap < 1e-3, f"with a cache, logits differ by {gap:.2g} of the largest"

    def _cache_gap(self) -> float:
        """Generate with a cache and without, and return the largest difference of logits, as a share of the largest."""
        made = [self._generate(use_cache) for use_cache in (True, False)]
        gaps = []
        for mine, theirs in zip(made[0].logits, made[1].logits, strict=True):
            same_token = torch.equal(mine.argmax(-1), theirs.argmax(-1))
            known = torch.isfinite(mine) & torch.isfinite(theirs)
            assert torch.equal(known, torch.isfinite(theirs)), "with a cache, other logits are hidden"
            mine, theirs = mine[known], theirs[known]
            gaps.append(float((mine - theirs).abs().max() / theirs.abs().max().clamp_min(1e-6)))
            if not same_token:
                # Two tokens were all but level here; what follows are two texts.
                break
        return max(gaps)

    def _generate(self, use_cache: bool) -> Any:
        ids = self.prompt
        options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return self.model.generate(
            **inputs, **options, use_cache=use_cache, return_dict_in_generate=True, output_logits=True
        )

    def _original_generates(self) -> bool:
        """Whether it makes text from nothing but tokens; some want more than a trial makes up."""
        if not self.model.can_generate():
            return False
        try:
            self.prompt = next(candidates(self.model))["input_ids"][:1]
            agrees = self._cache_gap() < 1e-3
        except Exception:
            return False
        if not agrees:
            self.note += "; with transformers' own cache the original gives other logits"
        return agrees

    def outputs(self, model: Any = None, batch: Any = None, gradient: bool = False) -> list[Tensor]:
        """Run a model and return its floating point outputs."""
        with torch.set_grad_enabled(gradient), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            found = (model or self.module)(**(batch or self.batch))
        return [x for x in tree_leaves(found) if torch.is_tensor(x) and x.is_floating_point()]


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:600]
