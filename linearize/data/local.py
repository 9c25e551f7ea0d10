"""Local files and folders: find the files, following links; choose those of a split; and read each kind."""

from __future__ import annotations

import csv
import glob
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeVar

from linearize.core.errors import FULL, DataError, some
from linearize.core.heads import Modality
from linearize.core.parsing import MOST_TEXT, read_json
from linearize.core.registry import Values
from linearize.data.hub import cause, first_rows
from linearize.data.images import IMAGE_SUFFIXES, ImageFile, is_image, zip_images

if TYPE_CHECKING:
    from datasets import Dataset

Item = TypeVar("Item")
CHECKED_ROWS = 10_000
TABLE_KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet", ".txt": "text"}
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
MOST_FOLDERS = 100_000
EXPECTED = "expected .json, .jsonl, .csv, .tsv, .txt (each also .gz) or .parquet, images, or a .zip of images"
# A .tsv has no quoting (GLUE's lone quotes would swallow rows), and "NA" and "null" may be texts.
READERS: dict[str, tuple[str, Values]] = {
    "csv": ("csv", {"keep_default_na": False, "na_values": [""]}),
    "tsv": ("csv", {"keep_default_na": False, "na_values": [""], "sep": "\t", "quoting": csv.QUOTE_NONE}),
    # Without the mark that Windows puts before the first text.
    "text": ("text", {"encoding": "utf-8-sig"}),
}
INDEX = "__index_level_"
"""Begins the name that `datasets` gives to pandas' names of rows."""

FORMS = {
    "json": "objects with the same fields, one per line, or a list of them",
    "csv": "a header and rows with the same number of fields",
    "tsv": "a header and rows with the same number of fields",
    "parquet": "a complete parquet file",
    "text": "lines of text",
}


def missing_split(where: str, split: str, known: Iterable[str]) -> DataError:
    """Return the error for a split that the data does not have."""
    return DataError(f"{where}: got split {split!r}, expected one of: {', '.join(sorted(known))}.")


def looks_local(name: str) -> bool:
    """Tell whether a name can only be a local path, judging by how it starts or ends."""
    return name.startswith((".", "/", "~")) or "\\" in name or file_kind(Path(name)) is not None


def open_local(path: Path, split: str, modality: Modality, most: int | None = None) -> list[Dataset] | list[ImageFile]:
    """Open a local file or folder.

    Args:
        path: A file of a known kind; a folder of such files; a folder or zip file of images, also in class folders;
            or a folder written by ``Dataset.save_to_disk``.
        split: Which files of a folder to read, if their names or folders say train, validation or test.
        modality: Whether the model reads text or images.
        most: Rows to read of each kind of file, without loading the rest; None for all. All image files are listed.

    Returns:
        Tables, one for each kind of file; or the images.

    Raises:
        DataError: If there is nothing to read, or a file is empty, damaged or of another kind.
    """
    if not exists(path):
        raise DataError(f"got {str(path)!r}, which does not exist, expected a file or a folder; check the path.")
    if path.is_dir() and ((path / "state.json").exists() or (path / "dataset_dict.json").exists()):
        return [_saved(path, split) if most is None else first_rows(_saved(path, split), most)]
    root = path if path.is_dir() else path.parent
    files = _of_split(_tags(root, known_files(path)), split, root.name) if path.is_dir() else [path]
    kinds = {file: file_kind(file) for file in files}
    counts = Counter("images" if kind in ("image", "zip") else "tables or texts" for kind in kinds.values())
    if not files or None in kinds.values():
        found = "no file of a known kind" if path.is_dir() else f"a file ending in {path.suffix!r}"
        raise DataError(f"{path.name!r}: got {found}, {EXPECTED}.")
    if len(counts) > 1:
        mixed = " and ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        raise DataError(f"folder {path.name!r}: got {mixed}, expected one kind; put them in separate folders.")
    if "images" in counts:
        if modality == "text":
            raise DataError(f"{path.name!r}: got images, expected text for a model that reads text; pass text.")
        loose = [file for file in files if kinds[file] == "image" and is_image(PurePosixPath(file.name))]
        images = [ImageFile(path, None, PurePosixPath(path.relative_to(root)), path.stat().st_size) for path in loose]
        for file in (file for file in files if kinds[file] == "zip"):
            members = zip_images(file)
            depth, folders = _split_folders([image.inner for image in members])
            images += _of_split({image: folders.get(image.inner.parts[depth]) for image in members}, split, file.name)
        depth, folders = _split_folders([image.inner for image in images])
        # The folder of the split is not a class.
        begin = depth + 1 if folders else 0
        return [image._replace(inner=PurePosixPath(*image.inner.parts[begin:])) for image in images]
    return [_table(kind, [f for f in files if kinds[f] == kind], most) for kind in dict.fromkeys(kinds.values())]


def file_kind(path: Path) -> str | None:
    """Return the kind of a file by its ending: a value of `TABLE_KINDS`, ``image``, ``zip`` or None."""
    before, last = ["", "", *(suffix.lower() for suffix in path.suffixes)][-2:]
    if last in IMAGE_SUFFIXES:
        return "image"
    if last == ".zip":
        return "zip"
    kind = TABLE_KINDS.get(before if last == ".gz" else last)
    # Parquet files are compressed inside.
    return None if kind == "parquet" and last == ".gz" else kind


def known_files(folder: Path) -> list[Path]:
    """Return the files of known kinds in a folder, sorted; a broken link is an error."""
    return sorted(file for file in files_in(folder) if file_kind(file) is not None and exists(file))


def splits_of(path: Path) -> list[str]:
    """Return the names of the splits of a local data set that can be opened; none if it has no splits."""
    if (path / "dataset_dict.json").exists():
        return sorted(read_json(path / "dataset_dict.json", MOST_TEXT)["splits"])
    files = known_files(path) if path.is_dir() else [path]
    names = set(_tags(path, files).values()) if path.is_dir() else set()
    for file in files:
        if file_kind(file) == "zip":
            names |= set(_split_folders([image.inner for image in zip_images(file)])[1].values())
    return sorted(name for name in names if name is not None)


def _tags(root: Path, files: Sequence[Path]) -> dict[Path, str | None]:
    """Return the split of each file; None if it has no split.

    The split of a table or zip file is in its name (``train.jsonl.gz``, ``test-0.zip``) or in a folder above it. The
    split of images is their top folder, if all top folders are names of splits: ``train`` may also be a class. A
    folder around all of them does not count.
    """
    inner = {file: PurePosixPath(file.relative_to(root)) for file in files}
    depth, folders = _split_folders([place for file, place in inner.items() if file_kind(file) == "image"])
    named = {word: split for split, words in SPLIT_WORDS.items() for word in words}
    tags: dict[Path, str | None] = {}
    for file, place in inner.items():
        words = [*(part.lower() for part in place.parts[:-1]), *re.split(r"[^a-z]+", place.name.lower())]
        found = next((named[word] for word in words if word in named), None)
        tags[file] = folders.get(place.parts[depth]) if file_kind(file) == "image" else found
    return tags


def _of_split(tags: Mapping[Item, str | None], split: str, name: str) -> list[Item]:
    """Return the items of one split, or all if none has a split.

    Raises:
        DataError: If there are splits, but not this one.
    """
    known = {tag for tag in tags.values() if tag is not None}
    if known and split not in known:
        raise missing_split(repr(name), split, known)
    return [item for item, tag in tags.items() if tag == split or not known]


def _split_folders(places: Sequence[PurePosixPath]) -> tuple[int, dict[str, str]]:
    """Return how many folders are around all splits, and the split of each folder there; {} without splits."""
    for depth in itertools.count():
        tops = {place.parts[depth] if len(place.parts) > depth + 1 else "" for place in places}
        splits = {top: split for top in tops for split, words in SPLIT_WORDS.items() if top.lower() in words}
        if splits.keys() == tops:
            return depth, splits
        if len(tops) > 1 or "" in tops:
            break
    return 0, {}


def check_classes(files: Sequence[ImageFile], origin: str) -> None:
    """Refuse images whose classes would all be names of splits, as in `cat/train/1.jpg`.

    Raises:
        DataError: naming the folders.
    """
    found = {file.inner.parent.name for file in files}
    if {name.lower() for name in found} <= set(itertools.chain(*SPLIT_WORDS.values())):
        raise DataError(
            f"{origin}: got images whose class folders are named {', '.join(sorted(found))}, as splits are, expected "
            "split/class/image, such as train/cat/1.jpg"
        )


def _saved(path: Path, split: str) -> Dataset:
    from datasets import DatasetDict, load_from_disk

    try:
        loaded = load_from_disk(str(path))
    except Exception as error:  # A damaged folder may raise anything.
        raise DataError(f"cannot read {path.name!r} as a saved data set: {cause(error)}") from error
    if isinstance(loaded, DatasetDict):
        if split not in loaded:
            raise missing_split(repr(path.name), split, loaded)
        return loaded[split]
    return loaded


def _table(kind: str | None, files: Sequence[Path], most: int | None) -> Dataset:
    import pandas
    from datasets import load_dataset

    assert kind is not None
    for file in files:
        if file.suffix.lower() == ".gz" and re.search(r"[\[\]]", str(file)):
            # `datasets` makes a URL of it, where brackets enclose an address.
            raise DataError(f"got {str(file)!r}, a .gz file with a bracket in its path, expected none; rename it.")
    builder, options = READERS.get(kind, (kind, {}))
    try:
        names = [glob.escape(str(file)) for file in files]
        table = load_dataset(builder, data_files=names, split="train", streaming=most is not None, **options)
        table = table if most is None else first_rows(table, most)
        # Arrow's readers of JSON and parquet do not check that texts are UTF-8.
        for batch in table.with_format("arrow").iter(batch_size=CHECKED_ROWS):
            batch.validate(full=True)
        if kind in READERS and any(name.startswith(INDEX) for name in table.column_names):
            # A first row longer than the header: pandas takes the surplus for names of rows.
            wanted, got = len(pandas.read_csv(files[0], nrows=0, **options).columns), len(table.column_names)
            if got > wanted:
                raise ValueError(f"its header has {wanted} fields and its first row {got} (quote texts with commas)")
    except Exception as error:  # The readers raise a dozen kinds of errors, nearly all of them about the file.
        _check_cache(error, files)
        for file in files if len(files) > 1 else ():
            # Read one by one, the broken file is named.
            _table(kind, [file], most)
        which, why = some([file.name for file in files]), cause(error)
        if "corresponds to no data" in str(error) or why.startswith(("StopIteration", "EmptyDataError")):
            raise DataError(f"{which} is empty: got no rows, expected at least one; check the file.") from error
        form = FORMS[kind] if kind == "parquet" else f"{FORMS[kind]} in UTF-8"
        advice = f"expected {form}; repair the file or get it again."
        raise DataError(f"cannot read {which} as {kind}: {why}; {advice}") from error
    if not len(table):
        raise DataError(f"{files[0].name!r} is empty: got no rows, expected at least one; check the file.")
    return table


def _check_cache(error: BaseException, files: Sequence[Path]) -> None:
    """Raise the error for a cache that `datasets` cannot write, if that is why it could not read the files.

    Raises:
        DataError: if it is.
    """
    from datasets import config

    while error.__cause__ is not None:
        error = error.__cause__
    if not isinstance(error, OSError):
        return
    elsewhere = error.filename is not None and Path(str(error.filename)).resolve() not in map(Path.resolve, files)
    # `datasets` itself says so without an error number.
    full = error.errno in FULL or str(error).startswith("Not enough disk space")
    if elsewhere or full:
        raise DataError(
            f"cannot read {some([file.name for file in files])}: the cache of `datasets`, "
            f"{str(config.HF_DATASETS_CACHE)!r}, cannot be written ({error.strerror or 'disk full'}); "
            "make room there, or set HF_DATASETS_CACHE to another folder"
        ) from error


def exists(path: Path) -> bool:
    """Tell whether a file or folder exists.

    Raises:
        DataError: If the path cannot be read, is a broken link, or is a pipe or device, which may never end.
    """
    try:
        if path.is_file() or path.is_dir():
            return True
        if path.exists():
            raise DataError(f"got {str(path)!r}, which is a pipe or a device, expected a file or a folder; name one.")
        if path.is_symlink():
            raise DataError(f"got the link {str(path)!r}, which leads nowhere, expected a file or a folder; repair it.")
    except OSError as error:
        why = f"{type(error).__name__}: {error.strerror}"
        raise DataError(f"cannot look for data set {str(path)[:100]!r} ({why}); check the name.") from error
    return False


def files_in(folder: Path, _above: tuple[Path, ...] = (), _seen: list[int] | None = None) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders, sorted, without hidden ones. Links are followed, except loops.

    Broken links are included: opening such a file reports it as missing.

    Raises:
        DataError: If a folder cannot be read, or there are more than `MOST_FOLDERS`.
    """
    seen = [0] if _seen is None else _seen
    seen[0] += 1
    if seen[0] > MOST_FOLDERS:
        raise DataError(f"got more than {MOST_FOLDERS:,} folders up to {folder.name!r}, expected fewer; remove links.")
    try:
        real = folder.resolve()
        if real in _above:
            return
        inner = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
        kinds = [path.is_dir() for path in inner]
    except (OSError, RuntimeError) as error:  # `resolve` calls a loop of links a RuntimeError.
        raise DataError(f"cannot read folder {folder.name!r}: {cause(error)}; expected a readable one.") from error
    for path, is_folder in zip(inner, kinds, strict=True):
        if is_folder:
            yield from files_in(path, (*_above, real), seen)
        elif path.is_file() or path.is_symlink():
            yield path
