"""Every field of config.json's section `linearize`: its type is strict, the host's module has the last word."""

from __future__ import annotations

import copy
import json
import random
import shutil

import pytest
import torch
from support.bad_values import VALUES
from support.tiny import converted, inputs_of, original, outputs
from transformers import AutoModel

import linearize
from linearize.attention.parts import PARTS
from linearize.attention.shape import HeadShape
from linearize.checkpoint.fingerprint import kernels_of
from linearize.conversion.plan import change_hybrids
from linearize.core.errors import CheckpointError, ConfigError, LinearizeError
from linearize.core.registry import Hybrid, kernel_info, make_config
from linearize.modeling.config import check_checksum, check_section, checksum
from linearize.modeling.model import check_checkpoint
from linearize.modeling.plan import CALLED, Plan

MODELS = {
    "bert": {"kernel": "hedgehog", "keep_softmax": [1]},
    "gpt2": {"kernel": "hedgehog", "kernel_args": {"activation": "exp"}, "window": 4, "sinks": 2},
    "clip": {"kernel": "elu"},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("schema")
    for name, options in MODELS.items():
        linearize.save(converted(name, **options), root / name, provenance={"base_model": "x", "seed": 3})
    return root


@pytest.fixture
def folders(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "all")


def read(folder):
    return json.loads((folder / "config.json").read_text())


def write(folder, values, *, sealed=False):
    """Write a config; `sealed`: with a checksum that fits, as somebody who edits would have to write."""
    if sealed:
        values["linearize"]["checksum"] = checksum(values["linearize"])
    (folder / "config.json").write_text(json.dumps(values))


ADDITIONS = {
    "window": 5,
    "sinks": 2,
    "exact_keys": 2,
    "scale": "linear",
    "softmax_heads": (1,),
    "trained_length": 6,
    "routed_blocks": 2,
    "routed_heads": (0, 2),
}
BAD = {
    "causal": ["x", "", "true", "false", 0, 1, 1e308, None, [None], [], {}],
    "heads": [True, 0, -4, 4.0, "4", None, 1e308, [4], 65537],
    "key_heads": [True, 0, 4.0, "4", None, 3],
    "head_dim": [True, 0, 8.0, "8", None],
    "value_dim": [True, 0, 8.0, "8", None],
    "module": [None, 3, "", [], ["encoder"]],
    "index": [True, -1, 0.0, "0", None, 7, [0]],
    "kernel": [None, 3, "", [], {}],
    "arguments": [None, [], "x", {"activation": ["exp"]}, {"activation": float("nan")}, {"activation": {}}, 3],
    "reason": [None, 3, [], "why", True],
    "cache_index": [True, -1, 0.0, "0", [0]],
    "window": [True, 0, -1, 2.0, "4", [], 2**40],
    "sinks": [None, True, -1, 2.0, "4", [], 2**40, 3],
    "host": [None, [], "is_causal", [3], ["x"], ["mask", "is_causal"], ["head_dim"], ["is_causal", "is_causal"], {}],
}
SECTION = {
    "format_version": [None, True, "1", 1.0, 0, -1, [1], 99],
    "base_model_type": [None, 3, "", [], "linearize", "berd"],
    "base_architecture": [None, 3, "", [], {}],
    "seed": [None, True, "0", 0.0, 1e308, 2**70, []],
    "layers": [None, {}, [], "x", 3, [None], [[]], ["x"]],
    "provenance": [None, [], "x", 3],
    "checksum": [None, 0, "", "0000000000000000", []],
    "unknown": [None, 1],
}


@pytest.mark.parametrize("field", [*BAD])
def test_a_wrong_value_in_a_layer_is_refused(field, saved):
    for value in BAD[field]:
        section = read(saved / "bert")["linearize"]
        layer = section["layers"][0]
        (layer["shape"] if field in layer["shape"] else layer)[field] = value
        with pytest.raises(LinearizeError) as caught:
            check_section(section)
        assert "\n" not in str(caught.value)
        # The type alone is enough: a checksum that fits does not help.
        with pytest.raises(LinearizeError):
            section["checksum"] = checksum(section)
            check_section(section)


@pytest.mark.parametrize("field", [*SECTION])
def test_a_wrong_value_in_the_section_is_refused(field, saved):
    for value in SECTION[field]:
        section = read(saved / "bert")["linearize"] | {field: value}
        with pytest.raises(LinearizeError) as caught:
            check_section(section)
            check_checksum(section)
            # The original's type is looked up when the config is made.
            linearize.modeling.config.base_config_class(section["base_model_type"])
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_a_part_is_written_in_the_first_format_that_means_the_same(part, tmp_path):
    """What an earlier version meant by the value would be computed in another way without a word."""
    needs = {"routed_blocks": 2} if part.name == "routed_heads" else {}
    values = {"window": 3, "scale": "linear", **needs, part.name: ADDITIONS[part.name]}
    model = converted("gpt2", window=3, scale="linear")
    change_hybrids(model, {x.module: Hybrid(**values) for x in Plan.from_dict(model.config.linearize).converted})
    linearize.save(model, tmp_path / "saved")
    section = read(tmp_path / "saved")["linearize"]
    assert section["format_version"] == (2 if needs else part.since)
    assert Plan.from_dict(check_section(section)).converted[0].hybrid == Hybrid(**values)
    if part.since > 1:
        with pytest.raises(CheckpointError, match=f"got {part.option} in format version 1.* convert the model again"):
            check_section({**section, "format_version": part.since - 1})
        # Interrupted runs of earlier versions do not go on with another meaning either.
        assert "format_version" in str(kernels_of(model))


def test_every_field_has_to_be_there(saved):
    section = read(saved / "bert")["linearize"]
    for key in set(section) - {"provenance"}:
        with pytest.raises(CheckpointError):
            check_checksum(check_section({name: value for name, value in section.items() if name != key}))
    for key in section["layers"][0]:
        other = copy.deepcopy(section)
        del other["layers"][0][key]
        with pytest.raises(CheckpointError, match="has checksum" if key == "host" else "keys of a layer"):
            check_checksum(check_section(other))


def test_the_schema_is_covered(saved):
    """A field that is added without a bad value here would not be checked."""
    section = read(saved / "bert")["linearize"]
    assert set(section) | {"unknown"} == set(SECTION)
    # Sinks are written where there are some.
    layer = section["layers"][0] | {"sinks": 0}
    assert (set(layer) | set(layer["shape"])) - {"shape"} == set(BAD)


@pytest.mark.parametrize("causal", ["x", 1e308, [None], 1, None])
def test_a_direction_is_true_or_false(causal):
    with pytest.raises(ConfigError, match="direction"):
        HeadShape(4, 4, 8, 8, causal)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_the_direction_is_the_host_modules(name, folders):
    values = read(folders / name)
    shape = values["linearize"]["layers"][0]["shape"]
    shape["causal"] = not shape["causal"]
    write(folders / name, values, sealed=True)
    with pytest.raises(CheckpointError, match=f"is_causal is {shape['causal']}, but the model's is"):
        AutoModel.from_pretrained(folders / name)
    with pytest.raises(CheckpointError, match="is_causal"):
        check_checkpoint(folders / name)


def test_the_direction_is_what_the_host_says_at_the_call(folders):
    """CLIP's text tower is causal, though its module says it is not."""
    values = read(folders / "clip")
    told = [layer for layer in values["linearize"]["layers"] if CALLED in layer["host"]]
    assert len(told) == 2 and all(layer["shape"]["causal"] for layer in told)
    model = AutoModel.from_pretrained(folders / "clip")
    outputs(model, inputs_of(model))
    told[0]["shape"]["causal"] = False
    write(folders / "clip", values, sealed=True)
    model = AutoModel.from_pretrained(folders / "clip")
    with pytest.raises(CheckpointError, match="is_causal True, expected False"):
        outputs(model, inputs_of(model))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 2, "key_heads": 2}, "num_heads|num_attention_heads"),
        ({"head_dim": 16}, "head_dim|attention_head_size"),
        ({"value_dim": 16}, "value size"),
    ],
)
def test_the_sizes_are_the_host_modules(change, message, folders):
    """elu has no weights whose sizes would show it."""
    values = read(folders / "clip")
    for layer in values["linearize"]["layers"]:
        layer["shape"] |= change
    write(folders / "clip", values, sealed=True)
    with pytest.raises(CheckpointError, match=message):
        model = AutoModel.from_pretrained(folders / "clip")
        outputs(model, inputs_of(model))


def test_a_cache_index_is_the_host_modules(folders):
    values = read(folders / "gpt2")
    values["linearize"]["layers"][0]["cache_index"] = 1
    write(folders / "gpt2", values, sealed=True)
    with pytest.raises(CheckpointError, match="layer_idx is 1, but the model's is 0"):
        AutoModel.from_pretrained(folders / "gpt2")


@pytest.mark.parametrize(
    "change",
    [{"window": 5}, {"window": None, "sinks": 0}, {"sinks": 1}, {"arguments": {}}],
)
def test_an_edit_that_fits_everywhere_is_seen(change, folders):
    """Weights of the same size, values of the right kind: without a checksum the model would only be another one."""
    values = read(folders / "gpt2")
    values["linearize"]["layers"][0].update(change)
    write(folders / "gpt2", values)
    # Without a window a query's scale would have no use: that edit shows in the weights too, and first.
    with pytest.raises(LinearizeError, match=r"has checksum|query_scale.bias' and 1 more, which config.json does not"):
        AutoModel.from_pretrained(folders / "gpt2")


def test_text_for_a_number_is_refused(folders):
    """The command line gives text; a file has no reason to."""
    values = read(folders / "gpt2")
    values["linearize"]["layers"][0].update(kernel="flexformer_s", arguments={"frequencies": "4"}, scale="none")
    write(folders / "gpt2", values, sealed=True)
    with pytest.raises(CheckpointError, match="frequencies: got '4', expected 4"):
        AutoModel.from_pretrained(folders / "gpt2")


def test_a_saved_config_is_read_back_and_saved_again(folders, tmp_path):
    for name in MODELS:
        model = AutoModel.from_pretrained(folders / name)
        linearize.save(model, tmp_path / f"{name}-2")
        again = AutoModel.from_pretrained(tmp_path / f"{name}-2")
        assert Plan.from_dict(model.config.linearize) == Plan.from_dict(again.config.linearize)
        assert type(model.config).from_dict(model.config.to_dict()).linearize == again.config.linearize
        for one, other in zip(outputs(model, inputs_of(model)), outputs(again, inputs_of(again)), strict=True):
            assert torch.equal(one, other)


def test_originals_without_a_flag_count_as_bidirectional(tmp_path):
    model = original("bert")
    # SDPA would take a missing flag for causal attention where there is no padding.
    model.set_attn_implementation("eager")
    for layer in model.encoder.layer:
        del layer.attention.self.is_causal
    plan = Plan.from_dict(linearize.convert(model).config.linearize)
    assert all("is_causal" in layer.host and not layer.shape.causal for layer in plan.layers)


def mutate(section, rng):
    """Change, delete, double, swap, rename or add one value anywhere."""
    places = []

    def walk(node):
        for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
            places.append((node, key))
            if isinstance(value, (dict, list)):
                walk(value)

    walk(section)
    if not places:
        return
    node, key = rng.choice(places)
    action = rng.random()
    if action < 0.45:
        node[key] = copy.deepcopy(rng.choice([*VALUES, not node[key], str(node[key]), [node[key]]]))
    elif action < 0.55:
        del node[key]
    elif action < 0.65 and isinstance(node, list):
        node.insert(rng.randrange(len(node) + 1), copy.deepcopy(node[key]))
    elif action < 0.75 and isinstance(node[key], (int, float)):
        node[key] = node[key] * rng.choice([-1, 2, 0.5, 1000]) + rng.choice([-1, 0, 1])
    elif action < 0.85 and isinstance(node, dict):
        node[rng.choice(["x", "causal", "window", "heads"])] = copy.deepcopy(node[key])
    else:
        other, there = rng.choice(places)
        # Of a value that was changed into another one the place may be gone.
        node[key] = copy.deepcopy(other[there]) if (other is not node) else rng.choice(VALUES)


def fuzz(folders, count, seed):
    """Mutate the sections; what is accepted must still be the plan that was written. Returns how many were refused."""
    rng = random.Random(seed)
    originals = {name: read(folders / name) for name in MODELS}
    plans = {name: Plan.from_dict(values["linearize"]) for name, values in originals.items()}
    refused = {"as it is": 0, "sealed": 0}
    for number in range(count):
        name = rng.choice([*MODELS])
        values = copy.deepcopy(originals[name])
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            mutate(values["linearize"], rng)
        try:
            section = check_section(values["linearize"])
            check_checksum(section)
            plan = Plan.from_dict(section)
        except LinearizeError as error:
            assert "\n" not in str(error) and len(str(error)) < 1500
            refused["as it is"] += 1
        else:
            assert plan == plans[name], number
        # With a checksum that fits: whatever the types, the host and the weights let pass has no other shape.
        if number % 10 == 0:
            refused["sealed"] += check_sealed(folders / name, values, plans[name])
        write(folders / name, originals[name])
    return refused


def check_sealed(folder, values, plan):
    """Return whether a mutated folder with a new checksum is refused; if not, the host's facts must be unchanged."""
    try:
        write(folder, values, sealed=True)
        check_checkpoint(folder)
    except LinearizeError as error:
        assert "\n" not in str(error)
        return True
    except (TypeError, AttributeError, KeyError):
        # The test's own sealing: there is no section any more.
        assert not isinstance(values.get("linearize"), dict)
        return True
    after = {layer.module: layer for layer in Plan.from_dict(values["linearize"]).converted}
    written = {layer.module: layer for layer in plan.converted}
    # A kernel without weights leaves nothing behind that could contradict a plan without it: only the checksum, which
    # was made to fit here, tells.
    for module in written.keys() - after.keys():
        info = kernel_info(written[module].kernel)
        assert not info.is_learnable(make_config(info, written[module].arguments))
    assert after.keys() <= written.keys()
    for module, one in after.items():
        other = written[module]
        direction = {"is_causal", "mask", CALLED} & set(one.host)
        assert direction != {"is_causal"} or one.shape.causal == other.shape.causal
    return False


def test_fuzz_the_section(folders):
    refused = fuzz(folders, 500, seed=17)
    assert refused["as it is"] > 400 and refused["sealed"] > 25


@pytest.mark.slow
def test_fuzz_the_section_at_length(folders):
    refused = fuzz(folders, 10_000, seed=1717)
    assert refused["as it is"] > 8_000 and refused["sealed"] > 500
