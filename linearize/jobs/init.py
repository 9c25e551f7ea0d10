"""`init`: make an untrained model of an architecture, with linear attention or softmax."""

from __future__ import annotations

from pathlib import Path

from linearize.checkpoint.loading import load_processor
from linearize.checkpoint.output import claim
from linearize.checkpoint.ownership import check_links
from linearize.conversion.plan import convert
from linearize.core.errors import ConfigError
from linearize.core.heads import Processor
from linearize.core.parsing import parse_json, parse_yaml, read_text
from linearize.jobs.config import InitJob
from linearize.modeling.plan import Plan
from linearize.training.stage_two.load import fresh_model
from linearize.training.stage_two.save import save_model
from linearize.training.stage_two.tasks import task


def init_checkpoint(job: InitJob, processor: Processor | None = None) -> Plan | None:
    """Make an untrained model and save it.

    Args:
        job: the options; with neither a kernel nor layers the model has softmax.
        processor: tokenizer or image processor to save with it, instead of the one that the job names.

    Returns:
        The plan of the conversion, or None for softmax.

    Raises:
        LinearizeError: a subclass of it, for everything the user can correct.
    """
    with claim(job.output, overwrite=job.overwrite, sources=[job.config if isinstance(job.config, str) else None]):
        chosen = task(job.task)
        if processor is None and job.tokenizer is not None:
            processor = load_processor(job.tokenizer, chosen.modality)
        values = read_config(job.config) if isinstance(job.config, str) else job.config
        model = fresh_model(values, chosen, job.num_labels, seed=job.seed, matching_keys=job.matching_keys)
        linear = job.kernel is not None or job.layers is not None
        if linear:
            model = convert(model, job.kernel, job.kernel_args, layers=job.layers, seed=job.seed)
        stage = {"from_scratch": True, "seed": job.seed}
        save_model(model, job.output, processor, overwrite=job.overwrite, stage=stage)
        return Plan.from_dict(model.config.linearize) if linear else None


def read_config(name: str) -> dict[str, object]:
    """Read a config from a file or folder.

    Raises:
        ConfigError: if it is missing, cannot be read, or is not a mapping.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        check_links(path)
        path = path / "config.json"
    if not path.is_file():
        raise ConfigError(f"config: got {name!r}, expected a JSON or YAML file, or a folder with a config.json")
    try:
        text = read_text(path)
        values = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"config: {name!r} cannot be read ({error}); correct the file") from error
    if not isinstance(values, dict):
        raise ConfigError(f"config: {name!r} is not a mapping, expected one with model_type")
    for name in ("architectures", "transformers_version", "_name_or_path", "dtype", "torch_dtype"):
        values.pop(name, None)
    return values
