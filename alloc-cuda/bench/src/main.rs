//! Costs and traces of the device pool on the simulated driver.
//! usage: thermalloc-cuda-bench cost | traces | trace FILE | csv | vary SEEDS | real
#![allow(clippy::cast_possible_truncation, reason = "sizes and times on 64 bits")]

mod cost;
mod machine;
mod policies;
mod real;
mod recorded;
mod replay;
mod traces;

/// Those that are made here and those of real programs.
fn all_traces() -> std::io::Result<Vec<traces::Trace>> {
    let mut all = traces::all();
    all.extend(recorded::all()?);
    Ok(all)
}

fn main() -> std::process::ExitCode {
    let mut out = std::io::stdout();
    let done = match std::env::args().nth(1).as_deref() {
        Some("cost") => cost::run(&mut out),
        Some("traces") => all_traces().and_then(|traces| replay::run(&mut out, false, traces)),
        Some("trace") => std::env::args()
            .nth(2)
            .ok_or_else(|| std::io::Error::other("no file"))
            .and_then(|path| recorded::read(path.as_ref()))
            .and_then(|trace| replay::run(&mut out, false, vec![trace])),
        Some("vary") => {
            let seeds = std::env::args().nth(2).and_then(|n| n.parse().ok()).unwrap_or(4);
            replay::vary(&mut out, 0..seeds)
        }
        Some("real") => real::run(&mut out),
        Some("csv") => all_traces().and_then(|traces| replay::run(&mut out, true, traces)),
        _ => Err(std::io::Error::other(
            "usage: thermalloc-cuda-bench cost | traces | trace FILE | csv | vary SEEDS | real",
        )),
    };
    match done {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            use std::io::Write;
            let _ = writeln!(std::io::stderr(), "thermalloc: cuda-bench: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}
