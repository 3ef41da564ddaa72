//! Huge pages in a real process, in the mode that this system has: where blocks lie, what becomes a
//! huge page, and what must not grow.

use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use thermalloc_tests::{Library, compile, must};

const SCRATCH: &str = env!("CARGO_TARGET_TMPDIR");

/// The program `dense.c` with the library preloaded.
fn dense(case: &str, options: &str) -> Command {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    let program = Path::new(SCRATCH).join("dense");
    let library = LIBRARY.get_or_init(|| {
        compile("dense.c", &program, &["-fPIE", "-pie"]);
        Library::build(Path::new(SCRATCH))
    });
    let mut command = library.preload(&program);
    command.arg(case).env("THERMALLOC_CONF", options);
    command
}

/// The system's mode; none where it has no huge pages of 2 MiB.
fn mode() -> Option<String> {
    let read = |name: &str| {
        std::fs::read_to_string(format!("/sys/kernel/mm/transparent_hugepage/{name}")).ok()
    };
    let huge = read("hpage_pmd_size")?.trim() == "2097152";
    let enabled = read("enabled")?;
    let mode = enabled.split(['[', ']']).nth(1)?.to_string();
    huge.then_some(mode)
}

#[test]
fn only_exact_multiples_are_aligned_and_nothing_is_resident_for_it() {
    must(&mut dense("placed", ""));
}

#[test]
fn dense_memory_becomes_huge_pages() {
    if matches!(mode().as_deref(), Some("always" | "madvise")) {
        must(&mut dense("dense", ""));
    }
}

#[test]
fn sparse_memory_stays_sparse() {
    // In mode always the kernel makes huge pages by itself, unless it is told not to.
    let options = if mode().as_deref() == Some("always") { "thp:never" } else { "" };
    must(&mut dense("sparse", options));
    must(&mut dense("sparse", "thp:never"));
}

#[test]
fn a_small_program_stays_small() {
    if mode().as_deref() != Some("always") {
        must(&mut dense("small", ""));
    }
}
