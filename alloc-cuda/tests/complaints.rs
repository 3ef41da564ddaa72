//! What users of other pools complain about, each as a test. The numbers are those of the table in the
//! documentation.
#![allow(clippy::cast_possible_truncation, reason = "small numbers")]

mod common;

use common::{CHUNK, MIB, Machine, config};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use thermalloc_cuda::driver::{Call, Stream};
use thermalloc_cuda::{Backing, DefaultPool, Export, ExportError, Pool, Reuse};
use thermalloc_cuda_sim::{Config, Mistake, Progress};

fn plain() -> Config {
    Config { vmm: false, pools: false, progress: Progress::Eager, ..config() }
}

/// 1: 12 GB reserved for 1 GB in use, since a large segment was split to pieces.
#[test]
fn c01_small_blocks_do_not_pin_a_large_segment() {
    let m = Machine::with(plain(), |builder| builder.backing(Backing::Plain));
    let stream = m.stream();
    let large = m.pool.alloc(1000 * MIB, stream).unwrap();
    m.free(large);
    let small: Vec<u64> = (0..200).map(|_| m.pool.alloc(3 * MIB, stream).unwrap()).collect();
    for (i, &block) in small.iter().enumerate() {
        if i % 10 != 0 {
            m.free(block);
        }
    }
    m.pool.trim(0);
    // The large segment went as a whole.
    assert!(m.pool.stats().reserved_bytes < 700 * MIB, "{}", m.pool.report());
    let m = Machine::new(config());
    let stream = m.stream();
    let blocks: Vec<u64> = (0..500).map(|_| m.pool.alloc(6 * MIB, stream).unwrap()).collect();
    for (i, &block) in blocks.iter().enumerate() {
        if i % 50 != 0 {
            m.free(block);
        }
    }
    m.pool.trim(0);
    // With virtual memory everything around a block goes.
    assert!(m.pool.stats().reserved_bytes <= 10 * 8 * MIB, "{}", m.pool.report());
}

/// 2: memory used by a second stream comes back late and nobody knows when.
#[test]
fn c02_a_use_on_another_stream_ends_when_it_is_over() {
    let m = Machine::new(Config { progress: Progress::Lazy, ..config() });
    let (a, b, event) = (m.stream(), m.stream(), m.event());
    let ptr = m.pool.alloc(10 * MIB, a).unwrap();
    m.write(a, ptr, MIB, 1);
    m.hand_over(event, a, b);
    m.pool.record_use(ptr, b).unwrap();
    m.expect(b, ptr, MIB, 1);
    m.pool.end_use(ptr, b).unwrap();
    // Much later work on the stream does not keep the block.
    let other = m.pool.alloc(MIB, b).unwrap();
    (0..100).for_each(|_| m.write(b, other, MIB, 2));
    m.free(ptr);
    let stats = m.pool.stats();
    assert_eq!((stats.pending_bytes, stats.pending_blocks), (10 * MIB, 1), "it can be seen");
    // The event that the use ended with comes long before the stream is idle.
    for _ in 0..20 {
        m.pool.poll();
    }
    assert_eq!(m.pool.stats().pending_bytes, 0);
    m.sim.assert_clean();
}

/// 3: a forgotten use is a race, which the checker shows; with it there is none.
#[test]
fn c03_a_recorded_use_is_waited_for_and_a_forgotten_one_is_seen() {
    for records in [true, false] {
        let m = Machine::new(config());
        let (a, b, event) = (m.stream(), m.stream(), m.event());
        for _ in 0..50 {
            let ptr = m.pool.alloc(4 * MIB, a).unwrap();
            m.write(a, ptr, MIB, 1);
            m.hand_over(event, a, b);
            if records {
                m.pool.record_use(ptr, b).unwrap();
            }
            m.expect(b, ptr, MIB, 1);
            m.free(ptr);
        }
        assert_eq!(m.sim.count(Mistake::Race) == 0, records);
    }
}

/// 4: an out-of-memory text that confuses its terms.
#[test]
fn c04_the_error_tells_what_there_is_and_what_helps() {
    let m = Machine::with(config(), |builder| builder.limit_bytes(100 * MIB).wait_ms(None));
    let (a, b) = (m.stream(), m.stream());
    let weights = {
        let _tag = m.pool.tag("weights");
        m.pool.alloc(60 * MIB, a).unwrap()
    };
    let pending = m.pool.alloc(30 * MIB, a).unwrap();
    m.pool.record_use(pending, b).unwrap();
    m.sim.configure(|config| config.progress = Progress::Lazy);
    (0..200).for_each(|_| m.write(b, pending, MIB, 1));
    m.free(pending);
    m.sim.set_other_process_bytes(0, 3 << 30);
    let error = m.pool.alloc(50 * MIB, a).unwrap_err();
    let report = error.out_of_memory().unwrap();
    assert_eq!(report.asked_bytes, 50 * MIB);
    assert_eq!(report.active_bytes, 60 * MIB);
    assert_eq!(report.limit_bytes, Some(100 * MIB));
    assert_eq!(report.others_bytes, 3 << 30);
    assert_eq!(report.holders[0].name, "weights");
    assert_eq!(report.holders[0].bytes, 60 * MIB);
    assert!(report.pending.iter().any(|on| on.stream == b && on.bytes == 30 * MIB));
    let text = error.to_string();
    for part in ["50.00 MiB asked for", "pending on stream", "hint:", "limit 100.00 MiB", "weights"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(text.contains("raise limit_bytes"), "the hint fits: {text}");
    // Nothing is lost.
    m.pool.check().unwrap();
    m.free(weights);
    m.sync(b);
    m.pool.poll();
    let whole = m.pool.alloc(90 * MIB, a).unwrap();
    m.free(whole);
}

/// 5: NVML is missing on a slice of a device, and an assertion hides the error.
#[test]
fn c05_a_slice_of_a_device_gives_a_plain_error() {
    let m = Machine::new(Config { mig: true, vram_bytes: 512 * MIB, ..config() });
    let stream = m.stream();
    let error = m.pool.alloc(1 << 30, stream).unwrap_err();
    assert!(error.out_of_memory().unwrap().device_total_bytes > 0);
    assert!(m.pool.alloc(100 * MIB, stream).is_ok());
}

/// 6: virtual memory has no legacy handle, and the failure says nothing.
#[test]
fn c06_a_block_travels_by_the_way_that_its_backing_has() {
    let m = Machine::new(config());
    let stream = m.stream();
    let ptr = m.pool.alloc(5 * MIB, stream).unwrap();
    let error = m.pool.legacy_handle(ptr).unwrap_err();
    assert!(matches!(error, ExportError::Backing { backing: Backing::Virtual, .. }));
    assert!(error.to_string().contains("file descriptors"), "{error}");
    m.write(stream, ptr, 5 * MIB, 9);
    m.sync(stream);
    let export = m.pool.export(ptr).unwrap();
    let Export::Fds { fds, bytes, .. } = &export else { panic!("{export:?}") };
    assert!(fds.len() >= 3 && *bytes == 5 * MIB);
    let imported = m.pool.import(&export).unwrap();
    m.expect(stream, imported.ptr(), 5 * MIB, 9);
    m.sync(stream);
    drop(imported);
    m.sim.assert_clean();

    let m = Machine::with(plain(), |builder| builder.backing(Backing::Plain));
    let stream = m.stream();
    let ptr = m.pool.alloc(5 * MIB, stream).unwrap();
    assert!(m.pool.legacy_handle(ptr).is_ok());
    assert!(matches!(m.pool.export(ptr), Ok(Export::Legacy { .. })));

    let m = Machine::with(config(), |builder| builder.backing(Backing::DriverPool));
    let ptr = m.pool.alloc(5 * MIB, m.stream()).unwrap();
    assert!(m.pool.export(ptr).unwrap_err().to_string().contains("the driver's pool"));
}

/// 7: memory given back twice when a program sleeps and wakes.
#[test]
fn c07_giving_back_twice_is_harmless_and_waking_finds_memory() {
    let m = Machine::new(Config { progress: Progress::Eager, ..config() });
    let stream = m.stream();
    for _ in 0..3 {
        let ptr = m.pool.alloc(100 * MIB, stream).unwrap();
        m.write(stream, ptr, MIB, 1);
        m.free(ptr);
        assert!(m.pool.trim(0) >= 100 * MIB);
        assert_eq!(m.pool.trim(0), 0);
        assert_eq!(m.sim.used_bytes(0), 0);
    }
    m.sim.assert_clean();
}

/// 8: a pluggable allocator without statistics.
#[test]
fn c08_statistics_are_exact_without_a_framework() {
    let m = Machine::new(config());
    let stream = m.stream();
    let ptr = m.pool.alloc(3 * MIB + 1, stream).unwrap();
    let stats = m.pool.stats();
    assert_eq!(stats.requested_bytes, 3 * MIB + 1);
    assert_eq!(stats.reserved_bytes, m.sim.used_bytes(0));
    assert_eq!(stats.allocs, 1);
    assert!(m.pool.report().contains("requested_bytes"));
    assert!(m.pool.driver_calls().iter().any(|&(name, _)| name == "cuMemCreate"));
    m.free(ptr);
}

/// 9: a pool that fails while a synchronisation and a second try succeed.
#[test]
fn c09_an_allocation_waits_for_pending_memory_before_it_fails() {
    for backing in [Backing::Virtual, Backing::DriverPool, Backing::Plain] {
        let lazy = Config { progress: Progress::Lazy, ..config() };
        let m = Machine::with(lazy, |builder| {
            builder.backing(backing).limit_bytes(128 * MIB).reuse(Reuse::Complete)
        });
        let (a, b) = (m.stream(), m.stream());
        for round in 0..10 {
            let (stream, other) = if round % 2 == 0 { (a, b) } else { (b, a) };
            let ptr = m.pool.alloc(90 * MIB, stream).unwrap();
            (0..30).for_each(|_| m.write(stream, ptr, MIB, 1));
            m.free(ptr);
            let ptr = m.pool.alloc(90 * MIB, other).unwrap();
            m.write(other, ptr, MIB, 2);
            m.free(ptr);
        }
        assert!(m.pool.stats().oom_waits > 0 || backing != Backing::Virtual);
        m.sim.assert_clean();
    }
}

/// 9: fragments become one block.
#[test]
fn c09_fragments_are_stitched() {
    let m = Machine::with(config(), |builder| builder.limit_bytes(200 * MIB));
    let stream = m.stream();
    let blocks: Vec<u64> = (0..25).map(|_| m.pool.alloc(8 * MIB, stream).unwrap()).collect();
    blocks.iter().step_by(2).for_each(|&block| m.free(block));
    let whole = m.pool.alloc(100 * MIB, stream).unwrap();
    m.write(stream, whole, 100 * MIB, 3);
    m.expect(stream, whole, 100 * MIB, 3);
    assert_eq!(m.pool.stats().stitches, 1);
    m.free(whole);
    // The same again costs no call of the driver.
    let before = m.pool.stats();
    let again = m.pool.alloc(100 * MIB, stream).unwrap();
    let after = m.pool.stats();
    assert_eq!(again, whole);
    assert_eq!(after.driver_memory_calls, before.driver_memory_calls);
    m.free(again);
    m.sync(stream);
    m.sim.assert_clean();
}

/// 10: a wait within an allocation can deadlock with collectives; a lock held meanwhile worse.
#[test]
fn c10_waiting_can_be_switched_off_and_no_lock_is_held() {
    let m = Machine::with(config(), |builder| builder.limit_bytes(64 * MIB).wait_ms(None));
    m.sim.configure(|config| config.progress = Progress::Lazy);
    let (a, b) = (m.stream(), m.stream());
    let ptr = m.pool.alloc(40 * MIB, a).unwrap();
    m.pool.record_use(ptr, b).unwrap();
    m.write(b, ptr, MIB, 1);
    m.free(ptr);
    let before = m.sim.calls(Call::cuEventSynchronize) + m.sim.calls(Call::cuStreamSynchronize);
    let _ = m.pool.alloc(50 * MIB, a);
    let after = m.sim.calls(Call::cuEventSynchronize) + m.sim.calls(Call::cuStreamSynchronize);
    assert_eq!((after - before, m.pool.stats().oom_waits), (0, 0));

    m.sim.probe(Some(|_| thermalloc_cuda::fault::locks_held() > 0));
    m.pool.set_wait_ms(Some(100));
    for i in 1..60 {
        let stream = if i % 2 == 0 { a } else { b };
        if let Ok(ptr) = m.pool.alloc(i * MIB, stream) {
            m.write(stream, ptr, MIB, 1);
            m.free(ptr);
        }
        if i % 7 == 0 {
            m.pool.trim(0);
        }
        m.pool.poll();
    }
    assert_eq!(m.sim.count(Mistake::CallUnderLock), 0);
}

/// 11: stealing makes streams wait for each other; an event for each free is dear.
#[test]
fn c11_streams_keep_their_own_memory_and_frees_cost_no_event() {
    let m = Machine::new(config());
    let streams: Vec<Stream> = (0..4).map(|_| m.stream()).collect();
    for round in 0..200 {
        for &stream in &streams {
            let ptr = m.pool.alloc(64 << 10, stream).unwrap();
            m.write(stream, ptr, 100, round as u8);
            m.free(ptr);
        }
    }
    let stats = m.pool.stats();
    assert_eq!((stats.waits_inserted, stats.cross_stream_reuses), (0, 0));
    assert!(stats.event_records + stats.event_queries < 10, "{stats:?}");
}

/// 11: with waits as policy, memory crosses over and events are few.
#[test]
fn c11_a_wait_is_inserted_once_for_many_blocks() {
    let m = Machine::with(config(), |builder| {
        builder.reuse(Reuse::Wait).limit_bytes(100 * MIB).wait_ms(None)
    });
    m.sim.configure(|config| config.progress = Progress::Lazy);
    let (a, b) = (m.stream(), m.stream());
    let blocks: Vec<u64> = (0..20).map(|_| m.pool.alloc(4 * MIB, a).unwrap()).collect();
    blocks.iter().for_each(|&ptr| m.write(a, ptr, MIB, 1));
    blocks.iter().for_each(|&ptr| m.free(ptr));
    let blocks: Vec<u64> = (0..20).map(|_| m.pool.alloc(4 * MIB, b).unwrap()).collect();
    blocks.iter().for_each(|&ptr| m.write(b, ptr, MIB, 2));
    let stats = m.pool.stats();
    assert!(stats.cross_stream_reuses >= 10, "{stats:?}");
    assert!(stats.waits_inserted >= 1 && stats.waits_inserted <= 2, "{stats:?}");
    assert!(stats.event_records <= 4, "{stats:?}");
    m.sync(b);
    m.sim.assert_clean();
}

/// 12: the default pool's threshold of 0 gives everything back at each synchronisation.
#[test]
fn c12_the_default_pool_keeps_what_is_warm() {
    let m = Machine::new(Config { progress: Progress::Eager, ..config() });
    let stream = m.stream();
    let default = DefaultPool::of(Arc::clone(&m.driver), 0).unwrap();
    let use_it = || {
        let mut ptr = 0;
        // SAFETY: a valid place to write to.
        unsafe { m.driver.mem_alloc_async(&raw mut ptr, 64 << 20, stream) }.unwrap();
        // SAFETY: a live block.
        unsafe { m.driver.mem_free_async(ptr, stream) }.unwrap();
        m.sync(stream);
        default.stats().unwrap().reserved_bytes
    };
    assert_eq!(use_it(), 0);
    default.set_threshold(u64::MAX).unwrap();
    assert!(use_it() >= 64 * MIB);
    assert!(default.cool().unwrap() >= 64 * MIB, "the peak stays");
    assert!(default.stats().unwrap().reserved_bytes >= 64 * MIB);
    default.cool().unwrap();
    assert_eq!(default.stats().unwrap().reserved_bytes, 0, "and goes when it was not used");
    // This pool keeps its memory by itself.
    let ptr = m.pool.alloc(64 * MIB, stream).unwrap();
    m.free(ptr);
    m.sync(stream);
    assert!(m.pool.stats().reserved_bytes >= 64 * MIB);
}

/// 13: devices without pools or virtual memory.
#[test]
fn c13_what_a_device_lacks_is_worked_around_and_named() {
    for (vmm, pools, backing) in [
        (true, true, Backing::Virtual),
        (false, true, Backing::DriverPool),
        (false, false, Backing::Plain),
    ] {
        let m = Machine::new(Config { vmm, pools, ..config() });
        assert_eq!(m.pool.backing(), backing);
        assert!(m.pool.report().contains(&backing.to_string()));
        let ptr = m.pool.alloc(10 * MIB, m.stream()).unwrap();
        m.free(ptr);
    }
    // A function that is missing counts as a feature that is.
    let m = Machine::new(Config { missing: vec![Call::cuMemCreate], ..config() });
    assert_eq!(m.pool.backing(), Backing::DriverPool);
    // So does a granularity that chunks do not fit.
    let m = Machine::new(Config { granularity_bytes: 64 << 20, ..config() });
    assert_ne!(m.pool.backing(), Backing::Virtual);
}

/// 14: an aborted capture keeps its pool for ever.
#[test]
fn c14_an_aborted_capture_leaves_nothing() {
    let m = Machine::new(Config { progress: Progress::Eager, ..config() });
    let stream = m.stream();
    let capture = m.pool.begin_capture(stream);
    let ptr = m.pool.alloc(50 * MIB, stream).unwrap();
    assert!(m.pool.stats().private_bytes >= 50 * MIB, "it is counted");
    m.free(ptr);
    drop(capture);
    let stats = m.pool.stats();
    assert_eq!((stats.private_bytes, stats.private_pools, stats.aborted_captures), (0, 0, 1));

    // One that was finished keeps its memory for as long as the graph.
    let capture = m.pool.begin_capture(stream);
    let ptr = m.pool.alloc(50 * MIB, stream).unwrap();
    m.free(ptr);
    let memory = capture.finish();
    m.pool.trim(0);
    assert!(m.pool.stats().private_bytes >= 50 * MIB);
    let other = m.pool.alloc(50 * MIB, stream).unwrap();
    assert_ne!(other, ptr, "it serves nobody else");
    m.free(other);
    drop(memory);
    assert_eq!(m.pool.stats().private_bytes, 0);
    m.sim.assert_clean();
}

/// 14: a real capture: nothing that the driver forbids is called, and replays are without race.
#[test]
fn c14_a_capture_makes_no_forbidden_call() {
    let m = Machine::new(config());
    let stream = m.stream();
    let warm = m.pool.alloc(20 * MIB, stream).unwrap();
    m.write(stream, warm, MIB, 1);
    m.free(warm);
    let capture = m.pool.begin_capture(stream);
    let mode = thermalloc_cuda::driver::constant::STREAM_CAPTURE_MODE_GLOBAL;
    // SAFETY: a live stream.
    unsafe { m.driver.stream_begin_capture(stream, mode) }.unwrap();
    for i in 1..20 {
        let ptr = m.pool.alloc(i * MIB, stream).unwrap();
        m.write(stream, ptr, MIB, 5);
        m.expect(stream, ptr, MIB, 5);
        m.free(ptr);
    }
    m.pool.poll();
    m.pool.trim(0);
    let mut graph = thermalloc_cuda::driver::Graph::NULL;
    // SAFETY: a valid place to write to.
    unsafe { m.driver.stream_end_capture(stream, &raw mut graph) }.unwrap();
    let memory = capture.finish();
    let mut exec = thermalloc_cuda::driver::GraphExec::NULL;
    // SAFETY: a live graph and a valid place to write to.
    unsafe { m.driver.graph_instantiate(&raw mut exec, graph, 0) }.unwrap();
    for round in 0..10 {
        // Other work between the launches does not touch the graph's memory.
        let ptr = m.pool.alloc(30 * MIB, stream).unwrap();
        m.write(stream, ptr, MIB, round);
        m.free(ptr);
        // SAFETY: live objects.
        unsafe { m.driver.graph_launch(exec, stream) }.unwrap();
    }
    m.sync(stream);
    // SAFETY: nothing runs any more.
    unsafe { m.driver.graph_exec_destroy(exec) }.unwrap();
    // SAFETY: as above.
    unsafe { m.driver.graph_destroy(graph) }.unwrap();
    drop(memory);
    m.sim.assert_clean();
}

/// 15: pinned memory rounded up to twice its size.
#[test]
fn c15_pinned_memory_is_close_to_what_was_asked_for() {
    let m = Machine::new(config());
    let (stream, pinned) = (m.stream(), m.pool.pinned());
    let bytes = (72 << 20) + 1;
    let ptr = pinned.alloc(bytes).unwrap();
    assert!(pinned.stats().pinned_bytes - (bytes as u64) < 4096);
    pinned.record_use(ptr, stream);
    let device = m.pool.alloc(MIB, stream).unwrap();
    // SAFETY: live memory on both sides.
    unsafe { m.driver.memcpy_htod_async(device, ptr.as_ptr().cast(), 1 << 20, stream) }.unwrap();
    m.sim.configure(|config| config.progress = Progress::Lazy);
    // SAFETY: the copy was recorded.
    assert!(unsafe { pinned.free(ptr) });
    // SAFETY: it must be refused.
    assert!(!unsafe { pinned.free(ptr) });
    let other = pinned.alloc(bytes).unwrap();
    assert_ne!(other, ptr, "the copy may still read it");
    m.sync(stream);
    // SAFETY: nobody uses it.
    assert!(unsafe { pinned.free(other) });
    let again: Vec<_> = (0..2).map(|_| pinned.alloc(bytes).unwrap()).collect();
    assert!(again.contains(&ptr) && again.contains(&other));
    assert_eq!(pinned.stats().misses, 2);
    for ptr in again {
        // SAFETY: nobody uses it.
        unsafe { pinned.free(ptr) };
    }
    assert!(pinned.trim(0) > 0);
    assert_eq!((pinned.stats().pinned_bytes, m.sim.pinned_bytes()), (0, 0));
    m.free(device);
    m.sim.configure(|config| config.pinned_limit_bytes = 1 << 20);
    let error = pinned.alloc(100 << 20).unwrap_err();
    assert!(error.to_string().contains("RLIMIT_MEMLOCK"), "{error}");
    drop(pinned);
    m.sim.assert_clean();
}

/// 17: a panic where there is no driver. That this process has none is the usual case.
#[test]
fn c17_no_driver_is_an_error() {
    match Pool::builder(0).build() {
        Err(error) => assert!(error.to_string().contains("CUDA driver"), "{error}"),
        Ok(pool) => assert!(pool.device_bytes() > 0),
    }
    let m = Machine::new(config());
    assert!(Pool::builder(7).build_on(Arc::clone(&m.driver)).is_err(), "no such device");
}

/// Cold memory goes back, hot memory never does.
#[test]
fn heat_keeps_the_peak_of_the_window_and_gives_the_rest_back() {
    let m = Machine::new(Config { progress: Progress::Eager, ..config() });
    let stream = m.stream();
    let keep = m.pool.alloc(20 * MIB, stream).unwrap();
    // A program with a period within the window keeps all of it, and maps nothing.
    for _ in 0..40 {
        let ptr = m.pool.alloc(500 * MIB, stream).unwrap();
        m.write(stream, ptr, MIB, 1);
        m.free(ptr);
        m.advance_ms(1000);
        m.pool.poll();
    }
    assert_eq!(m.pool.stats().trimmed_bytes, 0);
    assert_eq!(m.pool.stats().growths, 2);
    // It goes within window and decay once it is not used any more.
    for _ in 0..8 {
        m.advance_ms(1000);
        m.pool.poll();
    }
    let left = m.pool.stats().reserved_bytes;
    assert!(left <= 20 * MIB + 20 * MIB, "{left}");
    m.free(keep);
    for _ in 0..10 {
        m.advance_ms(1000);
        m.pool.poll();
    }
    assert_eq!(m.pool.stats().reserved_bytes, 0, "an idle program has nothing");
    m.sim.assert_clean();
}

/// Another process that needs memory gets what is free here.
#[test]
fn pressure_gives_free_memory_back_at_once() {
    let m = Machine::new(Config { vram_bytes: 4 << 30, progress: Progress::Eager, ..config() });
    let stream = m.stream();
    let ptr = m.pool.alloc(2 << 30, stream).unwrap();
    m.free(ptr);
    m.pool.poll();
    assert!(m.pool.stats().reserved_bytes >= 2 << 30);
    m.sim.set_other_process_bytes(0, 2 << 30);
    m.pool.poll();
    let stats = m.pool.stats();
    assert!(stats.pressure_events >= 1 && stats.trimmed_bytes >= 64 * MIB, "{stats:?}");
}

/// The callback is asked when all else failed, may free, and is asked again while it says so.
#[test]
fn the_callback_frees_and_the_allocation_goes_on() {
    let asked = Arc::new(AtomicU32::new(0));
    let victim = Arc::new(AtomicU64::new(0));
    let pool: Arc<std::sync::OnceLock<Pool>> = Arc::default();
    let (count, block, known) = (Arc::clone(&asked), Arc::clone(&victim), Arc::clone(&pool));
    let m = Machine::with(config(), |builder| {
        builder.limit_bytes(100 * MIB).on_out_of_memory(move |_| {
            count.fetch_add(1, Relaxed);
            let ptr = block.swap(0, Relaxed);
            let pool = known.get().filter(|_| ptr != 0);
            // SAFETY: nobody uses the block any more.
            pool.is_some_and(|pool| unsafe { pool.free(ptr) }.is_ok())
        })
    });
    let _ = pool.set(m.pool.clone());
    let stream = m.stream();
    victim.store(m.pool.alloc(90 * MIB, stream).unwrap(), Relaxed);
    let ptr = m.pool.alloc(80 * MIB, stream).unwrap();
    assert_eq!(asked.load(Relaxed), 1);
    assert!(m.pool.alloc(80 * MIB, stream).is_err());
    assert_eq!(asked.load(Relaxed), 2);
    m.free(ptr);
}

/// A failure of any call leaves the books right.
#[test]
fn a_failing_driver_loses_nothing() {
    for call in [
        Call::cuMemCreate,
        Call::cuMemMap,
        Call::cuMemSetAccess,
        Call::cuMemAddressReserve,
        Call::cuEventCreate,
        Call::cuEventRecord,
        Call::cuEventQuery,
        Call::cuStreamWaitEvent,
        Call::cuMemGetInfo_v2,
    ] {
        for skip in [0, 1, 5] {
            let m = Machine::with(config(), |builder| builder.limit_bytes(300 * MIB));
            let (a, b) = (m.stream(), m.stream());
            let mut live = Vec::new();
            m.sim.fail(call, skip, 3, 2);
            for i in 0..40 {
                let stream = if i % 3 == 0 { b } else { a };
                if let Ok(ptr) = m.pool.alloc((i % 13 + 1) * 3 * MIB, stream) {
                    m.write(stream, ptr, MIB, 1);
                    live.push(ptr);
                }
                if live.len() > 5 {
                    m.free(live.remove(0));
                }
                m.pool.poll();
                m.pool.check().unwrap_or_else(|error| panic!("{call:?} {skip}: {error}"));
            }
            m.sim.fail_nothing();
            live.into_iter().for_each(|ptr| m.free(ptr));
            let ptr =
                m.pool.alloc(250 * MIB, a).unwrap_or_else(|error| panic!("{call:?}: {error}"));
            m.free(ptr);
            m.sim.assert_clean();
        }
    }
}

/// A destroyed stream's memory serves a new stream of the same handle only when it is complete.
#[test]
fn a_forgotten_stream_hands_its_memory_over_safely() {
    let m = Machine::with(config(), |builder| builder.limit_bytes(64 * MIB));
    for _ in 0..30 {
        let stream = m.stream();
        let ptr = m.pool.alloc(20 * MIB, stream).unwrap();
        m.write(stream, ptr, MIB, 1);
        m.free(ptr);
        m.pool.forget_stream(stream).unwrap();
        // SAFETY: a live stream, not used after.
        unsafe { m.driver.stream_destroy(stream) }.unwrap();
    }
    m.sim.assert_clean();
}

/// Managed memory: advice, a prefetch, and a named error where the device has none.
#[test]
fn managed_memory_takes_advice_and_moves() {
    use thermalloc_cuda::{Advice, Place};
    let m = Machine::new(config());
    let managed = m.pool.managed(4 << 20).unwrap();
    managed.advise(Advice::Prefer(Place::Device(0))).unwrap();
    managed.advise(Advice::ReadMostly).unwrap();
    managed.prefetch(Place::Device(0), m.stream()).unwrap();
    managed.prefetch(Place::Host, m.stream()).unwrap();
    drop(managed);
    m.sim.assert_clean();
    let m = Machine::new(Config { managed: false, ..config() });
    assert!(m.pool.managed(1).unwrap_err().to_string().contains("cuMemAllocManaged"));
}

/// Peers reach this pool's memory, that mapped later too.
#[test]
fn a_peer_reaches_the_memory() {
    let m = Machine::new(Config { devices: 2, ..config() });
    let stream = m.stream();
    let first = m.pool.alloc(5 * MIB, stream).unwrap();
    m.pool.allow_peer(1).unwrap();
    let second = m.pool.alloc(50 * CHUNK, stream).unwrap();
    m.free(first);
    m.free(second);
    m.sim.assert_clean();
}
