"""Half precision, weights on other devices or on disk, 8-bit weights, and checkpoints of transformers' Trainer."""

from __future__ import annotations

import copy
from functools import partial

import accelerate
import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.generation import GREEDY, causal, prompts
from support.tiny import converted, inputs_of, original, outputs
from transformers import AutoModel

import linearize
from linearize.core.errors import CheckpointError
from linearize.modeling.weights import check_numbers


def relative_error(got, expected, inputs):
    """Return how far an output [B, T, X] is from another, over the tokens that are no padding."""
    real = inputs.get("attention_mask", torch.ones(expected.shape[:2])).bool()
    got, expected = got[real].float(), expected[real]
    return ((got - expected).norm() / expected.norm()).item()


@pytest.mark.sampled("values")
@pytest.mark.parametrize("kernel", ["hedgehog", "flexformer_n", "elu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "modernbert"])
def test_half_precision_costs_what_it_costs_the_original(name, dtype, kernel, tmp_path):
    before, model = original(name), converted(name, kernel=kernel)
    inputs = inputs_of(model)
    low = {key: x.to(dtype) if x.is_floating_point() else x for key, x in inputs.items()}
    cost = relative_error(outputs(copy.deepcopy(before).to(dtype), low)[0], outputs(before, inputs)[0], inputs)
    expected = outputs(model, inputs)[0]
    linearize.save(model, tmp_path / "full")
    cast = copy.deepcopy(model).to(dtype)
    cast.save_pretrained(tmp_path / "half")
    loaded = AutoModel.from_pretrained(tmp_path / "full", dtype=dtype).eval()
    again = AutoModel.from_pretrained(tmp_path / "half", dtype="auto").eval()
    assert again.dtype == loaded.dtype == dtype
    for half in (cast, loaded, again):
        assert 0 < relative_error(outputs(half, low)[0], expected, inputs) < 1.15 * cost


@pytest.mark.parametrize("options", [{}, {"window": 4, "softmax_heads": {0: [1, 2]}}], ids=["kernel", "softmax heads"])
def test_autocast_costs_what_it_costs_the_original(options):
    before, model = original("llama"), converted("llama", **options)
    inputs = inputs_of(model)
    plain = [outputs(one, inputs)[0] for one in (before, model)]
    with torch.autocast("cpu", torch.bfloat16):
        low = [outputs(one, inputs)[0] for one in (before, model)]
    cost, got = (relative_error(*pair, inputs) for pair in zip(low, plain, strict=True))
    assert 0 < got < 1.15 * cost


def offloaded(how, folder, model):
    """Load a checkpoint with its weights laid out in one of accelerate's ways."""
    if how == "auto":
        return AutoModel.from_pretrained(folder, device_map="auto")
    if how == "split":
        size = sum(x.numel() * x.element_size() for x in model.parameters())
        limits = {"cpu": int(size * 0.6)}
        return AutoModel.from_pretrained(folder, device_map="auto", max_memory=limits, offload_folder=folder / "off")
    loaded = AutoModel.from_pretrained(folder)
    if how == "disk":
        accelerate.disk_offload(loaded, folder / "off", torch.device("cpu"))
        return loaded
    return accelerate.cpu_offload(loaded, torch.device("cpu"))


@pytest.mark.sampled("values")
@pytest.mark.parametrize("kernel", ["hedgehog", "flexformer_n", "luna"])
@pytest.mark.parametrize("how", ["auto", "split", "cpu", "disk"])
@pytest.mark.parametrize("name", ["bert", "llama", "vit"])
def test_offloaded_weights_give_the_same_numbers(name, how, kernel, tmp_path):
    if (name, kernel) == ("llama", "luna"):
        kernel = "elu"  # luna is bidirectional
    model = converted(name, kernel=kernel)
    inputs = inputs_of(model)
    linearize.save(model, tmp_path / "out")
    loaded = offloaded(how, tmp_path / "out", model).eval()
    assert any(x.is_meta for x in loaded.parameters()) == (how != "auto")
    assert torch.equal(outputs(loaded, inputs)[0], outputs(model, inputs)[0])


def test_generation_with_offloaded_weights(tmp_path):
    model = causal("llama")
    linearize.save(model, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    accelerate.cpu_offload(loaded, torch.device("cpu"))
    assert torch.equal(loaded.generate(**prompts(), **GREEDY), model.generate(**prompts(), **GREEDY))


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("how", ["cpu", "disk"])
def test_the_native_op_does_not_read_offloaded_weights(how, window, switch, tmp_path):
    """It read their addresses, which are 0: the process ended with a segmentation fault."""
    model, inputs = causal("llama", window=window), prompts(padded=False)
    linearize.save(model, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    expected = outputs(loaded, inputs)[0]
    switch(False)
    assert not torch.equal(outputs(loaded, inputs)[0], expected)
    switch(True)
    placed = accelerate.cpu_offload if how == "cpu" else partial(accelerate.disk_offload, offload_dir=tmp_path / "off")
    placed(loaded, execution_device=torch.device("cpu"))
    for gradient in (False, True):
        with torch.set_grad_enabled(gradient):
            torch.testing.assert_close(loaded(**inputs).logits, expected, atol=2e-6, rtol=1e-5)
    assert loaded.generate(**inputs, **GREEDY).shape[1] > inputs["input_ids"].shape[1]


class Quantised(torch.Tensor):
    """Stands for the tensors of quantisation libraries, which know some operations only."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.aminmax:
            raise NotImplementedError("aten.aminmax")
        return super().__torch_function__(function, types, args, kwargs or {})


def test_quantised_weights_are_not_looked_into():
    model = torch.nn.Linear(2, 2)
    model.weight = torch.nn.Parameter(torch.ones(2, 2).as_subclass(Quantised), requires_grad=False)
    check_numbers(model)
    model.bias.data[0] = torch.nan
    with pytest.raises(CheckpointError, match="'bias'"):
        check_numbers(model)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kernel"), [("bert", "luna"), ("llama", "flexformer_n"), ("vit", "hedgehog")])
def test_8_bit_weights(name, kernel, tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    asked = {"dtype": torch.float32}
    asked["quantization_config"] = transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig())
    errors = []
    for model in (original(name), converted(name, kernel=kernel)):
        folder = tmp_path / type(model).__name__
        model.save_pretrained(folder)
        inputs = inputs_of(model)
        low = AutoModel.from_pretrained(folder, **asked).eval()
        errors.append(relative_error(outputs(low, inputs)[0], outputs(model, inputs)[0], inputs))
        low.save_pretrained(tmp_path / "again")
        again = AutoModel.from_pretrained(tmp_path / "again").eval()
        assert torch.equal(outputs(again, inputs)[0], outputs(low, inputs)[0])
    kernels = [x for key, x in low.named_parameters() if ".linear_attention." in key]
    assert kernels and all(type(x) is torch.nn.Parameter and x.dtype == torch.float32 for x in kernels)
    assert 0 < errors[1] < 1.15 * errors[0]


def test_weights_are_taken_by_their_names_in_files(tmp_path):
    """ViT's are renamed as they are saved; transformers' Trainer hands the file on as it is, and ignores the rest."""
    model = converted("vit", "AutoModelForImageClassification")
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() != model.state_dict().keys()
    other = converted("vit", "AutoModelForImageClassification", config={"initializer_range": 0.1})
    for prefix, owner in (("", other), ("inner.", torch.nn.ModuleDict({"inner": copy.deepcopy(other)}))):
        loaded = owner.load_state_dict({prefix + key: x for key, x in stored.items()}, strict=False)
        assert not loaded.missing_keys and not loaded.unexpected_keys
        for key, x in model.state_dict().items():
            assert torch.equal(owner.state_dict()[prefix + key], x)
    # Names that are nobody's are reported as ever, and weights by their own names are taken as ever.
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"classifier\.other"'):
        other.load_state_dict({**model.state_dict(), "classifier.other": torch.ones(1)})
    other.load_state_dict(model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "bert"])
def test_a_resumed_run_of_the_trainer_is_bit_equal(name, tmp_path):
    image = name == "vit"
    generator = torch.Generator().manual_seed(0)
    rows = [
        {"pixel_values": torch.randn(3, 30, 30, generator=generator), "labels": i % 2}
        if image
        else {"input_ids": torch.randint(3, 96, (12,), generator=generator), "labels": i % 2}
        for i in range(24)
    ]
    options = {"max_steps": 6, "save_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 1e-3}
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no"}

    def train(resume, shift):
        head = "AutoModelForImageClassification" if image else "AutoModelForSequenceClassification"
        model = converted(name, head)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(shift)
        arguments = transformers.TrainingArguments(str(tmp_path / "run"), **options, **quiet)
        transformers.Trainer(model, arguments, train_dataset=rows).train(resume_from_checkpoint=resume)
        return model.state_dict()

    whole = train(None, 0.0)
    # It starts elsewhere, so that whatever the checkpoint does not give is seen.
    resumed = train(str(tmp_path / "run" / "checkpoint-3"), 1.0)
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)
