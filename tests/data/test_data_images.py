from __future__ import annotations

import io
import shutil
import struct
import zipfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import linearize
from linearize.core.errors import ConfigError, DataError
from linearize.data import DataConfig, Source, load_source
from linearize.data.encode import ImageEncoder
from linearize.data.images import ImageFiles, decode, zip_images
from linearize.data.load import open_records
from linearize.data.records import Example
from linearize.fidelity.teacher import run_body

Draw = Callable[..., None]


@pytest.fixture
def classes(tmp_path: Path, draw: Draw) -> Path:
    """Ten reds and ten blues: a folder with a folder for each class; the shade tells the number."""
    for number in range(10):
        draw(tmp_path / "images" / "red" / f"{number}.png", (200 + number, 0, 0), (4 + number, 9))
        draw(tmp_path / "images" / "blue" / f"{number}.png", (0, 0, 200 + number))
    return tmp_path / "images"


def zipped(folder: Path, target: Path) -> Path:
    with zipfile.ZipFile(target, "w") as archive:
        for file in sorted(folder.rglob("*.png")):
            archive.write(file, file.relative_to(folder))
        archive.writestr("__MACOSX/._0.png", b"no image")
        archive.writestr("readme.md", b"no image")
    return target


def shades(source: Source, batches: int) -> list[tuple[int, int]]:
    """Colour (of 255) of each image."""
    found = []
    for batch in islice(source.train_batches(), batches):
        for image in batch["pixel_values"]:
            red, _, blue = (round(float(value) * 255) for value in image.mean(dim=(1, 2)))
            found.append((red, blue))
    return found


def labelled(path: Path, **options: Any) -> tuple[tuple[str, ...] | None, list[tuple[int, str]]]:
    """Class names; red and class of each image."""
    records, _ = open_records(str(path), DataConfig(**options), "image", label="label")
    examples = records.fetch(range(len(records.sizes)))
    return records.names, [
        (example.value.convert("RGB").getpixel((0, 0))[0], str(example.label)) for example in examples
    ]


def test_class_folders_and_zip_give_the_same(classes: Path, tmp_path: Path, image_processor: Any) -> None:
    zip_path = zipped(classes, tmp_path / "a.zip")
    results = []
    for path in (classes, zip_path):
        config = DataConfig(dataset=str(path), batch_size=5, holdout=5)
        source = load_source(config, image_processor, "image")
        assert (source.num_train, source.num_holdout) == (15, 5)
        batch = next(source.train_batches())
        assert batch["pixel_values"].shape == (5, 3, 8, 8) and batch["pixel_values"].dtype == torch.float32
        results.append(shades(source, 3))
        assert all(red + blue >= 200 for red, blue in results[-1])
        assert len(set(results[-1])) == 15
        names, examples = labelled(path)
        assert names == ("blue", "red") and len(examples) == 20
        assert all((label == "red") == (red > 0) for red, label in examples)
    assert results[0] == results[1]
    assert not (tmp_path / "cache").exists() and sorted(p.name for p in tmp_path.iterdir()) == ["a.zip", "images"]


def test_held_out_images_and_their_doubles_are_never_trained_on(
    classes: Path, tmp_path: Path, image_processor: Any
) -> None:
    both = tmp_path / "both"
    both.mkdir()
    zipped(classes, both / "a.zip")
    zipped(classes, both / "b.zip")
    source = load_source(DataConfig(dataset=str(both), batch_size=4, holdout=6), image_processor, "image")
    assert source.num_train is not None and source.num_train + source.duplicates == 34 and source.duplicates >= 4
    held = {tuple(image.flatten().tolist()) for b in source.holdout_batches() for image in b["pixel_values"]}
    trained = {
        tuple(image.flatten().tolist()) for b in islice(source.train_batches(), 40) for image in b["pixel_values"]
    }
    assert not held & trained and len(held | trained) == 20


def test_ranks_and_resuming(classes: Path, image_processor: Any) -> None:
    config = DataConfig(dataset=str(classes), batch_size=3, holdout=2)
    source = load_source(config, image_processor, "image")
    large = load_source(DataConfig(dataset=str(classes), batch_size=6, holdout=2), image_processor, "image")
    whole = list(islice(large.train_batches(), 12))
    for start in (0, 5, 11):
        parts = [next(source.train_batches(start, rank, 2))["pixel_values"] for rank in (0, 1)]
        assert torch.equal(torch.cat(parts), whole[start]["pixel_values"])


def test_splits_of_image_folders(tmp_path: Path, draw: Draw, image_processor: Any) -> None:
    for split, shade in (("train", 100), ("val", 200)):
        for number in range(3):
            draw(tmp_path / "splits" / split / "car" / f"{number}.png", (shade + number, 0, 0))
    source = load_source(
        DataConfig(dataset=str(tmp_path / "splits"), batch_size=3, holdout=0), image_processor, "image"
    )
    assert sorted(shades(source, 1)) == [(100, 0), (101, 0), (102, 0)] and labelled(tmp_path / "splits")[0] == ("car",)
    held = DataConfig(dataset=str(tmp_path / "splits"), split="validation", batch_size=3, holdout=0)
    assert sorted(shades(load_source(held, image_processor, "image"), 1))[0] == (200, 0)
    # A class may be called train, and then it is no split.
    for name in ("train", "plane"):
        draw(tmp_path / "vehicles" / name / "test.png", (9, 0, 0))
    assert labelled(tmp_path / "vehicles")[0] == ("plane", "train")
    zipped(tmp_path / "vehicles", tmp_path / "test-0.zip")
    zipped(tmp_path / "splits", tmp_path / "all.zip")
    (tmp_path / "zips").mkdir()
    (tmp_path / "test-0.zip").rename(tmp_path / "zips" / "test-0.zip")
    with pytest.raises(DataError, match="got split 'train', expected one of: test"):
        load_source(DataConfig(dataset=str(tmp_path / "zips")), image_processor, "image")
    inside = DataConfig(dataset=str(tmp_path / "all.zip"), split="validation", holdout=0)
    assert load_source(inside, image_processor, "image").num_train == 3


@pytest.mark.parametrize("outer", ["photos", "photos/v2"])
def test_splits_inside_other_folders(outer: str, tmp_path: Path, draw: Draw, image_processor: Any) -> None:
    """Archives often hold one folder with everything; all its splits were read as one."""
    for split, shade in (("train", 100), ("val", 200)):
        for number in range(3):
            draw(tmp_path / "all" / outer / split / "car" / f"{number}.png", (shade + number, 0, 0))
    zipped(tmp_path / "all", tmp_path / "all.zip")
    for path in (tmp_path / "all", tmp_path / "all.zip"):
        for split, red in (("train", 100), ("validation", 200)):
            config = DataConfig(dataset=str(path), split=split, batch_size=3, holdout=0)
            source = load_source(config, image_processor, "image")
            assert source.num_train == 3 and labelled(path, split=split)[0] == ("car",)
            assert sorted(shades(source, 1)) == [(red + number, 0) for number in range(3)]


@pytest.mark.parametrize("streaming", [False, True])
def test_images_in_a_table(classes: Path, tmp_path: Path, image_processor: Any, streaming: bool) -> None:
    from datasets import ClassLabel, Dataset, Features, Image

    files = [str(file) for file in sorted(classes.rglob("*.png"))]
    labels = [int("red" in file) for file in files]
    features = Features({"img": Image(), "label": ClassLabel(names=["sea", "fire"])})
    table = Dataset.from_dict({"img": [*files, None, files[0]], "label": [*labels, 0, -1]}, features=features)
    table.to_parquet(tmp_path / "all.parquet")
    names, examples = labelled(tmp_path / "all.parquet", streaming=streaming)
    assert names == ("sea", "fire") and len(examples) == 20
    assert all((label == "fire") == (red > 0) for red, label in examples)
    table.select(range(21)).to_parquet(tmp_path / "a.parquet")
    config = DataConfig(dataset=str(tmp_path / "a.parquet"), batch_size=9, holdout=2, streaming=streaming)
    source = load_source(config, image_processor, "image")
    assert source.num_train == 18 and source.skipped == 1 and len(set(shades(source, 2))) == 18
    held = source.holdout_batches()[0]
    assert held["pixel_values"].shape == (2, 3, 8, 8)
    again = next(source.train_batches(1))
    assert torch.equal(again["pixel_values"], list(islice(source.train_batches(), 2))[1]["pixel_values"])


def test_a_table_of_paths(classes: Path, tmp_path: Path, image_processor: Any) -> None:
    lines = "".join(f"{file}\n" for file in sorted(classes.rglob("*.png")))
    (tmp_path / "list.csv").write_text("file\n" + lines)
    config = DataConfig(dataset=str(tmp_path / "list.csv"), image_column="file", batch_size=20, holdout=0)
    assert len(set(shades(load_source(config, image_processor, "image"), 1))) == 20


def test_other_modes_become_rgb_and_upright(tmp_path: Path, image_processor: Any) -> None:
    Image.new("L", (5, 5), 77).save(tmp_path / "grey.png")
    Image.new("RGBA", (5, 5), (77, 77, 77, 255)).save(tmp_path / "alpha.png")
    Image.new("P", (5, 5)).save(tmp_path / "palette.gif")
    source = load_source(DataConfig(dataset=str(tmp_path), batch_size=3, holdout=0), image_processor, "image")
    assert sorted(shades(source, 1)) == [(0, 0), (77, 77), (77, 77)]
    exif = Image.Exif()
    exif[0x0112] = 6  # Lying on its side.
    turned = io.BytesIO()
    Image.new("RGB", (4, 9)).save(turned, "jpeg", exif=exif)
    assert decode(turned.getvalue(), "a.jpg").size == (9, 4)


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_images_of_16_bits_keep_their_greys(form: str) -> None:
    """All pixels from 256 on, of 65,536 greys, became white."""
    file = io.BytesIO()
    Image.fromarray(np.array([[0, 255, 256], [32768, 65280, 65535]], dtype=np.uint16)).save(file, form)
    rgb = np.asarray(decode(file.getvalue(), "a").convert("RGB"))
    assert rgb[:, :, 0].tolist() == rgb[:, :, 2].tolist() == [[0, 0, 1], [128, 255, 255]]


def test_pgm_of_16_bits_keeps_its_greys_and_floats_are_refused() -> None:
    """Pillow opens them as 32-bit integers, and made nearly all pixels white; of floats from 0 to 1 it made black."""
    values = np.array([[0, 255, 256], [32768, 65280, 65535]], dtype=">u2")
    rgb = np.asarray(decode(b"P5 3 2 65535 " + values.tobytes(), "a.pgm").convert("RGB"))
    assert rgb[:, :, 0].tolist() == [[0, 0, 1], [128, 255, 255]]
    file = io.BytesIO()
    Image.fromarray(np.full((2, 2), 0.5, dtype=np.float32)).save(file, "TIFF")
    with pytest.raises(DataError, match=r"'a\.tif' has floating point pixels"):
        decode(file.getvalue(), "a.tif")
    # Integers from 0 to 255 became black.
    file = io.BytesIO()
    Image.fromarray(np.full((2, 2), 200, dtype=np.int32)).save(file, "TIFF")
    with pytest.raises(DataError, match=r"'a\.tif' has 32-bit or signed pixels of unknown range"):
        decode(file.getvalue(), "a.tif")


def test_a_processor_around_the_image_processor(classes: Path, image_processor: Any) -> None:
    class Both:
        def __init__(self) -> None:
            self.image_processor = image_processor

    source = load_source(DataConfig(dataset=str(classes), holdout=2, batch_size=1), Both(), "image")
    assert next(source.train_batches())["pixel_values"].shape == (1, 3, 8, 8)


def test_what_is_wrong_is_named(classes: Path, tmp_path: Path, image_processor: Any, gpt_tokenizer: Any) -> None:
    config = DataConfig(dataset=str(classes), holdout=0)
    with pytest.raises(DataError, match="got images, expected text"):
        load_source(config, gpt_tokenizer, "text")
    with pytest.raises(ConfigError, match="expected an image processor"):
        load_source(config, gpt_tokenizer, "image")
    with pytest.raises(ConfigError, match="got packing for a model that reads images"):
        load_source(DataConfig(packing=True), image_processor, "image")
    (tmp_path / "a.txt").write_text("w1\n")
    with pytest.raises(DataError, match="got 20 images and 1 tables or texts, expected one kind"):
        load_source(DataConfig(dataset=str(tmp_path)), image_processor, "image")
    with pytest.raises(DataError, match=r"got 0 columns that may be the image.*text \(text\)"):
        load_source(DataConfig(dataset=str(tmp_path / "a.txt")), image_processor, "image")
    loose = classes / "red"
    with pytest.raises(DataError, match="outside a class folder"):
        labelled(loose)
    with zipfile.ZipFile(tmp_path / "none.zip", "w") as archive:
        archive.writestr("a.txt", "x")
    with pytest.raises(DataError, match=r"'none.zip' is empty: got no image"):
        load_source(DataConfig(dataset=str(tmp_path / "none.zip")), image_processor, "image")


def test_splits_inside_of_classes_are_not_taken_for_classes(classes: Path, tmp_path: Path) -> None:
    """`red/train/1.png` had the class "train"."""
    for name in ("red", "blue"):
        shutil.copytree(classes / "red", tmp_path / "set" / name / "train")
    with pytest.raises(DataError, match=r"class folders are named train, as splits are, expected split/class/image"):
        labelled(tmp_path / "set")


@pytest.mark.parametrize("content", [b"no image", b""])
def test_a_damaged_image_is_named(tmp_path: Path, image_processor: Any, content: bytes) -> None:
    (tmp_path / "broken.jpg").write_bytes(content)
    source = load_source(DataConfig(dataset=str(tmp_path), holdout=0, batch_size=1), image_processor, "image")
    with pytest.raises(DataError, match=r"cannot decode image 'broken\.jpg': UnidentifiedImageError"):
        next(source.train_batches())


def test_damage_inside_an_image_or_a_zip_file_is_named(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.new("RGB", (30, 20)).save(file, "TIFF")
    # The place of the pixels has the type of a fraction.
    damaged = bytearray(file.getvalue())
    place = damaged.index(struct.pack("<HH", 273, 4))
    damaged[place + 2] = 5
    with pytest.raises(DataError, match=r"cannot decode image 'a\.tif': "):
        decode(bytes(damaged), "a.tif")
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("red/1.png", bytes(1000))
    content = bytearray(path.read_bytes())
    content[30 + len("red/1.png")] = 255
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"cannot read image 'red/1\.png' of 'a\.zip': error: Error -3"):
        ImageFiles(zip_images(path), True, "a").fetch([0])


def test_a_processor_that_leaves_sizes_apart_is_refused(classes: Path) -> None:
    from transformers import ViTImageProcessor

    processor = ViTImageProcessor(do_resize=False)
    source = load_source(DataConfig(dataset=str(classes), holdout=0, batch_size=20), processor, "image")
    with pytest.raises(DataError, match="the image processor cannot make a batch"):
        next(source.train_batches())


def test_padding_of_smaller_images_is_masked() -> None:
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"], downsample_in_first_stage=True
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False, backbone_config=backbone, d_model=32, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, num_queries=4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = linearize.convert(transformers.DetrModel(config).eval(), kernel="hedgehog")
    encode = ImageEncoder(transformers.DetrImageProcessor(size={"shortest_edge": 64, "longest_edge": 128}))
    noise = np.random.default_rng(0).integers(0, 255, (64, 128, 3), dtype=np.uint8)
    images = [Example(Image.fromarray(noise[:, :64])), Example(Image.fromarray(noise))]
    both, alone = encode(images, slice(None)), encode(images[:1], slice(None))
    assert both["pixel_values"].shape == (2, 3, 64, 128)
    assert both["pixel_mask"].sum(dim=(1, 2)).tolist() == [64 * 64, 64 * 128]
    assert list(alone) == ["pixel_values"]
    with torch.no_grad():
        states = run_body(model, both).last_hidden_state[0]
        bare = run_body(model, {"pixel_values": both["pixel_values"]}).last_hidden_state[0]
        expected = run_body(model, alone).last_hidden_state[0]
    torch.testing.assert_close(states, expected, rtol=0, atol=1e-5)
    assert (bare - expected).abs().max() > 1e-2
