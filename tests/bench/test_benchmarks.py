"""The benchmarks of the project on tiny sizes: they run and their numbers belong together; nothing is timed."""

import json
import os
import runpy
import sys

import pytest
import torch
from support.forks import in_place_of_interpreter
from support.naive import naive_attention
from support.tiny import converted, original
from support.weights_loss import weights_loss

import linearize
from benchmarks import attentions, goals, onnx, public_op, steps
from benchmarks.alignment import AlignmentSuite
from benchmarks.attentions import DecodeSuite, OpSuite
from benchmarks.bound import operations, with_bound
from benchmarks.goals import Goal, judge, run_goals, table_of_goals
from benchmarks.public_op import PublicOpSuite
from benchmarks.stage_one import StageOneSuite, naive_loss
from benchmarks.train import TrainSuite
from linearize.attention.interface import linear_attentions
from linearize.core.errors import ConfigError
from linearize.evaluation.bench import memory
from linearize.evaluation.bench.job import measure
from linearize.evaluation.bench.models import BenchModel
from linearize.evaluation.bench.suites import AttentionSizes, AttentionSuite
from linearize.evaluation.options import BenchOptions
from linearize.training.stage_one.loss import Targets

SIZES = AttentionSizes("hedgehog", heads=2, head_dim=8)
RATE = 1e9


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "bert"
    original("bert").save_pretrained(folder)
    return str(folder)


@pytest.fixture
def no_process(monkeypatch):
    """Every side takes as much memory."""
    monkeypatch.setattr(memory, "in_fresh_process", lambda *_: 1000)


class _Public:
    """In place of the package: the product by its definition."""

    @staticmethod
    def causal_dot_product(q, k, v):
        return (q @ k.transpose(-1, -2)).tril() @ v


def test_public_op(monkeypatch):
    suite = PublicOpSuite(SIZES, features=16)
    monkeypatch.setattr(public_op, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install pytorch-fast-transformers"):
        suite.check()
    assert [g.figure for g in table_of_goals() if "public" in g.what] == [None]
    monkeypatch.setattr(public_op, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "fast_transformers", _Public)
    monkeypatch.setitem(sys.modules, "fast_transformers.causal_product", _Public)
    suite.check()
    wanted = PublicOpSuite(AttentionSizes("flexformer_n"))
    assert [g.tasks for g in table_of_goals() if "public" in g.what] == [((wanted, 4096),)]
    ours, theirs = (suite.prepare(variant, 20)() for variant in ("linear", "fast-transformers"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    row = measure(suite, 20, repeats=2, memory=False)
    assert row.speedup == row.seconds("fast-transformers") / row.seconds("linear")


@pytest.mark.parametrize("backward", [False, True])
def test_the_op_on_given_features(backward):
    suite = OpSuite(SIZES, causal=True, backward=backward, features=16)
    suite.check()
    row = measure(suite, 20, repeats=2, memory=False)
    assert row.speedup == row.seconds("softmax") / row.seconds("linear") and row.what.startswith("given features")
    phi_q, phi_k = (SIZES.draw(20, 16, seed=seed).abs() for seed in (3, 4))
    expected, _ = naive_attention(phi_q, phi_k, SIZES.draw(20, seed=2), causal=True)
    found = suite.prepare("linear", 20)()
    if backward:
        assert [tuple(gradient.shape) for gradient in found] == [(1, 2, 20, 16), (1, 2, 20, 16), (1, 2, 20, 8)]
    else:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_decoding():
    suite = DecodeSuite(SIZES, layers=3)
    suite.check()
    row = measure(suite, 40, repeats=2, memory=False)
    variants = row.to_dict()["sides"]
    first = [variants[name]["first_seconds"] for name in ("softmax", "linear")]
    assert row.figures["first_speedup"] == pytest.approx(first[0] / first[1])
    assert suite.calls == 8 and variants["linear"]["repeats"] == 2
    positional = DecodeSuite(AttentionSizes("cosformer", {"max_positions": 64}, heads=2, head_dim=8), layers=1)
    assert measure(positional, 40, repeats=2, memory=False).speedup > 0


@pytest.mark.parametrize("line", ["op --causal --features 16", "decode --kernel elu --kernel luna --layers 2"])
def test_attentions_from_the_command_line(line, capsys):
    small = "--lengths 8,16 --heads 2 --head-dim 8 --repeats 1 --no-memory --json"
    assert attentions.main([*line.split(), *small.split()]) == 0
    streams = capsys.readouterr()
    tokens = [row["tokens"] for row in json.loads(streams.out)["rows"]]
    assert tokens == [8, 16] * (2 if line.startswith("decode") else 1) and "Noise:" in streams.err


@pytest.mark.slow
def test_graphs_are_timed(tmp_path, capsys):
    pytest.importorskip("onnxruntime")
    linearize.save(converted("gpt2", "AutoModelForCausalLM", "flexformer_n"), tmp_path / "gpt2")
    assert onnx.main([str(tmp_path / "gpt2"), "--lengths", "16", "--json"]) == 0
    streams = capsys.readouterr()
    assert [row["what"] for row in json.loads(streams.out)] == ["forward", "step"]
    assert "step after 16 tokens: PyTorch" in streams.err and "onnxruntime" in streams.err


def test_pytorch_is_timed_with_the_native_op_and_without(monkeypatch):
    seen = []
    monkeypatch.setattr(onnx, "in_turns", lambda sides: {name: call() or 1.0 for name, call in sides.items()})
    monkeypatch.setenv("LINEARIZE_NATIVE", "1")
    for engine, expected in ((object(), ["1", "onnx", "0"]), (None, ["1", "onnx"])):
        monkeypatch.setattr(onnx.native, "engine", lambda engine=engine: engine)
        row = onnx._pair("forward", 5, lambda: seen.append(os.environ["LINEARIZE_NATIVE"]), lambda: seen.append("onnx"))
        assert seen == expected and (row.pytorch_alone is None) == (engine is None)
        seen.clear()
    assert os.environ["LINEARIZE_NATIVE"] == "1"


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("kernel", ["hedgehog", "flexformer_n"])
def test_stage_one(bert, kernel):
    suite = StageOneSuite(BenchModel(bert, kernel, longest=64))
    suite.check()
    row = measure(suite, 40, repeats=2)
    assert row.speedup == pytest.approx(row.seconds("naive") / row.seconds("step"))
    assert row.figures["share_of_least"] == pytest.approx(row.seconds("least") / row.seconds("step"))
    # Both sides take as much, so nothing is left between them.
    assert row.figures["memory_ratio"] == row.figures["memory_ratio_above_weights"] == 1.0


@pytest.fixture(scope="module")
def folders(bert, tmp_path_factory):
    linear = tmp_path_factory.mktemp("models") / "linear"
    converted("bert").save_pretrained(linear)
    return {"bert": bert, "linear": str(linear)}


@pytest.mark.parametrize("name", ["bert", "linear"])
def test_a_training_step_is_one_of_softmax_or_of_kernels(folders, no_process, name):
    suite = TrainSuite(BenchModel(folders[name], "hedgehog", longest=64, batch_tokens=100))
    suite.check()
    row = measure(suite, 40, repeats=2)
    assert row.speedup == pytest.approx(row.seconds("softmax") / row.seconds("linear"))
    assert row.figures["bound_speedup"] == pytest.approx(row.seconds("softmax") / row.seconds("no attention"))
    assert [suite.model.inputs(tokens)["input_ids"].shape for tokens in (40, 101)] == [(2, 40), (1, 101)]
    found = {}
    for variant in suite.variants:
        model = suite.model.original if (name, variant) == ("bert", "softmax") else suite.model.linear
        step = suite.prepare(variant, 40)
        weights = next(weight for key, weight in model.named_parameters() if key.endswith("query.weight"))
        before = weights.detach().clone()
        step()
        found[variant] = weights.grad.clone()
        # Without attention nothing depends on the queries.
        assert torch.equal(weights, before) == (variant == "no attention")
        assert not any(layer.observer for layer in linear_attentions(model).values())
    assert not found["no attention"].any() and not torch.allclose(found["softmax"], found["linear"], rtol=0.1, atol=0)


@pytest.mark.usefixtures("no_process")
def test_alignment(bert):
    suite = AlignmentSuite(BenchModel(bert, "hedgehog", longest=64))
    suite.check()
    row = measure(suite, 40, repeats=2)
    assert row.figures["step_over_passes"] == pytest.approx(row.seconds("step") / row.seconds("passes"))
    assert 0 < row.figures["blockwise_memory_ratio"] < 1


def test_the_naive_way_is_the_loss_of_stage_one():
    layer = next(iter(m for m in converted("bert").modules() if type(m).__name__ == "LinearAttention"))
    q, k, v = (torch.randn(1, 4, 12, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    naive_loss(layer, q, k, v, None, 0.3)
    found = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    (phi_q, _), (phi_k, scale) = layer.mixer.mapped(q, k, scaling=0.3)
    loss = weights_loss(phi_q, phi_k, scale, Targets(q, k, 0.3, False))
    (loss / (4 * 12)).backward()
    for one, parameter in zip(found, layer.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=1e-3, atol=1e-6)


def test_stage_one_needs_weights_to_learn(bert):
    with pytest.raises(ConfigError, match="weights to learn"):
        StageOneSuite(BenchModel(bert, "elu")).check()
    with pytest.raises(ConfigError, match="one sequence"):
        StageOneSuite(BenchModel(bert, batch=2)).check()


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("step", steps.SUITES)
def test_steps_from_the_command_line(bert, step, capsys):
    line = [step, "--model", bert, "--lengths", "16,32", "--repeats", "1", "--no-memory", "--json"]
    assert steps.main(line) == 0
    streams = capsys.readouterr()
    assert [row["tokens"] for row in json.loads(streams.out)["rows"]] == [16, 32] and "Noise:" in streams.err


def test_operations_are_counted():
    given = OpSuite(SIZES, features=16)
    # Two products of 2 heads, 10 tokens, 16 features and 8 values with one column more.
    assert operations(given, "linear", 10) == 2 * 2 * 2 * 10 * 16 * 9
    assert operations(given, "softmax", 10) == 2 * 2 * 2 * 10 * 10 * 8
    # Hedgehog has one matrix of 8 x 8 per head, for queries and for keys.
    mapped = AttentionSuite(SIZES)
    assert operations(mapped, "linear", 10) == operations(given, "linear", 10) + 2 * 2 * 2 * 10 * 8 * 8
    assert operations(AttentionSuite(SIZES, causal=True, backward=True), "softmax", 10) == 3 * 2 * 2 * 10 * 10 * 8
    row = with_bound(measure(given, 20, repeats=1, memory=False), given, RATE)
    for variant in given.variants:
        share = row.figures[f"{variant}_operations"] / RATE / row.seconds(variant)
        assert row.figures[f"{variant}_share_of_bound"] == pytest.approx(share)


def test_goals_are_those_of_the_table():
    table = table_of_goals()
    assert len({goal.what for goal in table}) == len(table) == 23
    assert sum(goal.figure is None for goal in table) == 3


def test_goals_are_judged(no_process, monkeypatch, capsys):
    tasks = ((AttentionSuite(SIZES), 8),)
    table = [
        Goal("easy", 0.0, figure=lambda rows: rows[0].speedup, tasks=tasks),
        Goal("hard", 1e9, figure=lambda rows: rows[0].speedup, tasks=tasks),
        Goal("limit", 1e9, most=True, figure=lambda rows: rows[1].seconds("linear"), tasks=tasks * 2),
        Goal("later", 2.0),
    ]
    result, verdicts = run_goals(BenchOptions(repeats=1), goals=table)
    assert [verdict.verdict for verdict in verdicts] == ["pass", "missed", "pass", "not built"]
    assert len(result.rows) == 1 and verdicts[0].goal == ">= 0 x"
    lost = Goal("lost", 1.0, figure=lambda rows: None, tasks=tasks)
    assert judge(lost, list(tasks), result.rows).verdict == "not measured"
    monkeypatch.setattr(goals, "table_of_goals", lambda device: table)
    assert goals.main(["--repeats", "1", "--json"]) == 0
    streams = capsys.readouterr()
    assert len(json.loads(streams.out)["goals"]) == 4 and "Goals: 2 of 4 reached" in streams.err


@pytest.mark.filterwarnings("ignore:'benchmarks.attentions' found in sys.modules")
def test_a_module_that_is_run_measures_memory(monkeypatch, capsys):
    """Its suites belonged to `__main__`, where the measuring process did not find them."""
    monkeypatch.setattr(memory.subprocess, "run", in_place_of_interpreter)
    line = ["attentions", "op", "--kernel", "hedgehog", "--lengths", "16", "--json", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", line)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("benchmarks.attentions", run_name="__main__")
    assert ended.value.code == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["speedup"] > 0 and {"seconds", "bytes", "problem"} <= row["sides"]["linear"].keys()
