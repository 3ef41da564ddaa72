//! A machine with a driver and a current context, and short forms of the calls.
#![allow(dead_code, unused_imports, reason = "each test file uses a part")]
#![allow(clippy::cast_possible_truncation, reason = "small sizes")]

use thermalloc_cuda::driver::{
    AccessDesc, AllocationProp, DevicePtr, Driver, Error, Event, Location, MemHandle, MemPool,
    Stream, constant,
};
use thermalloc_cuda_sim::{Access, Config, Data, Mistake, Progress, Sim};

pub(crate) const MIB: u64 = 1 << 20;

pub(crate) struct Machine {
    pub(crate) driver: Driver,
    pub(crate) sim: Sim,
}

/// Lazy and with all its data: what a wait does not order is never ordered by luck.
pub(crate) fn strict() -> Config {
    Config { progress: Progress::Lazy, data: Data::Full, ..Config::default() }
}

macro_rules! call {
    ($machine:expr, $name:ident($($arg:expr),*)) => {
        // SAFETY: every argument is a live object or a valid place.
        unsafe { $machine.driver.$name($($arg),*) }
    };
}
pub(crate) use call;

impl Machine {
    pub(crate) fn new(config: Config) -> Self {
        let sim = Sim::new(config);
        let driver = sim.driver().expect("a simulated driver");
        sim.use_device(&driver, 0).expect("device 0");
        Self { driver, sim }
    }

    pub(crate) fn stream(&self) -> Stream {
        self.stream_with(constant::STREAM_NON_BLOCKING)
    }

    pub(crate) fn stream_with(&self, flags: u32) -> Stream {
        let mut stream = Stream::NULL;
        call!(self, stream_create(&raw mut stream, flags)).unwrap();
        stream
    }

    pub(crate) fn event(&self) -> Event {
        let mut event = Event::NULL;
        call!(self, event_create(&raw mut event, constant::EVENT_DISABLE_TIMING)).unwrap();
        event
    }

    pub(crate) fn record(&self, event: Event, stream: Stream) {
        call!(self, event_record(event, stream)).unwrap();
    }

    pub(crate) fn wait(&self, stream: Stream, event: Event) {
        call!(self, stream_wait_event(stream, event, 0)).unwrap();
    }

    pub(crate) fn ready(&self, event: Event) -> bool {
        match call!(self, event_query(event)) {
            Ok(()) => true,
            Err(error) if error.code() == Some(600) => false,
            Err(error) => panic!("{error}"),
        }
    }

    pub(crate) fn sync(&self, stream: Stream) {
        call!(self, stream_synchronize(stream)).unwrap();
    }

    pub(crate) fn alloc(&self, bytes: u64) -> DevicePtr {
        let mut ptr = 0;
        call!(self, mem_alloc(&raw mut ptr, bytes as usize)).unwrap();
        ptr
    }

    pub(crate) fn free(&self, ptr: DevicePtr) -> Result<(), Error> {
        call!(self, mem_free(ptr))
    }

    pub(crate) fn write(&self, stream: Stream, ptr: DevicePtr, len: u64, value: u8) {
        self.sim.launch(stream, &[Access::write(ptr, len, value)]).unwrap();
    }

    pub(crate) fn read(&self, stream: Stream, ptr: DevicePtr, len: u64) {
        self.sim.launch(stream, &[Access::read(ptr, len)]).unwrap();
    }

    pub(crate) fn expect(&self, stream: Stream, ptr: DevicePtr, len: u64, value: u8) {
        self.sim.launch(stream, &[Access::expect(ptr, len, value)]).unwrap();
    }

    pub(crate) fn races(&self) -> usize {
        self.sim.count(Mistake::Race)
    }

    /// Exactly one mistake since the last look, of this kind.
    #[track_caller]
    pub(crate) fn only(&self, mistake: Mistake) {
        let found = self.sim.take_violations();
        assert!(
            found.len() == 1 && found[0].mistake == mistake,
            "expected one {mistake:?}: {found:?}"
        );
    }

    pub(crate) fn reserve(&self, bytes: u64) -> DevicePtr {
        let mut ptr = 0;
        call!(self, mem_address_reserve(&raw mut ptr, bytes as usize, 0, 0, 0)).unwrap();
        ptr
    }

    pub(crate) fn create(&self, bytes: u64, handle_types: u32) -> Result<MemHandle, Error> {
        let mut handle = 0;
        let prop = AllocationProp::device(0, handle_types);
        call!(self, mem_create(&raw mut handle, bytes as usize, &raw const prop, 0))?;
        Ok(handle)
    }

    pub(crate) fn map(&self, ptr: DevicePtr, bytes: u64, handle: MemHandle) -> Result<(), Error> {
        call!(self, mem_map(ptr, bytes as usize, 0, handle, 0))?;
        self.access(ptr, bytes, constant::MEM_ACCESS_FLAGS_PROT_READWRITE)
    }

    pub(crate) fn access(&self, ptr: DevicePtr, bytes: u64, flags: u32) -> Result<(), Error> {
        let desc = AccessDesc { location: Location::device(0), flags };
        call!(self, mem_set_access(ptr, bytes as usize, &raw const desc, 1))
    }

    pub(crate) fn unmap(&self, ptr: DevicePtr, bytes: u64) -> Result<(), Error> {
        call!(self, mem_unmap(ptr, bytes as usize))
    }

    pub(crate) fn default_pool(&self) -> MemPool {
        let mut pool = MemPool::NULL;
        call!(self, device_get_default_mem_pool(&raw mut pool, 0)).unwrap();
        pool
    }

    pub(crate) fn alloc_async(&self, bytes: u64, stream: Stream) -> Result<DevicePtr, Error> {
        let mut ptr = 0;
        call!(self, mem_alloc_async(&raw mut ptr, bytes as usize, stream))?;
        Ok(ptr)
    }

    pub(crate) fn free_async(&self, ptr: DevicePtr, stream: Stream) -> Result<(), Error> {
        call!(self, mem_free_async(ptr, stream))
    }

    pub(crate) fn pool_attribute(&self, pool: MemPool, attribute: u32) -> u64 {
        let mut value = 0u64;
        call!(self, mem_pool_get_attribute(pool, attribute, (&raw mut value).cast())).unwrap();
        value
    }

    pub(crate) fn set_pool_attribute(&self, pool: MemPool, attribute: u32, mut value: u64) {
        call!(self, mem_pool_set_attribute(pool, attribute, (&raw mut value).cast())).unwrap();
    }

    pub(crate) fn free_bytes(&self) -> u64 {
        let (mut free, mut total) = (0, 0);
        call!(self, mem_get_info(&raw mut free, &raw mut total)).unwrap();
        free as u64
    }
}
