//! What an idle thread costs that once used malloc: resident size for each of many threads that made a few
//! small allocations, less that of threads that made none. Runs itself once for each of the two.

use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use thermalloc_benches::{Block, Json, option, proc};

static BLOCKS: AtomicUsize = AtomicUsize::new(0);
static PARKED: AtomicUsize = AtomicUsize::new(0);

/// Sizes of 16, 32, 48 ... bytes; every second block stays live. Never returns: the process ends first.
extern "C" fn thread(_: *mut libc::c_void) -> *mut libc::c_void {
    for i in 1..=BLOCKS.load(Ordering::Relaxed) {
        let block = Block::new(16 * i);
        if i % 2 == 0 {
            block.free();
        }
    }
    PARKED.fetch_add(1, Ordering::Release);
    loop {
        // SAFETY: pause has no preconditions.
        unsafe { libc::pause() };
    }
}

/// Threads come from pthread_create itself: Rust's own would allocate for their handles and names.
fn rss_of(threads: usize) -> f64 {
    let before = proc::rss_kib();
    for _ in 0..threads {
        let mut id = 0;
        // SAFETY: id is valid to write to, and `thread` needs no argument.
        let error = unsafe { libc::pthread_create(&mut id, ptr::null(), thread, ptr::null_mut()) };
        assert_eq!(error, 0, "pthread_create");
    }
    while PARKED.load(Ordering::Acquire) < threads {
        std::thread::yield_now();
    }
    std::thread::sleep(std::time::Duration::from_millis(option("settle-ms", 500)));
    proc::rss_kib().saturating_sub(before) as f64 / threads as f64
}

fn rerun(threads: usize, blocks: usize) -> f64 {
    let program = std::env::current_exe().expect("/proc is mounted");
    let mut command = std::process::Command::new(program);
    command.args([
        "--child",
        "yes",
        "--threads",
        &threads.to_string(),
        "--blocks",
        &blocks.to_string(),
    ]);
    let out = command.output().expect("runs itself");
    String::from_utf8_lossy(&out.stdout).trim().parse().expect("a number")
}

fn main() {
    let (threads, blocks) = (option("threads", 600), option("blocks", 20));
    if option("child", String::new()) == "yes" {
        BLOCKS.store(blocks, Ordering::Relaxed);
        println!("{}", rss_of(threads));
        return;
    }
    let (bare, used) = (rerun(threads, 0), rerun(threads, blocks));
    Json::new("idle_threads")
        .number("threads", threads as f64)
        .number("blocks", blocks as f64)
        .number("bare_kib_per_thread", bare)
        .number("used_kib_per_thread", used)
        .number("beyond_kib_per_thread", used - bare)
        .print();
}
