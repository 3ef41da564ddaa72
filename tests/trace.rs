//! A process with the option `trace_file` records what the policy lab can replay. Each case is a child
//! process, this program again.

use std::alloc::{GlobalAlloc, Layout};
use std::fs::File;
use std::hint::black_box;
use std::io::BufReader;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use thermalloc::Thermalloc;
use thermalloc_lab::policy::{Kind, Settings};
use thermalloc_lab::sim;
use thermalloc_lab::trace::{Trace, What};

#[global_allocator]
static GLOBAL: Thermalloc = Thermalloc;

const CASE: &str = "THERMALLOC_TEST_CASE";
/// Lengths by which the events of a fork's child, and of a block resized in place, are known.
const OF_CHILD: usize = 77 << 20;
const LONG: usize = 40 << 20;

fn touched(size: usize) -> Vec<u8> {
    black_box(vec![1; size])
}

/// What a program does: blocks large and small, threads, a block that grows and shrinks.
fn work() {
    let until = Instant::now() + Duration::from_millis(700);
    std::thread::scope(|scope| {
        for thread in 0..2usize {
            scope.spawn(move || {
                let mut i = thread;
                while Instant::now() < until {
                    let small: Vec<Vec<u8>> = (0..200).map(|k| touched(100 + k * 37)).collect();
                    drop((touched((1 << 20) + i % 7 * (300 << 10)), small));
                    i += 1;
                    std::thread::sleep(Duration::from_millis(2));
                }
            });
        }
    });
    let layout = Layout::from_size_align(LONG, 1).expect("small");
    // SAFETY: the length is not 0.
    let block = unsafe { GLOBAL.alloc(layout) };
    // SAFETY: live, with that layout.
    let block = unsafe { GLOBAL.realloc(block, layout, LONG / 2) };
    let layout = Layout::from_size_align(LONG / 2, 1).expect("small");
    // SAFETY: as above.
    unsafe { GLOBAL.dealloc(block, layout) };
}

fn fork() {
    // SAFETY: the child allocates, which thermalloc allows there, and ends.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        for _ in 0..50 {
            drop(touched(OF_CHILD));
        }
        std::thread::sleep(Duration::from_millis(600));
        // SAFETY: ends the process.
        unsafe { libc::_exit(0) };
    }
    let mut status = -1;
    // SAFETY: `status` outlives the call.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(status, 0);
}

fn open_files() -> Vec<PathBuf> {
    let links = std::fs::read_dir("/proc/self/fd").expect("/proc is mounted");
    links.filter_map(|link| std::fs::read_link(link.ok()?.path()).ok()).collect()
}

/// Runs the case if this is a child.
fn child() -> bool {
    let Some(path) = std::env::var_os(CASE) else { return false };
    work();
    fork();
    // The file is written four times a second.
    std::thread::sleep(Duration::from_millis(600));
    // A free, for where there is no background thread to write.
    drop(touched(2 << 20));
    let path = path.as_bytes();
    assert!(open_files().iter().all(|open| !open.as_os_str().as_bytes().starts_with(path)));
    true
}

/// This program again, for one test, with `options`; the file's path begins with `path`.
fn run(test: &str, path: &Path, options: &str) -> Output {
    let me = std::env::current_exe().expect("this program");
    let output = Command::new("timeout")
        .args(["-s", "KILL", "60"])
        .arg(me)
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(CASE, path)
        .env("THERMALLOC_CONF", options)
        .output()
        .expect("timeout runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    output
}

/// An empty folder of this test's own.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}

fn read(path: &Path) -> Trace {
    let file = File::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    // Reading checks that each free and each resize is of a live block.
    Trace::read(BufReader::new(file)).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn check(trace: &Trace) {
    let s = trace.summary();
    assert_eq!(trace.dropped, 0);
    assert!(s.frees > 100 && s.allocs >= s.frees, "{s:?}");
    assert!(s.peak_bytes >= LONG as u64 && trace.end_us >= 700_000, "{s:?}");
    let lengths = |wanted: usize| {
        trace.events.iter().filter(move |event| match event.what {
            What::Alloc { bytes, .. } | What::Resize { bytes } => bytes == wanted,
            What::Free => false,
        })
    };
    assert_eq!(lengths(OF_CHILD).count(), 0, "a fork's child records nothing");
    let long = lengths(LONG).next().expect("the block that is cut");
    let cut = lengths(LONG / 2).next().expect("its new length");
    assert_eq!((long.id, cut.what), (cut.id, What::Resize { bytes: LONG / 2 }));
    for kind in [Kind::Thermalloc, Kind::Glibc] {
        let outcome = sim::replay(trace, kind, Settings::default(), 100_000);
        assert!(outcome.counts.faults > 0 && outcome.failures == 0, "{outcome:?}");
    }
}

#[test]
fn a_process_records_what_the_lab_can_replay() {
    const ME: &str = "a_process_records_what_the_lab_can_replay";
    if child() {
        return;
    }
    let folder = folder("trace_record");
    for (name, more) in [("thread", ""), ("none", ",background_thread:false")] {
        let path = folder.join(name);
        let output = run(ME, &path, &format!("trace_file:{}.%p{more}", path.display()));
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
        let files: Vec<_> = std::fs::read_dir(&folder)
            .expect("the folder")
            .map(|entry| entry.expect("an entry").path())
            .filter(|file| file.file_stem() == path.file_name())
            .collect();
        assert_eq!(files.len(), 1, "{files:?}");
        let pid = files[0].extension().expect("the process id").to_str().expect("digits");
        assert!(pid.parse::<u32>().is_ok(), "{files:?}");
        check(&read(&files[0]));
    }
}

#[test]
fn a_file_is_made_anew() {
    if child() {
        return;
    }
    let path = folder("trace_anew").join("trace");
    std::fs::write(&path, "something else\n".repeat(10_000)).expect("written");
    run("a_file_is_made_anew", &path, &format!("trace_file:{}", path.display()));
    check(&read(&path));
}

#[test]
fn what_cannot_be_written_is_one_line_and_no_more() {
    const ME: &str = "what_cannot_be_written_is_one_line_and_no_more";
    if child() {
        return;
    }
    let folder = folder("trace_refused");
    let pipe = folder.join("pipe");
    let made = Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs");
    assert!(made.success());
    for path in [folder.join("no/such/folder"), folder.clone(), pipe] {
        let output = run(ME, &folder, &format!("trace_file:{}", path.display()));
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(stderr.starts_with("thermalloc: option trace_file: \""), "{stderr}");
        assert!(
            stderr.ends_with("nothing is recorded\n") && stderr.lines().count() == 1,
            "{stderr}"
        );
    }
}
