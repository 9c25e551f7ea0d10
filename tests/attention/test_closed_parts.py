"""Additions are closed by default: what does not know a part refuses it in one line, and never ignores it."""

from __future__ import annotations

import ast
import importlib
import sys
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.kernel_cases import KERNELS, needed
from support.tiny import converted, inputs_of

import linearize
from linearize.attention import parts
from linearize.attention.backends import choose as choosing
from linearize.attention.backends.choose import BACKENDS, declined, kind_of
from linearize.attention.backends.eager import Windowed
from linearize.attention.cache import Recorded
from linearize.attention.call import AttentionCall
from linearize.attention.factory import build_mixer
from linearize.attention.interface import linear_attentions
from linearize.attention.layer import LinearAttention
from linearize.attention.parts import HEADS, NEAR, PARTS, ROUTED, SCALED, Part, without
from linearize.attention.shape import HeadShape
from linearize.core.errors import CheckpointError, ConfigError, LinearizeError
from linearize.core.registry import HYBRID, Hybrid
from linearize.evaluation.bench.models import BenchModel
from linearize.fidelity.ablate import ablated
from linearize.fidelity.heads import head_shares
from linearize.fidelity.measure import measure_layers
from linearize.jobs import export
from linearize.jobs.stages import exact_rows
from linearize.kernel_search.windows import choose_windows
from linearize.modeling.context_parallel import check_layers
from linearize.modeling.plan import LayerPlan, Plan
from linearize.modeling.portable import why_not
from linearize.training.alignment.loop import align
from linearize.training.stage_one.config import DistillConfig
from linearize.training.stage_one.loss import Targets
from linearize.training.stage_one.observer import layer_loss
from linearize.training.stage_one.start import fit_scales

PACKAGE = Path(linearize.__file__).parent
SHAPE = HeadShape(4, 2, 8, 8, True)
TOKENS = 12


@dataclass(frozen=True)
class Tilted(Hybrid):
    tilt: int = 0


class Tilt(Part):
    name, words = "tilt", "a tilt"


class Tilting(Windowed):
    """The one backend that knows the part."""

    name, supports = "tilting", NEAR | SCALED | {"tilt"}


TILTED = Tilted(window=4, scale="linear", tilt=3)


@pytest.fixture
def known(monkeypatch):
    """A made-up part that one made-up backend computes."""
    monkeypatch.setattr(parts, "PARTS", (*PARTS, Tilt()))
    monkeypatch.setattr(choosing, "BACKENDS", (*BACKENDS, Tilting()))


def layer_of(hybrid=TILTED, shape=SHAPE):
    layer = LinearAttention("hedgehog", {}, shape, hybrid)
    layer.reset_parameters(0)
    return layer.eval()


def heads(tokens=TOKENS):
    return tuple(torch.randn(2, count, tokens, 8) for count in (4, 2, 2))


def model_of():
    model = converted("bert", window=4)
    for layer in linear_attentions(model).values():
        layer.mixer.change(TILTED)
    return model


def plan_of():
    layer = LayerPlan("layer.0", 0, "hedgehog", SHAPE, hybrid=TILTED, host=("is_causal",))
    return Plan("LlamaModel", "llama", (layer,))


def run(manager):
    with manager:
        pass


def refold():
    _, k, v = heads()
    layer_of()._fold(0.5, None, Recorded(k, v, torch.ones(2, TOKENS, dtype=torch.bool)))


def export_it(monkeypatch, tmp_path):
    loaded = SimpleNamespace(model=model_of(), processor=None)
    monkeypatch.setattr(export, "load_converted", lambda name: loaded)
    export.export_checkpoint(export.ExportJob.of(model="m", output=str(tmp_path / "out")))


def start_in_vllm(monkeypatch):
    """The check of `linearize.vllm`, next to a stand-in for vLLM, which has an environment of its own."""
    stand_in = SimpleNamespace(MambaModelConfig=object, HFConfigParser=object)
    for name in ("vllm", "vllm.model_executor.models.config", "vllm.transformers_utils.config"):
        monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.setitem(sys.modules, "linearize.vllm.config", None)
    del sys.modules["linearize.vllm.config"]
    module = importlib.import_module("linearize.vllm.config")
    module.runner(SimpleNamespace(architectures=["LlamaForCausalLM"], is_encoder_decoder=False), plan_of())


def spread_out():
    model = model_of()
    check_layers(model, linear_attentions(model))


def targets():
    return Targets(*heads()[:2], 0.5, True)


DATA = SimpleNamespace(
    holdout_batches=lambda: [inputs_of(model_of())], train_batches=lambda: iter([inputs_of(model_of())])
)
# Everything that reads additions itself, by the name in its refusal.
CONSUMERS = {
    "weights": lambda: layer_of().mixer.weights(*heads()[:2], scaling=0.5),
    "a state that is computed again": refold,
    "context parallel": spread_out,
    "exact rows": lambda: exact_rows(plan_of(), 9),
    "bench": lambda: BenchModel.linear.func(SimpleNamespace(converted=False, hybrid=TILTED)),
    "ablate": lambda: run(ablated(model_of(), "window")),
    "fidelity": lambda: measure_layers(model_of(), [inputs_of(model_of())]),
    "keep-softmax-heads": lambda: head_shares(model_of(), [inputs_of(model_of())]),
    "window: auto": lambda: choose_windows(model_of(), DATA, plan_of()),
    "stage one": lambda: layer_loss("x", layer_of(), DistillConfig()),
    "start of the scales": lambda: fit_scales(layer_of(), targets()),
    "alignment": lambda: align(model_of(), DATA),
    "export": export_it,
    "vLLM": start_in_vllm,
}
# What reads `.hybrid` and calls no `check_parts`, and how it knows all that is there.
WHOLE = {
    "linearize.cli._output": "shows `changed`",
    "linearize.attention.backends.choose": "refuses",
    "linearize.attention.backends.fused_step": "called only with `supports`",
    "linearize.attention.backends.fused_window": "called only with `supports`",
    "linearize.attention.backends.native": "called only with `supports`",
    "linearize.attention.mixer": "reads HEADS",
    "linearize.checkpoint.fingerprint": "hashes `changed`",
    "linearize.checkpoint.save": "shows `changed`",
    "linearize.conversion.plan": "changes one field",
    "linearize.conversion.plan_file": "writes `changed`",
    "linearize.evaluation.bench.suites": "builds the layer",
    "linearize.jobs.convert": "changes no field",
    "linearize.jobs.stages": "asks `exact_tokens`",
    "linearize.kernel_search.costs": "builds the layer",
    "linearize.modeling.config": "asks `newest_part`",
    "linearize.modeling.model": "compares",
    "linearize.modeling.plan": "writes `changed`",
    "linearize.modeling.portable": "refuses",
    "linearize.vllm.layer": "runs what `linearize.vllm.config` accepts",
    "linearize.vllm.model": "runs what `linearize.vllm.config` accepts",
}


def sources():
    """The modules in which these words occur, which are few: to parse all takes a second."""
    for path in [*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "cli").glob("*.py")]:
        inside = path.is_relative_to(PACKAGE.parent / "cli")
        name = ("linearize." if inside else "") + ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        text = path.read_text(encoding="utf-8")
        if "check_parts" in text or ".hybrid" in text:
            yield name, list(ast.walk(ast.parse(text)))


def checks(nodes):
    return [n for n in nodes if isinstance(n, ast.Call) and getattr(n.func, "id", None) == "check_parts"]


def test_every_field_is_one_part_and_every_part_is_in_one_set():
    assert [part.name for part in PARTS] == list(HYBRID) == [field.name for field in fields(Hybrid)]
    assert sorted([*NEAR, *ROUTED, *SCALED, *HEADS]) == sorted(HYBRID)
    assert all(part.words for part in PARTS)


def test_every_consumer_is_tried():
    """What begins to read additions must say which it handles, and be tried here."""
    found, readers = [], set()
    for name, nodes in sources():
        found += [call.args[2].value for call in checks(nodes) if isinstance(call.args[2], ast.Constant)]
        if any(isinstance(node, ast.Attribute) and node.attr == "hybrid" for node in nodes) and not checks(nodes):
            readers.add(name)
    assert sorted(found) == sorted(CONSUMERS)
    assert readers == set(WHOLE)


@pytest.mark.parametrize("consumer", CONSUMERS.values(), ids=CONSUMERS)
def test_a_consumer_refuses_a_part_that_it_does_not_know(consumer, known, monkeypatch, tmp_path):
    name = next(name for name, one in CONSUMERS.items() if one is consumer)
    if consumer is export_it:
        consumer = partial(export_it, monkeypatch, tmp_path)
    elif consumer is start_in_vllm:
        consumer = partial(start_in_vllm, monkeypatch)
    with pytest.raises(LinearizeError, match=rf"^{name}: got a layer with tilt=3, expected at most .*; leave it out$"):
        consumer()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["whole", "gradient", "state", "step"])
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_backend_gets_no_part_that_it_does_not_know(backend, call, known):
    mixer = layer_of().mixer
    with torch.set_grad_enabled(call == "gradient"):
        asked = AttentionCall(*heads(), 0.5, needs_state=call in ("state", "step"))
        if call == "step":
            asked = AttentionCall(*heads(1), 0.5, state=mixer(asked)[1], needs_state=True)
        without_window = layer_of(replace(TILTED, window=None, scale="none")).mixer
        assert choosing.choose(mixer, asked).name == "tilting"
        assert declined(backend, without_window, kind_of(without_window, asked)) == "it does not support a tilt"
        assert declined(backend, mixer, kind_of(mixer, asked)).startswith("it does not support a ")


def test_a_part_without_a_backend_is_refused_when_it_is_built(known, monkeypatch):
    layer = layer_of()
    monkeypatch.setattr(choosing, "BACKENDS", BACKENDS)
    for problem in (layer_of, lambda: layer.mixer.change(TILTED), lambda: layer(*heads(), None, 0.5)):
        with pytest.raises(ConfigError, match=r"^got a layer with window=4, scale=linear, tilt=3, expected .*out$"):
            problem()


@pytest.mark.parametrize("info", KERNELS, ids=lambda info: info.name)
def test_a_field_without_a_part_is_refused_when_it_is_built(info):
    with pytest.raises(ConfigError, match=f"^kernel '{info.name}': got a layer with tilt=3, expected"):
        build_mixer(info.name, needed(info), replace(SHAPE, causal=info.causal), Tilted(tilt=3))


def test_kernels_that_take_no_addition_take_no_new_one(known):
    with pytest.raises(ConfigError, match=r"^kernel 'diag_softmax' takes no tilt"):
        build_mixer("diag_softmax", {}, SHAPE, Tilted(tilt=3))


def test_checkpoints_keep_a_new_part_and_refuse_one_that_they_do_not_know(known):
    data = plan_of().to_dict()
    assert data["layers"][0]["tilt"] == 3
    with pytest.raises(CheckpointError, match="tilt"):
        Plan.from_dict(data)
    assert why_not(plan_of()) == (
        "addition 'tilt' is not part of linearize, so its code does not travel with the checkpoint"
    )
    assert "tilt=3" in repr(layer_of())


def test_parts_are_left_out():
    whole = Tilted(4, 1, 2, "linear", (1,), 9, tilt=3)
    assert without(whole, NEAR) == Tilted(scale="linear", softmax_heads=(1,), trained_length=9, tilt=3)
    assert without(whole, ["exact_keys"]) == replace(whole, exact_keys=0)
