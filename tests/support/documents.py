"""Command lines and Python blocks of README.md and the pages in docs, run as they stand on tiny inputs.

Most lines run as they stand. The working folder holds tiny models and data under the documents' names (`FOLDERS`,
`CONVERTED`, `reviews.jsonl`, `glue/`), and each line reads what earlier lines of its document wrote. Tables define the
differences, and a line that they do not cover fails:

- `WORDS` replaces names that cannot be the name of a folder here;
- `QUICK`, `EXAMPLES` and `RECIPES` add options to a line that make it small (the last one of a kind counts);
- `accelerate launch` and `torchrun` lines run in one process, after the launcher's own parser accepted them;
- `make`, `pip`, `uvicorn` and `vllm` lines are not run but checked against Makefile, pyproject.toml, examples and what
  `make vllm` tries; the lines of a make target that start `linearize` are parsed (tests/test_demo.py runs the demo).
  `push` uploads nothing.
"""

from __future__ import annotations

import gzip
import importlib
import itertools
import json
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import torch
from PIL import Image

import linearize
from linearize.attention.native import locate
from linearize.cli import main
from linearize.cli.main import build_parser
from support.checkpoints import WORDS as VOCABULARY
from support.checkpoints import add_embedder, make_original, make_text
from support.pictures import cheap_pictures
from support.scripts import script

CHECKOUT = Path(linearize.__file__).parent.parent
GENERATED = "docs/reference/cli"

FOLDERS = {
    # Stage two takes rows of 128 tokens unless asked otherwise.
    "roberta-base": ("roberta", "AutoModelForMaskedLM", {"max_position_embeddings": 140}),
    "bert-base-uncased": ("bert", "AutoModelForMaskedLM", {}),
    "my-bert": ("bert", "AutoModelForMaskedLM", {}),
    # Lines of recipes read chunks of 512 tokens, and name two layers beside a kernel for the others.
    "MINILM": ("bert", "AutoModel", {"max_position_embeddings": 512, "num_hidden_layers": 3}),
    "LLAMA": ("llama", "AutoModelForCausalLM", {}),
    "SMOLLM2": ("llama", "AutoModelForCausalLM", {}),
    "llama-linear": ("llama", "AutoModelForCausalLM", {}),
    "VIT": ("vit", "AutoModelForImageClassification", {"image_size": 32, "patch_size": 16}),
    "gpt2": ("gpt2", "AutoModelForCausalLM", {}),
    "google/vit-base-patch16-224": ("vit", "AutoModelForImageClassification", {}),
    "my-vit": ("vit", "AutoModelForImageClassification", {"image_size": 32, "patch_size": 32}),
}
CONVERTED = ("roberta-base-hedgehog", "my-bert-hedgehog")
"""Converted checkpoints under the names that README.md gives them, for the other documents: aligned, as by default."""
WORDS = {
    "vit_tiny_patch16_224": "test_vit", "NAME": "hedgehog", "MODEL": "gpt2", "./llama": "LLAMA",
    "sentence-transformers/all-MiniLM-L6-v2": "MINILM", "smollm2-chat": "gpt2-linear",
}  # fmt: skip
LAYERS = "{1: softmax, 3: ", "{0: softmax, 1: "
"""Numbers of layers in a recipe's row, and those of a model that has two."""

SMALL_SEARCH = "--search-steps 3 --length 32"
"""Added to a line with --kernel auto."""
SMALL = "--device cpu --distill-steps 2 --distill-length 16 --batch-size 4 --holdout 8"
LOOK = "--device cpu --lengths 16 --inputs 2 --max-length 16"
TASK = "--device cpu --batch-size 8 --max-length 16"
QUICK = {
    "convert": SMALL, "distill": SMALL,
    "search": "--device cpu --distill-length 16 --batch-size 4 --holdout 8 --steps 3 --length 32",
    "align": "--device cpu --steps 2 --length 16 --batch-size 4 --holdout 8",
    "longdoc": "--device cpu --max-length 80 --distill-steps 1 --align-steps 1 --steps 1 --batch-size 8 --no-memory",
    "finetune": f"{TASK} --epochs 1", "evaluate": TASK, "init": "", "run": "",
    "recipes": "", "completion": "", "results": "", "kernels": "", "inspect": "", "push": "",
    "report": LOOK, "compare": LOOK, "export": "", "embed": "--device cpu",
    "demo": "--steps 2 --tokens 600", "native": "",
    "bench": "--device cpu --lengths 16,32 --heads 2 --head-dim 8 --repeats 1 --no-memory",
}  # fmt: skip
OF_MODEL = "--device cpu --repeats 1 --no-memory"
"""Added to `bench MODEL`, which has its own heads, and its own lengths if it reads images."""
ONLY_PARSED = {
    "bert-base": "a model of real size",
    "SmolLM2-135M-Instruct.Q4_1.gguf": "a model of real size; tests/checkpoint/test_gguf.py has a tiny one",
    "export": "writing a graph down takes half a minute; tests/export does",
}
TINY_TUNING = "batch_size: 8, epochs: 1, eval_every: 2"
RECIPES = {
    "mine.yaml": [],
    "minilm-glue": ["tasks=[cola]", "model={name: MINILM}", "rows.max_length=16", "device=cpu",
                    f"teacher={{{TINY_TUNING}}}", f"finetune={{{TINY_TUNING}, teacher: true}}",
                    "distil={steps: 2, batch_size: 4, holdout: 8}", "seeds=0",
                    "align={steps: 2, batch_size: 4, holdout: 8}"],
    "minilm-long-documents": ["model={name: MINILM}", "rows.max_length=16", "device=cpu", "seeds=0",
                              "tasks.reviews.rows={max_length: 16}", "tasks.reviews.teacher={}",
                              "tasks.documents.options={filler: wikitext2, parts: 2, words: 3, train: 24, "
                              "validation: 8}",
                              "tasks.last_short.options={decides: last, filler: wikitext2, parts: 2, words: 3, "
                              "train: 24, validation: 8}", "tasks.last_short.rows={max_length: 16}",
                              "tasks.last_short.teacher={}",
                              "tasks.last.options={decides: last, filler: wikitext2, parts: 4, words: 3, apart: 2, "
                              "train: 24, validation: 8}",
                              *[f"tasks.{name}.{stage}={{}}" for name in ("documents", "last")
                                for stage in ("teacher", "finetune", "distil", "align")],
                              f"teacher={{{TINY_TUNING}}}", f"finetune={{{TINY_TUNING}}}",
                              "distil={steps: 2, batch_size: 4, holdout: 8, max_length: 16}",
                              "align={steps: 2, batch_size: 4, holdout: 8, max_length: 80}"],
    "minilm-long-retrieval": ["model={name: MINILM}", "rows.max_length=16", "device=cpu", "seeds=0",
                              "tasks.opened.options={shortest: 4, held: 0.5, opening: 2}",
                              *[f"tasks.opened.{stage}={{}}" for stage in ("distil", "align")],
                              "distil={steps: 2, batch_size: 4, holdout: 8, max_length: 16}",
                              "align={steps: 2, batch_size: 4, holdout: 8, max_length: 80}"],
    "minilm-embedding": ["model={name: MINILM}", "rows.max_length=16", "device=cpu",
                         "distil={steps: 2, batch_size: 4, holdout: 8}", "align={steps: 2, batch_size: 4, holdout: 8}"],
    "proof-minilm": ["model={name: MINILM}", "rows.max_length=16", "device=cpu",
                     "kernels=[softmax,window only,hedgehog]", "seeds=0",
                     "distil={steps: 2, batch_size: 4, holdout: 8}", "align={steps: 2, batch_size: 4, holdout: 8}"],
    "proof-minilm-long": ["model={name: MINILM}", "rows.max_length=16", "device=cpu",
                          "kernels=[softmax,window only,hedgehog,hedgehog window scales]",
                          "tasks.opened.options={shortest: 4, held: 0.5, opening: 2}",
                          *[f"tasks.needle-{n}.options={{shortest: 4, held: 0.5, words: 50}}"
                            for n in (512, 2048, 8192)],
                          "distil={steps: 2, batch_size: 4, holdout: 8, max_length: 16}",
                          "align={steps: 2, batch_size: 4, holdout: 8, max_length: 80}"],
    "vit-cifar10": ["model.config={model_type: vit, image_size: 32, patch_size: 16, hidden_size: 16, "
                    "intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2}", "device=cpu",
                    f"teacher={{{TINY_TUNING}}}", f"finetune={{{TINY_TUNING}}}",
                    "align={steps: 0}", "distil={steps: 1, batch_size: 4, holdout: 4}"],
    "gpt2-small-wikitext2": ["kernels=[softmax,hedgehog]", "model.config={model_type: gpt2, n_embd: 16, n_layer: 1, "
                             "n_head: 2}", "model.tokenizer.size=300", "rows={max_length: 16}", "device=cpu",
                             f"teacher={{{TINY_TUNING}}}", f"finetune={{{TINY_TUNING}}}",
                             "distil={steps: 1, batch_size: 4, holdout: 4}"],
    "llama-small-wikitext2": ["kernels=[softmax,hedgehog]", "model.config={model_type: llama, hidden_size: 16, "
                              "intermediate_size: 16, num_hidden_layers: 8, num_attention_heads: 2}",
                              "model.tokenizer.size=300", "rows={max_length: 16}", "device=cpu",
                              f"teacher={{{TINY_TUNING}}}", f"finetune={{{TINY_TUNING}}}", "align={steps: 0}",
                              "distil={steps: 1, batch_size: 4, holdout: 4}"],
    "associative-recall": ["tasks.recall.options={train: 32, validation: 8, vocabulary: 6, length: 16}",
                           "rows.max_length=16", "model.config.n_embd=16", "device=cpu",
                           "finetune={batch_size: 8, steps: 2, eval_every: 2}"],
    "listops-small": ["kernels=[softmax,elu]", "device=cpu", f"finetune={{{TINY_TUNING}}}",
                      "tasks.listops.options={train: 32, validation: 8, shortest: 5, longest: 30, depth: 3}"],
    "pixels-small": ["kernels=[softmax,elu]", "device=cpu", f"finetune={{{TINY_TUNING}}}",
                     "tasks.pixels.options={side: 4}"],
    "papers-small": ["kernels=[softmax,elu]", "device=cpu", f"finetune={{{TINY_TUNING}}}",
                     "tasks.pixels.options={side: 4}"],
    "transnormer-small-wikitext2": ["kernels=[softmax,transnormer_t1]", "model.config={model_type: gpt2, n_embd: 16, "
                                    "n_layer: 4, n_head: 2}", "model.tokenizer.size=300", "rows={max_length: 16}",
                                    "device=cpu", f"finetune={{{TINY_TUNING}}}"],
    "retrieval-small": ["kernels=[softmax,elu]", "device=cpu", f"finetune={{{TINY_TUNING}}}",
                        "tasks.retrieval.options={longest: 8}", "tasks.retrieval.tokenizer={kind: words}"],
}  # fmt: skip
EXAMPLES = {
    "long_documents": ["--max-length", "80", "--distill-steps", "1", "--align-steps", "1", "--epochs", "0.1"],
    "own_kernel": ["--kernels", "softmax,squared_relu", *[c for c in RECIPES["minilm-glue"] if "{name" not in c][1:]],
    "generation": ["--distill-steps", "2", "--tokens", "8", "--dataset", "corpus.txt"],
    "images": ["--distill-steps", "1", "--untrained"],
    "chat": ["--tokens", "8"],
}  # fmt: skip


def pages():
    """Return the Markdown pages of docs by their paths in the checkout, without those that the site generates."""
    found = sorted(path.relative_to(CHECKOUT).as_posix() for path in (CHECKOUT / "docs").rglob("*.md"))
    return [name for name in found if not name.startswith(f"{GENERATED}/")]


def blocks(text):
    """Return (language, content) of the fenced blocks that run; blocks of TOML must only parse."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert all(language in ("bash", "python", "toml") for language, _ in found), "a block is not bash, python or toml"
    for language, content in found:
        if language == "toml":
            tomllib.loads(content)
    return [(language, content) for language, content in found if language != "toml"]


def inline(text):
    """Return the commands that stand inside sentences and tables."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [span for span in re.findall(r"`([^`\n]+)`", text) if re.match(r"(linearize|make|pip|python) ", span)]


def lines(block):
    """Return the commands of a block, without comments."""
    joined = block.replace("\\\n", " ").splitlines()
    return [line for line in joined if shlex.split(line, comments=True)]


def make_place(root: Path) -> Path:
    """Put tiny things under the documents' names into a folder, with the conversions of README.md."""
    for name, (kind, head, overrides) in FOLDERS.items():
        make_original(root / name, kind, head, **overrides)
    add_embedder(root / "MINILM")
    for name in CONVERTED:
        kind, head, overrides = FOLDERS[name.removesuffix("-hedgehog")]
        aligned = {"base_model": name.removesuffix("-hedgehog"), "alignment": {"train": "blocks"}}
        make_text(root / name, kind, head=head, config=overrides, provenance=aligned)
    rows = [{"text": " ".join(VOCABULARY[i % 11 :] + VOCABULARY[: i % 13]), "label": i % 2} for i in range(96)]
    write_texts(root, rows)
    shutil.copy(CHECKOUT / "recipes" / "template.yaml", root / "mine.yaml")
    write_glue(root / "glue", rows)
    write_reviews(root, rows)
    for split in ("train", "validation", "test"):
        # Two lines an article, as WikiText has them.
        own = "".join(
            f"{'' if n % 2 else f' = Article {n} = {chr(10)}'}{split} {row['text']}\n" for n, row in enumerate(rows)
        )
        (root / "data" / "wikitext2").mkdir(parents=True, exist_ok=True)
        (root / "data" / "wikitext2" / f"{split}.txt.gz").write_bytes(gzip.compress(own.encode()))
    for split, name, number in itertools.product(("train", "test"), ("cat", "ship"), range(8)):
        folder = root / "data" / "cifar10" / split / name
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (30 * number, 99, 7)).save(folder / f"{number}.png")
    return root


def write_texts(root, rows):
    reviews = "".join(json.dumps(row) + "\n" for row in rows)
    (root / "reviews.jsonl").write_text(reviews)
    (root / "reviews.jsonl.gz").write_bytes(gzip.compress(reviews.encode()))
    for name in ("sst2", "cola", "imdb"):
        # No text of one is in another: the same text would be left out of the training rows.
        own = "".join(json.dumps({"text": f"{name} {row['text']}"}) + "\n" for row in rows)
        (root / f"{name}.jsonl.gz").write_bytes(gzip.compress(own.encode()))
    for name in ("book.txt", "corpus.txt", "sentences.txt", "wiki.valid.txt", "wiki.align.txt"):
        (root / name).write_text("".join(row["text"] + "\n" for row in rows))


def write_reviews(root, rows):
    """Write the folders of long and short reviews, each with two splits."""
    for name in ("imdb", "imdb_long"):
        (root / "data" / name).mkdir(parents=True)
        for split, count in (("train", 24), ("validation", 8)):
            own = [{"text": f"{name} {split} {row['text']}", "label": row["label"]} for row in rows[:count]]
            (root / "data" / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))


def write_glue(root, rows):
    for name in ("cola", "sst2", "stsb", "mrpc"):
        (root / name).mkdir(parents=True)
    for split, count in (("train", 24), ("validation", 8), ("test", 8)):
        single = [{"sentence": row["text"], "label": row["label"]} for row in rows[:count]]
        pairs = [
            {"sentence1": one["text"], "sentence2": other["text"], "label": number % 6}
            for number, (one, other) in enumerate(itertools.pairwise(rows[: count + 1]))
        ]
        classes = [{**pair, "label": number % 2} for number, pair in enumerate(pairs)]
        for name, found in (("cola", single), ("sst2", single), ("stsb", pairs), ("mrpc", classes)):
            (root / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))


def make_cheap(patch, root: Path) -> None:
    """Leave out what takes long and says nothing about a line: optimisation, fresh processes.

    Reports have one small picture for every figure: that is most of their time.
    """
    patch.chdir(root)
    # What a document registers ends with it.
    patch.setattr("linearize.core.registry._KERNELS", {info.name: info for info in linearize.kernel_infos()})
    patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
    patch.setattr("linearize.jobs.demo.minilm_folder", lambda: root / "MINILM")
    patch.setattr("linearize.jobs.demo.smollm2", lambda: root / "SMOLLM2")
    patch.setattr("linearize.attention.native.locate.FLAGS", tuple("-O0" if f == "-O3" else f for f in locate.FLAGS))
    patch.setattr("linearize.evaluation.bench.memory.in_fresh_process", lambda *_: 1)
    cheap_pictures(patch)
    patch.setattr("linearize.checkpoint.push.push", lambda *_, **__: "https://example.org")


def run_python(block, name, patch):
    """Run a block of Python; one for several processes is alone in its group."""
    several = "init_process_group" in block
    with patch.context() as own:
        if several:
            alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
            for key, value in alone.items():
                own.setenv(key, value)
        try:
            exec(compile(block, name, "exec", dont_inherit=True), {"__name__": "document"})
        finally:
            if several:
                torch.distributed.destroy_process_group()


def run_line(line, capsys, *, parse_only=False):
    """Run, or check, one command; an AssertionError says that it fails or is not covered."""
    words = [WORDS.get(word, word).replace(*LAYERS) for word in shlex.split(line, comments=True)]
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if words[0] in ("accelerate", "torchrun"):
        words = launched(words)
    if words[0] == "linearize":
        run_linearize(line, words[1:], capsys, parse_only)
    elif words[0] == "uvicorn":
        folder = words[words.index("--app-dir") + 1]
        assert (CHECKOUT / folder / f"{words[1].partition(':')[0]}.py").is_file(), f"{line!r}: there is no such app"
    elif words[0] == "vllm":
        assert words[1] == "serve" and len(words) == 3, f"{line!r}: only `vllm serve FOLDER` is tried, by `make vllm`"
    elif words[0] == "python":
        run_example(line, words[1], words[2:], parse_only)
    elif words[0] == "make":
        check_make(line, words[1:])
    elif words[:2] == ["pip", "install"]:
        check_pip(line, words[2:])
    else:
        raise AssertionError(f"no way to run {line!r}; add one to this test")


def launched(words):
    """Return the line that a launcher starts, once its own parser has taken its options."""
    if words[0] == "torchrun":
        from torch.distributed.run import get_args_parser

        given = get_args_parser().parse_args(words[1:])
        assert given.no_python
    else:
        from accelerate.commands.launch import launch_command_parser

        given = launch_command_parser().parse_args(words[2:])
        assert words[1] == "launch" and given.no_python
    return [given.training_script, *given.training_script_args]


def run_linearize(line, words, capsys, parse_only=False):
    assert words and words[0] in QUICK, f"verb of {line!r} is not covered; add it to QUICK"
    build_parser(words[0]).parse_args(words[1:])
    if words[0] == "run":
        assert words[1] in RECIPES, f"recipe of {line!r} is not covered; add it to RECIPES"
    if parse_only or set(words) & set(ONLY_PARSED):
        return
    if words[0] == "run":
        words = [*words[:2], *tiny(words[1], words[2:]), *words[2:]]
    # What was measured on a GPU runs here as well.
    words = [word.removesuffix("cuda") + "cpu" if word in ("cuda", "device=cuda") else word for word in words]
    searched = SMALL_SEARCH.split() if words[0] == "convert" and "auto" in words else []
    code = main([*words, *quick(words).split(), *searched])
    captured = capsys.readouterr()
    assert code == 0, f"{line!r} ends with {code}: {captured.err[-600:]}"


def tiny(recipe, words):
    """Return what makes a recipe small, but for what a line says itself and for the tasks that it leaves out."""
    own = {word.partition("=")[0]: word.partition("=")[2] for word in words if "=" in word}
    tasks = own["tasks"].strip("[]").split(",") if "tasks" in own else None
    return [
        change
        for change in RECIPES[recipe]
        if (name := change.partition("=")[0]) not in own
        and (tasks is None or not name.startswith("tasks.") or name.split(".")[1] in tasks)
    ]


def quick(words):
    if words[:2] == ["longdoc", "minilm-short"]:
        # It was made from a model of 512 tokens.
        return QUICK["longdoc"].replace("--max-length 80", "--max-length 520")
    if words[0] != "bench" or words[1].startswith("-"):
        # The small models have 8 heads.
        fewer = " --keep-softmax-heads 2" if "--keep-softmax-heads" in words else ""
        shorter = " --chunk-length 16" if "--chunk-length" in words else ""
        return f"{QUICK[words[0]]}{fewer}{shorter}"
    return OF_MODEL if "--image-size" in words else f"{OF_MODEL} --lengths 16,32"


PARSED = (
    "attention_shape",
    "closeness_by_length",
    "measure_sharded_loading",
    "measure_sharded_loading",
    "measure_stage_one_memory",
    "pairs_apart",
    "proof_smollm2",
    "routed_blocks",
    "routed_scores",
    "search_check",
    "search_documents",
    "silence_kernel",
    "state_choice",
    "train_needles",
    "tune_triton",
    "vllm_equality",
)
"""Scripts that take minutes, a real model or a GPU: only their lines are checked."""


def run_example(line, file, words, parse_only=False):
    if file == "-P":
        tried = (CHECKOUT / "tests" / "engines" / "test_vllm.py").read_text(encoding="utf-8")
        assert words[0] == "-m" and f'"{words[1]}"' in tried, f"{line!r} is not what `make vllm` tries"
        return
    if file == "-m":
        # They measure models of real size; tests/bench runs them.
        assert words[0].startswith("benchmarks."), f"{line!r} is no benchmark"
        importlib.import_module(words[0]).parse(words[1:])
        return
    name = Path(file).stem
    if file in ("scripts/silence_kernel.py", "scripts/pairs_apart.py") and not parse_only:
        script(name).main(words)
        return
    if file in (f"scripts/{name}.py" for name in PARSED):
        script(name).parse(words)
        return
    if file == "tests/engines/compare.py":
        # `make slow` runs it as a test.
        from engines import compare

        compare.parse(words)
        return
    assert file == f"examples/{name}.py" and name in EXAMPLES, f"{line!r} is not covered; add the example to EXAMPLES"
    if not parse_only:
        script(name, CHECKOUT / "examples").main([*words, *EXAMPLES[name]])


def check_make(line, targets):
    makefile = (CHECKOUT / "Makefile").read_text(encoding="utf-8")
    for target in targets:
        if "=" in target:
            assert f"{target.partition('=')[0]} ?=" in makefile, f"{line!r}: the Makefile has no variable of that name"
            continue
        found = re.search(rf"^{re.escape(target)}:.*\n((?:\t.*\n)*)", makefile, re.MULTILINE)
        assert found, f"{line!r}: the Makefile has no target {target}"
        for command in re.findall(r"\$\(BIN\)/linearize (.*)", found.group(1)):
            words = shlex.split(command)
            build_parser(words[0]).parse_args(words[1:])


def check_pip(line, words):
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [word for word in words if not word.startswith("-")]
    for word in named:
        name, extras = re.fullmatch(r"([\w.-]+)(?:\[([\w,-]+)\])?", word).groups()
        known = set((extras or "").split(",")) <= {"", *project["optional-dependencies"]}
        assert name in (".", project["name"]) and known, f"{line!r}: pyproject.toml has no {word}"
