"""Makes the wheel: the modules, the libraries and the command-line tool, which cargo builds. Needs nothing but
Python and cargo, so `pip wheel` works without a network once cargo's crates are there.

THERMALLOC_BUILD names a folder with libthermalloc.so, libthermalloc_threads.so and thermalloc to take instead
of building them.
"""

import base64
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path

import elf_needs

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parent
# Path in a build, path in the package, whether a wheel needs it.
_BINARIES = (
    ("libthermalloc.so", "libthermalloc.so", True),
    ("libthermalloc_threads.so", "libthermalloc_threads.so", True),
    ("thermalloc", "bin/thermalloc", True),
    ("libthermalloc_cuda.so", "libthermalloc_cuda.so", False),
    ("libthermalloc_cuda_torch.so", "libthermalloc_cuda_torch.so", False),
)


def _project():
    """The plain `name = "text"` lines of pyproject.toml, which are all that it has."""
    text = (_HERE / "pyproject.toml").read_text()
    found = dict(re.findall(r'^([\w-]+) = "([^"]*)"$', text, re.MULTILINE))
    found["license"] = re.search(r'^license = \{ text = "([^"]*)" \}$', text, re.MULTILINE)[1]
    found["scripts"] = re.findall(r'^([\w-]+) = "(\w[\w.]*:\w+)"$', text, re.MULTILINE)
    return found


def _build():
    """The folder with the binaries."""
    given = os.environ.get("THERMALLOC_BUILD")
    if given:
        return Path(given)
    command = ["cargo", "build", "--release", "-p", "thermalloc-capi", "-p", "thermalloc-threads", "-p", "thermalloc-cli"]
    subprocess.run(command, cwd=_ROOT, check=True)
    return Path(os.environ.get("CARGO_TARGET_DIR", _ROOT / "target")) / "release"


def _stripped(path, folder):
    """A copy without lines of source, which are most of a tool's bytes; as it is where there is no strip."""
    copy = Path(folder) / path.name
    shutil.copy(path, copy)
    if shutil.which("strip"):
        subprocess.run(["strip", "--strip-debug", str(copy)], check=False)
    return copy.read_bytes()


def _metadata(project):
    return (
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        f"Summary: {project['description']}\nLicense: {project['license']}\n"
        f"Requires-Python: {project['requires-python']}\n"
    ).encode()


class _Wheel:
    """A wheel that is being written, with its list of contents."""

    def __init__(self, path, info):
        self._zip = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED)
        self._info, self._record = info, []

    def add(self, name, data, mode=0o644):
        entry = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
        entry.external_attr = (0o100000 | mode) << 16
        entry.compress_type = zipfile.ZIP_DEFLATED
        self._zip.writestr(entry, data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        self._record.append(f"{name},sha256={digest},{len(data)}\n")

    def close(self):
        name = f"{self._info}/RECORD"
        self._zip.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), "".join(self._record) + f"{name},,\n")
        self._zip.close()


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    project = _project()
    named = f"{project['name']}-{project['version']}"
    build = _build()
    with tempfile.TemporaryDirectory() as folder:
        binaries = {
            place: _stripped(build / source, folder)
            for source, place, needed in _BINARIES
            if needed or (build / source).exists()
        }
    # Bound to the C library, to no version of Python.
    tag = f"py3-none-{elf_needs.platform_tag(binaries.values(), platform.machine())}"
    file = f"{named}-{tag}.whl"
    wheel = _Wheel(Path(wheel_directory) / file, f"{named}.dist-info")
    for module in sorted((_HERE / "thermalloc").glob("*.py")):
        wheel.add(f"thermalloc/{module.name}", module.read_bytes())
    for place, data in binaries.items():
        wheel.add(f"thermalloc/{place}", data, 0o755)
    info = f"{named}.dist-info"
    wheel.add(f"{info}/METADATA", _metadata(project))
    wheel.add(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: thermalloc\nRoot-Is-Purelib: false\nTag: {tag}\n".encode())
    scripts = "".join(f"{name} = {function}\n" for name, function in project["scripts"])
    wheel.add(f"{info}/entry_points.txt", f"[console_scripts]\n{scripts}".encode())
    for name in ("LICENSE-APACHE", "LICENSE-MIT"):
        wheel.add(f"{info}/licenses/{name}", (_ROOT / name).read_bytes())
    wheel.close()
    return file


def build_sdist(sdist_directory, config_settings=None):
    raise RuntimeError("the library is built from the whole repository: make a wheel there")
