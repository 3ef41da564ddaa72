"""The package in real processes. THERMALLOC_LIB and THERMALLOC_TOOL name the library and the tool, where
they are not found by themselves.
"""

import glob
import json
import os
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def python(*arguments, cwd=None):
    environment = dict(os.environ, PYTHONPATH=ROOT)
    environment.pop("LD_PRELOAD", None)
    environment.pop("THERMALLOC_CONF", None)
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment, cwd=cwd, capture_output=True, text=True, timeout=120, check=False,
    )


class Tests(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def script(self, text):
        path = os.path.join(self.folder.name, "script.py")
        with open(path, "w") as file:
            file.write(text)
        return path

    def test_run_passes_on_arguments_and_the_exit_code(self):
        script = self.script("import sys, thermalloc; print(thermalloc.loaded(), sys.argv[1:]); sys.exit(7)")
        done = python("-m", "thermalloc", "run", script, "a", "--exact")
        self.assertEqual((done.returncode, done.stdout), (7, "True ['a', '--exact']\n"), done.stderr)

    def test_scopes_and_the_difference(self):
        script = self.script(
            "import thermalloc, json\n"
            "with thermalloc.profile(keep='dumps') as p:\n"
            "    with thermalloc.scope('weights:table'):\n"
            "        table = bytearray(5 << 20)\n"
            "    @thermalloc.scope('kv_cache')\n"
            "    def fill(): return bytearray(3 << 20)\n"
            "    cache = fill()\n"
            "    thermalloc.step(4)\n"
            "s = p.summary()\n"
            "assert '<table>' in s._repr_html_() and 'weights' in str(s)\n"
            "print(json.dumps(s.changes))\n"
        )
        done = python("-m", "thermalloc", "prof", "-o", "p", "--conf", "lg_prof_sample:12", script, cwd=self.folder.name)
        self.assertEqual(done.returncode, 0, done.stderr)
        changes = json.loads(done.stdout)
        self.assertEqual(changes["weights"]["after_bytes"], (5 << 20) + 1)
        self.assertEqual(changes["kv_cache"]["after_bytes"], (3 << 20) + 1)
        self.assertEqual(changes["weights"]["before_bytes"], 0)
        logs = glob.glob(os.path.join(self.folder.name, "p.*.thlog"))
        self.assertEqual(len(logs), 1)

    def test_a_block_is_marked_later(self):
        script = self.script(
            "import thermalloc, ctypes\n"
            "block = (ctypes.c_char * (4 << 20))()\n"
            "assert thermalloc.mark(ctypes.addressof(block), 'weights:late')\n"
            "thermalloc.dump('d.thprof')\n"
            "r = thermalloc.report('report', 'd.thprof')\n"
            "print([row['live_bytes'] for row in r['components'] if row['component'] == 'weights'])\n"
        )
        done = python("-m", "thermalloc", "prof", "--no-events", script, cwd=self.folder.name)
        self.assertEqual((done.returncode, done.stdout), (0, f"[{float(4 << 20)}]\n"), done.stderr)

    def test_without_the_allocator_scopes_do_nothing_and_dumps_say_why(self):
        script = self.script(
            "import thermalloc\n"
            "with thermalloc.scope('weights'): x = 1\n"
            "assert not thermalloc.loaded() and not thermalloc.mark(0, 'weights')\n"
            "try: thermalloc.dump('d')\n"
            "except thermalloc.ProfileError as e: print('python -m thermalloc prof' in str(e))\n"
        )
        done = python(script)
        self.assertEqual(done.stdout, "True\n", done.stderr)


if __name__ == "__main__":
    unittest.main()
