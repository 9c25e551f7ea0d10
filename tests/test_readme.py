"""Every command line and every Python block of the README runs, in the README's order, on tiny inputs.

Most lines run as they stand: in a working folder lie tiny things under the README's names (`FOLDERS`, `reviews.jsonl`,
`glue/`), and what one line writes the next ones read. Three tables say what differs, and a line that they do not cover
fails:

- `WORDS` replaces what cannot lie in a folder under its own name;
- `QUICK`, `EXAMPLES` and `RECIPES` put options behind a line that make it small (the last one of a kind counts);
- `make` and `pip` lines are not run but checked against Makefile and pyproject.toml; of a make target its lines with
  `linearize` are run. Nothing is uploaded: `push` is a stand-in.
"""

import gzip
import importlib
import itertools
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from PIL import Image
from support.checkpoints import WORDS as VOCABULARY
from support.checkpoints import make_original

import linearize
from linearize.cli import main
from linearize.cli.main import VERBS, build_parser
from linearize.registry import kernel_infos

CHECKOUT = Path(linearize.__file__).parent.parent
README = (CHECKOUT / "README.md").read_text(encoding="utf-8")

FOLDERS = {
    # Stage two takes rows of 128 tokens unless asked otherwise.
    "roberta-base": ("roberta", "AutoModelForMaskedLM", {"max_position_embeddings": 140}),
    "bert-base-uncased": ("bert", "AutoModelForMaskedLM", {}),
    "my-bert": ("bert", "AutoModelForMaskedLM", {}),
    "MINILM": ("bert", "AutoModel", {}),
    "gpt2": ("gpt2", "AutoModelForCausalLM", {}),
}
WORDS = {"vit_tiny_patch16_224": "test_vit", "NAME": "hedgehog"}

SMALL = "--device cpu --distill-steps 2 --distill-length 16 --batch-size 4 --holdout 8"
LOOK = "--device cpu --lengths 16 --inputs 2 --max-length 16"
TASK = "--device cpu --batch-size 8 --max-length 16"
QUICK = {
    "convert": SMALL, "distill": SMALL, "align": "--device cpu --steps 2 --length 16 --batch-size 4 --holdout 8",
    "finetune": f"{TASK} --epochs 1", "evaluate": TASK, "init": "", "run": "",
    "recipes": "", "results": "", "kernels": "", "inspect": "", "push": "", "report": LOOK, "compare": LOOK,
    "demo": "--steps 2 --tokens 200", "native": "",
    "bench": "--device cpu --lengths 16,32 --heads 2 --head-dim 8 --repeats 1 --no-memory",
}  # fmt: skip
ONLY_PARSED = {
    "--goals": "measures every figure that the project promises, which takes minutes",
    "bert-base": "a model of real size",
}
EXAMPLES = {
    "classification": "--distill-steps 2",
    "long_documents": "--distill-steps 2 --tokens 200",
    "generation": "--distill-steps 2 --tokens 8 --dataset corpus.txt",
    "images": "--distill-steps 1 --untrained",
}
TINY_TUNING = "batch_size: 8, epochs: 1, eval_every: 2"
RECIPES = {
    "minilm-glue": ["tasks=[cola]", "model={name: MINILM}", "rows.max_length=16", "device=cpu",
                    f"teacher={{{TINY_TUNING}}}", f"finetune={{{TINY_TUNING}}}",
                    "distil={steps: 2, batch_size: 4, holdout: 8}", "seeds=0",
                    "align={steps: 2, batch_size: 4, holdout: 8}"],
    "minilm-embedding": ["model={name: MINILM}", "rows.max_length=16", "device=cpu",
                         "distil={steps: 2, batch_size: 4, holdout: 8}", "align={steps: 2, batch_size: 4, holdout: 8}"],
    "vit-cifar10": ["model.config={model_type: vit, image_size: 32, patch_size: 16, hidden_size: 16, "
                    "intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2}", "device=cpu",
                    f"teacher={{{TINY_TUNING}}}", f"finetune={{{TINY_TUNING}}}",
                    "distil={steps: 1, batch_size: 4, holdout: 4}"],
    "gpt2-small-wikitext2": ["kernels=[softmax,hedgehog]", "model.config={model_type: gpt2, n_embd: 16, n_layer: 1, "
                             "n_head: 2}", "model.tokenizer.size=300", "rows={max_length: 16}", "device=cpu",
                             f"teacher={{{TINY_TUNING}}}", f"finetune={{{TINY_TUNING}}}",
                             "distil={steps: 1, batch_size: 4, holdout: 4}"],
    "associative-recall": ["tasks.recall.options={train: 32, validation: 8, vocabulary: 6, length: 16}",
                           "rows.max_length=16", "model.config.n_embd=16", "device=cpu",
                           "finetune={batch_size: 8, steps: 2, eval_every: 2}"],
}  # fmt: skip


def blocks(text):
    """Return (language, content) of all fenced blocks."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert all(language in ("bash", "python") for language, _ in found), "a block is neither bash nor python"
    return found


def inline(text):
    """Return the commands that stand inside sentences and tables."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [span for span in re.findall(r"`([^`\n]+)`", text) if re.match(r"(linearize|make|pip|python) ", span)]


def lines(block):
    """Return the commands of a block, without comments."""
    joined = block.replace("\\\n", " ").splitlines()
    return [line for line in joined if shlex.split(line, comments=True)]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The working folder, with tiny things under the README's names."""
    for name, (kind, head, overrides) in FOLDERS.items():
        make_original(tmp_path / name, kind, head, **overrides)
    rows = [{"text": " ".join(VOCABULARY[i % 11 :] + VOCABULARY[: i % 13]), "label": i % 2} for i in range(96)]
    reviews = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "reviews.jsonl").write_text(reviews)
    (tmp_path / "reviews.jsonl.gz").write_bytes(gzip.compress(reviews.encode()))
    for name in ("sst2", "cola", "imdb"):
        # No text of one is in another: the same text would be left out of the training rows.
        own = "".join(json.dumps({"text": f"{name} {row['text']}"}) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(own.encode()))
    (tmp_path / "corpus.txt").write_text("".join(row["text"] + "\n" for row in rows))
    (tmp_path / "glue" / "cola").mkdir(parents=True)
    for split, count in (("train", 24), ("validation", 8)):
        text = "".join(json.dumps({"sentence": row["text"], "label": row["label"]}) + "\n" for row in rows[:count])
        (tmp_path / "glue" / "cola" / f"{split}.jsonl").write_text(text)
        pairs = [
            {"sentence1": one["text"], "sentence2": other["text"], "label": number % 6}
            for number, (one, other) in enumerate(itertools.pairwise(rows[: count + 1]))
        ]
        text = "".join(json.dumps(pair) + "\n" for pair in pairs)
        (tmp_path / "glue" / "stsb").mkdir(exist_ok=True)
        (tmp_path / "glue" / "stsb" / f"{split}.jsonl").write_text(text)
    (tmp_path / "data" / "wikitext2").mkdir(parents=True)
    for split in ("train", "validation"):
        own = "".join(f"{split} {row['text']}\n" for row in rows)
        (tmp_path / "data" / "wikitext2" / f"{split}.txt.gz").write_bytes(gzip.compress(own.encode()))
    for split, name, number in itertools.product(("train", "test"), ("cat", "ship"), range(8)):
        folder = tmp_path / "data" / "cifar10" / split / name
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (30 * number, 99, 7)).save(folder / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("linearize.demo.minilm_folder", lambda: tmp_path / "MINILM")
    # Memory is measured in a fresh process per side, which takes longer to start than all the rest here.
    monkeypatch.setattr(
        "linearize.bench.side_by_side.peak_memory", lambda suite, side, lengths: dict.fromkeys(lengths, 1)
    )
    monkeypatch.setattr("linearize.checkpoint.push.push", lambda folder, repo, private=False: "https://example.org")
    return tmp_path


def run_line(line, capsys):
    """Run, or check, one command of the README; an AssertionError says that it fails or is not covered."""
    words = [WORDS.get(word, word) for word in shlex.split(line, comments=True)]
    if words[0] == "linearize":
        run_linearize(line, words[1:], capsys)
    elif words[:2] == ["python", "-m"]:
        run_example(line, words[2], words[3:])
    elif words[0] == "make":
        check_make(line, words[1:], capsys)
    elif words[:2] == ["pip", "install"]:
        check_pip(line, words[2:])
    else:
        raise AssertionError(f"README: no way to run {line!r}; add one to this test")


def run_linearize(line, words, capsys):
    assert words and words[0] in QUICK, f"README: verb of {line!r} is not covered; add it to QUICK"
    build_parser(words[0]).parse_args(words[1:])
    if set(words) & set(ONLY_PARSED):
        return
    if words[0] == "run":
        assert words[1] in RECIPES, f"README: recipe of {line!r} is not covered; add it to RECIPES"
        words = [*words[:2], *[w for w in words[2:] if "=" in w], *RECIPES[words[1]], *[
            w for w in words[2:] if "=" not in w
        ]]  # fmt: skip
    code = main([*words, *QUICK[words[0]].split()])
    captured = capsys.readouterr()
    assert code == 0, f"README: {line!r} ends with {code}: {captured.err[-600:]}"


def run_example(line, module, words):
    name = module.removeprefix("linearize.examples.")
    assert name in EXAMPLES, f"README: example of {line!r} is not covered; add it to EXAMPLES"
    importlib.import_module(module).main([*words, *EXAMPLES[name].split()])


def check_make(line, targets, capsys):
    makefile = (CHECKOUT / "Makefile").read_text(encoding="utf-8")
    for target in targets:
        found = re.search(rf"^{re.escape(target)}:.*\n((?:\t.*\n)*)", makefile, re.MULTILINE)
        assert found, f"README: {line!r}: the Makefile has no target {target}"
        for command in re.findall(r"\$\(BIN\)/(linearize .*)", found.group(1)):
            run_line(command, capsys)


def check_pip(line, words):
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [word for word in words if not word.startswith("-")]
    for word in named:
        name, extras = re.fullmatch(r"([\w.-]+)(?:\[([\w,-]+)\])?", word).groups()
        known = set((extras or "").split(",")) <= {"", *project["optional-dependencies"]}
        assert name in (".", project["name"]) and known, f"README: {line!r}: pyproject.toml has no {word}"


def test_everything_runs_in_order(place, capsys):
    ran = 0
    for number, (language, content) in enumerate(blocks(README)):
        if language == "python":
            exec(compile(content, f"README.md, block {number}", "exec"), {"__name__": "readme"})
            ran += 1
            continue
        for line in lines(content):
            run_line(line, capsys)
            ran += 1
    assert ran > 15
    assert (place / "roberta-base-hedgehog" / "log.jsonl").is_file() and (place / "heads.png").is_file()
    assert (place / "minilm-hedgehog").is_dir() and list((place / "runs").iterdir())


def test_commands_in_sentences(place, capsys):
    for span in inline(README):
        words = span.split()
        if len(words) == 2 and words[0] == "linearize":
            # A verb that is only spoken of.
            assert words[1] in VERBS, f"README: {span!r} is no verb"
        else:
            run_line(span, capsys)


@pytest.mark.parametrize(
    "line",
    [
        "linearize paint roberta-base", "linearize convert roberta-base --colour red", "linearize convert ./nowhere",
        "linearize run luna-glue data=./glue", "linearize kernels hedgehug", "make coffee",
        "pip install -e '.[moon]'", "pip install something-else", "python -m linearize.examples.moon roberta-base",
        "docker run linearize",
    ],
)  # fmt: skip
def test_a_line_that_is_not_covered_fails(line, place, capsys):
    with pytest.raises((AssertionError, linearize.LinearizeError)):
        run_line(line, capsys)
    with pytest.raises(AssertionError, match="neither bash nor python"):
        blocks("```sh\nrm -r everything\n```")


def test_the_table_of_verbs():
    """All verbs are in it, and the options that it names are theirs."""
    rows = re.findall(r"^\| ((?:`[a-z]+`(?:, )?)+) \| (.*) \|$", README, re.MULTILINE)
    named = [verb for cell, _ in rows for verb in re.findall(r"`([a-z]+)`", cell)]
    assert sorted(named) == sorted(VERBS)
    for cell, text in rows:
        verbs = re.findall(r"`([a-z]+)`", cell)
        known = {o for verb in verbs for action in build_parser(verb)._actions for o in action.option_strings}
        assert set(re.findall(r"`(--[a-z-]+)`", text)) <= known


def test_the_count_of_kernels():
    kernels, presets = map(int, re.search(r"(\d+) kernels and (\d+) presets", README).groups())
    infos = kernel_infos()
    assert (kernels, presets) == (len([i for i in infos if i.preset is None]), len([i for i in infos if i.preset]))


def test_pictures_are_small_and_described():
    pictures = re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", README)
    assert len(pictures) == 3
    for words, path in pictures:
        assert len(words) > 40 and (CHECKOUT / path).stat().st_size < 150_000
    for target in re.findall(r"(?<!!)\[[^\]]*\]\(([^)]+)\)", README):
        assert target.startswith("https://") or (CHECKOUT / target).exists()
