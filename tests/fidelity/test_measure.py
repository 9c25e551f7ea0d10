"""The figures of a layer equal those of written-out matrices, and padding counts nothing."""

import json

import pytest
import torch
from support.tiny import converted, inputs_of, original, outputs

from linearize.attention.interface import linear_attentions, observed
from linearize.attention.layer import LinearAttention
from linearize.conversion.plan import set_trained_length
from linearize.core.errors import ConfigError, DataError
from linearize.fidelity import measure, measure_layers
from linearize.fidelity.ablate import kernel_merit
from linearize.fidelity.teacher import run_body


def written_out(model, batch, kernel_of):
    """KL, total variation, negative share and output error of the first layer, the plain way."""
    found = {}

    def observe(layer, q, k, v, mask, scaling):
        if found:
            return
        groups = q.shape[1] // k.shape[1]
        keys, values = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        visible = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool)
        visible = visible.tril() if layer.shape.causal else visible
        visible = visible.expand(q.shape[0], 1, *visible.shape)
        valid = torch.ones(q.shape[0], q.shape[2])
        if mask is not None:
            visible, valid = visible & mask[:, None, None].bool(), mask.float()
        t = (q @ keys.transpose(-1, -2) * scaling).masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num()
        w = layer.mixer.weights(q, k, scaling=scaling, key_padding_mask=mask)
        valid = valid[:, None].expand(-1, q.shape[1], -1)
        kl = (t * (t.clamp(min=1e-30).log() - w.clamp(min=1e-6).log())).sum(-1)
        tv = 0.5 * (t - w).abs().sum(-1)
        negative = ((w < 0) & visible).float().sum(-1)
        found["kl"] = float((kl * valid).sum() / valid.sum())
        found["total_variation"] = float((tv * valid).sum() / valid.sum())
        found["negative_share"] = float((negative * valid).sum() / (visible.float().sum(-1) * valid).sum())
        error = ((w @ values - t @ values).square().sum(-1) * valid).sum()
        found["output_error"] = float((error / ((t @ values).square().sum(-1) * valid).sum()).sqrt())

    with torch.no_grad(), observed(model, observe):
        run_body(model, batch)
    return found


@pytest.mark.parametrize("kernel", ["hedgehog", "flexformer_n", "rfa"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_figures_equal_written_out_matrices(name, kernel):
    model = converted(name, kernel=kernel)
    batch = inputs_of(model)
    layer = measure_layers(model, [batch]).layers[0]
    for figure, value in written_out(model, batch, kernel).items():
        assert getattr(layer, figure) == pytest.approx(value, rel=2e-4, abs=1e-6), figure
    assert layer.kernel == kernel
    assert len(layer.heads["kl"]) == 4
    assert sum(layer.heads["kl"]) / 4 == pytest.approx(layer.kl)


HYBRIDS = {
    "window": {"kernel": "hedgehog"},
    "no kernel": {"kernel": "none"},
    "scales": {"kernel": "hedgehog", "scale": "linear"},
    "exact keys": {"kernel": "hedgehog", "scale": "linear", "exact_keys": 2},
    "routed blocks": {"kernel": "hedgehog", "scale": "linear", "routed_blocks": "1:2"},
    "softmax heads": {"kernel": "flexformer_n", "scale": "network", "softmax_heads": {0: (1, 3)}},
    "signed": {"kernel": "flexformer_n", "kernel_args": {"form": "paper"}},
}


@pytest.mark.parametrize("hybrid", HYBRIDS)
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_figures_of_hybrids_equal_written_out_matrices(name, hybrid):
    model = converted(name, **HYBRIDS[hybrid], window=4, sinks=1)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("query.weight", "q_proj.weight")):
                parameter.mul_(40.0)
            elif "_scale." in parameter_name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    # Causal hybrids with scales fade from the fourth token on.
    set_trained_length(model, 3)
    batch = inputs_of(model)
    # Padding in the middle and on the left too: the window counts tokens without it.
    batch["attention_mask"][0, 3:5] = 0
    batch["attention_mask"][1, 0] = 0
    layer = measure_layers(model, [batch]).layers[0]
    assert layer.kl > 0.01 and layer.far_mass > 0.01
    for figure, value in written_out(model, batch, hybrid).items():
        assert getattr(layer, figure) == pytest.approx(value, rel=2e-4, abs=1e-6), figure


def test_padding_counts_nothing():
    model = converted("bert")
    # Far from uniform: a KL near 0 is what rounding leaves of entropies near 2.
    for name, parameter in model.named_parameters():
        parameter.data.mul_(40.0 if name.endswith("query.weight") else 1.0)
    batch = inputs_of(model)
    figures = measure_layers(model, [batch])
    assert all(layer.kl > 0.05 and layer.output_error > 0.1 for layer in figures.layers)
    assert figures.queries == int(batch["attention_mask"].sum())
    longer = {k: torch.cat([v, torch.zeros(3, 5, dtype=v.dtype)], dim=1) for k, v in batch.items()}
    again = measure_layers(model, [longer])
    assert again.queries == figures.queries
    for one, two in zip(figures.layers, again.layers, strict=True):
        assert one.kl == pytest.approx(two.kl, rel=1e-4)
        assert one.output_error == pytest.approx(two.output_error, rel=1e-4)


def test_measuring_leaves_the_model_as_it_was():
    model = converted("bert").train()
    measure_layers(model, [inputs_of(model)])
    assert model.training
    assert all(layer.observer is None for layer in linear_attentions(model).values())


def test_nothing_to_measure_on_is_an_error():
    with pytest.raises(DataError, match="no held-out batch"):
        measure_layers(converted("bert"), [])


def test_the_original_is_compared_with_whole_outputs():
    model, first, batch = converted("bert"), original("bert").train(), inputs_of(converted("bert"))
    found = measure(first, model, iter([batch]))
    assert first.training and not model.training
    assert found.layers == measure(None, model, [batch]).layers == measure_layers(model, [batch]).layers
    with torch.no_grad():
        one, two = (run_body(m.eval(), batch).last_hidden_state for m in (first, model))
    keep = batch["attention_mask"].bool()
    cosine = torch.nn.functional.cosine_similarity(one, two, dim=-1)[keep].mean()
    assert found.outputs.cosine == pytest.approx(float(cosine), abs=1e-5)
    assert found.outputs.relative_error == pytest.approx(float((one - two)[keep].norm() / one[keep].norm()), rel=1e-4)
    assert found.outputs.tokens == int(keep.sum()) == found.queries
    assert json.loads(json.dumps(found.to_dict()))["outputs"]["tokens"] == found.queries
    assert measure(None, model, [batch]).outputs is None


def test_an_original_that_cannot_be_it_is_refused():
    model = converted("bert")
    with pytest.raises(ConfigError, match="got a converted model"):
        measure(model, model, [inputs_of(model)])
    with pytest.raises(ConfigError, match="got a model of type 'gpt2', expected 'bert'"):
        measure(original("gpt2"), model, [inputs_of(model)])
    for first in (original("bert"), None):
        with pytest.raises(ConfigError, match="got BertModel, expected a converted model"):
            measure(first, original("bert"), [inputs_of(model)])


@torch.no_grad()
def test_padding_counts_nothing_in_a_decoder_that_reads_the_encoders_tokens():
    model = converted("bart")
    # Far from uniform, as in `test_padding_counts_nothing`.
    for name, parameter in model.named_parameters():
        parameter.data.mul_(40.0 if name.endswith("q_proj.weight") else 1.0)
    ids = torch.randint(5, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1] * 9, [1] * 4 + [0] * 5])
    rows = [ids[:1], ids[1:, :4]]
    padded = measure_layers(model, [{"input_ids": ids, "attention_mask": mask}])
    alone = measure_layers(model, [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows])
    assert padded.queries == 13
    for one, other in zip(padded.layers, alone.layers, strict=True):
        assert one.kl == pytest.approx(other.kl, rel=1e-4), one.module
        assert one.output_error == pytest.approx(other.output_error, rel=1e-4), one.module


@torch.no_grad()
@pytest.mark.parametrize("tokens", [4, 11])
def test_a_decoder_with_its_own_tokens_has_their_mask(tokens):
    """The encoder's mask [2, 9] was taken for the decoder's states [2, T]: an IndexError, or the wrong padding."""
    first, model = original("bart"), converted("bart", window=3)
    make = torch.Generator().manual_seed(0)
    ids, own = (torch.randint(5, 90, (2, size), generator=make) for size in (9, tokens))
    mask, own_mask = torch.tensor([[1] * 9, [1] * 4 + [0] * 5]), torch.ones_like(own)
    own_mask[1, 3:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": own, "decoder_attention_mask": own_mask}
    found, keep = measure(first, model, [batch]).outputs, own_mask.bool()
    one, two = (run_body(m.eval(), batch).last_hidden_state for m in (first, model))
    error = float((one - two)[keep].norm() / one[keep].norm())
    assert found.tokens == tokens + 3 and found.relative_error == pytest.approx(error, rel=1e-4)
    assert kernel_merit(model, [batch], first).error == pytest.approx(error, rel=1e-4)


def test_an_interrupted_measurement_leaves_the_kernels_in_place(monkeypatch):
    """The kernels are removed for a moment, to measure the window alone."""
    model = converted("llama", window=3)
    inputs, real, calls = inputs_of(model), LinearAttention.forward, []
    before = outputs(model, inputs)

    def forward(layer, *call):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(layer, *call)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(LinearAttention, "forward", forward)
        measure_layers(model, [inputs])
    assert len(calls) == 2
    assert all(torch.equal(a, b) for a, b in zip(outputs(model, inputs), before, strict=True))
