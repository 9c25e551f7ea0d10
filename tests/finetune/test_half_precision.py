"""Checkpoints in half precision learn as in fp32, and nothing that a tuning sets for itself stays in the model."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from support.children import tuning
from support.forks import together
from support.tasks import WORDS, photos, word_tokenizer, write
from support.tiny import SMALLER, original

import linearize
from linearize.checkpoint.loading import load_processor
from linearize.training.sharding import make_accelerator
from linearize.training.stage_two.config import DataOptions, LoraConfig, TuneConfig
from linearize.training.stage_two.load import load_for_task
from linearize.training.stage_two.prepare import prepare
from linearize.training.stage_two.tasks import TASKS, task
from linearize.training.stage_two.trainer import finetune, measure_with_interval

RATE = 2e-5
"""Most weights are near 0.02, where numbers of bf16 are 1.2e-4 apart."""
CONFIG = TuneConfig(
    learning_rate=RATE,
    batch_size=8,
    steps=16,
    schedule="constant",
    warmup=0.0,
    dropout=0.0,
    selection_rows=0,
    eval_every=16,
)
KINDS = {named.kind: name for name, named in reversed(TASKS.items()) if named.type.trains}
TEMPLATE = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' [SEP] ' }}{% endfor %}"
IMAGES = "images:ImageClassification"


def rows_of(kind, tmp_path):
    """Rows that a tiny model can learn, for every type of task that trains."""
    chance, rows = random.Random(0), []
    if kind == IMAGES:
        return photos(tmp_path)
    for number in range(60):
        words = chance.choices(WORDS, [0.5**place for place in range(len(WORDS))], k=8)
        text, label = " ".join(words), number % 2
        answer = {"text": [words[2]], "answer_start": [sum(len(word) + 1 for word in words[:2])]}
        turns = [{"role": role, "content": text} for role in ("user", "assistant")]
        more = {"question": "is the", "context": text, "answers": answer, "positions": [3, 5], "messages": turns}
        tags = ["B-X" if word == "bad" else "O" for word in words]
        named = {"text:TextClassification": label, "text:TextRegression": label + 0.5}
        rows.append({"text": text, "label": named.get(kind, 0), "tokens": words, "ner_tags": tags, **more})
    write(tmp_path / "rows.jsonl", rows)
    return tmp_path / "rows.jsonl"


def opened(kind, tmp_path):
    """The data of a type of task, and the folder of a tiny bf16 checkpoint for it."""
    head = TASKS[KINDS[kind]].head
    causal, sizes = head.name == "text-generation", {"vocab_size": 17, "max_position_embeddings": 32}
    folder = tmp_path / "model"
    if kind == IMAGES:
        from transformers import ViTImageProcessor

        model = original("vit", image_size=8, patch_size=4, **SMALLER)
        ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(folder)
    else:
        ends = {"bos_token_id": 2, "eos_token_id": 3} if causal else {}
        model = original("llama" if causal else "bert", *(["AutoModelForCausalLM"] * causal), **sizes, **ends)
        tokenizer = word_tokenizer()
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(folder)
    model.to(torch.bfloat16).save_pretrained(folder)
    columns = {"columns": ("text",)} if kind.startswith(("text:", "language:")) else {}
    chosen = task(KINDS[kind], **columns)
    given = load_processor(str(folder), chosen.modality)
    data = prepare(chosen, given, DataOptions(max_length=16), data=str(rows_of(kind, tmp_path)))
    return str(folder), data


def tuned(folder, data, dtype, tmp_path, config=CONFIG, kernel="hedgehog", **more):
    """Tune the bf16 checkpoint in a dtype; return the model, its change by name in fp64, and the result."""
    model = load_for_task(folder, data).to(dtype)
    model = model if kernel is None else linearize.convert(model, kernel)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    result = finetune(model, data, config, folder=tmp_path / f"{dtype}-{kernel}-{len(more)}", **more)
    after = dict(model.named_parameters())
    assert {name: value.dtype for name, value in after.items()} == {n: v.dtype for n, v in before.items()}
    return model, {name: after[name].detach().double() - before[name].double() for name in before}, result


def blocks(changes):
    """The changes of all matrices in the blocks, as one vector."""
    named = [n for n, x in changes.items() if "layer" in n and x.ndim == 2 and ".linear_attention." not in n]
    return torch.cat([changes[name].flatten() for name in named])


def alike(rough, exact):
    """Whether two changes have one direction and one size, up to the rounding of the kept weights."""
    near = torch.nn.functional.cosine_similarity(rough, exact, dim=0)
    ratio = rough.norm() / exact.norm()
    assert near > 0.8 and 0.8 < ratio < 1.25, f"cosine {near:.3f}, norms {ratio:.3f}"


@pytest.mark.sampled("values")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_type_of_task_learns_as_in_fp32(kind, dtype, tmp_path):
    folder, data = opened(kind, tmp_path)
    _, exact, _ = tuned(folder, data, torch.float32, tmp_path)
    _, rough, _ = tuned(folder, data, dtype, tmp_path)
    exact, rough = blocks(exact), blocks(rough)
    moved = exact.abs() > 8 * RATE
    assert moved.any() and (rough[moved] != 0).double().mean() > 0.8
    alike(rough, exact)


def teach(folder, data):
    teacher = load_for_task(folder, data, seed=3)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
    return {"teacher": teacher}


@pytest.mark.parametrize(
    ("changes", "taught", "kernel"),
    [
        ({"lora": LoraConfig(r=4), "learning_rate": 10 * RATE}, False, "hedgehog"),
        ({"gradient_accumulation": 8, "batch_size": 1}, False, None),
        ({"precision": "bf16"}, False, "hedgehog"),
        ({"freeze_kernels": True, "gradient_checkpointing": True}, False, "hedgehog"),
        ({}, True, "hedgehog"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_every_way_of_tuning_learns_as_in_fp32(dtype, changes, taught, kernel, tmp_path):
    folder, data = opened("language:CausalLanguage", tmp_path)
    config = replace(CONFIG, **changes)
    found = []
    for kind in (torch.float32, dtype):
        more = teach(folder, data) if taught else {}
        found.append(tuned(folder, data, kind, tmp_path, config, kernel, **more))
    alike(*(blocks({n: x for n, x in changes.items() if x.any()}) for _, changes, _ in reversed(found)))
    assert found[1][2].score == pytest.approx(found[0][2].score, rel=0.02)


def test_the_score_is_that_of_the_saved_weights(tmp_path):
    folder, data = opened("language:CausalLanguage", tmp_path)
    for lora in (None, LoraConfig(r=4)):
        model, _, result = tuned(folder, data, torch.bfloat16, tmp_path / str(lora), replace(CONFIG, lora=lora))
        again = measure_with_interval(copy.deepcopy(model), data, batch_size=16)
        assert result.metrics == again.metrics


def test_a_resumed_run_ends_like_a_whole_one(tmp_path):
    folder, data = opened("language:CausalLanguage", tmp_path)
    config = replace(CONFIG, eval_every=4, log_every=1)

    def stop(entry):
        if entry["step"] == 9:
            raise KeyboardInterrupt

    whole, _, expected = tuned(folder, data, torch.bfloat16, tmp_path / "whole", config)
    with pytest.raises(KeyboardInterrupt):
        tuned(folder, data, torch.bfloat16, tmp_path / "cut", config, on_log=stop)
    more = {"resume": True}
    again, _, result = tuned(folder, data, torch.bfloat16, tmp_path / "cut", config, **more)
    assert result.metrics == expected.metrics and result.best_step == expected.best_step
    for one, two in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)


def test_two_processes_equal_one_that_takes_their_batches_in_turn(tmp_path):
    folder, _ = opened("language:CausalLanguage", tmp_path)
    options = {"task": "causal-lm", "columns": "text", "max_length": 16, "device": "cpu", "steps": 16}
    options |= {"learning_rate": RATE, "schedule": "constant", "warmup": 0.0, "selection_rows": 0, "batch_size": 4}
    options |= {"eval_every": 16}
    line, one, two = (folder, str(tmp_path / "rows.jsonl")), tmp_path / "one", tmp_path / "two"
    tuning.main(*line, str(one), options | {"gradient_accumulation": 2})
    together(tuning.main, *line, str(two), options)
    first, second, before = (load_file(path / "model.safetensors") for path in (one, two, tmp_path / "model"))
    assert all(x.dtype == torch.bfloat16 for x in (*first.values(), *second.values()))
    alike(*(blocks({n: x[n].double() - before[n].double() for n in before}) for x in (second, first)))


def test_a_tuning_leaves_nothing_of_its_own_behind(tmp_path, monkeypatch):
    """Stage one of the next model in the same process ran under its autocast; config.json got `use_cache: false`."""
    folder, data = opened("language:CausalLanguage", tmp_path)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    for number, precision in enumerate(("no", "bf16")):
        model = linearize.convert(load_for_task(folder, data), "hedgehog")
        teacher = teach(folder, data)["teacher"]
        before = [copy.deepcopy(one.config.to_dict()) for one in (model, teacher)]
        assert before[0]["use_cache"] is True
        measure_with_interval(model, data)
        assert model.config.to_dict() == before[0]
        config = replace(CONFIG, steps=1, precision=precision)
        finetune(model, data, config, folder=tmp_path / str(number), teacher=teacher)
        assert [one.config.to_dict() for one in (model, teacher)] == before
        assert not {"forward", "_original_forward"} & vars(model).keys()
        assert make_accelerator(model).mixed_precision == "no"
