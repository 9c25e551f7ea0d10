"""Architectures that worked in the last sweep still work, and the page says what the sweep found."""

from __future__ import annotations

import json

import pytest
import transformers
from architectures.shrink import tiny_config, tiny_model
from architectures.sweep import apart, modeling_files, try_one
from architectures.table import BEGIN, END, PAGE, RESULTS, page

FOUND = json.loads(RESULTS.read_text(encoding="utf-8"))
PARTS = 24


def test_the_page_is_what_was_found():
    text = PAGE.read_text(encoding="utf-8")
    assert text.split(BEGIN)[1].split(END)[0].strip() == page(FOUND)


def test_every_modeling_file_was_tried():
    known = {result["file"] for result in FOUND if not result["file"].startswith("timm/")}
    assert set(modeling_files()) <= known or transformers.__version__ != "5.23.0"
    assert all(set(result) >= {"file", "name", "model", "status", "step", "message"} for result in FOUND)


def test_the_rule_keeps_what_belongs_together():
    config = tiny_config(transformers.LlavaConfig)
    assert config.text_config.hidden_size == config.vision_config.hidden_size == 32
    assert config.image_token_id < config.text_config.vocab_size == 128
    model = tiny_model(transformers.LlamaForCausalLM, tiny_config(transformers.LlamaConfig))
    assert sum(x.numel() for x in model.parameters()) < 100_000


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_what_worked_still_works(part):
    names = [result["file"] for result in FOUND if result["status"] == "works"][part::PARTS]
    found = {name: apart(lambda name=name: try_one(name), name, 60) for name in names}
    broken = {name: f"{one['step']}: {one['message']}" for name, one in found.items() if one["status"] != "works"}
    assert not broken
