//! A periodic program on the library is served from warm pages once it has gone round for a while.

use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use thermalloc_tests::{Library, compile, must, output, text};

const SCRATCH: &str = env!("CARGO_TARGET_TMPDIR");

/// The program `steady.c` with the library preloaded.
fn steady(options: &str, args: &[&str]) -> Command {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    let program = Path::new(SCRATCH).join("steady");
    let library = LIBRARY.get_or_init(|| {
        compile("steady.c", &program, &["-fPIE", "-pie"]);
        Library::build(Path::new(SCRATCH))
    });
    let mut command = library.preload(&program);
    command.args(args).env("THERMALLOC_CONF", options);
    command
}

/// Each period touches some 40,000 pages.
#[test]
fn a_steady_loop_faults_no_more() {
    must(&mut steady("", &["12", "8", "faults", "40"]));
}

/// After the start's pages have gone and the dense ones are huge, nothing is asked of the kernel. Where a
/// busy machine lets the threads run in another order than they did so far, a block of 16 MiB may find
/// all gaps taken, and the window grows once more: so one of three runs has to make no call.
#[test]
fn a_steady_loop_makes_no_memory_call() {
    for _ in 0..2 {
        if output(&mut steady("", &["20", "10", "calls"])).status.success() {
            return;
        }
    }
    must(&mut steady("", &["20", "10", "calls"]));
}

/// What is watched is there to be seen.
#[test]
fn a_loop_that_purges_at_once_is_caught() {
    let run = output(&mut steady("dirty_decay_ms:0", &["1", "3", "faults", "40"]));
    assert!(text(&run.stdout).contains(" faults in "), "{}", text(&run.stdout));
    let run = output(&mut steady("dirty_decay_ms:0", &["1", "3", "calls"]));
    assert!(!run.status.success(), "{}", text(&run.stderr));
}
