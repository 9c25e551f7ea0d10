"""Run the notebooks of docs/notebooks from start to end, and store their outputs.

    python scripts/run_notebooks.py                     # the notebooks that are stored with outputs
    python scripts/run_notebooks.py long_documents      # one notebook; its times are machine-specific and not stored

The notebooks' Hub model is taken from the `demo` extra, so nothing is downloaded. Files written by a notebook go into a
temporary folder.
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
"""The notebooks that are stored with outputs; the others measure time, which depends on the reader's machine."""
MODEL = "sentence-transformers/all-MiniLM-L6-v2"
QUIET = {"TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "0"}
"""Environment for the notebooks: offline, and without progress bars in their outputs."""
LIMIT = 1800
"""Time limit in seconds for a cell, and for the start of the kernel on a busy machine."""


def execute(notebook: Any, folder: Path) -> Any:
    """Run a notebook in a folder with a Jupyter kernel, and return it with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell fails.
    """
    client = NotebookClient(
        notebook, timeout=LIMIT, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=os.environ | QUIET)
    for cell in notebook.cells:
        # Readers need neither the cells' timestamps nor their stderr.
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def main(argv: list[str] | None = None) -> int:
    """Run the notebooks, and rewrite those that are stored with outputs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(known)}; by default {', '.join(KEPT)}")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.names) - set(known)):
        parser.error(f"got {', '.join(unknown)}, expected names out of {', '.join(known)}")
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
