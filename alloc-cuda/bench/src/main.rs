//! Costs and traces of the device pool on the simulated driver.
//! usage: thermalloc-cuda-bench cost | traces | csv | vary SEEDS | real
#![allow(clippy::cast_possible_truncation, reason = "sizes and times on 64 bits")]

mod cost;
mod machine;
mod policies;
mod real;
mod replay;
mod traces;

fn main() -> std::process::ExitCode {
    let mut out = std::io::stdout();
    let done = match std::env::args().nth(1).as_deref() {
        Some("cost") => cost::run(&mut out),
        Some("traces") => replay::run(&mut out, false),
        Some("vary") => {
            let seeds = std::env::args().nth(2).and_then(|n| n.parse().ok()).unwrap_or(4);
            replay::vary(&mut out, 0..seeds)
        }
        Some("real") => real::run(&mut out),
        Some("csv") => replay::run(&mut out, true),
        _ => Err(std::io::Error::other(
            "usage: thermalloc-cuda-bench cost | traces | csv | vary SEEDS | real",
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
