"""All writing of a picture is inside it, and no label is printed over another one."""

import dataclasses
import itertools

import pytest
import torch
from matplotlib.text import Text
from support.tiny import converted, inputs_of

from linearize.fidelity import measure, plots, plots_maps
from linearize.fidelity.maps import attention_maps
from linearize.fidelity.plots_style import layer_names, to_png


def named(layers, style):
    """Give layers the long names of a model with two stacks, or the names of a usual one."""
    stacks = ("layers_of_pictures", "layers_of_text")
    names = [
        f"model.encoder.encoder_stack.{stacks[i % 2]}.{i // 2}.self_attention_with_output"
        if style == "long"
        else f"encoder.layer.{i}.attention"
        for i in range(len(layers))
    ]
    return [dataclasses.replace(layer, module=name) for layer, name in zip(layers, names, strict=True)]


def shown_texts(figure):
    """The texts that a reader sees, with their boxes in pixels; numbers in cells are not among them."""
    to_png(figure, dpi=100)
    hidden = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            margin = 1e-6 * (high - low)
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if not low - margin <= tick.get_loc() <= high + margin:
                    hidden |= {tick.label1, tick.label2}
        hidden |= set(axes.texts)
        if not axes.axison:
            hidden |= set(axes.findobj(Text))
    texts = [text for text in figure.findobj(Text) if text not in hidden and text.get_visible() and text.get_text()]
    return [(text.get_text(), text.get_window_extent()) for text in texts]


def check(figure):
    texts = shown_texts(figure)
    width, height = figure.get_size_inches() * figure.dpi
    for text, box in texts:
        inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1
        assert inside, f"{text!r} is cut off"
    for (one, first), (two, second) in itertools.combinations(texts, 2):
        across = min(first.x1, second.x1) - max(first.x0, second.x0)
        down = min(first.y1, second.y1) - max(first.y0, second.y0)
        assert across <= 2 or down <= 2, f"{one!r} and {two!r} are printed over each other"


@pytest.mark.sampled("values")
@pytest.mark.parametrize("style", ["usual", "long"])
@pytest.mark.parametrize("layers", [1, 2, pytest.param(10, marks=pytest.mark.slow)])
def test_texts_of_all_pictures(layers, style):
    model = converted("bert", config={"num_hidden_layers": layers})
    batch = {name: value[1:2] for name, value in inputs_of(model).items()}
    maps = named(attention_maps(model, batch), style)
    fidelity = measure(None, model, [batch])
    fidelity = dataclasses.replace(fidelity, layers=tuple(named(fidelity.layers, style)))
    title = f"{layer_names([maps[0].module])[0]}, head 1: total variation 0.123 (best)"
    check(plots.fidelity_heatmaps(fidelity))
    check(plots_maps.attention_grid(maps))
    check(plots_maps.head_map(maps[0], 1, [f"token{i}-with-long-text" for i in range(9)], title))
    check(plots_maps.head_map(maps[0], 1, list("abcdefghi")))


@pytest.mark.sampled("one")
@pytest.mark.parametrize("style", ["usual", "long"])
def test_texts_over_a_picture(style):
    pixels = torch.rand(1, 3, 30, 30, generator=torch.Generator().manual_seed(0))
    for layers in (1, 2, 6):
        model = converted("vit", config={"num_hidden_layers": layers})
        maps = named(attention_maps(model, {"pixel_values": pixels}), style)
        check(plots_maps.picture_maps(maps, pixels[0]))


def test_texts_of_curves():
    log = [{"step": i, "losses": {"a": 2.0 / i, "b": 1 / i}, "held_out": 1.5 / i} for i in range(1, 2000, 7)]
    tuned = [{"step": i, "loss": 1.0 / i} for i in range(1, 2000, 9)]
    tuned += [{"step": i * 500, "eval_loss": 0.9 / i, "eval_score": 0.5 + i / 20} for i in range(1, 4)]
    check(plots.stage_one_curves(log))
    check(plots.stage_two_curves(tuned, chance=0.5))


def test_chance_is_drawn():
    figure = plots.stage_two_curves([{"step": 1, "eval_score": 0.7}, {"step": 2, "eval_score": 0.8}], chance=0.5)
    lines = {line.get_label(): line.get_ydata() for line in figure.axes[1].lines}
    assert list(lines["chance"]) == [0.5, 0.5]
    assert "chance" in [text.get_text() for text in figure.axes[1].get_legend().get_texts()]
