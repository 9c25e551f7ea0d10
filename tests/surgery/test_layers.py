"""Which layer gets which kernel: the layer language, presets, windows, and what a kernel must know of the model."""

from __future__ import annotations

import contextlib

import pytest
from support.tiny import converted, original

import linearize
from linearize.conversion.layers import (
    ConversionConfig,
    assign,
    expand,
    kept_layers,
    parse_heads,
    parse_indices,
    parse_layers,
    parse_share,
)
from linearize.core.errors import ConfigError, LinearizeError, UnknownNameError
from linearize.core.registry import kernel_infos, make_config
from linearize.modeling.plan import SOFTMAX

PRESETS = [info for info in kernel_infos() if info.preset is not None]


def test_indices_and_layers_are_read():
    assert parse_indices("0-2, 5,7", "here") == [0, 1, 2, 5, 7]
    assert parse_layers("0-1=elu,2,4=hedgehog") == {0: "elu", 1: "elu", 2: "hedgehog", 4: "hedgehog"}


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "1--2", "1,,2", "0.5", "²"])
def test_indices_that_are_none(text):
    with pytest.raises(ConfigError, match="expected layer numbers such as 0-5 or 0,11"):
        parse_indices(text, "layers")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0-999999999999=elu", "got layer 999999999999, expected at most 99999"),
        ("3-1=elu", "expected the smaller number first"),
        ("0-2=elu,2=relu", "layer 2 is named twice"),
        ("0-2", "'0-2' has no kernel; write RANGE=KERNEL"),
        ("0-2=", "expected RANGE=KERNEL"),
        ("elu", "'elu' has no kernel"),
    ],
)
def test_layer_texts_that_are_wrong(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_layers(text)


def test_every_layer_gets_one_kernel():
    layers = {1: "elu", 2: ("luna", {"channels": 2})}
    chosen = assign(4, ConversionConfig("hedgehog", {"activation": "exp"}, layers, [3]))
    assert chosen == [("hedgehog", {"activation": "exp"}), ("elu", {}), ("luna", {"channels": 2}), (SOFTMAX, {})]
    assert [name for name, _ in assign(2, ConversionConfig(None, layers="0=elu,1=softmax"))] == ["elu", "softmax"]


@pytest.mark.parametrize(
    ("keep", "count", "kept"),
    [
        ("1/4", 8, [3, 7]),
        ("1/4", 11, [3, 7]),
        ("1 / 2", 5, [1, 3]),
        ("1/4", 3, []),
        ("0-1,3", 4, [0, 1, 3]),
        ((2,), 4, [2]),
    ],
)
def test_layers_that_stay_softmax(keep, count, kept):
    assert kept_layers(keep, count) == kept
    chosen = assign(count, ConversionConfig("elu", keep_softmax=keep))
    assert [name == SOFTMAX for name, _ in chosen] == [n in kept for n in range(count)]


@pytest.mark.parametrize("text", ["2/4", "1/1", "1/0", "1/", "/4", "1/4,5", "1/-2"])
def test_shares_that_are_none(text):
    with pytest.raises(ConfigError, match="expected one layer of every N, such as 1/4"):
        kept_layers(text, 8)


@pytest.mark.parametrize("read", [parse_heads, parse_share, lambda text: parse_indices(text, "layers")])
@pytest.mark.parametrize("form", ["{}", "1/{}", "{}:1", "1:{}", "0-{}"])
def test_numbers_of_thousands_of_digits_are_refused_in_one_line(read, form):
    with contextlib.suppress(ConfigError):
        read(form.format("9" * 5000))


@pytest.mark.parametrize(
    ("layers", "kept", "kernel", "message"),
    [
        ({4: "elu"}, [], "elu", "layer 4 does not exist: this model has 4 that can be converted, 0 to 3"),
        ({}, [-1], "elu", "layer -1 does not exist"),
        ({}, ["0"], "elu", "layer '0' does not exist"),
        ({}, [0.5], "elu", "layer 0.5 does not exist"),
        ({1: "elu"}, [1], "elu", "layer 1 is in layers and in keep_softmax; name it in one of them"),
        ({0: "elu"}, [2], None, "layer 1 has no kernel: name it in layers or keep_softmax, or give a kernel"),
        ({0: 7}, [], "elu", r"layer 0: got 7, expected a kernel or \(kernel, arguments\)"),
    ],
)
def test_plans_that_miss_repeat_or_exceed(layers, kept, kernel, message):
    with pytest.raises(ConfigError, match=message) as caught:
        assign(4, ConversionConfig(kernel, layers=layers, keep_softmax=kept))
    assert "\n" not in str(caught.value)


def test_arguments_for_no_layer_are_refused():
    layers = {0: "elu", 1: ("hedgehog", {})}
    assert assign(3, ConversionConfig("t2r", {"features": 8}, layers=layers))[2][1] == {"features": 8}
    with pytest.raises(ConfigError, match=r"kernel_args: got \['features'\], but layers and keep_softmax name"):
        assign(3, ConversionConfig("t2r", {"features": 8}, layers=layers, keep_softmax=[2]))


def test_heads_that_are_no_lists_are_refused():
    with pytest.raises(ConfigError, match=r"softmax_heads: got \{0: 1\}, expected lists of heads by layer number"):
        ConversionConfig("elu", softmax_heads={0: 1})


@pytest.mark.parametrize("info", PRESETS, ids=lambda info: info.name)
@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_presets_are_layer_plans(info, count):
    chosen = expand(count, info.name, {"block": 16})
    assert chosen == info.preset(make_config(info, {"block": 16}), count)
    names = [name for name, _ in chosen]
    assert len(chosen) == count
    first = names[: count // 2]
    assert len(set(first)) <= 1 and all(name.startswith("diag_") for name in first)
    assert len(set(names[count // 2 :])) == 1 and names[-1].startswith("norm_")
    assert all(arguments == {"block": 16} for name, arguments in chosen if name.startswith("diag_"))


def test_the_two_presets_are_the_papers():
    kinds = {info.name: {name for name, _ in expand(12, info.name, {})} for info in PRESETS}
    assert kinds["transnormer_t1"] == {"diag_rela", "norm_elu"}
    assert kinds["transnormer_t2"] == {"diag_softmax", "norm_1elu"}


def test_a_preset_with_layers_of_ones_own():
    plan = linearize.plan(
        original("bert", num_hidden_layers=6), "transnormer_t2", {"block": 8}, layers={2: "hedgehog"}, keep_softmax=[5]
    )
    assert [layer.kernel for layer in plan.layers] == [
        "diag_softmax", "diag_softmax", "hedgehog", "norm_1elu", "norm_1elu", "softmax"
    ]  # fmt: skip
    assert plan.layers[0].arguments == {"block": 8}
    assert linearize.Plan.from_dict(plan.to_dict()) == plan


def test_windows_go_where_they_can():
    layers = {0: "diag_softmax", 1: ("elu", {"window": 3}), 2: ("elu", {"window": "none"}), 3: ("exp", {"window": "9"})}
    del layers[2]
    plan = linearize.plan(original("gpt2", n_layer=5), "hedgehog", layers=layers, keep_softmax=[4], window=6)
    assert [layer.hybrid.window for layer in plan.layers] == [None, 3, 6, 9, None]
    assert all("window" not in layer.arguments for layer in plan.layers)
    assert linearize.Plan.from_dict(plan.to_dict()) == plan


def test_a_window_among_the_arguments_is_the_same():
    one = linearize.plan(original("gpt2"), "hedgehog", {"window": 4})
    assert one == linearize.plan(original("gpt2"), "hedgehog", window=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window: got 0, expected a number of tokens, 1 or more; leave it out for none"),
        ({"window": -2}, "window: got -2"),
        ({"window": "wide"}, "window: got 'wide'"),
        ({"layers": {0: "transnormer_t2"}}, "'transnormer_t2' is a plan for all layers of a model, not for one layer"),
        ({"layers": {0: "helgehog"}}, "unknown kernel 'helgehog'. Did you mean 'hedgehog'?"),
        ({"window": 4, "kernel": "norm_elu"}, "kernel 'norm_elu' takes no window"),
        ({"window": 4, "kernel": "transnormer_t1"}, "takes no window"),
        ({"kernel_args": {"activaton": "exp"}}, "Did you mean 'activation'?"),
        ({"kernel_args": {"activation": "tanh"}}, "got 'tanh', expected one of softmax, exp"),
        ({"kernel": "taylor", "config": {"hidden_size": 1040}}, "got head size 260, expected at most 128; choose"),
        ({"kernel": "cosformer", "kernel_args": {"max_positions": 0}}, "expected a whole number of at least 1"),
    ],
)
def test_bad_options_are_one_line_and_change_nothing(options, message):
    options = dict(options)
    model = original("bert", **options.pop("config", {}))
    before = type(model), model.config._attn_implementation
    with pytest.raises(ConfigError, match=message) as caught:
        linearize.convert(model, options.pop("kernel", "hedgehog"), **options)
    assert "\n" not in str(caught.value)
    assert (type(model), model.config._attn_implementation) == before
    assert not any(name.endswith("linear_attention") for name, _ in model.named_modules())


def test_the_longest_input_is_written_down():
    needing = [info.name for info in kernel_infos() if info.maximum_positions]
    assert needing
    for name in needing:
        plan = linearize.plan(original("bert"), name)
        assert {layer.arguments["max_positions"] for layer in plan.layers} == {64}
        longer = converted("bert", kernel=name, max_length=256)
        assert longer.config.linearize["layers"][0]["arguments"] == {"max_positions": 256}
        own = linearize.plan(original("bert"), name, {"max_positions": 1000})
        assert own.layers[0].arguments == {"max_positions": 1000}


def test_a_model_without_a_limit_asks_for_the_longest_input(monkeypatch):
    monkeypatch.setattr("linearize.conversion.layers.current_length", lambda model: None)
    model = original("bert")
    for info in kernel_infos():
        if info.maximum_positions:
            with pytest.raises(LinearizeError, match="give max_positions=NUMBER among the kernel's arguments"):
                linearize.plan(model, info.name)
            assert linearize.plan(model, info.name, {"max_positions": 64}).converted


def test_unknown_names_list_the_known_ones():
    with pytest.raises(UnknownNameError, match=r"Known: .*cosformer.*transnormer_t2"):
        linearize.plan(original("bert"), "no such kernel")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": 3}, "conversion, kernel: got 3, expected"),
        ({"kernel": ["elu"]}, r"conversion, kernel: got \['elu'\]"),
        ({"kernel_args": "features=4"}, "kernel_args: got 'features=4', expected a mapping by name"),
        ({"layers": {"0": "elu"}}, "layers: got {'0': 'elu'}, expected a mapping by layer number"),
        ({"keep_softmax": 1}, "keep_softmax: got 1, expected a list of layer numbers"),
        ({"softmax_heads": [0]}, r"softmax_heads: got \[0\], expected a mapping by layer number"),
        ({"max_length": "64"}, "conversion, max_length: got '64', expected a whole number"),
        ({"seed": "a"}, "conversion, seed: got 'a'"),
        ({"example_inputs": [1, 2]}, r"example_inputs: got \[1, 2\], expected a mapping by name"),
    ],
)
def test_arguments_of_another_type_are_named(options, message):
    """They ended in a TypeError deep inside the conversion, or were used."""
    with pytest.raises(ConfigError, match=message):
        linearize.convert(original("bert"), **options)
