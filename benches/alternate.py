#!/usr/bin/env python3
"""Runs a workload of frameworks with the profiler off and on by turns within one process: for overhead.py --within.

  alternate.py PAIRS SECONDS PROGRAM [ARGUMENT...]

PROGRAM hands its steps to `common.measure`, which is replaced here: a phase is some whole cycles of steps, of about
SECONDS, and its cost the process's CPU time for a step. One JSON line: [[off, on, seconds off, seconds on], ...].
"""
import ctypes
import gc
import json
import os
import resource
import runpy
import sys
import time


def switch(on):
    """`prof.active`: a thread notices when it has allocated 2 MiB more."""
    state = ctypes.c_bool(on)
    failed = ctypes.CDLL(None).mallctl(b"prof.active", None, None, ctypes.byref(state), ctypes.c_size_t(1))
    if failed:
        sys.exit(f"prof.active: {os.strerror(failed)}")


def phase(steps, cycles):
    """CPU seconds and seconds of a step."""
    r0, t0 = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for _ in range(cycles):
        for step in steps:
            step()
    r1, t1 = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    n = cycles * len(steps)
    return (r1.ru_utime + r1.ru_stime - r0.ru_utime - r0.ru_stime) / n, (t1 - t0) / n


def measure(pairs, phase_s):
    def measured(args, steps, name, extra=None, items_per_cycle=None):
        end = time.perf_counter() + args.warmup
        while time.perf_counter() < end:
            _, seconds = phase(steps, 1)
        gc.collect()
        gc.disable()
        cycles = max(1, round(phase_s / (seconds * len(steps))))
        rows = []
        for pair in range(pairs):
            found = {}
            for on in (False, True) if pair % 2 else (True, False):
                switch(on)
                found[on] = phase(steps, cycles)
            rows.append([found[False][0], found[True][0], found[False][1], found[True][1]])
        print(json.dumps(rows), flush=True)
        os._exit(0)
    return measured


def main():
    pairs, phase_s, program, sys.argv = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[3:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(program)))
    import common
    common.measure = measure(pairs, phase_s)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
