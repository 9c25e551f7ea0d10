"""Tiny converted checkpoints in folders, with tokenizer, data and logs. Shared by the tests of reports and examples."""

import json

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, ViTImageProcessor

import linearize
from support.tiny import converted, original

SENTENCE = "the cat sat on a mat and then it ran far away from all of us who saw how very fast one can be"
WORDS = SENTENCE.split()
FAMILIES = {
    "roberta": ("AutoModelForMaskedLM", "fill-mask"),
    "gpt2": ("AutoModelForCausalLM", "text-generation"),
    "llama": ("AutoModelForCausalLM", "text-generation"),
    "vit": ("AutoModelForImageClassification", "image-classification"),
}
"""One model of each kind, its head, and the pipeline that runs it."""


def tokenizer(length=64, ends=True):
    """A tokenizer of whole words; with ends, <s> and </s> are put around a text."""
    specials = ["<pad>", "<unk>", "<mask>", "<s>", "</s>", "$x^2$"]
    vocabulary = {word: i for i, word in enumerate([*specials, *dict.fromkeys(WORDS)])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if ends:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", vocabulary["<s>"]), ("</s>", vocabulary["</s>"])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", unk_token="<unk>", mask_token="<mask>", bos_token="<s>",
        eos_token="</s>", model_max_length=length,
    )  # fmt: skip


def texts(folder, count=12):
    file = folder / "texts.jsonl"
    rows = [{"text": " ".join(["$x^2$", *WORDS[i % 7 :], *WORDS[: i % 5]]), "label": i % 2} for i in range(count)]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return file


def log_lines(layers=("a.0", "a.1"), steps=4):
    rows = [
        {
            "stage": "distillation",
            "step": s,
            "steps": steps,
            "losses": dict.fromkeys(layers, 3.0 / s),
            "held_out": 1.0 if s == steps else None,
        }
        for s in range(1, steps + 1)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def make_text(folder, name="bert", kernel="hedgehog", head="AutoModel", provenance=None, **options):
    model = converted(name, head, kernel=kernel, **options)
    files = {"log.jsonl": log_lines()}
    provenance = {"base_model": "nobody/nothing", "seed": 0, **(provenance or {})}
    linearize.save(model, folder, processor=tokenizer(), provenance=provenance, extra_files=files)
    return folder


EMBEDDER = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
"""The modules of a sentence embedder."""


def make_embedder(folder, name="bert", **files):
    """A converted sentence embedder."""
    return add_embedder(make_text(folder, name=name), **files)


def add_embedder(folder, mode="mean", prompts=None, include=True, normalize=True):
    """Put the files of sentence-transformers, with which a model reads 60 tokens, into its folder."""
    width = json.loads((folder / "config.json").read_text()).get("hidden_size") or 32
    pool = {"word_embedding_dimension": width, "pooling_mode": mode, "include_prompt": include}
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pool))
    (folder / "modules.json").write_text(json.dumps(EMBEDDER if normalize else EMBEDDER[:2]))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 60, "do_lower_case": False}))
    own = {"prompts": prompts or {}, "default_prompt_name": next(iter(prompts or {}), None)}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(own))
    return folder


def make_image(folder, kernel="hedgehog"):
    model = converted("vit", "AutoModelForImageClassification", kernel=kernel)
    linearize.save(model, folder, processor=ViTImageProcessor(size={"height": 30, "width": 30}))
    return folder


def make_original(folder, name="bert", head="AutoModel", **overrides):
    model = original(name, head, **overrides)
    model.save_pretrained(folder)
    side = getattr(model.config, "image_size", None)
    processor = tokenizer() if side is None else ViTImageProcessor(size={"height": side, "width": side})
    processor.save_pretrained(folder)
    return folder
