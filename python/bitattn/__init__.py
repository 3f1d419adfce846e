"""bitattn: what a BF16 attention kernel computes, to the last bit.

With the compiled module (`pip install .`, or a build with CMake and `PYTHONPATH=build/release/python`): captures from files or NumPy arrays, and what the program does with them.

    capture = bitattn.load("datasets/goldens/fa3/d128_full_s128_late.h5")
    bitattn.verify(capture)["verified"]
    bitattn.diagnose(capture)["leak"]

Without it, `bitattn.torch` records captures in a PyTorch run, and `bitattn.recorder` is its core for other frameworks. The page: docs/capture.md.
"""

try:
    from ._native import (
        Capture,
        InputError,
        backends,
        compare,
        compare_recorded,
        diagnose,
        generate,
        identify,
        import_tensors,
        info,
        list_captures,
        load,
        run,
        save,
        verify,
        witness,
    )
    from ._native import version as __version__
except ModuleNotFoundError as _missing:
    if _missing.name != "bitattn._native":
        raise

    def __getattr__(name):
        if name in _NATIVE:
            raise ImportError(
                f"bitattn.{name} needs the compiled module, which is not beside {__file__}: take that folder off the path where bitattn was "
                "installed (pip install .), or build with CMake and put build/release/python on the path"
            )
        raise AttributeError(f"module 'bitattn' has no attribute '{name}'")


_NATIVE = (
    "Capture",
    "InputError",
    "backends",
    "compare",
    "compare_recorded",
    "diagnose",
    "generate",
    "identify",
    "import_tensors",
    "info",
    "list_captures",
    "load",
    "run",
    "save",
    "verify",
    "witness",
)
__all__ = [name for name in _NATIVE if name in globals()]
