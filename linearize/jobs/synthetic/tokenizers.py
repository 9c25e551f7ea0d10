"""Build tokenizers: with a fixed vocabulary, of bytes, or of words or pieces learned from texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from linearize.core.errors import ConfigError
from linearize.core.registry import Values

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD, UNKNOWN, START, BETWEEN, MASK, END = "<pad>", "<unk>", "<cls>", "<sep>", "<mask>", "</s>"
SPECIAL = (PAD, UNKNOWN, START, BETWEEN, MASK, END)
LEARNED = ("words", "pieces")
KINDS = ("bytes", *LEARNED)


def make_tokenizer(
    kind: str, texts: Iterable[str] = (), size: int | None = None, *, framed: bool = True, segments: bool = False
) -> PreTrainedTokenizerBase:
    """Build a tokenizer.

    Args:
        kind: "bytes" (one token per byte), "words" (separated by spaces) or "pieces" (byte-level BPE).
        texts: texts to learn words or pieces from.
        size: size of the vocabulary, including special tokens; None: all words, or 8,192 pieces.
        framed: whether rows begin with a special token, which classifiers read.
        segments: whether rows have `token_type_ids` (1 in a pair's second text), for models that embed them.

    Raises:
        ConfigError: if the vocabulary is too small.
    """
    if size is not None and size <= len(SPECIAL) + 256 * (kind != "words"):
        raise ConfigError(f"tokenizer: got a vocabulary of {size}, expected more than its special tokens and bytes")
    trainer: trainers.Trainer
    options: Values = {"special_tokens": list(SPECIAL), "show_progress": False}
    if kind == "words":
        made = Tokenizer(models.WordLevel({}, unk_token=UNKNOWN))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        # A special token in the texts, such as WikiText's <unk>, would leave a gap in the token ids, and the last id
        # would be outside the embedding.
        texts = (" ".join(word for word in text.split() if word not in SPECIAL) for text in texts)
        trainer = trainers.WordLevelTrainer(vocab_size=size or 10_000_000, **options)
    else:
        made, alphabet = Tokenizer(models.BPE()), sorted(pre_tokenizers.ByteLevel.alphabet())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "pieces")
        made.decoder = decoders.ByteLevel()
        if kind == "bytes":
            size, texts = len(SPECIAL) + len(alphabet), ()
        trainer = trainers.BpeTrainer(vocab_size=size or 8_192, initial_alphabet=alphabet, **options)
    made.train_from_iterator(texts, trainer)
    return wrap(made, framed, segments)


def fixed_tokenizer(tokens: Sequence[str], *, framed: bool = True) -> PreTrainedTokenizerBase:
    """Build a tokenizer with a known vocabulary, whose tokens are separated by spaces."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *tokens])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return wrap(made, framed)


def wrap(made: Tokenizer, framed: bool, segments: bool = False) -> PreTrainedTokenizerBase:
    """Wrap a tokenizer for transformers; if framed, it produces `<cls> a` and `<cls> a <sep> b`."""
    from transformers import PreTrainedTokenizerFast

    if framed:
        numbers = [(token, made.token_to_id(token)) for token in (START, BETWEEN)]
        made.post_processor = processors.TemplateProcessing(
            single=f"{START} $A", pair=f"{START} $A {BETWEEN} $B:1", special_tokens=numbers
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token=PAD,
        unk_token=UNKNOWN,
        cls_token=START,
        sep_token=BETWEEN,
        mask_token=MASK,
        eos_token=END,
        bos_token=END,
        model_input_names=["input_ids", *(["token_type_ids"] if segments else []), "attention_mask"],
    )
