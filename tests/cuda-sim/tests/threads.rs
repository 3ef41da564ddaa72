//! Many threads at once: nothing is lost, nothing waits for ever, nothing is blamed wrongly.
#![allow(clippy::cast_possible_truncation, reason = "small sizes")]

mod common;

use std::ffi::c_void;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use common::{Machine, call};
use thermalloc_cuda::driver::{Event, Stream};
use thermalloc_cuda_sim::{Config, Data, Progress, Sim};

#[test]
fn threads_hand_memory_on_by_events() {
    const THREADS: usize = 4;
    const ROUNDS: usize = 3000;
    let m = Machine::new(Config { data: Data::Edges, ..Config::default() });
    let ptr = m.alloc(4096);
    // Whoever holds the baton waits for its event before touching the memory.
    let baton: Mutex<(Event, u8)> = Mutex::new((m.event(), 0));
    let first = m.stream();
    m.write(first, ptr, 4096, 0);
    m.record(baton.lock().unwrap().0, first);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                m.sim.use_device(&m.driver, 0).unwrap();
                let stream = m.stream();
                for round in 0..ROUNDS {
                    let mut baton = baton.lock().unwrap();
                    m.wait(stream, baton.0);
                    m.expect(stream, ptr, 4096, baton.1);
                    baton.1 = baton.1.wrapping_add(1);
                    m.write(stream, ptr, 4096, baton.1);
                    m.record(baton.0, stream);
                    drop(baton);
                    if round % 64 == 0 {
                        m.sync(stream);
                    }
                }
                m.sync(stream);
            });
        }
    });
    assert_eq!(usize::from(baton.lock().unwrap().1), THREADS * ROUNDS % 256);
    m.sim.assert_clean();
}

#[test]
fn host_functions_of_many_streams_while_all_wait() {
    unsafe extern "C" fn add(data: *mut c_void) {
        // SAFETY: the test's counter.
        unsafe { &*data.cast::<AtomicU32>() }.fetch_add(1, Ordering::Relaxed);
        std::thread::yield_now();
    }
    let m = Machine::new(Config { progress: Progress::Lazy, ..Config::default() });
    let counter = AtomicU32::new(0);
    let data = (&raw const counter) as usize;
    let streams: Vec<Stream> = (0..4).map(|_| m.stream()).collect();
    std::thread::scope(|scope| {
        for mine in 0..4 {
            let (m, streams) = (&m, &streams);
            scope.spawn(move || {
                m.sim.use_device(&m.driver, 0).unwrap();
                let event = m.event();
                for round in 0..200 {
                    call!(m, launch_host_func(streams[mine], add, data as *mut c_void)).unwrap();
                    m.record(event, streams[mine]);
                    m.wait(streams[(mine + 1) % 4], event);
                    match round % 4 {
                        0 => m.sync(streams[mine]),
                        1 => while !m.ready(event) {},
                        2 => call!(m, ctx_synchronize()).unwrap(),
                        _ => {}
                    }
                }
            });
        }
    });
    call!(m, ctx_synchronize()).unwrap();
    assert_eq!(counter.load(Ordering::Relaxed), 800);
    m.sim.assert_clean();
}

#[test]
fn whoever_waits_for_a_host_function_waits_for_its_end() {
    static STEP: AtomicU32 = AtomicU32::new(0);
    unsafe extern "C" fn slow(_data: *mut c_void) {
        STEP.store(1, Ordering::Release);
        std::thread::sleep(std::time::Duration::from_millis(50));
        STEP.store(2, Ordering::Release);
    }
    let m = Machine::new(Config { progress: Progress::Lazy, ..Config::default() });
    let (stream, event) = (m.stream(), m.event());
    call!(m, launch_host_func(stream, slow, std::ptr::null_mut())).unwrap();
    m.record(event, stream);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            m.sim.use_device(&m.driver, 0).unwrap();
            m.sync(stream);
        });
        while STEP.load(Ordering::Acquire) == 0 {
            std::thread::yield_now();
        }
        assert!(!m.ready(event) || STEP.load(Ordering::Acquire) == 2);
        m.sync(stream);
        assert_eq!(STEP.load(Ordering::Acquire), 2);
    });
}

#[test]
fn more_machines_than_places_wait_for_one() {
    let made = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for thread in 0..20u64 {
            let made = &made;
            scope.spawn(move || {
                let m = Machine::new(Config { seed: thread, ..Config::default() });
                let ptr = m.alloc(4096);
                m.free(ptr).unwrap();
                m.sim.assert_clean();
                made.fetch_add(1, Ordering::Relaxed);
            });
        }
    });
    assert_eq!(made.load(Ordering::Relaxed), 20);
}

#[test]
fn a_machine_that_is_gone_answers_with_an_error() {
    let sim = Sim::new(Config::default());
    let driver = sim.driver().unwrap();
    sim.use_device(&driver, 0).unwrap();
    // Another machine may have its place by now, and this thread has no context there.
    drop(sim);
    let mut ptr = 0;
    // SAFETY: a valid place to write to.
    assert!(unsafe { driver.mem_alloc(&raw mut ptr, 512) }.is_err());
}
