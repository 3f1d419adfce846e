#!/usr/bin/python3
"""Executes notebooks from their first cell to their last.

    notebooks/execute.py [--program build/release/bitattn] NOTEBOOK…           fails if a cell fails or prints other than what is stored
    notebooks/execute.py [--program build/release/bitattn] --write NOTEBOOK…   stores what they print and draw

Ends with 77 (skipped) where nbclient, matplotlib or h5py is not installed.
"""

import argparse
import os
import pathlib
import sys

try:
    import h5py  # noqa: F401
    import ipykernel  # noqa: F401
    import matplotlib.font_manager  # noqa: F401: builds its cache here and not, with a remark, in a cell
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError
except ImportError as missing:
    print(f"{missing.name} is not installed: skipped")
    sys.exit(77)

MOST_BYTES = 400_000
SECONDS = 300


def printed(notebook):
    """What each code cell printed; pictures are left out, for they depend on fonts."""
    return ["".join(o.text for o in cell.outputs if o.output_type == "stream" and o.name == "stdout")
            for cell in notebook.cells if cell.cell_type == "code"]


def wrong_size(path):
    size = path.stat().st_size
    return f"{size} bytes; at most {MOST_BYTES}, so that it opens fast in a browser: smaller pictures" if size > MOST_BYTES else None


def execute(path, write):
    if wrong_size(path) and not write:
        return wrong_size(path)
    notebook = nbformat.read(path, as_version=4)
    stored = printed(notebook)
    client = NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", record_timing=False,
                            resources={"metadata": {"path": str(path.parent)}})
    try:
        client.execute()
    except CellExecutionError as error:
        return f"a cell failed\n{error}"
    noise = [o.text for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs
             if o.output_type == "stream" and o.name == "stderr" and "Warning" in o.text]
    if noise:
        return "a cell warns: " + noise[0]
    if write:
        notebook.metadata.language_info = {"name": "python"}
        nbformat.write(notebook, path)
        return wrong_size(path)
    for at, (before, now) in enumerate(zip(stored, printed(notebook))):
        if before != now:
            return f"code cell {at + 1} prints\n{now}where the notebook has\n{before}(execute.py --write stores what it prints now)"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", help="bitattn (default: build/release/bitattn)")
    parser.add_argument("--write", action="store_true", help="store what the cells print and draw")
    parser.add_argument("notebooks", nargs="+", type=pathlib.Path)
    options = parser.parse_args()
    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # or the kernel's debugger remarks on every start
    if options.program:
        os.environ["BITATTN_PROGRAM"] = os.path.abspath(options.program)
    failed = False
    for path in options.notebooks:
        wrong = execute(path.resolve(), options.write)
        print(f"{path.name}: {wrong or 'every cell ran'}")
        failed = failed or wrong is not None
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
