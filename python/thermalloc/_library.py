"""The C functions of libthermalloc in this process, and the files that a wheel ships.

Everything here does nothing where the process does not run on thermalloc: code that opens scopes
works unchanged under another allocator.
"""

import ctypes
import os
import shutil
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _bind():
    process = ctypes.CDLL(None)
    text, token = ctypes.c_char_p, ctypes.c_uint32
    signatures = {
        "thermalloc_scope_push": (token, [text]),
        "thermalloc_scope_pop": (None, [token]),
        "thermalloc_scope_capture": (token, []),
        "thermalloc_scope_attach": (token, [token]),
        "thermalloc_scope_step": (None, [ctypes.c_uint64]),
        "thermalloc_scope_mark": (ctypes.c_int, [ctypes.c_void_p, token]),
        "thermalloc_prof_dump": (ctypes.c_int, [text]),
    }
    functions = {}
    for name, (result, arguments) in signatures.items():
        try:
            function = getattr(process, name)
        except AttributeError:
            return None
        function.restype, function.argtypes = result, arguments
        functions[name] = function
    return functions


_functions = _bind()


def loaded():
    """Whether this process runs on thermalloc."""
    return _functions is not None


def call(name, *arguments):
    """Calls a function of the library; None where there is none."""
    return _functions[name](*arguments) if _functions else None


def library():
    """The path of libthermalloc.so."""
    named = os.environ.get("THERMALLOC_LIB")
    places = [Path(named)] if named else []
    places += [_HERE / "libthermalloc.so"]
    root = _HERE.parent.parent
    places += [root / "target" / "release" / "libthermalloc.so"]
    places += [Path(prefix) / "libthermalloc.so" for prefix in ("/usr/local/lib", "/usr/lib")]
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(
        "libthermalloc.so: in none of "
        + ", ".join(str(place.parent) for place in places)
        + ": name it by THERMALLOC_LIB"
    )


def threads():
    """The path of libthermalloc_threads.so, beside libthermalloc.so."""
    beside = library().with_name("libthermalloc_threads.so")
    if not beside.is_file():
        raise FileNotFoundError(f"{beside}: no such file: build it by 'cargo build --release -p thermalloc-threads'")
    return beside


def tool():
    """The path of the command-line tool, which makes reports; None where there is none."""
    named = os.environ.get("THERMALLOC_TOOL")
    root = _HERE.parent.parent
    places = [named] if named else []
    places += [_HERE / "bin" / "thermalloc"]
    places += [root / "target" / kind / "thermalloc" for kind in ("release", "debug")]
    for place in places:
        if os.access(place, os.X_OK):
            return str(place)
    return shutil.which("thermalloc")
