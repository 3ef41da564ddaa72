//! The length of the fast path: instructions of malloc and of free, from the call to the return, against
//! `fast_path.golden`, so that nobody makes it longer unseen.
//!
//! Counted by stepping through the finished library (`c/fast_path.c`), on restartable sequences and on the
//! thread cache. Valgrind, which has no restartable sequences, counts the thread cache once more. Where a tool or
//! the kernel refuses, a line says what was skipped.

#![cfg(all(target_arch = "x86_64", target_os = "linux"))]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use thermalloc_tests::{Library, compile, must, output, root, skipped, text};

const RENEW: &str = "THERMALLOC_WRITE_GOLDEN";
/// Another compiler's taste, in instructions of malloc or of free.
const TOLERANCE: i64 = 2;
const HEAD: &str = "\
# Instructions from the call to the return, PLT and event counter included; fast_path.rs counts and compares them.
# To renew: THERMALLOC_WRITE_GOLDEN=1 cargo test -p thermalloc-tests --test fast_path
# rseq: restartable sequences; cache: the thread cache, which is used where there are none.
# Cases: NAME_BYTES. A realloc counts as malloc; sized is free_sized; aligned asks for its size.
# way case malloc free both
";

/// Of malloc and of free.
type Counts = BTreeMap<(String, String), (i64, i64)>;

fn golden_file() -> PathBuf {
    root().join("tests/fast_path.golden")
}

fn golden() -> Counts {
    let text = std::fs::read_to_string(golden_file()).expect("fast_path.golden");
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let words: Vec<_> = line.split_whitespace().collect();
            let [way, case, malloc, free, _] = words[..] else { panic!("golden: {line}") };
            ((way.into(), case.into()), (number(malloc), number(free)))
        })
        .collect()
}

fn number(word: &str) -> i64 {
    word.parse().unwrap_or_else(|_| panic!("{word}: not a number"))
}

fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| Library::build(Path::new(env!("CARGO_TARGET_TMPDIR"))))
}

fn program(name: &str) -> PathBuf {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    compile("fast_path.c", &out, &["-fPIE", "-pie", "-ldl", "-fcf-protection=none"]);
    out
}

/// Adds the counts of one way; false where there are none to be had.
fn step(way: &str, tunables: &str, counts: &mut Counts) -> bool {
    let mut command = library().preload(&program("fast_path"));
    let run = output(command.env("GLIBC_TUNABLES", tunables).env("LD_BIND_NOW", "1"));
    let said = text(&run.stdout);
    if run.status.code() == Some(77) {
        skipped(said.lines().last().unwrap_or("no reason given"));
        return false;
    }
    assert!(run.status.success(), "{way}: {}\n{said}{}", run.status, text(&run.stderr));
    let mut lines = said.lines();
    match (way, lines.next()) {
        ("rseq", Some("rseq no")) => {
            skipped("this kernel or C library has no restartable sequences");
            return false;
        }
        ("rseq", Some("rseq yes")) | ("cache", Some("rseq no")) => {}
        (_, first) => panic!("{way}: {first:?}"),
    }
    for line in lines {
        let words: Vec<_> = line.split_whitespace().collect();
        let [case, malloc, free, sections] = words[..] else { panic!("{line}") };
        // Without one, or with two, it was not the fast path that was counted.
        let one_each = way == "cache" || case.starts_with("realloc") || sections == "1.00";
        assert!(one_each, "{case}: {sections} sections an operation");
        counts.insert((way.into(), case.into()), (number(malloc), number(free)));
    }
    true
}

fn write(counts: &Counts) {
    let mut text = String::from(HEAD);
    for ((way, case), (malloc, free)) in counts {
        let _ = writeln!(text, "{way} {case} {malloc} {free} {}", malloc + free);
    }
    std::fs::write(golden_file(), text).expect("fast_path.golden");
}

#[test]
fn is_as_long_as_the_golden_says() {
    let mut counts = Counts::new();
    let ways = [("rseq", ""), ("cache", "glibc.pthread.rseq=0")];
    let counted = ways.map(|(way, tunables)| step(way, tunables, &mut counts));
    if std::env::var_os(RENEW).is_some() {
        assert_eq!(counted, [true; 2], "both ways are needed to renew the golden");
        return write(&counts);
    }
    let mut wrong = String::new();
    let expected = golden();
    for (key, (malloc, free)) in &counts {
        let Some((was_malloc, was_free)) = expected.get(key) else {
            let _ = writeln!(wrong, "{key:?} is not in the golden");
            continue;
        };
        if (malloc - was_malloc).abs() > TOLERANCE || (free - was_free).abs() > TOLERANCE {
            let _ =
                writeln!(wrong, "{key:?}: {was_malloc} + {was_free} before, {malloc} + {free} now");
        }
    }
    assert!(
        wrong.is_empty(),
        "the fast path changed; if for the better, or for a reason, renew with {RENEW}=1:\n{wrong}"
    );
}

#[test]
fn callgrind_counts_the_same_on_the_thread_cache() {
    if Command::new("valgrind").arg("--version").output().is_err() {
        return skipped("no valgrind");
    }
    if std::env::var_os(RENEW).is_some() {
        return;
    }
    let program = program("fast_path_callgrind");
    for case in ["pair_64", "pair_32768", "sized_64"] {
        // Beyond the call itself call_malloc and call_free have three instructions each.
        let both =
            (callgrind(&program, case, 3000, "") - callgrind(&program, case, 1000, "")) / 2000 - 6;
        let (malloc, free) = golden()[&("cache".into(), case.into())];
        assert!(
            (both - malloc - free).abs() <= 2 * TOLERANCE,
            "{case}: {malloc} + {free} in the golden, {both} by callgrind"
        );
    }
}

/// With the profiler on the path is the same, and what samples take is little beside it: at the default
/// period one pair of 64 bytes in 8192 is recorded.
#[test]
fn the_profiler_adds_an_instruction_to_a_pair() {
    if Command::new("valgrind").arg("--version").output().is_err() {
        return skipped("no valgrind");
    }
    let program = program("fast_path_profiled");
    let (few, many) = (100_000, 400_000);
    let pairs = many - few;
    let spent = |conf| {
        callgrind(&program, "pair_64", many, conf) - callgrind(&program, "pair_64", few, conf)
    };
    let (off, on) = (spent(""), spent("prof:true,prof_budget:0,prof_seed:1"));
    assert!(on > off, "{off} off, {on} on: nothing was recorded");
    assert!(on - off < 2 * pairs, "{} a pair off, {} on", off / pairs, on / pairs);
    assert!((on - off) * 100 < 2 * off, "less than 2 %: {off} off, {on} on");
}

/// Instructions below the program's call_* functions.
fn callgrind(program: &Path, case: &str, rounds: i64, conf: &str) -> i64 {
    let name = format!("callgrind.{case}.{rounds}.{}", conf.len());
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let mut command = Command::new("timeout");
    command.args(["-s", "KILL", "120", "valgrind", "--tool=callgrind", "--toggle-collect=call_*"]);
    command.arg(format!("--callgrind-out-file={}", out.display())).arg(program);
    must(
        command
            .arg(case)
            .arg(rounds.to_string())
            .env("LD_PRELOAD", &library().shared)
            .env("THERMALLOC_CONF", conf)
            .env("LD_BIND_NOW", "1"),
    );
    let found = std::fs::read_to_string(&out).expect("callgrind's file");
    let total = found.lines().find_map(|line| line.strip_prefix("totals: ")).expect("totals");
    number(total)
}
