"""The wheel: built from this tree, installed into an environment of its own, used from there."""

import importlib.util
import os
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import thermalloc

SCRIPT = """
import sys, thermalloc
with thermalloc.profile() as p:
    with thermalloc.scope("weights"):
        table = bytearray(6 << 20)
print(p.summary().changes["weights"]["after_bytes"])
print(thermalloc.__file__, thermalloc.library(), thermalloc.tool(), sep="\\n")
"""


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
            library, tool = thermalloc.library(), thermalloc.tool()
        except FileNotFoundError as missing:
            self.skipTest(str(missing))
        if tool is None:
            self.skipTest("no thermalloc tool")
        with tempfile.TemporaryDirectory() as self.folder:
            build = os.path.join(self.folder, "build")
            os.mkdir(build)
            os.symlink(library, os.path.join(build, "libthermalloc.so"))
            os.symlink(tool, os.path.join(build, "thermalloc"))
            self.run_it(
                sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "-w", "wheels", ROOT,
                THERMALLOC_BUILD=build,
            )
            (wheel,) = os.listdir(os.path.join(self.folder, "wheels"))
            self.run_it(sys.executable, "-m", "venv", "venv")
            python = os.path.join(self.folder, "venv", "bin", "python")
            self.run_it(python, "-m", "pip", "install", "--no-index", os.path.join("wheels", wheel))
            script = os.path.join(self.folder, "script.py")
            with open(script, "w") as file:
                file.write(SCRIPT)
            said = self.run_it(python, "-m", "thermalloc", "prof", "--no-events", "script.py").splitlines()
            self.assertEqual(float(said[0]), (6 << 20) + 1)
            inside = os.path.join(self.folder, "venv", "lib")
            self.assertTrue(all(path.startswith(inside) for path in said[1:]), said)
            loaded = self.run_it(os.path.join(self.folder, "venv", "bin", "thermalloc-python"), "run", "-m", "this")
            self.assertIn("Namespaces", loaded)
            self.run_it(python, "-m", "pip", "uninstall", "-y", "thermalloc")
            self.assertFalse(os.path.exists(said[2]))


if __name__ == "__main__":
    unittest.main()
