"""`convert --preset`: what it stands for, what comes before it, and where it is refused."""

from __future__ import annotations

import pytest
import torch
from support.checkpoints import make_original
from support.command_lines import run
from transformers import AutoModelForCausalLM

import linearize
from linearize.checkpoint.inspect import inspect_checkpoint
from linearize.core.errors import ConfigError, UnknownNameError
from linearize.core.options import effective, options_of
from linearize.jobs import longdoc
from linearize.jobs.config import ConvertJob
from linearize.jobs.convert import make_plan
from linearize.jobs.presets import PRESETS
from linearize.jobs.task_config import LongdocJob
from linearize.modeling.plan import SOFTMAX

CAUSAL = PRESETS["causal"].options


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_options_that_it_stands_for(name):
    preset = PRESETS[name]
    assert {*preset.options, *preset.rows} <= set(options_of(ConvertJob))
    with_preset = effective(ConvertJob.of(model="m", preset=name))
    written_out = effective(ConvertJob.of(model="m", **preset.options, **preset.rows))
    assert with_preset.pop("preset") == name
    assert written_out.pop("preset") is None
    assert with_preset == written_out != effective(ConvertJob.of(model="m"))


@pytest.mark.parametrize("more", [{"kernel": "auto"}, {"window": 4}])
def test_more_softmax_heads_than_there_are_are_refused_before_anything_is_chosen(tmp_path, more):
    make_original(tmp_path / "bert", "bert", "AutoModel")
    with pytest.raises(ConfigError, match="got 100, but the converted layers have 8 heads that can keep it"):
        make_plan(ConvertJob.of(model=str(tmp_path / "bert"), keep_softmax_heads="100", dataset="demo", **more))


@pytest.mark.parametrize("name", PRESETS)
def test_longdoc_hands_a_preset_on(name):
    job = LongdocJob.of(model="m", task="text-classification", dataset="d", max_length=64, preset=name)
    made = ConvertJob.of(model="m", **job.attention())
    assert effective(made).items() >= PRESETS[name].options.items()


@pytest.mark.parametrize(
    ("options", "length", "rows", "sampled", "packing"),
    [
        ({}, None, 32, None, False),
        ({"window": 16}, None, 32, None, False),
        ({"window": 128}, 1024, 8, 256, False),
        ({"window": "auto:128"}, 1024, 8, 256, False),
        ({"window": 1024}, 4096, 2, 256, False),
        ({"window": 4096}, 8192, 1, 256, False),
        ({"window": 128, "distill_length": 64}, 64, 32, None, False),
        ({"preset": "encoder"}, 512, 16, None, False),
        ({"preset": "causal"}, 2048, 4, 256, True),
        ({"preset": "recall"}, 4096, 2, 256, True),
        ({"preset": "lookup"}, 1024, 8, 256, False),
        ({"preset": "recall", "distill_length": 512, "packing": False}, 512, 16, 256, False),
        ({"preset": "recall", "text_column": "a,b"}, 4096, 2, 256, False),
    ],
)
def test_rows_are_longer_than_the_window(options, length, rows, sampled, packing):
    """Inside its window an attention is exact, so a kernel learns nothing from rows that fit into it."""
    job = ConvertJob.of(model="m", **options)
    found = (job.distill_length, job.data.batch_size, job.distill.query_sample, job.data.packing)
    assert found == (length, rows, sampled, packing)


def test_longdoc_has_its_own_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(longdoc, "write_texts", lambda job, work: (tmp_path / "t", None, 40))
    lengths = longdoc.Lengths(original=64, linear=128, longest=128, notes=())
    job = LongdocJob.of(model="m", task="text-classification", dataset="d", max_length=128, preset="recall")
    made = next(made for *_, made in longdoc.steps(job, tmp_path, lengths) if isinstance(made, ConvertJob))
    assert (made.distill_length, made.distill.query_sample, made.data.packing) == (64, None, False)


def test_softmax_heads_are_a_number_or_a_share():
    counted = [ConvertJob.of(model="m", keep_softmax_heads=text) for text in ("14", "5%", "1%")]
    assert [job.softmax_heads(270) for job in counted] == [14, 14, 3]
    assert all(job.chooses_heads for job in counted)
    assert not ConvertJob.of(model="m", keep_softmax_heads="4:0,11:7").chooses_heads
    assert ConvertJob.of(model="m", keep_softmax_heads="1%").softmax_heads(8) == 1
    with pytest.raises(ConfigError, match="keep_softmax_heads: got 101%, expected at most 100%"):
        ConvertJob.of(model="m", keep_softmax_heads="101%")


def test_what_is_given_comes_before_a_preset():
    job = ConvertJob.of(model="m", preset="causal", kernel="elu", window=16, keep_softmax="0")
    assert (job.kernel, job.window, job.keep_softmax, job.additions.sinks) == ("elu", 16, (0,), CAUSAL["sinks"])
    assert job.target() == "m-elu"
    # Arguments of the preset's kernel do not go to another one.
    arguments = [ConvertJob.of(model="m", preset="causal", **more).kernel_args for more in ({}, {"kernel": "elu"})]
    assert arguments == [{"tied": False}, {}]


def test_the_layers_of_a_causal_preset(tmp_path):
    make_original(tmp_path / "llama", "llama", "AutoModelForCausalLM", num_hidden_layers=8)
    _, plan, _ = make_plan(ConvertJob.of(model=str(tmp_path / "llama"), preset="causal", keep_softmax="1/4"))
    kept = [layer.index for layer in plan.layers if layer.kernel == SOFTMAX]
    # Before windows are chosen, every layer is the reference.
    near = {(layer.hybrid.window, layer.hybrid.sinks) for layer in plan.layers if layer.kernel != SOFTMAX}
    assert kept == [3, 7]
    assert near == {(128, CAUSAL["sinks"])}


def test_presets_that_are_refused(tmp_path):
    with pytest.raises(UnknownNameError, match=r"unknown preset 'casual'. Did you mean 'causal'?"):
        ConvertJob.of(model="m", preset="casual")
    for other in ({"plan": "plan.yaml"}, {"kernel": "auto"}):
        with pytest.raises(ConfigError, match=r"preset: got 'causal' and --.*which also chooses kernels"):
            ConvertJob.of(model="m", preset="causal", **other)


@pytest.mark.parametrize(("preset", "other"), [("causal", "encoder"), ("encoder", "causal")])
def test_a_preset_for_models_of_another_kind_is_refused(tmp_path, preset, other):
    original = tmp_path / "original"
    make_original(original, "llama", "AutoModelForCausalLM") if preset == "encoder" else make_original(original)
    with pytest.raises(ConfigError, match=rf"preset: got '{preset}', but attention of .* use --preset {other}, or"):
        make_plan(ConvertJob.of(model=str(original), preset=preset))


def test_the_lookup_preset_fits_both_kinds(tmp_path):
    for number, original in enumerate((("llama", "AutoModelForCausalLM"), ("bert",))):
        folder = tmp_path / str(number)
        make_original(folder, *original)
        _, plan, _ = make_plan(ConvertJob.of(model=str(folder), preset="lookup"))
        assert {(layer.kernel, layer.hybrid.blocks) for layer in plan.converted} == {("none", (128, 1))}


def test_the_encoder_preset_leaves_short_texts_as_they_were(tmp_path):
    original = make_original(tmp_path / "bert", max_position_embeddings=160)
    loaded, plan, _ = make_plan(ConvertJob.of(model=str(original), preset="encoder"))
    assert {(x.kernel, x.hybrid.window, x.hybrid.sinks, x.hybrid.exact_keys) for x in plan.layers} == {
        ("hedgehog", 64, 4, 64)
    }
    loaded.model.eval()
    draws = torch.Generator().manual_seed(0)
    short, long = (torch.randint(5, 30, (2, length), generator=draws) for length in (68, 150))
    before = [loaded.model(ids).last_hidden_state for ids in (short, long)]
    converted = linearize.apply(loaded.model, plan).eval()
    after = [converted(ids).last_hidden_state for ids in (short, long)]
    torch.testing.assert_close(after[0], before[0], rtol=0, atol=1e-5)
    assert (after[1] - before[1]).abs().max() > 1e-4


def test_a_preset_has_no_more_exact_keys_than_the_model_takes_tokens(tmp_path):
    original = make_original(tmp_path / "bert", max_position_embeddings=50)
    _, plan, _ = make_plan(ConvertJob.of(model=str(original), preset="encoder"))
    assert {layer.hybrid.exact_keys for layer in plan.layers} == {50}
    with pytest.raises(ConfigError, match="got 51, but the model takes 50 tokens; choose fewer"):
        make_plan(ConvertJob.of(model=str(original), preset="encoder", exact_keys=51))


def test_the_causal_preset_chooses_windows_and_its_result_loads(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_original(tmp_path / "llama", "llama", "AutoModelForCausalLM", max_position_embeddings=64)
    (tmp_path / "texts.txt").write_text("\n\n".join(f"a text about the number {number}" for number in range(99)))
    line = (
        "convert llama --dataset texts.txt --holdout 8 --distill-steps 0 --align-steps 0 --device cpu --preset causal"
    )
    plans = {}
    for folder, more in (("chosen", []), ("same", ["--window", "128"])):
        code, text = run(capsys, *line.split(), "--output", folder, *more)[:2]
        assert code == 0
        assert ("Windows per layer: the last hidden state" in text) == (folder == "chosen")
        plans[folder] = inspect_checkpoint(folder).plan.converted
    # In rows of at most 64 tokens a window of 128 is exact, so no other choice is better.
    assert {layer.hybrid.window for plan in plans.values() for layer in plan} == {128}


@pytest.mark.parametrize("window", [16, "auto:8"])
def test_longdoc_takes_a_window_before_the_presets(window):
    job = LongdocJob.of(
        model="m", task="text-classification", dataset="d", max_length=64, preset="causal", window=window
    )
    assert ConvertJob.of(model="m", **job.attention()).window == window


@torch.no_grad()
def test_the_lookup_preset_trains_nothing_and_its_result_equals_softmax_in_short_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_original(tmp_path / "llama", "llama", "AutoModelForCausalLM", max_position_embeddings=512)
    note = "Stage one is left out: without a kernel there is nothing to train"
    # No data is named, and none is opened.
    code, text, err = run(capsys, *["convert", "llama", "--preset", "lookup", "--device", "cpu", "--output", "made"])
    assert (code, text.count(note), "Data:" in text) == (0, 1, False), err
    result = inspect_checkpoint("made")
    assert {layer.hybrid.routed_blocks for layer in result.plan.converted} == {"128:1"}
    ours, original = (AutoModelForCausalLM.from_pretrained(name).eval() for name in ("made", "llama"))
    # Window, sinks and looked-up keys: all keys.
    ids = torch.randint(3, 90, (2, 250), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(ids).logits, original(ids).logits, atol=1e-4, rtol=1e-4)
    texts = [model.generate(ids[:, :200], max_new_tokens=20, do_sample=False) for model in (ours, original)]
    assert torch.equal(*texts)


def test_without_a_kernel_steps_that_are_asked_for_are_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_original(tmp_path / "bert", "bert", "AutoModel")
    (tmp_path / "texts.txt").write_text("\n\n".join(f"a text about the number {number}" for number in range(99)))
    line = "convert bert --kernel none --window 4 --dataset texts.txt --holdout 8 --distill-steps 3 --align-steps 0"
    code, text, err = run(capsys, *line.split(), "--device", "cpu", "--output", "made")
    assert code == 0, err
    assert "Stage one is left out" in text
    assert "distillation" not in inspect_checkpoint("made").provenance.values


def test_with_a_kernel_the_lookup_preset_trains():
    steps = [ConvertJob.of(model="m", preset="lookup", **more).distill.steps for more in ({}, {"kernel": "hedgehog"})]
    assert steps == [0, ConvertJob.of(model="m").distill.steps]
