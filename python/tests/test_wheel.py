"""The wheel: built from this tree, installed into an environment of its own, used from there."""

import importlib.util
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import elf_needs
import thermalloc
from thermalloc import _library

SCRIPT = """
import sys, thermalloc
with thermalloc.profile() as p:
    with thermalloc.scope("weights"):
        table = bytearray(6 << 20)
print(p.summary().changes["weights"]["after_bytes"])
print(thermalloc.__file__, thermalloc.library(), thermalloc.tool(), sep="\\n")
"""


# What a thread allocates is of the scope that it was created in.
THREADS = """
import threading, thermalloc
made = []
with thermalloc.scope("kv_cache"):
    thread = threading.Thread(target=lambda: made.append(bytearray(7 << 20)))
    thread.start()
thread.join()
thermalloc.dump("threads.thprof")
rows = thermalloc.report("report", "threads.thprof")["components"]
print([row["live_bytes"] for row in rows if row["component"] == "kv_cache"])
"""


class Tags(unittest.TestCase):
    def test_what_this_interpreter_needs_is_what_readelf_says(self):
        with open(sys.executable, "rb") as file:
            libraries, versions = elf_needs.read(file.read())
        if shutil.which("readelf") is None:
            self.skipTest("no readelf")
        said = subprocess.run(["readelf", "-dVW", sys.executable], capture_output=True, text=True, check=True).stdout
        self.assertEqual(libraries, set(re.findall(r"\(NEEDED\).*\[(.*)\]", said)))
        needs = said.partition(".gnu.version_r")[2]
        self.assertEqual(versions, set(re.findall(r"Name: (\S+)  Flags", needs)))
        self.assertTrue(any(version.startswith("GLIBC_2.") for version in versions), versions)

    def test_the_newest_version_decides_and_a_strange_library_forbids(self):
        def tag(*files):
            with mock.patch.object(elf_needs, "read", lambda file: file):
                return elf_needs.platform_tag(files, "x86_64")

        c = {"libc.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}
        old, new = (c, {"GLIBC_2.2.5", "GCC_3.0"}), (c, {"GLIBC_2.9", "GLIBC_2.35"})
        self.assertEqual(tag(old), "manylinux_2_17_x86_64")
        self.assertEqual(tag(old, new), "manylinux_2_35_x86_64")
        for strange in ({"libc.musl-x86_64.so.1"}, c | {"libtorch.so"}, c | {"libstdc++.so.6"}):
            self.assertEqual(tag(new, (strange, set())), "linux_x86_64")
        self.assertEqual(tag((c, {"GLIBC_PRIVATE"})), "linux_x86_64")
        with self.assertRaises(ValueError):
            elf_needs.read(b"#!/bin/sh\n")


class Tests(unittest.TestCase):
    def run_it(self, *command, **more):
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("THERMALLOC", "PYTHON", "LD_"))}
        done = subprocess.run(
            [str(part) for part in command],
            env=dict(keep, **more), cwd=self.folder, capture_output=True, text=True, timeout=250, check=False,
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def test_built_installed_and_used(self):
        for needed in ("pip", "venv", "ensurepip"):
            if importlib.util.find_spec(needed) is None:
                self.skipTest(f"{sys.executable} has no {needed}")
        try:
            library, threads, tool = thermalloc.library(), _library.threads(), thermalloc.tool()
        except FileNotFoundError as missing:
            self.skipTest(str(missing))
        if tool is None:
            self.skipTest("no thermalloc tool")
        with tempfile.TemporaryDirectory() as self.folder:
            build = os.path.join(self.folder, "build")
            os.mkdir(build)
            os.symlink(library, os.path.join(build, "libthermalloc.so"))
            os.symlink(threads, os.path.join(build, "libthermalloc_threads.so"))
            os.symlink(tool, os.path.join(build, "thermalloc"))
            self.run_it(
                sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "-w", "wheels", ROOT,
                THERMALLOC_BUILD=build,
            )
            (wheel,) = os.listdir(os.path.join(self.folder, "wheels"))
            contents = [pathlib.Path(path).read_bytes() for path in (library, threads, tool)]
            self.assertIn(elf_needs.platform_tag(contents, platform.machine()), wheel)
            self.run_it(sys.executable, "-m", "venv", "venv")
            python = os.path.join(self.folder, "venv", "bin", "python")
            self.run_it(python, "-m", "pip", "install", "--no-index", os.path.join("wheels", wheel))
            for name, text in (("script.py", SCRIPT), ("threads.py", THREADS)):
                with open(os.path.join(self.folder, name), "w") as file:
                    file.write(text)
            said = self.run_it(python, "-m", "thermalloc", "prof", "--no-events", "script.py").splitlines()
            self.assertEqual(float(said[0]), (6 << 20) + 1)
            inside = os.path.join(self.folder, "venv", "lib")
            self.assertTrue(all(path.startswith(inside) for path in said[1:]), said)
            for more, told in (([], "[]\n"), (["--inherit-scopes"], f"[{float((7 << 20) + 1)}]\n")):
                command = [python, "-m", "thermalloc", "prof", "--no-events", "--conf", "lg_prof_sample:40", *more, "threads.py"]
                self.assertEqual(self.run_it(*command), told)
            loaded = self.run_it(os.path.join(self.folder, "venv", "bin", "thermalloc-python"), "run", "-m", "this")
            self.assertIn("Namespaces", loaded)
            self.run_it(python, "-m", "pip", "uninstall", "-y", "thermalloc")
            self.assertFalse(os.path.exists(said[2]))


if __name__ == "__main__":
    unittest.main()
