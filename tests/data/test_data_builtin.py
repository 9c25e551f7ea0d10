from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch

from linearize.core.errors import DataError
from linearize.data import DataConfig, builtin, load_source
from linearize.data import hub as hub_room
from linearize.data import load as load_room
from linearize.data.builtin import Crops, paragraphs, prose


def test_prose_is_much_and_english(little_prose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "MODULES", little_prose)
    built_in_prose = prose.__wrapped__()
    assert len(built_in_prose) > 2_000 and len(set(built_in_prose)) == len(built_in_prose)
    assert sum(len(text) for text in built_in_prose) > 500_000
    assert any(text.startswith("Assert statements are a convenient way to insert") for text in built_in_prose)
    assert all("\n" not in text and len(text) >= 80 and text[-1] in ".:!?" for text in built_in_prose)
    words = " ".join(built_in_prose).lower().split()
    assert 0.04 < words.count("the") / len(words) < 0.12


@pytest.mark.slow
def test_prose_is_the_same_when_it_is_gathered_again(little_prose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "MODULES", little_prose)
    assert prose.__wrapped__() == prose.__wrapped__()


def test_paragraphs_keep_prose_only() -> None:
    sentence = "This is a paragraph that is long enough to be kept, as it\n   runs over two lines of the text."
    code = ">>> x = [f(a, b) for a, b in zip(c, d)]\n>>> y = {1: 2, 3: 4, 5: 6, 7: 8, 9: 10, 11: 12, 13: 14, 15: 16}."
    text = f"Heading\n*******\n\n{sentence}\n\n{code}\n\nToo short."
    assert list(paragraphs(text)) == [
        "This is a paragraph that is long enough to be kept, as it runs over two lines of the text."
    ]


def test_text_without_a_dataset_offline(gpt_tokenizer: Any) -> None:
    source = load_source(DataConfig(batch_size=4, holdout=8), gpt_tokenizer, "text")
    assert source.fallback and source.num_train == len(prose()) - 8
    assert source.description.startswith("built-in English prose (manual topics and docstrings of Python 3.")
    assert "as no data set is given and HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set" in source.description
    assert next(source.train_batches())["input_ids"].shape[0] == 4
    for option in ("text_pair_column", "text_column", "split"):
        with pytest.raises(DataError, match=f"got {option}, which the built-in data does not have"):
            load_source(DataConfig(**{option: "label"}), gpt_tokenizer, "text")


def test_images_without_a_dataset_offline(image_processor: Any) -> None:
    source = load_source(DataConfig(batch_size=4, holdout=8, seed=1), image_processor, "image")
    assert (source.fallback, source.num_train, source.num_holdout) == (True, 2048, 8)
    assert source.description.startswith("built-in random crops of scikit-learn's two sample photographs")
    batch = next(source.train_batches())
    assert batch["pixel_values"].shape == (4, 3, 8, 8)
    again = load_source(DataConfig(batch_size=4, holdout=8, seed=1), image_processor, "image")
    assert torch.equal(next(again.train_batches())["pixel_values"], batch["pixel_values"])
    other = load_source(DataConfig(batch_size=4, holdout=8, seed=2), image_processor, "image")
    assert not torch.equal(next(other.train_batches())["pixel_values"], batch["pixel_values"])


def test_crops_vary_and_lie_inside() -> None:
    crops = Crops(300, seed=0)
    images = [example.value for example in crops.fetch(range(300))]
    areas = [image.size[0] * image.size[1] / (427 * 427) for image in images]
    assert min(areas) < 0.1 and max(areas) > 0.9
    assert all(image.size[0] <= 640 and image.size[1] <= 427 for image in images)
    assert 100 < sum(plan[5] for plan in crops.plans) < 200 and 100 < sum(plan[0] for plan in crops.plans) < 200
    # The first crops do not depend on how many there are.
    assert Crops(5, seed=0).plans == crops.plans[:5]
    which, top, left, height, width, mirrored = crops.plans[0]
    pixels = crops.photographs[which][top, left + (width - 1 if mirrored else 0)]
    assert images[0].getpixel((0, 0)) == tuple(pixels.tolist()) and images[0].size == (width, height)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A Hub that answers, with one data set of texts; the list tells what was asked for."""
    import datasets

    asked: list[tuple[Any, ...]] = []

    def load_dataset(repo: str, config: str | None, split: str, streaming: bool) -> Any:
        asked.append((repo, config, split, streaming))
        if repo == "o/broken":
            raise ValueError("BuilderConfig 'x' not found.\nAvailable: ['y']")
        return datasets.Dataset.from_dict({"text": [f"w{n}" for n in range(99)]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(hub_room, "unreachable", lambda repo: None)
    monkeypatch.setattr(load_room, "unreachable", lambda repo: None)
    return asked


def test_the_stated_hub_data_set_comes_first(hub: list[tuple[Any, ...]], gpt_tokenizer: Any) -> None:
    source = load_source(DataConfig(), gpt_tokenizer, "text")
    assert hub == [("Salesforce/wikitext", "wikitext-2-raw-v1", "train", False)]
    # A quarter of its 99 texts is held out, fewer than 64.
    assert not source.fallback and (source.num_train, source.num_holdout) == (75, 24)
    assert source.description.startswith("Hub data set Salesforce/wikitext:wikitext-2-raw-v1 (split train): 75 texts")


def test_hub_names_with_and_without_config(hub: list[tuple[Any, ...]], gpt_tokenizer: Any) -> None:
    load_source(DataConfig(dataset="o/n:c", split="test"), gpt_tokenizer, "text")
    load_source(DataConfig(dataset="imdb"), gpt_tokenizer, "text")
    assert hub == [("o/n", "c", "test", False), ("imdb", None, "train", False)]
    message = r"got Hub data set 'o/broken:x', split 'train', which cannot be loaded: ValueError: BuilderConfig 'x'"
    with pytest.raises(DataError, match=message) as caught:
        load_source(DataConfig(dataset="o/broken:x"), gpt_tokenizer, "text")
    assert "\n" not in str(caught.value)


def test_a_hub_name_offline_says_what_to_do(gpt_tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"'o/n'.* pass a local file or folder, or unset it\.$"):
        load_source(DataConfig(dataset="o/n"), gpt_tokenizer, "text")


def test_one_quick_question_whether_the_hub_answers(monkeypatch: pytest.MonkeyPatch, gpt_tokenizer: Any) -> None:
    import datasets
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    asked: list[tuple[str, float]] = []

    def dataset_info(self: object, repo: str, timeout: float) -> None:
        asked.append((repo, timeout))
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    source = load_source(DataConfig(), gpt_tokenizer, "text")
    assert asked == [("Salesforce/wikitext", 3.0)]
    assert source.fallback and "the Hub does not answer (OSError)" in source.description
    with pytest.raises(DataError, match=r"or connect to the network\.$"):
        load_source(DataConfig(dataset="o/n"), gpt_tokenizer, "text")
    assert not datasets.config.HF_HUB_OFFLINE
    assert len(list(islice(source.train_batches(), 2))) == 2
