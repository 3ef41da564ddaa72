//! What machine is simulated.

use thermalloc_cuda::driver::Call;

/// How far the device gets when the host does not wait for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Progress {
    /// Nothing runs until the host waits; a query that finds work pending lets one operation of it run,
    /// so that polling ends.
    Lazy,
    /// As `Lazy`, and after a submission a random stream may run an operation.
    Random,
    /// Everything runs when it is submitted.
    Eager,
    /// In virtual time: an operation is complete when the host's clock has reached its end.
    Timed,
}

/// What kernels do to memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Data {
    /// Nothing; accesses are judged only.
    None,
    /// The first and the last 64 bytes of each range are written and compared.
    Edges,
    /// Every byte is.
    Full,
}

/// The simulated machine. Plain fields: change what a test is about.
#[derive(Clone, Debug)]
pub struct Config {
    /// Seed of all that is random.
    pub seed: u64,
    /// Devices.
    pub devices: usize,
    /// Memory of each device.
    pub vram_bytes: u64,
    /// As `cuDriverGetVersion` says it.
    pub version: i32,
    /// How far the device gets by itself.
    pub progress: Progress,
    /// What kernels do to memory.
    pub data: Data,
    /// Attribute 115 and the functions of memory pools.
    pub pools: bool,
    /// Attribute 102 and the functions of virtual memory.
    pub vmm: bool,
    /// Managed memory.
    pub managed: bool,
    /// Handles can be exported as file descriptors.
    pub export_fd: bool,
    /// A slice of a device: no NVML, no peers, no legacy handles.
    pub mig: bool,
    /// `cuInit` returns 34.
    pub stub: bool,
    /// Symbols that this driver lacks.
    pub missing: Vec<Call>,
    /// Granularity of physical memory.
    pub granularity_bytes: u64,
    /// Pinned memory beyond this fails.
    pub pinned_limit_bytes: u64,
    /// An access to memory that is not there makes every later call fail with 700.
    pub sticky_faults: bool,
    /// Operations that a stream holds before a submission has to wait.
    pub queue_depth: usize,
    /// What the calls cost in virtual time.
    pub latency: Latency,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            seed: 1,
            devices: 1,
            vram_bytes: 8 << 30,
            version: 12_080,
            progress: Progress::Random,
            data: Data::None,
            pools: true,
            vmm: true,
            managed: true,
            export_fd: true,
            mig: false,
            stub: false,
            missing: Vec::new(),
            granularity_bytes: 2 << 20,
            pinned_limit_bytes: 1 << 40,
            sticky_faults: true,
            queue_depth: 1024,
            latency: Latency::ZERO,
        }
    }
}

/// Virtual time of the calls and of the device.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Latency {
    /// `cuMemAlloc`, `cuMemAllocManaged`.
    pub alloc_ns: u64,
    /// `cuMemFree`, beside the wait for the device.
    pub free_ns: u64,
    /// `cuMemAllocAsync` that the pool serves.
    pub alloc_async_ns: u64,
    /// `cuMemFreeAsync`.
    pub free_async_ns: u64,
    /// Reserving or freeing an address range.
    pub reserve_ns: u64,
    /// `cuMemCreate` and `cuMemRelease`, and each 2 MiB more of one handle.
    pub create_ns: u64,
    /// `cuMemMap`.
    pub map_ns: u64,
    /// `cuMemUnmap`.
    pub unmap_ns: u64,
    /// `cuMemSetAccess`.
    pub set_access_ns: u64,
    /// `cuMemHostAlloc` and `cuMemFreeHost`, registering.
    pub host_alloc_ns: u64,
    /// Pinning, for each MiB.
    pub pin_ns_per_mib: u64,
    /// Launches, copies, memsets.
    pub launch_ns: u64,
    /// Record, wait, query.
    pub event_ns: u64,
    /// Creating and destroying streams and events.
    pub object_ns: u64,
    /// A synchronisation, beside what it waits for.
    pub sync_ns: u64,
    /// Everything else.
    pub other_ns: u64,
    /// Every operation on the device.
    pub kernel_ns: u64,
    /// Bytes that an operation touches in a microsecond; 0: it takes `kernel_ns` only.
    pub bytes_per_us: u64,
}

impl Latency {
    /// Calls cost nothing.
    pub const ZERO: Self = Self {
        alloc_ns: 0,
        free_ns: 0,
        alloc_async_ns: 0,
        free_async_ns: 0,
        reserve_ns: 0,
        create_ns: 0,
        map_ns: 0,
        unmap_ns: 0,
        set_access_ns: 0,
        host_alloc_ns: 0,
        pin_ns_per_mib: 0,
        launch_ns: 0,
        event_ns: 0,
        object_ns: 0,
        sync_ns: 0,
        other_ns: 0,
        kernel_ns: 1,
        bytes_per_us: 0,
    };

    /// The order of magnitude of a data-centre device.
    pub const REALISTIC: Self = Self {
        alloc_ns: 100_000,
        free_ns: 80_000,
        alloc_async_ns: 1_500,
        free_async_ns: 1_200,
        reserve_ns: 4_000,
        create_ns: 45_000,
        map_ns: 6_000,
        unmap_ns: 25_000,
        set_access_ns: 30_000,
        host_alloc_ns: 150_000,
        pin_ns_per_mib: 60_000,
        launch_ns: 2_500,
        event_ns: 500,
        object_ns: 2_000,
        sync_ns: 3_000,
        other_ns: 100,
        kernel_ns: 4_000,
        bytes_per_us: 1_000_000,
    };

    pub(crate) fn of(&self, call: Call) -> u64 {
        use Call as C;
        match call {
            C::cuMemAlloc_v2 | C::cuMemAllocManaged => self.alloc_ns,
            C::cuMemFree_v2 => self.free_ns,
            C::cuMemAllocAsync | C::cuMemAllocFromPoolAsync => self.alloc_async_ns,
            C::cuMemFreeAsync => self.free_async_ns,
            C::cuMemAddressReserve | C::cuMemAddressFree => self.reserve_ns,
            C::cuMemCreate | C::cuMemRelease => self.create_ns,
            C::cuMemMap => self.map_ns,
            C::cuMemUnmap => self.unmap_ns,
            C::cuMemSetAccess => self.set_access_ns,
            C::cuMemHostAlloc
            | C::cuMemAllocHost_v2
            | C::cuMemFreeHost
            | C::cuMemHostRegister_v2
            | C::cuMemHostUnregister => self.host_alloc_ns,
            C::cuLaunchKernel
            | C::cuLaunchHostFunc
            | C::cuGraphLaunch
            | C::cuMemcpyHtoDAsync_v2
            | C::cuMemcpyDtoHAsync_v2
            | C::cuMemcpyDtoDAsync_v2
            | C::cuMemsetD8Async
            | C::cuMemsetD32Async => self.launch_ns,
            C::cuEventRecord | C::cuEventQuery | C::cuStreamQuery | C::cuStreamWaitEvent => {
                self.event_ns
            }
            C::cuStreamCreate
            | C::cuStreamCreateWithPriority
            | C::cuStreamDestroy_v2
            | C::cuEventCreate
            | C::cuEventDestroy_v2 => self.object_ns,
            C::cuStreamSynchronize | C::cuEventSynchronize | C::cuCtxSynchronize => self.sync_ns,
            _ => self.other_ns,
        }
    }
}

/// Whether a call can keep its caller waiting: for the device, or for the driver's work on page tables.
pub fn can_block(call: Call) -> bool {
    use Call as C;
    matches!(
        call,
        C::cuMemAlloc_v2
            | C::cuMemFree_v2
            | C::cuMemAllocManaged
            | C::cuMemHostAlloc
            | C::cuMemAllocHost_v2
            | C::cuMemFreeHost
            | C::cuMemHostRegister_v2
            | C::cuMemHostUnregister
            | C::cuMemAllocAsync
            | C::cuMemAllocFromPoolAsync
            | C::cuMemPoolTrimTo
            | C::cuMemPoolDestroy
            | C::cuMemCreate
            | C::cuMemRelease
            | C::cuMemMap
            | C::cuMemUnmap
            | C::cuMemSetAccess
            | C::cuMemAddressReserve
            | C::cuMemAddressFree
            | C::cuStreamSynchronize
            | C::cuEventSynchronize
            | C::cuCtxSynchronize
            | C::cuStreamDestroy_v2
            | C::cuMemcpyHtoD_v2
            | C::cuMemcpyDtoH_v2
            | C::cuMemGetInfo_v2
            | C::cuGraphInstantiateWithFlags
            | C::cuGraphLaunch
            | C::cuIpcOpenMemHandle_v2
    )
}

impl Config {
    /// The machine of the shared library: as `THERMALLOC_CUDA_SIM` describes it, in words such as
    /// `vram=1g,devices=2,no-pools,no-vmm,mig,stub,version=11040,progress=lazy`.
    pub(crate) fn from_env() -> Self {
        let text = std::env::var("THERMALLOC_CUDA_SIM").unwrap_or_default();
        let mut config = Self { data: Data::Full, ..Self::default() };
        for word in text.split(',').filter(|word| !word.is_empty()) {
            config.apply(word);
        }
        config
    }

    fn apply(&mut self, word: &str) {
        let (name, value) = word.split_once('=').unwrap_or((word, ""));
        match name {
            "vram" => self.vram_bytes = parse_bytes(value),
            "pinned" => self.pinned_limit_bytes = parse_bytes(value),
            "devices" => self.devices = value.parse().unwrap_or(1),
            "version" => self.version = value.parse().unwrap_or(self.version),
            "seed" => self.seed = value.parse().unwrap_or(1),
            "no-pools" => self.pools = false,
            "no-vmm" => self.vmm = false,
            "no-managed" => self.managed = false,
            "no-export" => self.export_fd = false,
            "mig" => self.mig = true,
            "stub" => self.stub = true,
            "progress" => {
                self.progress = match value {
                    "lazy" => Progress::Lazy,
                    "eager" => Progress::Eager,
                    "timed" => Progress::Timed,
                    _ => Progress::Random,
                }
            }
            _ => {}
        }
    }
}

fn parse_bytes(text: &str) -> u64 {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "k" => 1 << 10,
        "m" => 1 << 20,
        "g" => 1 << 30,
        _ => 1,
    };
    digits.parse::<u64>().unwrap_or(0) * unit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_describe_a_machine() {
        let mut config = Config::default();
        for word in ["vram=3g", "devices=2", "no-pools", "progress=lazy", "unknown"] {
            config.apply(word);
        }
        assert_eq!((config.vram_bytes, config.devices, config.pools), (3 << 30, 2, false));
        assert_eq!(config.progress, Progress::Lazy);
        assert_eq!(parse_bytes("512k"), 512 << 10);
    }
}
