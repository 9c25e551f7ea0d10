"""`init`: make an untrained model of an architecture, with linear attention or softmax."""

from __future__ import annotations

from collections.abc import Mapping

import transformers
from torch import nn
from transformers import PreTrainedModel

from linearize.checkpoint.loading import load_processor
from linearize.checkpoint.output import claim
from linearize.checkpoint.ownership import check_links
from linearize.conversion.plan import convert
from linearize.core.errors import ConfigError
from linearize.core.heads import Processor
from linearize.core.options import read_values
from linearize.core.parsing import user_path
from linearize.jobs.config import InitJob
from linearize.modeling.plan import Plan
from linearize.training.stage_two.load import label_options, ready
from linearize.training.stage_two.save import save_model
from linearize.training.stage_two.tasks import Task, task

PROCESSORS = ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
"""Files of which a folder with a tokenizer or an image processor has at least one."""


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
    sources = [job.config if isinstance(job.config, str) else None, job.tokenizer]
    with claim(job.output, overwrite=job.overwrite, sources=sources):
        chosen, source = task(job.task), job.tokenizer
        if job.num_labels is not None and not chosen.head.per_label:
            raise ConfigError(
                f"num_labels: got {job.num_labels} for task {chosen.name}, whose head has no classes; leave it out"
            )
        if job.kernel_args and job.kernel is None:
            raise ConfigError("kernel_arg: got arguments without a kernel; name it (--kernel), or leave them out")
        if isinstance(job.config, str) and any((user_path(job.config) / name).is_file() for name in PROCESSORS):
            source = source or job.config
        if processor is None and source is not None:
            processor = load_processor(source, chosen.modality)
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
    path = user_path(name)
    if path.is_dir():
        check_links(path)
        path = path / "config.json"
    values = read_values(path, f"config: {name!r}", "a JSON or YAML file with model_type, or a folder with config.json")
    for name in ("architectures", "transformers_version", "_name_or_path", "dtype", "torch_dtype"):
        values.pop(name, None)
    return values


def fresh_model(
    config: Mapping[str, object], chosen: Task, num_labels: int | None, *, seed: int = 0, matching_keys: bool = False
) -> PreTrainedModel:
    """Make an untrained softmax model from a config.

    Args:
        config: `model_type` and the values that differ from its defaults.
        chosen: the task, which decides the head.
        num_labels: outputs of the head, if it has one per label.
        seed: seed of the weights.
        matching_keys: whether keys start with the weights of the queries (`match_keys`).

    Raises:
        ConfigError: if the config does not describe a model with such a head.
    """
    values = dict(config)
    kind = values.pop("model_type", None)
    if not isinstance(kind, str):
        raise ConfigError("model config: got no model_type, expected one such as bert, gpt2, llama or vit; add it")
    if num_labels is not None:
        values |= label_options(chosen, num_labels)
    transformers.set_seed(seed)
    try:
        full = transformers.AutoConfig.for_model(kind, **values)
        model = getattr(transformers, chosen.head.auto_class).from_config(full)
    except Exception as error:  # Configs are checked by each architecture in its own way.
        problem = f"model config of type {kind!r} makes no model for {chosen.head.name}"
        why = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{problem}: {why}") from error
    if matching_keys:
        match_keys(model)
    return ready(model)


def match_keys(model: PreTrainedModel) -> None:
    """Start the keys of an untrained model with the weights of the queries, in place.

    Equal tokens then attend to each other from the first step (Trockman & Kolter 2023, "Mimetic Initialization of
    Self-Attention Layers", https://arxiv.org/abs/2305.09828, where W_q W_k^T starts near a multiple of the identity).

    Raises:
        ConfigError: if no layer has separate projections of the same size.
    """
    matched = 0
    for module in model.modules():
        for names in (("query", "key"), ("q_proj", "k_proj"), ("q_lin", "k_lin")):
            query, key = (getattr(module, name, None) for name in names)
            if isinstance(query, nn.Linear) and isinstance(key, nn.Linear) and query.weight.shape == key.weight.shape:
                key.load_state_dict(query.state_dict())
                matched += 1
    if not matched:
        raise ConfigError(
            f"matching_keys: got a model of type {model.config.model_type!r} without separate query and key "
            "projections of the same size, expected one such as bert or vit, or llama with as many key heads as query "
            "heads; leave it out"
        )
