//! `scenario NAME-THREADS [--scale F]`: one workload on the process's malloc, a fixed amount of work from fixed
//! seeds, so that time is the figure. One JSON line.
//!
//! The workloads follow the published descriptions of the programs that allocators are usually compared with;
//! the code is our own. What the programs' Rust collections ask for comes from the same malloc.

mod graph;
mod handoff;
mod large;
mod live;
mod number;
mod server;
mod sharing;
mod threads;

use std::time::Duration;
use thermalloc_benches::proc::{self, Usage};
use thermalloc_benches::{Json, now, option};

/// How a workload is run.
struct Case {
    threads: usize,
    scale: f64,
}

impl Case {
    /// A share of `n`, at least 1.
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a count, scaled by a positive number"
    )]
    fn times(&self, n: usize) -> usize {
        ((n as f64 * self.scale) as usize).max(1)
    }
}

/// What a workload says of itself beyond what the process used.
#[derive(Default)]
struct Outcome {
    /// Blocks allocated, or calls of realloc.
    ops: usize,
    /// Time at work, where it sleeps in between.
    busy: Option<Duration>,
    /// Resident KiB beyond live bytes and stacks, all threads still there.
    extra_kib: Option<f64>,
}

impl Outcome {
    fn of(ops: usize) -> Self {
        Self { ops, ..Self::default() }
    }
}

type Work = fn(&Case) -> Outcome;

/// Name, the numbers of threads that are of interest, the workload.
const SCENARIOS: &[(&str, &[usize], Work)] = &[
    ("larson", &[2, 16], server::larson),
    ("xmalloc", &[2, 16], handoff::xmalloc),
    ("sh8bench", &[2, 16], handoff::sh8bench),
    ("cache-thrash", &[2], sharing::thrash),
    ("cache-scratch", &[2], sharing::scratch),
    ("cfrac", &[1], number::cfrac),
    ("graph", &[1], graph::graph),
    ("alloc-test", &[1, 2], live::alloc_test),
    ("mstress", &[2, 16], live::mstress),
    ("malloc-large", &[1], large::malloc_large),
    ("thread-churn", &[2], threads::churn),
    ("oversub", &[2, 16, 64], threads::oversubscription),
    ("tensors", &[2, 16], large::tensors),
    ("tensors-gaps", &[2, 16], large::tensors_with_gaps),
];

fn usage() -> ! {
    eprintln!("scenario: usage: scenario --list | scenario NAME-THREADS [--scale F]");
    std::process::exit(2)
}

fn main() {
    let what = std::env::args().nth(1).unwrap_or_else(|| usage());
    if what == "--list" {
        for (name, threads, _) in SCENARIOS {
            threads.iter().for_each(|n| println!("{name}-{n}"));
        }
        return;
    }
    let (name, threads) = what.rsplit_once('-').unwrap_or_else(|| usage());
    let threads = threads.parse().unwrap_or_else(|_| usage());
    let (.., run) = SCENARIOS.iter().find(|(n, ..)| *n == name).unwrap_or_else(|| usage());
    let case = Case { threads, scale: option("scale", 1.0) };

    let (start, before) = (now(), Usage::now());
    let outcome = run(&case);
    let (wall, after) = (now() - start, Usage::now());
    let (peak, end) = (proc::peak_kib(), proc::exact_rss_kib());
    let ms = |seconds: f64| seconds * 1000.0;
    let json = Json::new(&what)
        .number("ops", outcome.ops as f64)
        .number("wall_ms", ms(outcome.busy.unwrap_or(wall).as_secs_f64()))
        .number("user_ms", ms(after.user - before.user))
        .number("sys_ms", ms(after.sys - before.sys))
        .number("faults", (after.faults - before.faults) as f64)
        .number("peak_kib", peak as f64)
        .number("end_kib", end as f64);
    match outcome.extra_kib {
        Some(extra) => json.number("extra_kib", extra),
        None => json,
    }
    .print();
}
