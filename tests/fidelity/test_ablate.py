"""Controls: a converted model without one part of its attention, and what its kernels bring over their windows."""

import pytest
import torch
from support.scripts import script
from support.tiny import converted, inputs_of, original

from linearize.attention.interface import linear_attentions
from linearize.checkpoint.provenance import Provenance
from linearize.checkpoint.save import _fidelity, limits
from linearize.core.errors import ConfigError
from linearize.fidelity import ablate
from linearize.fidelity.ablate import PARTS, KernelMerit, ablated, kernel_merit, merit_of
from linearize.fidelity.measure import measure_layers
from linearize.modeling.plan import Plan

CAUSAL = "AutoModelForCausalLM"


def states(model, inputs):
    with torch.no_grad():
        return model.base_model(**inputs).last_hidden_state


def hybrid(name="llama", **more):
    model = converted(name, CAUSAL if name == "llama" else "AutoModelForMaskedLM", "hedgehog", **more)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_scale." in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    return model


@pytest.mark.parametrize("more", [{"exact_keys": 2}, {"routed_blocks": "1:2"}], ids=["exact keys", "routed"])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_each_part_is_what_its_absence_says(name, more):
    model = hybrid(name, window=3, sinks=1, **more)
    inputs = inputs_of(model)
    whole = states(model, inputs)
    found = {}
    for part in set(PARTS) - {"routed" if "exact_keys" in more else "exact-keys"}:
        with ablated(model, part):
            found[part] = states(model, inputs)
    assert torch.equal(states(model, inputs), whole)
    for part, out in found.items():
        assert not torch.allclose(out, whole, atol=1e-4), part
    with ablated(model, "kernel"):
        kinds = {layer.mixer.keys.map.__class__.__name__ for layer in linear_attentions(model).values()}
        assert kinds == {"Hedgehog"}


def test_without_the_kernel_a_model_is_its_window():
    model = hybrid(window=3, sinks=1)
    alone = converted("llama", CAUSAL, "none", window=3, sinks=1)
    alone.load_state_dict(model.state_dict(), strict=False)
    inputs = inputs_of(model)
    with ablated(model, "kernel"):
        torch.testing.assert_close(states(model, inputs), states(alone, inputs), rtol=1e-4, atol=1e-5)


def test_a_silent_kernel_has_no_weight_and_no_gradient():
    """The control of an aligned model is trained like it, but must not get its kernels back."""
    silent = script("silence_kernel").silence
    model = hybrid(window=3, sinks=1, exact_keys=2)
    inputs = inputs_of(model)
    with ablated(model, "kernel"):
        expected = states(model, inputs)
    silent(model)
    torch.testing.assert_close(states(model, inputs), expected, rtol=1e-4, atol=1e-5)
    model.base_model(**inputs).last_hidden_state.square().sum().backward()
    kernels = [mixer.keys for layer in linear_attentions(model).values() if (mixer := layer.mixer)]
    assert all((x.grad is None or not x.grad.any()) for kernel in kernels for x in kernel.parameters())
    with pytest.raises(SystemExit, match="without query scales"):
        silent(converted("llama", CAUSAL, "hedgehog"))


def test_without_the_kernel_nothing_far_reaches_the_first_token():
    """A classifier reads the first token, to which each layer brings half a window; sinks are seen, they do not see."""
    model = hybrid("bert", window=4, sinks=2)
    inputs = inputs_of(model, tokens=12)
    inputs["attention_mask"][:] = 1
    changed = inputs | {"input_ids": inputs["input_ids"].clone()}
    reach = 2 * model.config.num_hidden_layers
    changed["input_ids"][:, reach + 1 :] = 7
    assert not torch.allclose(states(model, inputs)[:, 0], states(model, changed)[:, 0], atol=1e-4)
    with ablated(model, "kernel"):
        assert torch.equal(states(model, inputs)[:, 0], states(model, changed)[:, 0])
        changed["input_ids"][:, reach] = 7
        assert not torch.equal(states(model, inputs)[:, 0], states(model, changed)[:, 0])


def test_without_the_window_a_model_is_its_kernel():
    model = hybrid(window=3, sinks=1, scale="none")
    alone = converted("llama", CAUSAL, "hedgehog")
    alone.load_state_dict(model.state_dict())
    inputs = inputs_of(model)
    with ablated(model, "window"):
        torch.testing.assert_close(states(model, inputs), states(alone, inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("more", "part"), [({}, "kernel"), ({}, "window"), ({"window": 4}, "exact-keys"), ({"window": 4}, "heart")]
)
def test_a_part_that_is_not_there_is_refused(more, part):
    model = converted("llama", CAUSAL, "hedgehog", **more)
    with pytest.raises(ConfigError, match=r"ablate: got|unknown part"), ablated(model, part):
        pass


def test_merit_is_the_difference_of_two_errors():
    model = hybrid(window=3)
    batches = [inputs_of(model) for _ in range(3)]
    found = kernel_merit(model, batches)
    assert found.difference == pytest.approx(found.window_only - found.error)
    assert found.interval[0] <= found.difference + 1e-9
    assert found.difference <= found.interval[1] + 1e-9
    assert ("cannot be told from noise" in found.text) == (found.interval[0] <= 0 <= found.interval[1])
    worse = KernelMerit(0.5, 0.3, -0.2, (-0.3, -0.1))
    assert worse.text.endswith("with it: the kernel raises it by 0.200 (0.100 to 0.300)")
    assert kernel_merit(model, batches, original("llama", CAUSAL)) == found
    short = kernel_merit(model, [{"input_ids": batch["input_ids"][:, :3]} for batch in batches])
    assert short.text.startswith("the last hidden state has no error even without the kernel")
    one = kernel_merit(model, [{"input_ids": batches[0]["input_ids"][:1]}])
    assert one.interval is None and one.text.endswith("on one row and so without an interval")
    longer = [{"input_ids": torch.cat([batch["input_ids"]] * 20, dim=1)} for batch in batches]
    short = original("llama", CAUSAL, max_position_embeddings=9)
    assert kernel_merit(model, longer, short) == kernel_merit(
        model, [{"input_ids": batch["input_ids"][:, :9]} for batch in longer]
    )
    assert kernel_merit(converted("llama", CAUSAL, "hedgehog"), batches) is None
    assert kernel_merit(converted("llama", CAUSAL, "none", window=3), batches) is None


def test_the_interval_of_many_rows_needs_little_memory(monkeypatch):
    """4,000 rows took 1.2 GiB: all resamples were drawn at once."""
    rows, drawn, real = torch.rand(50, 3, dtype=torch.float64), [], torch.randint
    at_once = rows[real(50, (10_000, 50), generator=torch.Generator().manual_seed(0))].sum(dim=1)
    monkeypatch.setattr(torch, "randint", lambda *args, **more: drawn.append(real(*args, **more)) or drawn[-1])
    ends = ablate._errors(at_once)[2].quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    assert merit_of(rows).interval == tuple(ends.tolist())
    assert {tuple(x.shape) for x in drawn} == {(100, 50)} and len(drawn) == 100


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_far_mass_is_softmax_outside_the_window(name):
    model = hybrid(name, window=3, sinks=1)
    inputs = inputs_of(model)
    seen = []

    def observe(name, layer, q, k, v, mask, scaling):
        scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * scaling
        real = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool) if mask is None else mask.bool()
        place = real.cumsum(-1)
        distance = place[:, :, None] - place[:, None]
        visible = real[:, None] & (distance >= 0 if layer.shape.causal else torch.ones_like(distance).bool())
        near = (distance < 3 if layer.shape.causal else distance.abs() <= 1) | (place <= 1)[:, None]
        weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
        far = (weights * ~near[:, None]).sum(-1)
        seen.append(float(far.detach()[real[:, None].expand_as(far)].mean()))

    from linearize.fidelity.teacher import show

    show(model, [inputs], observe)
    found = measure_layers(model, [inputs])
    assert [layer.far_mass for layer in found.layers] == pytest.approx(seen, rel=1e-4)
    for layer in found.layers:
        low, high = layer.kernel_gain
        assert low <= layer.window_error - layer.output_error <= high
    plain = measure_layers(converted("llama", CAUSAL, "hedgehog"), [inputs_of(converted("llama", CAUSAL, "hedgehog"))])
    assert all(layer.far_mass is None and layer.window_error is None for layer in plain.layers)


def test_the_card_states_the_control():
    plan = Plan.from_dict(hybrid(window=3).config.linearize)
    merit = {"error": 0.25, "window_only": 0.5}
    said = limits(plan, Provenance({"kernel_merit": merit}), None)
    words = "was 0.250; with its softmax windows alone, without the kernel, it was 0.500"
    assert any(text.endswith(f"{words}.") for text in said)
    said = limits(plan, Provenance({"kernel_merit": merit | {"interval": [0.2, 0.3]}}), None)
    assert any(f"{words} (the 95 % interval of the difference: 0.200 to 0.300)." in text for text in said)
    assert not any("windows alone" in text for text in limits(plan, Provenance(), None))


def test_the_card_has_the_control_of_each_layer():
    layer = {"module": "h.0", "kl": 0.5, "output_error": 0.25, "far_mass": 0.75, "window_error": 0.5}
    rows = {}
    for name, more in {"one row": {}, "rows": {"kernel_gain": [0.2, 0.3]}, "no window": {"far_mass": None}}.items():
        side = {"layers": [layer | more]}
        rows[name] = _fidelity(Provenance({"distillation": {"before": side, "after": side}}))
    assert rows["one row"]["head"][-3:] == ["far mass", "output error, window alone", "benefit of the kernel"]
    assert rows["one row"]["rows"][0][-3:] == ["0.75", "0.5", "0.250"]
    assert rows["rows"]["rows"][0][-1] == "0.250 (0.200 to 0.300)"
    assert rows["no window"]["head"] == ["kl before", "after", "output error before", "after"]
