"""What the runners share: which allocators there are, interleaved rounds, raw rows, tables."""
import collections
import csv
import glob
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

import json
import programs

HERE = pathlib.Path(__file__).resolve().parent
PEERS = HERE / "target/peers"
SYSTEM = "/usr/lib/*-linux-gnu/"
# name: (library or a pattern for it, environment). Debian's packages, then what peers/build.sh makes.
ALLOCATORS = {
    "glibc": ("", {}),
    "jemalloc": (SYSTEM + "libjemalloc.so.2", {}),
    "gperftools": (SYSTEM + "libtcmalloc_minimal.so.4", {}),
    "mimalloc2": (SYSTEM + "libmimalloc.so.2", {}),
    "jemalloc-new": (str(PEERS / "libjemalloc.so"), {}),
    "mimalloc3": (str(PEERS / "libmimalloc.so"), {}),
    "snmalloc": (str(PEERS / "libsnmalloc.so"), {}),
    # Its per-CPU mode needs rseq to itself, which glibc would have registered.
    "tcmalloc": (str(PEERS / "libtcmalloc.so"), {"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}),
}
# The newest of each, which a reader would choose from.
NEWEST = "glibc,jemalloc-new,mimalloc3,snmalloc,tcmalloc"


def say(*what):
    print(time.strftime("%H:%M:%S"), *what, file=sys.stderr, flush=True)


def build():
    """Builds the measuring programs; returns where they are."""
    out = subprocess.run(["cargo", "build", "--release", "--locked", "--message-format=json-render-diagnostics"], cwd=HERE,
                         check=True, stdout=subprocess.PIPE, text=True).stdout
    exes = [json.loads(line).get("executable") for line in out.splitlines()]
    return {pathlib.Path(e).name: e for e in exes if e}


def chosen(a, default):
    """name: (library, environment), in the order asked for; what is not installed is left out, aloud."""
    known = dict(ALLOCATORS)
    for extra in a.add:
        name, _, rest = extra.partition("=")
        lib, *pairs = rest.split(",")
        known[name] = (lib, dict(p.split("=", 1) for p in pairs))
    if a.lib:
        known["ours"] = (a.lib, {})
    names = (a.allocators or default or ",".join(known)).split(",")
    names += [n for n in known if n not in names and n not in ALLOCATORS]
    found = {}
    for name in names:
        if name not in known:
            sys.exit(f"run.py: allocator {name}: not known: have {', '.join(known)}")
        lib, env = known[name]
        paths = sorted(glob.glob(lib))
        if lib and not paths:
            say(f"{name} is left out: no {lib} (see README.md)")
            continue
        found[name] = (os.path.abspath(paths[0]) if lib else "", env)
    return found


def rounds(a, allocators):
    """(round, allocator) pairs, each round beginning with another allocator."""
    names = list(allocators)
    for r in range(a.rounds):
        for name in names[r % len(names):] + names[:r % len(names)]:
            yield r, name


class Failed(Exception):
    """A measuring program under an allocator crashed, or found no end."""


def run_measured(argv, allocator, timeout):
    """Standard output of a measuring program under an allocator."""
    lib, env = allocator
    env = {**programs.clean_env(), **env, **({"LD_PRELOAD": lib} if lib else {})}
    try:
        run = subprocess.run(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", timeout=timeout)
    except subprocess.TimeoutExpired:
        raise Failed(f"no end after {timeout} s")
    if run.returncode:
        raise Failed(f"exit {run.returncode}: " + " / ".join(run.stderr.strip().splitlines()[-3:]))
    return run.stdout


def measured(argv, allocator, timeout):
    """The same, or None where it failed, aloud."""
    try:
        return run_measured(argv, allocator, timeout)
    except Failed as e:
        return say(e, *argv, allocator[0])


def came_from(library, lib):
    """The name of the library that malloc came from, once that is the one preloaded."""
    if lib and not os.path.samefile(library, lib):
        sys.exit(f"run.py: malloc came from {library}, not {lib}: was the preload ignored?")
    if not lib and not os.path.basename(library).startswith("libc."):
        sys.exit(f"run.py: malloc came from {library}, not from the C library")
    return os.path.basename(library)


def versions(allocators):
    """What is known of the versions of the allocators that are measured."""
    found = []
    text = PEERS / "versions"
    if text.exists():
        for line in text.read_text().splitlines():
            package, version = line.split()
            # A crate's version names upstream's behind the plus, where it has one: -gHASH, -NUMBER cut off.
            found.append(f"{package} {version.split('-0-g')[0]}")
    for name, package in {"jemalloc": "libjemalloc2", "gperftools": "libtcmalloc-minimal4", "mimalloc2": "libmimalloc2.0"}.items():
        if name in allocators:
            query = subprocess.run(["dpkg-query", "-W", "-f", "${Package} ${Version}", package], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            found += [query.stdout] if query.stdout else []
    if any(name.startswith("ours") for name in allocators):
        commit = subprocess.run(["git", "-C", HERE, "rev-parse", "--short", "HEAD"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        found.append(f"thermalloc {commit.stdout.strip() or 'of no known commit'}")
    return ", ".join(found)


class Results:
    """Raw rows, written as they come. The first line says what machine it was, what was measured, how often."""

    def __init__(self, a, columns, allocators):
        quick = getattr(a, "quick", False)
        default = HERE / (f"target/quick/{a.what}.csv" if quick else f"results/{a.what}.csv")
        self.path = pathlib.Path(a.out or default)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.columns, self.rows, self.file = columns, [], open(self.path, "w", newline="")
        with open("/sys/kernel/mm/transparent_hugepage/enabled") as f:
            thp = f.read().split("[")[1].split("]")[0]
        with open("/proc/cpuinfo") as f:
            cpu = next((line.split(": ")[1].strip() for line in f if line.startswith("model name")), platform.machine())
        self.file.write(f"# {time.strftime('%Y-%m-%d')}; {cpu}, {os.cpu_count()} CPUs; Linux {platform.release().split('-')[0]}; "
                        f"{' '.join(platform.libc_ver())}; THP {thp}; load {os.getloadavg()[0]:.1f} at the start; {a.rounds} rounds; "
                        f"{versions(allocators)}{'; QUICK, no measurement' if quick else ''}\n")
        csv.writer(self.file).writerow(columns)

    def add(self, **row):
        self.rows.append(row)
        csv.DictWriter(self.file, self.columns).writerow(row)
        self.file.flush()


def read(path):
    with open(path) as f:
        lines = [line for line in f if not line.startswith("#")]
    return list(csv.DictReader(lines))


def medians(rows, key, value, middle=statistics.median):
    """key(row) -> median of value, rows in the order in which they first came."""
    groups = collections.OrderedDict()
    for row in rows:
        if row.get(value) not in ("", None):
            groups.setdefault(key(row), []).append(float(row[value]))
    return collections.OrderedDict((k, middle(v)) for k, v in groups.items())


def unique(items):
    return list(dict.fromkeys(items))


def is_ours(name):
    return name.split("-")[0] == "ours"


def geomean(values):
    values = list(values)
    return statistics.geometric_mean(values) if values else None


def markdown(head, rows, file=None):
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head), file=file)
    for row in rows:
        print("| " + " | ".join(str(c) for c in row) + " |", file=file)


def bare(number):
    return "" if number is None else f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"
