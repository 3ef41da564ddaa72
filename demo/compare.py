#!/usr/bin/env python3
"""Runs real programs on the system allocator and on a preloaded one, turn about, and prints
medians: wall and CPU seconds, minor faults, peak resident size, and resident size after a quiet
spell. Stops where an output or an exit code differs.

usage: compare.py LIBRARY [--rounds N]
"""
import argparse
import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SYSTEM, OURS = "system", "preloaded"
QUIET_STEPS, QUIET_SECONDS = 10, 8
COLUMNS = ("wall s", "CPU s", "minor faults", "peak MiB")


def die(what):
    sys.exit(f"compare.py: {what}")


def environment(allocator, library):
    env = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "GLIBC_TUNABLES")}
    env["PYTHONHASHSEED"] = "0"
    if allocator == OURS:
        env["LD_PRELOAD"] = library
    return env


def check_preload(library):
    """The loader goes on without a library that it cannot load; such a run would compare nothing."""
    code = "print(open('/proc/self/maps').read())"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=environment(OURS, library), capture_output=True, text=True)
    if run.returncode or library not in run.stdout:
        die(f"{library} was not loaded: exit code {run.returncode}: {run.stderr.strip()[-300:]}")


def programs(folder):
    """Name, command, and the file that it writes if its output is not on stdout."""
    python = [sys.executable]
    found = [("image pipeline", python + [str(HERE / "pipeline.py")], None)]
    compiler = shutil.which("g++")
    if compiler:
        target = str(Path(folder) / "templates.o")
        flags = ["-std=c++17", "-O2", "-c", "-o", target, str(HERE / "templates.cpp")]
        found.append(("g++ -O2", [compiler] + flags, target))
    try:
        import sqlite3  # noqa: F401  (some builds of Python lack it)

        found.append(("sqlite", python + [str(HERE / "database.py")], None))
    except ImportError:
        print("this Python has no sqlite3 module: that program is left out")
    return found


def measure(command, target, env, folder):
    """One run: its figures, and a digest of what it put out."""
    output = Path(folder) / "stdout"
    if target:
        Path(target).unlink(missing_ok=True)
    with open(output, "wb") as stdout:
        start = time.monotonic()
        child = subprocess.Popen(command, stdout=stdout, stdin=subprocess.DEVNULL, env=env)
        _, status, usage = os.wait4(child.pid, 0)
        wall = time.monotonic() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        die(f"exit code {child.returncode}: LD_PRELOAD={env.get('LD_PRELOAD', '')} {' '.join(command)}")
    digest = hashlib.sha256(Path(target or output).read_bytes()).hexdigest()
    figures = (wall, usage.ru_utime + usage.ru_stime, usage.ru_minflt, usage.ru_maxrss / 1024)
    return figures, digest


def in_turn(rounds):
    """Which allocator runs when: each is first as often as the other."""
    return [order for i in range(rounds) for order in ((SYSTEM, OURS) if i % 2 == 0 else (OURS, SYSTEM))]


def compare(name, command, target, library, rounds, folder):
    runs = {SYSTEM: [], OURS: []}
    digests = set()
    for allocator in in_turn(rounds):
        figures, digest = measure(command, target, environment(allocator, library), folder)
        runs[allocator].append(figures)
        digests.add(digest)
    if len(digests) != 1:
        die(f"{name}: the output differs between runs")
    return {a: [statistics.median(column) for column in zip(*runs[a])] for a in runs}


def quiet(library, rounds):
    """MiB resident after the pipeline has ended and its process has slept. The work is done one
    after the other, the sleeping together."""
    command = [sys.executable, str(HERE / "pipeline.py")]
    command += ["--steps", str(QUIET_STEPS), "--quiet", str(QUIET_SECONDS)]
    sleeping = []
    for allocator in in_turn(rounds):
        env = environment(allocator, library)
        child = subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True)
        sleeping.append((allocator, child, child.stdout.readline()))
    if len({digest for _, _, digest in sleeping}) != 1:
        die("image pipeline: the output differs between runs")
    sizes = {SYSTEM: [], OURS: []}
    for allocator, child, _ in sleeping:
        text = child.communicate()[0]
        if child.returncode:
            die(f"image pipeline on {allocator}: exit code {child.returncode}")
        sizes[allocator].append(int(text) / 1024)
    return {a: statistics.median(sizes[a]) for a in sizes}


def name_of(library):
    """thermalloc, of .../libthermalloc.so.0"""
    return Path(library).name.removeprefix("lib").split(".so")[0]


def row(name, allocator, cells):
    print(f"{name:<16} {allocator:<16}" + "".join(f"{cell:>14}" for cell in cells), flush=True)


def show(name, medians, ours):
    for allocator, (wall, cpu, faults, peak) in medians.items():
        label = ours if allocator == OURS else allocator
        row(name, label, (f"{wall:.2f}", f"{cpu:.2f}", f"{faults:,.0f}", f"{peak:.1f}"))
    row("", "ratio", (f"{o / s:.2f}" for o, s in zip(medians[OURS], medians[SYSTEM])))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", help="path of libthermalloc.so")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    library = os.path.realpath(args.library)
    check_preload(library)
    ours = name_of(args.library)
    print(f"medians of {args.rounds}, in turn; ratio: {ours} / system, below 1 is less")
    row("program", "allocator", COLUMNS)
    with tempfile.TemporaryDirectory() as folder:
        for name, command, target in programs(folder):
            show(name, compare(name, command, target, library, args.rounds, folder), ours)
    after = quiet(library, args.rounds)
    print(
        f"image pipeline, resident after {QUIET_SECONDS} s of quiet: "
        f"system {after[SYSTEM]:.1f} MiB, {ours} {after[OURS]:.1f} MiB, "
        f"ratio {after[OURS] / after[SYSTEM]:.2f}"
    )
    print("outputs and exit codes are the same on both")


if __name__ == "__main__":
    main()
