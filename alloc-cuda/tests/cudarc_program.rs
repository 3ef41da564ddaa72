//! A program that uses cudarc, with the simulated driver as the `libcuda.so.1` that cudarc loads: the
//! buffers are usable wherever cudarc takes memory.

use cudarc::driver::{CudaContext, DevicePtr, DeviceSlice};
use std::path::Path;
use std::process::Command;
use thermalloc_cuda::Pool;

const CHILD: &str = "THERMALLOC_TEST_CUDARC";

/// Runs a test of this file in a process that finds the simulated driver, or an empty folder.
fn in_process(test: &str, with_driver: bool) -> bool {
    if std::env::var_os(CHILD).is_some() {
        return true;
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test);
    let _not_there_yet = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("a folder");
    let me = std::env::current_exe().expect("this test");
    if with_driver {
        let driver = me.with_file_name("libthermalloc_cuda_sim.so");
        std::os::unix::fs::symlink(driver, folder.join("libcuda.so.1")).expect("a link");
    }
    let status = Command::new("timeout")
        .args(["-s", "KILL", "60"])
        .arg(me)
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(CHILD, "1")
        .env("LD_LIBRARY_PATH", &folder)
        .status();
    assert!(status.expect("a child").success());
    false
}

#[test]
fn buffers_work_where_cudarc_takes_memory() {
    if !in_process("buffers_work_where_cudarc_takes_memory", true) {
        return;
    }
    let context = CudaContext::new(0).expect("a context");
    let pool = Pool::builder(0).build().expect("a pool");
    let stream = context.new_stream().expect("a stream");
    let values: Vec<u32> = (0..100_000).collect();
    let buffer = pool.copied(&stream, &values).expect("a buffer");
    assert_eq!(DeviceSlice::len(&buffer), values.len());
    assert_eq!(stream.clone_dtoh(&buffer).expect("a copy"), values);
    let mut zeros = pool.zeros::<u32>(&stream, values.len()).expect("a buffer");
    assert!(stream.clone_dtoh(&zeros).expect("a copy").iter().all(|&value| value == 0));
    stream.memcpy_dtod(&buffer, &mut zeros).expect("a copy");
    assert_eq!(stream.clone_dtoh(&zeros).expect("a copy"), values);
    // As one of cudarc's own slices.
    {
        let slice = zeros.as_cuda_slice();
        assert_eq!(slice.len(), values.len());
        assert_eq!(stream.clone_dtoh(&slice.slice(10..20)).expect("a copy"), values[10..20]);
    }
    // Another stream reads it and the buffer is dropped at once: nothing waits, nothing races.
    let other = context.new_stream().expect("a stream");
    let copy = other.clone_dtoh(&buffer).expect("a copy");
    assert_eq!(copy, values);
    {
        let (ptr, _record) = buffer.device_ptr(&other);
        assert_eq!(ptr, buffer.ptr());
    }
    drop(buffer);
    assert!(pool.stats().deferred_frees == 1, "{}", pool.report());
    drop(zeros);
    stream.synchronize().expect("a sync");
    other.synchronize().expect("a sync");
    pool.poll();
    let stats = pool.stats();
    assert_eq!((stats.active_bytes, stats.pending_bytes), (0, 0));
    // In the steady state a buffer makes no event and no call for memory.
    let before = pool.stats();
    for _ in 0..100 {
        drop(pool.copied(&stream, &values).expect("a buffer"));
    }
    let after = pool.stats();
    assert_eq!(after.driver_memory_calls, before.driver_memory_calls);
    assert_eq!(after.event_records, before.event_records);
}

#[test]
fn without_a_driver_there_is_an_error_and_no_panic() {
    if !in_process("without_a_driver_there_is_an_error_and_no_panic", false) {
        return;
    }
    if let Err(error) = Pool::builder(0).build() {
        assert!(error.to_string().starts_with("CUDA driver: "), "{error}");
    }
}
