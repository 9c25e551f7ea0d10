"""Pictures are figures without a display; what they are drawn from is right."""

import sys

import numpy as np
import pytest
import torch
from support import forks
from support.tiny import converted, inputs_of

from linearize.core.errors import DataError
from linearize.fidelity import measure, plots, plots_maps
from linearize.fidelity.maps import attention_maps
from linearize.fidelity.plots_style import DISTANCE_SCALE, WEIGHT_SCALE, layer_names, safe_label, shade, to_png

KERNELS = ("hedgehog", "luna", "flexformer_s", "flexformer_n", "norm_elu", "diag_softmax")


def one(model):
    return {name: value[1:2] for name, value in inputs_of(model).items()}


@pytest.mark.parametrize("kernel", KERNELS)
def test_maps_are_the_models_own_weights(kernel):
    model = converted("bert", kernel=kernel)
    batch = one(model)
    maps = attention_maps(model, batch)
    assert [m.module for m in maps] == ["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"]
    assert all(layer.layer.observer is None for layer in maps)
    first = maps[0]
    expected = (first.q @ first.k.transpose(-1, -2) * first.scaling).softmax(-1)
    torch.testing.assert_close(first.softmax, expected)
    written = first.layer.mixer.weights(first.q[None], first.k[None], scaling=first.scaling)[0]
    if not first.layer.mixer.info.normalized:
        written = written / written.abs().sum(-1, keepdim=True)
    torch.testing.assert_close(first.linear, written.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_causal_maps_see_no_later_key(name):
    maps = attention_maps(m := converted(name), one(m))
    for layer in maps:
        assert float(layer.linear.triu(1).abs().max()) < 1e-6
        assert float(layer.softmax.triu(1).abs().max()) == 0
        torch.testing.assert_close(layer.linear.sum(-1), torch.ones(4, 9))


def test_two_inputs_at_once_have_no_map():
    model = converted("bert")
    with pytest.raises(DataError, match="expected one"):
        attention_maps(model, inputs_of(model))


@pytest.mark.sampled("one")
@pytest.mark.parametrize("kernel", ["flexformer_n", "norm_elu"])
def test_every_figure_draws(kernel):
    model = converted("bert", kernel=kernel)
    batch = one(model)
    maps, fidelity = attention_maps(model, batch), measure(None, model, [batch])
    figures = [
        plots_maps.attention_grid(maps),
        plots_maps.head_map(maps[1], 3, ["$a", "b\n", "漢", "<s>", "e", "f", "g", "h" * 40, ""]),
        plots.fidelity_heatmaps(fidelity),
    ]
    for figure in figures:
        png, width, height = to_png(figure, dpi=40)
        assert png.startswith(b"\x89PNG") and width > 100 and height > 50
    assert "matplotlib.pyplot" not in sys.modules


def test_picture_maps_and_their_grid():
    assert plots_maps.patch_grid(197, 224, 224) == (1, 14, 14)
    assert plots_maps.patch_grid(198, 224, 224) == (2, 14, 14)
    assert plots_maps.patch_grid(261, 224, 224) == (5, 16, 16)
    with pytest.raises(DataError, match="square patches"):
        plots_maps.patch_grid(7, 31, 17)
    model = converted("vit")
    batch = {"pixel_values": torch.rand(1, 3, 30, 30)}
    maps = attention_maps(model, batch)
    figure = plots_maps.picture_maps(maps, batch["pixel_values"][0])
    assert to_png(figure, dpi=40)[0].startswith(b"\x89PNG")
    titles = [axes.get_title(loc="left") for axes in figure.axes][: 1 + 2 * len(maps)]
    assert titles[:3] == ["the picture", "layer 0, softmax", "layer 0, linear"]


def test_curves():
    log = [{"step": 1, "losses": {"a": 2.0}, "held_out": None}, {"step": 2, "losses": {"b": 1.0}, "held_out": 1.5}]
    assert len(plots.stage_one_curves(log).axes[0].lines) >= 3
    tuned = [{"step": 1, "loss": 1.0}, {"step": 2, "eval_loss": 0.9, "eval_score": 80.0}]
    assert len(plots.stage_two_curves(tuned).axes[1].lines) == 1
    # A log holds the lines of both stages.
    assert len(plots.stage_one_curves(log + tuned).axes[0].lines) == len(plots.stage_one_curves(log).axes[0].lines)
    assert len(plots.stage_two_curves(log + tuned).axes[0].lines) == 2
    # The alignment's lines also have losses, and steps from 1 on.
    staged = [{"stage": "distillation", **line} for line in log]
    aligned = [{"stage": "alignment", "step": 1, "losses": {"states": 9.0}, "held_out": 9.0}]
    for line in plots.stage_one_curves(staged + aligned).axes[0].lines:
        assert 9.0 not in line.get_ydata() and list(line.get_xdata()) == sorted(line.get_xdata())
    # A log comes from whoever made the checkpoint.
    broken = [{"step": 1, "losses": 5, "loss": {}}, {"step": "x", "losses": {"a": 1.0}, "loss": 1.0}, {"step": [1]}]
    assert len(plots.stage_one_curves([*broken, *log]).axes[0].lines) >= 3
    assert len(plots.stage_two_curves([*broken, *tuned]).axes[1].lines) == 1
    for empty in (plots.stage_one_curves, plots.stage_two_curves):
        with pytest.raises(DataError, match="log"):
            empty([])


def test_all_maps_of_a_kind_have_one_scale():
    """Pale in one map and dark in another were the same weight, as each had its own scale."""
    weights = torch.tensor([[1.0, 0.1, 0.01], [1e-3, 1e-9, 0.0], [-1e-4, -0.5, 3.0]])
    expected = [[1.0, 2 / 3, 1 / 3], [0.0, 0.0, 0.0], [0.0, -1.0, 1.0]]
    np.testing.assert_allclose(shade(weights), expected, atol=1e-6)
    model = converted("bert")
    batch = one(model)
    maps, fidelity = attention_maps(model, batch), measure(None, model, [batch])
    pixels = {"pixel_values": torch.rand(1, 3, 30, 30)}
    pictures = attention_maps(converted("vit"), pixels)
    of_weights = [
        plots_maps.attention_grid(maps),
        plots_maps.head_map(maps[0], 1, list("abcdefghi")),
        plots_maps.picture_maps(pictures, pixels["pixel_values"][0]),
    ]
    for figures, scale in ((of_weights, WEIGHT_SCALE), ([plots.fidelity_heatmaps(fidelity)], DISTANCE_SCALE)):
        for figure in figures:
            bars = [axes for axes in figure.axes if axes.get_ylabel() == scale]
            assert bars and all(axes.get_ylim() == (0.0, 1.0) for axes in bars)


def test_numbers_in_cells_are_brief():
    assert [plots._brief(v) for v in (0, 0.254, -0.5, 1.65, 31.7, 7.2e-5)] == ["0", ".25", "-.50", "1.65", "32", "7e-5"]


def test_names_and_labels():
    assert layer_names(["encoder.layer.0.attn", "encoder.layer.11.attn"]) == ["layer 0", "layer 11"]
    assert layer_names(["encoder.0", "decoder.0"]) == ["encoder.0", "decoder.0"]
    assert safe_label("$x$") == r"\$x\$"
    assert safe_label("\t") == "_"


def test_matplotlib_is_loaded_with_the_first_figure():
    names = ["plots", "plots_maps"]
    modules = [
        *(f"linearize.fidelity.{name}" for name in names),
        "linearize.evaluation.report.page",
        "linearize.evaluation.report.compare",
    ]
    # Nothing that a fork has imported loads it, which the first line checks.
    code = f"import sys; assert 'matplotlib' not in sys.modules; import {', '.join(modules)}; "
    code += "sys.exit('matplotlib' in sys.modules)"
    done = forks.python(code)
    assert done.returncode == 0, done.stderr
