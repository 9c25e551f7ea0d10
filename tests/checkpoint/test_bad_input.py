"""Damaged folders: one clear error each, no partial model, no memory for sizes that only config.json claims."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import resource
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.bad_values import VALUES
from support.tiny import converted, original
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

import linearize
from linearize.checkpoint.loading import load_model, load_processor, pooling, read_config, sentence_files, with_length
from linearize.checkpoint.provenance import read_log
from linearize.checkpoint.save import base_facts
from linearize.cli.main import main
from linearize.core.errors import CheckpointError, ConfigError, LinearizeError
from linearize.modeling.config import GUARD, LinearizeConfig, checksum
from linearize.training.stage_two.save import original_result


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "bert"
    linearize.save(converted("bert", "AutoModelForMaskedLM"), folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "bert")


def seal(values):
    """Write the checksum that fits where there still is a plan: what is behind it is to be tested too."""
    with contextlib.suppress(AttributeError, TypeError, KeyError):
        values["linearize"]["checksum"] = checksum(values["linearize"])


def edit(folder, change):
    """Change config.json in place; `change` gets its values."""
    values = json.loads((folder / "config.json").read_text())
    change(values)
    seal(values)
    (folder / "config.json").write_text(json.dumps(values))


def edit_layer(**changes):
    return lambda values: values["linearize"]["layers"][0].update(changes)


def edit_section(**changes):
    return lambda values: values["linearize"].update(changes)


def load(folder):
    return AutoModelForMaskedLM.from_pretrained(folder)


def test_the_folder_itself_is_fine(folder):
    assert type(load(folder)).__qualname__ == "LinearizedBertForMaskedLM"


CONFIG_DAMAGE = {
    "no section": (lambda v: v.pop("linearize"), CheckpointError, "no section 'linearize'"),
    "section is a list": (lambda v: v.update(linearize=[1]), CheckpointError, "no section 'linearize'"),
    "newer format": (edit_section(format_version=3), CheckpointError, "format version 3, this linearize reads up to 2"),
    "version is text": (edit_section(format_version="1"), CheckpointError, "format_version '1'"),
    "version is zero": (edit_section(format_version=0), CheckpointError, "format_version 0"),
    "no layers": (edit_section(layers=None), CheckpointError, "cannot be read"),
    "empty layers": (edit_section(layers=[]), CheckpointError, "no converted layer"),
    "unknown original": (edit_section(base_model_type="berd"), CheckpointError, "model type 'berd'"),
    "original is a list": (edit_section(base_model_type=["bert"]), CheckpointError, "base_model_type: got"),
    "another original": (edit_section(base_model_type="gpt2"), CheckpointError, "expected|weights|no such module"),
    "unknown kernel": (edit_layer(kernel="hegdehog"), ConfigError, "Did you mean 'hedgehog'"),
    "kernel is a number": (edit_layer(kernel=3), CheckpointError, "kernel: got 3, expected text"),
    "unknown argument": (edit_layer(arguments={"scale": 3}), ConfigError, "argument of kernel hedgehog 'scale'"),
    "argument out of range": (
        edit_layer(kernel="flexformer_s", arguments={"frequencies": 10**9}),
        ConfigError,
        "expected a whole number from 1 to 4096",
    ),
    "unknown key": (edit_layer(colour="red"), CheckpointError, "colour"),
    "no such module": (edit_layer(module="encoder.layer.7.attention.self"), CheckpointError, "no such module"),
    "module is no attention": (edit_layer(module="embeddings"), CheckpointError, "lacks"),
    "other head size": (
        edit_layer(shape={"heads": 4, "key_heads": 4, "head_dim": 16, "value_dim": 8, "causal": False}),
        CheckpointError,
        "different size .*attention_head_size is 16, but the model's is 8",
    ),
    "other value size": (
        edit_layer(shape={"heads": 4, "key_heads": 4, "head_dim": 8, "value_dim": 16, "causal": False}, kernel="luna"),
        CheckpointError,
        "lacks|holds|different size",
    ),
    "absurd heads": (
        edit_layer(shape={"heads": 2**40, "key_heads": 4, "head_dim": 16, "value_dim": 8, "causal": False}),
        CheckpointError,
        "65536",
    ),
    "heads is NaN": (
        edit_layer(shape={"heads": float("nan"), "key_heads": 4, "head_dim": 8, "value_dim": 8, "causal": False}),
        CheckpointError,
        "65536",
    ),
    "one kernel more": (
        lambda v: v["linearize"]["layers"].append({**v["linearize"]["layers"][0], "module": "pooler"}),
        CheckpointError,
        "numbers of the layers",
    ),
    "one kernel less": (lambda v: v["linearize"]["layers"].pop(), CheckpointError, "holds"),
    "softmax instead": (edit_layer(kernel="softmax"), CheckpointError, "holds"),
    "wider": (lambda v: v.update(hidden_size=64), CheckpointError, "different size"),
    "absurdly wide": (lambda v: v.update(hidden_size=2**40), CheckpointError, "config.json"),
    "absurd vocabulary": (lambda v: v.update(vocab_size=10**12), CheckpointError, "different size"),
    "absurdly deep": (lambda v: v.update(num_hidden_layers=10**9), CheckpointError, "num_hidden_layers 1000000000"),
    "one layer more": (lambda v: v.update(num_hidden_layers=3), CheckpointError, "lacks"),
    "one layer less": (lambda v: v.update(num_hidden_layers=1), CheckpointError, "no such module|holds"),
    "negative": (lambda v: v.update(hidden_size=-32), CheckpointError, "config.json"),
    "text for a number": (lambda v: v.update(hidden_size="wide"), CheckpointError, "config.json"),
    "guarded number is no number": (
        lambda v: v.update(initializer_range=f"wide{GUARD}"),
        CheckpointError,
        "got initializer_range 'wide', expected a number",
    ),
    "heads do not divide": (lambda v: v.update(num_attention_heads=5), CheckpointError, "config.json"),
    "unknown activation": (lambda v: v.update(hidden_act="gelo"), CheckpointError, "config.json"),
}


@pytest.mark.parametrize("name", CONFIG_DAMAGE)
def test_damaged_config(name, folder):
    change, error, message = CONFIG_DAMAGE[name]
    edit(folder, change)
    with pytest.raises(error, match=message) as caught:
        AutoModel.from_pretrained(folder)
    assert "\n" not in str(caught.value)


def test_absurd_sizes_take_no_memory(folder):
    edit(folder, lambda values: values.update(vocab_size=10**10, max_position_embeddings=10**10))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError):
        load(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_config_cut_off(share, folder):
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text[: int(len(text) * share)])
    # transformers reads the file itself, before it can know whose it is.
    with pytest.raises((OSError, LinearizeError), match=r"config\.json"):
        load(folder)


def test_the_home_of_an_unknown_user_is_one_line():
    with pytest.raises(CheckpointError, match="'~no-such-user/model' does not exist"):
        read_config("~no-such-user/model")


@pytest.mark.parametrize("value", [5, {"a": 1}, [5], [None]], ids=repr)
def test_architectures_that_are_no_list_of_names_are_one_line(value, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": value}))
    with pytest.raises(CheckpointError, match=r"its config.json: got architectures .*expected a list of class names"):
        read_config(str(tmp_path))


def test_weights_missing(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights file"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_weights_cut_off(keep, folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:keep])
    with pytest.raises(CheckpointError, match="cut off or damaged"):
        load(folder)


def test_weights_with_bytes_to_spare_or_a_false_header(folder):
    data = (folder / "model.safetensors").read_bytes()
    for other in (data + b"x", b"\xff" * 8 + data[8:], data[:8] + b"[" + data[9:]):
        (folder / "model.safetensors").write_bytes(other)
        with pytest.raises(CheckpointError, match="cut off or damaged"):
            load(folder)


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


KERNEL = "bert.encoder.layer.0.attention.self.linear_attention.mixer.keys.weight"
WEIGHT_DAMAGE = {
    "kernel missing": (lambda w: w.pop(KERNEL), "lacks '.*linear_attention.*weight'"),
    "body missing": (lambda w: w.pop("bert.encoder.layer.1.output.dense.weight"), "lacks '.*output.dense.weight'"),
    "head missing": (lambda w: w.pop("cls.predictions.bias"), "lacks 'cls.predictions"),
    "extra": (lambda w: w.update(extra=torch.zeros(3)), "holds 'extra'"),
    "other size": (lambda w: w.update({KERNEL: torch.zeros(4, 8, 9)}), r"got \[4, 8, 9\], expected \[4, 8, 8\]"),
    "empty": (lambda w: w.clear(), "lacks|holds only 0"),
}


@pytest.mark.parametrize("name", WEIGHT_DAMAGE)
def test_damaged_weights(name, folder):
    change, message = WEIGHT_DAMAGE[name]
    change_weights(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load(folder)
    with pytest.raises(CheckpointError, match=message):
        AutoModel.from_pretrained(folder)


@pytest.mark.parametrize("name", [KERNEL, "bert.encoder.layer.1.output.dense.weight"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn])
def test_numbers_of_another_kind_are_refused(name, dtype, folder):
    change_weights(folder, lambda w: w.update({name: w[name].to(dtype)}))
    with pytest.raises(CheckpointError, match=r"holds '.*' as .*, expected"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_kernels_in_another_type_only_where_the_whole_model_is(dtype, folder, tmp_path):
    """What somebody cast on purpose is read, into fp32 as always; a kernel that alone was cast is damage."""
    load(folder).to(dtype).save_pretrained(tmp_path / "cast")
    stored = load_file(tmp_path / "cast" / "model.safetensors")
    assert stored[KERNEL].dtype == dtype
    loaded = load(tmp_path / "cast").state_dict()[KERNEL]
    assert loaded.dtype == torch.float32 and torch.equal(loaded, stored[KERNEL].float())
    change_weights(folder, lambda w: w.update({KERNEL: w[KERNEL].to(dtype)}))
    with pytest.raises(CheckpointError, match="expected F32"):
        load(folder)


def test_damaged_shards(tmp_path):
    linearize.save(converted("gpt2", "AutoModelForCausalLM"), tmp_path / "out", max_shard_size="20KB")
    index = tmp_path / "out" / "model.safetensors.index.json"
    first = sorted((tmp_path / "out").glob("model-*.safetensors"))[0]
    data = first.read_bytes()
    first.write_bytes(data[:-7])
    with pytest.raises(CheckpointError, match="cut off or damaged"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    first.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    first.write_bytes(data)
    text = index.read_text()
    for other in (text[:50], "{}", text.replace(first.name, f"../{first.name}", 1)):
        index.write_text(other)
        with pytest.raises(CheckpointError, match=r"index\.json"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def mutate(values, rng):
    """Change, delete, double or swap one value anywhere, with more weight on our own section."""
    places = []

    def walk(node):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in items:
            if key == "auto_map":
                # transformers looks into it itself, before it can know whose checkpoint it is.
                continue
            places.append((node, key))
            if isinstance(value, (dict, list)):
                walk(value)

    walk(values if rng.random() < 0.4 else values["linearize"])
    node, key = rng.choice(places)
    action = rng.random()
    if action < 0.6:
        node[key] = copy.deepcopy(rng.choice(VALUES))
    elif action < 0.75:
        del node[key]
    elif action < 0.85 and isinstance(node, list):
        node.append(copy.deepcopy(node[key]))
    elif isinstance(node[key], (int, float)):
        node[key] = node[key] * rng.choice([-1, 2, 1000, 10**9])
    else:
        other, there = rng.choice(places)
        node[key] = copy.deepcopy(other[there])


def check_config(values):
    """Read a config; anything but an error of ours fails the test. Returns whether it was accepted."""
    try:
        LinearizeConfig.from_dict(values)
    except LinearizeError as error:
        assert "\n" not in str(error)
        return False
    return True


def test_fuzz_config(saved):
    original = json.loads((saved / "config.json").read_text())
    rng = random.Random(208)
    accepted = 0
    for _ in range(3000):
        values = copy.deepcopy(original)
        for _ in range(rng.choice([1, 1, 2, 4])):
            mutate(values, rng)
            if not (isinstance(values.get("linearize"), dict) and values["linearize"]):
                break
        seal(values)
        accepted += check_config(values)
    assert 100 < accepted < 2900


def test_fuzz_loading(folder):
    """A mutated config either loads the whole checkpoint or is refused by us."""
    original = json.loads((folder / "config.json").read_text())
    with safe_open(folder / "model.safetensors", "pt") as file:
        kernels = {key for key in file.keys() if ".linear_attention." in key}  # noqa: SIM118
    rng = random.Random(218)
    outcomes = {True: 0, False: 0}
    for _ in range(200):
        values = copy.deepcopy(original)
        mutate(values, rng)
        seal(values)
        (folder / "config.json").write_text(json.dumps(values))
        if values.get("model_type") != "linearize":
            continue
        try:
            model = load(folder)
        except LinearizeError as error:
            assert "\n" not in str(error)
            outcomes[False] += 1
        else:
            assert kernels <= {f"{key}" for key in model.state_dict()}
            outcomes[True] += 1
    assert min(outcomes.values()) > 20


def test_fuzz_cut_off_headers(folder):
    data = (folder / "model.safetensors").read_bytes()
    rng = random.Random(228)
    refused = 0
    for _ in range(60):
        other = bytearray(data)
        for _ in range(rng.choice([1, 3])):
            other[rng.randrange(0, 3000)] = rng.randrange(256)
        (folder / "model.safetensors").write_bytes(bytes(other[: rng.choice([len(data), rng.randrange(len(data))])]))
        try:
            load(folder)
        except CheckpointError:
            refused += 1
    assert refused > 40


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", ["linear_attention", "word_embeddings"])
def test_weights_that_are_no_numbers(folder, kind, value):
    weights = load_file(folder / "model.safetensors")
    name = next(key for key in sorted(weights) if kind in key)
    weights[name].view(-1)[3] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"holds NaN or infinity in .*{name}.*expected finite numbers"):
        load(folder)


def test_an_original_with_weights_that_are_no_numbers(tmp_path, capsys):
    model = original("bert", "AutoModelForMaskedLM")
    model.bert.encoder.layer[1].output.dense.bias.data[0] = float("nan")
    model.save_pretrained(tmp_path / "bert")
    assert main(["convert", str(tmp_path / "bert"), "--kernel", "elu", "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "layer.1.output.dense.bias" in error and "NaN or infinity" in error
    assert not (tmp_path / "out").exists()


BROKEN = {
    "empty": b"",
    "null": b"null",
    "list": b"[1]",
    "number": b"5",
    "not utf-8": b'{"a": "\xe9"}',
    "deep": b"[" * 9999,
}


@pytest.mark.parametrize("kind", BROKEN)
def test_every_side_file_that_is_broken_is_one_line(kind, tmp_path):
    """A file that says nothing which is needed may be passed over."""

    def write(file, content):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(content)

    write("modules.json", b'[{"path": ""}, {"path": "1_Pooling"}]')
    for file in ("sentence_bert_config.json", "config_sentence_transformers.json", "modules.json"):
        before = (tmp_path / file).read_bytes() if (tmp_path / file).exists() else b"{}"
        write(file, BROKEN[kind])
        with pytest.raises(CheckpointError, match=f"{file} (cannot be read as JSON|holds a|is not a list)") as caught:
            sentence_files(str(tmp_path))
        assert len(str(caught.value).splitlines()) == 1
        write(file, before)
    write("1_Pooling/config.json", BROKEN[kind])
    files = with_length(sentence_files(str(tmp_path)), 100)
    assert json.loads(files["sentence_bert_config.json"]) == {"max_seq_length": 100} and pooling(files) == ("mean", [])
    write("README.md", b"---\n" + BROKEN[kind] + b"\n---\n")
    assert base_facts(str(tmp_path)) == {}
    for file, read in (("log.jsonl", read_log), ("finetuning.json", original_result)):
        write(file, BROKEN[kind])
        if file == "log.jsonl" and BROKEN[kind]:
            with pytest.raises(CheckpointError, match="cannot be read as a log"):
                read(tmp_path)
        elif file != "log.jsonl":
            assert read(tmp_path, "cola", "rows") is None


def test_an_original_without_a_layer_or_with_other_sizes_is_refused(tmp_path):
    """Layers that the file lacks were filled with random numbers, without a warning."""
    original("bert").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    layers = values["num_hidden_layers"]
    for change, message in (
        ({"num_hidden_layers": layers + 1}, rf"lacks 16 tensors of BertModel \(encoder\.layer\.{layers}\."),
        ({"vocab_size": 7}, r"holds embeddings\.word_embeddings\.weight of size .*, but its config asks for \[7, "),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"hidden_size": "8"}, "Validation error for field 'hidden_size': TypeError"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(values | change))
        with pytest.raises(CheckpointError, match=message):
            load_model(str(tmp_path))


def test_a_class_that_reads_other_names_is_named(tmp_path):
    """Llama's class for questions calls its body `transformer`: "download it again" would not help."""
    original("llama", "AutoModelForCausalLM").save_pretrained(tmp_path)
    message = (
        r"lacks \d+ tensors of LlamaForQuestionAnswering .* as model\.layers\..* reads other names: choose another task"
    )
    with pytest.raises(CheckpointError, match=message):
        load_model(str(tmp_path), task="question-answering")


def test_one_class_name_in_place_of_a_list_keeps_the_head(tmp_path):
    """Its first letter was taken for the name, and the model without its head."""
    original("bert", "AutoModelForMaskedLM").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"architectures": "BertForMaskedLM"}))
    assert type(load_model(str(tmp_path)).model).__name__ == "BertForMaskedLM"


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n"])
def test_weights_that_are_no_pickle_are_called_damaged(tmp_path, content):
    original("bert").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"its weights are damaged \(not a pickle of tensors\)"):
        load_model(str(tmp_path))


def test_a_folder_without_a_tokenizer_gets_none_of_special_tokens(tmp_path):
    """transformers makes one, whose every word is unknown: the model was trained on rows of unknown tokens."""
    original("bert").save_pretrained(tmp_path)
    assert load_model(str(tmp_path)).processor is None
    with pytest.raises(CheckpointError, match="has no tokenizer, or one without words; save the model's own there"):
        load_processor(str(tmp_path), "text")


def test_a_name_too_long_for_a_file_is_one_line():
    with pytest.raises(CheckpointError, match="is neither a folder nor a Hub name that can be reached"):
        read_config("x" * 300)
