"""Stage one on tiny models: it learns, stops, recovers, and changes nothing but the kernels."""

import math
from types import SimpleNamespace

import pytest
import torch
import transformers
from support.kernel_cases import FAMILIES, KERNELS
from support.tiny import BART, IMAGE, converted, inputs_of, original
from support.training import ALIGN, Fixed, batches, sharp

import linearize
from linearize.attention.interface import linear_attentions
from linearize.core.errors import ConfigError, DataError, TrainingError
from linearize.training import run
from linearize.training.alignment import loop as alignment
from linearize.training.alignment.config import AlignConfig
from linearize.training.alignment.loop import align
from linearize.training.stage_one import DistillConfig, loop
from linearize.training.stage_one.loop import distill
from linearize.training.stage_one.loss import Targets
from linearize.training.stage_one.observer import KernelTrainer, layer_loss


@pytest.mark.sampled("values")
@pytest.mark.parametrize("kernel", ["hedgehog", "flexformer_n"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit"])
def test_the_kernel_comes_closer_and_nothing_else_changes(name, kernel):
    model = sharp(name, kernel=kernel)
    frozen = {k: v.clone() for k, v in model.state_dict().items() if ".linear_attention." not in k}
    flags = [p.requires_grad for p in model.parameters()]
    result = distill(model, Fixed(batches(model)), DistillConfig(steps=40, eval_every=10))
    assert result.after.mean("kl") < 0.8 * result.before.mean("kl")
    assert result.steps == 40
    assert [r.step for r in result.history] == list(range(1, 41))
    assert all(torch.equal(frozen[k], v) for k, v in model.state_dict().items() if k in frozen)
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is None for p in model.parameters())


def test_output_and_both_losses_bring_the_outputs_closer():
    for loss in ("output", "both"):
        model = sharp("bert")
        result = distill(model, Fixed(batches(model)), DistillConfig(steps=30, loss=loss))
        assert result.after.mean("output_error") < 0.9 * result.before.mean("output_error")


def test_both_losses_add_up_with_their_weight():
    """At the first step the kernels are the same, so the losses of three runs can be added up."""
    first = {}
    for loss, weight in (("weights", 1.0), ("output", 1.0), ("both", 1.0), ("both", 0.25)):
        model = sharp("bert")
        config = DistillConfig(steps=1, loss=loss, output_weight=weight)
        first[loss, weight] = distill(model, Fixed(batches(model)), config).history[0].losses
    for layer, both in first["both", 1.0].items():
        weights, output = first["weights", 1.0][layer], first["output", 1.0][layer]
        assert both == pytest.approx(weights + output, rel=1e-6)
        assert first["both", 0.25][layer] == pytest.approx(weights + 0.25 * output, rel=1e-6)


@pytest.mark.parametrize("kernel", ["performer", "rfa", "elu", "cosformer"])
def test_a_kernel_with_nothing_to_learn_skips_stage_one(kernel):
    model = sharp("bert", kernel=kernel)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = distill(model, Fixed(batches(model)), DistillConfig(steps=5))
    assert (result.stopped, result.steps, result.history) == ("nothing to learn", 0, [])
    assert result.after.mean("kl") == result.before.mean("kl") > 0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_sampled_queries_are_unbiased():
    """The mean over all samples of one query is the loss on all queries."""
    layer = next(iter(linear_attentions(sharp("gpt2")).values()))
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 4, 9, 8, generator=draw) for _ in range(2))
    targets = Targets(q, k, 0.5, True)
    whole = layer_loss("a", layer, DistillConfig())
    whole.add(targets, k, train=False, sample=None)
    one = layer_loss("a", layer, DistillConfig())
    for place in range(9):
        one.add(targets, k, train=False, sample=torch.tensor([place]))
    assert one.count == whole.count == 2 * 4 * 9
    assert one.mean == pytest.approx(whole.mean, rel=1e-5)


def test_every_query_can_be_drawn():
    trainer = SimpleNamespace(sampler=torch.Generator().manual_seed(0))
    drawn = torch.stack([KernelTrainer.draw(trainer, 5, 2) for _ in range(60)])
    assert drawn.unique().tolist() == [0, 1, 2, 3, 4] and (drawn.diff(dim=1) > 0).all()
    assert KernelTrainer.draw(trainer, 5, 5).tolist() == [0, 1, 2, 3, 4]


def test_every_step_is_told():
    told = []
    model = sharp("bert")
    result = distill(model, Fixed(batches(model)), DistillConfig(steps=4, eval_every=2), on_step=told.append)
    assert told == result.history
    assert [(report.step, report.steps, report.held_out is None) for report in told] == [
        (1, 4, True),
        (2, 4, False),
        (3, 4, True),
        (4, 4, False),
    ]
    assert all(len(report.losses) == 2 and report.loss == sum(report.losses.values()) / 2 for report in told)


@pytest.mark.parametrize("stage", ["stage one", "alignment"])
def test_measuring_the_start_says_nothing_about_the_time_left(stage, monkeypatch):
    clock, told = [0.0], []
    monkeypatch.setattr(run, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def passes(seconds, measured):
        def after(*args, **kwargs):
            clock[0] += seconds
            return measured(*args, **kwargs)

        return after

    monkeypatch.setattr(loop, "measure_layers", passes(1000, loop.measure_layers))
    monkeypatch.setattr(alignment, "measure", passes(1000, alignment.measure))
    model = sharp("bert")
    data, train, config = Fixed(batches(model)), distill, DistillConfig(steps=4, eval_every=9)
    if stage == "alignment":
        train, config = align, AlignConfig(steps=4, eval_every=9, blockwise=1.0)
    result = train(model, data, config, on_step=passes(1, told.append))
    assert [step.seconds for step in told] == [0, 1, 2, 3] and result.seconds == 4
    assert [step.left for step in told] == [0, 1, 2 / 3, 0]


def test_data_without_batches_is_refused():
    with pytest.raises(ConfigError, match=r"got data of type list, expected something with train_batches"):
        distill(sharp("bert"), [{"input_ids": torch.ones(1, 4, dtype=torch.long)}])


def test_the_same_seed_gives_the_same_kernels():
    states = []
    for _ in range(2):
        model = sharp("bert")
        distill(model, Fixed(batches(model)), DistillConfig(steps=5, query_sample=4))
        states.append({k: v.clone() for k, v in model.state_dict().items()})
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(info.name, marks=[pytest.mark.slow] * (info not in FAMILIES.values()))
        for info in KERNELS
        if info.learnable
    ],
)
@pytest.mark.parametrize("loss", ["auto", "output"])
@pytest.mark.sampled("values")
def test_accumulated_batches_equal_one_big_batch(kernel, loss):
    """The loss is a mean over valid queries, so that a batch may be cut anywhere, padding and all."""
    rows = batches(original("bert"), 2)
    big = {k: torch.cat([b[k] for b in rows]) for k in rows[0]}
    states, losses = [], []
    for data, count in ((Fixed([big]), 1), (Fixed(rows, rows), 2)):
        model = sharp("bert", kernel=kernel)
        result = distill(model, data, DistillConfig(steps=2, eval_every=1, loss=loss, gradient_accumulation=count))
        states.append(linearize_state(model))
        losses.append([report.held_out for report in result.history])
    torch.testing.assert_close(*states, rtol=0, atol=2e-5)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def linearize_state(model):
    """Return the parameters and buffers of all kernels."""
    return {name: tensor for name, tensor in model.state_dict().items() if ".linear_attention." in name}


def test_a_layer_of_softmax_heads_alone_does_not_count():
    """Its loss was a mean over nothing."""
    model = sharp("llama", window=4, softmax_heads={0: [0, 1, 2, 3], 1: [1]})
    result = distill(model, Fixed(batches(model)), DistillConfig(steps=2, eval_every=1))
    assert [len(report.losses) for report in result.history] == [1, 1] and math.isfinite(result.held_out)


def test_the_loss_does_not_depend_on_padding():
    model = sharp("bert")
    batch = batches(model, 1)[0]
    longer = {k: torch.cat([v, torch.zeros(4, 7, dtype=v.dtype)], dim=1) for k, v in batch.items()}
    losses = []
    for one in (batch, longer):
        result = distill(sharp("bert"), Fixed([one]), DistillConfig(steps=1))
        losses.append(result.history[0].losses)
    for layer in losses[0]:
        assert losses[0][layer] == pytest.approx(losses[1][layer], rel=1e-5)


def test_early_stopping_keeps_the_best():
    model = sharp("bert")
    config = DistillConfig(steps=400, eval_every=1, patience=3, learning_rate=3.0)
    result = distill(model, Fixed(batches(model)), config)
    assert result.stopped == "early stopping"
    assert result.steps == result.best_step + 3
    assert result.held_out == pytest.approx(min(r.held_out for r in result.history), rel=1e-6) or result.best_step == 0


def test_nan_names_layer_and_step_and_keeps_the_last_good_state():
    model = sharp("bert")
    good = batches(model)
    broken = dict(good[0])
    with torch.no_grad():
        # A token whose embedding is infinite, met at the third step only.
        model.embeddings.word_embeddings.weight[95] = math.inf
    broken["input_ids"] = torch.full_like(broken["input_ids"], 95)
    with pytest.raises(TrainingError, match=r"layer encoder\.layer\.0\.attention\.self at step 3") as caught:
        distill(model, Fixed([good[0], good[1], broken]), DistillConfig(steps=10, eval_every=1))
    assert "\n" not in str(caught.value)
    assert "lower the learning rate (--learning-rate), or check the data" in str(caught.value)
    parameters = [p for layer in linear_attentions(model).values() for p in layer.parameters()]
    assert all(torch.isfinite(p).all() for p in parameters)
    fresh = [p for layer in linear_attentions(sharp("bert")).values() for p in layer.parameters()]
    assert any(not torch.equal(one, two) for one, two in zip(parameters, fresh, strict=True))


def test_student_feed_trains_on_its_own_hidden_states():
    teacher, student = sharp("bert"), sharp("bert")
    a = distill(teacher, Fixed(batches(teacher)), DistillConfig(steps=2))
    b = distill(student, Fixed(batches(student)), DistillConfig(steps=2, feed="student"))
    first, last = list(a.history[0].losses)
    assert a.history[0].losses[first] == pytest.approx(b.history[0].losses[first])
    assert a.history[0].losses[last] != pytest.approx(b.history[0].losses[last], rel=1e-6)


def test_a_model_that_is_not_converted_is_refused():
    model = original("bert")
    with pytest.raises(ConfigError, match="expected a converted model"):
        distill(model, Fixed(batches(converted("bert"))))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"steps": -1}, "steps: got -1"),
        ({"loss": "mse"}, "expected one of auto, weights, output, both"),
        ({"precision": "fp8"}, "expected one of no, bf16, fp16"),
        ({"learning_rate": -1.0}, "learning_rate: got -1.0"),
        ({"learning_rate": float("nan")}, "learning_rate: got nan"),
        ({"output_weight": -1.0}, "output_weight: got -1.0"),
        ({"query_sample": 0}, "query_sample: got 0"),
        ({"eval_every": 0}, "eval_every: got 0"),
    ],
)
def test_bad_options(values, words):
    with pytest.raises(ConfigError, match=words):
        DistillConfig(**values)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_frozen_model(precision):
    model = sharp("bert")
    result = distill(model, Fixed(batches(model)), DistillConfig(steps=20, precision=precision))
    assert result.after.mean("kl") < result.before.mean("kl")
    assert all(p.dtype is torch.float32 for p in model.parameters())


def llava():
    torch.manual_seed(0)
    text = original("llama").config
    vision = transformers.CLIPVisionConfig(**IMAGE)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=98)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.model.language_model.named_parameters():
            parameter.mul_(8 if parameter.ndim == 2 and "embed" not in name else 1)
    return model


def test_texts_never_train_the_image_tower_of_a_model_for_both():
    """It ended in a loss of NaN, which is never the best, so that the text's kernels kept their start as well."""
    texts = Fixed([{"input_ids": torch.randint(3, 90, (4, 12), generator=torch.Generator().manual_seed(0))}])
    model = linearize.convert(llava())
    with pytest.raises(DataError, match=r"never reaches 'model.vision_tower.*' and 1 more.*--keep-softmax 2,3"):
        distill(model, texts, DistillConfig(steps=4))
    model = linearize.convert(llava(), keep_softmax="2,3")
    result = distill(model, texts, DistillConfig(steps=20, eval_every=10))
    assert result.after.mean("kl") < 0.9 * result.before.mean("kl") and len(result.after.layers) == 2
    # Its body passes `use_cache` on to the text model; a block that runs twice must not find a cache.
    aligned = align(model, texts, AlignConfig(**ALIGN))
    assert aligned.after.loss < 0.8 * aligned.before.loss


def test_texts_with_images_train_both():
    """A block of the student that runs inside its teacher is not one of the layers whose states LLaVA selects."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.cat([torch.full((2, 9), 98), torch.randint(3, 90, (2, 9), generator=generator)], dim=1)
    both = Fixed([{"input_ids": ids, "pixel_values": torch.randn(2, 3, 30, 30, generator=generator)}])
    model = linearize.convert(llava())
    result = distill(model, both, DistillConfig(steps=4))
    assert len(result.after.layers) == 4
    aligned = align(model, both, AlignConfig(**ALIGN))
    assert aligned.after.loss < 0.8 * aligned.before.loss
    assert {step.phase for step in aligned.history} == {"blockwise", "end to end"}


def test_a_model_that_reads_texts_and_images_together_says_so():
    model = converted("clip")
    texts = Fixed([{"input_ids": inputs_of(model)["input_ids"]}])
    for stage, config in ((distill, DistillConfig(steps=2)), (align, AlignConfig(**ALIGN))):
        with pytest.raises(DataError, match="CLIPModel does not run on input_ids without pixel_values"):
            stage(model, texts, config)
    parts = original("vit").config, transformers.MBartConfig(**BART)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    captions = linearize.convert(transformers.VisionEncoderDecoderModel(config).eval())
    images = Fixed([{"pixel_values": torch.randn(2, 3, 30, 30)}])
    with pytest.raises(DataError, match="does not run on pixel_values without decoder_input_ids"):
        distill(captions, images, DistillConfig(steps=2))


def test_rates_rise_to_the_peak_and_fall_along_a_cosine():
    """The first step after the rise has the peak's rate too, and the last one is still above zero."""
    groups = [{"peak": 2.0, "warmup": 1 / 3}, {"peak": 1.0, "warmup": 0.0}]
    trainer = SimpleNamespace(optimizer=SimpleNamespace(param_groups=groups))
    found = []
    for step in range(1, 7):
        run.PartTrainer.set_rates(trainer, step, 6, factor=0.5)
        found.append([group["lr"] for group in groups])
    half = [0.5 * (1 + math.cos(math.pi * part)) for part in (0, 1 / 4, 1 / 2, 3 / 4)]
    fifths = [0.5 * (1 + math.cos(math.pi * part / 5)) for part in range(5)]
    assert [one for one, _ in found] == pytest.approx([0.5, 1.0, *half])
    assert [other for _, other in found] == pytest.approx([0.5, *(0.5 * share for share in fifths)])


def test_the_longest_row_is_counted_without_padding():
    """From it a hybrid's linear part fades."""
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1]])
    rows = [{"input_ids": torch.zeros_like(mask), "attention_mask": mask}, {"input_ids": torch.zeros(1, 3)}]
    assert run.longest_row(rows) == 4 and run.longest_row(rows[1:]) == 3
    assert run.longest_row([*rows, {"pixel_values": torch.zeros(1, 3, 4, 4)}]) is None


def test_a_better_loss_ends_a_series_of_worse_ones():
    """Early stopping would count all worse losses of a run, not those in a row."""
    progress, found = run.Progress(), []
    for step, loss in enumerate([3.0, 4.0, 2.0, 2.0, 5.0], start=1):
        progress.step = step
        found.append((progress.better(loss), progress.rises, progress.best_step))
    assert found == [(True, 0, 1), (False, 1, 1), (True, 0, 3), (False, 1, 3), (False, 2, 3)]
