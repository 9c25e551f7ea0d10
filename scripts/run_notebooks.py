"""Run the notebooks of docs/notebooks from the first cell to the last and keep what they give.

    python scripts/run_notebooks.py                     # those whose results are kept
    python scripts/run_notebooks.py long_documents      # one; its times are this machine's, and are not kept

The model that they name on the Hub is the one of the extra `demo`, so that nothing is downloaded. What a notebook
writes goes into a folder that is removed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from linearize.jobs.demo import minilm_folder

NOTEBOOKS = Path(__file__).resolve().parent.parent / "docs" / "notebooks"
KEPT = ("convert_and_look",)
"""Those that are stored with what they gave; the others measure time, which is the reader's machine's."""
MODEL = "sentence-transformers/all-MiniLM-L6-v2"
QUIET = {"TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "0"}
"""Bars are for people who wait."""
LIMIT = 1800
"""Seconds that a cell, or the start of the kernel on a busy machine, may take."""


def execute(notebook: Any, folder: Path) -> Any:
    """Run a notebook in a folder by a Jupyter kernel; return it with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell fails.
    """
    client = NotebookClient(
        notebook, timeout=LIMIT, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=os.environ | QUIET)
    for cell in notebook.cells:
        # When a cell ran, and what was said aside, is of no interest to readers.
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
    return notebook


def main(argv: list[str] | None = None) -> int:
    """Run them, and write those that are kept anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)} ({', '.join(KEPT)})")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.names) - set(known)):
        parser.error(f"got {', '.join(unknown)}, expected names of {', '.join(known)}")
    for name in args.names or KEPT:
        path = NOTEBOOKS / f"{name}.ipynb"
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder, MODEL)
            model.parent.mkdir()
            model.symlink_to(minilm_folder())
            print(f"running {name}", flush=True)
            done = execute(nbformat.read(path, as_version=4), Path(folder))
        if name in KEPT:
            done.metadata = {"kernelspec": done.metadata["kernelspec"], "language_info": {"name": "python"}}
            path.write_text(nbformat.writes(done) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
