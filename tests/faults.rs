//! Faults of a program that can be seen end it: one line on stderr that names the fault, then
//! SIGABRT. Running out of memory isn't one of them. Each case is a child process, this program
//! again.

use std::os::unix::process::ExitStatusExt;
use std::process::Output;

use thermalloc::api;
use thermalloc_tests::this_again;

const CASE: &str = "THERMALLOC_TEST_CASE";
const LARGE: usize = 8 << 20;
/// Has a class, and an extent of its own.
const MIDDLE: usize = 64 << 10;

const NOT_LIVE: &str = "free of a pointer that is not a live block";
const USE_NOT_LIVE: &str = "use of a pointer that is not a live block";
const INTO_MIDDLE: &str = "free of a pointer into the middle of a block";
const DOUBLE: &str = "double free";

/// A case's name, what it does, and how its line goes on.
type Case = (&'static str, fn(), &'static str);

static CASES: &[Case] = &[
    ("free_on_stack", || free(stack().as_mut_ptr()), NOT_LIVE),
    ("free_static", || free(THREE_PAGES.0.as_ptr().cast_mut()), NOT_LIVE),
    ("free_foreign", || free(Box::leak(Box::new([1u8; 64])).as_mut_ptr()), NOT_LIVE),
    ("free_low", || free(core::ptr::without_provenance_mut(16)), NOT_LIVE),
    ("free_high", || free(core::ptr::without_provenance_mut(usize::MAX & !15)), NOT_LIVE),
    ("free_page_of_freed", || free(freed(LARGE).wrapping_add(1 << 20)), NOT_LIVE),
    ("free_page_of_trimmed", free_page_of_trimmed, NOT_LIVE),
    ("free_beyond_window", || free(live(LARGE).wrapping_add(1 << 40)), NOT_LIVE),
    ("large_twice", || free(freed(LARGE)), NOT_LIVE),
    ("large_interior_page", || free(live(LARGE).wrapping_add(4096)), NOT_LIVE),
    ("large_interior", || free(live(LARGE).wrapping_add(16)), INTO_MIDDLE),
    ("large_old_after_move", large_old_after_move, NOT_LIVE),
    ("middle_interior_page", || free(live(MIDDLE).wrapping_add(8192)), NOT_LIVE),
    ("middle_interior", || flush(&[live(MIDDLE).wrapping_add(32)]), INTO_MIDDLE),
    ("middle_twice", || flush(&[freed(MIDDLE)]), DOUBLE),
    ("slot_interior", || flush(&[live(48).wrapping_add(8)]), INTO_MIDDLE),
    ("slot_interior_aligned", || flush(&[live(48).wrapping_add(16)]), INTO_MIDDLE),
    ("slot_interior_big", || flush(&[live(20_000).wrapping_add(4096)]), INTO_MIDDLE),
    ("slot_twice", || flush(&[freed(48)]), DOUBLE),
    ("slot_twice_with_others_between", slot_twice_with_others_between, DOUBLE),
    ("slot_twice_after_flush", slot_twice_after_flush, DOUBLE),
    ("slot_twice_on_two_threads", slot_twice_on_two_threads, DOUBLE),
    ("slot_twice_without_a_trim", slot_twice_without_a_trim, DOUBLE),
    ("realloc_wild", || _ = realloc(stack().as_mut_ptr(), 100), USE_NOT_LIVE),
    ("realloc_of_freed", || _ = realloc(freed(LARGE), 100), USE_NOT_LIVE),
    ("realloc_interior", || _ = realloc(live(LARGE).wrapping_add(4096), 100), USE_NOT_LIVE),
    ("usable_size_wild", || _ = usable_size(stack().as_ptr()), USE_NOT_LIVE),
    ("usable_size_of_freed", || _ = usable_size(freed(LARGE)), USE_NOT_LIVE),
];

#[repr(align(4096))]
struct ThreePages([u8; 3 * 4096]);
static THREE_PAGES: ThreePages = ThreePages([1; 3 * 4096]);

fn stack() -> [u8; 64] {
    core::hint::black_box([1; 64])
}

fn free(p: *mut u8) {
    // SAFETY: no block, or no longer: this process has nothing to lose.
    unsafe { api::free(p) };
}

fn realloc(p: *mut u8, size: usize) -> *mut u8 {
    // SAFETY: as above.
    unsafe { api::realloc(p, size) }
}

fn usable_size(p: *const u8) -> usize {
    // SAFETY: as above.
    unsafe { api::usable_size(p) }
}

fn live(size: usize) -> *mut u8 {
    let p = api::alloc(size);
    assert!(!p.is_null());
    p
}

fn freed(size: usize) -> *mut u8 {
    let p = live(size);
    free(p);
    p
}

/// Frees `blocks`, and empties the caches: then they reach their slabs.
fn flush(blocks: &[*mut u8]) {
    blocks.iter().copied().for_each(free);
    api::trim();
}

fn free_page_of_trimmed() {
    let p = live(100);
    flush(&[p]);
    free(p);
}

fn large_old_after_move() {
    let p = live(LARGE);
    let _next = live(LARGE);
    let moved = realloc(p, 4 * LARGE);
    assert_ne!(moved, p);
    free(p);
}

fn slot_twice_with_others_between() {
    let blocks: Vec<_> = (0..50).map(|_| live(48)).collect();
    blocks.iter().copied().for_each(free);
    flush(&[blocks[20]]);
}

fn slot_twice_after_flush() {
    let _keeps_the_slab = live(48);
    let p = live(48);
    flush(&[p]);
    flush(&[p]);
}

fn slot_twice_on_two_threads() {
    let p = live(200).expose_provenance();
    let free_it = move || free(core::ptr::with_exposed_provenance_mut(p));
    std::thread::spawn(free_it).join().expect("no panic");
    std::thread::spawn(free_it).join().expect("no panic");
    api::trim();
}

/// Caches and batches overflow of themselves when enough is freed. Every other block stays, so that
/// no slab is given up meanwhile.
fn slot_twice_without_a_trim() {
    let blocks: Vec<_> = (0..40_000).map(|_| live(48)).collect();
    blocks.iter().step_by(2).copied().for_each(free);
    free(blocks[20_000]);
    blocks.iter().skip(1).step_by(2).copied().for_each(free);
}

/// Runs the case that the environment names, if this is a child.
fn child(run: impl FnOnce(&str)) -> bool {
    let Some(case) = std::env::var_os(CASE) else { return false };
    limit(libc::RLIMIT_CORE, 0);
    run(case.to_str().expect("a name"));
    true
}

fn limit(which: libc::__rlimit_resource_t, bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: only reads the limit.
    assert_eq!(unsafe { libc::setrlimit(which, &raw const limit) }, 0);
}

/// This program again, for `case` of `test`.
fn run(test: &str, case: &str, options: &str) -> Output {
    this_again(test, (CASE, case), options)
}

#[test]
fn a_fault_is_one_line_and_an_abort() {
    if child(|case| CASES.iter().find(|known| known.0 == case).expect("a case").1()) {
        return;
    }
    let caches = ["rseq:true", "rseq:false"];
    for (options, (case, _, named)) in caches.iter().flat_map(|o| CASES.iter().map(move |c| (o, c)))
    {
        let output = run("a_fault_is_one_line_and_an_abort", case, options);
        let stderr = String::from_utf8_lossy(&output.stderr);
        // `timeout` ends by the signal that ended the program, or with 128 more.
        let aborted = output.status.signal() == Some(libc::SIGABRT)
            || output.status.code() == Some(128 + libc::SIGABRT);
        assert!(aborted, "{case}, {options}: {}: {stderr}", output.status);
        let line = stderr.strip_suffix('\n').unwrap_or("");
        assert!(!line.contains('\n'), "{case}, {options}: {stderr}");
        assert!(line.starts_with("thermalloc: "), "{case}, {options}: {stderr}");
        assert!(line["thermalloc: ".len()..].starts_with(named), "{case}, {options}: {stderr}");
    }
}

fn succeeds(test: &str, case: &str) {
    let output = run(test, case, "");
    let (stdout, stderr) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && stderr.is_empty(), "{}: {stdout}{stderr}", output.status);
}

#[test]
fn more_than_there_can_be_is_null() {
    let small = live(100);
    let large = live(LARGE);
    for size in
        [usize::MAX, usize::MAX - 4095, isize::MAX as usize + 1, isize::MAX as usize, 1 << 46]
    {
        assert!(api::alloc(size).is_null(), "{size:#x}");
        assert!(api::alloc_zeroed(size).is_null(), "{size:#x}");
        for lg in [0, 4, 12, 21, 30, 47, 62, 63] {
            assert!(api::alloc_aligned(size, 1 << lg).is_null(), "{size:#x} at 2^{lg}");
            assert!(api::alloc_aligned_zeroed(size, 1 << lg).is_null(), "{size:#x} at 2^{lg}");
        }
        for p in [small, large] {
            assert!(realloc(p, size).is_null(), "{size:#x}");
        }
    }
    for lg in 47..64 {
        assert!(api::alloc_aligned(1, 1 << lg).is_null(), "at 2^{lg}");
    }
    assert_eq!((usable_size(small), usable_size(large)), (112, LARGE));
    free(small);
    free(large);
}

/// Allocates until there is no more, then frees all of that and does it again.
fn exhaust(size: usize) {
    limit(libc::RLIMIT_AS, 160 << 20);
    let mut most = 0;
    for round in 0..3 {
        let mut last: *mut *mut u8 = core::ptr::null_mut();
        let mut n = 0usize;
        loop {
            let block = api::alloc(size).cast::<*mut u8>();
            if block.is_null() {
                break;
            }
            // SAFETY: a block of at least 16 bytes: a list through the blocks takes no other memory.
            unsafe { block.write(last.cast()) };
            last = block;
            n += 1;
        }
        assert!(api::alloc_zeroed(size).is_null() && api::alloc_aligned(size, 4096).is_null());
        assert!(realloc(last.cast(), 300 << 20).is_null());
        while !last.is_null() {
            // SAFETY: written above.
            let next = unsafe { last.read() };
            free(last.cast());
            last = next.cast();
        }
        assert!(n * size > 40 << 20, "only {n} blocks of {size} in round {round}");
        assert!(round == 0 || n * 4 >= most * 3, "{n} blocks of {size} now, {most} at first");
        most = most.max(n);
    }
}

#[test]
fn out_of_memory_is_null_and_passes() {
    const ME: &str = "out_of_memory_is_null_and_passes";
    if child(|case| exhaust(case.parse().expect("a size"))) {
        return;
    }
    for size in ["48", "3000", "30000", "65536", "1048576", "5000000", "33554432"] {
        succeeds(ME, size);
    }
}

/// A program that starts with nothing to spare: the first allocation may fail, nothing may end.
#[test]
fn no_memory_to_start_with_is_null() {
    if child(|_| {
        let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: only writes the limit.
        assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut before) }, 0);
        let none = libc::rlimit { rlim_cur: 1 << 20, ..before };
        // SAFETY: only reads the limit.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const none) }, 0);
        let (small, large) = (api::alloc(100), api::alloc(LARGE));
        // SAFETY: as above.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const before) }, 0);
        assert!(small.is_null() && large.is_null(), "1 MiB is less than this program has already");
        free(live(100));
        free(live(LARGE));
    }) {
        return;
    }
    succeeds("no_memory_to_start_with_is_null", "start");
}
