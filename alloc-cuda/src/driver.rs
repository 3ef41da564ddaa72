//! The only seam to the CUDA driver: one table of plain C functions that return integers.
//!
//! Nothing here panics. A driver that is absent, too old or without a feature is an [`Error`] that
//! names what is missing, or an entry of the table that is `None`. A code of a newer driver is only
//! a number. A simulated driver is another table.
#![allow(
    clippy::missing_safety_doc,
    reason = "the table's methods have the C functions' own conditions"
)]

use crate::recent::{Recent, RecentCall, coarse_ms};
use std::ffi::{CStr, c_char, c_void};
use std::fmt;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

/// An address in the device's address space.
pub type DevicePtr = u64;
/// A physical allocation of the virtual memory interface.
pub type MemHandle = u64;
/// Runs on a thread of the driver, in stream order.
pub type HostFn = unsafe extern "C" fn(*mut c_void);

/// The oldest driver that has all that the table requires (11.4).
pub const OLDEST_VERSION: i32 = 11_040;

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident)*) => {$(
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
        pub struct $name(pub usize);

        impl $name {
            /// No object; of streams, the legacy default stream.
            pub const NULL: Self = Self(0);
        }
    )*};
}

handles! {
    /// A context (`CUcontext`).
    Context
    /// A stream (`CUstream`).
    Stream
    /// An event (`CUevent`).
    Event
    /// A memory pool of the driver (`CUmemoryPool`).
    MemPool
    /// A graph (`CUgraph`).
    Graph
    /// An instantiated graph (`CUgraphExec`).
    GraphExec
    /// A node of a graph (`CUgraphNode`).
    GraphNode
    /// An object whose life a graph prolongs (`CUuserObject`).
    UserObject
    /// A loaded module (`CUmodule`).
    Module
    /// A kernel (`CUfunction`).
    Function
}

impl Stream {
    /// `CU_STREAM_LEGACY`.
    pub const LEGACY: Self = Self(1);
    /// `CU_STREAM_PER_THREAD`.
    pub const PER_THREAD: Self = Self(2);
}

/// Codes that the pool tells apart; others are passed on as they are.
pub mod code {
    macro_rules! codes {
        ($($name:ident = $value:literal)*) => {
            $(#[doc = concat!("`CUDA_", stringify!($name), "`")] pub const $name: u32 = $value;)*

            /// The driver's own name of a code.
            pub const fn name(code: u32) -> &'static str {
                match code {
                    $($value => concat!("CUDA_", stringify!($name)),)*
                    _ => "an unknown code",
                }
            }
        };
    }
    codes! {
        SUCCESS = 0
        ERROR_INVALID_VALUE = 1
        ERROR_OUT_OF_MEMORY = 2
        ERROR_NOT_INITIALIZED = 3
        ERROR_DEINITIALIZED = 4
        ERROR_STUB_LIBRARY = 34
        ERROR_DEVICE_UNAVAILABLE = 46
        ERROR_NO_DEVICE = 100
        ERROR_INVALID_DEVICE = 101
        ERROR_INVALID_IMAGE = 200
        ERROR_INVALID_CONTEXT = 201
        ERROR_MAP_FAILED = 205
        ERROR_ALREADY_MAPPED = 208
        ERROR_NOT_MAPPED = 211
        ERROR_ECC_UNCORRECTABLE = 214
        ERROR_PEER_ACCESS_UNSUPPORTED = 217
        ERROR_OPERATING_SYSTEM = 304
        ERROR_INVALID_HANDLE = 400
        ERROR_ILLEGAL_STATE = 401
        ERROR_NOT_FOUND = 500
        ERROR_NOT_READY = 600
        ERROR_ILLEGAL_ADDRESS = 700
        ERROR_PEER_ACCESS_ALREADY_ENABLED = 704
        ERROR_PEER_ACCESS_NOT_ENABLED = 705
        ERROR_CONTEXT_IS_DESTROYED = 709
        ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712
        ERROR_HOST_MEMORY_NOT_REGISTERED = 713
        ERROR_LAUNCH_FAILED = 719
        ERROR_NOT_PERMITTED = 800
        ERROR_NOT_SUPPORTED = 801
        ERROR_SYSTEM_NOT_READY = 802
        ERROR_SYSTEM_DRIVER_MISMATCH = 803
        ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE = 804
        ERROR_STREAM_CAPTURE_UNSUPPORTED = 900
        ERROR_STREAM_CAPTURE_INVALIDATED = 901
        ERROR_STREAM_CAPTURE_MERGE = 902
        ERROR_STREAM_CAPTURE_UNMATCHED = 903
        ERROR_STREAM_CAPTURE_UNJOINED = 904
        ERROR_STREAM_CAPTURE_ISOLATION = 905
        ERROR_STREAM_CAPTURE_IMPLICIT = 906
        ERROR_CAPTURED_EVENT = 907
        ERROR_STREAM_CAPTURE_WRONG_THREAD = 908
        ERROR_TIMEOUT = 909
        ERROR_UNKNOWN = 999
    }
}

/// Numbers of the driver's header, under its names without the prefix.
#[allow(missing_docs, reason = "the driver's header documents them")]
pub mod constant {
    pub const DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY: i32 = 19;
    pub const DEVICE_ATTRIBUTE_INTEGRATED: i32 = 18;
    pub const DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: i32 = 41;
    pub const DEVICE_ATTRIBUTE_PCI_BUS_ID: i32 = 33;
    pub const DEVICE_ATTRIBUTE_PCI_DEVICE_ID: i32 = 34;
    pub const DEVICE_ATTRIBUTE_PCI_DOMAIN_ID: i32 = 50;
    pub const DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: i32 = 75;
    pub const DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: i32 = 76;
    pub const DEVICE_ATTRIBUTE_MANAGED_MEMORY: i32 = 83;
    pub const DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS: i32 = 89;
    pub const DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED: i32 = 99;
    pub const DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: i32 = 102;
    pub const DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: i32 = 103;
    pub const DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: i32 = 115;
    pub const DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES: i32 = 119;
    pub const DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED: i32 = 128;
    pub const DEVICE_ATTRIBUTE_NUMA_ID: i32 = 134;
    pub const DEVICE_ATTRIBUTE_HOST_NUMA_ID: i32 = 147;

    pub const STREAM_DEFAULT: u32 = 0;
    pub const STREAM_NON_BLOCKING: u32 = 1;
    pub const EVENT_DEFAULT: u32 = 0;
    pub const EVENT_BLOCKING_SYNC: u32 = 1;
    pub const EVENT_DISABLE_TIMING: u32 = 2;
    pub const EVENT_INTERPROCESS: u32 = 4;

    pub const MEM_ALLOCATION_TYPE_PINNED: u32 = 1;
    pub const MEM_HANDLE_TYPE_NONE: u32 = 0;
    pub const MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: u32 = 1;
    pub const MEM_HANDLE_TYPE_FABRIC: u32 = 8;
    pub const MEM_LOCATION_TYPE_DEVICE: u32 = 1;
    pub const MEM_LOCATION_TYPE_HOST: u32 = 2;
    pub const MEM_LOCATION_TYPE_HOST_NUMA: u32 = 3;
    pub const MEM_ACCESS_FLAGS_PROT_NONE: u32 = 0;
    pub const MEM_ACCESS_FLAGS_PROT_READ: u32 = 1;
    pub const MEM_ACCESS_FLAGS_PROT_READWRITE: u32 = 3;
    pub const MEM_ALLOC_GRANULARITY_MINIMUM: u32 = 0;
    pub const MEM_ALLOC_GRANULARITY_RECOMMENDED: u32 = 1;

    pub const MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES: u32 = 1;
    pub const MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC: u32 = 2;
    pub const MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES: u32 = 3;
    pub const MEMPOOL_ATTR_RELEASE_THRESHOLD: u32 = 4;
    pub const MEMPOOL_ATTR_RESERVED_MEM_CURRENT: u32 = 5;
    pub const MEMPOOL_ATTR_RESERVED_MEM_HIGH: u32 = 6;
    pub const MEMPOOL_ATTR_USED_MEM_CURRENT: u32 = 7;
    pub const MEMPOOL_ATTR_USED_MEM_HIGH: u32 = 8;

    pub const GRAPH_MEM_ATTR_USED_MEM_CURRENT: u32 = 0;
    pub const GRAPH_MEM_ATTR_USED_MEM_HIGH: u32 = 1;
    pub const GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT: u32 = 2;
    pub const GRAPH_MEM_ATTR_RESERVED_MEM_HIGH: u32 = 3;

    pub const STREAM_CAPTURE_STATUS_NONE: u32 = 0;
    pub const STREAM_CAPTURE_STATUS_ACTIVE: u32 = 1;
    pub const STREAM_CAPTURE_STATUS_INVALIDATED: u32 = 2;
    pub const STREAM_CAPTURE_MODE_GLOBAL: u32 = 0;
    pub const STREAM_CAPTURE_MODE_THREAD_LOCAL: u32 = 1;
    pub const STREAM_CAPTURE_MODE_RELAXED: u32 = 2;
    pub const USER_OBJECT_NO_DESTRUCTOR_SYNC: u32 = 1;
    pub const GRAPH_USER_OBJECT_MOVE: u32 = 1;
    pub const GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH: u64 = 1;

    pub const MEMHOSTALLOC_PORTABLE: u32 = 1;
    pub const MEMHOSTALLOC_DEVICEMAP: u32 = 2;
    pub const MEMHOSTALLOC_WRITECOMBINED: u32 = 4;
    pub const MEMHOSTREGISTER_PORTABLE: u32 = 1;
    pub const MEMHOSTREGISTER_DEVICEMAP: u32 = 2;
    pub const MEMHOSTREGISTER_IOMEMORY: u32 = 4;
    pub const MEMHOSTREGISTER_READ_ONLY: u32 = 8;
    pub const MEM_ATTACH_GLOBAL: u32 = 1;
    pub const MEM_ATTACH_HOST: u32 = 2;
    pub const MEM_ADVISE_SET_READ_MOSTLY: u32 = 1;
    pub const MEM_ADVISE_UNSET_READ_MOSTLY: u32 = 2;
    pub const MEM_ADVISE_SET_PREFERRED_LOCATION: u32 = 3;
    pub const MEM_ADVISE_UNSET_PREFERRED_LOCATION: u32 = 4;
    pub const MEM_ADVISE_SET_ACCESSED_BY: u32 = 5;
    pub const MEM_ADVISE_UNSET_ACCESSED_BY: u32 = 6;
    pub const DEVICE_CPU: i32 = -1;

    pub const POINTER_ATTRIBUTE_CONTEXT: u32 = 1;
    pub const POINTER_ATTRIBUTE_MEMORY_TYPE: u32 = 2;
    pub const POINTER_ATTRIBUTE_DEVICE_POINTER: u32 = 3;
    pub const POINTER_ATTRIBUTE_HOST_POINTER: u32 = 4;
    pub const POINTER_ATTRIBUTE_BUFFER_ID: u32 = 7;
    pub const POINTER_ATTRIBUTE_IS_MANAGED: u32 = 8;
    pub const POINTER_ATTRIBUTE_DEVICE_ORDINAL: u32 = 9;
    pub const POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: u32 = 10;
    pub const POINTER_ATTRIBUTE_RANGE_START_ADDR: u32 = 11;
    pub const POINTER_ATTRIBUTE_RANGE_SIZE: u32 = 12;
    pub const POINTER_ATTRIBUTE_MAPPED: u32 = 13;
    pub const POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: u32 = 14;
    pub const POINTER_ATTRIBUTE_MEMPOOL_HANDLE: u32 = 17;
    pub const MEMORYTYPE_HOST: u32 = 1;
    pub const MEMORYTYPE_DEVICE: u32 = 2;
    pub const IPC_MEM_LAZY_ENABLE_PEER_ACCESS: u32 = 1;
}

/// Where memory lies (`CUmemLocation`).
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Location {
    /// One of `MEM_LOCATION_TYPE_*`.
    pub kind: u32,
    /// The device's or the node's number.
    pub id: i32,
}

impl Location {
    /// Memory of a device.
    pub const fn device(ordinal: i32) -> Self {
        Self { kind: constant::MEM_LOCATION_TYPE_DEVICE, id: ordinal }
    }
}

/// What physical memory to create (`CUmemAllocationProp`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AllocationProp {
    /// `MEM_ALLOCATION_TYPE_PINNED`.
    pub kind: u32,
    /// Handle types that can be exported later.
    pub requested_handle_types: u32,
    /// Where.
    pub location: Location,
    /// Not of Linux.
    pub win32_handle_meta_data: *mut c_void,
    /// 1: generic compression.
    pub compression_type: u8,
    /// 1: reachable for GPUDirect RDMA.
    pub gpu_direct_rdma_capable: u8,
    /// 1: tile pool.
    pub usage: u16,
    /// Zero.
    pub reserved: [u8; 4],
}

impl AllocationProp {
    /// Plain device memory.
    pub const fn device(ordinal: i32, handle_types: u32) -> Self {
        Self {
            kind: constant::MEM_ALLOCATION_TYPE_PINNED,
            requested_handle_types: handle_types,
            location: Location::device(ordinal),
            win32_handle_meta_data: std::ptr::null_mut(),
            compression_type: 0,
            gpu_direct_rdma_capable: 0,
            usage: 0,
            reserved: [0; 4],
        }
    }
}

/// Who may do what with mapped memory (`CUmemAccessDesc`).
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct AccessDesc {
    /// Who.
    pub location: Location,
    /// One of `MEM_ACCESS_FLAGS_*`.
    pub flags: u32,
}

/// What memory pool to create (`CUmemPoolProps`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MemPoolProps {
    /// `MEM_ALLOCATION_TYPE_PINNED`.
    pub kind: u32,
    /// Handle types that can be exported later.
    pub handle_types: u32,
    /// Where.
    pub location: Location,
    /// Not of Linux.
    pub win32_security_attributes: *mut c_void,
    /// 0: no limit. Drivers before 12.2 do not read it.
    pub max_size: usize,
    /// Zero.
    pub reserved: [u8; 56],
}

impl MemPoolProps {
    /// A pool of plain device memory.
    pub const fn device(ordinal: i32, handle_types: u32) -> Self {
        Self {
            kind: constant::MEM_ALLOCATION_TYPE_PINNED,
            handle_types,
            location: Location::device(ordinal),
            win32_security_attributes: std::ptr::null_mut(),
            max_size: 0,
            reserved: [0; 56],
        }
    }
}

/// A block of a pool on its way to another process (`CUmemPoolPtrExportData`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PoolPtrExport(pub [u8; 64]);

/// A block of `cuMemAlloc` on its way to another process (`CUipcMemHandle`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct IpcMemHandle(pub [u8; 64]);

/// An event on its way to another process (`CUipcEventHandle`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct IpcEventHandle(pub [u8; 64]);

const _: () = {
    assert!(size_of::<Location>() == 8);
    assert!(size_of::<AllocationProp>() == 32);
    assert!(size_of::<AccessDesc>() == 12);
    assert!(size_of::<MemPoolProps>() == 88);
    assert!(size_of::<PoolPtrExport>() == 64);
};

/// What went wrong with the driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Error {
    /// No `libcuda.so` could be loaded.
    NoDriver,
    /// The toolkit's stub was loaded in place of the driver.
    Stub,
    /// The driver is older than [`OLDEST_VERSION`].
    TooOld {
        /// As `cuDriverGetVersion` says it: 1000 x major + 10 x minor.
        version: i32,
    },
    /// The driver lacks a function without which nothing works.
    MissingSymbol {
        /// Its name.
        symbol: &'static str,
    },
    /// The driver lacks an optional function that this request needs.
    Unavailable {
        /// Its name.
        call: &'static str,
    },
    /// A call failed.
    Call {
        /// Its name.
        call: &'static str,
        /// What it returned.
        code: u32,
    },
}

impl Error {
    /// The driver's code, where the driver gave one.
    pub fn code(&self) -> Option<u32> {
        match *self {
            Self::Stub => Some(code::ERROR_STUB_LIBRARY),
            Self::Call { code, .. } => Some(code),
            _ => None,
        }
    }

    /// Whether a request failed for want of memory.
    pub fn is_out_of_memory(&self) -> bool {
        self.code() == Some(code::ERROR_OUT_OF_MEMORY)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NoDriver => f.write_str("CUDA driver: libcuda.so was not found: is the NVIDIA driver installed?"),
            Self::Stub => f.write_str(
                "CUDA driver: the loaded libcuda.so is the toolkit's stub: take its folder out of LD_LIBRARY_PATH",
            ),
            Self::TooOld { version } => write!(
                f,
                "CUDA driver: version {}.{} is too old: at least {}.{} is needed",
                version / 1000,
                version % 1000 / 10,
                OLDEST_VERSION / 1000,
                OLDEST_VERSION % 1000 / 10
            ),
            Self::MissingSymbol { symbol } => write!(f, "CUDA driver: it has no {symbol}: a newer driver has"),
            Self::Unavailable { call } => write!(f, "CUDA driver: this one has no {call}"),
            Self::Call { call, code } => write!(f, "{call}: {} ({code})", code::name(code)),
        }
    }
}

impl std::error::Error for Error {}

/// Turns a returned code into a result.
pub fn check(call: &'static str, code: u32) -> Result<(), Error> {
    if code == code::SUCCESS { Ok(()) } else { Err(Error::Call { call, code }) }
}

macro_rules! table {
    (
        required { $($name:ident = $symbol:ident ( $($arg:ident : $type:ty),* );)* }
        optional { $($oname:ident = $osymbol:ident ( $($oarg:ident : $otype:ty),* );)* }
    ) => {
        /// The functions of the driver. Those that only some drivers have are optional.
        #[derive(Clone, Copy)]
        #[allow(missing_docs, reason = "the driver's manual documents them")]
        pub struct Table {
            $(pub $name: unsafe extern "C" fn($($type),*) -> u32,)*
            $(pub $oname: Option<unsafe extern "C" fn($($otype),*) -> u32>,)*
        }

        /// The functions of the table, to count and to trace by.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[repr(u8)]
        #[allow(non_camel_case_types, missing_docs, reason = "they are the driver's own names")]
        pub enum Call {
            $($symbol,)*
            $($osymbol,)*
        }

        impl Call {
            /// All, in the order of their numbers.
            pub const ALL: &'static [Self] = &[$(Self::$symbol,)* $(Self::$osymbol,)*];

            /// The C symbol.
            pub const fn symbol(self) -> &'static str {
                match self {
                    $(Self::$symbol => stringify!($symbol),)*
                    $(Self::$osymbol => stringify!($osymbol),)*
                }
            }
        }

        impl Table {
            /// The address of one function; null where this driver has none of that name.
            pub fn address(&self, symbol: &str) -> *const c_void {
                match symbol {
                    $(stringify!($symbol) => self.$name as *const c_void,)*
                    $(stringify!($osymbol) => self.$oname.map_or(std::ptr::null(), |call| call as *const c_void),)*
                    _ => std::ptr::null(),
                }
            }

            /// Asks `lookup` for each symbol.
            ///
            /// # Safety
            /// `lookup` returns null or the address of the driver's function of that name.
            pub unsafe fn load(mut lookup: impl FnMut(&CStr) -> *const c_void) -> Result<Self, Error> {
                let mut find = |symbol: &'static str| {
                    let with_nul = CStr::from_bytes_with_nul(symbol.as_bytes()).ok();
                    with_nul.map_or(std::ptr::null(), &mut lookup)
                };
                Ok(Self {
                    $($name: {
                        let found = find(concat!(stringify!($symbol), "\0"));
                        if found.is_null() {
                            return Err(Error::MissingSymbol { symbol: stringify!($symbol) });
                        }
                        // SAFETY: not null, and the caller promises that it is this function.
                        unsafe { std::mem::transmute::<*const c_void, unsafe extern "C" fn($($type),*) -> u32>(found) }
                    },)*
                    $($oname: {
                        let found = find(concat!(stringify!($osymbol), "\0"));
                        // SAFETY: null is `None`, and the caller promises that else it is this function.
                        unsafe { std::mem::transmute::<*const c_void, Option<unsafe extern "C" fn($($otype),*) -> u32>>(found) }
                    },)*
                })
            }
        }

        #[allow(missing_docs, clippy::too_many_arguments, reason = "the driver's manual documents them")]
        impl Driver {
            $(
                #[inline]
                pub unsafe fn $name(&self $(, $arg: $type)*) -> Result<(), Error> {
                    // SAFETY: the caller keeps the C function's conditions.
                    let code = unsafe { (self.table.$name)($($arg),*) };
                    self.called(Call::$symbol, code)
                }
            )*
            $(
                #[inline]
                pub unsafe fn $oname(&self $(, $oarg: $otype)*) -> Result<(), Error> {
                    let Some(call) = self.table.$oname else {
                        return Err(Error::Unavailable { call: stringify!($osymbol) });
                    };
                    // SAFETY: the caller keeps the C function's conditions.
                    let code = unsafe { call($($oarg),*) };
                    self.called(Call::$osymbol, code)
                }
            )*
        }
    };
}

table! {
    required {
        init = cuInit(flags: u32);
        driver_get_version = cuDriverGetVersion(version: *mut i32);
        device_get = cuDeviceGet(device: *mut i32, ordinal: i32);
        device_get_count = cuDeviceGetCount(count: *mut i32);
        device_get_name = cuDeviceGetName(name: *mut c_char, length: i32, device: i32);
        device_total_mem = cuDeviceTotalMem_v2(bytes: *mut usize, device: i32);
        device_get_attribute = cuDeviceGetAttribute(value: *mut i32, attribute: i32, device: i32);
        primary_ctx_retain = cuDevicePrimaryCtxRetain(context: *mut Context, device: i32);
        primary_ctx_release = cuDevicePrimaryCtxRelease_v2(device: i32);
        ctx_get_current = cuCtxGetCurrent(context: *mut Context);
        ctx_set_current = cuCtxSetCurrent(context: Context);
        ctx_push_current = cuCtxPushCurrent_v2(context: Context);
        ctx_pop_current = cuCtxPopCurrent_v2(context: *mut Context);
        ctx_get_device = cuCtxGetDevice(device: *mut i32);
        ctx_synchronize = cuCtxSynchronize();
        stream_create = cuStreamCreate(stream: *mut Stream, flags: u32);
        stream_destroy = cuStreamDestroy_v2(stream: Stream);
        stream_query = cuStreamQuery(stream: Stream);
        stream_synchronize = cuStreamSynchronize(stream: Stream);
        stream_wait_event = cuStreamWaitEvent(stream: Stream, event: Event, flags: u32);
        stream_is_capturing = cuStreamIsCapturing(stream: Stream, status: *mut u32);
        event_create = cuEventCreate(event: *mut Event, flags: u32);
        event_destroy = cuEventDestroy_v2(event: Event);
        event_query = cuEventQuery(event: Event);
        event_record = cuEventRecord(event: Event, stream: Stream);
        event_synchronize = cuEventSynchronize(event: Event);
        mem_get_info = cuMemGetInfo_v2(free_bytes: *mut usize, total_bytes: *mut usize);
        mem_alloc = cuMemAlloc_v2(ptr: *mut DevicePtr, bytes: usize);
        mem_free = cuMemFree_v2(ptr: DevicePtr);
        pointer_get_attribute = cuPointerGetAttribute(data: *mut c_void, attribute: u32, ptr: DevicePtr);
        memcpy_htod_async = cuMemcpyHtoDAsync_v2(to: DevicePtr, from: *const c_void, bytes: usize, stream: Stream);
        memcpy_dtoh_async = cuMemcpyDtoHAsync_v2(to: *mut c_void, from: DevicePtr, bytes: usize, stream: Stream);
        memcpy_dtod_async = cuMemcpyDtoDAsync_v2(to: DevicePtr, from: DevicePtr, bytes: usize, stream: Stream);
        memset_d8_async = cuMemsetD8Async(ptr: DevicePtr, value: u8, bytes: usize, stream: Stream);
    }
    optional {
        get_error_name = cuGetErrorName(code: u32, name: *mut *const c_char);
        get_error_string = cuGetErrorString(code: u32, text: *mut *const c_char);
        get_proc_address = cuGetProcAddress_v2(symbol: *const c_char, function: *mut *mut c_void, version: i32, flags: u64, status: *mut u32);
        device_get_uuid = cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: i32);
        device_get_pci_bus_id = cuDeviceGetPCIBusId(id: *mut c_char, length: i32, device: i32);
        stream_create_with_priority = cuStreamCreateWithPriority(stream: *mut Stream, flags: u32, priority: i32);
        stream_get_flags = cuStreamGetFlags(stream: Stream, flags: *mut u32);
        stream_get_ctx = cuStreamGetCtx(stream: Stream, context: *mut Context);
        stream_get_id = cuStreamGetId(stream: Stream, id: *mut u64);
        event_elapsed_time = cuEventElapsedTime(milliseconds: *mut f32, start: Event, end: Event);

        mem_alloc_managed = cuMemAllocManaged(ptr: *mut DevicePtr, bytes: usize, flags: u32);
        mem_advise = cuMemAdvise(ptr: DevicePtr, bytes: usize, advice: u32, device: i32);
        mem_advise_v2 = cuMemAdvise_v2(ptr: DevicePtr, bytes: usize, advice: u32, location: Location);
        mem_prefetch_async = cuMemPrefetchAsync(ptr: DevicePtr, bytes: usize, device: i32, stream: Stream);
        mem_prefetch_async_v2 = cuMemPrefetchAsync_v2(ptr: DevicePtr, bytes: usize, location: Location, flags: u32, stream: Stream);

        mem_host_alloc = cuMemHostAlloc(ptr: *mut *mut c_void, bytes: usize, flags: u32);
        mem_alloc_host = cuMemAllocHost_v2(ptr: *mut *mut c_void, bytes: usize);
        mem_free_host = cuMemFreeHost(ptr: *mut c_void);
        mem_host_register = cuMemHostRegister_v2(ptr: *mut c_void, bytes: usize, flags: u32);
        mem_host_unregister = cuMemHostUnregister(ptr: *mut c_void);
        mem_host_get_device_pointer = cuMemHostGetDevicePointer_v2(ptr: *mut DevicePtr, host: *mut c_void, flags: u32);
        mem_host_get_flags = cuMemHostGetFlags(flags: *mut u32, host: *mut c_void);

        mem_get_address_range = cuMemGetAddressRange_v2(base: *mut DevicePtr, bytes: *mut usize, ptr: DevicePtr);
        memcpy_htod = cuMemcpyHtoD_v2(to: DevicePtr, from: *const c_void, bytes: usize);
        memcpy_dtoh = cuMemcpyDtoH_v2(to: *mut c_void, from: DevicePtr, bytes: usize);
        memset_d32_async = cuMemsetD32Async(ptr: DevicePtr, value: u32, count: usize, stream: Stream);

        mem_alloc_async = cuMemAllocAsync(ptr: *mut DevicePtr, bytes: usize, stream: Stream);
        mem_alloc_from_pool_async = cuMemAllocFromPoolAsync(ptr: *mut DevicePtr, bytes: usize, pool: MemPool, stream: Stream);
        mem_free_async = cuMemFreeAsync(ptr: DevicePtr, stream: Stream);
        device_get_default_mem_pool = cuDeviceGetDefaultMemPool(pool: *mut MemPool, device: i32);
        device_get_mem_pool = cuDeviceGetMemPool(pool: *mut MemPool, device: i32);
        device_set_mem_pool = cuDeviceSetMemPool(device: i32, pool: MemPool);
        mem_pool_create = cuMemPoolCreate(pool: *mut MemPool, props: *const MemPoolProps);
        mem_pool_destroy = cuMemPoolDestroy(pool: MemPool);
        mem_pool_trim_to = cuMemPoolTrimTo(pool: MemPool, keep_bytes: usize);
        mem_pool_get_attribute = cuMemPoolGetAttribute(pool: MemPool, attribute: u32, value: *mut c_void);
        mem_pool_set_attribute = cuMemPoolSetAttribute(pool: MemPool, attribute: u32, value: *mut c_void);
        mem_pool_set_access = cuMemPoolSetAccess(pool: MemPool, map: *const AccessDesc, count: usize);
        mem_pool_get_access = cuMemPoolGetAccess(flags: *mut u32, pool: MemPool, location: *mut Location);
        mem_pool_export_to_shareable_handle = cuMemPoolExportToShareableHandle(handle: *mut c_void, pool: MemPool, kind: u32, flags: u64);
        mem_pool_import_from_shareable_handle = cuMemPoolImportFromShareableHandle(pool: *mut MemPool, handle: *mut c_void, kind: u32, flags: u64);
        mem_pool_export_pointer = cuMemPoolExportPointer(data: *mut PoolPtrExport, ptr: DevicePtr);
        mem_pool_import_pointer = cuMemPoolImportPointer(ptr: *mut DevicePtr, pool: MemPool, data: *mut PoolPtrExport);

        mem_address_reserve = cuMemAddressReserve(ptr: *mut DevicePtr, bytes: usize, alignment: usize, hint: DevicePtr, flags: u64);
        mem_address_free = cuMemAddressFree(ptr: DevicePtr, bytes: usize);
        mem_create = cuMemCreate(handle: *mut MemHandle, bytes: usize, prop: *const AllocationProp, flags: u64);
        mem_release = cuMemRelease(handle: MemHandle);
        mem_map = cuMemMap(ptr: DevicePtr, bytes: usize, offset: usize, handle: MemHandle, flags: u64);
        mem_unmap = cuMemUnmap(ptr: DevicePtr, bytes: usize);
        mem_set_access = cuMemSetAccess(ptr: DevicePtr, bytes: usize, desc: *const AccessDesc, count: usize);
        mem_get_access = cuMemGetAccess(flags: *mut u64, location: *const Location, ptr: DevicePtr);
        mem_get_allocation_granularity = cuMemGetAllocationGranularity(bytes: *mut usize, prop: *const AllocationProp, option: u32);
        mem_export_to_shareable_handle = cuMemExportToShareableHandle(shareable: *mut c_void, handle: MemHandle, kind: u32, flags: u64);
        mem_import_from_shareable_handle = cuMemImportFromShareableHandle(handle: *mut MemHandle, shareable: *mut c_void, kind: u32);
        mem_retain_allocation_handle = cuMemRetainAllocationHandle(handle: *mut MemHandle, ptr: *mut c_void);

        ipc_get_mem_handle = cuIpcGetMemHandle(handle: *mut IpcMemHandle, ptr: DevicePtr);
        ipc_open_mem_handle = cuIpcOpenMemHandle_v2(ptr: *mut DevicePtr, handle: IpcMemHandle, flags: u32);
        ipc_close_mem_handle = cuIpcCloseMemHandle(ptr: DevicePtr);
        ipc_get_event_handle = cuIpcGetEventHandle(handle: *mut IpcEventHandle, event: Event);
        ipc_open_event_handle = cuIpcOpenEventHandle(event: *mut Event, handle: IpcEventHandle);
        device_can_access_peer = cuDeviceCanAccessPeer(can: *mut i32, device: i32, peer: i32);
        ctx_enable_peer_access = cuCtxEnablePeerAccess(peer: Context, flags: u32);
        ctx_disable_peer_access = cuCtxDisablePeerAccess(peer: Context);

        stream_begin_capture = cuStreamBeginCapture_v2(stream: Stream, mode: u32);
        stream_end_capture = cuStreamEndCapture(stream: Stream, graph: *mut Graph);
        stream_get_capture_info_v2 = cuStreamGetCaptureInfo_v2(stream: Stream, status: *mut u32, id: *mut u64, graph: *mut Graph, dependencies: *mut *const GraphNode, count: *mut usize);
        stream_get_capture_info_v3 = cuStreamGetCaptureInfo_v3(stream: Stream, status: *mut u32, id: *mut u64, graph: *mut Graph, dependencies: *mut *const GraphNode, edges: *mut *const c_void, count: *mut usize);
        thread_exchange_stream_capture_mode = cuThreadExchangeStreamCaptureMode(mode: *mut u32);
        graph_create = cuGraphCreate(graph: *mut Graph, flags: u32);
        graph_destroy = cuGraphDestroy(graph: Graph);
        graph_instantiate = cuGraphInstantiateWithFlags(exec: *mut GraphExec, graph: Graph, flags: u64);
        graph_exec_destroy = cuGraphExecDestroy(exec: GraphExec);
        graph_launch = cuGraphLaunch(exec: GraphExec, stream: Stream);
        graph_retain_user_object = cuGraphRetainUserObject(graph: Graph, object: UserObject, count: u32, flags: u32);
        graph_release_user_object = cuGraphReleaseUserObject(graph: Graph, object: UserObject, count: u32);
        user_object_create = cuUserObjectCreate(object: *mut UserObject, data: *mut c_void, destroy: HostFn, count: u32, flags: u32);
        user_object_retain = cuUserObjectRetain(object: UserObject, count: u32);
        user_object_release = cuUserObjectRelease(object: UserObject, count: u32);
        device_get_graph_mem_attribute = cuDeviceGetGraphMemAttribute(device: i32, attribute: u32, value: *mut c_void);
        device_set_graph_mem_attribute = cuDeviceSetGraphMemAttribute(device: i32, attribute: u32, value: *mut c_void);
        device_graph_mem_trim = cuDeviceGraphMemTrim(device: i32);

        module_load_data = cuModuleLoadData(module: *mut Module, image: *const c_void);
        module_unload = cuModuleUnload(module: Module);
        module_get_function = cuModuleGetFunction(function: *mut Function, module: Module, name: *const c_char);
        launch_kernel = cuLaunchKernel(function: Function, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32, shared_bytes: u32, stream: Stream, params: *mut *mut c_void, extra: *mut *mut c_void);
        launch_host_func = cuLaunchHostFunc(stream: Stream, function: HostFn, data: *mut c_void);
    }
}

const FUNCTIONS: usize = Call::ALL.len();

/// Hears of each call after it returned: which, and its code.
pub type Observer = fn(Call, u32);

/// A driver that is loaded and initialised, with a count of calls by function.
///
/// Its methods are the functions of [`Table`] under the same names; they check the code. Each has the
/// conditions of the C function that it calls.
pub struct Driver {
    table: Table,
    version: i32,
    calls: [AtomicU64; FUNCTIONS],
    recent: Recent,
    observer: AtomicPtr<()>,
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("version", &self.version).finish_non_exhaustive()
    }
}

impl Driver {
    /// The system's driver, the library that cudarc uses too.
    pub fn load() -> Result<Self, Error> {
        let lookup = lookup()?;
        // SAFETY: these are the symbols of the driver's library, which is never unloaded.
        let table = unsafe { Table::load(lookup) }?;
        Self::new(table)
    }

    /// Initialises the driver behind a table: also a simulated one.
    pub fn new(table: Table) -> Result<Self, Error> {
        let calls = [const { AtomicU64::new(0) }; FUNCTIONS];
        let observer = AtomicPtr::new(std::ptr::null_mut());
        let mut driver = Self { table, version: 0, calls, recent: Recent::new(), observer };
        // SAFETY: no condition.
        match unsafe { driver.init(0) } {
            Err(error) if error.code() == Some(code::ERROR_STUB_LIBRARY) => {
                return Err(Error::Stub);
            }
            other => other?,
        }
        let mut version = 0;
        // SAFETY: a valid place to write to.
        unsafe { driver.driver_get_version(&raw mut version) }?;
        if version < OLDEST_VERSION {
            return Err(Error::TooOld { version });
        }
        driver.version = version;
        Ok(driver)
    }

    /// As `cuDriverGetVersion` says it: 1000 x major + 10 x minor.
    pub fn version(&self) -> i32 {
        self.version
    }

    /// The functions themselves: for a caller that wants the plain code, and to see which are there.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// What the device can do, each feature only where attribute and functions are there.
    pub fn features(&self, device: i32) -> Result<Features, Error> {
        let t = &self.table;
        let asked = |attribute| self.attribute(device, attribute).map(|value| value > 0);
        let has_pools = t.mem_alloc_from_pool_async.is_some()
            && t.mem_free_async.is_some()
            && t.mem_pool_create.is_some()
            && t.mem_pool_destroy.is_some()
            && t.mem_pool_trim_to.is_some()
            && t.mem_pool_get_attribute.is_some()
            && t.mem_pool_set_attribute.is_some();
        let has_vmm = t.mem_address_reserve.is_some()
            && t.mem_address_free.is_some()
            && t.mem_create.is_some()
            && t.mem_release.is_some()
            && t.mem_map.is_some()
            && t.mem_unmap.is_some()
            && t.mem_set_access.is_some()
            && t.mem_get_allocation_granularity.is_some();
        Ok(Features {
            pools: has_pools && asked(constant::DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)?,
            vmm: has_vmm && asked(constant::DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)?,
            managed: t.mem_alloc_managed.is_some()
                && asked(constant::DEVICE_ATTRIBUTE_MANAGED_MEMORY)?,
            export_fd: asked(
                constant::DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
            )?,
        })
    }

    /// A device's attribute; 0 where an old driver does not know the number.
    pub fn attribute(&self, device: i32, attribute: i32) -> Result<i32, Error> {
        let mut value = 0;
        // SAFETY: a valid place to write to.
        match unsafe { self.device_get_attribute(&raw mut value, attribute, device) } {
            Err(error) if error.code() == Some(code::ERROR_INVALID_VALUE) => Ok(0),
            other => other.map(|()| value),
        }
    }

    /// Calls of one function so far.
    pub fn calls(&self, function: Call) -> u64 {
        self.calls[function as usize].load(Ordering::Relaxed)
    }

    /// Calls so far, of all functions.
    pub fn all_calls(&self) -> u64 {
        self.calls.iter().map(|calls| calls.load(Ordering::Relaxed)).sum()
    }

    /// The last calls, oldest first.
    pub fn recent_calls(&self) -> Vec<RecentCall> {
        self.recent.calls()
    }

    /// Sets who hears of each call.
    pub fn observe(&self, observer: Option<Observer>) {
        let pointer = observer.map_or(std::ptr::null_mut(), |observer| observer as *mut ());
        self.observer.store(pointer, Ordering::Release);
    }

    #[inline]
    fn called(&self, function: Call, code: u32) -> Result<(), Error> {
        self.calls[function as usize].fetch_add(1, Ordering::Relaxed);
        self.recent.note(function, code, coarse_ms());
        let observer = self.observer.load(Ordering::Acquire);
        if !observer.is_null() {
            // SAFETY: only `observe` writes here, and it writes an `Observer`.
            let observer = unsafe { std::mem::transmute::<*mut (), Observer>(observer) };
            observer(function, code);
        }
        check(function.symbol(), code)
    }
}

/// Finds the functions of the library that cudarc loads, after a look whether there is one.
#[cfg(not(feature = "linked-driver"))]
fn lookup() -> Result<impl FnMut(&CStr) -> *const c_void, Error> {
    // SAFETY: it only loads and unloads the driver's library.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        return Err(Error::NoDriver);
    }
    // SAFETY: the library was there a moment ago; else this would panic.
    let library = unsafe { cudarc::driver::sys::culib() };
    Ok(|symbol: &CStr| {
        // SAFETY: any symbol is an address.
        let found = unsafe { library.get::<*const c_void>(symbol.to_bytes_with_nul()) };
        found.map_or(std::ptr::null(), |found| *found)
    })
}

/// Finds the functions of the library that the program is linked with: then cudarc loads none.
#[cfg(feature = "linked-driver")]
fn lookup() -> Result<impl FnMut(&CStr) -> *const c_void, Error> {
    // SAFETY: a C string.
    let find =
        |symbol: &CStr| unsafe { libc::dlsym(libc::RTLD_DEFAULT, symbol.as_ptr()) }.cast_const();
    if find(c"cuInit").is_null() { Err(Error::NoDriver) } else { Ok(find) }
}

/// What a device and its driver offer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Features {
    /// Stream-ordered memory pools of the driver (attribute 115).
    pub pools: bool,
    /// Virtual memory management (attribute 102).
    pub vmm: bool,
    /// Managed memory.
    pub managed: bool,
    /// Physical memory can be exported as a file descriptor.
    pub export_fd: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_the_call_and_the_code() {
        let error = check("cuMemAlloc_v2", 2).unwrap_err();
        assert_eq!(error.to_string(), "cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY (2)");
        assert!(error.is_out_of_memory());
        assert!(
            check("cuInit", 54_321).unwrap_err().to_string().contains("an unknown code (54321)")
        );
        assert_eq!(
            Error::TooOld { version: 10_020 }.to_string(),
            "CUDA driver: version 10.2 is too old: at least 11.4 is needed"
        );
    }

    #[test]
    fn a_table_names_the_first_symbol_that_is_missing() {
        // SAFETY: null is allowed.
        let nothing = unsafe { Table::load(|_| std::ptr::null()) };
        assert_eq!(nothing.err(), Some(Error::MissingSymbol { symbol: "cuInit" }));
        let mut asked = Vec::new();
        // SAFETY: the table is never called, so any address will do.
        let table = unsafe {
            Table::load(|symbol| {
                asked.push(symbol.to_owned());
                if symbol == c"cuMemCreate" { std::ptr::null() } else { c"x".as_ptr().cast() }
            })
        };
        assert!(table.is_ok_and(|table| table.mem_create.is_none() && table.mem_map.is_some()));
        assert_eq!(asked.len(), Call::ALL.len());
    }
}
