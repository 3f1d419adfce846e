"""Tensors of PyTorch's .pt files as captures.

    python3 -m bitattn.importing IN.pt -o OUT.h5 --layout BHSD --scale 0.125 --causal

Only PyTorch reads its own format. What it finds goes, as HDF5 in a temporary folder, through `bitattn import`, whose options these are:
docs/capture.md, "Tensors from elsewhere".
"""

import os
import shutil
import subprocess
import sys
import tempfile

import h5py

from . import words

USAGE = "python3 -m bitattn.importing IN.pt -o OUT.h5 [options of `bitattn import`]"


def find_program():
    """The program bitattn: $BITATTN, else on the path, else in this checkout's build. Raises ValueError where it is not."""
    built = os.path.join(os.path.dirname(__file__), "..", "..", "build", "release", "bitattn")
    found = os.environ.get("BITATTN") or shutil.which("bitattn") or shutil.which(built)
    if not found:
        raise ValueError("the program bitattn is not on the path: build it, or name it in $BITATTN")
    return found


def _store(value, group, name):
    """Mappings and lists as groups, tensors as data sets, numbers and texts as attributes; anything else is left out."""
    import torch

    if isinstance(value, torch.Tensor):
        value = value.detach().contiguous()
        if value.dtype == torch.bfloat16:
            words.write_array(group, name, value.view(torch.int16).numpy().view("uint16"))
        elif value.dtype in (torch.float16, torch.float32, torch.float64, torch.int16, torch.int32, torch.int64):
            words.write_array(group, name, value.numpy())
    elif isinstance(value, (bool, int, float, str)):
        group.attrs[name] = int(value) if isinstance(value, bool) else value
    elif isinstance(value, dict) or isinstance(value, (list, tuple)):
        # A key may hold "/" (as in names of tensors): these are groups as well.
        inside = group if name is None else group.require_group(name)
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _store(item, inside, str(key))


def convert(source, target):
    """Everything in a .pt file that a capture can be made of, as an HDF5 file. Nothing but tensors and plain values is unpickled. Raises ValueError."""
    try:
        import torch
    except ImportError:
        raise ValueError(f"{source}: reading it needs PyTorch, which is not installed") from None
    try:
        content = torch.load(source, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ValueError(f"{source}: {error.strerror or error}") from None
    except Exception as error:  # zip, pickle and PyTorch each have their own for a damaged or unwanted file
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"{source}: PyTorch cannot read it: {reason[0]}") from None
    if not isinstance(content, (dict, list, tuple)):
        raise ValueError(f"{source}: holds one {type(content).__name__}, expected tensors by name")
    with h5py.File(target, "w") as file:
        _store(content, file, None)


def main(arguments=None):
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or {"-h", "--help"} & set(arguments):
        print(f"usage: {USAGE}\n\n{__doc__}", end="")
        return 0 if arguments else 2
    files = [a for a in arguments if a.endswith((".pt", ".pth"))]
    try:
        if len(files) != 1:
            raise ValueError(f"expected one file that ends in .pt or .pth (others: bitattn import); {USAGE}")
        program = find_program()
        with tempfile.TemporaryDirectory(prefix="bitattn_import_") as folder:
            converted = os.path.join(folder, "tensors.h5")
            convert(files[0], converted)
            done = subprocess.run(
                [program, "import", *(converted if a == files[0] else a for a in arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )  # fmt: skip
        # A user knows the file that was given.
        sys.stdout.write(done.stdout.replace(converted, files[0]))
        sys.stderr.write(done.stderr.replace(converted, files[0]))
        return done.returncode
    except (OSError, ValueError) as error:
        print(f"bitattn.importing: {error}".replace("\n", " "), file=sys.stderr)
        return 2


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
