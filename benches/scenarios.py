"""`run.py scenarios`: workloads of a fixed amount of work, so that time is the figure; and their tables."""
import json
import subprocess

from common import NEWEST, Failed, Results, bare, build, came_from, chosen, geomean, is_ours, markdown, medians, rounds, run_measured, say, unique

COLUMNS = ["round", "allocator", "library", "scenario", "ops", "wall_ms", "user_ms", "sys_ms", "faults", "peak_kib", "end_kib", "extra_kib", "error"]
# column: (title, unit)
FIGURES = {
    "wall_ms": ("time, ms (of the work, without the sleeps in tensors-gaps)", 1),
    "cpu_ms": ("CPU time, user + system, ms", 1),
    "peak_kib": ("peak resident, MiB", 1024),
    "end_kib": ("resident at the end, all blocks freed a moment ago, MiB", 1024),
    "faults": ("minor faults, thousands", 1000),
    "sys_ms": ("system time, ms", 1),
    "extra_kib": ("resident less live bytes and stacks, MiB", 1024),
}
RATIOS = ("wall_ms", "cpu_ms", "peak_kib")


def run(a):
    exe, allocators = build()["scenario"], chosen(a, NEWEST)
    scale = a.scale or (0.02 if a.quick else 1)
    listed = subprocess.run([exe, "--list"], check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    only = a.only.split(",") if a.only else []
    wanted = [s for s in listed if not only or any(s == o or s.rsplit("-", 1)[0] == o for o in only)]
    results = Results(a, COLUMNS, allocators)
    for scenario in wanted:
        for r, name in rounds(a, allocators):
            row = {"round": r, "allocator": name, "scenario": scenario}
            try:
                line = json.loads(run_measured([exe, scenario, "--scale", str(scale)], allocators[name], a.timeout))
                line["library"] = came_from(line["library"], allocators[name][0])
                results.add(**row, **{k: v for k, v in line.items() if k in COLUMNS and k not in row})
            except Failed as e:
                results.add(**row, error=str(e))
                say(scenario, name, "failed:", e)
        say(scenario, "done")
    tables(results.rows, a.column)
    say("raw rows in", results.path)


def with_cpu(rows):
    for row in rows:
        if row.get("user_ms") not in ("", None):
            row["cpu_ms"] = float(row["user_ms"]) + float(row["sys_ms"])
    return rows


def table_of(rows, column, middle=None):
    """{(scenario, allocator): median}; a scenario that ever failed under an allocator is not in it."""
    failed = {(r["scenario"], r["allocator"]) for r in rows if r.get("error")}
    m = medians(with_cpu(rows), lambda r: (r["scenario"], r["allocator"]), column, *([middle] if middle else []))
    return {k: v for k, v in m.items() if k not in failed}


def names_of(rows):
    return sorted(unique(r["allocator"] for r in rows), key=is_ours)


def best_peer(m, scenario, peers):
    have = [p for p in peers if (scenario, p) in m]
    return min(have, key=lambda p: m[scenario, p]) if have else None


def ratios(m, ours, against):
    """scenario: ours / against's, where both ended."""
    return {s: m[s, ours] / m[s, against] for s, n in m if n == ours and m.get((s, against))}


def tables(rows, column=None, file=None):
    for figure in [column] if column else ["wall_ms", "cpu_ms", "peak_kib", "end_kib", "faults", "extra_kib"]:
        one_table(rows, figure, file)


def one_table(rows, column, file=None):
    title, unit = FIGURES[column]
    m, low, high = (table_of(rows, column, f) for f in (None, min, max))
    if not m:
        return
    names = names_of(rows)
    mine, peers = [n for n in names if is_ours(n)], [n for n in names if not is_ours(n)]
    compared = column in RATIOS and mine and peers
    body = []
    for scenario in unique(r["scenario"] for r in rows):
        if column == "extra_kib" and not any(k[0] == scenario for k in m):
            continue
        cells = []
        for n in names:
            k = (scenario, n)
            spread = f" ({bare(low[k] / unit)}-{bare(high[k] / unit)})" if k in m and low[k] != high[k] else ""
            cells.append(bare(m[k] / unit) + spread if k in m else "failed")
        best = best_peer(m, scenario, peers)
        extra = [best or "", *(bare(m[scenario, n] / m[scenario, best]) if best and (scenario, n) in m else "" for n in mine)] if compared else []
        body.append([scenario, *cells, *extra])
    print(f"\n### {title}; medians (min-max)\n", file=file)
    markdown(["scenario", *names, *(["best peer", *(f"{n} / best" for n in mine)] if compared else [])], body, file)
    for n in mine if compared else []:
        to_best = [m[s, n] / m[s, best_peer(m, s, peers)] for s, x in m if x == n and best_peer(m, s, peers)]
        means = ", ".join(f"{p} {bare(geomean(ratios(m, n, p).values()))}" for p in peers if ratios(m, n, p))
        print(f"\n{n}: geometric mean to the best peer {bare(geomean(to_best))}, worst {bare(max(to_best, default=None))}, first in "
              f"{sum(x <= 1 for x in to_best)} of {len(to_best)}; to each peer: {means}", file=file)
