"""GGUF files as checkpoints: read in fp32, converted, and refused in one line where they are damaged or incomplete."""

import importlib
import json
import shutil

import pytest
import torch
import transformers
from support.checkpoints import texts, tokenizer
from support.command_lines import run
from support.tiny import original

import linearize.conversion.gguf as reading
from linearize.checkpoint.loading import load_model
from linearize.core.errors import CheckpointError
from linearize.jobs import demo, task_config
from linearize.training.stage_two.load import length_limit

gguf = pytest.importorskip("gguf")
TEMPLATE = "{% for message in messages %}{{ '<|s|>' + message['content'] }}{% endfor %}"
SHORT = ["--distill-steps", 2, "--align-steps", 1, "--holdout", 4, "--batch-size", 4, "--device", "cpu"]


def vocabulary():
    """Special tokens, one token per byte as GPT-2 writes it, and two merged pairs."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return ["<|endoftext|>", "<|s|>", "<|e|>", *bytes_to_unicode().values(), "th", "he"]


@pytest.fixture(scope="module")
def model():
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return original("llama", "AutoModelForCausalLM", vocab_size=len(vocabulary()), tie_word_embeddings=False, **ends)


def as_llama_cpp(weight, heads):
    """Reorder the rows of a query or key matrix [H * D, E]: llama.cpp rotates neighbours, transformers halves."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def write(path, model, architecture="llama", packed=None, leave_out=(), **options):
    """Write a tiny Llama as a GGUF file, or as shards of `split_max_tensors` tensors."""
    config, tokens = model.config, vocabulary()
    writer = gguf.GGUFWriter(path, architecture, **options)
    writer.add_name("gpt2")  # A title that is a name on the Hub as well.
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["t h", "h e"])
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for key, tensor in model.state_dict().items():
        values = tensor.numpy()
        if ".q_proj." in key or ".k_proj." in key:
            values = as_llama_cpp(values, config.num_attention_heads if ".q_" in key else config.num_key_value_heads)
        # Blocks of Q8_0 have 32 numbers; norms stay in fp32.
        kind = gguf.GGMLQuantizationType[packed] if packed and values.ndim == 2 and values.shape[1] % 32 == 0 else None
        values = values if kind is None else gguf.quantize(values, kind)
        if key not in leave_out:
            writer.add_tensor(names.get_name(key, try_suffixes=(".weight",)), values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model)


@pytest.fixture
def shards(model, tmp_path):
    """Three files of one model, alone in a folder."""
    (tmp_path / "shards").mkdir()
    write(tmp_path / "shards" / "tiny.gguf", model, split_max_tensors=8)
    return sorted((tmp_path / "shards").iterdir())


def test_a_file_is_read_as_what_it_was_written_from(file, model):
    loaded = load_model(str(file))
    assert type(loaded.model) is transformers.LlamaForCausalLM and loaded.model.dtype == torch.float32
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[key], tensor), key
    ids = torch.arange(10)[None]
    torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits)
    assert loaded.processor.get_vocab() == {token: number for number, token in enumerate(vocabulary())}
    assert loaded.processor.chat_template == TEMPLATE
    text = "the cat, 12 times\n"
    assert loaded.processor.decode(loaded.processor(text)["input_ids"]) == text
    # Neither the title of the file nor anything of its packing is left to be saved.
    assert loaded.model.config.name_or_path == str(file)
    assert not {"quantization_config", "_model_name_or_path"} & set(loaded.model.config.to_dict())


def test_packed_weights_are_read_in_fp32(model, tmp_path):
    loaded = load_model(str(write(tmp_path / "q8.gguf", model, packed="Q8_0")))
    for key, tensor in model.state_dict().items():
        found = loaded.model.state_dict()[key]
        assert found.dtype == torch.float32
        # Q8_0 has a scale in fp16 and steps of 1/127 per 32 numbers: half a step, and the rounding of the scale.
        assert (found - tensor).abs().max() <= tensor.abs().max() * (0.5 / 127 + 2**-11), key
    assert torch.unique(loaded.model.model.layers[0].self_attn.o_proj.weight[0] * 1e6).numel() < 33


def test_conversion_from_first_to_last(file, model, tmp_path, capsys):
    """Convert, load the result without the file, align with the file as teacher, compare with it, tune with it."""
    data = ["--dataset", texts(tmp_path), "--text-column", "text"]
    out = tmp_path / "linear"
    code, _, error = run(capsys, "convert", file, *data, *SHORT, "--output", out)
    assert code == 0, error
    assert "de-quantizing" not in error
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(loaded.model.layers[1].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight)
    found = transformers.AutoTokenizer.from_pretrained(out)
    assert found.chat_template == TEMPLATE and found.tokenize("the") == ["th", "e"]
    assert (out / "model.safetensors").is_file() and not list(out.rglob("*.gguf"))
    config = json.loads((out / "config.json").read_text())
    assert config["linearize"]["provenance"]["base_model"] == "tiny.gguf" and "quantization_config" not in config
    # Its title "gpt2" is not taken for the model of that name on the Hub.
    assert "base_model: gpt2" not in (out / "README.md").read_text()
    assert str(file.parent) not in (out / "config.json").read_text() + (out / "README.md").read_text()

    code, _, error = run(
        capsys, "align", out, "--teacher", file, *data, "--steps", 1, "--batch-size", 4, "--holdout", 4,
        "--output", tmp_path / "aligned", "--device", "cpu",
    )  # fmt: skip
    assert code == 0, error
    code, _, error = run(
        capsys, "evaluate", out, "--task", "causal-lm", "--dataset", texts(tmp_path), "--columns", "text",
        "--max-length", 32, "--compare", file, "--device", "cpu",
    )  # fmt: skip
    assert code == 0, error
    tuned = ["--epochs", 1, "--max-length", 32, "--batch-size", 4, "--output", tmp_path / "tuned", "--device", "cpu"]
    code, _, error = run(
        capsys, "finetune", out, "--task", "causal-lm", "--dataset", texts(tmp_path), "--columns", "text",
        "--teacher", file, *tuned,
    )  # fmt: skip
    assert code == 0, error


def test_a_classifier_is_tuned_from_a_file(file, tmp_path, capsys):
    code, _, error = run(
        capsys, "finetune", file, "--task", "text-classification", "--dataset", texts(tmp_path), "--columns", "text",
        "--label-column", "label", "--epochs", 1, "--max-length", 32, "--batch-size", 4, "--output", tmp_path / "tuned",
        "--device", "cpu",
    )  # fmt: skip
    assert code == 0, error
    tuned = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "tuned")
    assert tuned.config.architectures == ["LlamaForSequenceClassification"]


def test_the_default_name_of_the_output_has_no_suffix():
    from linearize.jobs.config import ConvertJob

    assert ConvertJob.of(model="models/tiny.gguf").target() == "tiny-hedgehog"


def test_report_finds_the_file_again(file, tmp_path, capsys, monkeypatch):
    from linearize.checkpoint.loading import load_converted
    from linearize.evaluation.report.inputs import find_original

    out = tmp_path / "linear"
    data = ["--dataset", texts(tmp_path), "--text-column", "text"]
    assert run(capsys, "convert", file, *data, *SHORT, "--output", out)[0] == 0
    loaded = load_converted(str(out))
    monkeypatch.chdir(tmp_path)
    assert "'tiny.gguf'" in find_original(None, loaded, "cpu")[1]
    shutil.copy(file, tmp_path)
    assert find_original(None, loaded, "cpu")[0].name == "tiny.gguf"


@pytest.mark.parametrize("place", ["file", "folder"])
def test_inspect_and_plan(place, file, model, capsys):
    name = file if place == "file" else file.parent
    code, text, error = run(capsys, "inspect", name, "--json")
    assert code == 0, error
    found = json.loads(text)
    assert found["model_type"] == "llama" and found["architecture"] == "LlamaForCausalLM" and not found["converted"]
    assert found["parameters_total"] == sum(p.numel() for p in model.parameters()) and found["max_length"] == 64
    assert len(found["plan"]["layers"]) == 2
    code, text, error = run(capsys, "kernels", "--for", name)
    assert code == 0 and "hedgehog" in text, error


def test_shards_are_joined(shards, model):
    for name in (shards[0], shards[2], shards[0].parent):
        loaded = load_model(str(name)).model
        assert all(torch.equal(loaded.state_dict()[key], tensor) for key, tensor in model.state_dict().items())
    assert len(shards) == len(list(shards[0].parent.iterdir())) == 3


@pytest.mark.parametrize("packed", ["Q8_0", "F16", "BF16"])
def test_packed_shards_are_joined(packed, model, tmp_path):
    whole = load_model(str(write(tmp_path / "whole.gguf", model, packed=packed))).model.state_dict()
    write(tmp_path / "tiny.gguf", model, packed=packed, split_max_tensors=8)
    joined = load_model(str(tmp_path / "tiny-00002-of-00003.gguf")).model.state_dict()
    assert all(torch.equal(joined[key], whole[key]) for key in whole)
    assert not torch.equal(joined["lm_head.weight"], model.lm_head.weight)


def test_tokenizer_files_of_the_folder_are_preferred(file, tmp_path):
    shutil.copy(file, tmp_path)
    tokenizer(length=37).save_pretrained(tmp_path)
    for name in (str(tmp_path), str(tmp_path / file.name)):
        assert load_model(name).processor.get_vocab() == tokenizer().get_vocab() and length_limit(name) == 37


def test_a_quick_look_counts_the_parameters_of_a_gguf_file(file, model, tmp_path):
    """`longdoc --quick` ended in a traceback, and counted the embeddings of models that do not call them embeddings."""
    model.save_pretrained(tmp_path / "folder")
    inner = sum(weight.numel() for name, weight in model.model.named_parameters() if "embed_tokens" not in name)
    assert task_config._parameters(str(file)) == task_config._parameters(str(tmp_path / "folder")) == inner


def test_a_folder_with_other_weights_is_no_gguf(file, tmp_path):
    shutil.copy(file, tmp_path)
    assert reading.find_gguf(tmp_path) == tmp_path / "tiny.gguf"
    (tmp_path / "model.safetensors").touch()
    assert reading.find_gguf(tmp_path) is None
    shutil.copy(file, tmp_path / "sha256-0123")
    assert reading.find_gguf(tmp_path / "sha256-0123") is not None and reading.find_gguf("gpt2") is None


def refused(capsys, folder, *words):
    """Run a command line that must end with one line and code 2, and write nothing; return the line."""
    before = sorted(folder.rglob("*"))
    code, _, error = run(capsys, *words)
    assert code == 2 and error.count("\n") == 1 and error.startswith("linearize: error: "), error
    assert sorted(folder.rglob("*")) == before
    return error


@pytest.mark.parametrize("verb", ["convert", "inspect", "finetune"])
@pytest.mark.parametrize("length", [0, 2, 100, 3000, -20_000, -1])
def test_a_file_that_is_cut_off(verb, length, file, tmp_path, capsys):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:length])
    more = {"convert": ["--output", tmp_path / "out"], "finetune": ["--task", "sst2", "--output", tmp_path / "out"]}
    error = refused(capsys, tmp_path, verb, cut, *more.get(verb, []))
    assert f"'{cut}' is not a complete GGUF file: it is cut off or damaged (" in error and "download it" in error


def test_a_file_without_some_of_its_tensors(model, tmp_path, capsys):
    path = write(tmp_path / "less.gguf", model, leave_out=["model.layers.1.mlp.up_proj.weight"])
    error = refused(capsys, tmp_path, "convert", path, "--output", tmp_path / "out")
    assert "lacks 1 tensors of LlamaForCausalLM (model.layers.1.mlp.up_proj.weight" in error


def test_an_architecture_that_transformers_cannot_read(model, tmp_path, capsys):
    path = write(tmp_path / "new.gguf", model, architecture="plm")
    for words in (["convert", path, "--output", tmp_path / "out"], ["inspect", path]):
        error = refused(capsys, tmp_path, *words)
        assert "'new.gguf' holds the architecture 'plm', which transformers" in error and "safetensors" in error


def test_a_missing_shard(shards, capsys):
    shards[1].rename(shards[1].parent.parent / "elsewhere.gguf")
    folder = shards[0].parent
    for name in (folder, shards[0], shards[2]):
        error = refused(capsys, folder, "convert", name, "--output", folder / "out")
        assert f"is one of 3 files of a model; missing: {shards[1].name}; download" in error
    shards[1].parent.parent.joinpath("elsewhere.gguf").rename(folder / "renamed.gguf")
    error = refused(capsys, folder, "convert", folder / "renamed.gguf", "--output", folder / "out")
    assert "expected a name like model-00001-of-00003.gguf" in error


def test_several_files_or_none(file, tmp_path, capsys):
    for name in ("a-q4.gguf", "b-q8.gguf"):
        shutil.copy(file, tmp_path / name)
    error = refused(capsys, tmp_path, "convert", tmp_path, "--output", tmp_path / "out")
    assert "holds 2 GGUF models (a-q4.gguf, b-q8.gguf); give the path of one of them" in error
    error = refused(capsys, tmp_path, "convert", tmp_path / "c.gguf", "--output", tmp_path / "out")
    assert "c.gguf': no such GGUF file" in error
    (tmp_path / "empty").mkdir()
    error = refused(capsys, tmp_path, "convert", tmp_path / "empty", "--output", tmp_path / "out")
    assert "expected a folder with a config.json, or a GGUF file" in error


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_without_its_packages(package, file, tmp_path, capsys, monkeypatch):
    present = importlib.import_module

    def absent(name, *more):
        if name == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return present(name, *more)

    reading._header.cache_clear()
    monkeypatch.setattr(importlib, "import_module", absent)
    extra = {"gguf": "gguf", "accelerate": "train"}[package]
    data = ["--dataset", texts(tmp_path), "--columns", "text", "--label-column", "label"]
    for words in (["convert", file], ["finetune", file, "--task", "text-classification", *data]):
        error = refused(capsys, tmp_path, *words, "--output", tmp_path / "out")
        assert f'needs the package {package}, which is not installed: pip install "linearize[{extra}]"' in error


@pytest.mark.slow
def test_smollm2_is_read_and_answers():
    """The real file: 4-bit blocks, a tokenizer of 49,152 pieces, tied embeddings."""
    try:
        path = demo.smollm2()
    except CheckpointError as error:
        pytest.skip(str(error))
    loaded = load_model(str(path))
    assert sum(p.numel() for p in loaded.model.parameters()) == 134_515_008
    asked = [{"role": "user", "content": "What is 2+2?"}]
    inputs = loaded.processor.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    made = loaded.model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "4" in loaded.processor.decode(made)
