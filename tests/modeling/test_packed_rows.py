"""Several documents in one row: outputs and gradients are those of rows of their own."""

from __future__ import annotations

import pytest
import torch
from support.generation import causal
from support.tiny import converted
from transformers import DataCollatorWithFlattening

from linearize.attention import native
from linearize.attention.interface import linear_attentions, observed
from linearize.attention.packing import find_segments, positions_of
from linearize.core.errors import UnsupportedModelError

LENGTHS = (1, 13, 70, 2, 5)
"""Odd ones, one of a single token, one longer than a chunk."""
LONG = {"max_position_embeddings": 128}
SIZES = {"llama": LONG, "gpt2": {"n_positions": 128}, "gemma3": LONG, "bert": LONG, "mistral": LONG}


def documents():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 90, (1, n), generator=generator) for n in LENGTHS]


def packed():
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return {"input_ids": torch.cat(documents(), dim=1), "position_ids": positions}


def lengths(**more):
    """The same row by the lengths of its documents."""
    return {
        "input_ids": packed()["input_ids"],
        "cu_seq_lens_q": torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32),
        **more,
    }


def alone(model):
    """The outputs of the documents as rows of their own, put behind each other."""
    return torch.cat([model(input_ids=row, use_cache=False)[0] for row in documents()], dim=1)


@pytest.mark.parametrize("kernel", ["hedgehog", "elu", "cosformer", "performer", "flexformer_n", "diag_softmax"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_outputs_and_gradients_are_those_of_separate_rows(name, kernel):
    model = causal(name, kernel, config=SIZES[name])
    expected = alone(model)
    got = model(**packed())[0]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(6))
    names = [key for key, x in model.named_parameters() if x.requires_grad]
    learned = [x for _, x in model.named_parameters() if x.requires_grad]
    mine = torch.autograd.grad((got * weights).sum(), learned, allow_unused=True)
    theirs = torch.autograd.grad((expected * weights).sum(), learned, allow_unused=True)
    assert any("linear_attention" in key for key in names) or kernel in (
        "elu",
        "cosformer",
        "performer",
        "diag_softmax",
    )
    for key, one, other in zip(names, mine, theirs, strict=True):
        assert (one is None) == (other is None), key
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-4 * float(other.abs().max()), msg=key)


def test_without_packing_the_outputs_would_differ():
    model = causal("llama", config=LONG)
    row = {"input_ids": packed()["input_ids"]}
    assert float((model(**row)[0] - alone(model)).detach().abs().max()) > 0.01


@pytest.mark.parametrize("grad", [False, True])
def test_natively(switch, grad, monkeypatch):
    """The op in C attends in each document, forward and backward, as it does where each has a row."""
    calls = []
    for name in ("attend", "gradients"):
        real = getattr(type(native.engine()), name)
        monkeypatch.setattr(
            type(native.engine()),
            name,
            lambda *args, name=name, real=real, **kw: calls.append(name) or real(*args, **kw),
        )
    model = causal("llama", config=LONG)
    with torch.set_grad_enabled(grad):
        together = model(**packed())[0]
        torch.testing.assert_close(together, alone(model), rtol=1e-5, atol=1e-5)
    assert "attend" in calls
    if not grad:
        return
    found = []
    for out in (together, alone(model)):
        model.zero_grad()
        out.square().sum().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    assert "gradients" in calls
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (6, 0), (3, 2)])
def test_without_a_gradient(window, sinks):
    model = causal("llama", config=LONG, window=window, sinks=sinks)
    with torch.no_grad():
        torch.testing.assert_close(model(**packed())[0], alone(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_by_the_collators_lengths_alone(name):
    model = causal(name, config=SIZES[name])
    rows = [{"input_ids": row[0].tolist()} for row in documents()]
    collate = DataCollatorWithFlattening(return_position_ids=False, return_flash_attn_kwargs=True)
    batch = {key: value for key, value in collate(rows).items() if key != "labels"}
    assert "position_ids" not in batch
    with torch.no_grad():
        expected = alone(model)
        torch.testing.assert_close(model(**batch)[0], expected, rtol=1e-5, atol=1e-5)
        both = model(**batch, position_ids=packed()["position_ids"])[0]
        torch.testing.assert_close(both, expected, rtol=1e-5, atol=1e-5)
        embedded = model.get_input_embeddings()(batch.pop("input_ids"))
        got = model(**batch, inputs_embeds=embedded)[0]
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_two_packed_rows_of_other_documents():
    model = causal("llama", config=LONG)
    one, other = packed(), {key: torch.cat([x[:, 14:], x[:, :14]], dim=1) for key, x in packed().items()}
    with torch.no_grad():
        both = model(**{key: torch.cat([one[key], other[key]]) for key in one})[0]
        torch.testing.assert_close(both[:1], model(**one)[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(both[1:], model(**other)[0], rtol=1e-5, atol=1e-5)


def test_layers_that_stay_softmax_keep_to_documents_and_windows():
    model = causal("gemma3", config=LONG | {"sliding_window": 8})
    with torch.no_grad():
        torch.testing.assert_close(model(**packed())[0], alone(model), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model(**lengths())[0], alone(model), rtol=1e-5, atol=1e-5)
    model = causal("llama", config=LONG, keep_softmax=[1])
    with torch.no_grad():
        torch.testing.assert_close(model(**packed())[0], alone(model), rtol=1e-5, atol=1e-5)


def test_a_bidirectional_model_by_lengths():
    model = converted("bert", config=LONG)
    with torch.no_grad():
        got = model(**lengths(position_ids=packed()["position_ids"])).last_hidden_state
        torch.testing.assert_close(got, alone(model), rtol=1e-5, atol=1e-5)
        # Positions alone are no more than positions there, as for softmax.
        assert not torch.allclose(model(**packed()).last_hidden_state, got, atol=1e-3)


def test_gradient_checkpointing_calls_layers_again_with_their_documents():
    model = causal("llama", config=LONG).train()
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        model(**packed(), labels=packed()["input_ids"]).loss.backward()
        found.append([x.grad.clone() for x in model.parameters() if x.grad is not None])
    assert len(found[0]) > 10
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_observers_see_rows_of_one_document():
    model, seen = causal("llama", config=LONG), []
    with observed(model, lambda layer, q, k, v, mask, scaling: seen.append((q.shape, mask))), torch.no_grad():
        model(**packed())
    per_layer = seen[: len(seen) // len(linear_attentions(model))]
    counted = [shape[0] * shape[2] if mask is None else int(mask.sum()) for shape, mask in per_layer]
    assert sum(counted) == sum(LENGTHS)
    assert max(shape[2] for shape, _ in per_layer) == max(LENGTHS)


def test_attention_weights_are_blocks_on_the_diagonal():
    model = causal("llama", config=LONG)
    with torch.no_grad():
        weights = model(**packed(), output_attentions=True).attentions[0]
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:3]))
        one = model(input_ids=documents()[1], output_attentions=True, use_cache=False).attentions[0]
    torch.testing.assert_close(weights[:, :, 1:14, 1:14], one, rtol=1e-5, atol=1e-5)
    assert float(weights[:, :, 14:, :14].abs().max()) == 0.0


def test_a_row_of_one_document_is_left_alone():
    model = causal("llama", config=LONG)
    row = {"input_ids": packed()["input_ids"]}
    count = row["input_ids"].shape[1]
    with torch.no_grad():
        assert torch.equal(model(**row, position_ids=torch.arange(count)[None])[0], model(**row)[0])
        assert model(**row, position_ids=torch.arange(count)[None]).past_key_values.get_seq_length() == count


def test_packed_rows_of_padding_alone():
    model, rows = causal("llama", config=LONG), {key: x for key, x in lengths().items() if key != "position_ids"}
    with torch.no_grad():
        logits = model(**rows, attention_mask=torch.zeros_like(rows["input_ids"])).logits
    assert torch.isfinite(logits).all()


def test_what_cannot_be_honoured_is_refused():
    model = causal("llama", config=LONG)
    with pytest.raises(UnsupportedModelError, match=r"packed into one row .* with a generation cache"):
        model(**packed(), past_key_values=model.new_cache())
    with pytest.raises(UnsupportedModelError, match="expected numbers that increase from 0 to 91"):
        model(input_ids=packed()["input_ids"], cu_seq_lens_q=torch.tensor([0, 4, 8]))
    for wrong, message in (
        ({"cu_seq_lens_q": torch.tensor([], dtype=torch.int32)}, r"cu_seq_lens_q: got \[\], expected numbers"),
        (
            {"seq_idx": torch.zeros(91)},
            r"seq_idx: got shape \[91\], expected the document of each token, \[batch, 91\]",
        ),
        ({"seq_idx": torch.zeros(1, 90)}, r"seq_idx: got shape \[1, 90\]"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            model(input_ids=packed()["input_ids"], **wrong)
    # The refusal left nothing behind.
    plain = {"input_ids": documents()[1]}
    assert model(**plain)[0].shape[1] == 13
    encoder_decoder = converted("bart")
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        encoder_decoder(**lengths())


def test_a_host_that_hands_no_mask_on_is_refused():
    model = causal("llama", config=LONG)
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | {"attention_mask": None}), with_kwargs=True
    )
    with pytest.raises(UnsupportedModelError, match="does not pass its mask on"):
        model(**packed())


def test_positions_and_documents():
    tokens = torch.zeros(2, 6)
    positions = torch.tensor([[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]])
    segments = find_segments(True, tokens, {"position_ids": positions})
    assert segments.tolist() == [[1, 1, 2, 2, 2, 3], [1] * 6]
    assert torch.equal(positions_of(segments), positions)
    assert find_segments(False, tokens, {"position_ids": positions}) is None
    assert find_segments(True, tokens, {"position_ids": positions, "attention_mask": torch.ones(2, 6)}) is None
    index = torch.tensor([[7, 7, 7, 8, 8, 8]])
    assert find_segments(False, tokens, {"seq_idx": index}).tolist() == [[1, 1, 1, 2, 2, 2]] * 2
    mask = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])
    found = find_segments(False, tokens, {"seq_idx": index, "attention_mask": mask})
    assert found.tolist() == [[0, 1, 1, 2, 2, 0], [1, 1, 1, 2, 2, 2]]
