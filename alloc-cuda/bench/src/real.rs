//! What only a real driver can tell: its answers where the manual is silent, and the times of its
//! calls beside the pool's. Prints `question|answer` lines.

use std::io::Write;
use std::sync::Arc;
use std::time::Instant;
use thermalloc_cuda::driver::{
    AccessDesc, AllocationProp, Driver, Error, Event, IpcMemHandle, Location, MemPool, Stream,
    constant,
};
use thermalloc_cuda::{Pool, Reuse};

const MIB: usize = 1 << 20;

struct Gpu {
    driver: Arc<Driver>,
    pool: Pool,
}

impl Gpu {
    fn stream(&self) -> Result<Stream, Error> {
        let mut stream = Stream::NULL;
        // SAFETY: a valid place to write to.
        unsafe { self.driver.stream_create(&raw mut stream, constant::STREAM_NON_BLOCKING) }?;
        Ok(stream)
    }

    fn event(&self) -> Result<Event, Error> {
        let mut event = Event::NULL;
        // SAFETY: a valid place to write to.
        unsafe { self.driver.event_create(&raw mut event, constant::EVENT_DISABLE_TIMING) }?;
        Ok(event)
    }

    fn sync(&self) -> Result<(), Error> {
        // SAFETY: the context is current.
        unsafe { self.driver.ctx_synchronize() }
    }

    /// Keeps a stream busy for some milliseconds.
    fn busy(&self, stream: Stream, ptr: u64) -> Result<(), Error> {
        for i in 0..40 {
            // SAFETY: live memory of 256 MiB.
            unsafe { self.driver.memset_d8_async(ptr, i, 256 * MIB, stream) }?;
        }
        Ok(())
    }
}

fn us(count: u32, mut run: impl FnMut() -> Result<(), Error>) -> Result<f64, Error> {
    let start = Instant::now();
    for _ in 0..count {
        run()?;
    }
    Ok(start.elapsed().as_secs_f64() * 1e6 / f64::from(count))
}

fn says<T>(result: Result<T, Error>) -> String {
    match result {
        Ok(_) => "succeeds".to_owned(),
        Err(error) => error.to_string(),
    }
}

/// All questions.
pub(crate) fn run(out: &mut impl Write) -> std::io::Result<()> {
    let made = Driver::load().and_then(|driver| {
        let driver = Arc::new(driver);
        let pool = Pool::builder(0).reuse(Reuse::Grow).build_on(Arc::clone(&driver))?;
        let mut context = thermalloc_cuda::driver::Context::NULL;
        // SAFETY: a valid place to write to.
        unsafe { driver.primary_ctx_retain(&raw mut context, 0) }?;
        // SAFETY: retained just now.
        unsafe { driver.ctx_set_current(context) }?;
        Ok(Gpu { driver, pool })
    });
    let gpu = made.map_err(std::io::Error::other)?;
    let version = gpu.driver.version();
    writeln!(out, "driver|{}.{}", version / 1000, version % 1000 / 10)?;
    writeln!(out, "backing|{}", gpu.pool.backing())?;
    let mut ask = |name: &str, answer: Result<String, Error>| match answer {
        Ok(answer) => writeln!(out, "{name}|{answer}"),
        Err(error) => writeln!(out, "{name}|{error}"),
    };
    ask("query of an event never recorded", unrecorded(&gpu))?;
    ask("cuMemFree while a stream is busy", free_blocks(&gpu))?;
    ask("a default pool's memory after a sync", threshold(&gpu))?;
    ask("legacy IPC handle of virtual memory", legacy(&gpu))?;
    ask("cuMemAlloc during a capture", capture(&gpu))?;
    ask("virtual memory calls for 2 MiB", vmm(&gpu))?;
    ask("event record, query", events(&gpu))?;
    for bytes in [64 << 10, 8 * MIB, 256 * MIB] {
        let name = format!("alloc and free of {} KiB", bytes >> 10);
        ask(&name, compare(&gpu, bytes))?;
    }
    ask("data of two streams in one pool", data(&gpu))
}

fn unrecorded(gpu: &Gpu) -> Result<String, Error> {
    let event = gpu.event()?;
    // SAFETY: a live event.
    let query = says(unsafe { gpu.driver.event_query(event) });
    let stream = gpu.stream()?;
    // SAFETY: live objects.
    let wait = says(unsafe { gpu.driver.stream_wait_event(stream, event, 0) });
    Ok(format!("{query}; a wait {wait}"))
}

fn free_blocks(gpu: &Gpu) -> Result<String, Error> {
    let stream = gpu.stream()?;
    let (mut large, mut other) = (0, 0);
    // SAFETY: valid places to write to.
    unsafe { gpu.driver.mem_alloc(&raw mut large, 256 * MIB) }?;
    // SAFETY: as above.
    unsafe { gpu.driver.mem_alloc(&raw mut other, 64 * MIB) }?;
    gpu.sync()?;
    gpu.busy(stream, large)?;
    // SAFETY: a live block that nothing uses.
    let free = us(1, || unsafe { gpu.driver.mem_free(other) })?;
    let rest = us(1, || gpu.sync())?;
    // SAFETY: nothing uses it any more.
    unsafe { gpu.driver.mem_free(large) }?;
    let verdict = if rest < free / 4.0 { "waits for the device" } else { "does not wait" };
    Ok(format!("{verdict} ({free:.0} us, {rest:.0} us left)"))
}

fn threshold(gpu: &Gpu) -> Result<String, Error> {
    let stream = gpu.stream()?;
    let (mut pool, mut ptr, mut bytes) = (MemPool::NULL, 0, 0u64);
    // SAFETY: valid places to write to.
    unsafe { gpu.driver.device_get_default_mem_pool(&raw mut pool, 0) }?;
    // SAFETY: as above.
    unsafe { gpu.driver.mem_alloc_async(&raw mut ptr, 64 * MIB, stream) }?;
    // SAFETY: a live block.
    unsafe { gpu.driver.mem_free_async(ptr, stream) }?;
    // SAFETY: a live stream.
    unsafe { gpu.driver.stream_synchronize(stream) }?;
    let attribute = constant::MEMPOOL_ATTR_RESERVED_MEM_CURRENT;
    // SAFETY: the attribute is a u64.
    unsafe { gpu.driver.mem_pool_get_attribute(pool, attribute, (&raw mut bytes).cast()) }?;
    Ok(format!("{} MiB reserved", bytes >> 20))
}

fn legacy(gpu: &Gpu) -> Result<String, Error> {
    let stream = gpu.stream()?;
    let Ok(ptr) = gpu.pool.alloc(4 << 20, stream) else { return Ok("no memory".to_owned()) };
    let mut handle = IpcMemHandle([0; 64]);
    // SAFETY: a valid place to write to.
    let answer = says(unsafe { gpu.driver.ipc_get_mem_handle(&raw mut handle, ptr) });
    // SAFETY: nothing uses it.
    let _ = unsafe { gpu.pool.free(ptr) };
    Ok(answer)
}

fn capture(gpu: &Gpu) -> Result<String, Error> {
    let stream = gpu.stream()?;
    let event = gpu.event()?;
    let mode = constant::STREAM_CAPTURE_MODE_GLOBAL;
    // SAFETY: a live stream.
    unsafe { gpu.driver.stream_begin_capture(stream, mode) }?;
    let mut ptr = 0;
    // SAFETY: a valid place to write to.
    let alloc = says(unsafe { gpu.driver.mem_alloc(&raw mut ptr, 4096) });
    // SAFETY: a live event.
    let query = says(unsafe { gpu.driver.event_query(event) });
    let mut graph = thermalloc_cuda::driver::Graph::NULL;
    // SAFETY: a valid place to write to.
    let end = says(unsafe { gpu.driver.stream_end_capture(stream, &raw mut graph) });
    Ok(format!("{alloc}; a query {query}; the end {end}"))
}

fn vmm(gpu: &Gpu) -> Result<String, Error> {
    const CHUNKS: usize = 64;
    let bytes = 2 * MIB;
    let mut base = 0;
    // SAFETY: a valid place to write to.
    let reserve = us(1, || unsafe {
        gpu.driver.mem_address_reserve(&raw mut base, CHUNKS * bytes, bytes, 0, 0)
    })?;
    let prop = AllocationProp::device(0, 0);
    let mut handles = Vec::new();
    let create = us(CHUNKS as u32, || {
        let mut handle = 0;
        // SAFETY: valid places to read and to write.
        unsafe { gpu.driver.mem_create(&raw mut handle, bytes, &raw const prop, 0) }?;
        handles.push(handle);
        Ok(())
    })?;
    let mut at = 0;
    let map = us(CHUNKS as u32, || {
        at += 1;
        let ptr = base + ((at - 1) * bytes) as u64;
        // SAFETY: reserved addresses and a live handle.
        unsafe { gpu.driver.mem_map(ptr, bytes, 0, handles[at - 1], 0) }
    })?;
    let desc = AccessDesc {
        location: Location::device(0),
        flags: constant::MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    // SAFETY: a mapped range.
    let access =
        us(1, || unsafe { gpu.driver.mem_set_access(base, CHUNKS * bytes, &raw const desc, 1) })?;
    // SAFETY: whole mappings that nothing uses.
    let unmap = us(1, || unsafe { gpu.driver.mem_unmap(base, CHUNKS * bytes) })?;
    at = 0;
    let release = us(CHUNKS as u32, || {
        at += 1;
        // SAFETY: each once.
        unsafe { gpu.driver.mem_release(handles[at - 1]) }
    })?;
    // SAFETY: it was reserved as one.
    unsafe { gpu.driver.mem_address_free(base, CHUNKS * bytes) }?;
    let each = |us: f64| us / CHUNKS as f64;
    Ok(format!(
        "reserve {reserve:.1}, create {create:.1}, map {map:.1}, access {:.1}, unmap {:.1}, release {release:.1} us",
        each(access),
        each(unmap)
    ))
}

fn events(gpu: &Gpu) -> Result<String, Error> {
    let (stream, event) = (gpu.stream()?, gpu.event()?);
    // SAFETY: live objects.
    let record = us(1000, || unsafe { gpu.driver.event_record(event, stream) })?;
    gpu.sync()?;
    // SAFETY: a live event.
    let query = us(1000, || unsafe { gpu.driver.event_query(event) })?;
    Ok(format!("{record:.2}, {query:.2} us"))
}

fn compare(gpu: &Gpu, bytes: usize) -> Result<String, Error> {
    let stream = gpu.stream()?;
    let plain = us(50, || {
        let mut ptr = 0;
        // SAFETY: a valid place to write to.
        unsafe { gpu.driver.mem_alloc(&raw mut ptr, bytes) }?;
        // SAFETY: a live block.
        unsafe { gpu.driver.mem_free(ptr) }
    })?;
    let pooled = us(1000, || {
        let mut ptr = 0;
        // SAFETY: a valid place to write to.
        unsafe { gpu.driver.mem_alloc_async(&raw mut ptr, bytes, stream) }?;
        // SAFETY: a live block.
        unsafe { gpu.driver.mem_free_async(ptr, stream) }
    })?;
    gpu.sync()?;
    let on = gpu.pool.on(stream);
    let cycle = || {
        if let Ok(ptr) = on.alloc(bytes as u64) {
            // SAFETY: nothing uses it.
            let _ = unsafe { gpu.pool.free(ptr) };
        }
        Ok(())
    };
    us(10, cycle)?;
    let ours = us(100_000, cycle)?;
    Ok(format!("cuMemAlloc {plain:.1}, cuMemAllocAsync {pooled:.2}, pool {ours:.3} us"))
}

/// Two streams write and read blocks of one pool under a limit that makes them share; every byte
/// that comes back is looked at.
fn data(gpu: &Gpu) -> Result<String, Error> {
    let pool = Pool::builder(0)
        .limit_bytes(256 << 20)
        .reuse(Reuse::Wait)
        .build_on(Arc::clone(&gpu.driver))?;
    let streams = [gpu.stream()?, gpu.stream()?];
    let (mut wrong, mut rounds) = (0usize, 0);
    let mut host = vec![0u8; 24 * MIB];
    for round in 0..60usize {
        let stream = streams[round % 2];
        let blocks: Vec<u64> = (0..8).filter_map(|_| pool.alloc(24 << 20, stream).ok()).collect();
        for (i, &ptr) in blocks.iter().enumerate() {
            let value = (round * 8 + i) as u8;
            // SAFETY: live memory of that size.
            unsafe { gpu.driver.memset_d8_async(ptr, value, 24 * MIB, stream) }?;
        }
        if let Some(&ptr) = blocks.get(round % 8) {
            // SAFETY: live memory on both sides; it is waited for below.
            unsafe {
                gpu.driver.memcpy_dtoh_async(host.as_mut_ptr().cast(), ptr, 24 * MIB, stream)
            }?;
            // SAFETY: a live stream.
            unsafe { gpu.driver.stream_synchronize(stream) }?;
            let value = (round * 8 + round % 8) as u8;
            wrong += host.iter().filter(|&&byte| byte != value).count();
            rounds += 1;
        }
        for ptr in blocks {
            // SAFETY: no use follows.
            let _ = unsafe { pool.free(ptr) };
        }
    }
    Ok(format!("{wrong} wrong bytes in {rounds} rounds, {} waits", pool.stats().waits_inserted))
}
