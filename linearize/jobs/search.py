"""`search`: choose the kernel of every layer; also the first step of `convert --kernel auto`."""

from __future__ import annotations

from linearize.checkpoint.loading import load_model
from linearize.conversion.inputs import read_inputs
from linearize.conversion.plan import plan
from linearize.conversion.plan_file import check_plan_target, write_plan
from linearize.core.errors import ConfigError
from linearize.core.parsing import check_file
from linearize.jobs import stages
from linearize.jobs.config import ConvertJob, SearchJob
from linearize.jobs.events import Callback, Searched, StepDone, ignore
from linearize.kernel_search.candidates import parse_candidates
from linearize.kernel_search.loop import CARRIER, NO_FSDP, search
from linearize.kernel_search.result import SearchResult, write_plot
from linearize.training.processes import is_main, under_fsdp


def search_checkpoint(job: SearchJob, on_event: Callback = ignore) -> SearchResult:
    """Choose the kernel of every layer of a checkpoint, and write the plan if a file was named.

    Args:
        job: the options.
        on_event: called with every event.

    Raises:
        LinearizeError: a subclass of it, for everything the user can correct; nothing is written then.
    """
    check_search(job)
    if job.plot is not None:
        check_file(job.plot, "--plot", (".png",), overwrite=job.overwrite)
    stages.check_states(job)
    loaded = load_model(job.model, task=job.task, device=stages.first_device(job), revision=job.revision)
    base = plan(
        loaded.model,
        CARRIER,
        keep_softmax=job.keep_softmax,
        seed=job.seed,
        local_as_full=job.local_as_full,
        example_inputs=None if job.example_inputs is None else read_inputs(job.example_inputs, loaded.model),
    )
    context = stages.Context(job, loaded, base, on_event)
    stages.open_data(context, job.distill_length, "a kernel by name to `linearize convert`, with --distill-steps 0")
    stages.clear_states(job)
    result = choose_plan(context, job.max_length)
    if job.plot is not None and is_main():
        write_plot(result, job.plot)
    stages.drop_states(job)
    return result


def check_search(job: SearchJob | ConvertJob) -> None:
    """Check everything that can be checked before the model is loaded.

    Raises:
        ConfigError: for a wrong candidate, a single candidate, a file that cannot be written, or FSDP.
    """
    if under_fsdp():
        raise ConfigError(NO_FSDP)
    parse_candidates(job.search.candidates, softmax=job.search.softmax_layers > 0)
    if job.plan_out is not None:
        # A resumed run may find the plan that it wrote before it was interrupted.
        check_plan_target(job.plan_out, overwrite=job.overwrite or stages.resumes(job))


def choose_plan(context: stages.Context, max_length: int | None) -> SearchResult:
    """Search, and write the plan if a file was named.

    Args:
        context: the running job; its model and data are open, and the converted layers of its plan are searched.
        max_length: longest input that the result must take.
    """
    job = context.job
    assert isinstance(job, SearchJob | ConvertJob)
    result = search(
        context.loaded.model,
        context.source,
        job.search,
        plan=context.plan,
        max_length=max_length,
        on_step=lambda report: context.on_event(StepDone(report)),
        on_event=context.on_event,
    )
    context.searched = result
    if is_main() and job.plan_out is not None:
        write_plan(job.plan_out, result.plan, result.why)
    context.on_event(Searched(result))
    return result
