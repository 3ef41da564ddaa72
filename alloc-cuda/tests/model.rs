//! Random programs against a model and the race checker of the simulated driver.

mod common;

use common::{MIB, Machine, config, run_model};
use thermalloc_cuda::{Backing, Reuse, fault};
use thermalloc_cuda_sim::{Config, Progress};

fn run(config: Config, backing: Backing, reuse: Reuse, seed: u64, operations: u64) {
    // An exportable chunk is a descriptor of the simulated driver for as long as that lives.
    let m = Machine::with(Config { seed, export_fd: false, ..config }, |builder| {
        builder.backing(backing).reuse(reuse).limit_bytes(1200 * MIB)
    });
    assert_eq!(m.pool.backing(), backing);
    run_model(&m, seed, operations, 8, 900 * MIB).expect("a program that keeps the rules");
    let Machine { pool, sim, .. } = m;
    let driver = std::sync::Arc::clone(pool.driver());
    drop(pool);
    assert_eq!(sim.used_bytes(0), 0, "a dropped pool leaves nothing");
    drop(driver);
    sim.assert_clean();
}

#[test]
fn random_programs_have_no_race_and_exact_books() {
    for (seed, backing, reuse, progress) in [
        (1, Backing::Virtual, Reuse::Grow, Progress::Random),
        (2, Backing::Virtual, Reuse::Wait, Progress::Lazy),
        (3, Backing::Virtual, Reuse::Complete, Progress::Random),
        (4, Backing::DriverPool, Reuse::Grow, Progress::Random),
        (5, Backing::Plain, Reuse::Wait, Progress::Lazy),
        (6, Backing::Virtual, Reuse::Grow, Progress::Eager),
    ] {
        let operations = if cfg!(debug_assertions) { 20_000 } else { 100_000 };
        run(Config { progress, ..config() }, backing, reuse, seed, operations);
    }
}

/// 10 million operations for each of three seeds: some minutes with optimisation. `SEED` chooses one.
#[test]
#[ignore = "takes minutes"]
fn ten_million_operations_for_each_of_three_seeds() {
    let only: Option<u64> = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok());
    for seed in [11, 12, 13].into_iter().filter(|&seed| only.is_none_or(|only| only == seed)) {
        run(config(), Backing::Virtual, Reuse::Grow, seed, 10_000_000);
    }
}

/// Faults are process-wide, so all of them in one test, which runs in a process of its own.
#[test]
fn planted_faults_are_caught() {
    const CHILD: &str = "THERMALLOC_TEST_PLANTED";
    if std::env::var_os(CHILD).is_none() {
        let program = std::env::current_exe().expect("this test");
        let status = std::process::Command::new(program)
            .args(["--exact", "planted_faults_are_caught", "--nocapture"])
            .env(CHILD, "1")
            .status();
        assert!(status.expect("a child").success());
        return;
    }
    let mut missed = Vec::new();
    for &(number, what) in fault::ALL {
        fault::plant(number);
        let caught = (1..=6).any(|seed| {
            let reuse = if seed % 2 == 0 { Reuse::Wait } else { Reuse::Grow };
            let m = Machine::with(Config { seed, ..config() }, |builder| {
                builder.backing(Backing::Virtual).reuse(reuse).limit_bytes(600 * MIB)
            });
            let run = std::panic::AssertUnwindSafe(|| run_model(&m, seed, 30_000, 4, 500 * MIB));
            // Its own assertions may see it first.
            let verdict = std::panic::catch_unwind(run);
            // What a broken pool leaves behind is of no interest.
            std::mem::forget(m.pool);
            !matches!(verdict, Ok(Ok(())))
        });
        fault::plant(0);
        if !caught {
            missed.push(what);
        }
    }
    assert!(missed.is_empty(), "not seen: {missed:?}");
}
