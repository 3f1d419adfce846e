"""Captures in files and folders, by the step and layer that they say they are of. Only metadata is read."""

from dataclasses import dataclass
import os
import re

import h5py


@dataclass(frozen=True)
class Listed:
    """A capture: `file` and `group` inside it, and what its attributes say."""

    file: str
    group: str
    step: object
    layer: str
    call: int
    rank: int
    heads_kept: str

    @property
    def name(self):
        """As the program takes it: FILE.h5 or FILE.h5:/group."""
        return self.file if self.group == "/" else f"{self.file}:{self.group}"


def natural_key(text):
    """blocks.9.attn before blocks.10.attn: runs of digits count as numbers."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", text) if part]


def _text(value):
    value = value.decode() if isinstance(value, bytes) else value
    return str(value)


def _listed(path, group):
    attributes = group.attrs
    step = attributes.get("step")
    return Listed(
        path, group.name, None if step is None else int(step), _text(attributes.get("layer", "")), int(attributes.get("call", 0)),
        int(attributes.get("rank", 0)), _text(attributes.get("heads_kept", "")),
    )  # fmt: skip


def files_in(paths):
    """The paths with every folder replaced by the HDF5 files in it and below, sorted. Raises ValueError where there are none."""
    found = []
    for path in paths:
        if not os.path.isdir(path):
            found.append(path)
            continue
        inside = [os.path.join(d, n) for d, _, names in os.walk(path) for n in names if n.endswith((".h5", ".hdf5"))]
        if not inside:
            raise ValueError(f"{path}: the folder holds no HDF5 files (*.h5, *.hdf5)")
        found += sorted(inside)
    return found


def list_captures(paths):
    """All captures in files and folders: every group that holds q, k and v. Raises ValueError where a file cannot be read or holds none."""
    listed = []
    for path in files_in(paths):
        try:
            with h5py.File(path, "r") as file:
                groups = [file]
                file.visititems(lambda _, item: groups.append(item) if isinstance(item, h5py.Group) else None)
                captures = [_listed(path, g) for g in groups if all(name in g for name in "qkv")]
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error}".splitlines()[0]) from None
        if not captures:
            raise ValueError(f"{path}: no capture: no group holds q, k and v")
        listed += captures
    return listed
