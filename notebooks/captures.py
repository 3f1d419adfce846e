"""What the notebooks share: the program, a folder for what it writes, and how pictures look.

Everything else in a notebook is h5py, NumPy and matplotlib on files that bitattn wrote. BF16 is an HDF5 float type there, so h5py
reads it as float32.
"""

import atexit
import json
import os
import pathlib
import shutil
import subprocess
import tempfile

import matplotlib.pyplot as plt

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOLDENS = ROOT / "datasets" / "goldens"
PROGRAM = os.path.abspath(os.environ.get("BITATTN_PROGRAM", ROOT / "build" / "release" / "bitattn"))
FOLDER = pathlib.Path(tempfile.mkdtemp(prefix="bitattn-notebook-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)

# Colours that stay apart for colour-blind readers and in grey.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#777777"

plt.rcParams.update({
    "figure.dpi": 72, "figure.figsize": (9.0, 3.6), "figure.constrained_layout.use": True, "font.size": 10,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "legend.frameon": False,
    "axes.prop_cycle": plt.cycler(color=[BLUE, ORANGE, GREEN, RED, GREY]),
})


def bitattn(*arguments):
    """Runs the program from the repository's root, so that what it prints does not depend on where that is; its standard
    output. What it says on standard error is shown if it fails."""
    arguments = [a.relative_to(ROOT) if isinstance(a, pathlib.Path) and a.is_relative_to(ROOT) else a for a in arguments]
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        raise RuntimeError(f"bitattn {' '.join(map(str, arguments))}: exit {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def bitattn_json(*arguments):
    """The object that --json prints."""
    return json.loads(bitattn(*arguments, "--json"))


def written(name):
    """A path in a folder that goes when the notebook ends."""
    return FOLDER / name
