#!/usr/bin/env python3
"""Measures allocators side by side: primitives, scenarios, memory, real programs. See README.md.

Runs are interleaved: in each round every allocator has its turn, in a turning order, so that a machine that
slows down slows all of them. Tables show medians; the raw rows go to results/.
"""
import argparse
import csv
import json
import pathlib
import statistics
import subprocess

import programs
import scenarios
import verdict
from common import ALLOCATORS, HERE, NEWEST, Results, bare, build, came_from, chosen, is_ours, markdown, measured, medians, read, rounds, say, unique

# scenario: (arguments of --quick, the figure that counts)
MEMORY_CASES = {
    "idle_threads": (["--threads", "100", "--settle-ms", "100"], "beyond_kib_per_thread"),
    "consumer": (["--gib", "1"], "peak_mib"),
    "quiet": (["--mb", "50", "--seconds", "1"], "percent_of_peak"),
    "period": (["--mib", "50", "--period-ms", "300"], "faults_per_round"),
    "shrink": (["--high-mib", "256", "--low-mib", "50", "--early-s", "1", "--late-s", "2"], "late_over_live"),
}


# primitives

PRIMITIVES = ["round", "allocator", "library", "pattern", "size", "threads", "ops", "cpu_ns", "wall_ns"]


def primitives(a):
    exe, allocators = build()["primitives"], chosen(a, None)
    options = [x for flag in ("patterns", "sizes", "threads") if getattr(a, flag) for x in (f"--{flag}", getattr(a, flag))]
    listed = subprocess.run([exe, "--list", *options], check=True, stdout=subprocess.PIPE, text=True).stdout
    cases = [(r["pattern"], r["size"], r["threads"]) for r in csv.DictReader(listed.splitlines())]
    results = Results(a, PRIMITIVES, allocators)
    say(f"{len(cases)} cases, {len(allocators)} allocators, {a.rounds} rounds: about "
        f"{len(cases) * len(allocators) * a.rounds * (a.measure_ms + 80) / 60000:.0f} minutes")
    for case in cases:
        for r, name in rounds(a, allocators):
            pattern, size, threads = case
            # A process a case: what an earlier case left in the caches cannot help or hurt a later one.
            out = measured([exe, "--label", name, "--patterns", pattern, "--sizes", size, "--threads", threads,
                            "--measure-ms", str(a.measure_ms)], allocators[name], 60)
            for row in csv.DictReader((out or "").splitlines()):
                row["library"] = came_from(row["library"], allocators[name][0])
                results.add(round=r, **row)
        say(*case, "done")
    primitives_table(results.rows, a)
    say("raw rows in", results.path)


def primitives_table(rows, a):
    column = a.column or "cpu_ns"
    m = medians(rows, lambda r: (r["pattern"], r["size"], r["threads"], r["allocator"]), column)
    names = unique(k[3] for k in m)
    names.sort(key=lambda n: n == "ours")
    peers, table, ratios = [n for n in names if n != "ours"], [], []
    for case in unique(k[:3] for k in m):
        values = {n: m.get((*case, n)) for n in names}
        row = [*case, *(bare(values[n]) or "failed" for n in names)]
        if "ours" in names and any(values[n] for n in peers):
            best = min((n for n in peers if values[n]), key=values.get)
            ratio = values["ours"] / values[best] if values["ours"] else None
            ratios += [ratio] if ratio else []
            row += [best, bare(ratio)]
        table.append(row)
    print(f"\n{column} an operation (a malloc and its free; a realloc), medians\n")
    markdown(["pattern", "size", "threads", *names, *(["best peer", "ours / best"] if ratios else [])], table)
    if ratios:
        print(f"\nours / best peer: geometric mean {statistics.geometric_mean(ratios):.2f}, worst {max(ratios):.2f}, "
              f"best of all in {sum(r <= 1 for r in ratios)} of {len(ratios)} cases")


# memory

MEMORY = ["round", "allocator", "library", "scenario", "figure", "value"]


def memory(a):
    exes, allocators = build(), chosen(a, None)
    results = Results(a, MEMORY, allocators)
    for scenario, (quick, _) in MEMORY_CASES.items():
        if a.only and scenario not in a.only.split(","):
            continue
        for r, name in rounds(a, allocators):
            out = measured([exes[scenario], *(quick if a.quick else [])], allocators[name], 300)
            if out is None:
                continue
            say(name, out.strip())
            line = json.loads(out)
            library = came_from(line.pop("library"), allocators[name][0])
            for figure, value in line.items():
                if figure != "scenario":
                    results.add(round=r, allocator=name, library=library, scenario=scenario, figure=figure, value=value)
    memory_table(results.rows, a)
    say("raw rows in", results.path)


def memory_table(rows, a):
    m = medians(rows, lambda r: (r["scenario"], r["allocator"], r["figure"]), "value")
    for scenario in unique(k[0] for k in m):
        figures = unique(k[2] for k in m if k[0] == scenario)
        counts = MEMORY_CASES[scenario][1]
        names = sorted(unique(k[1] for k in m if k[0] == scenario), key=lambda n: m[scenario, n, counts])
        print(f"\n### {scenario}\n")
        markdown(["allocator", *(f"**{f}**" if f == counts else f for f in figures)],
                 [[n, *(bare(m[scenario, n, f]) for f in figures)] for n in names])


# programs

PROGRAMS = ["round", "program", "allocator", "exit", "wall", "user", "sys", "peak_kib", "faults", "check", "error"]


def real(a):
    exes, allocators = build(), chosen(a, NEWEST)
    results = Results(a, PROGRAMS, allocators)
    for kind in programs.ALL:
        if a.only and kind.__name__ not in a.only.split(","):
            continue
        program = kind(exes["measure"], pathlib.Path(a.work).resolve(), 0.1 if a.quick else 1)
        if program.missing:
            say(f"{program.name} is left out: no {', '.join(program.missing)}")
            continue
        for r, name in rounds(a, allocators):
            try:
                row = program.run(*allocators[name])
            except programs.Failed as e:
                row = {"exit": 1, "error": str(e)}
            results.add(round=r, program=program.name, allocator=name, **row)
            say(program.name, name, row)
    programs_table(results.rows, a)
    say("raw rows in", results.path)


def states(rows):
    """allocator: same, or how many runs failed or gave another output than the first allocator's."""
    names = unique(r["allocator"] for r in rows)
    wanted = next((r["check"] for r in rows if r["allocator"] == names[0] and r.get("check")), None)
    found = {}
    for n in names:
        runs = [r for r in rows if r["allocator"] == n]
        failed = sum(bool(r.get("error")) for r in runs)
        differ = sum(r.get("check") not in (wanted, "", None) for r in runs)
        found[n] = f"{failed} failed" if failed else f"{differ} differ" if differ else "same"
    return found


def with_sums(rows):
    for row in rows:
        if row.get("wall") not in ("", None):
            row["cpu"], row["peak_mib"] = float(row["user"]) + float(row["sys"]), int(row["peak_kib"]) / 1024
    return rows


def programs_table(rows, a):
    names = sorted(unique(r["allocator"] for r in rows), key=is_ours)
    ours, peers = [n for n in names if is_ours(n)], [n for n in names if not is_ours(n)]
    table = []
    for program in unique(r["program"] for r in with_sums(rows)):
        mine = [r for r in rows if r["program"] == program]
        odd = [f"{n} {s}" for n, s in states(mine).items() if s != "same"]
        for figure in ("wall", "cpu", "peak_mib"):
            m = medians(mine, lambda r: r["allocator"], figure)
            best = min((p for p in peers if m.get(p)), key=m.get, default=None)
            ratios = [bare(m[o] / m[best]) if best and m.get(o) else "" for o in ours]
            table.append([program, figure, *(bare(m.get(n)) for n in names), best or "", *ratios, ", ".join(odd) or "same"])
    print()
    markdown(["program", "figure", *names, "best peer", *(f"{o} / best" for o in ours), "output"], table)


def table(a):
    for path in a.files:
        rows = read(path)
        if rows:
            if "extra_kib" in rows[0]:
                scenarios.tables(rows, a.column)
            else:
                kind = primitives_table if "cpu_ns" in rows[0] else memory_table if "scenario" in rows[0] else programs_table
                kind(rows, a)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = p.add_subparsers(dest="what", required=True)

    def command(name, function, rounds, text):
        s = sub.add_parser(name, help=text)
        s.set_defaults(run=function)
        s.add_argument("--lib", help="our library, named ours in the tables")
        s.add_argument("--add", action="append", default=[], metavar="NAME=LIBRARY[,VARIABLE=VALUE...]", help="one more allocator")
        s.add_argument("--allocators", help="which peers, with commas; of " + ",".join(ALLOCATORS))
        s.add_argument("--rounds", type=int, default=rounds)
        s.add_argument("--out", help="the raw CSV; benches/results/NAME.csv unless given")
        return s

    s = command("primitives", primitives, 5, "ns per malloc and free in small patterns")
    s.add_argument("--patterns", help="pair,lifo,fifo,random,cross,aligned,calloc,realloc")
    s.add_argument("--sizes", help="bytes, with commas; also for the patterns that have sizes of their own")
    s.add_argument("--threads", help="with commas; 1,2,16 unless given")
    s.add_argument("--measure-ms", type=int, default=150)
    s.add_argument("--column", choices=["cpu_ns", "wall_ns"])
    s = command("scenarios", scenarios.run, 5, "whole workloads of a fixed amount of work: time, CPU time, peak, faults")
    s.add_argument("--only", help="names with commas, with or without the number of threads: larson,tensors-16")
    s.add_argument("--quick", action="store_true", help="a fiftieth of the work: a check that all works, no figures")
    s.add_argument("--scale", type=float, help="amount of work; 1 unless given")
    s.add_argument("--timeout", type=float, default=120, help="seconds for one run, after which it failed")
    s.add_argument("--column", choices=list(scenarios.FIGURES), help="only this table")
    s = command("memory", memory, 3, "resident size in four scenarios")
    s.add_argument("--only", help=",".join(MEMORY_CASES))
    s.add_argument("--quick", action="store_true", help="small and short: a check that all works, no figures")
    s = command("programs", real, 5, "real programs: time, CPU time, peak resident size")
    s.add_argument("--only", help=",".join(k.__name__ for k in programs.ALL))
    s.add_argument("--quick", action="store_true", help="a tenth of the work")
    s.add_argument("--work", default=HERE / "target/programs", help="folder for generated inputs")
    s = sub.add_parser("table", help="print the table of raw CSV files again")
    s.add_argument("files", nargs="+")
    s.add_argument("--column", help="cpu_ns or wall_ns of primitives; " + ", ".join(scenarios.FIGURES) + " of scenarios")
    s.set_defaults(run=table)
    verdict.arguments(sub)
    a = p.parse_args()
    a.run(a)


if __name__ == "__main__":
    main()
