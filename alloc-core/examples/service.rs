//! A small service on thermalloc: threads take jobs from a queue, count words and sort them.
//!
//! ```sh
//! cargo run --release -p thermalloc --example service
//! ```

use std::collections::HashMap;
use std::io::Write;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};

use thermalloc::control::stats;

#[global_allocator]
static GLOBAL: thermalloc::Thermalloc = thermalloc::Thermalloc;

const WORKERS: usize = 4;
const JOBS: usize = 200;

type Counts = HashMap<String, usize>;

/// The text of job `n`: some thousand words, a few of them often.
fn text(n: usize) -> String {
    (0..5000).map(|i| format!("word{} ", (i * i + n) % 997)).collect()
}

fn count(text: &str) -> Counts {
    let mut counts = Counts::new();
    for word in text.split_whitespace() {
        *counts.entry(word.to_owned()).or_default() += 1;
    }
    counts
}

fn next(jobs: &Mutex<Receiver<String>>) -> Option<String> {
    jobs.lock().ok()?.recv().ok()
}

fn main() -> std::io::Result<()> {
    let (submit, jobs) = channel();
    let (report, results) = channel();
    let jobs = Arc::new(Mutex::new(jobs));
    let workers: Vec<_> = (0..WORKERS)
        .map(|_| {
            let (jobs, report) = (Arc::clone(&jobs), report.clone());
            std::thread::spawn(move || {
                while let Some(text) = next(&jobs) {
                    let _ = report.send(count(&text));
                }
            })
        })
        .collect();
    drop(report);
    for n in 0..JOBS {
        let _ = submit.send(text(n));
    }
    drop(submit);

    // Each result was made by another thread, and is freed here.
    let mut total = Counts::new();
    for counts in results {
        for (word, n) in counts {
            *total.entry(word).or_default() += n;
        }
    }
    let failed = workers.into_iter().filter_map(|worker| worker.join().err()).count();
    let mut words: Vec<_> = total.into_iter().collect();
    words.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));

    let mut out = std::io::stdout().lock();
    let counted: usize = words.iter().map(|(_, n)| n).sum();
    writeln!(out, "{counted} words, {} different, {failed} workers failed", words.len())?;
    for (word, n) in words.iter().take(3) {
        writeln!(out, "{n:8} {word}")?;
    }
    let memory = stats::snapshot();
    writeln!(
        out,
        "live {} KiB, in caches {} KiB, kept warm {} KiB",
        memory.allocated_bytes >> 10,
        memory.cached_bytes >> 10,
        memory.warm_bytes >> 10
    )
}
