"""What is tried with one model: plan, conversion, reload, gradients, padding, generation; the first failure ends it."""

from __future__ import annotations

import importlib
import inspect
import re
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
from transformers.models.auto import modeling_auto

import linearize
from linearize.attention.interface import linear_attentions
from linearize.conversion.attentions import LOCAL_KEPT, plan_names, trial_runs
from linearize.conversion.check import _difference, _outputs, check, record
from linearize.conversion.inputs import candidates
from linearize.conversion.layers import ConversionConfig
from linearize.conversion.plan import convert_model
from linearize.core.errors import CheckpointError, LinearizeError, UnsupportedModelError
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
        softmax: "a tower" if all self-attentions of a model inside it stay softmax, "a part" if others do; those that
            are linear already, and cross-attention, do not count.
    """

    name: str
    model: str = ""
    status: str = UNTRIED
    step: str = ""
    message: str = ""
    converted: int = 0
    kept: int = 0
    softmax: str = ""

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
        trial.auto_classes,
        trial.gradients,
        trial.reference,
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
            result.softmax = trial.softmax
    result.status, result.step, result.message = WORKS, "", trial.note
    return result


LINEAR = re.compile(r"^cross-attention|already linear|\(\w*(Linear|Lightning|Delta|Deformable)\w*\)")
"""Reasons of attentions that are no softmax self-attention."""


def softmax_left(model: PreTrainedModel, plan: Plan) -> str:
    """Return "a tower", "a part" or nothing, as in `Result.softmax`."""
    hosts = {name: module for module, name in plan_names(model).items()}
    kept = {hosts[layer.module] for layer in plan.layers if not layer.converted and not LINEAR.search(layer.reason)}
    converted = {hosts[layer.module] for layer in plan.converted}
    if not kept:
        return ""
    towers = [set(part.modules()) for part in model.modules() if isinstance(part, PreTrainedModel)]
    return "a tower" if any(kept & tower and not converted & tower for tower in towers) else "a part"


def _auto_classes(model: PreTrainedModel) -> list[Any]:
    """List the Auto classes whose tables have a model's config."""
    found = vars(modeling_auto).values()
    autos = [one for one in found if isinstance(one, type) and getattr(one, "_model_mapping", None) is not None]
    return [one for one in dict.fromkeys(autos) if type(model.config) in one._model_mapping]


def _same_weight(name: str, other: str) -> bool:
    """Tell whether two names are of one weight, in a model and in its body."""
    return f".{name}".endswith(f".{other}") or f".{other}".endswith(f".{name}")


def _gap(old: Tensor, new: Tensor) -> float:
    """Return the largest difference as a share of the largest; infinite if other numbers are finite."""
    known = torch.isfinite(old)
    if old.shape != new.shape or not torch.equal(known, torch.isfinite(new)):
        return float("inf")
    old, new = old[known].double(), new[known].double()
    return float((old - new).abs().max() / old.abs().max().clamp_min(1e-6)) if old.numel() else 0.0


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
        self.softmax = ""
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
        self.softmax = softmax_left(self.model, plan)
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

    def auto_classes(self) -> None:
        """Load it with every Auto class that loads the original: with softmax in the kernels' place, it is that."""
        kernels = {key: x for key, x in self.model.state_dict().items() if ".linear_attention." in f".{key}"}
        with tempfile.TemporaryDirectory() as folder:
            original = self.make()
            try:
                original.save_pretrained(f"{folder}/original")
            except Exception:
                return
            linearize.save(self.model, f"{folder}/out")
            for auto in _auto_classes(original):
                try:
                    before, told = auto.from_pretrained(f"{folder}/original", output_loading_info=True)
                except Exception:
                    continue
                ends = {tuple(key.split(".")[-3:]) for key in original.state_dict()}
                lost = any(tuple(key.split(".")[-3:]) in ends for key in told["missing_keys"])
                try:
                    loaded, info = auto.from_pretrained(f"{folder}/out", output_loading_info=True)
                except CheckpointError as error:
                    if "is only a part of" in str(error):
                        note = "; not as its text part alone"
                        self.note += "" if lost or note in self.note else note
                        continue
                    told_so = "reads other names" in str(error) or "the plan does not name" in str(error)
                    # Of the original it makes noise: weights that are in the file.
                    assert lost and told_so, f"{auto.__name__}: {_line(error)}"
                    continue
                assert isinstance(loaded, type(before)), f"{auto.__name__} gives a {type(loaded).__name__}"
                own = linear_attentions(loaded)
                assert own, f"{auto.__name__} gives a model without kernels"
                missing = info["missing_keys"] ^ told["missing_keys"]
                assert not missing, f"{auto.__name__}: other missing keys than the original's: {sorted(missing)[:3]}"
                # What the file does not hold is drawn anew in both.
                loaded.load_state_dict(before.state_dict(), strict=False)
                for key, x in loaded.state_dict().items():
                    if ".linear_attention." in f".{key}":
                        saved = [y for name, y in kernels.items() if _same_weight(name, key)]
                        assert any(torch.equal(x, y) for y in saved), f"{auto.__name__}: {key} is not what was saved"
                try:
                    expected = self.outputs(before.eval())
                except Exception:
                    # The batch is for a part of it, or its head takes more.
                    continue
                check(loaded, [(loaded, self.batch, expected)])

    def gradients(self) -> None:
        """Train it with default arguments: every kernel gets a gradient, and a cache of the host's own changes none."""
        batch = {key: x for key, x in self.batch.items() if key != "use_cache"}
        self.model.train()
        try:
            try:
                original = self.make().train()
                self.outputs(original.get_submodule(self._place()), batch, gradient=True)
            except Exception:
                # Training takes more than the trial makes up, such as several images for their statistics.
                self.model.eval()
                batch = self.batch
            default = self._gradients(batch)
            if "use_cache" in self.batch:
                without = self._gradients(self.batch)
                assert default.keys() == without.keys(), "a cache changes which weights have a gradient"
                gap = max(_gap(without[key], default[key]) for key in default)
                assert gap < 1e-4, f"a cache of the host's own changes gradients by {gap:.2g} of the largest"
        finally:
            self.model.eval()

    def _place(self) -> str:
        return next(name for name, one in self.model.named_modules() if one is self.module)

    def _gradients(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Send a gradient to every kernel, and return all."""
        ran: set[Any] = set()
        layers = linear_attentions(self.model)
        handles = [one.register_forward_pre_hook(lambda one, args: ran.add(one)) for one in layers.values()]
        self.model.zero_grad()
        with torch.enable_grad():
            # By noise: the squares of what a normalisation gives have no gradient.
            draw = torch.Generator().manual_seed(0)
            found = [x.float() for x in self.outputs(batch=batch, gradient=True) if x.requires_grad]
            loss = sum((x * torch.randn(x.shape, generator=draw)).nan_to_num(0, 0, 0).mean() for x in found)
            assert torch.is_tensor(loss) and loss.requires_grad, "outputs have no gradient"
            loss.backward()
        for handle in handles:
            handle.remove()
        for name, layer in layers.items():
            grads = [x.grad for x in layer.parameters()]
            if layer not in ran:
                continue
            assert all(x is not None and bool(torch.isfinite(x).all()) for x in grads), f"{name} has no gradient"
        assert any(float(x.grad.abs().max()) > 0 for one in ran for x in one.parameters()), "all are zero"
        return {name: x.grad.clone() for name, x in self.model.named_parameters() if x.grad is not None}

    def reference(self) -> None:
        """Convert all that can be, windows too, to a window of softmax wider than the input: that is the original."""
        original = self.make()
        local = any(LOCAL_KEPT in layer.reason for layer in self.planned.layers)
        options: dict[str, Any] = {"local_as_full": True} if local or "as-full" in self.note else {}
        place, batch = self._place(), self.batch
        if self._pools_padding(original.get_submodule(place)):
            self.note += "; with no attention_mask, as it pools a padded token"
            batch = batch | {"attention_mask": torch.ones_like(batch["attention_mask"])}
        expected = _outputs(original.get_submodule(place), batch)
        try:
            # Half of it before each token; images of 896 pixels have 3,136 patches.
            linearize.convert(original, "none", window=8192, example_inputs=self.inputs, **options)
        except UnsupportedModelError:
            # Closed: what was not advised may be refused.
            assert local and "as-full" not in self.note
            return
        for old, new in zip(expected, _outputs(original.get_submodule(place), batch), strict=True):
            gap = _difference(old, new, [x for key, x in batch.items() if key.endswith("attention_mask")])
            assert gap < 1e-4, f"with {options} and a window of softmax, outputs differ by {gap:.2g} of the largest"

    def _pools_padding(self, module: Any) -> bool:
        """Whether outputs of the original, apart from padded tokens' own, depend on which token pads."""
        mask, ids = self.batch.get("attention_mask"), self.batch.get("input_ids")
        if mask is None or ids is None or mask.shape != ids.shape or bool(mask.all()):
            return False
        other = self.batch | {"input_ids": ids.where(mask.bool(), ids[:, :1])}
        pairs = zip(_outputs(module, self.batch), _outputs(module, other), strict=True)
        return any(_difference(old, new, [mask]) > 1e-4 for old, new in pairs)

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
