"""Options that follow from others: presets (`convert --preset`), and the length and number of training rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from linearize.core.errors import CheckpointError, ConfigError, unknown_name
from linearize.core.registry import ReadOnlyValues, Values
from linearize.training.stage_one.config import DISTILL_LENGTH

AUTO = "auto"
"""Used in place of a kernel's name: a search chooses a kernel for every layer."""
WINDOW = 64
"""Window of the reference model for `--window auto`."""
STEP_ROWS = 32
"""Default rows per optimizer step."""
ROW_WINDOWS, ROW_TOKENS = 8, 4096
"""Default length of rows with a window: `ROW_WINDOWS` windows, at most `ROW_TOKENS` tokens, at least two windows."""
SAMPLED = 256
"""Default number of queries per row whose loss is computed, in rows that are much longer because of a window."""


@dataclass(frozen=True)
class Preset:
    """Options of a conversion, and the kind of model they are for.

    Args:
        options: the options of the attention by name; options given explicitly take precedence.
        causal: whether they are for causal or for bidirectional attention; None: for both.
        rows: options of the rows that `convert` trains on; `longdoc` has its own.
    """

    options: Mapping[str, object]
    causal: bool | None
    rows: Mapping[str, object] = field(default_factory=dict)


_UNTIED: Mapping[str, object] = {"kernel": "hedgehog", "kernel_arg": {"tied": False}}
_LONG: Mapping[str, object] = {"distill_length": 2048, "query_sample": 256, "packing": True}

PRESETS: Mapping[str, Preset] = {
    "causal": Preset({**_UNTIED, "window": "auto:128", "sinks": 4}, causal=True, rows=_LONG),
    "recall": Preset(
        {**_UNTIED, "window": 256, "sinks": 4, "exact_keys": 64, "keep_softmax_heads": "5%"},
        causal=True,
        rows={**_LONG, "distill_length": 4096},
    ),
    "lookup": Preset(
        {"kernel": "none", "window": 128, "sinks": 4, "routed_blocks": "128"}, causal=None, rows={"distill_steps": 0}
    ),
    "encoder": Preset({"kernel": "hedgehog", "window": 64, "sinks": 4, "exact_keys": 64}, causal=False),
}
"""Presets by name. All with a kernel have learned log-scales, the default with a window.

`causal` and `recall` are for language models; docs/benchmarks/proof.md gives the benefit of each part. With `causal`,
memory is constant, and every layer gets the window, exact keys and kernel that suit it. `recall` has exact keys and
softmax heads in order to look up and copy text; the cache of its softmax heads grows with the text. Both train on long
rows: a kernel learns nothing inside the window, and heads that look up far back do nothing in short rows. `lookup`, for
both kinds, has no kernel, so nothing is trained; each query looks up keys. The cache of a language model keeps all
keys, twice, so that it grows with the text (docs/benchmarks/routed.md). `encoder` is for bidirectional models: texts of
up to 68 tokens stay exact, and in longer texts the kernel covers the tokens outside the window that are no exact keys.
"""


def reads_pairs(values: Mapping[str, object]) -> bool:
    """Tell whether options name two columns of texts, whose rows cannot be packed."""
    return bool(values.get("text_pair_column")) or "," in str(values.get("text_column"))


def preset_options(values: Mapping[str, object], *, rows: bool = False) -> Mapping[str, object]:
    """Return the preset's options that are not given explicitly; with another kernel, without those of its kernel.

    Args:
        values: the options given explicitly.
        rows: whether to include the options of the training rows; pairs of texts cannot be packed.

    Raises:
        UnknownNameError: for an unknown preset.
    """
    name = values.get("preset")
    if name is None:
        return {}
    if name not in PRESETS:
        raise unknown_name("preset", str(name), PRESETS)
    preset, given = PRESETS[str(name)], set(values)
    options = {**preset.options, **(preset.rows if rows else {})}
    if values.get("kernel", options["kernel"]) != options["kernel"]:
        given |= {"kernel_arg", "distill_steps"}
    if reads_pairs(values):
        given.add("packing")
    return {option: value for option, value in options.items() if option not in given}


def check_preset(name: str | None, model: str, causal: list[bool]) -> None:
    """Check that a preset suits a model.

    Args:
        name: the preset, or None.
        model: the model's name or folder.
        causal: for each self-attention to convert, whether it is causal.

    Raises:
        ConfigError: if the preset suits none of the model's attention layers.
    """
    if name is None or PRESETS[name].causal in (None, *causal):
        return
    other = next(other for other, preset in PRESETS.items() if preset.causal is (not PRESETS[name].causal))
    sees = "is causal" if PRESETS[other].causal else "is bidirectional"
    raise ConfigError(f"preset: got {name!r}, but attention of {model!r} {sees}; use --preset {other}, or leave it out")


def fitting(name: str | None, additions: ReadOnlyValues, tokens: int | None) -> Values:
    """Return a conversion's additions for a model that takes `tokens` tokens (None: any number).

    A preset suits models for short inputs as well, so it has at most as many exact keys as they take tokens. A larger
    number that is given explicitly stays, and is refused later.
    """
    usual = None if name is None else PRESETS[name].options.get("exact_keys")
    if tokens is None or usual is None or additions.get("exact_keys") != usual:
        return dict(additions)
    return {**additions, "exact_keys": min(additions["exact_keys"], tokens)}


def parse_window(text: str) -> int | str:
    """Parse a window such as 64, auto or auto:64."""
    auto, colon, count = text.partition(":")
    if text.isdecimal():
        return int(text)
    if auto != AUTO or (colon and not (count.isdecimal() and int(count))):
        raise ConfigError(f"window: got {text!r}, expected a number of tokens such as 64, auto or auto:64")
    return text


def rows_of(length: object, tokens: int) -> int:
    """Return how many rows of a length fit into `tokens`: `STEP_ROWS`, or a half, a quarter ... of it; at least 1."""
    rows = STEP_ROWS
    # A length of another type is refused by the checks of the options.
    while isinstance(length, int) and rows > 1 and rows * length > tokens:
        rows //= 2
    return rows


def width_of(window: str | int | None) -> int | None:
    """Return the window of every layer, or of the reference when windows are chosen; None without a window."""
    return int(window.partition(":")[2] or WINDOW) if isinstance(window, str) else window


def rows_for(window: object) -> dict[str, object]:
    """Return the default options of the training rows for a window: longer ones, as a kernel learns nothing inside it.

    Raises:
        ConfigError: if the window is text with another meaning.
    """
    # A window of another type is refused by the checks of the options.
    width = width_of(parse_window(window)) if isinstance(window, str) else window
    if not isinstance(width, int):
        return {}
    length = max(DISTILL_LENGTH, min(ROW_WINDOWS * width, ROW_TOKENS), 2 * width)
    sampled = {"query_sample": SAMPLED} if length > 2 * SAMPLED else {}
    return {"distill_length": length, **sampled} if length > DISTILL_LENGTH else {}


def rows_of_training(values: ReadOnlyValues, row_length: str) -> dict[str, object]:
    """Return the options with which a job reads rows like those that its checkpoint was trained on.

    Args:
        values: the options given explicitly, without a row length. A teacher may limit it.
        row_length: name of the option with the tokens per row.

    Returns:
        {} if these rows have at most `DISTILL_LENGTH` tokens, or are unknown.
    """
    from linearize.checkpoint.loading import read_config
    from linearize.checkpoint.provenance import Provenance, Record
    from linearize.training.stage_two.load import length_limit

    teacher = values.get("teacher")
    try:
        record = Record(read_config(values["model"])).part("linearize").part("provenance")
        length = Provenance(record.values).longest_row_length or 0
        length = min(length, (length_limit(teacher) if teacher else None) or length)
    except CheckpointError:
        # A missing checkpoint is refused elsewhere.
        return {}
    if length <= DISTILL_LENGTH:
        return {}
    options = record.part("options")
    packing = options.is_true("packing") and not reads_pairs(values)
    usual = {row_length: length, "packing": packing, "query_sample": options.whole("query_sample")}
    return {name: value for name, value in usual.items() if value}
