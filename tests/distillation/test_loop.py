"""Stage one on tiny models: it learns, stops, recovers, and changes nothing but the kernels."""

import itertools
import math

import pytest
import torch
from tiny import converted, inputs_of, original

import linearize
from linearize.attention.interface import linear_attentions
from linearize.distillation import DistillConfig
from linearize.distillation.loop import distill
from linearize.errors import ConfigError, TrainingError


class Fixed:
    """Batches from a list, over and over."""

    def __init__(self, batches, held_out=None):
        self.batches, self.held_out = batches, held_out or batches[:1]

    def train_batches(self, start=0, rank=0, world_size=1):
        return itertools.islice(itertools.cycle(self.batches), start, None)

    def holdout_batches(self):
        return self.held_out


def sharp(name, head="AutoModel", **options):
    """A tiny model whose softmax is far from flat, as a trained one's is."""
    model = original(name, head)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if any(
                part in key
                for part in ("query.weight", "key.weight", "q_proj.weight", "k_proj.weight", "c_attn.weight")
            ):
                parameter.mul_(8)
    return linearize.convert(model, **options)


def batches(model, count=4):
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        batch = inputs_of(model, batch=4, tokens=12)
        if "input_ids" in batch:
            batch["input_ids"] = torch.randint(3, 90, batch["input_ids"].shape, generator=generator)
        made.append(batch)
    return made


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


def test_the_same_seed_gives_the_same_kernels():
    states = []
    for _ in range(2):
        model = sharp("bert")
        distill(model, Fixed(batches(model)), DistillConfig(steps=5, query_sample=4))
        states.append({k: v.clone() for k, v in model.state_dict().items()})
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])


def test_accumulated_batches_equal_one_big_batch():
    """The loss is a mean over valid queries, so that a batch may be cut anywhere, padding and all."""
    model = sharp("bert")
    rows = batches(model, 2)
    big = {k: torch.cat([b[k] for b in rows]) for k in rows[0]}
    whole, parts = sharp("bert"), sharp("bert")
    distill(whole, Fixed([big]), DistillConfig(steps=3))
    distill(parts, Fixed(rows, [big]), DistillConfig(steps=3, gradient_accumulation=2))
    for one, two in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=2e-6)


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
        ({"query_sample": 0}, "query_sample: got 0"),
        ({"eval_every": 0}, "eval_every: got 0"),
    ],
)
def test_bad_options(values, words):
    with pytest.raises(ConfigError, match=words):
        DistillConfig(**values)


def test_bf16_frozen_model():
    model = sharp("bert")
    result = distill(model, Fixed(batches(model)), DistillConfig(steps=20, precision="bf16"))
    assert result.after.mean("kl") < result.before.mean("kl")
    assert all(p.dtype is torch.float32 for p in model.parameters())
