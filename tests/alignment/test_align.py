"""Alignment on tiny models: it comes closer, trains what it is told to, resumes to the bit, never ends worse."""

from __future__ import annotations

import copy
import functools
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers
from support.tiny import TEXT, converted, inputs_of, original
from support.training import ALIGN as QUICK
from support.training import Fixed, batches, loud
from support.training import loud_converted as sharp

import linearize
from linearize.attention.interface import observed
from linearize.conversion.timm import wrap
from linearize.core.errors import ConfigError, DataError, TrainingError
from linearize.fidelity.teacher import frozen_output
from linearize.training.alignment import loop
from linearize.training.alignment.config import LARGEST, WEIGHTS, AlignConfig
from linearize.training.alignment.loop import align, trained_parameters
from linearize.training.alignment.objective import ATTENTION, Objective, measure, pooled, size_of, summed, variance
from linearize.training.alignment.pair import OUTPUT, channels_last, find_blocks, hooked, make_teacher, run
from linearize.training.alignment.trainer import AlignTrainer
from linearize.training.run import Progress
from linearize.training.sharding import make_accelerator
from linearize.training.states import StateFolder


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


HEADS = [
    ("bert", "AutoModel"),
    ("bert", "AutoModelForSequenceClassification"),
    ("bert", "AutoModelForMaskedLM"),
    ("bert", "AutoModelForQuestionAnswering"),
    ("modernbert", "AutoModel"),
    ("gpt2", "AutoModelForCausalLM"),
    ("llama", "AutoModelForCausalLM"),
    ("bart", "AutoModel"),
    ("vit", "AutoModelForImageClassification"),
]


@pytest.mark.sampled("values", "head")
@pytest.mark.parametrize("name, head", HEADS)
def test_the_student_comes_closer(name, head):
    model = sharp(name, head)
    result = align(model, Fixed(batches(model)), AlignConfig(**QUICK))
    assert result.after.loss < 0.8 * result.before.loss
    assert all(result.after.layers[layer] < result.before.layers[layer] for layer in list(result.before.layers)[-1:])
    assert (result.before.logits is None) == (head == "AutoModel")
    assert [step.step for step in result.history] == list(range(1, 17))
    assert {step.phase for step in result.history} == {"blockwise", "end to end"}


def test_the_teacher_is_the_original():
    """What the student is compared with are the numbers of the softmax model itself."""
    for name, head in HEADS:
        if name == "bart":
            continue
        model = sharp(name, head)
        batch = batches(model, 1)[0]
        shown = Objective(model, model, AlignConfig()).teach(batch)
        plain = original(name, head)
        plain.load_state_dict({k: v for k, v in model.state_dict().items() if ".linear_attention." not in k})
        with torch.no_grad():
            expected = plain(**batch, output_hidden_states=True)
        keep = batch["attention_mask"].bool() if "attention_mask" in batch else slice(None)
        last = expected.hidden_states[-1]
        if name == "vit":
            last = plain.vit.layernorm(last) if not torch.equal(last, shown.last) else last
        torch.testing.assert_close(shown.last[keep], last[keep], atol=2e-5, rtol=1e-4)
        for kind, logits in shown.logits.items():
            of_tokens = logits.ndim == 3 and logits.shape[1] > 1
            torch.testing.assert_close(logits[keep] if of_tokens else logits.squeeze(1), _of(expected, kind, keep))


def _of(output, kind, keep):
    logits = output[kind]
    return logits[keep] if logits.ndim == 3 else logits


@pytest.mark.parametrize("train", ["kernels", "lora"])
@pytest.mark.parametrize("kernel", [info.name for info in linearize.kernel_infos()])
def test_kernels_with_nothing_to_learn_are_refused(kernel, train):
    """`--kernel elu --align-train kernels` ended in a KeyError."""
    model = converted("bert", kernel=kernel, window=2 if kernel == "none" else None)
    learns = any(".linear_attention." in name for name, _ in model.named_parameters())
    config = AlignConfig(steps=1, blockwise=0, train=train)
    if learns or train == "lora":
        assert align(model, Fixed(batches(model)), config).steps == 1
    else:
        with pytest.raises(ConfigError, match="got train=kernels, but these kernels have nothing to learn"):
            align(model, Fixed(batches(model)), config)


@pytest.mark.parametrize("train", ["kernels", "attention", "blocks", "lora"])
def test_only_what_is_asked_for_is_trained(train):
    model = sharp("bert", "AutoModelForSequenceClassification")
    before, flags = state(model), [p.requires_grad for p in model.parameters()]
    result = align(model, Fixed(batches(model)), AlignConfig(**QUICK, train=train))
    assert result.after.loss < result.before.loss
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert before.keys() == model.state_dict().keys()
    kernels = {name for name in changed if ".linear_attention." in name}
    assert kernels
    rest = changed - kernels
    if train == "kernels":
        assert not rest
    elif train == "lora":
        assert rest and all(name.endswith(("query.weight", "key.weight", "value.weight")) for name in rest)
    elif train == "attention":
        assert rest and all(".attention." in name for name in rest)
    else:
        assert any(".intermediate." in name for name in rest) and all("encoder.layer" in name for name in rest)
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is None for p in model.parameters())
    assert not model.training


def test_a_given_teacher_is_left_as_it_was_and_equals_the_own_softmax():
    model = sharp("bert")
    teacher = original("bert")
    teacher.load_state_dict({k: v for k, v in model.state_dict().items() if ".linear_attention." not in k})
    before = state(teacher)
    one, two = copy.deepcopy(model), copy.deepcopy(model)
    config = AlignConfig(**QUICK)
    first = align(one, Fixed(batches(model)), config, teacher=teacher)
    second = align(two, Fixed(batches(model)), config)
    assert type(teacher).__name__ == "BertModel" and all(torch.equal(before[k], v) for k, v in state(teacher).items())
    assert first.after == second.after
    assert all(torch.equal(a, b) for a, b in zip(state(one).values(), state(two).values(), strict=True))


def test_blockwise_gradients_are_those_of_the_blocks_under_the_teachers_inputs():
    """Against autograd over everything at once."""
    model = sharp("bert")
    batch = batches(model, 1)[0]
    objective = Objective(model, make_teacher(model, None, shared=False), AlignConfig())
    objective.measure_scales([batch])
    model.requires_grad_(True)
    terms = objective.blockwise(batch, (1.0, 1.0), train=True)
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    mask, keep = batch["attention_mask"], batch["attention_mask"].bool()
    inputs, outputs, attended = {}, {}, {}
    handles = []
    for name, attention in objective.blocks.items():
        module = objective.teacher.get_submodule(name)
        handles.append(
            module.register_forward_hook(
                lambda m, a, o, n=name: (inputs.update({n: a[0]}), outputs.update({n: o}))[0] and None
            )
        )
        child = objective.teacher.get_submodule(attention)
        handles.append(child.register_forward_hook(lambda m, a, o, n=name: attended.update({n: o[0]})))
    objective.teach(batch)
    for handle in handles:
        handle.remove()
    total = 0.0
    for name in objective.blocks:
        layer = model.get_submodule(name)
        mine = layer.attention(inputs[name], mask)[0]
        whole = layer(inputs[name], mask)
        for got, target in ((mine, attended[name]), (whole, outputs[name])):
            target = target[keep]
            spread = (target - target.mean(dim=0)).square().sum() / len(target)
            total = total + (got[keep] - target).square().sum() / len(target) / spread
    total.backward()
    torch.testing.assert_close(torch.tensor(sum(terms.values())), total.detach())
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, atol=1e-6, rtol=1e-4)
        else:
            assert name not in found


@pytest.mark.sampled("values")
@pytest.mark.parametrize("options", [{}, {"train": "kernels"}, {"train": "lora"}, {"gradient_accumulation": 2}])
@pytest.mark.parametrize("stop_at", [3, 10])
def test_resumed_equals_uninterrupted_to_the_bit(options, stop_at, tmp_path):
    class Stop(Exception):
        pass

    def run(folder, stop=None, resume=False):
        model = sharp("bert")

        def on_step(report):
            if report.step == stop:
                raise Stop

        config = AlignConfig(**QUICK | options, save_every=2, folder=str(tmp_path / folder), resume=resume)
        try:
            result = align(model, Fixed(batches(model)), config, on_step=on_step)
        except Stop:
            return None
        return state(model), result

    whole, result = run("whole")
    assert run("cut", stop=stop_at) is None
    resumed, again = run("cut", resume=True)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert (again.steps, again.best_step, again.after) == (result.steps, result.best_step, result.after)
    assert [step.losses for step in again.history] == [step.losses for step in result.history]
    assert StateFolder(tmp_path / "cut", 2).steps() == [14, 16]


@pytest.mark.parametrize("options", [{}, {"window": 4, "sinks": 1}], ids=["plain", "window"])
def test_blocks_are_aligned_under_bf16(options):
    """Gradients are computed during the teacher's pass under autocast, but outside autocast, as fp32 sums need."""
    moved = []
    for precision in ("no", "bf16"):
        model = sharp("llama", **options)
        before = state(model)
        config = AlignConfig(steps=4, blockwise=1.0, eval_every=4, precision=precision)
        result = align(model, Fixed(batches(model)), config)
        assert result.after.loss < result.before.loss
        after = state(model)
        moved.append(torch.cat([(after[name] - before[name]).flatten() for name in before]))
    exact, rough = moved
    assert torch.nn.functional.cosine_similarity(exact, rough, dim=0) > 0.9


@pytest.mark.parametrize(("phase", "weight"), [("blockwise", 1.0), ("end to end", 1.0), ("end to end", LARGEST)])
def test_small_gradients_are_not_lost_in_fp16(phase, weight):
    """Without a factor of the loss 98 % were 0, and the alignment trained hardly anything; the largest may overflow."""
    found = []
    for precision in ("no", "fp16"):
        model = converted("bert")
        whole = {name: value.repeat(64, 1) for name, value in batches(model, 1)[0].items()}
        config = AlignConfig(precision=precision, **dict.fromkeys(WEIGHTS, weight), max_grad_norm=LARGEST)
        objective = Objective(model, make_teacher(model, None, shared=False), config)
        objective.measure_scales([whole])
        trained = trained_parameters(model, objective.blocks, "blocks")
        trainer = AlignTrainer(objective, trained, make_accelerator(model), phase, 2, precision)
        [given], _ = trainer.get_batch_samples(iter([whole]), 1, trainer.args.device)
        trainer.training_step(model, given)
        trainer._clip_grad_norm(model)
        found.append(torch.cat([parameter.grad.flatten() for parameter in trained.values()]))
    exact, rough = found
    # The error of a student is a small difference, so fp16's rounding moves its gradient by 4.6 to 5.3 % on the
    # instruction sets tried. Without the factor it moves by 70 %, and 98 % of the numbers are 0.
    assert (rough - exact).norm() < 0.1 * exact.norm()
    assert (rough == 0).float().mean() < 0.1


def test_small_updates_of_half_precision_weights_add_up(tmp_path):
    """Each is far below what bf16 can tell apart; a resumed run still agrees to the bit."""

    def run(folder, stop=None, resume=False):
        model = sharp("bert").to(torch.bfloat16)
        before = state(model)

        def on_step(report):
            if report.step == stop:
                raise InterruptedError

        options = {"steps": 40, "learning_rate": 2e-4, "kernel_learning_rate": 1e-3, "blockwise": 0.0, "eval_every": 10}
        config = AlignConfig(**options, save_every=5, folder=str(tmp_path / folder), resume=resume)
        try:
            result = align(model, Fixed(batches(model)), config, on_step=on_step)
        except InterruptedError:
            return None
        return before, state(model), result

    before, after, result = run("whole")
    assert result.best_step > 0 and result.after.loss < result.before.loss
    weights = [name for name in before if "layer." in name and name.endswith("dense.weight")]
    moved = [(before[name] != after[name]).float().mean().item() for name in weights]
    # One step moves a weight of 0.2 by 2e-4; the next number in bf16 is 8e-4 away.
    assert min(moved) > 0.3
    assert after[weights[0]].dtype == torch.bfloat16
    assert run("cut", stop=23) is None
    _, again, resumed = run("cut", resume=True)
    assert all(torch.equal(after[name], again[name]) for name in after)
    assert resumed.after == result.after


def test_resume_with_anything_else_is_refused_by_name(tmp_path):
    def run(model=None, data=None, teacher=None, **options):
        model = model or sharp("bert")
        data = data or Fixed(batches(model))
        align(model, data, AlignConfig(**QUICK | options, folder=str(tmp_path)), teacher=teacher)

    run(save_every=4)
    with pytest.raises(ConfigError, match=r"started with learning_rate=0\.002, now it is 0\.001"):
        run(resume=True, learning_rate=1e-3)
    with pytest.raises(ConfigError, match="data contents"):
        run(resume=True, data=Fixed(batches(sharp("bert"))[::-1]))
    with pytest.raises(ConfigError, match="kernels"):
        run(resume=True, model=sharp("bert", kernel_args={"activation": "exp"}))
    other = loud("bert")
    with torch.no_grad():
        other.encoder.layer[0].output.dense.weight[0, 0] += 1
    with pytest.raises(ConfigError, match="teacher weights"):
        run(resume=True, teacher=other)
    run(resume=True)


def test_a_batch_split_over_steps_of_accumulation_gives_the_same_gradient():
    model = sharp("bert", "AutoModelForSequenceClassification")
    whole = batches(model, 1)[0]
    parts = [{name: value[rows] for name, value in whole.items()} for rows in (slice(0, 1), slice(1, 4))]
    objective = Objective(model, make_teacher(model, None, shared=False), AlignConfig())
    objective.measure_scales([whole])
    tokens, rows = size_of(whole)

    def gradient(given):
        model.zero_grad()
        for batch in given:
            share = size_of(batch)[0] / tokens, size_of(batch)[1] / rows
            objective.total(objective.end_to_end(batch, share)).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    one, two = gradient([whole]), gradient(parts)
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["bert", "clip", "bart"])
def test_the_terms_of_parts_add_up_to_those_of_the_whole_batch(name):
    """The states of images were weighted by the texts' tokens."""
    model = sharp(name)
    whole = inputs_of(model, batch=4, tokens=12)
    whole["attention_mask"] = (torch.arange(12) < torch.tensor([[12], [5], [3], [9]])).long()
    parts = [{key: value[rows] for key, value in whole.items()} for rows in (slice(0, 1), slice(1, 4))]
    objective = Objective(model, make_teacher(model, None, shared=True), AlignConfig(pooled_weight=0))
    objective.measure_scales([whole])
    for terms_of in (objective.end_to_end, functools.partial(objective.blockwise, train=False)):
        one, two = (summed(terms_of, given) for given in ([whole], parts))
        assert len(one) > 1 and all(float(two[key]) == pytest.approx(float(one[key]), rel=1e-4) for key in one)


@pytest.mark.parametrize("name, labels", [("llama", None), ("bert", 1)])
def test_variances_do_not_depend_on_the_batches(name, labels):
    """They were means of the batches' own: 1e-12 for the numbers of a regression in batches of one row."""
    head = "AutoModelForSequenceClassification" if labels else "AutoModelForCausalLM"
    model = linearize.convert(loud(name, head, **({"num_labels": labels} if labels else {})))
    whole = batches(model, 1)[0]
    objective = Objective(model, make_teacher(model, None, shared=False), AlignConfig())
    objective.measure_scales([whole])
    together = dict(objective.scales)
    objective.measure_scales([{key: value[row : row + 1] for key, value in whole.items()} for row in range(4)])
    assert objective.scales == pytest.approx(together, rel=1e-6)
    taught = objective.teach(whole)
    by_hand = {key: float(variance(value, taught.masks[key])) for key, value in taught.states.items()}
    assert {key: together[key] for key in by_hand} == pytest.approx(by_hand, rel=1e-5)


def test_padding_does_not_matter():
    model = sharp("bert")
    batch = batches(model, 1)[0]
    longer = {
        name: torch.nn.functional.pad(value, (0, 5), value=7 * (name == "input_ids")) for name, value in batch.items()
    }
    objective = Objective(model, make_teacher(model, None, shared=True), AlignConfig())
    objective.measure_scales([batch])
    one, two = measure(objective, [batch]), measure(objective, [longer])
    assert one.cosine == pytest.approx(two.cosine, abs=1e-6)
    assert one.layers == pytest.approx(two.layers, rel=1e-5)


def test_towers_of_one_length_have_masks_of_their_own():
    """The image's tokens took the text's mask where there were equally many: its last ones did not count."""
    model = sharp("clip")
    image, text = torch.randn(2, 3, 30, 30), torch.randint(3, 90, (2, 10))
    text[0, -4:] = text[1, -1:] = 98
    mask = torch.ones_like(text)
    mask[0, -3:] = 0
    found = []
    for more in (0, 2):
        pad = torch.nn.functional.pad
        batch = {"input_ids": pad(text, (0, more), value=98), "attention_mask": pad(mask, (0, more))}
        batch["pixel_values"] = image
        objective = Objective(model, make_teacher(model, None, shared=False), AlignConfig())
        objective.measure_scales([batch])
        errors = objective.blockwise(batch, (1.0, 1.0), train=False)
        assert sum("vision" in name for name in errors) == 2
        found.append({**objective.scales, **measure(objective, [batch]).layers, **errors})
    assert found[1] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.parametrize("kind", ["ForCTC", "Model"])
def test_padded_sound_does_not_matter(kind):
    """The batch's mask counts samples, so the states' padded frames counted too."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    sizes |= {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
    sizes |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer"}
    config = transformers.Wav2Vec2Config(vocab_size=32, **sizes)
    torch.manual_seed(0)
    model = getattr(transformers, f"Wav2Vec2{kind}")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Louder attentions, so that rounding does not matter.
            parameter.mul_(12 if "_proj.weight" in name else 1)
    model = linearize.convert(model, kernel="hedgehog")
    sound = torch.randn(2, 800)
    batch = {"input_values": sound, "attention_mask": torch.ones(2, 800, dtype=torch.long)}
    for tensor in batch.values():
        tensor[1, 500:] = 0
    longer = {name: torch.nn.functional.pad(value, (0, 600)) for name, value in batch.items()}
    objective = Objective(model, make_teacher(model, None, shared=False), AlignConfig())
    found = []
    for given in (batch, longer):
        objective.measure_scales([given])
        errors = objective.blockwise(given, (1.0, 1.0), train=False)
        close = measure(objective, [given])
        found.append({**objective.scales, **close.layers, "cosine": close.cosine, "logits": close.logits or 0.0})
        found[-1] |= {f"blockwise {name}": error for name, error in errors.items()}
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("shared", [False, True])
def test_a_shared_block_is_aligned_on_all_its_calls(shared):
    """ALBERT's only block was aligned on the first of its calls, so a quarter of the steps made the others worse."""
    torch.manual_seed(0)
    sizes = TEXT | {"num_hidden_layers": 3, "embedding_size": 16}
    model = transformers.AlbertModel(transformers.AlbertConfig(**sizes)).eval()
    with torch.no_grad():
        for parameter in model.encoder.parameters():
            parameter.mul_(8 if parameter.ndim == 2 else 1)
    model = linearize.convert(model, kernel="hedgehog")
    teacher, ids = make_teacher(model, None, shared=shared), torch.randint(3, 90, (2, 10))
    objective = Objective(model, teacher, AlignConfig())
    objective.measure_scales([{"input_ids": ids}])
    ((block, attention),) = objective.blocks.items()
    inner, outer, calls = [], [], []
    keep = {
        attention: lambda module, args, kwargs, output: inner.append(output[0]),
        block: lambda module, args, kwargs, output: calls.append((args, kwargs)) or outer.append(output),
    }
    with torch.no_grad():
        with observed(teacher, frozen_output), hooked(teacher, keep):
            teacher(ids)
        expected, calls_of_teacher = 0.0, calls.copy()
        for (args, kwargs), attended, target in zip(calls_of_teacher, inner.copy(), outer.copy(), strict=True):
            with hooked(model, keep):
                model.get_submodule(block)(*args, **kwargs)
            expected += float((outer[-1] - target).square().sum(-1).mean()) / objective.scales[block]
            expected += float((inner[-1] - attended).square().sum(-1).mean()) / objective.scales[ATTENTION + block]
    found = objective.blockwise({"input_ids": ids}, (1.0, 1.0), train=False)
    assert len(calls_of_teacher) == 3 and found == pytest.approx({block: expected}, rel=1e-4)


def test_it_never_ends_worse_than_it_began():
    """At a rate that throws the weights about, those of the start come back."""
    model = sharp("bert")
    align(model, Fixed(batches(model)), AlignConfig(**QUICK))
    before = state(model)
    wild = AlignConfig(steps=6, eval_every=1, learning_rate=50.0, kernel_learning_rate=50.0, patience=1, warmup=0.0)
    result = align(model, Fixed(batches(model)), wild, teacher=loud("bert"))
    assert (result.best_step, result.after) == (0, result.before)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert result.stopped == "early stopping"


def test_two_worse_evaluations_halve_the_rate_and_goes_back():
    model = sharp("bert")
    wild = AlignConfig(**QUICK | {"learning_rate": 0.3, "kernel_learning_rate": 0.3, "eval_every": 1, "blockwise": 0.0})
    rates = [step.learning_rate for step in align(model, Fixed(batches(model)), wild).history]
    assert min(rates[1:8]) < 0.3 / 1.9


def test_divergence_names_layer_and_step_and_keeps_the_best():
    model = sharp("bert")
    before = state(model)
    made = batches(model)
    poisoned = sharp("bert")
    data = Fixed(made)

    class Poison(Fixed):
        def train_batches(self, start=0, rank=0, world_size=1):
            for number, batch in enumerate(super().train_batches(start, rank, world_size)):
                if number == 3:
                    with torch.no_grad():
                        model.encoder.layer[1].output.dense.weight.fill_(float("nan"))
                yield batch

    data = Poison(made)
    config = AlignConfig(**QUICK | {"blockwise": 0.0}, patience=0, train="kernels")
    with pytest.raises(TrainingError, match=r"error of encoder\.layer\.1 became nan at step 4"):
        align(model, data, config)
    kernels = {name: tensor for name, tensor in model.state_dict().items() if ".linear_attention." in name}
    assert all(tensor.isfinite().all() for tensor in kernels.values())
    assert before.keys() == model.state_dict().keys() and poisoned is not model


def test_regression_logits_count_as_numbers():
    model = sharp("bert", "AutoModelForSequenceClassification")
    plain = original("bert", "AutoModelForSequenceClassification", num_labels=1)
    model = linearize.convert(plain)
    batch = batches(model, 1)[0]
    objective = Objective(model, make_teacher(model, None, shared=True), AlignConfig())
    objective.measure_scales([batch])
    found = measure(objective, [batch])
    taught = objective.teach(batch).logits["logits"]
    with torch.no_grad():
        learned = objective.learn(batch).logits["logits"]
    expected = (taught - learned).square().mean() / (taught - taught.mean()).square().mean()
    assert found.logits == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification"])
def test_classes_are_not_tokens_and_several_labels_are_not_one_choice(problem):
    """With as many classes as tokens, those at padding were ignored; a shift of all labels counted as no difference."""
    plain = original("bert", "AutoModelForSequenceClassification", num_labels=7, problem_type=problem)
    model = linearize.convert(copy.deepcopy(plain))
    batch = {
        "input_ids": torch.arange(1, 15).reshape(2, 7),
        "attention_mask": torch.tensor([[1] * 7, [1] * 4 + [0] * 3]),
    }
    with torch.no_grad():
        model.classifier.bias += 2.0
        model.classifier.bias[6] += 1.0
        teacher = make_teacher(model, plain, shared=False)
        mine, theirs = (side.eval()(**batch).logits.double() for side in (model, plain))
    if problem == "single_label_classification":
        expected = (theirs.softmax(-1) * (theirs.log_softmax(-1) - mine.log_softmax(-1))).sum(-1).mean()
    else:
        p, q = theirs.sigmoid(), mine.sigmoid()
        expected = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean()
    objective = Objective(model, teacher, AlignConfig())
    objective.measure_scales([batch])
    assert measure(objective, [batch]).logits == pytest.approx(float(expected), rel=1e-4)


def test_blocks_of_nested_models():
    assert list(find_blocks(sharp("bert"))) == ["encoder.layer.0", "encoder.layer.1"]
    assert next(iter(find_blocks(sharp("bert")).values())) == "encoder.layer.0.attention"
    assert next(iter(find_blocks(sharp("gpt2", "AutoModelForCausalLM")).values())) == "transformer.h.0.attn"
    assert len(find_blocks(sharp("bart"))) == 4


def test_a_layer_that_all_layers_share_comes_closer():
    torch.manual_seed(0)
    model = transformers.AlbertForMaskedLM(transformers.AlbertConfig(**TEXT | {"embedding_size": 16}))
    with torch.no_grad():
        for parameter in model.albert.encoder.parameters():
            parameter.mul_(8 if parameter.ndim == 2 else 1)
    model = linearize.convert(model)
    layer = "albert.encoder.albert_layer_groups.0.albert_layers.0"
    assert find_blocks(model) == {layer: f"{layer}.attention"}
    result = align(model, Fixed(batches(model)), AlignConfig(**QUICK))
    assert {step.phase for step in result.history} == {"blockwise", "end to end"}
    assert result.after.loss < 0.8 * result.before.loss


def test_timm():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    sizes = {"img_size": 32, "depth": 2, "embed_dim": 32, "num_heads": 4}
    plain = timm.create_model("vit_tiny_patch16_224", **sizes)
    with torch.no_grad():
        for parameter in plain.blocks.parameters():
            parameter.mul_(8 if parameter.ndim == 2 else 1)
    model = linearize.convert(wrap(plain, model_args=sizes))
    assert next(iter(find_blocks(model).values())).endswith("blocks.0.attn")
    data = Fixed([{"pixel_values": torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))}])
    result = align(model, data, AlignConfig(**QUICK))
    assert result.after.loss < 0.8 * result.before.loss and result.after.logits is not None


@pytest.mark.parametrize(
    "teacher, match",
    [
        (lambda: sharp("bert"), "got a converted model"),
        (lambda: original("roberta"), "model of type 'roberta', expected 'bert'"),
        (lambda: original("bert", hidden_size=16), "of another size"),
        (lambda: original("bert", num_hidden_layers=3), "the student has none"),
        (lambda: original("bert", vocab_size=120), "of another size"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(teacher, match):
    model = sharp("bert")
    before = state(model)
    with pytest.raises(ConfigError, match=match):
        align(model, Fixed(batches(model)), AlignConfig(**QUICK), teacher=teacher())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_teacher_of_another_head_or_label_set_is_refused():
    model = sharp("bert", "AutoModelForSequenceClassification")
    data = Fixed(batches(model))
    with pytest.raises(ConfigError, match="and needs its logits"):
        align(model, data, AlignConfig(**QUICK), teacher=original("bert"))
    with pytest.raises(ConfigError, match="same labels"):
        named = original("bert", "AutoModelForSequenceClassification", id2label={0: "bad", 1: "good"})
        align(model, data, AlignConfig(**QUICK), teacher=named)


def test_bad_options_and_data():
    model = sharp("bert")
    with pytest.raises(ConfigError, match="expected a converted model"):
        align(original("bert"), Fixed(batches(model)))
    with pytest.raises(ConfigError, match="holdout_batches"):
        align(model, [1, 2])
    with pytest.raises(DataError, match="no held-out batch"):
        empty = Fixed(batches(model))
        empty.held_out = []
        align(model, empty)
    for bad in ({"steps": -1}, {"blockwise": 2.0}, {"train": "all"}, {"learning_rate": float("nan")}, {"resume": True}):
        with pytest.raises(ConfigError, match="alignment"):
            AlignConfig(**bad)
    with pytest.raises(ConfigError, match="all 0"):
        AlignConfig(hidden_weight=0.0, pooled_weight=0.0, logits_weight=0.0)
    assert align(model, Fixed(batches(model)), AlignConfig(steps=0)).steps == 0
    assert OUTPUT == "output"


@pytest.mark.parametrize("train", ["attention", "lora"])
@pytest.mark.parametrize("named", [False, True])
def test_a_teacher_shares_the_weights_that_are_not_trained(train, named, monkeypatch):
    """And gives the same numbers as a whole copy, to the bit."""
    results, teachers = [], []

    def noted(student, teacher, *, shared, frozen):
        made = make_teacher(student, teacher, shared=shared, frozen=frozen if len(teachers) else ())
        own = {parameter.data_ptr() for parameter in student.parameters()}
        teachers.append({name for name, parameter in made.named_parameters() if parameter.data_ptr() in own})
        assert not any(parameter.requires_grad for parameter in made.parameters())
        return made

    monkeypatch.setattr(loop, "make_teacher", noted)
    for _ in range(2):
        model = sharp("llama", "AutoModelForCausalLM")
        other = loud("llama", "AutoModelForCausalLM") if named else None
        flags = [parameter.requires_grad for parameter in model.parameters()]
        options = {"train": train, "steps": 4, "eval_every": 2}
        result = align(model, Fixed(batches(model)), AlignConfig(**options), teacher=other)
        assert [parameter.requires_grad for parameter in model.parameters()] == flags
        results.append((model.state_dict(), [step.losses for step in result.history], result.after))
    (first, losses, after), (second, others, again) = results
    assert losses == others and after == again and all(torch.equal(first[key], second[key]) for key in first)
    whole, part = teachers
    assert not whole and {"model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"} <= part
    assert ("model.layers.0.self_attn.q_proj.weight" in part) is (train == "lora")


def test_a_run_at_half_the_rate_forgets_its_moments():
    """The old moments would drive the restored weights in the same direction again."""
    run = object.__new__(loop._Run)
    run.progress = Progress(halved=1, rises=2)
    run.trainer = SimpleNamespace(factor=0.5, optimizer=SimpleNamespace(state={"weight": "moments"}))
    run._slow_down()
    assert (run.progress.halved, run.progress.rises, run.trainer.factor) == (2, 0, 0.25)
    assert run.trainer.optimizer.state == {}


def test_outputs_of_an_image_model_are_pooled_over_patches():
    """SegFormer returns its last state and its logits with the channels before the rows of patches."""
    config = transformers.SegformerConfig(
        hidden_sizes=[8, 8, 16, 24], depths=[1] * 4, num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=16,
        num_labels=5,
    )  # fmt: skip
    torch.manual_seed(0)
    model = linearize.convert(transformers.SegformerForSemanticSegmentation(config).eval(), "hedgehog")
    batch = {"pixel_values": torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(1))}
    with torch.no_grad():
        found = run(model, find_blocks(model), batch, head=True)
        state, logits = model.segformer(**batch).last_hidden_state, model(**batch).logits
    assert state.shape == (2, 24, 2, 3) and logits.shape == (2, 5, 16, 24)
    torch.testing.assert_close(pooled(found.last, None), state.mean(dim=(2, 3)))
    assert torch.equal(found.logits["logits"], logits.permute(0, 2, 3, 1))


def by_hand(mine, theirs):
    """The error of states [B, C, H, W], over the spread of the vectors [C] of all patches."""
    x, y = (state.double().permute(0, 2, 3, 1).flatten(0, 2) for state in (mine, theirs))
    return float((x - y).square().sum() / (y - y.mean(dim=0)).square().sum())


def test_blocks_that_have_their_channels_first():
    """Visformer's blocks and attentions are convolutions."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    sizes = {"img_size": 64, "init_channels": 8, "embed_dim": 8, "depth": (1, 1, 1), "num_heads": 2, "group": 2}
    plain = timm.create_model("visformer_tiny", **sizes).eval()
    with torch.no_grad():
        for parameter in (*plain.stage2.parameters(), *plain.stage3.parameters()):
            parameter.mul_(8 if parameter.ndim == 4 else 1)
    batch = {"pixel_values": torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(1))}
    model = linearize.convert(wrap(plain, model_args=sizes), example_inputs=batch).eval()
    objective = Objective(model, make_teacher(model, None, shared=True), AlignConfig())
    blocks = objective.blocks
    assert list(blocks.values()) == ["timm_model.stage2.0.attn", "timm_model.stage3.0.attn"]
    seen = []
    for observe in (None, frozen_output, lambda *_: None):
        states = {}
        hooks = {
            name: lambda module, args, kwargs, output, name=name, states=states: states.update({name: output})
            for pair in blocks.items()
            for name in pair
        }
        with torch.no_grad(), hooked(model, hooks), observed(model, observe):
            model(**batch)
        seen.append(states)
    student, _, teacher = seen
    assert teacher["timm_model.stage2.0"].shape == (3, 8, 4, 4)
    objective.measure_scales([batch])
    with torch.no_grad():
        terms = objective.end_to_end(batch, (1.0, 1.0))
    for block in blocks:
        assert float(terms[block]) == pytest.approx(by_hand(student[block], teacher[block]), rel=1e-4)
    mine, theirs = (states[block].mean(dim=(2, 3)) for states in (student, teacher))
    expected = float((1 - torch.nn.functional.cosine_similarity(mine, theirs)).mean())
    assert float(terms["pooled"]) == pytest.approx(expected, rel=1e-3, abs=1e-6)
    # The first block has the teacher's inputs in both.
    first, attention = next(iter(blocks.items()))
    errors = objective.blockwise(batch, (1.0, 1.0), train=False)
    expected = sum(by_hand(student[name], teacher[name]) for name in (first, attention))
    assert errors[first] == pytest.approx(expected, rel=1e-4)


def test_axes_of_an_image():
    image = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    for known in ({3}, {3, 4, 7}):
        assert torch.equal(channels_last(image, known), image.permute(0, 2, 3, 1))
    assert channels_last(image, {5}) is image and channels_last(image[0], {3}).shape == (3, 4, 5)
    # Known numbers that decide nothing: the image is square.
    for known in ((), {3, 4}):
        assert channels_last(torch.zeros(2, 3, 4, 4), known).shape == (2, 4, 4, 3)
        assert channels_last(torch.zeros(2, 4, 4, 3), known).shape == (2, 4, 4, 3)
    for shape in ((2, 4, 4, 4), (2, 3, 4, 5), (2, 4, 3, 4)):
        with pytest.raises(ConfigError, match=r"got an image of the axes \[2, \d, \d, \d\]"):
            channels_last(torch.zeros(shape), {4} if shape[1:] != (3, 4, 5) else ())


def test_the_best_step_may_be_one_of_an_earlier_phase(monkeypatch, tmp_path):
    """Also if the run is resumed in the later phase, which keeps the weights that it began with."""
    losses = {"blockwise": [1.0, 0.5, 0.7], "end to end": [1.0, 2.0, 2.0]}
    held_out_loss = AlignTrainer.held_out_loss

    def given(trainer, held_out):
        held_out_loss(trainer, held_out)
        return losses[trainer.phase].pop(0)

    monkeypatch.setattr(AlignTrainer, "held_out_loss", given)
    options = {"steps": 8, "blockwise": 0.5, "eval_every": 2, "save_every": 1, "folder": str(tmp_path), "keep": 9}
    model = sharp("bert")
    result = align(model, Fixed(batches(model)), AlignConfig(**options))
    assert result.best_step == 2 and result.after.loss < result.before.loss
    for step in (7, 8):
        shutil.rmtree(tmp_path / f"step-{step}", ignore_errors=True)
    losses["end to end"] = [2.0]
    model = sharp("bert")
    assert align(model, Fixed(batches(model)), AlignConfig(**options, resume=True)).best_step == 2
