"""`--window auto`: layers that look far get more, all layers together hold no more than the reference."""

from __future__ import annotations

import pytest
import torch
from support.checkpoints import make_original, texts
from support.command_lines import run
from support.kernel_cases import needed
from support.training import Fixed, loud

import linearize
from linearize.attention.cache import LinearStateLayer
from linearize.attention.factory import state_bytes
from linearize.attention.layer import LinearAttention
from linearize.attention.shape import HeadShape
from linearize.checkpoint.inspect import inspect_checkpoint
from linearize.conversion.plan_file import read_plan
from linearize.core.errors import ConfigError
from linearize.core.events import Advanced, Event, Started
from linearize.core.registry import Hybrid, kernel_info, kernel_infos
from linearize.jobs.config import ConvertJob
from linearize.jobs.presets import width_of
from linearize.kernel_search.windows import choices_of, choose_windows, read_bytes, some_rows
from linearize.modeling.plan import LayerPlan

CAUSAL = "AutoModelForCausalLM"
SHAPE = HeadShape(4, 2, 6, 8, True)
ADDITIONS = [
    {},
    {"scale": "linear"},
    {"softmax_heads": (1,)},
    {"window": 5},
    {"window": 5, "sinks": 2, "softmax_heads": (0, 3)},
    {"window": 5, "sinks": 2, "exact_keys": 3, "scale": "network", "trained_length": 7},
]


def rows(tokens=40, count=4):
    draw = torch.Generator().manual_seed(0)
    return Fixed([{"input_ids": torch.randint(5, 30, (count, tokens), generator=draw)} for _ in range(2)])


def layer(kernel="hedgehog", **hybrid):
    return LayerPlan("x", 0, kernel, SHAPE, hybrid=Hybrid(**hybrid))


@pytest.mark.sampled("values")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("added", ADDITIONS, ids=lambda x: "-".join(map(str, x)) or "plain")
@pytest.mark.parametrize("kernel", [info.name for info in kernel_infos() if info.preset is None])
def test_the_price_of_a_layer_is_the_state_that_decoding_holds(kernel, added, dtype):
    """To the byte, for every kernel and addition."""
    mixer = kernel, needed(kernel_info(kernel)), SHAPE, Hybrid(**added)
    try:
        attention = LinearAttention(*mixer)
    except ConfigError:
        pytest.skip("a kernel without this addition")
    attention.reset_parameters(0)
    cached = LinearStateLayer()
    for count in (9, 1, 1, 1):
        tokens = torch.randn(1, SHAPE.heads, count, SHAPE.head_dim, dtype=dtype)
        k, v = tokens[:, : SHAPE.key_heads], torch.randn(1, SHAPE.key_heads, count, SHAPE.value_dim, dtype=dtype)
        attention.hand_over(cached)
        cached.update(k, v)
        with torch.no_grad():
            attention(tokens, k, v, None, 0.3)
    assert state_bytes(*mixer, dtype=dtype, tokens=12) == cached.nbytes() > 0


def test_with_and_without_a_kernel_at_equal_state():
    """The widest window without a kernel that is no dearer holds as many bytes, to within one key of the window."""
    first, second = (state_bytes(*layer("none", window=window).mixer) for window in (1, 2))
    for hybrid in ({}, {"exact_keys": 3}, {"sinks": 2, "exact_keys": 3}):
        price = state_bytes(*layer(window=16, scale="linear", **hybrid).mixer)
        window = 1 + (price - first) // (second - first)
        assert window > 20 and 0 <= price - state_bytes(*layer("none", window=window).mixer) < second - first


def test_what_a_layer_can_become():
    labels = list(choices_of(layer(window=8, sinks=1, scale="linear")))
    assert labels[0] == "hedgehog:window=8"
    assert set(labels[1:]) == {
        *(f"hedgehog:window={window}" for window in (2, 4, 16, 32)),
        *(f"hedgehog:window={window}:exact_keys=4" for window in (2, 4, 8, 16, 32)),
        *(f"none:window={window}" for window in (2, 4, 8, 16, 32)),
    }
    # Without scales there is nothing to choose keys by.
    assert not any("exact" in label for label in choices_of(layer(window=8)))


def test_what_a_layer_with_routed_blocks_can_become():
    counts = ("", *(f":routed_blocks={count}:2" for count in (1, 2, 4, 8, 16)))
    labels = list(choices_of(layer(window=8, scale="linear", routed_blocks="4:2")))
    assert labels[0] == "hedgehog:window=8:routed_blocks=4:2"
    assert sorted(labels) == sorted(f"{kernel}:window=8{count}" for kernel in ("hedgehog", "none") for count in counts)
    assert len(choices_of(layer("none", window=8, routed_blocks="4:2"))) == len(counts)
    some = choices_of(layer("none", window=8, routed_blocks="4:2", routed_heads=(1, 2)))
    assert [choice.hybrid.routed_heads for choice in some.values()].count((1, 2)) == len(some) - 1 == len(counts) - 1


def test_the_price_of_looked_up_keys_is_their_bytes():
    """Four heads read 8 keys of 6 channels with values of 8; none are read without blocks."""
    plain, routed = layer("none", window=8), layer("none", window=8, routed_blocks="4:2")
    assert read_bytes(plain, torch.bfloat16) == state_bytes(*plain.mixer, dtype=torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):
        assert read_bytes(routed, dtype) - read_bytes(plain, dtype) == 4 * 8 * (6 + 8) * dtype.itemsize
        one = layer("none", window=8, routed_blocks="4:2", routed_heads=(2,))
        assert read_bytes(one, dtype) - read_bytes(plain, dtype) == 8 * (6 + 8) * dtype.itemsize


def uneven():
    """Return a model whose second layer looks at all tokens alike, and whose first does not reach the hidden state."""
    model = loud("llama", CAUSAL)
    attentions = [block.self_attn for block in model.model.layers]
    with torch.no_grad():
        # Equal scores: all tokens weigh the same, and most of them are far.
        attentions[1].q_proj.weight.zero_()
        attentions[0].o_proj.weight.zero_()
    return model


@pytest.mark.parametrize("kernel", ["none", "hedgehog"])
def test_a_layer_that_looks_far_looks_up_more_blocks(kernel):
    model = uneven()
    base = linearize.plan(model, kernel, window=4, sinks=1, routed_blocks="4:1")
    chosen, _, error, reference = choose_windows(model, rows(), base)
    first, second = chosen.converted
    assert second.hybrid.blocks[0] > first.hybrid.blocks[0] and first.hybrid.window == second.hybrid.window == 4
    prices = [sum(read_bytes(one, model.dtype) for one in plan.converted) for plan in (chosen, base)]
    assert prices[0] <= prices[1] and error < reference


def test_a_layer_that_looks_far_gets_more_than_one_that_looks_near():
    model = uneven()
    base = linearize.plan(model, "hedgehog", window=8, sinks=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = choose_windows(model, rows(), base)
    chosen, why, error, reference = found
    first, second = chosen.converted
    assert state_bytes(*second.mixer) > state_bytes(*first.mixer)
    assert sum(state_bytes(*one.mixer) for one in chosen.converted) <= sum(
        state_bytes(*one.mixer) for one in base.converted
    )
    assert error < reference
    assert set(why) == {0, 1} and "error of the layer's output" in why[1]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert found == choose_windows(model, rows(), base)


def test_the_choice_says_how_far_it_is():
    """Each step counts its parts up to their number."""
    seen: list[Event] = []
    choose_windows(loud("llama", CAUSAL), rows(), linearize.plan(loud("llama", CAUSAL), "none", window=8), seen.append)
    steps: list[list[tuple[int, int]]] = []
    for event in seen:
        if isinstance(event, Started):
            steps.append([])
        else:
            assert isinstance(event, Advanced)
            steps[-1].append((event.done, event.total))
    scales, alone, whole = steps
    assert not scales and alone == [(n, len(alone)) for n in range(1, len(alone) + 1)] and len(alone) > 2
    # The whole model runs with one layer replaced after the other, and then with whole plans.
    first = whole[: whole[0][1]]
    assert first == [(1, 2), (2, 2)] and whole[2:] == [(n, len(whole) - 2) for n in range(1, len(whole) - 1)]
    assert len(whole) > 2


def test_the_error_is_that_of_the_converted_model():
    """A window alone has nothing to fit, so the figure can be computed from the applied plan."""
    model = loud("llama", CAUSAL)
    base = linearize.plan(model, "none", window=8)
    data = rows()
    chosen, _, error, _ = choose_windows(model, data, base)
    ids = data.holdout_batches()[0]["input_ids"][:8]
    with torch.no_grad():
        wanted = model.model(ids).last_hidden_state.double()
        got = linearize.apply(model, chosen).model(ids).last_hidden_state.double()
    spread = (wanted - wanted.mean(dim=(0, 1))).square().sum()
    assert error == pytest.approx(float(((got - wanted).square().sum() / spread).sqrt()), rel=1e-3)


def test_windows_that_are_too_wide_to_judge_are_left_out():
    model = loud("llama", CAUSAL)
    chosen = choose_windows(model, rows(tokens=12), linearize.plan(model, "hedgehog", window=8))[0]
    assert all(one.hybrid.window in (2, 4, 8) for one in chosen.converted)


def test_a_window_is_judged_by_the_rows_of_its_own_layer():
    """Decoder layers got windows wider than their rows if the encoder's rows were longer: they looked exact."""
    draw, model = torch.Generator().manual_seed(0), loud("bart")
    lengths = {"input_ids": 40, "decoder_input_ids": 12}
    batch = {name: torch.randint(5, 30, (4, tokens), generator=draw) for name, tokens in lengths.items()}
    chosen = choose_windows(model, Fixed([batch]), linearize.plan(model, "hedgehog", window=4))[0]
    windows = {"encoder": (1, 2, 4, 8, 16), "decoder": (1, 2, 4)}
    assert all(layer.hybrid.window in windows[layer.module.split(".")[0]] for layer in chosen.converted)


def test_layers_without_a_window_stay_as_planned():
    model = loud("llama", CAUSAL)
    base = linearize.plan(model, "hedgehog", window=8, layers={1: "diag_softmax"})
    chosen = choose_windows(model, rows(), base)[0]
    assert chosen.converted[1] == base.converted[1]
    with pytest.raises(ConfigError, match="no layer takes a window"):
        choose_windows(model, rows(), linearize.plan(model, "hedgehog"))


def test_the_option():
    def job(**more):
        return ConvertJob.of(model="m", **more)

    assert [width_of(job(window=text).window) for text in ("auto", "auto:32", "16")] == [64, 32, 16]
    assert [job(window=text).chooses_windows for text in ("auto", "auto:32", "16")] == [True, True, False]
    assert job().window is None and job(preset="causal", window="auto").additions.sinks == 4
    for text in ("auto:0", "auto:", "wide", "-3"):
        with pytest.raises(ConfigError, match="expected a number of tokens such as 64, auto or auto:64"):
            job(window=text)


def test_convert_chooses_and_writes_the_plan(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_original(tmp_path / "llama", "llama", CAUSAL)
    texts(tmp_path, 60)
    line = "convert llama --window auto:4 --dataset texts.jsonl --distill-length 24 --holdout 8"
    code, out, err = run(
        capsys,
        *line.split(),
        "--distill-steps",
        2,
        "--align-steps",
        0,
        "--plan-out",
        "p.yaml",
        "--device",
        "cpu",
        "--output",
        "o",
    )
    assert code == 0, err
    assert "Windows per layer: the last hidden state has an error of" in out
    info = inspect_checkpoint("o")
    assert info.plan is not None
    assert {layer.hybrid.window for layer in info.plan.converted} <= {1, 2, 4, 8, 16}
    read = read_plan("p.yaml").layers
    assert [one.window for one in read] == [layer.hybrid.window for layer in info.plan.converted]


def test_long_rows_count_fewer():
    rows = {"input_ids": torch.zeros(8, 1000, dtype=torch.long), "attention_mask": torch.ones(8, 1000)}
    assert [len(some_rows(rows, most)["input_ids"]) for most in (1, 2, 8)] == [1, 2, 2]
    assert len(some_rows({"input_ids": torch.zeros(3, 9000)}, 8)["input_ids"]) == 1
    assert len(some_rows({"pixel_values": torch.zeros(8, 3, 4, 4)}, 5)["pixel_values"]) == 5


def test_choices_that_differ_in_exact_keys_share_a_fit(monkeypatch):
    fitted = []
    monkeypatch.setattr(
        "linearize.kernel_search.windows.fit_scales", lambda module, targets: fitted.append(module.hybrid.window)
    )
    model = loud("llama", CAUSAL)
    choose_windows(model, rows(), linearize.plan(model, "hedgehog", window=8, sinks=1))
    # Two layers; 32 is more than half of 40 tokens.
    assert sorted(fitted) == [2, 2, 4, 4, 8, 8, 16, 16]
