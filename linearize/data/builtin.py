"""Data that needs no network: English prose from Python itself, and crops of two photographs."""

from __future__ import annotations

import ast
import contextlib
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from linearize.core.errors import DataError
from linearize.data.records import Example, Records

DEFAULT_TEXT = "Salesforce/wikitext:wikitext-2-raw-v1"
DEFAULT_IMAGES = "uoft-cs/cifar10"
CROPS = 2048
PHOTOGRAPHS = ("china.jpg", "flower.jpg")
MIN_CHARACTERS = 80
# Prose has few symbols; code, tables and grammars have many.
MIN_LETTERS = 0.88
# Modules with long docstrings, all of them in Python 3.11 to 3.14; read as files, never imported.
MODULES = """
argparse ast asyncio/base_events asyncio/events asyncio/locks asyncio/tasks bdb bisect calendar cmd code codecs
collections/__init__ concurrent/futures/_base configparser contextlib copy csv dataclasses datetime difflib dis
email/_header_value_parser email/_policybase email/header email/message email/policy enum filecmp fileinput fnmatch
fractions ftplib functools getopt gettext gzip heapq http/client http/cookiejar http/cookies http/server imaplib
importlib/_bootstrap_external inspect ipaddress locale logging/__init__ logging/handlers lzma mailbox mimetypes
nturl2path numbers optparse os pdb pickle pickletools pkgutil platform plistlib poplib posixpath pprint profile
pyclbr pydoc queue random re/__init__ reprlib sched secrets selectors shelve shlex shutil smtplib socket socketserver
ssl statistics string subprocess symtable tarfile tempfile textwrap threading timeit tkinter/__init__ tkinter/ttk
tokenize trace traceback turtle types typing unittest/case unittest/mock urllib/parse urllib/request uuid warnings
weakref webbrowser xml/dom/minidom xml/etree/ElementTree xml/sax/handler xmlrpc/client xmlrpc/server zipapp _pydecimal
_pyio
"""


@cache
def prose() -> tuple[str, ...]:
    """Collect paragraphs of English prose: Python's manual topics and the docstrings of its standard library.

    Returns:
        Distinct paragraphs of at least 80 characters, in a fixed order that depends only on Python's version.

    Raises:
        DataError: If this Python was installed without its sources.
    """
    texts: list[str] = []
    with contextlib.suppress(ImportError):  # Some distributions leave it out.
        from pydoc_data.topics import topics

        texts += [topics[name] for name in sorted(topics)]
    library = Path(sysconfig.get_path("stdlib"))
    for file in (file for file in (library / f"{name}.py" for name in MODULES.split()) if file.is_file()):
        nodes = ast.walk(ast.parse(file.read_bytes()))
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        texts += [ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds)]
    different = dict.fromkeys(paragraph for text in texts for paragraph in paragraphs(text))
    if not different:
        raise DataError("this Python has no manual topics and no sources to take prose from; pass a dataset.")
    return tuple(different)


def paragraphs(text: str) -> Iterator[str]:
    """Cut a text at its blank lines and keep the paragraphs of prose, each on one line."""
    for block in re.split(r"\n\s*\n", text):
        line = " ".join(block.split())
        letters = sum(sign.isalpha() or sign == " " for sign in line)
        if len(line) >= MIN_CHARACTERS and letters >= MIN_LETTERS * len(line) and line[-1] in ".:!?":
            yield line


class Crops(Records):
    """Random crops of scikit-learn's two sample photographs (427 x 640), of varied scale and shape; half are mirrored.

    Crop ``i`` depends only on the seed and ``i``.

    Args:
        count: How many crops there are.
        seed: Seed of their positions and sizes.
    """

    def __init__(self, count: int, seed: int) -> None:
        from sklearn.datasets import load_sample_image

        self.photographs = [load_sample_image(name) for name in PHOTOGRAPHS]
        # Photograph, top, left, height, width, and whether it is mirrored.
        self.plans: list[tuple[int, int, int, int, int, bool]] = []
        for number in range(count):
            generator = np.random.default_rng([seed, number])
            which = int(generator.integers(len(self.photographs)))
            rows, columns = self.photographs[which].shape[:2]
            side = min(rows, columns) * np.sqrt(generator.uniform(0.05, 1.0))
            stretch = np.exp(generator.uniform(np.log(3 / 4), np.log(4 / 3)) / 2)
            height, width = int(np.clip(side * stretch, 16, rows)), int(np.clip(side / stretch, 16, columns))
            top, left = int(generator.integers(rows - height + 1)), int(generator.integers(columns - width + 1))
            self.plans.append((which, top, left, height, width, bool(generator.integers(2))))
        self.sizes = np.array([height * width for _, _, _, height, width, _ in self.plans], dtype=np.int64)

    def fetch(self, rows: Sequence[int]) -> list[Example]:
        from PIL import Image

        examples = []
        for which, top, left, height, width, mirrored in (self.plans[row] for row in rows):
            pixels = self.photographs[which][top : top + height, left : left + width]
            examples.append(Example(Image.fromarray(np.ascontiguousarray(pixels[:, ::-1] if mirrored else pixels))))
        return examples

    def digests(self, rows: Sequence[int]) -> Iterable[bytes]:
        return (repr(self.plans[row]).encode() for row in rows)
