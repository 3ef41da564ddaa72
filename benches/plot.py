#!/usr/bin/env python3
"""Draws docs/chart.svg and writes a section of docs/compare.md from the raw rows in results/.

The chart: time and peak resident size over all scenarios, each as the geometric mean of the ratio to glibc, and what is
left resident after quiet. The section stands between two marks; the rest of docs/compare.md is left alone.
"""
import argparse
import contextlib
import html
import io
import pathlib
import statistics

import run
import scenarios
from common import HERE, NEWEST, geomean, read, unique

NAMES = {"ours": "thermalloc", "jemalloc-new": "jemalloc", "mimalloc3": "mimalloc 3", "tcmalloc": "tcmalloc (Google)"}
BAR, GAP, LABEL, WIDTH, PANEL = 20, 8, 130, 130, 330
START, END = "<!-- allocators: written by benches/plot.py -->", "<!-- end of allocators -->"


def over_all_scenarios(rows, column):
    """allocator: geometric mean of its ratio to glibc, over the scenarios that all of them ended."""
    m = scenarios.table_of(rows, column)
    names = shown(rows)
    ended = [s for s in unique(r["scenario"] for r in rows) if all((s, n) in m for n in names)]
    return {n: geomean(m[s, n] / m[s, "glibc"] for s in ended) for n in names}, len(ended)


def shown(rows):
    return [n for n in unique(r["allocator"] for r in rows) if n in (*NEWEST.split(","), "ours")]


def quiet(rows):
    """Median of the resident size 8 s after everything was freed, per cent of the peak, by allocator."""
    values = {}
    for r in rows:
        if (r["scenario"], r["figure"]) == ("quiet", "percent_of_peak") and r["allocator"] in shown(rows):
            values.setdefault(r["allocator"], []).append(float(r["value"]))
    return {a: statistics.median(v) for a, v in values.items()}


def panel(x, title, unit, values):
    top, out = max(values.values()), [f'<text x="{x}" y="22" class="t">{html.escape(title)}</text>']
    for i, (name, value) in enumerate(sorted(values.items(), key=lambda kv: kv[1])):
        y = 38 + i * (BAR + GAP)
        kind = "o" if name == "ours" else "p"
        out.append(f'<text x="{x + LABEL - 8}" y="{y + 15}" class="n">{html.escape(NAMES.get(name, name))}</text>')
        out.append(f'<rect x="{x + LABEL}" y="{y}" width="{max(value / top * WIDTH, 1):.1f}" height="{BAR}" class="{kind}"/>')
        out.append(f'<text x="{x + LABEL + value / top * WIDTH + 6:.1f}" y="{y + 15}" class="v">{value:.3g}{unit}</text>')
    return out, 38 + len(values) * (BAR + GAP)


def draw(path, panels):
    drawn = [panel(10 + i * PANEL, *p) for i, p in enumerate(panels)]
    height, width = max(h for _, h in drawn) + 8, len(panels) * PANEL
    style = ("text{font:13px sans-serif;fill:#333}.t{font-weight:bold}.n{text-anchor:end}.o{fill:#d9480f}.p{fill:#adb5bd}"
             "@media(prefers-color-scheme:dark){text{fill:#ddd}}")
    lines = [line for out, _ in drawn for line in out]
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
                    f"<style>{style}</style>\n" + "\n".join(lines) + "\n</svg>\n")


def notes(path):
    """The comments at the head of a CSV file: machine, versions, rounds, date."""
    with open(path) as f:
        return [line[1:].strip() for line in f if line.startswith("#")]


def measured(path):
    for note in notes(path):
        print(f"\nMeasured {note}.")


def section(a):
    """The tables, with every row: also those that are lost."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        print("## Allocators side by side\n")
        print("Medians of interleaved rounds, each allocator with its defaults, by preload; what each row does and how to measure it again: "
              "[benches](../benches/README.md). A ratio below 1.00 means that thermalloc (`ours`) needs less than the best of the others.")
        measured(a.scenarios)
        rows = read(a.scenarios)
        for figure in ("wall_ms", "peak_kib", "extra_kib"):
            scenarios.one_table(rows, figure)
        options = argparse.Namespace(column="cpu_ns")
        if a.primitives.exists():
            print("\n### malloc and free in small patterns, one thread; across threads, two")
            measured(a.primitives)
            run.primitives_table([r for r in read(a.primitives) if r["threads"] == ("2" if r["pattern"] == "cross" else "1")], options)
        if a.programs.exists():
            print("\n### Real programs")
            measured(a.programs)
            run.programs_table(read(a.programs), options)
    return text.getvalue().strip()


def put(path, text):
    """Replaces what is between the marks; appends it with marks where there are none."""
    old = path.read_text() if path.exists() else "# thermalloc and the others\n"
    before, mark, rest = old.partition(START)
    after = rest.partition(END)[2] if mark else "\n"
    path.write_text(f"{before if mark else old.rstrip() + chr(10) * 2}{START}\n{text}\n{END}{after}")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("scenarios", "primitives", "programs", "memory"):
        p.add_argument(f"--{name}", type=pathlib.Path, default=HERE / f"results/{name}.csv")
    p.add_argument("--docs", type=pathlib.Path, default=HERE.parent / "docs", help="where chart.svg and compare.md are")
    a = p.parse_args()
    if not a.scenarios.exists():
        p.error(f"no {a.scenarios}: ./run.py scenarios makes it")
    if any("QUICK" in note for note in notes(a.scenarios)) and a.docs == p.get_default("docs"):
        p.error(f"{a.scenarios} is from --quick, no measurement: --docs FOLDER shows what it would look like")
    rows = read(a.scenarios)
    time, n = over_all_scenarios(rows, "wall_ms")
    peak, _ = over_all_scenarios(rows, "peak_kib")
    panels = [(f"time, {n} scenarios, glibc = 1", "", time), ("peak resident size, glibc = 1", "", peak)]
    left = quiet(read(a.memory)) if a.memory.exists() else {}
    if left:
        panels.append(("resident 8 s after all was freed", " %", left))
    draw(a.docs / "chart.svg", panels)
    put(a.docs / "compare.md", section(a))


if __name__ == "__main__":
    main()
