"""torch.export and ONNX with sizes left open: the numbers of PyTorch at other sizes, step by step too."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from support.command_lines import run
from support.rounding import UNIT, allowed
from support.tiny import converted, inputs_of, outputs

import linearize
from linearize.core.errors import UnsupportedModelError
from linearize.export.graphs import AFTER, BATCH, BEFORE, PAST, TOKENS, graphs_of
from linearize.ops import causal_attention

DYNAMIC = torch.export.Dim.DYNAMIC


class Causal(torch.nn.Module):
    """The op alone."""

    def __init__(self, normalize: bool) -> None:
        super().__init__()
        self.normalize = normalize

    def forward(self, q, k, v, scale=None):
        return causal_attention(q, k, v, log_scale=scale, normalize=self.normalize)


def tensors(batch, tokens, scaled):
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    made = [draw(batch, 4, tokens, 6).abs(), draw(batch, 2, tokens, 6).abs(), draw(batch, 2, tokens, 5)]
    return [*made, 30 * draw(batch, 2, tokens)] if scaled else made


@pytest.mark.slow
def test_the_causal_op_is_written_down_for_any_length():
    given = tensors(2, 9, True)
    sizes = [{0: DYNAMIC, 2: DYNAMIC}] * 4
    program = torch.export.export(Causal(True), tuple(given), dynamic_shapes=tuple(sizes), strict=False).module()
    for batch, tokens in ((2, 9), (3, 2), (1 + 1, 64), (2, 65), (4, 300)):
        q, k, v, scale = tensors(batch, tokens, True)
        (out, state), (expected, after) = program(q, k, v, scale), causal_attention(q, k, v, log_scale=scale)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        # The fast op may keep the same sums under another shift.
        same = state[0] * torch.exp(state[1] - after[1])[..., None, None]
        torch.testing.assert_close(same, after[0], rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert", "vit", "gpt2", "llama", "qwen2"])
def test_models_are_written_down_for_any_length(name):
    head = "AutoModelForCausalLM" if name in ("gpt2", "llama", "qwen2") else "AutoModel"
    model = converted(name, head)
    model.config.use_cache = False
    inputs = inputs_of(model)
    sizes = {key: {0: DYNAMIC} if key == "pixel_values" else {0: DYNAMIC, 1: DYNAMIC} for key in inputs}
    program = torch.export.export(model, (), kwargs=inputs, dynamic_shapes=sizes, strict=False).module()
    for batch, tokens in ((2, 5), (4, 40)):
        other = inputs_of(model, batch, tokens)
        for one, two in zip(outputs(model, other), outputs(program, other), strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=2e-6)


def test_exact_keys_of_an_encoder_are_chosen_in_the_graph():
    """Also in rows of fewer tokens than exact keys or sinks."""
    model = converted("bert", window=8, sinks=4, exact_keys=12, config={"num_hidden_layers": 1})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "log_scale" in name:
                parameter.normal_(generator=generator)
    graph = graphs_of(model)[0]
    program = graph.program().module()
    for batch, tokens in ((2, 2), (2, 5), (4, 13), (3, 40)):
        inputs = inputs_of(model, batch, tokens)
        given = [inputs.get(name, torch.zeros_like(inputs["input_ids"])) for name in graph.inputs]
        for one, two in zip(graph.module(*given), program(*given), strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=2e-6)


@pytest.mark.parametrize("count", [1, 2, 5, 64, 100])
def test_lunas_segments_in_a_graph_are_those_of_searchsorted(count):
    """Also at a knot, among equal knots and beyond the last one."""
    from linearize.kernels.luna import _bisect

    generator = torch.Generator().manual_seed(count)
    knots = torch.randint(-9, 9, (2, 3, count), generator=generator).float().sort().values
    knots[1, :, -1], knots[1, 0, 0] = torch.inf, -torch.inf
    u = torch.cat([torch.randint(-12, 12, (2, 3, 50), generator=generator) / 2, knots], dim=-1)
    assert torch.equal(_bisect(knots, u), torch.searchsorted(knots, u))


OPTIONS = {
    "linear": {},
    "mixed": {"keep_softmax": [0]},
    "window": {"window": 4, "sinks": 2},
    "recall": {"window": 4, "sinks": 2, "exact_keys": 3, "softmax_heads": "0:1"},
}


@pytest.mark.parametrize("which", OPTIONS)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_prompt_and_steps_are_the_model(name, which):
    """The modules themselves, before anything is written down."""
    model = converted(name, "AutoModelForCausalLM", **OPTIONS[which])
    prompt, step = graphs_of(model)
    ids = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        whole = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    found = prompt.run({"input_ids": ids[:, :9], "attention_mask": mask[:, :9]})
    torch.testing.assert_close(found["logits"][mask[:, :9].bool()], whole[:, :9][mask[:, :9].bool()])
    for number in range(9, 12):
        state = {key.replace(AFTER, BEFORE, 1): x for key, x in found.items() if key.startswith(AFTER)}
        found = step.run({"input_ids": ids[:, number, None], **state})
        torch.testing.assert_close(found["logits"][:, 0], whole[:, number], rtol=1e-5, atol=1e-5)
    assert set(step.inputs) == {"input_ids", *(key.replace(AFTER, BEFORE, 1) for key in found if key != "logits")}
    assert ("present.mask" in found) == ("present.0.keys" in found) == (which == "mixed")


@pytest.mark.parametrize("scaled", [False, True])
def test_the_chunks_that_are_written_down_are_those_of_the_op(scaled):
    """All chunks at once, as in a graph, equal the loop over the chunks."""
    from support.op_cases import parallel_attention

    from linearize.ops.state import empty_state

    q, k, v, *scale = tensors(2, 150, scaled)
    mask = torch.ones(2, 150, dtype=torch.bool)
    mask[0, :20] = False
    given = {"key_padding_mask": mask, "log_scale": scale[0] if scaled else None}
    state = empty_state(k, v, scaled=scaled)
    for part in (slice(0, 70), slice(70, 150)):
        tokens = [x[:, :, part] for x in (q, k, v)]
        options = {
            name: None if x is None else x[:, part] if x.ndim == 2 else x[:, :, part] for name, x in given.items()
        }
        out, after = parallel_attention(*tokens, **options, initial_state=state, normalize=True, eps=1e-30)
        expected, state = causal_attention(*tokens, **options, initial_state=state)
        real = mask[:, part][:, None, :, None].expand_as(out)
        torch.testing.assert_close(out[real], expected[real], rtol=1e-5, atol=1e-5)
        same = after.kv * torch.exp(after.log_scale - state.log_scale)[..., None, None]
        torch.testing.assert_close(same, state.kv, rtol=1e-5, atol=1e-4)


def test_the_last_logits_alone():
    model = converted("gpt2", "AutoModelForCausalLM")
    whole, last = (graphs_of(model, last_logits=last)[0] for last in (False, True))
    expected, found = whole.run(whole.inputs)["logits"][:, -1:], last.run(last.inputs)["logits"]
    # A product for one token may add up in another order.
    torch.testing.assert_close(found, expected, rtol=0, atol=allowed(UNIT * expected.abs().max().item(), 32))


@pytest.mark.parametrize("head", ["SequenceClassification", "QuestionAnswering"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_decoder_without_an_output_per_token_is_one_graph(name, head):
    """It was exported with a graph for steps, and compared as if its classes were tokens."""
    model = converted(name, f"AutoModelFor{head}", config={"pad_token_id": 0})
    (graph,) = graphs_of(model)
    assert graph.name == "model" and set(graph.inputs) == {"input_ids", "attention_mask"}
    assert graph.outputs == (("logits",) if head == "SequenceClassification" else ("start_logits", "end_logits"))
    for made, expected in zip(graph.run(graph.inputs).values(), outputs(model, graph.inputs), strict=False):
        torch.testing.assert_close(made, expected)


def test_what_cannot_be_exported_is_refused_in_one_line():
    with pytest.raises(UnsupportedModelError, match="got an encoder-decoder, expected"):
        graphs_of(converted("bart"))
    with pytest.raises(UnsupportedModelError, match="no padding token is defined"):
        graphs_of(converted("gpt2", "AutoModelForSequenceClassification", config={"pad_token_id": None}))
    with pytest.raises(UnsupportedModelError, match="got a layer that remembers a DynamicSlidingWindowLayer"):
        graphs_of(converted("gemma3", "AutoModelForCausalLM"))


def test_the_command_line_refuses_before_it_works(tmp_path, capsys):
    pytest.importorskip("onnxscript")
    code, out, err = run(capsys, "export", tmp_path / "nowhere", "--output", tmp_path / "out")
    assert code == 2 and out == "" and len(err.splitlines()) == 1 and not (tmp_path / "out").exists()
    linearize.save(converted("bert"), tmp_path / "bert")
    code, _, err = run(capsys, "export", tmp_path / "bert", "--output", tmp_path / "out", "--time", "16")
    assert code == 2 and "unknown option '--time'" in err
    code, _, err = run(capsys, "export", tmp_path / "bert", "--output", tmp_path / "out", "--last-logits")
    assert code == 2 and "so its one graph has all outputs" in err and not (tmp_path / "out").exists()
    code, _, err = run(capsys, "export", tmp_path, "--output", tmp_path / "out", "--format", "tflite")
    assert code == 2 and "tflite" in err and "onnx" in err


SIZES = {BATCH, TOKENS, PAST, "past + 1"}
"""Names of the open sizes of outputs; torch.export calls them s26 and the like."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kernel", "options"),
    [
        ("bert", "hedgehog", {}),
        ("bert", "luna", {}),
        ("roberta", "flexformer_n", {}),
        ("vit", "t2r", {}),
        ("gpt2", "flexformer_n", {}),
        ("llama", "hedgehog", {"keep_softmax": [0]}),
        ("qwen2", "performer", {}),
        ("bert", "flexformer_n", {"window": 8, "sinks": 2}),
        ("bert", "hedgehog", {"window": 8, "sinks": 2, "exact_keys": 12}),
        ("llama", "flexformer_n", {"window": 8, "sinks": 2}),
        ("llama", "hedgehog", {"window": 8, "sinks": 2, "exact_keys": 6, "softmax_heads": "0:1"}),
        ("gpt2", "t2r", {"window": 8, "exact_keys": 12}),
    ],
)
def test_onnx_through_the_command_line(name, kernel, options, tmp_path, capsys):
    ort = pytest.importorskip("onnxruntime")
    writes = name in ("gpt2", "llama", "qwen2")
    sizes = {"n_positions": 200} if name == "gpt2" else {} if name == "vit" else {"max_position_embeddings": 200}
    model = converted(name, "AutoModelForCausalLM" if writes else "AutoModel", kernel, config=sizes, **options)
    linearize.save(model, tmp_path / "model")
    line = ["export", tmp_path / "model", "--format", "onnx", "--output", tmp_path / "out", "--json"]
    code, out, err = run(capsys, *line)
    assert code == 0, err
    found = json.loads(out)
    assert set(found["checked"]) == ({"model", "step"} if writes else {"model"})
    assert all(one["difference"] <= 2e-5 * max(1, one["largest"]) for one in found["checked"].values())
    record = json.loads((tmp_path / "out" / "export.json").read_text())
    # The whole path of the checkpoint was in a folder that is published.
    assert record["model"] == "model"
    described = record["graphs"]
    opened = ort.InferenceSession(str(tmp_path / "out" / "model.onnx"))
    assert {one.name: one.shape for one in opened.get_inputs()} == {
        key: one["shape"] for key, one in described["model.onnx"]["inputs"].items()
    }
    for graph in described:
        read = ort.InferenceSession(str(tmp_path / "out" / graph))
        shapes = [one.shape for one in read.get_outputs()]
        assert {str(size) for shape in shapes for size in shape if not isinstance(size, int)} <= SIZES, shapes
        assert all(shape[0] == BATCH for shape in shapes)
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"model.onnx", "model.onnx_data", "export.json"} <= files and ("step.onnx" in files) == writes
    if not writes:
        # Compare with the checkpoint as it is loaded, at other sizes.
        loaded = transformers.AutoModel.from_pretrained(tmp_path / "model").eval()
        for tokens in (70, 6):
            inputs = inputs_of(loaded, batch=4, tokens=tokens)
            names = {one.name for one in opened.get_inputs()} & inputs.keys()
            made = torch.from_numpy(
                opened.run(None, {key: inputs[key].numpy() for key in names} | spare(opened, inputs))[0]
            )
            expected = outputs(loaded, inputs)[0]
            real = inputs.get("attention_mask", torch.ones(expected.shape[:2])).bool()
            torch.testing.assert_close(made[real], expected[real], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_server_of_embeddings_reads_the_folder(tmp_path, capsys):
    """What Text Embeddings Inference reads; nothing there can be loaded as softmax."""
    ort = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from tokenizers import Tokenizer

    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"])}
    tokenizer = transformers.BertTokenizer(vocab=words, model_max_length=64)
    tokenizer.backend_tokenizer.enable_truncation(16)
    model = converted("bert", max_length=100, config={"num_hidden_layers": 1})
    files = {
        "modules.json": '[{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},'
        ' {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]',
        "sentence_bert_config.json": '{"max_seq_length": 16}',
        "1_Pooling/config.json": '{"pooling_mode_cls_token": false, "pooling_mode_mean_tokens": true}',
    }
    linearize.save(model, tmp_path / "model", processor=tokenizer, extra_files=files)
    code, _, err = run(capsys, "export", tmp_path / "model", "--output", tmp_path / "out")
    assert code == 0, err
    found = {name: json.loads((tmp_path / "out" / name).read_text()) for name in ("config.json", *files)}
    config = found["config.json"]
    assert config["model_type"] == "bert" and config["architectures"] == ["BertModel"]
    assert (config["hidden_size"], config["num_hidden_layers"], config["pad_token_id"]) == (32, 1, 0)
    assert config["max_position_embeddings"] == found["sentence_bert_config.json"]["max_seq_length"] == 100
    assert not {"linearize", "auto_map"} & config.keys() and isinstance(config["initializer_range"], float)
    assert found["1_Pooling/config.json"]["pooling_mode_mean_tokens"] is True
    # As servers read it: without Python, and with the graph beside it.
    ids = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).encode("a " * 300).ids
    assert len(ids) == 100
    opened = ort.InferenceSession(str(tmp_path / "out" / "model.onnx"))
    assert {one.name for one in opened.get_inputs()} == {"input_ids", "attention_mask", "token_type_ids"}
    given = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, 100, dtype=torch.long)}
    given["token_type_ids"] = torch.zeros_like(given["input_ids"])
    states = opened.run(["last_hidden_state"], {key: x.numpy() for key, x in given.items()})[0]
    torch.testing.assert_close(torch.from_numpy(states), outputs(model, given)[0], rtol=1e-5, atol=1e-5)
    for loader in (transformers.AutoModel, transformers.BertModel):
        with pytest.raises(OSError, match="no file named"):
            loader.from_pretrained(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("own_op", [False, True])
@pytest.mark.parametrize(("options", "rule"), [({}, "linear"), ({"window": 4}, "gated")])
def test_a_step_by_onnxruntimes_own_op(options, rule, own_op, tmp_path, capsys):
    """With log-scales, the state is first multiplied by what its shift changed; queries share heads of keys."""
    ort = pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    model = converted("llama", "AutoModelForCausalLM", config={"num_hidden_layers": 1}, **options)
    linearize.save(model, tmp_path / "model")
    more = ["--onnxruntime-op"] if own_op else []
    code, out, err = run(capsys, "export", tmp_path / "model", "--output", tmp_path / "out", "--json", *more)
    assert code == 0, err
    checked = json.loads(out)["checked"]["step"]
    assert checked["difference"] <= 2e-5 * max(1, checked["largest"])
    step = onnx.load(tmp_path / "out" / "step.onnx", load_external_data=False)
    rules = [
        next(given.s.decode() for given in node.attribute if given.name == "update_rule")
        for node in step.graph.node
        if node.op_type == "LinearAttention"
    ]
    assert rules == [rule] * own_op
    assert ort.InferenceSession(str(tmp_path / "out" / "step.onnx"))


def test_an_onnxruntime_without_the_op_is_refused(tmp_path, monkeypatch, capsys):
    pytest.importorskip("onnxscript")
    from linearize.export import onnx

    monkeypatch.setattr(onnx, "get_all_operator_schema", list)
    code, out, err = run(capsys, "export", tmp_path, "--output", tmp_path / "out", "--onnxruntime-op")
    assert code == 2 and out == "" and len(err.splitlines()) == 1 and "with the op LinearAttention; upgrade it" in err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_openvino_reads_the_graphs(name, tmp_path, capsys):
    """In fp32; left alone, it computes in bf16 on processors that have it."""
    ov = pytest.importorskip("openvino")
    pytest.importorskip("onnxscript")
    from linearize.export.onnx import resized

    head = "AutoModelForCausalLM" if name == "gpt2" else "AutoModel"
    model = converted(name, head, config={"n_positions" if name == "gpt2" else "max_position_embeddings": 200})
    linearize.save(model, tmp_path / "model")
    code, _, err = run(capsys, "export", tmp_path / "model", "--output", tmp_path / "out")
    assert code == 0, err
    graphs = {graph.name: graph for graph in graphs_of(model)}
    for graph in graphs.values():
        read = ov.convert_model(str(tmp_path / "out" / f"{graph.name}.onnx"))
        compiled = ov.Core().compile_model(read, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        longer = [resized(graph, {BATCH: 3, TOKENS: 100}, padded=False)] if graph.name == "model" else []
        for inputs in [graph.inputs, *longer]:
            found = compiled({key: x.numpy() for key, x in inputs.items()})
            for output, (key, expected) in zip(compiled.outputs, graph.run(inputs).items(), strict=True):
                made = torch.from_numpy(found[output])
                torch.testing.assert_close(made.to(expected.dtype), expected, rtol=2e-5, atol=2e-5, msg=key)


def spare(opened, inputs):
    """Inputs that the model makes for itself."""
    missing = {one.name for one in opened.get_inputs()} - inputs.keys()
    return {key: torch.zeros_like(inputs["input_ids"]).numpy() for key in missing}
