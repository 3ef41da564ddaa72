//! The driver's functions.

use std::ffi::{c_char, c_void};

use thermalloc_cuda::driver::{
    AccessDesc, AllocationProp, Call, Context, DevicePtr, Event, Function, Graph, GraphExec,
    GraphNode, HostFn, IpcMemHandle, Location, MemHandle, MemPool, MemPoolProps, Module,
    PoolPtrExport, Stream, Table, UserObject, code, constant,
};

use crate::abi::{Addr, Arg, ConstAddr, In, Out, put_text};
use crate::capture::Submission;
use crate::enter::{Cx, SLOTS, enter};
use crate::memory::{Access, Kind, Mode};
use crate::state::{Mistake, R, context_of, device_of_context};

macro_rules! functions {
    ($(fn $symbol:ident($cx:ident $(, $arg:ident: $type:ty)*) $body:block)*) => {
        $(
            pub(crate) unsafe extern "C" fn $symbol<const SLOT: usize>($($arg: <$type as Arg>::Raw),*) -> u32 {
                $(
                    // SAFETY: the caller keeps to the driver's manual.
                    let $arg = unsafe { <$type as Arg>::from_raw($arg) };
                )*
                bodies::$symbol(SLOT, $($arg),*)
            }
        )*

        mod bodies {
            use super::*;
            $(
                #[allow(clippy::too_many_arguments, reason = "the driver's function has as many")]
                pub(super) fn $symbol(slot: usize, $($arg: $type),*) -> u32 {
                    enter(slot, Call::$symbol, |$cx: &mut Cx| $body)
                }
            )*
        }

        /// The same functions under their C names, for the machine of slot 0.
        mod exported {
            use super::*;
            $(
                #[unsafe(no_mangle)]
                unsafe extern "C" fn $symbol($($arg: <$type as Arg>::Raw),*) -> u32 {
                    // SAFETY: passed on as it came.
                    unsafe { super::$symbol::<0>($($arg),*) }
                }
            )*
        }
    };
}

mod device;
mod graph;
mod memory;
mod pool;
mod stream;
mod vmm;

use device::*;
use graph::*;
use memory::*;
use pool::*;
use stream::*;
use vmm::*;

macro_rules! tables {
    ($($slot:literal)*) => {
        /// The table of the machine in a slot.
        pub(crate) fn table_of(slot: usize) -> Table {
            match slot {
                $($slot => full_table::<$slot>(),)*
                _ => full_table::<0>(),
            }
        }
        const _: () = assert!(SLOTS == [$($slot),*].len() + 1);
    };
}

tables! { 1 2 3 4 5 6 7 8 }

/// Every function: that their types are the table's is checked here.
fn full_table<const S: usize>() -> Table {
    Table {
        init: cuInit::<S>,
        driver_get_version: cuDriverGetVersion::<S>,
        device_get: cuDeviceGet::<S>,
        device_get_count: cuDeviceGetCount::<S>,
        device_get_name: cuDeviceGetName::<S>,
        device_total_mem: cuDeviceTotalMem_v2::<S>,
        device_get_attribute: cuDeviceGetAttribute::<S>,
        primary_ctx_retain: cuDevicePrimaryCtxRetain::<S>,
        primary_ctx_release: cuDevicePrimaryCtxRelease_v2::<S>,
        ctx_get_current: cuCtxGetCurrent::<S>,
        ctx_set_current: cuCtxSetCurrent::<S>,
        ctx_push_current: cuCtxPushCurrent_v2::<S>,
        ctx_pop_current: cuCtxPopCurrent_v2::<S>,
        ctx_get_device: cuCtxGetDevice::<S>,
        ctx_synchronize: cuCtxSynchronize::<S>,
        stream_create: cuStreamCreate::<S>,
        stream_destroy: cuStreamDestroy_v2::<S>,
        stream_query: cuStreamQuery::<S>,
        stream_synchronize: cuStreamSynchronize::<S>,
        stream_wait_event: cuStreamWaitEvent::<S>,
        stream_is_capturing: cuStreamIsCapturing::<S>,
        event_create: cuEventCreate::<S>,
        event_destroy: cuEventDestroy_v2::<S>,
        event_query: cuEventQuery::<S>,
        event_record: cuEventRecord::<S>,
        event_synchronize: cuEventSynchronize::<S>,
        mem_get_info: cuMemGetInfo_v2::<S>,
        mem_alloc: cuMemAlloc_v2::<S>,
        mem_free: cuMemFree_v2::<S>,
        pointer_get_attribute: cuPointerGetAttribute::<S>,
        memcpy_htod_async: cuMemcpyHtoDAsync_v2::<S>,
        memcpy_dtoh_async: cuMemcpyDtoHAsync_v2::<S>,
        memcpy_dtod_async: cuMemcpyDtoDAsync_v2::<S>,
        memset_d8_async: cuMemsetD8Async::<S>,
        get_error_name: Some(cuGetErrorName::<S>),
        get_error_string: Some(cuGetErrorString::<S>),
        get_proc_address: Some(cuGetProcAddress_v2::<S>),
        device_get_uuid: Some(cuDeviceGetUuid_v2::<S>),
        device_get_pci_bus_id: Some(cuDeviceGetPCIBusId::<S>),
        stream_create_with_priority: Some(cuStreamCreateWithPriority::<S>),
        stream_get_flags: Some(cuStreamGetFlags::<S>),
        stream_get_ctx: Some(cuStreamGetCtx::<S>),
        stream_get_id: Some(cuStreamGetId::<S>),
        event_elapsed_time: Some(cuEventElapsedTime::<S>),
        mem_alloc_managed: Some(cuMemAllocManaged::<S>),
        mem_advise: Some(cuMemAdvise::<S>),
        mem_advise_v2: Some(cuMemAdvise_v2::<S>),
        mem_prefetch_async: Some(cuMemPrefetchAsync::<S>),
        mem_prefetch_async_v2: Some(cuMemPrefetchAsync_v2::<S>),
        mem_host_alloc: Some(cuMemHostAlloc::<S>),
        mem_alloc_host: Some(cuMemAllocHost_v2::<S>),
        mem_free_host: Some(cuMemFreeHost::<S>),
        mem_host_register: Some(cuMemHostRegister_v2::<S>),
        mem_host_unregister: Some(cuMemHostUnregister::<S>),
        mem_host_get_device_pointer: Some(cuMemHostGetDevicePointer_v2::<S>),
        mem_host_get_flags: Some(cuMemHostGetFlags::<S>),
        mem_get_address_range: Some(cuMemGetAddressRange_v2::<S>),
        memcpy_htod: Some(cuMemcpyHtoD_v2::<S>),
        memcpy_dtoh: Some(cuMemcpyDtoH_v2::<S>),
        memset_d32_async: Some(cuMemsetD32Async::<S>),
        mem_alloc_async: Some(cuMemAllocAsync::<S>),
        mem_alloc_from_pool_async: Some(cuMemAllocFromPoolAsync::<S>),
        mem_free_async: Some(cuMemFreeAsync::<S>),
        device_get_default_mem_pool: Some(cuDeviceGetDefaultMemPool::<S>),
        device_get_mem_pool: Some(cuDeviceGetMemPool::<S>),
        device_set_mem_pool: Some(cuDeviceSetMemPool::<S>),
        mem_pool_create: Some(cuMemPoolCreate::<S>),
        mem_pool_destroy: Some(cuMemPoolDestroy::<S>),
        mem_pool_trim_to: Some(cuMemPoolTrimTo::<S>),
        mem_pool_get_attribute: Some(cuMemPoolGetAttribute::<S>),
        mem_pool_set_attribute: Some(cuMemPoolSetAttribute::<S>),
        mem_pool_set_access: Some(cuMemPoolSetAccess::<S>),
        mem_pool_get_access: Some(cuMemPoolGetAccess::<S>),
        mem_pool_export_to_shareable_handle: Some(cuMemPoolExportToShareableHandle::<S>),
        mem_pool_import_from_shareable_handle: Some(cuMemPoolImportFromShareableHandle::<S>),
        mem_pool_export_pointer: Some(cuMemPoolExportPointer::<S>),
        mem_pool_import_pointer: Some(cuMemPoolImportPointer::<S>),
        mem_address_reserve: Some(cuMemAddressReserve::<S>),
        mem_address_free: Some(cuMemAddressFree::<S>),
        mem_create: Some(cuMemCreate::<S>),
        mem_release: Some(cuMemRelease::<S>),
        mem_map: Some(cuMemMap::<S>),
        mem_unmap: Some(cuMemUnmap::<S>),
        mem_set_access: Some(cuMemSetAccess::<S>),
        mem_get_access: Some(cuMemGetAccess::<S>),
        mem_get_allocation_granularity: Some(cuMemGetAllocationGranularity::<S>),
        mem_export_to_shareable_handle: Some(cuMemExportToShareableHandle::<S>),
        mem_import_from_shareable_handle: Some(cuMemImportFromShareableHandle::<S>),
        mem_retain_allocation_handle: Some(cuMemRetainAllocationHandle::<S>),
        ipc_get_mem_handle: Some(cuIpcGetMemHandle::<S>),
        ipc_open_mem_handle: Some(cuIpcOpenMemHandle_v2::<S>),
        ipc_close_mem_handle: Some(cuIpcCloseMemHandle::<S>),
        ipc_get_event_handle: None,
        ipc_open_event_handle: None,
        device_can_access_peer: Some(cuDeviceCanAccessPeer::<S>),
        ctx_enable_peer_access: Some(cuCtxEnablePeerAccess::<S>),
        ctx_disable_peer_access: Some(cuCtxDisablePeerAccess::<S>),
        stream_begin_capture: Some(cuStreamBeginCapture_v2::<S>),
        stream_end_capture: Some(cuStreamEndCapture::<S>),
        stream_get_capture_info_v2: Some(cuStreamGetCaptureInfo_v2::<S>),
        stream_get_capture_info_v3: Some(cuStreamGetCaptureInfo_v3::<S>),
        thread_exchange_stream_capture_mode: Some(cuThreadExchangeStreamCaptureMode::<S>),
        graph_create: Some(cuGraphCreate::<S>),
        graph_destroy: Some(cuGraphDestroy::<S>),
        graph_instantiate: Some(cuGraphInstantiateWithFlags::<S>),
        graph_exec_destroy: Some(cuGraphExecDestroy::<S>),
        graph_launch: Some(cuGraphLaunch::<S>),
        graph_retain_user_object: Some(cuGraphRetainUserObject::<S>),
        graph_release_user_object: Some(cuGraphReleaseUserObject::<S>),
        user_object_create: Some(cuUserObjectCreate::<S>),
        user_object_retain: Some(cuUserObjectRetain::<S>),
        user_object_release: Some(cuUserObjectRelease::<S>),
        device_get_graph_mem_attribute: Some(cuDeviceGetGraphMemAttribute::<S>),
        device_set_graph_mem_attribute: Some(cuDeviceSetGraphMemAttribute::<S>),
        device_graph_mem_trim: Some(cuDeviceGraphMemTrim::<S>),
        module_load_data: Some(cuModuleLoadData::<S>),
        module_unload: Some(cuModuleUnload::<S>),
        module_get_function: Some(cuModuleGetFunction::<S>),
        launch_kernel: Some(cuLaunchKernel::<S>),
        launch_host_func: Some(cuLaunchHostFunc::<S>),
    }
}
