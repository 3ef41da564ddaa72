//! What is ordered and what is not: planted races that must be seen, correct hand-offs that must not.

mod common;

use common::{MIB, Machine, call, strict};
use thermalloc_cuda::driver::{Stream, constant};
use thermalloc_cuda_sim::{Access, Config, Data, Mistake, Progress};

#[test]
fn streams_that_nothing_orders_race() {
    for (first_writes, second_writes, races) in
        [(true, true, 1), (true, false, 1), (false, true, 1), (false, false, 0)]
    {
        let m = Machine::new(strict());
        let (a, b) = (m.stream(), m.stream());
        let ptr = m.alloc(MIB);
        let access =
            |writes| if writes { Access::write(ptr, MIB, 1) } else { Access::read(ptr, MIB) };
        m.sim.launch(a, &[access(first_writes)]).unwrap();
        m.sim.launch(b, &[access(second_writes)]).unwrap();
        assert_eq!(m.races(), races, "{first_writes} {second_writes}");
    }
}

#[test]
fn the_verdict_does_not_depend_on_what_ran() {
    for progress in [Progress::Lazy, Progress::Random, Progress::Eager, Progress::Timed] {
        let m = Machine::new(Config { progress, ..strict() });
        let (a, b) = (m.stream(), m.stream());
        let ptr = m.alloc(4096);
        m.write(a, ptr, 4096, 1);
        m.sim.run_all();
        m.read(b, ptr + 4000, 8);
        assert_eq!(m.races(), 1, "{progress:?}: it has run, but nobody may know");
    }
}

#[test]
fn neighbours_do_not_race() {
    let m = Machine::new(strict());
    let (a, b) = (m.stream(), m.stream());
    let ptr = m.alloc(4096);
    m.write(a, ptr, 100, 1);
    m.write(b, ptr + 100, 100, 2);
    m.sim.assert_clean();
    m.write(b, ptr + 99, 1, 2);
    m.only(Mistake::Race);
}

#[test]
fn an_event_hands_over_and_its_wait_is_honoured() {
    for seed in 0..20 {
        let m = Machine::new(Config { progress: Progress::Random, seed, ..strict() });
        let (a, b, event) = (m.stream(), m.stream(), m.event());
        let ptr = m.alloc(MIB);
        for round in 0..50u8 {
            m.write(a, ptr, MIB / 8, round);
            m.record(event, a);
            m.wait(b, event);
            m.expect(b, ptr, MIB / 8, round);
            m.record(event, b);
            m.wait(a, event);
        }
        m.sync(a);
        m.sync(b);
        m.sim.assert_clean();
    }
}

#[test]
fn a_forgotten_wait_is_a_race_and_shows_in_the_data() {
    let m = Machine::new(strict());
    let (a, b) = (m.stream(), m.stream());
    let ptr = m.alloc(4096);
    m.write(a, ptr, 4096, 1);
    m.expect(b, ptr, 4096, 1);
    m.sync(b);
    assert_eq!((m.races(), m.sim.count(Mistake::WrongData)), (1, 1), "b ran before a");
}

#[test]
fn an_event_covers_what_was_before_its_record_only() {
    let m = Machine::new(strict());
    let (a, b, event) = (m.stream(), m.stream(), m.event());
    let (first, second) = (m.alloc(4096), m.alloc(4096));
    m.write(a, first, 4096, 1);
    m.record(event, a);
    m.write(a, second, 4096, 1);
    m.wait(b, event);
    m.read(b, first, 4096);
    m.sim.assert_clean();
    m.read(b, second, 4096);
    m.only(Mistake::Race);
}

#[test]
fn a_wait_means_the_record_that_was_there() {
    let m = Machine::new(strict());
    let (a, b, event) = (m.stream(), m.stream(), m.event());
    let ptr = m.alloc(4096);
    m.write(a, ptr, 4096, 1);
    m.wait(b, event);
    m.record(event, a);
    m.read(b, ptr, 4096);
    m.only(Mistake::Race);
}

#[test]
fn order_is_transitive() {
    let m = Machine::new(strict());
    let streams: Vec<Stream> = (0..8).map(|_| m.stream()).collect();
    let ptr = m.alloc(4096);
    m.write(streams[0], ptr, 4096, 9);
    for pair in streams.windows(2) {
        let event = m.event();
        m.record(event, pair[0]);
        m.wait(pair[1], event);
        call!(m, event_destroy(event)).unwrap();
    }
    m.expect(streams[7], ptr, 4096, 9);
    m.sync(streams[7]);
    m.sim.assert_clean();
}

#[test]
fn the_host_orders_by_waiting_and_by_asking() {
    let m = Machine::new(strict());
    let (a, b, event) = (m.stream(), m.stream(), m.event());
    let ptr = m.alloc(4096);
    m.write(a, ptr, 4096, 1);
    m.sync(a);
    m.write(b, ptr, 4096, 2);
    m.record(event, b);
    call!(m, event_synchronize(event)).unwrap();
    m.write(a, ptr, 4096, 3);
    m.record(event, a);
    let mut asked = 0;
    while !m.ready(event) {
        asked += 1;
        assert!(asked < 10, "polling ends");
    }
    assert!(asked > 0, "the first answer of a lazy device is that it is not ready");
    m.write(b, ptr, 4096, 4);
    call!(m, ctx_synchronize()).unwrap();
    m.write(a, ptr, 4096, 5);
    m.sim.assert_clean();
}

#[test]
fn an_event_that_is_not_ready_orders_nothing() {
    let m = Machine::new(strict());
    let (a, b, event) = (m.stream(), m.stream(), m.event());
    let ptr = m.alloc(4096);
    m.write(a, ptr, 4096, 1);
    m.record(event, a);
    assert!(!m.ready(event));
    m.write(b, ptr, 4096, 2);
    m.only(Mistake::Race);
}

#[test]
fn an_event_never_recorded_is_ready_and_orders_nothing() {
    let m = Machine::new(strict());
    let (a, b, event) = (m.stream(), m.stream(), m.event());
    let ptr = m.alloc(4096);
    m.write(a, ptr, 4096, 1);
    assert!(m.ready(event));
    m.wait(b, event);
    m.write(b, ptr, 4096, 2);
    m.only(Mistake::Race);
}

#[test]
fn the_legacy_stream_orders_blocking_streams_only() {
    let m = Machine::new(strict());
    let (blocking, other) = (m.stream_with(constant::STREAM_DEFAULT), m.stream());
    let ptr = m.alloc(4096);
    m.write(blocking, ptr, 4096, 1);
    m.expect(Stream::NULL, ptr, 4096, 1);
    m.write(Stream::LEGACY, ptr, 4096, 2);
    m.expect(blocking, ptr, 4096, 2);
    m.sync(blocking);
    m.sim.assert_clean();
    m.write(Stream::NULL, ptr, 4096, 3);
    m.write(other, ptr, 4096, 4);
    m.only(Mistake::Race);
    m.write(Stream::NULL, ptr, 4096, 5);
    m.only(Mistake::Race);
}

#[test]
fn the_legacy_stream_joins_two_blocking_streams() {
    let m = Machine::new(strict());
    let (a, b) = (m.stream_with(constant::STREAM_DEFAULT), m.stream_with(constant::STREAM_DEFAULT));
    let (x, y) = (m.alloc(4096), m.alloc(4096));
    m.write(a, x, 4096, 1);
    m.write(Stream::NULL, y, 4096, 1);
    m.expect(b, x, 4096, 1);
    m.sync(b);
    m.sim.assert_clean();
}

#[test]
fn waiting_for_the_legacy_stream_waits_for_blocking_streams() {
    let m = Machine::new(strict());
    let (blocking, other) = (m.stream_with(constant::STREAM_DEFAULT), m.stream());
    let ptr = m.alloc(4096);
    m.write(blocking, ptr, 4096, 1);
    m.sync(Stream::NULL);
    m.write(other, ptr, 4096, 2);
    m.sim.assert_clean();
    m.sync(Stream::NULL);
    m.write(blocking, ptr, 4096, 3);
    m.only(Mistake::Race);
}

#[test]
fn per_thread_streams_differ_between_threads_and_block() {
    let m = Machine::new(strict());
    let ptr = m.alloc(4096);
    m.write(Stream::PER_THREAD, ptr, 4096, 1);
    m.expect(Stream::NULL, ptr, 4096, 1);
    m.expect(Stream::PER_THREAD, ptr, 4096, 1);
    m.sync(Stream::PER_THREAD);
    m.sim.assert_clean();
    m.write(Stream::PER_THREAD, ptr, 4096, 2);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            m.sim.use_device(&m.driver, 0).unwrap();
            m.write(Stream::PER_THREAD, ptr, 4096, 3);
        });
        other.join().unwrap();
    });
    m.only(Mistake::Race);
}

#[test]
fn the_host_and_pinned_memory() {
    let m = Machine::new(strict());
    let stream = m.stream();
    let device = m.alloc(4096);
    let mut host = std::ptr::null_mut();
    call!(m, mem_host_alloc(&raw mut host, 4096, 0)).unwrap();
    m.write(stream, device, 4096, 7);
    call!(m, memcpy_dtoh_async(host, device, 4096, stream)).unwrap();
    m.sim.host_reads(host as u64, 4096);
    m.only(Mistake::Race);
    m.sync(stream);
    m.sim.host_reads(host as u64, 4096);
    // SAFETY: 4096 bytes of pinned memory, and the copy is complete.
    let last = unsafe { std::slice::from_raw_parts(host.cast::<u8>(), 4096) }[4095];
    assert_eq!(last, 7);
    call!(m, memcpy_htod_async(device, host, 4096, stream)).unwrap();
    m.sim.host_reads(host as u64, 4096);
    m.sim.assert_clean();
    m.sim.host_writes(host as u64, 1);
    m.only(Mistake::Race);
    call!(m, mem_free_host(host)).unwrap();
    m.sim.assert_clean();
}

#[test]
fn host_functions_run_in_order_without_the_lock() {
    unsafe extern "C" fn add(data: *mut std::ffi::c_void) {
        // SAFETY: the test's counter, which outlives its streams' work.
        unsafe { &*data.cast::<std::sync::atomic::AtomicU32>() }
            .fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }
    let m = Machine::new(strict());
    let (a, b, event) = (m.stream(), m.stream(), m.event());
    let counter = std::sync::atomic::AtomicU32::new(0);
    let data = (&raw const counter).cast_mut().cast();
    call!(m, launch_host_func(a, add, data)).unwrap();
    m.record(event, a);
    m.wait(b, event);
    call!(m, launch_host_func(b, add, data)).unwrap();
    assert_eq!(counter.load(std::sync::atomic::Ordering::Relaxed), 0);
    m.sync(b);
    assert_eq!(counter.load(std::sync::atomic::Ordering::Relaxed), 2);
    call!(m, launch_host_func(a, add, data)).unwrap();
    m.record(event, a);
    while !m.ready(event) {}
    assert_eq!(counter.load(std::sync::atomic::Ordering::Relaxed), 3, "polling lets it run too");
    m.sim.assert_clean();
}

#[test]
fn a_driver_call_from_a_host_function_is_a_mistake() {
    unsafe extern "C" fn calls(data: *mut std::ffi::c_void) {
        // SAFETY: the test's machine.
        let m = unsafe { &*data.cast::<Machine>() };
        assert!(m.alloc_async(512, Stream::NULL).is_err());
    }
    let m = Machine::new(strict());
    let stream = m.stream();
    call!(m, launch_host_func(stream, calls, (&raw const m).cast_mut().cast())).unwrap();
    m.sync(stream);
    m.only(Mistake::CallInHostFunction);
}

#[test]
fn the_same_seed_runs_the_same() {
    let run = |seed| {
        let m = Machine::new(Config {
            seed,
            progress: Progress::Random,
            data: Data::None,
            ..Config::default()
        });
        let streams: Vec<Stream> = (0..4).map(|_| m.stream()).collect();
        let ptr = m.alloc(4096);
        let event = m.event();
        (0..200)
            .map(|step| {
                m.read(streams[step % 4], ptr, 64);
                m.record(event, streams[(step + 1) % 4]);
                u8::from(m.ready(event))
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(run(5), run(5));
    assert_ne!(run(5), run(6));
}

#[test]
fn a_chain_of_ten_thousand_waits() {
    let m = Machine::new(Config {
        progress: Progress::Lazy,
        queue_depth: 1 << 20,
        ..Config::default()
    });
    let (a, b, event) = (m.stream(), m.stream(), m.event());
    let ptr = m.alloc(4096);
    for step in 0..10_000 {
        let (from, to) = if step % 2 == 0 { (a, b) } else { (b, a) };
        m.write(from, ptr, 512, 1);
        m.record(event, from);
        m.wait(to, event);
    }
    m.sync(a);
    m.sim.assert_clean();
}
