//! Purging in a real process: forks in the middle of it, a kernel that refuses it, a limit. Each
//! case is a child process, this program again.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use thermalloc::api;
use thermalloc::control::stats::{Stats, snapshot};
use thermalloc_tests::{fork_once, this_again};

const CASE: &str = "THERMALLOC_TEST_CASE";
const MIB: usize = 1 << 20;
const PAGE: usize = 4096;

/// A block that knows what was written into it.
struct Block {
    start: *mut u8,
    size: usize,
    tag: u8,
}

impl Block {
    fn new(size: usize, tag: usize) -> Self {
        let tag = tag.to_le_bytes()[0];
        let start = api::alloc(size);
        // A child after a fork must not panic: it has no unwinder's locks to rely on.
        if start.is_null() {
            std::process::abort();
        }
        for at in (0..size).step_by(PAGE) {
            // SAFETY: within the block.
            unsafe { start.wrapping_add(at).write(tag) };
        }
        Self { start, size, tag }
    }

    fn is_as_written(&self) -> bool {
        // SAFETY: within the block.
        (0..self.size)
            .step_by(PAGE)
            .all(|at| unsafe { self.start.wrapping_add(at).read() } == self.tag)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: this block's start, freed once.
        unsafe { api::free(self.start) };
    }
}

/// Runs the case that the environment names, if this is a child.
fn child(run: impl FnOnce(&str)) -> bool {
    let Some(case) = std::env::var_os(CASE) else { return false };
    run(case.to_str().expect("a name"));
    true
}

/// This program again, for `case` of `test`; it has to succeed and to say nothing.
fn succeeds(test: &str, case: &str, options: &str) {
    let output = this_again(test, (CASE, case), options);
    let (stdout, stderr) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(
        output.status.success() && stderr.is_empty(),
        "{case}: {}: {stdout}{stderr}",
        output.status
    );
}

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// Waits for the figures to be as `is` says; they as they were last.
fn wait_for(limit: Duration, is: impl Fn(&Stats) -> bool) -> Stats {
    let end = Instant::now() + limit;
    loop {
        let stats = snapshot();
        if is(&stats) || Instant::now() > end {
            return stats;
        }
        std::thread::sleep(ms(10));
    }
}

/// What a fork's child does: the steps that failed, as bits.
fn in_child() -> i32 {
    let kept: [Block; 16] = core::array::from_fn(|i| Block::new((3 * PAGE) << (i % 8), i + 1));
    for round in 0..3 {
        let _short: [Block; 24] =
            core::array::from_fn(|i| Block::new([100, 5000, 70_000, MIB][i % 4], round));
        if kept.iter().any(|block| !block.is_as_written()) {
            return 1;
        }
    }
    // A background thread of the child's own may have blocks on their way.
    let trimmed = (0..50).any(|_| {
        api::trim();
        let all = snapshot().dirty_bytes == 0;
        if !all {
            std::thread::sleep(ms(2));
        }
        all
    });
    if !trimmed {
        return 2;
    }
    if kept.iter().any(|block| !block.is_as_written()) {
        return 4;
    }
    // Nobody asks for these to be given back, and this process had no background thread.
    drop([Block::new(4 * MIB, 1), Block::new(4 * MIB, 2)]);
    let stats = wait_for(ms(10_000), |stats| stats.dirty_bytes < MIB as u64);
    if stats.dirty_bytes >= MIB as u64 {
        return 8;
    }
    if kept.iter().any(|block| !block.is_as_written()) { 16 } else { 0 }
}

fn purge_and_fork() {
    // The first block starts the allocator: before there are other threads, as in any program.
    drop(Block::new(PAGE, 1));
    let stop = AtomicBool::new(false);
    let forks = std::thread::scope(|scope| {
        // The background thread purges what these free, and one of them asks for it besides.
        for purger in [true, false] {
            let stop = &stop;
            scope.spawn(move || {
                while !stop.load(Relaxed) {
                    let mut blocks: Vec<_> =
                        (0..200).map(|i| Block::new(PAGE * (17 + i % 40), i)).collect();
                    // Every other one stays for a while: many ranges to a purge.
                    let mut nth = 0;
                    blocks.retain(|_| {
                        nth += 1;
                        nth % 2 == 0
                    });
                    if purger {
                        api::trim();
                    }
                    assert!(blocks.iter().all(Block::is_as_written));
                }
            });
        }
        let forkers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let (start, mut forks) = (Instant::now(), 0);
                    // A busy machine takes longer to come to enough of both.
                    let few = |forks| forks < 10 || snapshot().purge_calls <= 100;
                    while start.elapsed() < ms(4000) || few(forks) && start.elapsed() < ms(60_000) {
                        let status = fork_once(in_child);
                        if status != 0 {
                            stop.store(true, Relaxed);
                        }
                        assert_eq!(status, 0, "child {forks}");
                        forks += 1;
                    }
                    forks
                })
            })
            .collect();
        let forks: u32 = forkers.into_iter().map(|thread| thread.join().expect("no panic")).sum();
        stop.store(true, Relaxed);
        forks
    });
    let stats = snapshot();
    assert!(forks >= 20 && stats.purge_calls > 100, "{forks} forks, {} purges", stats.purge_calls);
}

#[test]
fn a_fork_in_the_middle_of_a_purge() {
    if child(|_| purge_and_fork()) {
        return;
    }
    let me = "a_fork_in_the_middle_of_a_purge";
    succeeds(me, "at once", "dirty_decay_ms:0");
    succeeds(me, "in steps", "hot_window_ms:20,dirty_decay_ms:100");
}

/// From now on the kernel answers all advice on memory with `errno`, in all threads.
#[allow(clippy::cast_possible_truncation, reason = "a filter's fields are small and unsigned")]
fn refuse_advice(errno: i32) {
    let statement = |code: u32, k| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let refuse = libc::SECCOMP_RET_ERRNO | errno as u32;
    let equals = |call: libc::c_long, jt| libc::sock_filter {
        code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
        jt,
        jf: 0,
        k: call as u32,
    };
    let mut code = [
        // The call's number is the first word.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        equals(libc::SYS_madvise, 2),
        equals(libc::SYS_process_madvise, 1),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
        statement(libc::BPF_RET | libc::BPF_K, refuse),
    ];
    let program = libc::sock_fprog { len: code.len() as u16, filter: code.as_mut_ptr() };
    // SAFETY: no more than a system call.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
    let (set, all) = (libc::SECCOMP_SET_MODE_FILTER, libc::SECCOMP_FILTER_FLAG_TSYNC);
    // SAFETY: a system call that reads the program.
    let set = unsafe { libc::syscall(libc::SYS_seccomp, set, all, &raw const program) };
    assert_eq!(set, 0, "{}", io::Error::last_os_error());
}

/// Processor time that this process has taken.
fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes the time only.
    let got = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    assert_eq!(got, 0);
    Duration::from_secs(time.tv_sec.unsigned_abs())
        + Duration::from_nanos(time.tv_nsec.unsigned_abs())
}

fn refused(case: &str) {
    match case {
        "locked" => {
            // SAFETY: no more than a system call.
            let locked = unsafe { libc::mlockall(libc::MCL_FUTURE) };
            assert_eq!(locked, 0, "{}", io::Error::last_os_error());
        }
        errno => refuse_advice(errno.parse().expect("a number")),
    }
    // Little enough for what anybody may lock. Every other block stays, so that pieces are many.
    let mut kept = Vec::new();
    for i in 0..60 {
        let size = [2, 7, 20][i % 3] * PAGE;
        kept.push(Block::new(size, i));
        drop(Block::new(size, 0xA5));
    }
    drop(Block::new(2 * MIB, 0xA5));
    // Whatever was purged or not, zero means zero.
    let before = cpu_time();
    let start = Instant::now();
    while start.elapsed() < ms(3000) {
        std::thread::sleep(ms(100));
        for size in [3 * PAGE, 20 * PAGE, MIB] {
            let block = api::alloc_zeroed(size);
            // SAFETY: a block of that size.
            let bytes = unsafe { core::slice::from_raw_parts_mut(block, size) };
            assert!(bytes.iter().all(|&byte| byte == 0), "{size} bytes");
            bytes.fill(0xA5);
            // SAFETY: just allocated.
            unsafe { api::free(block) };
        }
    }
    std::thread::sleep(ms(1000));
    let (took, stats) = (cpu_time() - before, snapshot());
    assert!(kept.iter().all(Block::is_as_written));
    // A piece that was refused is as one just freed: it is tried again when it has aged anew.
    assert!(stats.purge_failures > 0, "nothing was refused");
    assert!(stats.purge_failures < 1000, "{} refusals", stats.purge_failures);
    assert_eq!(stats.purged_bytes, 0);
    assert!(took < ms(1000), "{took:?} of processor time in 4 s");
    api::trim();
    assert!(snapshot().dirty_bytes > 0, "what can't be given back isn't counted as given back");
    drop(kept);
}

/// A kernel or a sandbox may refuse advice in many ways, and so does it where pages are locked.
#[test]
fn refused_advice_is_no_harm() {
    if child(refused) {
        return;
    }
    let refusals = [libc::EPERM, libc::EINVAL, libc::ENOSYS, libc::ENOMEM, libc::EAGAIN];
    let cases = refusals.iter().map(i32::to_string).chain(["locked".into()]);
    std::thread::scope(|scope| {
        for case in cases {
            scope.spawn(move || {
                let options = "hot_window_ms:100,dirty_decay_ms:100";
                succeeds("refused_advice_is_no_harm", &case, options);
            });
        }
    });
}

/// Resident bytes of this process.
fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").expect("/proc is mounted");
    let pages: u64 = text.split(' ').nth(1).and_then(|n| n.parse().ok()).expect("a number");
    pages * PAGE as u64
}

/// A program that needs 32 MiB all the time, and up to 96 MiB once in two seconds.
fn work_within_a_limit() {
    const LIMIT: u64 = 64 << 20;
    let others = resident_bytes();
    let live: Vec<_> = (0..24).map(|i| Block::new(MIB, i)).collect();
    for _ in 0..3 {
        let before = snapshot().pressure_bytes;
        let burst: Vec<_> = (0..9).map(|i| Block::new(8 * MIB, i)).collect();
        assert!(burst.iter().all(Block::is_as_written));
        drop(burst);
        assert!(snapshot().resident_bytes > LIMIT, "the burst's pages are hot");
        // The look is once a second.
        let stats = wait_for(ms(1500), |stats| stats.pressure_bytes - before >= 32 << 20);
        assert!(stats.pressure_bytes - before >= 32 << 20, "{}", stats.pressure_bytes - before);
        assert!(stats.resident_bytes < LIMIT, "{} bytes", stats.resident_bytes);
        assert_eq!(stats.pressure, 2);
        // From here on the program's demand is below the limit, and so is what it keeps.
        let start = Instant::now();
        let mut rounds = 0;
        while start.elapsed() < ms(1500) {
            let round: Vec<_> = (0..8).map(|i| Block::new(MIB, i)).collect();
            assert!(round.iter().all(Block::is_as_written));
            drop(round);
            rounds += 1;
            let stats = snapshot();
            assert!(stats.resident_bytes < LIMIT, "{} bytes", stats.resident_bytes);
            let resident = resident_bytes() - others;
            assert!(resident < LIMIT + (4 << 20), "{resident} bytes resident");
            std::thread::sleep(ms(20));
        }
        assert!(rounds > 10);
        assert!(live.iter().all(Block::is_as_written));
    }
    let stats = wait_for(ms(1500), |stats| stats.pressure == 0);
    assert_eq!(stats.pressure, 0, "the last look saw no pressure");
}

#[test]
fn free_pages_stay_within_a_limit_while_the_program_works() {
    if child(|_| work_within_a_limit()) {
        return;
    }
    let me = "free_pages_stay_within_a_limit_while_the_program_works";
    succeeds(me, "limit", "limit_bytes:64M,limit_percent:0,hot_window_ms:20000");
}
