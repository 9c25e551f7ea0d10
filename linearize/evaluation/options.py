"""Options of `bench`, `report` and `compare`; importing this module loads nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

from linearize.core import kernel_options
from linearize.core.errors import ConfigError
from linearize.core.kernel_options import Additions
from linearize.core.options import check, option, parse_image_sizes, parse_lengths, section
from linearize.core.registry import Values

WHAT, SIZES, HOW = "what to measure", "sizes of random inputs", "how"
SIZE: Values = {"low": 1, "high": 65536}
LENGTHS = {"attention": (512, 4096, 16384), "decode-model": (8192, 32768), "model": (128, 512, 4096)}
"""The suites, and their default lengths."""
OF_ATTENTION = ("causal", "backward", "heads", "head_dim")


def check_lengths(
    lengths: Sequence[int],
    most: int = 1 << 24,
    name: str = "lengths",
    expected: str = "numbers of tokens such as 512,4096,16384",
) -> list[int]:
    """Return the lengths in ascending order without duplicates.

    Raises:
        ConfigError: if there are no lengths, or one of them is not an integer from 1 to `most`.
    """
    bad = [n for n in lengths if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= most]
    if bad or not lengths:
        raise ConfigError(f"{name}: got {repr(bad[0]) if bad else 'none'}, expected {expected}")
    return sorted(set(lengths))


@dataclass(frozen=True)
class BenchOptions:
    """What to measure, and how."""

    model: str | None = option(
        None, "measure a whole model: Hub name, folder, or bert-base", positional=True, metavar="MODEL"
    )
    kernels: tuple[str, ...] = option(
        (), "kernel; may be repeated (hedgehog)", name="kernel", repeat=True, metavar="NAME", parse=tuple
    )
    kernel_args: Mapping[str, object] = kernel_options.kernel_args()
    additions: Additions = section(Additions)
    lengths: tuple[int, ...] | None = option(
        None, "input or context lengths in tokens; by default the suite's own", metavar="N,N", parse=parse_lengths
    )
    image_sizes: tuple[int, ...] | None = option(
        None,
        "side lengths of square images in pixels, for a MODEL that reads images",
        name="image_size",
        metavar="N,N",
        parse=parse_image_sizes,
    )
    heads: int = option(12, "heads", group=SIZES, metavar="H", **SIZE)
    head_dim: int = option(64, "size of a head", group=SIZES, metavar="D", **SIZE)
    batch: int = option(1, "sequences", group=SIZES, metavar="B", **SIZE)
    layers: int | None = option(None, "layers of bert-base (12)", group=SIZES, metavar="L", **SIZE)
    causal: bool = option(False, "a query sees only keys up to its own position", group=WHAT)
    backward: bool = option(False, "forward and backward", group=WHAT)
    decode: bool = option(False, "one token of MODEL after a context (--lengths)", group=WHAT)
    dtype: str = option("float32", "float32, bfloat16 or float16", group=HOW, metavar="T")
    device: str = option("cpu", "cpu, cuda, cuda:1, mps or auto", group=HOW, metavar="D")
    repeats: int | None = option(None, "turns; by default 3 to 200, as many as take ten seconds", group=HOW, **SIZE)
    threads: int | None = option(None, "threads of torch on the CPU; by default its own choice", group=HOW, **SIZE)
    memory: bool = option(True, "also measure peak memory; otherwise time only", shown="yes", group=HOW)

    def __post_init__(self) -> None:
        check(self, "bench")
        meaningless: tuple[str, ...] = ("layers",)
        why = "one attention layer is measured"
        if self.decode:
            meaningless, why = (*OF_ATTENTION, "image_sizes"), "--decode measures one token of a whole model"
        elif self.model is not None:
            meaningless, why = OF_ATTENTION, "a whole model is measured with its own attention"
        for name in meaningless:
            if getattr(self, name) != getattr(BenchOptions, name):
                raise ConfigError(f"bench: {why}; leave --{name.replace('sizes', 'size').replace('_', '-')} out")
        if self.decode and self.model is None:
            raise ConfigError(
                "bench: --decode needs a MODEL such as gpt2; for attention layers alone, run python -m "
                "benchmarks.attentions decode in a checkout"
            )

    @property
    def suite(self) -> str:
        """The suite: a key of `LENGTHS`."""
        if self.model is None:
            return "attention"
        return "decode-model" if self.decode else "model"

    def sorted_lengths(self) -> list[int]:
        """Return the lengths in ascending order; by default those of the suite.

        Raises:
            ConfigError: if one of them is not a positive integer.
        """
        return check_lengths(LENGTHS[self.suite] if self.lengths is None else self.lengths)


TIMED_LENGTHS = (128, 512, 2048)


@dataclass(frozen=True)
class InputOptions:
    """The inputs to measure on."""

    dataset: str | None = option(
        None,
        "Hub data set, local file or folder to take the inputs from",
        metavar="NAME_OR_PATH",
        shown="the built-in data",
    )
    text_column: str | None = option(
        None, "column of the text, or both columns of a pair; found automatically if unambiguous", metavar="C[,D]"
    )
    image_column: str | None = option(None, "column of the image", metavar="C")
    inputs: int = option(8, "how many inputs to measure on", low=1)
    max_length: int | None = option(None, "tokens per input", low=1, shown="128")

    def __post_init__(self) -> None:
        check(self, "report")


@dataclass(frozen=True, kw_only=True)
class MeasuringOptions:
    """Options that reports and comparisons share."""

    original: str | None = option(
        None,
        "the model it was made from, to compare whole outputs with; by default the one that the checkpoint records",
        metavar="MODEL",
    )
    inputs: InputOptions = section(InputOptions)
    lengths: Sequence[int] = option(
        TIMED_LENGTHS,
        "input lengths to time at, in tokens; none: no timing",
        shown=",".join(map(str, TIMED_LENGTHS)),
        metavar="N,N",
        parse=parse_lengths,
    )
    device: str = option("auto", "cpu, cuda, cuda:1, mps or auto", metavar="D")

    def __post_init__(self) -> None:
        if self.lengths:
            check_lengths(self.lengths)


@dataclass(frozen=True)
class ReportOptions(MeasuringOptions):
    """Options of a report."""

    checkpoint: str = option(help="folder or Hub name of a converted checkpoint", positional=True, metavar="DIR")
    _: KW_ONLY
    inputs: InputOptions = section(InputOptions, shown={"max_length": "the length it was trained on, 512 at most"})


@dataclass(frozen=True)
class CompareOptions(MeasuringOptions):
    """Options of a comparison."""

    checkpoints: Sequence[str] = option(
        help="folders of converted checkpoints, two or more", positional=True, nargs="+", metavar="DIR"
    )
    _: KW_ONLY
    repeats: int = option(5, "how often each is timed; differences within the quartiles are noise", low=1)


def lengths_within(limit: int | None, lengths: Sequence[int], notes: list[str]) -> list[int]:
    """Return the lengths that a model can take, in ascending order; add a note about those that it cannot."""
    dropped = [length for length in sorted(set(lengths)) if limit is not None and length > limit]
    if dropped:
        names = ", ".join(f"{length:,}" for length in dropped)
        notes.append(
            f"Not timed at {names} tokens: this checkpoint takes at most {limit:,}; convert with --max-length."
        )
    return sorted(set(lengths) - set(dropped))
