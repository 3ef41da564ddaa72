"""`run.py verdict`: the figures that thermalloc has set itself, from the raw rows of all runs. Nothing is measured here."""
import pathlib
import statistics

import scenarios
from common import HERE, bare, geomean, is_ours, markdown, medians, read, unique

# Of the peers, those that give memory back and are chosen for it.
LEAN = ("jemalloc", "jemalloc-new", "mimalloc3", "tcmalloc")
SMALLEST, LARGEST = 16, 2 << 20
# What one more thread may cost before memory counts as depending on their number.
KIB_A_THREAD = 8


def arguments(sub):
    s = sub.add_parser("verdict", help="the figures thermalloc has set itself, from the raw rows")
    s.add_argument("--scenarios", type=pathlib.Path, default=HERE / "results/scenarios.csv")
    s.add_argument("--primitives", type=pathlib.Path, default=HERE / "results/primitives.csv")
    s.add_argument("--programs", type=pathlib.Path, default=HERE / "results/programs.csv")
    s.add_argument("--golden", type=pathlib.Path, default=HERE.parent / "tests/fast_path.golden")
    s.add_argument("--name", default="ours", help="the row that is judged")
    s.add_argument("--column", default="wall_ms", choices=["wall_ms", "cpu_ms"], help="the time of a scenario")
    s.set_defaults(run=run)


class Verdict:
    def __init__(self):
        self.rows = []

    def at_most(self, what, figure, bound, note=""):
        met = "not measured" if figure is None else "yes" if figure <= bound else "NO"
        self.rows.append([what, bare(figure), f"at most {bare(bound)}", met, note])


def run(a):
    v = Verdict()
    for judge, path in ((of_scenarios, a.scenarios), (of_programs, a.programs), (of_primitives, a.primitives), (of_golden, a.golden)):
        if path.exists():
            judge(v, a, path)
        else:
            v.rows.append([f"all of {path.name}", "", "", "not measured", ""])
    markdown(["what", "figure", "wanted", "met", "where"], v.rows)
    missed = sum(r[3] != "yes" for r in v.rows)
    print(f"\n{len(v.rows) - missed} of {len(v.rows)} met")


def above(ratios, bound):
    return ", ".join(f"{k} {bare(r)}" for k, r in sorted(ratios.items(), key=lambda kr: -kr[1]) if r > bound)


def of_scenarios(v, a, path):
    rows = read(path)
    peers = [n for n in scenarios.names_of(rows) if not is_ours(n)]
    names = unique(r["scenario"] for r in rows)
    time, peak, extra = (scenarios.table_of(rows, c) for c in (a.column, "peak_kib", "extra_kib"))
    lost = [s for s in names if (s, a.name) not in time]
    v.at_most("scenarios that failed or are missing", float(len(lost)), 0, ", ".join(lost))

    best = {s: time[s, a.name] / time[s, p] for s in names if (s, a.name) in time and (p := scenarios.best_peer(time, s, peers))}
    v.at_most("time to the best peer of each scenario, geometric mean", geomean(best.values()), 1.0, f"{len(best)} scenarios")
    v.at_most("time to the best peer, worst scenario", max(best.values(), default=None), 1.10, above(best, 1.10))
    for p in peers:
        r = scenarios.ratios(time, a.name, p)
        v.at_most(f"time to {p}, geometric mean", geomean(r.values()), 0.95, f"{len(r)} scenarios")

    lean = {p: geomean(peak[s, p] for s in names if (s, p) in peak) for p in peers if p in LEAN}
    if lean:
        p = min(lean, key=lean.get)
        v.at_most(f"peak resident to the leanest peer ({p}), geometric mean", geomean(scenarios.ratios(peak, a.name, p).values()), 1.0)
    median = {s: peak[s, a.name] / statistics.median(m) for s in names if (s, a.name) in peak and (m := [peak[s, p] for p in peers if (s, p) in peak])}
    v.at_most("peak resident to the median peer, worst scenario", max(median.values(), default=None), 1.25, above(median, 1.25))

    ops = medians(rows, lambda r: (r["scenario"], r["allocator"]), "ops")
    each = {s: time[s, a.name] / ops[s, a.name] for s in ("oversub-2", "oversub-16", "oversub-64") if (s, a.name) in time}
    for s in ("oversub-16", "oversub-64"):
        both = s in each and "oversub-2" in each
        v.at_most(f"time an operation of {s} to oversub-2", each[s] / each["oversub-2"] if both else None, 1.05)
    few, many = extra.get(("oversub-2", a.name)), extra.get(("oversub-64", a.name))
    both = few is not None and many is not None
    v.at_most("resident less live bytes and stacks, KiB for each thread from 2 to 64", (many - few) / 62 if both else None, KIB_A_THREAD,
              f"{bare(few / 1024)} to {bare(many / 1024)} MiB" if both else "")


def of_programs(v, a, path):
    rows = read(path)
    m = medians([r for r in rows if not r.get("error")], lambda r: (r["program"], r["allocator"]), "wall")
    peers = [n for n in unique(k[1] for k in m) if not is_ours(n)]
    best = {p: m[p, a.name] / min(have) for p in unique(k[0] for k in m)
            if (p, a.name) in m and (have := [m[p, n] for n in peers if (p, n) in m])}
    v.at_most("real programs, time to the best peer, geometric mean", geomean(best.values()), 1.0, f"{len(best)} programs, against {', '.join(peers)}")
    v.at_most("real programs, time to the best peer, worst", max(best.values(), default=None), 1.10, above(best, 1.10))
    failed = unique(r["program"] for r in rows if r["allocator"] == a.name and r.get("error"))
    v.at_most("real programs that failed", float(len(failed)), 0, ", ".join(failed))


def of_primitives(v, a, path):
    rows = [r for r in read(path) if SMALLEST <= int(r["size"]) <= LARGEST]
    m = medians(rows, lambda r: (r["pattern"], int(r["size"]), int(r["threads"]), r["allocator"]), "cpu_ns")
    peers = [n for n in unique(k[3] for k in m) if not is_ours(n)]

    def against_best(wanted):
        found = {}
        for case in unique(k[:3] for k in m if wanted(*k[:3])):
            have = [m[*case, p] for p in peers if (*case, p) in m]
            if (*case, a.name) in m and have:
                found["{} {} B x{}".format(*case)] = m[*case, a.name] / min(have)
        return found

    for pattern in ("pair", "lifo", "fifo"):
        r = against_best(lambda p, size, threads: p == pattern and threads == 1)
        v.at_most(f"{pattern}, to the fastest peer, worst size", max(r.values(), default=None), 1.15, above(r, 1.15))
        sizes = {k[1] for k in m if k[0] == pattern and k[2] == 1 and k[3] == a.name}
        if LARGEST not in sizes or SMALLEST not in sizes:
            v.rows.append([f"{pattern}, sizes from {SMALLEST} B to 2 MiB", "", "", "not measured", f"have {min(sizes, default=0)} to {max(sizes, default=0)} B"])
    r = against_best(lambda p, size, threads: p in ("pair", "lifo", "fifo") and threads == 1)
    v.at_most("immediate and batch patterns, to the fastest peer, geometric mean", geomean(r.values()), 1.0, f"{len(r)} cases")
    r = against_best(lambda p, size, threads: p == "cross")
    v.at_most("cross-thread, to the best peer, worst case", max(r.values(), default=None), 1.0, above(r, 1.0))


def of_golden(v, a, path):
    counts = {}
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            way, case, _, _, both = line.split()
            counts[way, case] = float(both)
    for way, name, bound in (("rseq", "restartable sequences", 46), ("cache", "the thread cache", 38)):
        v.at_most(f"instructions of malloc + free of 64 B, {name}", counts.get((way, "pair_64")), bound)
        v.at_most(f"the same with free_sized, {name}", counts.get((way, "sized_64")), counts.get((way, "pair_64"), bound) - 1, "fewer than with free")
