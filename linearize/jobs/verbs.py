"""A function for each verb of the command line that does work: the same options by name, and the verb's result.

    from linearize.jobs import verbs
    result = verbs.convert("roberta-base", kernel="hedgehog", dataset="reviews.jsonl", output="roberta-linear")

An option has its name on the command line, with underscores; numbers, lists and flags are values. What follows without
a name is the verb's own argument. The functions of `linearize` with the same names (`convert`, `distill`, `align`,
`search`, `embed`) take a model in memory and write nothing.

`python scripts/write_stub.py` writes verbs.pyi, from which editors and type checkers know the options.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from linearize.core.signatures import by_name
from linearize.evaluation.options import BenchOptions, CompareOptions, ReportOptions
from linearize.jobs.config import AlignJob, ConvertJob, DistillJob, EmbedJob, ExportJob, InitJob, SearchJob
from linearize.jobs.events import Callback, ignore
from linearize.jobs.task_config import EvaluateJob, LongdocJob, TuneJob

if TYPE_CHECKING:
    from linearize.checkpoint.inspect import CheckpointInfo
    from linearize.evaluation.bench.job import BenchResult
    from linearize.evaluation.report.compare import Compared
    from linearize.evaluation.report.gather import Gathered
    from linearize.jobs.convert import ConvertResult
    from linearize.jobs.embed import EmbedResult
    from linearize.jobs.evaluate import Evaluation
    from linearize.jobs.export import ExportResult
    from linearize.jobs.finetune import Tuned
    from linearize.jobs.longdoc import LongdocResult
    from linearize.kernel_search.result import SearchResult
    from linearize.modeling.plan import Plan


@by_name(ConvertJob)
def convert(job: ConvertJob, on_event: Callback = ignore) -> ConvertResult:
    """Convert a checkpoint, train its kernels, align it, and write a folder."""
    from linearize.jobs.convert import convert_checkpoint

    return convert_checkpoint(job, on_event)


@by_name(DistillJob)
def distill(job: DistillJob, on_event: Callback = ignore) -> ConvertResult:
    """Continue stage one on a converted checkpoint, and write a folder."""
    from linearize.jobs.convert import distill_checkpoint

    return distill_checkpoint(job, on_event)


@by_name(AlignJob)
def align(job: AlignJob, on_event: Callback = ignore) -> ConvertResult:
    """Align a converted checkpoint with its original, and write a folder."""
    from linearize.jobs.convert import align_checkpoint

    return align_checkpoint(job, on_event)


@by_name(SearchJob)
def search(job: SearchJob, on_event: Callback = ignore) -> SearchResult:
    """Choose the kernel of every layer of a checkpoint within a budget."""
    from linearize.jobs.search import search_checkpoint

    return search_checkpoint(job, on_event)


@by_name(TuneJob)
def finetune(job: TuneJob, on_event: Callback = ignore) -> Tuned:
    """Train a checkpoint on a task; return the folder that was written (`output`), and the `result`."""
    from linearize.jobs.finetune import finetune_checkpoint

    return finetune_checkpoint(job, on_event)


@by_name(EvaluateJob)
def evaluate(job: EvaluateJob, on_event: Callback = ignore) -> Evaluation:
    """Measure a checkpoint on a task, also next to its original (`compare`)."""
    from linearize.jobs.evaluate import evaluate_checkpoint

    return evaluate_checkpoint(job, on_event)


@by_name(LongdocJob)
def longdoc(job: LongdocJob, on_event: Callback = ignore) -> LongdocResult:
    """Compare a tuned original on cut documents and in chunks with the linear model on whole ones."""
    from linearize.jobs.longdoc import run_longdoc

    return run_longdoc(job, on_event)


@by_name(EmbedJob)
def embed(job: EmbedJob, on_event: Callback = ignore) -> EmbedResult:
    """Write the vectors of documents, and of their spans, into one file."""
    from linearize.jobs.embed import embed_dataset

    return embed_dataset(job, on_event)


@by_name(ExportJob)
def export(job: ExportJob, on_event: Callback = ignore) -> ExportResult:
    """Write a converted checkpoint as ONNX, and check the graphs."""
    from linearize.jobs.export import export_checkpoint

    return export_checkpoint(job, on_event)


@by_name(InitJob)
def init(job: InitJob) -> Plan | None:
    """Write an untrained model; return its plan, or None if it has softmax."""
    from linearize.jobs.init import init_checkpoint

    return init_checkpoint(job)


@by_name(BenchOptions)
def bench(options: BenchOptions, on_event: Callback = ignore) -> BenchResult:
    """Measure time and memory next to softmax: one attention, a whole model, or decoding."""
    from linearize.evaluation.bench.job import run_bench

    return run_bench(options, on_event)


@by_name(ReportOptions)
def report(
    options: ReportOptions, on_event: Callback = ignore, *, output: str = "report", overwrite: bool = False
) -> Gathered:
    """Write a page of pictures of one conversion; return its data."""
    from linearize.evaluation.report.page import write_report

    return write_report(options, output, overwrite=overwrite, on_event=on_event)


@by_name(CompareOptions)
def compare(
    options: CompareOptions, on_event: Callback = ignore, *, output: str = "comparison", overwrite: bool = False
) -> Compared:
    """Measure several conversions on the same inputs, and write the numbers."""
    from linearize.evaluation.report.compare import write_comparison

    return write_comparison(options, output, overwrite=overwrite, on_event=on_event)


def inspect(model: str) -> CheckpointInfo:
    """Return facts about a checkpoint, without reading its weights."""
    from linearize.checkpoint.inspect import inspect_checkpoint

    return inspect_checkpoint(model)


def push(folder: str, repo: str, *, private: bool = False, include: Sequence[str] = ()) -> str:
    """Upload a folder to the Hub, and return its address."""
    from linearize.checkpoint.push import push as upload

    return upload(folder, repo, private, include=include)
