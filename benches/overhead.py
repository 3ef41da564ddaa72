#!/usr/bin/env python3
"""What the profiler costs: pairs of runs with it off and on, in turning order, and the median of their ratios.

  overhead.py --lib libthermalloc.so loop redis                   20 pairs of each
  overhead.py --lib libthermalloc.so tf_transformer-fn yolo-ort   workloads of --workloads-dir
  overhead.py --lib libthermalloc.so -- python3 program.py        any command, by its CPU time
  overhead.py ... --within                                        turns of one process, by prof.active
  overhead.py ... --null                                          off against off: what the machine itself does

Two runs of a program differ by more than the profiler costs: where its pages lie, what the machine does meanwhile. So
with --within a pair is two phases of one process, one after the other, with records switched off and on; what is left
out is only what prof:true costs where nothing is recorded (tests/fast_path.golden: not one instruction). What the
budget of samples saves up while records are off it spends while they are on, so a program at its budget shows up to
twice the cost that it has when they are always on.

The interval is that of the sign test (order statistics of the ratios, no assumption on how they are spread),
and a bootstrap's beside it. --samples explains the result from below: samples a second at the default
period, times what one costs. That cost is measured where there are so many that they show.
"""
import argparse
import csv
import json
import math
import os
import pathlib
import random
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time

from programs import clean_env

HERE = pathlib.Path(__file__).resolve().parent
ON = "prof:true"
# The kind of record that a figure of the allocator is.
STAT = 17
# So many samples that their cost stands out.
DENSE = "prof:true,lg_prof_sample:13,prof_budget:0"

LOOP = r"""
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
/* Nothing but malloc and free: 16 to 2063 bytes, 512 blocks at a time. With a second argument so many pairs of
   phases, off and on by turns, and what each took. */
int mallctl(const char *, void *, size_t *, void *, size_t) __attribute__((weak));
static void *ring[512];
static double run(unsigned long n) {
  static unsigned long state = 1;
  struct timespec t;
  for (unsigned long i = 0; i < n; i++) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    void **slot = &ring[state >> 55];
    free(*slot);
    *slot = malloc(16 + (state >> 33) % 2048 * ((state >> 50 & 7) == 0) + (state >> 40) % 128);
  }
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}
int main(int argc, char **argv) {
  unsigned long n = strtoul(argv[1], 0, 10), pairs = argc > 2 ? strtoul(argv[2], 0, 10) : 0;
  double before = run(n);
  for (unsigned long i = 0; i < 2 * pairs; i++) {
    _Bool on = i & 1 ^ i >> 1 & 1;
    if (!mallctl || mallctl("prof.active", 0, 0, &on, sizeof on)) return 1;
    double now = run(n);
    printf("%d %.6f\n", on, now - before);
    before = now;
  }
}
"""

# Another program's records are switched by a signal.
SWITCH = r"""
#include <signal.h>
#include <stddef.h>
int mallctl(const char *, void *, size_t *, void *, size_t);
static void set(int signal) {
  _Bool on = signal == SIGUSR2;
  mallctl("prof.active", 0, 0, &on, sizeof on);
}
__attribute__((constructor)) static void begin(void) { signal(SIGUSR1, set), signal(SIGUSR2, set); }
"""


class Failed(Exception):
    pass


def environment(lib, conf):
    env = clean_env()
    env.update(LD_PRELOAD=lib, THERMALLOC_CONF=conf, PYTHONHASHSEED="0", TBB_ENABLE_SANITIZERS="1")
    return env


def finished(process, what, timeout):
    """CPU seconds of a process and all that it waited for, and its output."""
    deadline = time.monotonic() + timeout
    while True:
        pid, status, used = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        if time.monotonic() > deadline:
            process.kill()
            raise Failed(f"{what}: no end after {timeout} s")
        time.sleep(0.002)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise Failed(f"{what}: exit {process.returncode}")
    return used.ru_utime + used.ru_stime


class Command:
    """Any program; its cost is its CPU time."""

    def __init__(self, a, argv):
        self.name, self.argv, self.timeout = pathlib.Path(argv[0]).name, argv, a.timeout

    def cost(self, env):
        with tempfile.TemporaryDirectory() as tmp, open(os.path.join(tmp, "err"), "w+") as err:
            process = subprocess.Popen(self.argv, env={**env, "TMPDIR": tmp}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=err)
            return finished(process, self.name, self.timeout)


class Loop(Command):
    """A loop of malloc and free alone."""

    def __init__(self, a):
        source, exe = a.scratch / "loop.c", a.scratch / "loop"
        source.write_text(LOOP)
        subprocess.run(["gcc", "-O2", "-fno-builtin", "-o", exe, source], check=True)
        super().__init__(a, [str(exe), str(round(500e6 * a.scale))])
        self.name = "loop"

    def within(self, a, env):
        run = subprocess.run([*self.argv[:1], str(round(50e6 * a.scale)), str(a.pairs)], env=env, stdout=subprocess.PIPE, text=True,
                             timeout=self.timeout * 10, check=True)
        phases = [(int(on), float(cost)) for on, cost in map(str.split, run.stdout.splitlines())]
        return [[dict(two)[0], dict(two)[1]] for two in zip(phases[::2], phases[1::2])]


class Redis:
    """redis-server under its benchmark; its cost is the server's CPU time for a fixed number of requests."""

    name = "redis"
    port = 7391

    def __init__(self, a):
        self.requests, self.timeout = round(250_000 * a.scale), a.timeout

    def cost(self, env):
        with tempfile.TemporaryDirectory() as tmp:
            server = self.start(env, tmp)
            try:
                self.work(self.requests)
            finally:
                self.client("redis-cli", "shutdown", "nosave")
            return finished(server, "redis-server", self.timeout)

    def within(self, a, env):
        source, library = a.scratch / "switch.c", a.scratch / "switch.so"
        source.write_text(SWITCH)
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
        rows = []
        with tempfile.TemporaryDirectory() as tmp:
            server = self.start({**env, "LD_PRELOAD": f"{env['LD_PRELOAD']}:{library}"}, tmp)
            try:
                self.work(self.requests)
                for pair in range(a.pairs):
                    found = {}
                    for on in (False, True) if pair % 2 else (True, False):
                        server.send_signal(signal.SIGUSR2 if on else signal.SIGUSR1)
                        before = cpu_ns(server.pid)
                        self.work(self.requests // 2)
                        found[on] = (cpu_ns(server.pid) - before) / 1e9
                    rows.append([found[False], found[True]])
            finally:
                self.client("redis-cli", "shutdown", "nosave")
            finished(server, "redis-server", self.timeout)
        return rows

    def start(self, env, tmp):
        server = subprocess.Popen(["redis-server", "--port", str(self.port), "--save", "", "--appendonly", "no", "--dir", tmp],
                                  env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(200):
            if self.client("redis-cli", "ping").stdout.strip() == b"PONG":
                return server
            time.sleep(0.02)
        server.kill()
        raise Failed("redis-server: no answer")

    def work(self, requests):
        run = self.client("redis-benchmark", "-q", "-n", str(requests), "-r", "100000", "-d", "200", "-c", "20", "-P", "8",
                          "-t", "set,get,lpush,lpop,sadd,hset")
        if run.returncode:
            raise Failed(f"redis-benchmark: exit {run.returncode}")

    def client(self, program, *arguments):
        return subprocess.run([program, "-p", str(self.port), *arguments], env=clean_env(), stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=self.timeout)


class Workload:
    """A workload of a framework; its cost is the CPU time of a step, or with --wall the time of one."""

    def __init__(self, a, name):
        sys.path.insert(0, str(a.workloads_dir))
        import run as workloads
        if name not in workloads.WORKLOADS:
            sys.exit(f"overhead.py: {name}: not known: have loop, redis, {', '.join(workloads.WORKLOADS)}")
        self.name, self.timeout, self.wall = name, a.timeout, a.wall
        seconds = [str(x) for x in ("--seconds", 3 * a.scale, "--warmup", 1.5 * a.scale)]
        self.argv = workloads.command(name, pathlib.Path(a.venvs), seconds)

    def cost(self, env):
        with tempfile.TemporaryDirectory() as tmp:
            run = subprocess.run(self.argv, env={**env, "TMPDIR": tmp}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE, timeout=self.timeout, text=True)
        lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
        if run.returncode or not lines:
            raise Failed(f"{self.name}: exit {run.returncode}: {run.stderr[-300:]}")
        said = json.loads(lines[-1])
        return 1 / said["steps_per_s"] if self.wall else (said["user"] + said["sys"]) / said["steps"]

    def within(self, a, env):
        python, *program = self.argv
        with tempfile.TemporaryDirectory() as tmp:
            run = subprocess.run([python, str(HERE / "alternate.py"), str(a.pairs), str(a.phase_s), *program], env={**env, "TMPDIR": tmp},
                                 stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=self.timeout * 10, text=True)
        lines = [line for line in run.stdout.splitlines() if line.startswith("[[")]
        if run.returncode or not lines:
            raise Failed(f"{self.name}: exit {run.returncode}: {run.stderr[-300:]}")
        return [row[2:] if self.wall else row[:2] for row in json.loads(lines[-1])]


def cpu_ns(pid):
    """CPU time of a process's threads so far."""
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/schedstat") as f:
            total += int(f.read().split()[0])
    return total


def sign_interval(ratios, level=0.95):
    """The narrowest interval of order statistics that has the median in it with at least this probability; what
    probability that is. None where there are too few."""
    n, ratios = len(ratios), sorted(ratios)
    outside = [2 * sum(math.comb(n, j) for j in range(k)) / 2 ** n for k in range(n // 2 + 1)]
    ks = [k for k in range(1, n // 2 + 1) if outside[k] <= 1 - level]
    if not ks:
        return None
    return ratios[ks[-1] - 1], ratios[n - ks[-1]], 1 - outside[ks[-1]]


def bootstrap_interval(ratios, level=0.95, times=4000):
    chance = random.Random(1)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(times))
    edge = round((1 - level) / 2 * times)
    return medians[edge], medians[-edge - 1]


def percent(ratio):
    return f"{(ratio - 1) * 100:+.2f} %"


def pairs(a, workload, off, on, rows):
    """Ratios of on to off, each of two runs one after the other."""
    ratios = []
    for pair in range(a.pairs):
        order = [("off", off), ("on", on)][::-1 if pair % 2 else 1]
        try:
            cost = {which: workload.cost(env) for which, env in order}
        except (Failed, subprocess.TimeoutExpired) as why:
            print(f"{workload.name}: pair {pair} is left out: {why}", file=sys.stderr)
            continue
        ratios.append(cost["on"] / cost["off"])
        rows.append(dict(workload=workload.name, pair=pair, first=order[0][0], off=cost["off"], on=cost["on"]))
        print(f"{workload.name}: pair {pair}: {cost['off']:.4f} off, {cost['on']:.4f} on, {percent(ratios[-1])}", file=sys.stderr, flush=True)
    return ratios


def turns(a, workload, env, rows):
    """Ratios of on to off, each of two phases of a process, from as many processes as asked for."""
    ratios = []
    for process in range(a.processes):
        try:
            found = workload.within(a, env)
        except (Failed, subprocess.SubprocessError) as why:
            print(f"{workload.name}: process {process} is left out: {why}", file=sys.stderr)
            continue
        ratios += [on / off for off, on in found]
        rows += [dict(workload=workload.name, process=process, pair=pair, off=off, on=on) for pair, (off, on) in enumerate(found)]
        print(f"{workload.name}: process {process}: {percent(statistics.median(ratios[-len(found):]))}", file=sys.stderr, flush=True)
    return ratios


def tell(workload, ratios):
    if not ratios:
        return print(f"{workload.name}: no pair was measured")
    low, high = bootstrap_interval(ratios)
    line = f"{workload.name}: {percent(statistics.median(ratios))} (median of {len(ratios)} pairs"
    sign = sign_interval(ratios)
    if sign:
        line += f"; {percent(sign[0])} to {percent(sign[1])} by signs, {sign[2] * 100:.1f} %"
    print(f"{line}; {percent(low)} to {percent(high)} by bootstrap)", flush=True)


def recorded(folder):
    """Blocks that the profiler recorded in the process of the folder that has most: by its last dump, or by its
    statistics page, which stays where a program leaves without its exit functions."""
    counts = [figures(p.read_bytes(), 0).get("prof_blocks", 0) for p in folder.glob("*.thprof")]
    for page in folder.glob("page.*"):
        data = page.read_bytes()
        # prof-format/src/page.rs: the word after the magic counts the states; each second one is in the second half.
        odd = struct.unpack_from("<Q", data, 8)[0] & 1
        counts.append(figures(data, 4096 + odd * (len(data) - 4096) // 2).get("prof_blocks", 0))
    return max(counts, default=0)


def figures(data, at):
    """The figures of the allocator in a dump (docs/profile-format.md), by name."""
    found = {}
    while data[at:at + 6] == b"THPROF":
        stop = at + 24 + struct.unpack_from("<I", data, at + 8)[0]
        at += 24
        while at < stop:
            kind, words, tail = struct.unpack_from("<HHI", data, at)
            if kind == STAT:
                padded = (tail + 7) // 8 * 8
                name = data[at + words * 8 - padded:][:tail].decode()
                found[name] = struct.unpack_from("<Q", data, at + 8)[0]
            at += words * 8
    return found


def samples(a, workload, off):
    """Samples of a run at the default period and what one costs, and so what they cost together."""
    def run(conf):
        with tempfile.TemporaryDirectory(dir=a.scratch) as folder:
            began = time.monotonic()
            files = f"prof_final:true,prof_prefix:{folder}/p,stats_page:{folder}/page.%p"
            cost = workload.cost(environment(a.lib, f"{conf},{files}"))
            return cost, recorded(pathlib.Path(folder)), time.monotonic() - began

    _, n, seconds = run(ON)
    text = f"{workload.name}: {n} samples in {seconds:.1f} s, {n / seconds:.0f} a second"
    if isinstance(workload, Workload):
        each = a.sample_ns * 1e-9
        return print(f"{text}; at {a.sample_ns} ns each {n / seconds * each * 100:.3f} % of a CPU", flush=True)
    plain = statistics.median(workload.cost(off) for _ in range(3))
    dense = [run(DENSE) for _ in range(3)]
    each = statistics.median((cost - plain) / max(n, 1) for cost, n, _ in dense)
    print(f"{text}; of {dense[0][1]} one costs {each * 1e9:.0f} ns of CPU: {n * each / plain * 100:.3f} % of its {plain:.2f} s", flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--lib", required=True, help="libthermalloc.so")
    p.add_argument("--pairs", type=int, default=20)
    p.add_argument("--on", default=ON, help="options of the run that is compared (default: %(default)s)")
    p.add_argument("--off", default="", help="options of the run that it is compared with")
    p.add_argument("--within", action="store_true", help="pairs are turns of one process")
    p.add_argument("--processes", type=int, default=3, help="--within: so many processes (default: %(default)s)")
    p.add_argument("--phase-s", type=float, default=0.5, help="--within: length of a framework's phase, s (default: %(default)s)")
    p.add_argument("--null", action="store_true", help="compare off with off")
    p.add_argument("--samples", action="store_true", help="count samples and measure one, in place of pairs")
    p.add_argument("--sample-ns", type=float, default=1700, help="frameworks: what a sample costs (default: %(default)s, redis's)")
    p.add_argument("--scale", type=float, default=1, help="length of a run; 1 is two to five seconds")
    p.add_argument("--wall", action="store_true", help="frameworks: the time of a step in place of its CPU time")
    p.add_argument("--timeout", type=float, default=120)
    p.add_argument("--out", help="write raw rows to this CSV")
    p.add_argument("--workloads-dir", type=pathlib.Path, default=HERE / "../../shared/workloads", help="folder with the workloads' run.py")
    p.add_argument("--venvs", default=os.path.join(os.environ.get("ALLOCBENCH_DIR", "allocbench"), "venv"), help="their virtual environments")
    p.add_argument("workloads", nargs="*", help="loop, redis, names of workloads; or -- and a command")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    a = p.parse_args(sys.argv[1:split])
    command = sys.argv[split + 1:]
    if a.within and command:
        p.error("--within: a command can't be switched")
    a.lib, a.workloads_dir = os.path.abspath(a.lib), a.workloads_dir.resolve()
    off = environment(a.lib, a.off)
    on = dict(off) if a.null else environment(a.lib, a.on)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        a.scratch = pathlib.Path(scratch)
        makers = {"loop": Loop, "redis": Redis}
        chosen = [makers[name](a) if name in makers else Workload(a, name) for name in a.workloads]
        chosen += [Command(a, command)] if command else []
        if not chosen:
            p.error("no workload")
        for workload in chosen:
            if a.within:
                tell(workload, turns(a, workload, on, rows))
                continue
            if not a.samples:
                tell(workload, pairs(a, workload, off, on, rows))
                continue
            try:
                samples(a, workload, off)
            except (Failed, subprocess.TimeoutExpired) as why:
                print(f"{workload.name}: {why}")
    if a.out and rows:
        with open(a.out, "w", newline="") as f:
            writer = csv.DictWriter(f, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
