//! Memory of every kind: limits, accounts, what freeing and unmapping forbids.

#![allow(clippy::cast_possible_truncation, reason = "small sizes")]

mod common;

use common::{MIB, Machine, call, strict};
use thermalloc_cuda::driver::{Call, code, constant};
use thermalloc_cuda_sim::{Config, Data, Mistake, Progress};

const GRANULE: u64 = 2 * MIB;

#[test]
fn plain_memory_is_counted_and_limited() {
    let m = Machine::new(Config { vram_bytes: 64 * MIB, ..strict() });
    let a = m.alloc(32 * MIB);
    assert_eq!(m.free_bytes(), 32 * MIB);
    let mut ptr = 0;
    let error = call!(m, mem_alloc(&raw mut ptr, (33 * MIB) as usize)).unwrap_err();
    assert!(error.is_out_of_memory());
    m.sim.set_other_process_bytes(0, 20 * MIB);
    assert_eq!(m.free_bytes(), 12 * MIB);
    assert!(call!(m, mem_alloc(&raw mut ptr, (13 * MIB) as usize)).is_err());
    m.free(a).unwrap();
    assert_eq!(
        (m.free_bytes(), m.sim.used_bytes(0), m.sim.peak_used_bytes(0)),
        (44 * MIB, 0, 32 * MIB)
    );
    m.sim.assert_clean_and_empty();
}

#[test]
fn freeing_waits_for_the_device() {
    let m = Machine::new(strict());
    let (a, b) = (m.stream(), m.stream());
    let (ptr, other) = (m.alloc(4096), m.alloc(4096));
    m.write(a, other, 4096, 1);
    m.free(ptr).unwrap();
    m.write(b, other, 4096, 2);
    m.sim.assert_clean();
}

#[test]
fn freeing_twice_and_freeing_nothing() {
    let m = Machine::new(strict());
    let ptr = m.alloc(4096);
    m.free(ptr).unwrap();
    assert!(m.free(ptr).is_err());
    m.only(Mistake::DoubleFree);
    let ptr = m.alloc(4096);
    assert!(m.free(ptr + 512).is_err());
    m.only(Mistake::BadFree);
    assert!(m.free(0x1234_0000).is_err());
    m.only(Mistake::BadFree);
    assert_eq!(m.sim.leaks().len(), 1);
}

#[test]
fn use_after_free_is_told_from_nonsense_and_breaks_the_context() {
    let m = Machine::new(strict());
    let stream = m.stream();
    let ptr = m.alloc(4096);
    m.free(ptr).unwrap();
    m.write(stream, ptr, 4096, 1);
    m.only(Mistake::UseAfterFree);
    let sync = call!(m, stream_synchronize(stream)).unwrap_err();
    assert_eq!(sync.code(), Some(code::ERROR_ILLEGAL_ADDRESS));
    let mut again = 0;
    let sticky = call!(m, mem_alloc(&raw mut again, 512)).unwrap_err();
    assert_eq!(sticky.code(), Some(code::ERROR_ILLEGAL_ADDRESS));

    let m = Machine::new(strict());
    let stream = m.stream();
    let ptr = m.alloc(4096);
    m.read(stream, ptr + 4000, 4096);
    m.only(Mistake::IllegalAddress);
}

#[test]
fn handles_that_are_gone() {
    let m = Machine::new(strict());
    let (stream, event) = (m.stream(), m.event());
    call!(m, stream_destroy(stream)).unwrap();
    assert!(call!(m, stream_query(stream)).is_err());
    m.only(Mistake::BadHandle);
    call!(m, event_destroy(event)).unwrap();
    assert!(call!(m, event_destroy(event)).is_err());
    m.only(Mistake::BadHandle);
    let next = m.event();
    assert_ne!(next, event, "a handle is not used again");
}

#[test]
fn work_of_a_destroyed_stream_still_counts() {
    let m = Machine::new(strict());
    let a = m.stream();
    let ptr = m.alloc(4096);
    m.write(a, ptr, 4096, 1);
    call!(m, stream_destroy(a)).unwrap();
    let b = m.stream();
    m.write(b, ptr, 4096, 2);
    m.only(Mistake::Race);
}

#[test]
fn virtual_memory_maps_stitches_and_keeps_its_bytes() {
    let m = Machine::new(strict());
    let stream = m.stream();
    let (one, two) = (m.create(GRANULE, 0).unwrap(), m.create(GRANULE, 0).unwrap());
    let (range, other) = (m.reserve(2 * GRANULE), m.reserve(2 * GRANULE));
    m.map(range, GRANULE, one).unwrap();
    m.map(range + GRANULE, GRANULE, two).unwrap();
    m.write(stream, range, 2 * GRANULE, 5);
    m.write(stream, range, 16, 6);
    m.sync(stream);
    // The chunks in the other order, at another address.
    m.unmap(range, 2 * GRANULE).unwrap();
    m.map(other, GRANULE, two).unwrap();
    m.map(other + GRANULE, GRANULE, one).unwrap();
    m.expect(stream, other, GRANULE, 5);
    m.expect(stream, other + GRANULE, 16, 6);
    m.expect(stream, other + GRANULE + 16, GRANULE - 16, 5);
    m.sync(stream);
    m.sim.assert_clean();
    assert_eq!(m.sim.used_bytes(0), 2 * GRANULE);
    for handle in [one, two] {
        call!(m, mem_release(handle)).unwrap();
    }
    assert_eq!(m.sim.used_bytes(0), 2 * GRANULE, "a mapping keeps its memory");
    m.unmap(other, 2 * GRANULE).unwrap();
    assert_eq!(m.sim.used_bytes(0), 0);
    for ptr in [range, other] {
        call!(m, mem_address_free(ptr, (2 * GRANULE) as usize)).unwrap();
    }
    call!(m, stream_destroy(stream)).unwrap();
    m.sim.assert_clean_and_empty();
}

#[test]
fn a_race_is_seen_through_two_mappings_of_one_chunk() {
    let m = Machine::new(strict());
    let (a, b) = (m.stream(), m.stream());
    let chunk = m.create(GRANULE, 0).unwrap();
    let (here, there) = (m.reserve(GRANULE), m.reserve(GRANULE));
    m.map(here, GRANULE, chunk).unwrap();
    m.map(there, GRANULE, chunk).unwrap();
    m.write(a, here, 4096, 1);
    m.write(b, there + 4096, 4096, 1);
    m.sim.assert_clean();
    m.write(b, there, 4096, 1);
    m.only(Mistake::Race);
}

#[test]
fn unmapping_what_may_be_in_use() {
    let m = Machine::new(Config { sticky_faults: false, ..strict() });
    let (stream, event) = (m.stream(), m.event());
    let chunk = m.create(GRANULE, 0).unwrap();
    let range = m.reserve(GRANULE);
    m.map(range, GRANULE, chunk).unwrap();
    m.write(stream, range, 4096, 1);
    m.record(event, stream);
    m.sim.run_all();
    m.unmap(range, GRANULE).unwrap();
    m.only(Mistake::UnmapInUse);
    m.write(stream, range, 4096, 1);
    m.only(Mistake::UseAfterFree);
    assert!(m.unmap(range, GRANULE).is_err());
    m.only(Mistake::DoubleFree);

    m.map(range, GRANULE, chunk).unwrap();
    m.write(stream, range, 4096, 1);
    m.record(event, stream);
    while !m.ready(event) {}
    m.unmap(range, GRANULE).unwrap();
    m.sim.assert_clean();
}

#[test]
fn a_mapping_needs_access() {
    let m = Machine::new(strict());
    let stream = m.stream();
    let chunk = m.create(GRANULE, 0).unwrap();
    let range = m.reserve(GRANULE);
    call!(m, mem_map(range, GRANULE as usize, 0, chunk, 0)).unwrap();
    m.read(stream, range, 512);
    m.only(Mistake::IllegalAddress);
    m.access(range, GRANULE, constant::MEM_ACCESS_FLAGS_PROT_READ).unwrap();
    m.read(stream, range, 512);
    m.sim.assert_clean();
    m.write(stream, range, 512, 1);
    m.only(Mistake::IllegalAddress);
}

#[test]
fn what_virtual_memory_refuses() {
    let m = Machine::new(strict());
    let chunk = m.create(2 * GRANULE, 0).unwrap();
    let range = m.reserve(2 * GRANULE);
    let refused = |result: Result<(), thermalloc_cuda::driver::Error>| result.unwrap_err().code();
    assert_eq!(refused(m.create(GRANULE + 1, 0).map(|_| ())), Some(code::ERROR_INVALID_VALUE));
    assert_eq!(
        refused(call!(m, mem_map(range, GRANULE as usize, 0, chunk, 0))),
        Some(code::ERROR_INVALID_VALUE)
    );
    assert_eq!(
        refused(call!(m, mem_map(range + GRANULE, 2 * GRANULE as usize, 0, chunk, 0))),
        Some(code::ERROR_INVALID_VALUE)
    );
    m.map(range, 2 * GRANULE, chunk).unwrap();
    assert!(m.unmap(range, GRANULE).is_err(), "a part of a mapping");
    m.only(Mistake::BadFree);
    assert!(m.map(range, 2 * GRANULE, chunk).is_err());
    m.only(Mistake::BadFree);
    assert!(call!(m, mem_address_free(range, 2 * GRANULE as usize)).is_err(), "still mapped");
    m.only(Mistake::BadFree);
    call!(m, mem_release(chunk)).unwrap();
    assert!(call!(m, mem_release(chunk)).is_err());
    m.only(Mistake::DoubleFree);
}

#[test]
fn a_pool_reuses_in_stream_order_and_releases_at_a_threshold() {
    let m = Machine::new(strict());
    let (a, pool) = (m.stream(), m.default_pool());
    let first = m.alloc_async(MIB, a).unwrap();
    m.write(a, first, MIB, 1);
    m.free_async(first, a).unwrap();
    let second = m.alloc_async(MIB, a).unwrap();
    assert_eq!(first, second, "the same stream has it at once");
    m.write(a, second, MIB, 2);
    m.free_async(second, a).unwrap();
    assert_eq!(m.pool_attribute(pool, constant::MEMPOOL_ATTR_USED_MEM_CURRENT), 0);
    assert_eq!(m.pool_attribute(pool, constant::MEMPOOL_ATTR_USED_MEM_HIGH), MIB);
    assert_eq!(m.sim.used_bytes(0), 32 * MIB);
    m.sync(a);
    assert_eq!(m.sim.used_bytes(0), 0, "a threshold of 0 gives all back");
    m.set_pool_attribute(pool, constant::MEMPOOL_ATTR_RELEASE_THRESHOLD, u64::MAX);
    let third = m.alloc_async(MIB, a).unwrap();
    m.free_async(third, a).unwrap();
    m.sync(a);
    assert_eq!(m.sim.used_bytes(0), 32 * MIB);
    call!(m, mem_pool_trim_to(pool, 0)).unwrap();
    assert_eq!(m.sim.used_bytes(0), 0);
    m.sim.assert_clean();
}

#[test]
fn reuse_across_streams_follows_the_policies() {
    let (follow, opportunistic, internal) = (
        constant::MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES,
        constant::MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC,
        constant::MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES,
    );
    // What is allowed, whether an event orders the streams, whether the first has run; whether b gets it.
    for (allowed, ordered, ran, reused) in [
        (0, true, false, false),
        (follow, true, false, true),
        (follow, false, false, false),
        (opportunistic, false, true, true),
        (opportunistic, false, false, false),
        (internal, false, false, true),
    ] {
        let m = Machine::new(strict());
        let (a, b, event, pool) = (m.stream(), m.stream(), m.event(), m.default_pool());
        for policy in [follow, opportunistic, internal] {
            m.set_pool_attribute(pool, policy, u64::from(policy == allowed));
        }
        let first = m.alloc_async(MIB, a).unwrap();
        m.write(a, first, MIB, 1);
        m.free_async(first, a).unwrap();
        if ordered {
            m.record(event, a);
            m.wait(b, event);
        }
        if ran {
            m.sim.run_all();
        }
        let second = m.alloc_async(MIB, b).unwrap();
        assert_eq!(first == second, reused, "{allowed} {ordered} {ran}");
        m.write(b, second, MIB, 2);
        m.sync(b);
        // Were b not behind a, a's write would come now.
        m.sync(a);
        m.expect(b, second, MIB, 2);
        m.sync(b);
        m.sim.assert_clean();
    }
}

#[test]
fn a_pool_block_is_used_in_order_of_its_life() {
    let m = Machine::new(strict());
    let (a, b) = (m.stream(), m.stream());
    let ptr = m.alloc_async(MIB, a).unwrap();
    m.write(b, ptr, MIB, 1);
    m.only(Mistake::Race);
    m.free_async(ptr, a).unwrap();
    m.only(Mistake::Race);
    m.write(a, ptr, MIB, 1);
    m.only(Mistake::UseAfterFree);
    assert!(m.free_async(ptr, a).is_err());
    m.only(Mistake::DoubleFree);
}

#[test]
fn a_pool_has_a_limit_and_dies_with_its_last_block() {
    use thermalloc_cuda::driver::{MemPool, MemPoolProps};
    let m = Machine::new(strict());
    let a = m.stream();
    let props = MemPoolProps { max_size: (64 * MIB) as usize, ..MemPoolProps::device(0, 0) };
    let mut pool = MemPool::NULL;
    call!(m, mem_pool_create(&raw mut pool, &raw const props)).unwrap();
    let mut ptr = 0;
    call!(m, mem_alloc_from_pool_async(&raw mut ptr, (48 * MIB) as usize, pool, a)).unwrap();
    let mut more = 0;
    let error = call!(m, mem_alloc_from_pool_async(&raw mut more, (48 * MIB) as usize, pool, a))
        .unwrap_err();
    assert!(error.is_out_of_memory());
    call!(m, mem_pool_destroy(pool)).unwrap();
    m.free_async(ptr, a).unwrap();
    m.sync(a);
    assert_eq!(m.sim.used_bytes(0), 0);
    call!(m, stream_destroy(a)).unwrap();
    m.sim.assert_clean_and_empty();
}

#[test]
fn host_memory_is_registered_once_and_not_under_the_device() {
    let m = Machine::new(Config { pinned_limit_bytes: MIB, ..strict() });
    let stream = m.stream();
    let mut memory = vec![3u8; 8192];
    let host = memory.as_mut_ptr().cast();
    call!(m, mem_host_register(host, 8192, 0)).unwrap();
    let again = call!(m, mem_host_register(host, 4096, 0)).unwrap_err();
    assert_eq!(again.code(), Some(code::ERROR_HOST_MEMORY_ALREADY_REGISTERED));
    let mut pinned = std::ptr::null_mut();
    assert!(
        call!(m, mem_host_alloc(&raw mut pinned, MIB as usize, 0)).unwrap_err().is_out_of_memory()
    );
    let device = m.alloc(8192);
    call!(m, memcpy_htod_async(device, host, 8192, stream)).unwrap();
    call!(m, mem_host_unregister(host)).unwrap();
    m.only(Mistake::UnmapInUse);
    m.expect(stream, device, 8192, 3);
    m.sync(stream);
    let gone = call!(m, mem_host_unregister(host)).unwrap_err();
    assert_eq!(gone.code(), Some(code::ERROR_HOST_MEMORY_NOT_REGISTERED));
    m.only(Mistake::DoubleFree);
    assert_eq!(m.sim.pinned_bytes(), 0);
}

#[test]
fn managed_memory_is_one_memory() {
    let m = Machine::new(strict());
    let stream = m.stream();
    let mut ptr = 0;
    call!(m, mem_alloc_managed(&raw mut ptr, 4096, constant::MEM_ATTACH_GLOBAL)).unwrap();
    call!(m, mem_advise(ptr, 4096, constant::MEM_ADVISE_SET_READ_MOSTLY, 0)).unwrap();
    call!(m, mem_prefetch_async(ptr, 4096, 0, stream)).unwrap();
    m.write(stream, ptr, 4096, 8);
    m.sync(stream);
    // SAFETY: managed memory, and the write is complete.
    let byte = unsafe { *((ptr + 100) as *const u8) };
    assert_eq!(byte, 8);
    assert!(call!(m, mem_advise(ptr, 4096, 77, 0)).is_err());
    m.free(ptr).unwrap();
    assert!(call!(m, mem_prefetch_async(ptr, 4096, 0, stream)).is_err());
    m.sim.assert_clean();
}

#[test]
fn copies_copy() {
    for data in [Data::Full, Data::Edges] {
        let m = Machine::new(Config { data, ..strict() });
        let stream = m.stream();
        let (from, to) = (m.alloc(MIB), m.alloc(MIB));
        let sent: Vec<u8> = (0..1000u32).map(|i| (i * 7) as u8).collect();
        call!(m, memcpy_htod_async(from, sent.as_ptr().cast(), 1000, stream)).unwrap();
        call!(m, memcpy_dtod_async(to + 100, from, 1000, stream)).unwrap();
        call!(m, memset_d8_async(to + 100, 0xaa, 10, stream)).unwrap();
        call!(m, memset_d32_async(to + 112, 0x0403_0201, 1, stream)).unwrap();
        let mut back = vec![0u8; 1000];
        call!(m, memcpy_dtoh_async(back.as_mut_ptr().cast(), to + 100, 1000, stream)).unwrap();
        let mut wanted = sent.clone();
        wanted[..10].fill(0xaa);
        wanted[12..16].copy_from_slice(&[1, 2, 3, 4]);
        assert_eq!(back, wanted, "a copy to plain host memory is complete when it returns");
        m.sim.assert_clean();
    }
}

#[test]
fn faults_happen_on_the_call_they_were_asked_for() {
    let m = Machine::new(strict());
    m.sim.fail(Call::cuMemAlloc_v2, 2, 2, code::ERROR_OUT_OF_MEMORY);
    let alloc = || {
        let mut ptr = 0;
        call!(m, mem_alloc(&raw mut ptr, 512)).is_ok()
    };
    assert_eq!([alloc(), alloc(), alloc(), alloc(), alloc()], [true, true, false, false, true]);
    assert_eq!(m.sim.calls(Call::cuMemAlloc_v2), 5);
    assert_eq!(m.driver.calls(Call::cuMemAlloc_v2), 5);
}

#[test]
fn faults_happen_at_random_and_as_the_seed_says() {
    let run = |seed| {
        let m = Machine::new(Config { seed, ..strict() });
        m.sim.fail_randomly(Call::cuMemAlloc_v2, 4, code::ERROR_OUT_OF_MEMORY);
        let alloc = |_| {
            let mut ptr = 0;
            call!(m, mem_alloc(&raw mut ptr, 512)).is_ok()
        };
        let made: Vec<bool> = (0..400).map(alloc).collect();
        m.sim.fail_nothing();
        assert!(alloc(0));
        made
    };
    let made = run(3);
    let failed = made.iter().filter(|made| !**made).count();
    assert!((60..140).contains(&failed), "{failed}");
    assert!(run(3) == made && run(4) != made);
}

#[test]
fn attributes_of_pointers_tell_the_backing() {
    let m = Machine::new(strict());
    let stream = m.stream();
    let plain = m.alloc(4096);
    let block = m.alloc_async(4096, stream).unwrap();
    let chunk = m.create(GRANULE, constant::MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR).unwrap();
    let range = m.reserve(GRANULE);
    m.map(range, GRANULE, chunk).unwrap();
    let legacy = |ptr| {
        let mut capable = 0u32;
        let attribute = constant::POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE;
        call!(m, pointer_get_attribute((&raw mut capable).cast(), attribute, ptr)).unwrap();
        capable
    };
    assert_eq!([legacy(plain), legacy(block), legacy(range)], [1, 0, 0]);
    let mut handle = thermalloc_cuda::driver::IpcMemHandle([0; 64]);
    call!(m, ipc_get_mem_handle(&raw mut handle, plain)).unwrap();
    assert!(call!(m, ipc_get_mem_handle(&raw mut handle, range)).is_err());
    let mut fd = -1i32;
    let kind = constant::MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    call!(m, mem_export_to_shareable_handle((&raw mut fd).cast(), chunk, kind, 0)).unwrap();
    let mut again = 0;
    call!(
        m,
        mem_import_from_shareable_handle(
            &raw mut again,
            fd as usize as *mut std::ffi::c_void,
            kind
        )
    )
    .unwrap();
    assert_eq!(again, chunk, "this process's own memory");
    // SAFETY: the descriptor that was exported.
    unsafe { libc::close(fd) };
}

#[test]
fn virtual_time_passes_by_calls_and_by_waits() {
    use thermalloc_cuda_sim::{Access, Latency};
    let latency = Latency { kernel_ns: 1000, ..Latency::REALISTIC };
    let m = Machine::new(Config {
        progress: Progress::Timed,
        latency,
        data: Data::None,
        ..Config::default()
    });
    let (a, b, event) = (m.stream(), m.stream(), m.event());
    let before = m.sim.now_ns();
    let ptr = m.alloc(4096);
    assert_eq!(m.sim.now_ns() - before, latency.alloc_ns);
    let before = m.sim.now_ns();
    m.sim.launch_for(a, &[Access::write(ptr, 64, 1)], 500_000).unwrap();
    m.record(event, a);
    m.wait(b, event);
    m.sim.launch_for(b, &[Access::write(ptr, 64, 1)], 100_000).unwrap();
    assert!(m.sim.now_ns() - before < 20_000, "submitting does not wait");
    assert!(!m.ready(event));
    m.sim.advance_ns(500_000);
    assert!(m.ready(event));
    let state = call!(m, stream_query(b)).unwrap_err();
    assert_eq!(state.code(), Some(code::ERROR_NOT_READY));
    m.sync(b);
    let passed = m.sim.now_ns() - before;
    assert!((600_000..620_000).contains(&passed), "{passed}");
    m.sim.assert_clean();
}

#[test]
fn a_call_that_can_block_under_a_lock() {
    thread_local!(static HELD: std::cell::Cell<bool> = const { std::cell::Cell::new(false) });
    let m = Machine::new(strict());
    m.sim.probe(Some(|_| HELD.get()));
    let (stream, event) = (m.stream(), m.event());
    m.alloc(512);
    HELD.set(true);
    m.record(event, stream);
    m.ready(event);
    m.sim.assert_clean();
    m.alloc(512);
    m.only(Mistake::CallUnderLock);
    m.sync(stream);
    m.only(Mistake::CallUnderLock);
}

#[test]
fn two_devices_have_their_own_memory() {
    let m = Machine::new(Config { devices: 2, ..strict() });
    let ptr = m.alloc(64 * MIB);
    m.sim.use_device(&m.driver, 1).unwrap();
    assert_eq!(m.free_bytes(), 8 << 30);
    assert_eq!((m.sim.used_bytes(0), m.sim.used_bytes(1)), (64 * MIB, 0));
    let (mut can, stream) = (0, m.stream());
    call!(m, device_can_access_peer(&raw mut can, 0, 1)).unwrap();
    assert_eq!(can, 1);
    m.write(stream, ptr, 64, 1);
    m.only(Mistake::IllegalAddress);
    let mut first = thermalloc_cuda::driver::Context::NULL;
    call!(m, primary_ctx_retain(&raw mut first, 0)).unwrap();
    call!(m, ctx_enable_peer_access(first, 0)).unwrap();
    assert!(call!(m, ctx_enable_peer_access(first, 0)).is_err());
    m.write(stream, ptr, 64, 1);
    m.sim.assert_clean();
    assert!(call!(m, device_get_attribute(&raw mut can, 102, 2)).is_err());
}
