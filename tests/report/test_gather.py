"""Reports and comparisons of tiny checkpoints: what is in them, what they leave out, and bad input."""

import json
import re
import stat
from dataclasses import replace

import pytest
import torch
from support.checkpoints import make_image, make_original, make_text, texts
from support.forks import in_forked_process
from support.tasks import WORDS
from transformers import WhisperConfig, WhisperModel

import linearize
from linearize.checkpoint.loading import load_converted, load_model
from linearize.core.errors import CheckpointError, ConfigError, DataError
from linearize.evaluation.options import InputOptions, ReportOptions
from linearize.evaluation.report import page
from linearize.evaluation.report.compare import CompareOptions, compare_checkpoints
from linearize.evaluation.report.gather import answer, gather
from linearize.evaluation.report.inputs import find_original
from linearize.evaluation.report.page import write_report
from linearize.fidelity.measure import output_difference
from linearize.fidelity.plots_style import to_png


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("report")
    texts(root)
    make_original(root / "bert-original")
    for kernel in ("hedgehog", "flexformer_n"):
        make_text(root / f"bert-{kernel}", kernel=kernel)
    make_text(root / "gpt2", "gpt2", "norm_elu", "AutoModelForCausalLM")
    make_image(root / "vit")
    return root


def options(made, name, **more):
    inputs = InputOptions(str(made / "texts.jsonl") if name != "vit" else None, "text" if name != "vit" else None,
                          inputs=more.pop("inputs", 3), max_length=more.pop("max_length", 24))  # fmt: skip
    return ReportOptions(str(made / name), inputs=inputs, lengths=more.pop("lengths", ()), device="cpu", **more)


def test_a_text_report_has_everything(made, tmp_path, monkeypatch, laid_out):
    monkeypatch.setattr("matplotlib.layout_engine.ConstrainedLayoutEngine.execute", laid_out)
    monkeypatch.setattr("linearize.evaluation.report.page.to_png", to_png)
    monkeypatch.setattr("linearize.evaluation.bench.memory.in_fresh_process", in_forked_process)
    out = tmp_path / "out"
    found = write_report(
        options(made, "bert-hedgehog", original=str(made / "bert-original"), lengths=(8, 16, 99)), str(out)
    )
    written = (out / "index.html").read_text()
    for anchor in ("checkpoint", "fidelity", "maps", "training", "speed"):
        assert f'<section id="{anchor}">' in written
    images = re.findall(r"<img [^>]*>", written)
    assert len(images) == len(list((out / "images").glob("*.png"))) == 4
    for tag in images:
        assert re.search(r'alt="[^"]{20,}"', tag) and re.search(r'width="\d+" height="\d+"', tag)
    assert "<script" not in written and not re.search(r'(src|href)="(?!data:|#)', written)
    assert str(made) not in written and "bert-hedgehog: report" in written
    numbers = json.loads((out / "report.json").read_text())
    assert numbers["fidelity"]["mean"]["kl"] == pytest.approx(found.fidelity.mean("kl"))
    assert numbers["outputs"]["cosine"] <= 1 + 1e-9 and numbers["outputs"]["relative_error"] > 0
    assert [speed["tokens"] for speed in numbers["speed"]] == [8, 16]
    assert all(speed["softmax_bytes"] is not None and speed["linear_bytes"] is not None for speed in numbers["speed"])
    assert "99 tokens" in " ".join(found.notes)
    assert [what for what in found.left_out if "Stage two's curves" in what]


def test_an_aligned_model_has_its_control_against_the_original(made, tmp_path):
    """Its own softmax has changed, so before this it had none."""
    trained = {"alignment": {"train": "blocks"}, "kernel_merit": {"error": 0.1, "window_only": 0.2}}
    make_text(tmp_path / "aligned", window=3, provenance=trained)
    checked = replace(options(made, "gpt2", original=str(made / "bert-original")), checkpoint=str(tmp_path / "aligned"))
    found = gather(checked)
    [control] = [note for note in found.notes if note.startswith("Control")]
    assert "of its norm without the kernel and" in control and control.endswith("trained together with the kernel.")
    table = next(iter(page._fidelity(found)))
    assert table.columns[-2:] == ["output error, window alone", "benefit of the kernel"]
    layer, row = found.fidelity.layers[0], table.rows[0]
    low, high = layer.kernel_gain
    assert row[-1] == f"{layer.window_error - layer.output_error:.3f} ({low:.3f} to {high:.3f})"
    missing = gather(replace(checked, original=None))
    assert not [note for note in missing.notes if note.startswith("Control")]
    assert any("benefit of the kernel" in text and "--original" in text for text in missing.left_out)


def test_without_the_original_it_says_what_is_left_out(made):
    found = gather(options(made, "bert-hedgehog"))
    assert found.outputs is None
    assert any("Whole outputs" in what and "--original" in what for what in found.left_out)
    with pytest.raises(CheckpointError, match="neither a folder nor a Hub name"):
        gather(options(made, "bert-hedgehog", original="nobody/nothing"))
    with pytest.raises(ConfigError, match="got a model of type 'bert', expected 'gpt2'"):
        gather(options(made, "gpt2", original=str(made / "bert-original")))


def test_a_local_original_is_not_looked_for_on_the_hub(made, tmp_path, monkeypatch):
    folder = make_text(tmp_path / "linear")
    config = json.loads((folder / "config.json").read_text())
    config["linearize"]["provenance"] |= {"base_model": "bert-original", "base_is_local": True}
    (folder / "config.json").write_text(json.dumps(config))
    loaded = load_converted(str(folder))
    original, missing = find_original(None, loaded, "cpu")
    assert original is None and "the local checkpoint 'bert-original', which was not found" in missing
    monkeypatch.chdir(made)
    assert find_original(None, loaded, "cpu")[0] is not None


def test_a_model_does_not_differ_from_itself(made):
    one = load_model(str(made / "bert-original")).model
    batch = {"input_ids": torch.arange(12).reshape(2, 6), "attention_mask": torch.ones(2, 6, dtype=torch.long)}
    batch["attention_mask"][1, 4:] = 0
    same = output_difference(one, one, [batch])
    assert (same.cosine, same.relative_error, same.tokens) == (pytest.approx(1.0), 0.0, 10)


def test_long_inputs_are_cut_and_said(made):
    found = gather(options(made, "bert-hedgehog", max_length=500))
    assert "cut to 64 tokens" in found.notes[0]


def test_outputs_are_compared_on_what_the_original_takes(made, tmp_path):
    make_original(tmp_path / "short", max_position_embeddings=16)
    found = gather(options(made, "bert-hedgehog", original=str(tmp_path / "short"), max_length=64))
    longest = max(found.fidelity.queries // 3, 1)
    assert found.outputs.tokens == 3 * 16 and longest > 16
    assert any("first 16 tokens of an input, the most that the original takes" in note for note in found.notes)


@pytest.mark.parametrize("name", ["gpt2", "vit", "bert-flexformer_n"])
def test_other_kinds(name, made, tmp_path):
    found = write_report(options(made, name), str(tmp_path / "out"))
    page = (tmp_path / "out" / "index.html").read_text()
    assert ("laid over the picture" in page) == (name == "vit")
    if name == "gpt2":
        assert found.fidelity.mean("kl") is None
    if name == "vit":
        assert any("no length to measure at" in what for what in found.left_out)


def test_pictures_are_timed_at_their_own_size(made, monkeypatch):
    monkeypatch.setattr("linearize.evaluation.bench.memory.in_fresh_process", in_forked_process)
    found = gather(options(made, "vit", lengths=(128,)))
    assert [row.tokens for row in found.speeds] == [10] and found.speeds[0].speedup > 0
    assert found.to_dict()["speed"][0]["linear_bytes"] is not None
    found.noise = None
    assert answer(found).endswith("times as long as with softmax; it reads images of 30 x 30 pixels.")


def test_rotary_models_are_timed_beyond_their_length(made, tmp_path, monkeypatch):
    monkeypatch.setattr("linearize.evaluation.bench.memory.in_fresh_process", in_forked_process)
    make_text(tmp_path / "llama", "llama", "hedgehog", "AutoModelForCausalLM")
    inputs = InputOptions(str(made / "texts.jsonl"), "text", inputs=1, max_length=8)
    found = gather(ReportOptions(str(tmp_path / "llama"), inputs=inputs, lengths=(100,), device="cpu"))
    assert [row.tokens for row in found.speeds] == [100]
    assert any("beyond the 64 tokens that this checkpoint was made for" in note for note in found.notes)


def test_bad_input(made, tmp_path):
    with pytest.raises(CheckpointError, match="is not a converted checkpoint"):
        gather(options(made, "bert-original"))
    with pytest.raises(DataError, match=re.escape("nowhere.jsonl")):
        gather(ReportOptions(str(made / "bert-hedgehog"), inputs=InputOptions("./nowhere.jsonl"), device="cpu"))
    for wrong in ({"inputs": 0}, {"max_length": -1}):
        with pytest.raises(ConfigError, match="at least 1"):
            InputOptions(**wrong)
    with pytest.raises(ConfigError, match="lengths"):
        gather(options(made, "bert-hedgehog", lengths=(0,)))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious.txt").write_text("keep")
    with pytest.raises(CheckpointError, match="--overwrite"):
        write_report(options(made, "bert-hedgehog"), str(tmp_path / "full"))
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        write_report(options(made, "bert-hedgehog"), str(tmp_path / "file"))
    sound = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 9, "num_mel_bins": 4}
    more = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_source_positions": 8, "pad_token_id": 0}
    linearize.save(linearize.convert(WhisperModel(WhisperConfig(**sound, **more))), tmp_path / "sound")
    with pytest.raises(ConfigError, match="takes input_features"):
        gather(ReportOptions(str(tmp_path / "sound"), device="cpu"))


def test_a_folder_that_cannot_be_written(made, tmp_path, monkeypatch):
    shut = tmp_path / "shut"
    shut.mkdir()
    shut.chmod(stat.S_IRUSR | stat.S_IXUSR)
    monkeypatch.setattr("linearize.checkpoint.save.os.access", lambda *a: False)  # root may write anywhere
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_report(options(made, "bert-hedgehog"), str(shut / "report"))


def test_a_full_disk_leaves_no_half_report(made, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(CheckpointError, match="No space left"):
        write_report(options(made, "vit"), str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


def test_a_broken_log_is_named(made, tmp_path):
    folder = make_text(tmp_path / "broken")
    (folder / "log.jsonl").write_text('{"step": 1}\n{"st')
    with pytest.raises(CheckpointError, match=re.escape("log.jsonl")):
        inputs = InputOptions(str(made / "texts.jsonl"), "text", inputs=2, max_length=16)
        gather(ReportOptions(str(folder), inputs=inputs, lengths=(), device="cpu"))


def test_compare_says_whose_softmax_it_shows(made, tmp_path):
    """An aligned model was "better" by its distance from its own changed softmax, without a word."""
    aligned = str(make_text(tmp_path / "aligned", provenance={"alignment": {"train": "blocks"}}))
    inputs = InputOptions(str(made / "texts.jsonl"), "text", inputs=2, max_length=8)
    found = compare_checkpoints(
        CompareOptions([str(made / "bert-hedgehog"), aligned], inputs=inputs, lengths=(), device="cpu")
    )
    [note] = [note for note in found.notes if "its own softmax" in note]
    assert note.startswith("aligned: its weights were trained after stage one") and note.endswith("go by the cosine.")


def test_models_of_different_limits_are_compared_on_the_same_inputs(made, tmp_path):
    """One read 64 tokens of an input and the other 96, and a verdict paired the two."""
    words = " ".join(WORDS * 40)
    (tmp_path / "long.jsonl").write_text("".join(f'{{"text": "{number} {words}"}}\n' for number in range(20)))
    longer = str(make_text(tmp_path / "longer", max_length=96))
    inputs = InputOptions(str(tmp_path / "long.jsonl"), "text", inputs=6)
    names = [str(made / "bert-hedgehog"), longer]
    found = compare_checkpoints(CompareOptions(names, inputs=inputs, lengths=(), device="cpu"))
    assert "Inputs were cut to 64 tokens, the most that bert-hedgehog takes, so that all models" in found.notes[0]
    alone = replace(inputs, max_length=64)
    same = compare_checkpoints(CompareOptions(names, inputs=alone, lengths=(), device="cpu"))
    assert [each.per_input for each in same.conversions] == [each.per_input for each in found.conversions]
    assert not any("cut to" in note for note in same.notes)


def test_compare(made):
    inputs = InputOptions(str(made / "texts.jsonl"), "text", inputs=3, max_length=24)
    names = [str(made / f"bert-{kernel}") for kernel in ("hedgehog", "flexformer_n")]
    one = compare_checkpoints(
        CompareOptions(names, original=str(made / "bert-original"), inputs=inputs, lengths=(8, 32), device="cpu")
    )
    assert [c.name for c in one.conversions] == ["bert-hedgehog", "bert-flexformer_n"]
    assert [c.kernels for c in one.conversions] == ["2 x hedgehog", "2 x flexformer_n"]
    assert one.conversions[0].parameters_added == 2 * 4 * (8 * 8 + 8)
    assert [[layer["kernel"] for layer in c.layers] for c in one.conversions] == [
        ["hedgehog"] * 2,
        ["flexformer_n"] * 2,
    ]
    assert all(c.kl == pytest.approx(sum(layer["kl"] for layer in c.layers) / 2) for c in one.conversions)
    assert all(c.tokens == 32 and c.speedup > 0 and 0 < c.cosine < 1 + 1e-9 for c in one.conversions)
    with pytest.raises(ConfigError, match="two or more"):
        compare_checkpoints(CompareOptions(names[:1]))
    with pytest.raises(ConfigError, match="reads image, but bert-hedgehog reads text"):
        compare_checkpoints(
            CompareOptions([names[0], str(made / "vit")], inputs=InputOptions(inputs=2), lengths=(), device="cpu")
        )
