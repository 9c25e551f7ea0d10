"""A converted model in other people's tools: PEFT, the HF Trainer, sentence-transformers."""

from __future__ import annotations

import pytest
import torch
import transformers
from support.tiny import converted, inputs_of, original, outputs
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, Trainer, TrainingArguments

import linearize
from linearize.attention.interface import linear_attentions
from linearize.checkpoint.loading import load_model
from linearize.core.errors import CheckpointError, ConfigError


class Rows(torch.utils.data.Dataset):
    """A few rows of random tokens."""

    def __init__(self, causal: bool) -> None:
        generator = torch.Generator().manual_seed(4)
        self.ids = torch.randint(3, 96, (8, 10), generator=generator)
        self.causal = causal

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int):
        ids = self.ids[index]
        labels = ids if self.causal else torch.tensor(index % 2)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def train(model, folder, causal, **more):
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_steps=2,
        **more,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows(causal))
    trainer.train()
    return trainer


def kernel_values(model):
    return [p.detach().clone() for layer in linear_attentions(model).values() for p in layer.parameters()]


@pytest.mark.parametrize(
    ("name", "head"), [("bert", "AutoModelForSequenceClassification"), ("llama", "AutoModelForCausalLM")]
)
def test_trainer_trains_saves_and_resumes(name, head, tmp_path):
    model = converted(name, head)
    before = kernel_values(model)
    train(model, tmp_path / "run", causal=name == "llama")
    assert all(not torch.equal(one, two) for one, two in zip(before, kernel_values(model), strict=True))
    saved = tmp_path / "run" / "checkpoint-2"
    assert (saved / "modeling_linearize.py").is_file()
    loaded = getattr(transformers, head).from_pretrained(saved)
    assert all(torch.equal(one, two) for one, two in zip(kernel_values(model), kernel_values(loaded), strict=True))
    trainer = Trainer(
        model=loaded,
        args=TrainingArguments(output_dir=str(tmp_path / "run"), max_steps=3, report_to=[], use_cpu=True),
        train_dataset=Rows(name == "llama"),
    )
    assert trainer.train(resume_from_checkpoint=str(saved)).global_step == 3


def test_trainer_with_gradient_checkpointing(tmp_path):
    model = converted("gpt2", "AutoModelForCausalLM")
    before = kernel_values(model)
    train(model, tmp_path, causal=True, gradient_checkpointing=True)
    assert all(not torch.equal(one, two) for one, two in zip(before, kernel_values(model), strict=True))


@pytest.mark.sampled("one")
@pytest.mark.parametrize(
    ("name", "auto", "targets"),
    [
        ("bert", AutoModelForSequenceClassification, ["query", "value"]),
        ("llama", AutoModelForCausalLM, ["q_proj", "v_proj"]),
    ],
)
def test_lora_trains_saves_loads_and_merges(name, auto, targets, tmp_path):
    peft = pytest.importorskip("peft")
    linearize.save(converted(name, auto.__name__), tmp_path / "base")
    model = auto.from_pretrained(tmp_path / "base")
    before = kernel_values(model)
    task = {"bert": "SEQ_CLS", "llama": "CAUSAL_LM"}[name]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, task_type=task))
    assert not any(p.requires_grad for layer in linear_attentions(model).values() for p in layer.parameters())
    train(adapted, tmp_path / "run", causal=name == "llama")
    assert all(torch.equal(one, two) for one, two in zip(before, kernel_values(model), strict=True))
    adapted.eval()
    inputs = inputs_of(model)
    want = outputs(adapted, inputs)[0]
    plain = auto.from_pretrained(tmp_path / "base")
    assert (outputs(plain, inputs)[0] - want).abs().max() > 1e-5
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    torch.testing.assert_close(outputs(loaded, inputs)[0], want, rtol=0, atol=2e-6)
    merged = adapted.merge_and_unload()
    linearize.save(merged, tmp_path / "merged")
    again = auto.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(outputs(again, inputs)[0], want, rtol=0, atol=1e-5)


def test_lora_on_the_kernels_neighbours_leaves_the_kernels_trainable_on_request(tmp_path):
    peft = pytest.importorskip("peft")
    model = converted("bert", "AutoModelForSequenceClassification")
    config = peft.LoraConfig(r=2, target_modules=["query"], modules_to_save=["linear_attention", "classifier"])
    adapted = peft.get_peft_model(model, config)
    before = kernel_values_of_copy(adapted)
    train(adapted, tmp_path, causal=False)
    after = kernel_values_of_copy(adapted)
    assert len(after) == 4
    assert all(not torch.equal(one, two) for one, two in zip(before, after, strict=True))


def kernel_values_of_copy(model):
    return [p.detach().clone() for n, p in model.named_parameters() if "linear_attention" in n and p.requires_grad]


def test_sentence_transformers(tmp_path):
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import SentenceTransformer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "dog"]
    tokenizer = transformers.BertTokenizer(vocab={word: index for index, word in enumerate(words)})
    linearize.save(converted("bert"), tmp_path / "out", processor=tokenizer)
    encoder = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    vectors = torch.as_tensor(encoder.encode(["a cat", "a dog a dog"]))
    model = AutoModel.from_pretrained(tmp_path / "out")
    batch = tokenizer(["a cat", "a dog a dog"], padding=True, return_tensors="pt")
    hidden = outputs(model, batch)[0]
    mask = batch["attention_mask"][..., None]
    torch.testing.assert_close(vectors, (hidden * mask).sum(1) / mask.sum(1), rtol=0, atol=1e-5)
    encoder.save(str(tmp_path / "again"))
    again = SentenceTransformer(str(tmp_path / "again"), device="cpu")
    torch.testing.assert_close(torch.as_tensor(again.encode(["a cat", "a dog a dog"])), vectors, rtol=0, atol=1e-5)


def test_save_takes_the_model_out_of_torch_compile_and_refuses_other_wrappers(tmp_path):
    """Of a PEFT model only the adapter was saved, with a card that promises a whole model: the kernels were lost."""
    peft = pytest.importorskip("peft")
    model = converted("bert", "AutoModelForSequenceClassification")
    linearize.save(torch.compile(model), tmp_path / "compiled")
    assert "AutoModelForSequenceClassification.from" in (tmp_path / "compiled" / "README.md").read_text()
    wrapped = torch.nn.DataParallel(model)
    with pytest.raises(CheckpointError, match="got DataParallel, expected a transformers model"):
        linearize.save(wrapped, tmp_path / "wrapped")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"], init_lora_weights=False))
    with pytest.raises(ConfigError, match="not merged"):
        linearize.save(adapted, tmp_path / "adapted")
    assert [path.name for path in tmp_path.iterdir()] == ["compiled"]
    linearize.save(adapted.merge_and_unload(), tmp_path / "merged")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(outputs(loaded, inputs_of(model))[0], outputs(model, inputs_of(model))[0])


def test_an_adapter_that_is_not_merged_is_refused(tmp_path):
    """Without a word the saved folder held no weights of the model, or some under names that no load knows."""
    peft = pytest.importorskip("peft")
    model = original("llama")
    model.save_pretrained(tmp_path / "both")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    for folder in ("adapter", "both"):
        adapted.save_pretrained(tmp_path / folder)
    with pytest.raises(ConfigError, match=r"adapter of peft that is not merged \(.*q_proj\)"):
        load_model(str(tmp_path / "both"))
    with pytest.raises(CheckpointError, match="holds only an adapter of peft; merge it"):
        load_model(str(tmp_path / "adapter"))
    with pytest.raises(ConfigError, match="not merged"):
        linearize.convert(model)
    model = peft.get_peft_model(converted("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    for part in (model, model.get_base_model()):
        with pytest.raises(ConfigError, match="not merged"):
            linearize.save(part, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    linearize.save(model.merge_and_unload(), tmp_path / "out")
