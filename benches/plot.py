#!/usr/bin/env python3
"""Draws docs/chart.svg from the raw rows in results/: time of malloc and free, and what is left resident after quiet."""
import csv
import html
import pathlib
import statistics

HERE = pathlib.Path(__file__).resolve().parent
RESULTS, CHART = HERE / "results", HERE.parent / "docs" / "chart.svg"
NAMES = {"ours": "thermalloc", "jemalloc-new": "jemalloc 5.3.1", "mimalloc3": "mimalloc 3.3", "tcmalloc": "tcmalloc (Google)",
         "gperftools": "tcmalloc (gperftools)"}
BAR, GAP, LABEL, WIDTH, PANEL = 20, 8, 150, 230, 470


def rows(name):
    with open(RESULTS / name, newline="") as f:
        return list(csv.DictReader(line for line in f if not line.startswith("#")))


def times():
    """Geometric mean over all cases of the median CPU time of an operation, nanoseconds, by allocator."""
    cases = {}
    for r in rows("primitives.csv"):
        cases.setdefault(r["allocator"], {}).setdefault((r["pattern"], r["size"], r["threads"]), []).append(float(r["cpu_ns"]))
    return {a: statistics.geometric_mean(statistics.median(v) for v in c.values()) for a, c in cases.items()}


def quiet():
    """Median of the resident size 8 s after everything was freed, per cent of the peak, by allocator."""
    values = {}
    for r in rows("memory.csv"):
        if (r["scenario"], r["figure"]) == ("quiet", "percent_of_peak"):
            values.setdefault(r["allocator"], []).append(float(r["value"]))
    return {a: statistics.median(v) for a, v in values.items()}


def panel(x, title, unit, values):
    top, out = max(values.values()), [f'<text x="{x}" y="22" class="t">{html.escape(title)}</text>']
    for i, (name, value) in enumerate(sorted(values.items(), key=lambda kv: kv[1])):
        y = 38 + i * (BAR + GAP)
        kind = "o" if name == "ours" else "p"
        out.append(f'<text x="{x + LABEL - 8}" y="{y + 15}" class="n">{html.escape(NAMES.get(name, name))}</text>')
        out.append(f'<rect x="{x + LABEL}" y="{y}" width="{max(value / top * WIDTH, 1):.1f}" height="{BAR}" class="{kind}"/>')
        out.append(f'<text x="{x + LABEL + value / top * WIDTH + 6:.1f}" y="{y + 15}" class="v">{value:.3g} {unit}</text>')
    return out, 38 + len(values) * (BAR + GAP)


def main():
    left, h1 = panel(10, "malloc + free, CPU time (less is better)", "ns", times())
    right, h2 = panel(10 + PANEL, "resident 8 s after all was freed (less is better)", "%", quiet())
    height = max(h1, h2) + 8
    style = ("text{font:13px sans-serif;fill:#333}.t{font-weight:bold}.n{text-anchor:end}.o{fill:#d9480f}.p{fill:#adb5bd}"
             "@media(prefers-color-scheme:dark){text{fill:#ddd}}")
    CHART.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * PANEL} {height}" width="{2 * PANEL}" height="{height}">'
                     f"<style>{style}</style>\n" + "\n".join(left + right) + "\n</svg>\n")


if __name__ == "__main__":
    main()
