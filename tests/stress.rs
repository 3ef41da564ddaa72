//! A Rust program on the allocator under what is rare in others: forks while threads allocate, many
//! short threads, signals all the time.

use std::collections::HashMap;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use thermalloc::{Thermalloc, api};
use thermalloc_tests::fork_once;

#[global_allocator]
static GLOBAL: Thermalloc = Thermalloc;

/// Allocates blocks of many sizes, checks what is in them, and frees them out of order.
fn work(rounds: u32) {
    let mut kept: Vec<Vec<u32>> = Vec::new();
    for i in 0..rounds {
        let len = [3, 20, 100, 700, 5000, 30_000][i as usize % 6] + i as usize % 17;
        kept.push(vec![i; len]);
        if kept.len() > 12 {
            let gone = kept.swap_remove(i as usize % 12);
            assert!(gone.iter().all(|&v| v == gone[0]));
        }
    }
}

/// What a fork's child may do: only this thread is there, and only the allocator is used.
fn in_child() -> i32 {
    let mut last = [core::ptr::null_mut::<u8>(); 64];
    for i in 0..4000usize {
        let size = [16, 100, 1000, 20_000, 100_000, 2 << 20][i % 6];
        let p = api::alloc(size);
        if p.is_null() {
            return 1;
        }
        // SAFETY: a block of at least that many bytes.
        unsafe { p.write_bytes(7, size.min(512)) };
        let old = core::mem::replace(&mut last[i % 64], p);
        // SAFETY: null, or a block that only the array knew.
        unsafe { api::free(old) };
    }
    api::trim();
    0
}

#[test]
fn forks_while_threads_allocate() {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !stop.load(Relaxed) {
                    work(50);
                }
            });
        }
        let end = Instant::now() + Duration::from_secs(2);
        let mut forks = 0;
        while Instant::now() < end || forks < 20 {
            let status = fork_once(in_child);
            if status != 0 {
                stop.store(true, Relaxed);
            }
            assert_eq!(status, 0, "child {forks}");
            forks += 1;
        }
        stop.store(true, Relaxed);
    });
}

#[test]
fn programs_are_started_while_threads_allocate() {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Relaxed) {
                    work(50);
                }
            });
        }
        let failed = (0..50).find(|_| !Command::new("true").status().is_ok_and(|s| s.success()));
        stop.store(true, Relaxed);
        assert_eq!(failed, None);
    });
}

#[test]
fn five_thousand_short_threads() {
    // Each leaves something for a later thread to free.
    let (send, receive) = channel::<HashMap<u32, String>>();
    let mut received = 0;
    for batch in 0..625u32 {
        std::thread::scope(|scope| {
            for i in 0..8 {
                let send = send.clone();
                scope.spawn(move || {
                    work(15);
                    let id = batch * 8 + i;
                    send.send((id..id + 5).map(|n| (n, n.to_string())).collect())
                        .expect("a receiver");
                });
            }
        });
        while let Ok(map) = receive.try_recv() {
            assert!(map.iter().all(|(n, text)| *text == n.to_string()));
            received += 1;
        }
    }
    assert_eq!(received, 5000);
}

static SIGNALS: AtomicU32 = AtomicU32::new(0);

extern "C" fn on_signal(_: libc::c_int) {
    SIGNALS.fetch_add(1, Relaxed);
}

/// Each signal cuts a restartable sequence short.
#[test]
fn signals_while_threads_allocate() {
    // SAFETY: all zero bytes are a valid action.
    let mut action: libc::sigaction = unsafe { core::mem::zeroed() };
    action.sa_sigaction = on_signal as *const () as usize;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: the handler only adds to a counter.
    let set = unsafe { libc::sigaction(libc::SIGUSR1, &raw const action, core::ptr::null_mut()) };
    assert_eq!(set, 0);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (send, threads) = channel();
        for _ in 0..3 {
            let (send, stop) = (send.clone(), &stop);
            scope.spawn(move || {
                // SAFETY: the calling thread's own id.
                send.send(unsafe { libc::pthread_self() }).expect("a receiver");
                while !stop.load(Relaxed) {
                    work(50);
                }
            });
        }
        let threads: Vec<_> = threads.iter().take(3).collect();
        let end = Instant::now() + Duration::from_secs(1);
        while Instant::now() < end {
            for &thread in &threads {
                // SAFETY: the threads run until they are told to stop.
                unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        stop.store(true, Relaxed);
    });
    assert!(SIGNALS.load(Relaxed) > 100);
}
