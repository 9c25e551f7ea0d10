"""Images as records: from tables with an image column, from folders, and from zip files without unpacking."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple
from zipfile import BadZipFile, ZipFile

import numpy as np

from linearize.core.errors import DataError
from linearize.core.registry import ReadOnlyValues
from linearize.data.columns import in_order
from linearize.data.hub import cause
from linearize.data.records import Example, Records, TableRecords, hashed, named_labels

if TYPE_CHECKING:
    import pyarrow as pa
    from PIL.Image import Image

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})


class ImageFile(NamedTuple):
    """One image: the file ``path``, or a member of the zip file ``path``.

    ``inner`` is its path in the folder or zip file, whose last folder is its class. ``size`` is in bytes.
    """

    path: Path
    member: str | None
    inner: PurePosixPath
    size: int


class ImageFiles(Records):
    """Image files of a folder or of zip files, each read when it is needed.

    Args:
        files: The images.
        labelled: Whether the folder of an image is its class.
        origin: Name of the data set in messages.

    Raises:
        DataError: If `labelled` is set and an image is not in a class folder.
    """

    def __init__(self, files: list[ImageFile], labelled: bool, origin: str) -> None:
        self.files = files
        self.sizes = np.array([file.size for file in files], dtype=np.int64)
        self._zips: dict[Path, ZipFile] = {}
        if labelled:
            loose = next((file for file in files if not file.inner.parent.name), None)
            if loose is not None:
                raise DataError(f"{origin}: got {str(loose.inner)!r} outside a class folder, expected class/image.")
            self.names = in_order(file.inner.parent.name for file in files)

    def fetch(self, rows: Sequence[int]) -> list[Example]:
        files = [self.files[row] for row in rows]
        images = [decode(self._read(file), str(file.inner)) for file in files]
        labels = [file.inner.parent.name if self.names else None for file in files]
        return [Example(image, None, label) for image, label in zip(images, labels, strict=True)]

    def digests(self, rows: Sequence[int]) -> Iterable[bytes]:
        return (hashed(self._read(self.files[row])).digest() for row in rows)

    def _read(self, file: ImageFile) -> bytes:
        try:
            if file.member is None:
                return file.path.read_bytes()
            if file.path not in self._zips:
                self._zips[file.path] = ZipFile(file.path)
            return self._zips[file.path].read(file.member)
        except (OSError, EOFError, RuntimeError, BadZipFile, KeyError, zlib.error) as error:
            raise DataError(f"cannot read image {str(file.inner)!r} of {file.path.name!r}: {cause(error)}") from error


class ImageTable(TableRecords):
    """Rows with the columns ``image`` (undecoded) and perhaps ``label``."""

    @staticmethod
    def measure(batch: pa.Table) -> tuple[np.ndarray, np.ndarray]:
        """Return which rows [N] have an image, and the size in bytes [N] of its file."""
        import pyarrow.compute as pc

        # Chunks are not joined: ten thousand images may have more bytes than Arrow's offsets can count.
        column = batch["image"]
        sizes = pc.fill_null(pc.binary_length(pc.struct_field(column, "bytes")), -1).to_numpy().astype(np.int64)
        good = pc.is_valid(column).to_numpy().copy()
        for row in np.flatnonzero(good & (sizes < 0)):
            path = column[int(row)].as_py()["path"]
            good[row] = path is not None
            sizes[row] = Path(path).stat().st_size if path is not None and Path(path).is_file() else 0
        return good, sizes

    def fetch(self, rows: Sequence[int]) -> list[Example]:
        columns = self.table[list(rows)]
        labels = named_labels(columns.get("label", [None] * len(rows)), self.names)
        return [
            Example(decode(raw_bytes(raw), raw["path"] or f"row {row}"), None, label)
            for row, raw, label in zip(rows, columns["image"], labels, strict=True)
        ]

    def digests(self, rows: Sequence[int]) -> Iterable[bytes]:
        return (hashed(raw_bytes(self.table[int(row)]["image"])).digest() for row in rows)


def raw_bytes(raw: ReadOnlyValues) -> bytes:
    """Return the bytes of an undecoded image of `datasets`, ``{"bytes": ..., "path": ...}``.

    Raises:
        DataError: If it is only a path, and that file cannot be read.
    """
    if raw["bytes"] is not None:
        return raw["bytes"]
    try:
        return Path(raw["path"] or "").read_bytes()
    except OSError as error:
        raise DataError(f"cannot read image {raw['path']!r}: {cause(error)}") from error


def decode(data: bytes, name: str) -> Image:
    """Decode an image file and turn it upright; of 16 bits per pixel the upper 8 are kept.

    Raises:
        DataError: If the bytes are not an image, the image is damaged, or the range of its pixels is unknown.
    """
    from PIL import Image, ImageOps

    try:
        opened = Image.open(BytesIO(data))
        opened.load()
        image = ImageOps.exif_transpose(opened)
    except Exception as error:  # A damaged image may raise anything.
        raise DataError(f"cannot decode image {name!r}: {cause(error)}; repair or remove it.") from error
    if image.mode == "F" or (image.mode, opened.format) == ("I", "TIFF"):
        kind = "floating point" if image.mode == "F" else "32-bit or signed"
        raise DataError(f"image {name!r} has {kind} pixels of unknown range; save it with 8 or 16 bits.")
    if image.mode.startswith("I"):
        # Pillow cuts them off at 255, so that nearly all pixels would be white. PGM's 16 bits are in mode "I".
        return Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    return image


def zip_images(path: Path) -> list[ImageFile]:
    """Return the images in a zip file.

    Raises:
        DataError: If it is not a zip file, or has no image.
    """
    try:
        with ZipFile(path) as archive:
            members = [member for member in archive.infolist() if is_image(PurePosixPath(member.filename))]
    except (OSError, BadZipFile) as error:
        raise DataError(f"cannot read {path.name!r} as a zip file: {cause(error)}") from error
    if not members:
        raise DataError(f"{path.name!r} is empty: got no image in it, expected files such as class/1.jpg.")
    members.sort(key=lambda member: member.filename)
    return [ImageFile(path, member.filename, PurePosixPath(member.filename), member.file_size) for member in members]


def is_image(path: PurePosixPath) -> bool:
    """Tell whether a file name is that of an image, and not of a hidden file or a macOS resource fork."""
    hidden = any(part.startswith((".", "__MACOSX")) for part in path.parts)
    return path.suffix.lower() in IMAGE_SUFFIXES and not hidden
