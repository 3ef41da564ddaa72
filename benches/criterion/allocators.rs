//! `cargo bench`: the primitive paths of each allocator, all in one process, through its handle for
//! `#[global_allocator]`. What a handle inlines, it inlines here too.
//!
//! Google's tcmalloc needs restartable sequences to itself, and thermalloc those of the C library, so the
//! process runs itself a second time for tcmalloc, with the C library's turned off.

mod paths;
mod peers;

use criterion::Criterion;
use paths::{CASES, Case};
use peers::Peer;
use std::time::Duration;

/// Set in the process that measures tcmalloc alone.
const ALONE: &str = "THERMALLOC_BENCH_ALONE";

fn bench(c: &mut Criterion, peers: &[&dyn Peer]) {
    for Case { name, path, sizes, threads } in CASES {
        for &size in *sizes {
            for &threads in *threads {
                let mut group = c.benchmark_group(format!("{name}/{size}/{threads}"));
                for peer in peers {
                    if peer.has(*path) {
                        group.bench_function(peer.name(), |b| {
                            b.iter_custom(|iters| peer.time(*path, size, threads, iters))
                        });
                    }
                }
            }
        }
    }
}

/// The same command for tcmalloc, on restartable sequences of its own.
fn run_alone() {
    let me = std::env::current_exe().expect("/proc is mounted");
    let status = std::process::Command::new(me)
        .args(std::env::args_os().skip(1))
        .env(ALONE, "tcmalloc")
        .env("GLIBC_TUNABLES", "glibc.pthread.rseq=0")
        .status()
        .expect("this program runs again");
    if !status.success() {
        println!("tcmalloc: failed: {status}");
    }
}

fn main() {
    let mut c = Criterion::default()
        .sample_size(15)
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(400))
        .configure_from_args();
    let alone = std::env::var_os(ALONE).is_some();
    let peers: Vec<&dyn Peer> =
        peers::all().into_iter().filter(|p| (p.name() == "tcmalloc") == alone).collect();
    bench(&mut c, &peers);
    if !alone {
        run_alone();
    }
}
