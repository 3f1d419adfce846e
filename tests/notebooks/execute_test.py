"""notebooks/execute.py fails where a cell fails or warns, prints other than what is stored, or a file has grown too large.

    execute_test.py EXECUTE.PY
"""

import pathlib
import subprocess
import sys
import tempfile

try:
    import nbclient  # noqa: F401
    import nbformat
except ImportError:
    print("nbclient or nbformat is not installed: skipped")
    sys.exit(77)


def notebook(path, *cells):
    """Cells are (source, what is stored as printed)."""
    book = nbformat.v4.new_notebook()
    for source, printed in cells:
        outputs = [nbformat.v4.new_output("stream", name="stdout", text=printed)] if printed else []
        book.cells.append(nbformat.v4.new_code_cell(source, outputs=outputs))
    nbformat.write(book, path)
    return path


def execute(*arguments):
    done = subprocess.run([sys.executable, sys.argv[1], *map(str, arguments)], capture_output=True, text=True)
    return done.returncode, done.stdout


def main():
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        good = notebook(folder / "good.ipynb", ("x = 2\nprint(x)", "2\n"), ("assert x == 2", ""))
        failing = notebook(folder / "failing.ipynb", ("x = 2", ""), ("assert x == 3", ""))
        other = notebook(folder / "other.ipynb", ("print(2)", "3\n"))
        warning = notebook(folder / "warning.ipynb", ("import warnings\nwarnings.warn('beware')", ""))
        large = notebook(folder / "large.ipynb", ("x = 1  # " + "x" * 400_000, ""))
        code, said = execute(failing, other, warning, large)
        assert code == 1, said
        lines = {line.split(":")[0]: line for line in said.splitlines() if ".ipynb:" in line}
        assert "a cell failed" in lines["failing.ipynb"] and "AssertionError" in said, said
        assert "code cell 1 prints" in lines["other.ipynb"], said
        assert "a cell warns" in lines["warning.ipynb"], said
        assert "at most 400000" in lines["large.ipynb"], said
        code, said = execute("--write", other)
        assert code == 0 and "every cell ran" in said, said
        assert nbformat.read(other, as_version=4).cells[0].outputs[0].text == "2\n"
        code, said = execute(good)
        assert code == 0 and "every cell ran" in said, said
    print("the runner tells")


main()
