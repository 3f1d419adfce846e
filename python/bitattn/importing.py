"""Tensors of PyTorch's .pt files as captures.

    python3 -m bitattn.importing IN.pt -o OUT.h5 --layout BHSD --scale 0.125 --causal

Only PyTorch reads its own format. What it finds goes, as HDF5 in a temporary folder, through `bitattn import`, whose options these are:
docs/capture.md, "Tensors from elsewhere".
"""

import os
import re
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


def _path(name):
    """A name that HDF5 can hold, below the group it is in."""
    return name.replace("\0", "_").strip("/") or "_"


class _Storing:
    """Mappings and lists as groups, tensors as data sets, numbers and texts as attributes. `left_out`: tensors that cannot be a capture's, and why."""

    def __init__(self, source):
        self.source, self.left_out = source, []

    def store(self, value, group, name):
        import torch

        if isinstance(value, torch.Tensor):
            self._tensor(value, group, name)
        elif isinstance(value, (bool, int, float, str)):
            if not isinstance(value, int) or abs(value) < 2**63:
                group.attrs[_path(name)] = int(value) if isinstance(value, bool) else value
        elif isinstance(value, (dict, list, tuple)):
            # A key may hold "/" (as in names of tensors): these are groups as well.
            inside = group if name is None else group.require_group(_path(name))
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                self.store(item, inside, str(key))

    def _tensor(self, value, group, name):
        import torch

        where = f"{group.name.rstrip('/')}/{name}".lstrip("/")
        known = (torch.float16, torch.float32, torch.float64, torch.int16, torch.int32, torch.int64)
        try:
            kind = getattr(value, "layout", "strided")
            if "strided" not in str(kind) or getattr(value, "is_quantized", False) or getattr(value, "is_meta", False):
                self.left_out.append(f"{where} (no plain tensor)")
                return
            if value.dtype != torch.bfloat16 and value.dtype not in known:
                self.left_out.append(f"{where} ({str(value.dtype).removeprefix('torch.')})")
                return
            value = value.detach().contiguous()
            array = value.view(torch.int16).numpy().view("uint16") if value.dtype == torch.bfloat16 else value.numpy()
        except (RuntimeError, NotImplementedError, TypeError) as error:
            self.left_out.append(f"{where} ({str(error).splitlines()[0][:60]})")
            return
        try:
            words.write_array(group, _path(name), array)
        except (ValueError, TypeError, OSError, RuntimeError) as error:
            raise ValueError(f"{self.source}: tensor {where}: {str(error).splitlines()[0]}") from None


def convert(source, target):
    """Everything in a .pt file that a capture can be made of, as an HDF5 file; returns what was left out. Nothing but tensors and plain values is unpickled.

    Raises ValueError.
    """
    try:
        import torch
    except ImportError:
        raise ValueError(f"{source}: reading it needs PyTorch, which is not installed") from None
    try:
        content = torch.load(source, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ValueError(f"{source}: {error.strerror or error}") from None
    except Exception as error:  # zip, pickle and PyTorch each have their own for a damaged or unwanted file
        reason = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip() or type(error).__name__
        if "GLOBAL" in reason or "global" in reason:
            reason = "it holds more than tensors and plain values (a whole model?); save a state_dict"
        raise ValueError(f"{source}: PyTorch cannot read it: {reason.splitlines()[0][:100]}") from None
    if not isinstance(content, (dict, list, tuple)):
        raise ValueError(f"{source}: holds one {type(content).__name__}, expected tensors by name")
    storing = _Storing(source)
    try:
        with h5py.File(target, "w") as file:
            storing.store(content, file, None)
    except RecursionError:
        raise ValueError(f"{source}: is nested too deeply") from None
    except (TypeError, OSError, RuntimeError) as error:
        raise ValueError(f"{source}: cannot be converted: {str(error).splitlines()[0]}") from None
    return storing.left_out


def _output(arguments):
    """The file that `bitattn import` would write, or None."""
    for at, argument in enumerate(arguments):
        if argument in ("-o", "--output") and at + 1 < len(arguments):
            return arguments[at + 1].split(":/")[0]
        for option in ("--output=", "-o"):
            if argument.startswith(option) and len(argument) > len(option):
                return argument.removeprefix(option).split(":/")[0]
    return None


def main(arguments=None):
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or {"-h", "--help"} & set(arguments):
        print(f"usage: {USAGE}\n\n{__doc__}", end="")
        return 0 if arguments else 2
    files = [a for at, a in enumerate(arguments) if a.endswith((".pt", ".pth")) and arguments[at - 1 : at] not in (["-o"], ["--output"])]
    try:
        if len(files) != 1:
            raise ValueError(f"expected one file that ends in .pt or .pth (others: bitattn import); {USAGE}")
        program, output = find_program(), _output(arguments)
        if output is not None and os.path.exists(output) and os.path.exists(files[0]) and os.path.samefile(output, files[0]):
            raise ValueError(f"{output}: the output would replace the input")
        with tempfile.TemporaryDirectory(prefix="bitattn_import_") as folder:
            converted = os.path.join(folder, "tensors.h5")
            left_out = convert(files[0], converted)
            done = subprocess.run(
                [program, "import", *(converted if a == files[0] else a for a in arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )  # fmt: skip
        # A user knows the file that was given.
        sys.stdout.write(done.stdout.replace(converted, files[0]))
        sys.stderr.write(done.stderr.replace(converted, files[0]))
        if left_out and "--quiet" not in arguments:
            more = f" and {len(left_out) - 5} more" if len(left_out) > 5 else ""
            print(f"bitattn.importing: left out: {', '.join(left_out[:5])}{more}", file=sys.stderr)
        return done.returncode
    except (OSError, ValueError) as error:
        print(f"bitattn.importing: {error}".replace("\n", " "), file=sys.stderr)
        return 2


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
