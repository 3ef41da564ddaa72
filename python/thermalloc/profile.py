"""Profiles of this process, and what they say."""

import json
import os
import subprocess
import tempfile

from . import _library


class ProfileError(RuntimeError):
    """There is no profile, or nothing that reads it."""


def dump(path):
    """Writes what the ledger holds to a file."""
    if not _library.loaded():
        raise ProfileError("this process does not run on thermalloc: use python -m thermalloc prof")
    failed = _library.call("thermalloc_prof_dump", os.fsencode(path))
    if failed:
        hint = " (the profiler is off: python -m thermalloc prof)" if failed != 11 else ""
        raise ProfileError(f"{path}: {os.strerror(failed)}{hint}")
    return path


def report(kind, *paths, **options):
    """A report of the command-line tool, as JSON says it: report("rss", "a.thprof", top=5)."""
    tool = _library.tool()
    if tool is None:
        raise ProfileError("no thermalloc tool on the PATH: name it by THERMALLOC_TOOL")
    command = [tool, "prof", kind, "--json", *map(str, paths)]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    # The tool itself needs no profile.
    environment = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "THERMALLOC_CONF")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ProfileError(done.stderr.strip())
    return json.loads(done.stdout)


def _size(number):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024 or unit == "GiB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024


class Summary:
    """What changed between two dumps, for people: as text, and as a table in notebooks."""

    def __init__(self, changes, sites, after):
        self.changes, self.sites, self.after = changes, sites, after

    def _rows(self):
        for name, row in self.changes.items():
            change = row["after_bytes"] - row["before_bytes"]
            yield name, _size(row["before_bytes"]), _size(row["after_bytes"]), _size(change)

    def __str__(self):
        rows = [("component", "before", "after", "change"), *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
        for site in self.sites[:5]:
            change = site["bytes"]["after_bytes"] - site["bytes"]["before_bytes"]
            lines.append(f"{_size(change):>12}  {' < '.join(site['stack'][:4])}")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self):
        from html import escape

        def row(cells, tag="td"):
            return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        head = row(("component", "before", "after", "change"), "th")
        return f"<table>{head}{''.join(row(cells) for cells in self._rows())}</table>"


class profile:
    """What a piece of code leaves behind.

    >>> with profile() as p:
    ...     kept = [bytearray(100_000) for _ in range(100)]
    >>> print(p.summary())
    """

    def __init__(self, keep=None):
        """keep: a folder for the two dumps, which are otherwise removed with this object."""
        self._temporary = None if keep else tempfile.TemporaryDirectory(prefix="thermalloc-")
        folder = keep or self._temporary.name
        os.makedirs(folder, exist_ok=True)
        self.before = os.path.join(folder, "before.thprof")
        self.after = os.path.join(folder, "after.thprof")

    def __enter__(self):
        dump(self.before)
        return self

    def __exit__(self, *_):
        dump(self.after)

    def summary(self):
        """The difference by component, and the call sites that changed most."""
        both = report("compare", self.before, self.after)
        return Summary(both["components"], both["sites"], self.after)

    def leaks(self):
        """Call sites that grew and kept what they allocated."""
        return report("leaks", self.before, self.after)["leaks"]

    def _repr_html_(self):
        return self.summary()._repr_html_()
