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

            /// The older form, which does not say why it found nothing.
            #[unsafe(no_mangle)]
            unsafe extern "C" fn cuGetProcAddress(symbol: *const c_char, function: *mut *mut c_void, version: i32, flags: u64) -> u32 {
                // SAFETY: passed on as it came.
                unsafe { super::cuGetProcAddress_v2::<0>(symbol, function, version, flags, std::ptr::null_mut()) }
            }
        }
    };
}

functions! {
    fn cuInit(cx, flags: u32) {
        let state = cx.state()?;
        if state.config.stub {
            return Err(code::ERROR_STUB_LIBRARY);
        }
        if flags != 0 {
            return Err(code::ERROR_INVALID_VALUE);
        }
        if state.devices.is_empty() {
            return Err(code::ERROR_NO_DEVICE);
        }
        state.initialised = true;
        Ok(())
    }
    fn cuDriverGetVersion(cx, version: Out<i32>) {
        version.set(cx.state()?.config.version)
    }
    fn cuGetErrorName(cx, number: u32, name: Out<*const c_char>) {
        let _state = cx.state()?;
        name.set(error_text(number)?)
    }
    fn cuGetErrorString(cx, number: u32, text: Out<*const c_char>) {
        let _state = cx.state()?;
        text.set(error_text(number)?)
    }
    fn cuGetProcAddress_v2(cx, symbol: In<c_char>, function: Out<*mut c_void>, _version: i32, _flags: u64, status: Out<u32>) {
        let missing = cx.state()?.config.missing.clone();
        let symbol = symbol.text()?;
        let table = table_of(cx.slot);
        // It is asked for names without the suffix of a version.
        let versions = [symbol.clone(), format!("{symbol}_v2"), format!("{symbol}_v3")];
        let there = versions.iter().rev().filter(|name| !missing.iter().any(|call| call.symbol() == *name));
        let found = there.map(|name| table.address(name)).find(|found| !found.is_null());
        function.set(found.unwrap_or(std::ptr::null()).cast_mut())?;
        status.set_if_wanted(u32::from(found.is_none()));
        found.map(|_| ()).ok_or(code::ERROR_NOT_FOUND)
    }
    fn cuDeviceGet(cx, device: Out<i32>, ordinal: i32) {
        cx.state()?.device_of(ordinal)?;
        device.set(ordinal)
    }
    fn cuDeviceGetCount(cx, count: Out<i32>) {
        count.set(cx.state()?.devices.len() as i32)
    }
    fn cuDeviceGetName(cx, name: Out<c_char>, length: i32, device: i32) {
        let state = cx.state()?;
        state.device_of(device)?;
        put_text(&name, length, if state.config.mig { "Simulated device MIG 1g.10gb" } else { "Simulated device" })
    }
    fn cuDeviceTotalMem_v2(cx, bytes: Out<usize>, device: i32) {
        let state = cx.state()?;
        let device = state.device_of(device)?;
        bytes.set(state.devices[device as usize].total as usize)
    }
    fn cuDeviceGetAttribute(cx, value: Out<i32>, attribute: i32, device: i32) {
        let state = cx.state()?;
        state.device_of(device)?;
        let config = &state.config;
        value.set(match attribute {
            constant::DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED => i32::from(config.pools),
            constant::DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED => i32::from(config.vmm),
            constant::DEVICE_ATTRIBUTE_MANAGED_MEMORY | constant::DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS => {
                i32::from(config.managed)
            }
            constant::DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
            | constant::DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES => i32::from(config.export_fd),
            constant::DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY
            | constant::DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING
            | constant::DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED => 1,
            constant::DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => 9,
            constant::DEVICE_ATTRIBUTE_PCI_BUS_ID => device + 1,
            _ if attribute > 0 && attribute < 160 => 0,
            _ => return Err(code::ERROR_INVALID_VALUE),
        })
    }
    fn cuDeviceGetUuid_v2(cx, uuid: Out<[u8; 16]>, device: i32) {
        cx.state()?.device_of(device)?;
        uuid.set([device as u8 + 1; 16])
    }
    fn cuDeviceGetPCIBusId(cx, id: Out<c_char>, length: i32, device: i32) {
        cx.state()?.device_of(device)?;
        put_text(&id, length, &format!("0000:{:02x}:00.0", device + 1))
    }
    fn cuDevicePrimaryCtxRetain(cx, context: Out<Context>, device: i32) {
        let state = cx.state()?;
        let device = state.device_of(device)?;
        state.devices[device as usize].context_refs += 1;
        context.set(context_of(device))
    }
    fn cuDevicePrimaryCtxRelease_v2(cx, device: i32) {
        let device = cx.state()?.device_of(device)?;
        let held = &mut cx.state()?.devices[device as usize];
        if held.context_refs == 0 {
            return Err(code::ERROR_INVALID_CONTEXT);
        }
        held.context_refs -= 1;
        Ok(())
    }
    fn cuCtxGetCurrent(cx, context: Out<Context>) {
        context.set(cx.current)
    }
    fn cuCtxSetCurrent(cx, context: Context) {
        check_context(cx, context)?;
        cx.contexts(|stack| {
            stack.pop();
            if context != Context::NULL {
                stack.push(context);
            }
        })
    }
    fn cuCtxPushCurrent_v2(cx, context: Context) {
        check_context(cx, context)?;
        cx.contexts(|stack| stack.push(context))
    }
    fn cuCtxPopCurrent_v2(cx, context: Out<Context>) {
        let popped = cx.contexts(Vec::pop)?.ok_or(code::ERROR_INVALID_CONTEXT)?;
        context.set_if_wanted(popped);
        Ok(())
    }
    fn cuCtxGetDevice(cx, device: Out<i32>) {
        device.set(cx.device()? as i32)
    }
    fn cuCtxSynchronize(cx) {
        let device = cx.device()?;
        cx.wait_device(device)
    }

    fn cuStreamCreate(cx, stream: Out<Stream>, flags: u32) {
        new_stream(cx, &stream, flags)
    }
    fn cuStreamCreateWithPriority(cx, stream: Out<Stream>, flags: u32, _priority: i32) {
        new_stream(cx, &stream, flags)
    }
    fn cuStreamDestroy_v2(cx, stream: Stream) {
        if stream.0 <= Stream::PER_THREAD.0 {
            return Err(code::ERROR_INVALID_HANDLE);
        }
        let slot = cx.stream(stream)?;
        cx.state()?.stream_destroy(slot);
        Ok(())
    }
    fn cuStreamQuery(cx, stream: Stream) {
        let slot = cx.stream(stream)?;
        cx.state()?.forbid_capture(slot)?;
        cx.state()?.settle(slot);
        let last = cx.state()?.last(slot);
        cx.let_host_run(last)?;
        cx.state()?.stream_query(slot)
    }
    fn cuStreamSynchronize(cx, stream: Stream) {
        let slot = cx.stream(stream)?;
        cx.state()?.forbid_capture(slot)?;
        cx.wait_stream(slot)
    }
    fn cuStreamWaitEvent(cx, stream: Stream, event: Event, _flags: u32) {
        let slot = cx.stream(stream)?;
        let state = cx.state()?;
        let event = state.event_index(event)?;
        if !state.capture_wait(slot, event)? {
            state.stream_wait(slot, event);
        }
        Ok(())
    }
    fn cuStreamGetFlags(cx, stream: Stream, flags: Out<u32>) {
        let slot = cx.stream(stream)?;
        flags.set(cx.state()?.streams[slot as usize].flags)
    }
    fn cuStreamGetCtx(cx, stream: Stream, context: Out<Context>) {
        let slot = cx.stream(stream)?;
        context.set(context_of(cx.state()?.streams[slot as usize].device))
    }
    fn cuStreamGetId(cx, stream: Stream, id: Out<u64>) {
        let slot = cx.stream(stream)?;
        id.set(cx.state()?.streams[slot as usize].number as u64)
    }
    fn cuStreamIsCapturing(cx, stream: Stream, status: Out<u32>) {
        let slot = cx.stream(stream)?;
        status.set(cx.state()?.capture_info(slot).0)
    }
    fn cuStreamBeginCapture_v2(cx, stream: Stream, mode: u32) {
        if mode > constant::STREAM_CAPTURE_MODE_RELAXED {
            return Err(code::ERROR_INVALID_VALUE);
        }
        let slot = cx.stream(stream)?;
        let thread = cx.thread;
        cx.state()?.begin_capture(slot, mode, thread)
    }
    fn cuStreamEndCapture(cx, stream: Stream, graph: Out<Graph>) {
        let slot = cx.stream(stream)?;
        let thread = cx.thread;
        graph.set(Graph::NULL)?;
        let made = cx.state()?.end_capture(slot, thread)?;
        graph.set(Graph(made))
    }
    fn cuStreamGetCaptureInfo_v2(cx, stream: Stream, status: Out<u32>, id: Out<u64>, graph: Out<Graph>, dependencies: Out<*const GraphNode>, count: Out<usize>) {
        let slot = cx.stream(stream)?;
        capture_info(cx, slot, &status, &id, &graph)?;
        dependencies.set_if_wanted(std::ptr::null());
        count.set_if_wanted(0);
        Ok(())
    }
    fn cuStreamGetCaptureInfo_v3(cx, stream: Stream, status: Out<u32>, id: Out<u64>, graph: Out<Graph>, dependencies: Out<*const GraphNode>, edges: Out<*const c_void>, count: Out<usize>) {
        let slot = cx.stream(stream)?;
        capture_info(cx, slot, &status, &id, &graph)?;
        dependencies.set_if_wanted(std::ptr::null());
        edges.set_if_wanted(std::ptr::null());
        count.set_if_wanted(0);
        Ok(())
    }
    fn cuThreadExchangeStreamCaptureMode(cx, mode: Out<u32>) {
        let new = mode.get()?;
        if new > constant::STREAM_CAPTURE_MODE_RELAXED {
            return Err(code::ERROR_INVALID_VALUE);
        }
        let old = cx.set_capture_mode(new)?;
        mode.set(old)
    }

    fn cuEventCreate(cx, event: Out<Event>, flags: u32) {
        cx.device()?;
        let made = cx.state()?.event_create(flags)?;
        event.set(made)
    }
    fn cuEventDestroy_v2(cx, event: Event) {
        cx.state()?.event_destroy(event)
    }
    fn cuEventRecord(cx, event: Event, stream: Stream) {
        let slot = cx.stream(stream)?;
        let state = cx.state()?;
        let event = state.event_index(event)?;
        if !state.capture_record(event, slot) {
            state.event_record(event, slot);
        }
        Ok(())
    }
    fn cuEventQuery(cx, event: Event) {
        let state = cx.state()?;
        let event = state.event_index(event)?;
        forbid_captured(cx, event)?;
        if let Some(epoch) = cx.state()?.event_epoch(event) {
            cx.let_host_run(epoch)?;
        }
        cx.state()?.event_query(event)
    }
    fn cuEventSynchronize(cx, event: Event) {
        let state = cx.state()?;
        let event = state.event_index(event)?;
        forbid_captured(cx, event)?;
        let Some(epoch) = cx.state()?.prepare_event_sync(event) else {
            return Ok(());
        };
        cx.wait(epoch)?;
        cx.state()?.host_saw_event(event);
        Ok(())
    }
    fn cuEventElapsedTime(cx, milliseconds: Out<f32>, start: Event, end: Event) {
        let state = cx.state()?;
        let (start, end) = (state.event_index(start)?, state.event_index(end)?);
        milliseconds.set(state.event_elapsed_ms(start, end)?)
    }

    fn cuMemGetInfo_v2(cx, free_bytes: Out<usize>, total_bytes: Out<usize>) {
        let device = cx.device()?;
        let state = cx.state()?;
        free_bytes.set(state.device_free(device) as usize)?;
        total_bytes.set(state.devices[device as usize].total as usize)
    }
    fn cuMemAlloc_v2(cx, ptr: Out<DevicePtr>, bytes: usize) {
        let device = cx.device()?;
        let made = cx.state()?.mem_alloc(device, bytes as u64, Kind::Device)?;
        ptr.set(made)
    }
    fn cuMemFree_v2(cx, ptr: DevicePtr) {
        if ptr == 0 {
            return Ok(());
        }
        let region = cx.state()?.regions.get(&ptr);
        let Some((device, kind)) = region.map(|region| (region.device, region.kind)) else {
            return Err(cx.state()?.bad_free("cuMemFree", ptr));
        };
        cx.wait_device(device)?;
        let state = cx.state()?;
        state.graph_memory_freed(ptr);
        if matches!(kind, Kind::PoolBlock(_)) { state.pool_free(ptr, None) } else { state.mem_free(ptr) }
    }
    fn cuMemAllocManaged(cx, ptr: Out<DevicePtr>, bytes: usize, flags: u32) {
        let device = cx.device()?;
        let state = cx.state()?;
        if !state.config.managed {
            return Err(code::ERROR_NOT_SUPPORTED);
        }
        if flags != constant::MEM_ATTACH_GLOBAL && flags != constant::MEM_ATTACH_HOST {
            return Err(code::ERROR_INVALID_VALUE);
        }
        let made = state.host_alloc(device, bytes as u64, Kind::Managed)?;
        ptr.set(made)
    }
    fn cuMemAdvise(cx, ptr: DevicePtr, bytes: usize, advice: u32, _device: i32) {
        check_managed(cx, ptr, bytes)?;
        if (1..=6).contains(&advice) { Ok(()) } else { Err(code::ERROR_INVALID_VALUE) }
    }
    fn cuMemAdvise_v2(cx, ptr: DevicePtr, bytes: usize, advice: u32, _location: Location) {
        check_managed(cx, ptr, bytes)?;
        if (1..=6).contains(&advice) { Ok(()) } else { Err(code::ERROR_INVALID_VALUE) }
    }
    fn cuMemPrefetchAsync(cx, ptr: DevicePtr, bytes: usize, _device: i32, stream: Stream) {
        prefetch(cx, ptr, bytes, stream)
    }
    fn cuMemPrefetchAsync_v2(cx, ptr: DevicePtr, bytes: usize, _location: Location, _flags: u32, stream: Stream) {
        prefetch(cx, ptr, bytes, stream)
    }

    fn cuMemHostAlloc(cx, ptr: Out<*mut c_void>, bytes: usize, flags: u32) {
        let device = cx.device()?;
        let state = cx.state()?;
        pin_time(state, bytes);
        let made = state.host_alloc(device, bytes as u64, Kind::Pinned(flags))?;
        ptr.set(made as *mut c_void)
    }
    fn cuMemAllocHost_v2(cx, ptr: Out<*mut c_void>, bytes: usize) {
        let device = cx.device()?;
        let state = cx.state()?;
        pin_time(state, bytes);
        let made = state.host_alloc(device, bytes as u64, Kind::Pinned(0))?;
        ptr.set(made as *mut c_void)
    }
    fn cuMemFreeHost(cx, ptr: Addr) {
        let device = cx.device()?;
        cx.wait_device(device)?;
        cx.state()?.free_host_region("cuMemFreeHost", ptr.number())
    }
    fn cuMemHostRegister_v2(cx, ptr: Addr, bytes: usize, flags: u32) {
        let device = cx.device()?;
        let state = cx.state()?;
        pin_time(state, bytes);
        state.host_register(device, ptr.number(), bytes as u64, flags)
    }
    fn cuMemHostUnregister(cx, ptr: Addr) {
        cx.device()?;
        cx.state()?.host_unregister(ptr.number())
    }
    fn cuMemHostGetDevicePointer_v2(cx, ptr: Out<DevicePtr>, host: Addr, flags: u32) {
        let region = cx.state()?.region_at(host.number()).map(|(_, region)| region.kind);
        match region {
            Some(Kind::Pinned(_) | Kind::Registered(_)) if flags == 0 => ptr.set(host.number()),
            _ => Err(code::ERROR_INVALID_VALUE),
        }
    }
    fn cuMemHostGetFlags(cx, flags: Out<u32>, host: Addr) {
        match cx.state()?.region_at(host.number()).map(|(_, region)| region.kind) {
            Some(Kind::Pinned(set) | Kind::Registered(set)) => flags.set(set),
            _ => Err(code::ERROR_INVALID_VALUE),
        }
    }

    fn cuPointerGetAttribute(cx, data: Addr, attribute: u32, ptr: DevicePtr) {
        pointer_attribute(cx, data, attribute, ptr)
    }
    fn cuMemGetAddressRange_v2(cx, base: Out<DevicePtr>, bytes: Out<usize>, ptr: DevicePtr) {
        let (start, region) = cx.state()?.region_at(ptr).ok_or(code::ERROR_NOT_FOUND)?;
        base.set_if_wanted(start);
        bytes.set_if_wanted(region.len as usize);
        Ok(())
    }
    fn cuMemcpyHtoDAsync_v2(cx, to: DevicePtr, from: ConstAddr, bytes: usize, stream: Stream) {
        let slot = cx.stream(stream)?;
        cx.state()?.submit(slot, Submission::CopyIn { to, host: from.number(), len: bytes as u64 }, 0)
    }
    fn cuMemcpyDtoHAsync_v2(cx, to: Addr, from: DevicePtr, bytes: usize, stream: Stream) {
        let slot = cx.stream(stream)?;
        let state = cx.state()?;
        let host = to.number();
        let pageable = !state.is_known_host(host);
        state.submit(slot, Submission::CopyOut { host, from, len: bytes as u64 }, 0)?;
        // Into memory that the driver does not know it copies before it returns.
        if pageable && state.streams[slot as usize].capture.is_none() { cx.wait_stream(slot) } else { Ok(()) }
    }
    fn cuMemcpyDtoDAsync_v2(cx, to: DevicePtr, from: DevicePtr, bytes: usize, stream: Stream) {
        let slot = cx.stream(stream)?;
        cx.state()?.submit(slot, Submission::CopyDevice { to, from, len: bytes as u64 }, 0)
    }
    fn cuMemcpyHtoD_v2(cx, to: DevicePtr, from: ConstAddr, bytes: usize) {
        let slot = cx.stream(Stream::LEGACY)?;
        cx.state()?.submit(slot, Submission::CopyIn { to, host: from.number(), len: bytes as u64 }, 0)?;
        cx.wait_stream(slot)
    }
    fn cuMemcpyDtoH_v2(cx, to: Addr, from: DevicePtr, bytes: usize) {
        let slot = cx.stream(Stream::LEGACY)?;
        cx.state()?.submit(slot, Submission::CopyOut { host: to.number(), from, len: bytes as u64 }, 0)?;
        cx.wait_stream(slot)
    }
    fn cuMemsetD8Async(cx, ptr: DevicePtr, value: u8, bytes: usize, stream: Stream) {
        let slot = cx.stream(stream)?;
        cx.state()?.submit(slot, Submission::Fill { ptr, len: bytes as u64, pattern: [value; 4] }, 0)
    }
    fn cuMemsetD32Async(cx, ptr: DevicePtr, value: u32, count: usize, stream: Stream) {
        let slot = cx.stream(stream)?;
        let len = count as u64 * 4;
        cx.state()?.submit(slot, Submission::Fill { ptr, len, pattern: value.to_ne_bytes() }, 0)
    }

    fn cuMemAllocAsync(cx, ptr: Out<DevicePtr>, bytes: usize, stream: Stream) {
        let slot = cx.stream(stream)?;
        let device = cx.state()?.streams[slot as usize].device;
        let pool = cx.state()?.devices[device as usize].current_pool;
        alloc_async(cx, &ptr, bytes, pool, slot)
    }
    fn cuMemAllocFromPoolAsync(cx, ptr: Out<DevicePtr>, bytes: usize, pool: MemPool, stream: Stream) {
        let slot = cx.stream(stream)?;
        alloc_async(cx, &ptr, bytes, pool.0, slot)
    }
    fn cuMemFreeAsync(cx, ptr: DevicePtr, stream: Stream) {
        pools(cx)?;
        let slot = cx.stream(stream)?;
        let state = cx.state()?;
        if state.streams[slot as usize].capture.is_some() {
            return state.capture_free(slot, ptr);
        }
        match state.regions.get(&ptr).map(|region| (region.kind, region.device)) {
            Some((Kind::Graph, device)) => {
                state.graph_memory_freed(ptr);
                cx.wait_device(device)?;
                cx.state()?.mem_free(ptr)
            }
            _ => state.pool_free(ptr, Some(slot)),
        }
    }
    fn cuDeviceGetDefaultMemPool(cx, pool: Out<MemPool>, device: i32) {
        pools(cx)?;
        let device = cx.state()?.device_of(device)?;
        pool.set(MemPool(cx.state()?.devices[device as usize].default_pool))
    }
    fn cuDeviceGetMemPool(cx, pool: Out<MemPool>, device: i32) {
        pools(cx)?;
        let device = cx.state()?.device_of(device)?;
        pool.set(MemPool(cx.state()?.devices[device as usize].current_pool))
    }
    fn cuDeviceSetMemPool(cx, device: i32, pool: MemPool) {
        pools(cx)?;
        let state = cx.state()?;
        let device = state.device_of(device)?;
        if state.pool_mut(pool.0)?.device != device {
            return Err(code::ERROR_INVALID_VALUE);
        }
        state.devices[device as usize].current_pool = pool.0;
        Ok(())
    }
    fn cuMemPoolCreate(cx, pool: Out<MemPool>, props: In<MemPoolProps>) {
        pools(cx)?;
        let props = props.get()?;
        let state = cx.state()?;
        let device = state.device_of(props.location.id)?;
        if props.kind != constant::MEM_ALLOCATION_TYPE_PINNED || props.location.kind != constant::MEM_LOCATION_TYPE_DEVICE {
            return Err(code::ERROR_INVALID_VALUE);
        }
        if props.handle_types != 0 && !state.config.export_fd {
            return Err(code::ERROR_NOT_SUPPORTED);
        }
        let fd = if props.handle_types == 0 { state.vram_fd } else { state.own_file()? };
        let made = state.new_pool(device, props.handle_types, fd);
        if state.config.version >= 12_020 {
            state.pool_limit(made, props.max_size as u64)?;
        }
        pool.set(MemPool(made))
    }
    fn cuMemPoolDestroy(cx, pool: MemPool) {
        pools(cx)?;
        let state = cx.state()?;
        if state.devices.iter().any(|device| device.default_pool == pool.0) {
            return Err(code::ERROR_INVALID_VALUE);
        }
        state.pool_destroy(pool.0)
    }
    fn cuMemPoolTrimTo(cx, pool: MemPool, keep_bytes: usize) {
        pools(cx)?;
        let state = cx.state()?;
        state.pool_mut(pool.0)?;
        state.pool_release(pool.0, keep_bytes as u64);
        Ok(())
    }
    fn cuMemPoolGetAttribute(cx, pool: MemPool, attribute: u32, value: Addr) {
        pools(cx)?;
        let found = cx.state()?.pool_attribute(pool.0, attribute)?;
        if attribute <= constant::MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES {
            value.put(found as i32)
        } else {
            value.put(found)
        }
    }
    fn cuMemPoolSetAttribute(cx, pool: MemPool, attribute: u32, value: Addr) {
        pools(cx)?;
        let number = if attribute <= constant::MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES {
            value.value::<i32>()? as u64
        } else {
            value.value::<u64>()?
        };
        cx.state()?.pool_set_attribute(pool.0, attribute, number)
    }
    fn cuMemPoolSetAccess(cx, pool: MemPool, map: In<AccessDesc>, count: usize) {
        pools(cx)?;
        for index in 0..count {
            let desc = map.nth(index)?;
            let device = cx.state()?.device_of(desc.location.id)?;
            let pool = cx.state()?.pool_mut(pool.0)?;
            pool.access.retain(|(other, _)| *other != device);
            pool.access.push((device, desc.flags));
        }
        Ok(())
    }
    fn cuMemPoolGetAccess(cx, flags: Out<u32>, pool: MemPool, location: Out<Location>) {
        pools(cx)?;
        let device = cx.state()?.device_of(location.get()?.id)?;
        let pool = cx.state()?.pool_mut(pool.0)?;
        let set = pool.access.iter().find(|(other, _)| *other == device).map(|(_, flags)| *flags);
        let own = if pool.device == device { constant::MEM_ACCESS_FLAGS_PROT_READWRITE } else { 0 };
        flags.set(set.unwrap_or(own))
    }

    fn cuMemPoolExportToShareableHandle(cx, handle: Addr, pool: MemPool, kind: u32, _flags: u64) {
        pools(cx)?;
        let fd = cx.state()?.export_pool(pool.0, kind)?;
        handle.put(fd)
    }
    fn cuMemPoolImportFromShareableHandle(cx, pool: Out<MemPool>, handle: Addr, kind: u32, _flags: u64) {
        pools(cx)?;
        let fd = passed_fd(handle, kind)?;
        let device = cx.device()?;
        let made = cx.state()?.import_pool(device, fd)?;
        pool.set(MemPool(made))
    }
    fn cuMemPoolExportPointer(cx, data: Out<PoolPtrExport>, ptr: DevicePtr) {
        pools(cx)?;
        let made = cx.state()?.export_block(ptr)?;
        data.set(PoolPtrExport(made))
    }
    fn cuMemPoolImportPointer(cx, ptr: Out<DevicePtr>, pool: MemPool, data: Out<PoolPtrExport>) {
        pools(cx)?;
        let made = cx.state()?.import_block(pool.0, &data.get()?.0)?;
        ptr.set(made)
    }

    fn cuMemAddressReserve(cx, ptr: Out<DevicePtr>, bytes: usize, alignment: usize, hint: DevicePtr, flags: u64) {
        vmm(cx)?;
        if flags != 0 {
            return Err(code::ERROR_INVALID_VALUE);
        }
        let made = cx.state()?.address_reserve(bytes as u64, alignment as u64, hint)?;
        ptr.set(made)
    }
    fn cuMemAddressFree(cx, ptr: DevicePtr, bytes: usize) {
        vmm(cx)?;
        cx.state()?.address_free(ptr, bytes as u64)
    }
    fn cuMemCreate(cx, handle: Out<MemHandle>, bytes: usize, prop: In<AllocationProp>, flags: u64) {
        vmm(cx)?;
        let prop = prop.get()?;
        let state = cx.state()?;
        let device = allocation_device(state, &prop)?;
        if flags != 0 {
            return Err(code::ERROR_INVALID_VALUE);
        }
        let made = state.mem_create(device, bytes as u64, prop.requested_handle_types)?;
        handle.set(made)
    }
    fn cuMemRelease(cx, handle: MemHandle) {
        vmm(cx)?;
        cx.state()?.mem_release(handle)
    }
    fn cuMemMap(cx, ptr: DevicePtr, bytes: usize, offset: usize, handle: MemHandle, flags: u64) {
        vmm(cx)?;
        if flags != 0 {
            return Err(code::ERROR_INVALID_VALUE);
        }
        cx.state()?.mem_map(ptr, bytes as u64, offset as u64, handle)
    }
    fn cuMemUnmap(cx, ptr: DevicePtr, bytes: usize) {
        vmm(cx)?;
        cx.state()?.mem_unmap(ptr, bytes as u64)
    }
    fn cuMemSetAccess(cx, ptr: DevicePtr, bytes: usize, desc: In<AccessDesc>, count: usize) {
        vmm(cx)?;
        for index in 0..count {
            let desc = desc.nth(index)?;
            let state = cx.state()?;
            if desc.location.kind != constant::MEM_LOCATION_TYPE_DEVICE {
                return Err(code::ERROR_NOT_SUPPORTED);
            }
            let device = state.device_of(desc.location.id)?;
            state.mem_set_access(ptr, bytes as u64, device, desc.flags)?;
        }
        Ok(())
    }
    fn cuMemGetAccess(cx, flags: Out<u64>, location: In<Location>, ptr: DevicePtr) {
        vmm(cx)?;
        let device = cx.state()?.device_of(location.get()?.id)?;
        let (_, region) = cx.state()?.region_at(ptr).ok_or(code::ERROR_INVALID_VALUE)?;
        let bit = 1 << device;
        flags.set(u64::from(region.readable & bit != 0) + 2 * u64::from(region.writable & bit != 0))
    }
    fn cuMemGetAllocationGranularity(cx, bytes: Out<usize>, prop: In<AllocationProp>, _option: u32) {
        vmm(cx)?;
        let prop = prop.get()?;
        let state = cx.state()?;
        allocation_device(state, &prop)?;
        bytes.set(state.config.granularity_bytes as usize)
    }
    fn cuMemExportToShareableHandle(cx, shareable: Addr, handle: MemHandle, kind: u32, _flags: u64) {
        vmm(cx)?;
        let fd = cx.state()?.export_phys(handle, kind)?;
        shareable.put(fd)
    }
    fn cuMemImportFromShareableHandle(cx, handle: Out<MemHandle>, shareable: Addr, kind: u32) {
        vmm(cx)?;
        let fd = passed_fd(shareable, kind)?;
        let made = cx.state()?.import_phys(fd)?;
        handle.set(made)
    }
    fn cuMemRetainAllocationHandle(cx, handle: Out<MemHandle>, ptr: Addr) {
        vmm(cx)?;
        let state = cx.state()?;
        match state.region_at(ptr.number()).map(|(_, region)| region.kind) {
            Some(Kind::Mapped(found)) => {
                state.phys.get_mut(&found).ok_or(code::ERROR_INVALID_VALUE)?.handles += 1;
                handle.set(found)
            }
            _ => Err(code::ERROR_INVALID_VALUE),
        }
    }

    fn cuIpcGetMemHandle(cx, handle: Out<IpcMemHandle>, ptr: DevicePtr) {
        let made = cx.state()?.ipc_export(ptr)?;
        handle.set(IpcMemHandle(made))
    }
    fn cuIpcOpenMemHandle_v2(cx, ptr: Out<DevicePtr>, handle: IpcMemHandle, _flags: u32) {
        let device = cx.device()?;
        let made = cx.state()?.ipc_open(device, &handle.0)?;
        ptr.set(made)
    }
    fn cuIpcCloseMemHandle(cx, ptr: DevicePtr) {
        let state = cx.state()?;
        let known = state.regions.get(&ptr).is_some_and(|region| region.kind == Kind::Imported);
        if !known {
            return Err(state.bad_free("cuIpcCloseMemHandle", ptr));
        }
        let device = cx.device()?;
        cx.wait_device(device)?;
        cx.state()?.mem_free(ptr)
    }
    fn cuDeviceCanAccessPeer(cx, can: Out<i32>, device: i32, peer: i32) {
        let state = cx.state()?;
        let (device, peer) = (state.device_of(device)?, state.device_of(peer)?);
        can.set(i32::from(device != peer && !state.config.mig))
    }
    fn cuCtxEnablePeerAccess(cx, peer: Context, flags: u32) {
        let device = cx.device()?;
        let peer = device_of_context(peer).ok_or(code::ERROR_INVALID_CONTEXT)?;
        let state = cx.state()?;
        if flags != 0 || peer == device {
            return Err(code::ERROR_INVALID_VALUE);
        }
        if state.config.mig {
            return Err(code::ERROR_PEER_ACCESS_UNSUPPORTED);
        }
        let peers = &mut state.devices[device as usize].peers;
        if *peers & 1 << peer != 0 {
            return Err(code::ERROR_PEER_ACCESS_ALREADY_ENABLED);
        }
        *peers |= 1 << peer;
        Ok(())
    }
    fn cuCtxDisablePeerAccess(cx, peer: Context) {
        let device = cx.device()?;
        let peer = device_of_context(peer).ok_or(code::ERROR_INVALID_CONTEXT)?;
        let peers = &mut cx.state()?.devices[device as usize].peers;
        if *peers & 1 << peer == 0 {
            return Err(code::ERROR_PEER_ACCESS_NOT_ENABLED);
        }
        *peers &= !(1 << peer);
        Ok(())
    }

    fn cuGraphCreate(cx, graph: Out<Graph>, _flags: u32) {
        let made = cx.state()?.graph_create();
        graph.set(Graph(made))
    }
    fn cuGraphDestroy(cx, graph: Graph) {
        cx.state()?.graph_destroy(graph.0)
    }
    fn cuGraphInstantiateWithFlags(cx, exec: Out<GraphExec>, graph: Graph, _flags: u64) {
        let made = cx.state()?.graph_instantiate(graph.0)?;
        exec.set(GraphExec(made))
    }
    fn cuGraphExecDestroy(cx, exec: GraphExec) {
        cx.state()?.exec_destroy(exec.0)
    }
    fn cuGraphLaunch(cx, exec: GraphExec, stream: Stream) {
        let slot = cx.stream(stream)?;
        cx.state()?.graph_launch(exec.0, slot)
    }
    fn cuGraphRetainUserObject(cx, graph: Graph, object: UserObject, count: u32, flags: u32) {
        cx.state()?.graph_retain(graph.0, object.0, count, flags & constant::GRAPH_USER_OBJECT_MOVE != 0)
    }
    fn cuGraphReleaseUserObject(cx, graph: Graph, object: UserObject, count: u32) {
        cx.state()?.graph_release(graph.0, object.0, count)
    }
    fn cuUserObjectCreate(cx, object: Out<UserObject>, data: Addr, destroy: HostFn, count: u32, flags: u32) {
        if flags != constant::USER_OBJECT_NO_DESTRUCTOR_SYNC || count == 0 {
            return Err(code::ERROR_INVALID_VALUE);
        }
        let made = cx.state()?.object_create(data.number() as usize, destroy, count);
        object.set(UserObject(made))
    }
    fn cuUserObjectRetain(cx, object: UserObject, count: u32) {
        cx.state()?.object_retain(object.0, count)
    }
    fn cuUserObjectRelease(cx, object: UserObject, count: u32) {
        cx.state()?.object_release(object.0, count)
    }
    fn cuDeviceGetGraphMemAttribute(cx, device: i32, attribute: u32, value: Addr) {
        let device = cx.state()?.device_of(device)?;
        let device = &cx.state()?.devices[device as usize];
        value.put(match attribute {
            constant::GRAPH_MEM_ATTR_USED_MEM_CURRENT | constant::GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT => device.graph_used,
            constant::GRAPH_MEM_ATTR_USED_MEM_HIGH => device.graph_used_high,
            constant::GRAPH_MEM_ATTR_RESERVED_MEM_HIGH => device.graph_reserved_high,
            _ => return Err(code::ERROR_INVALID_VALUE),
        })
    }
    fn cuDeviceSetGraphMemAttribute(cx, device: i32, attribute: u32, value: Addr) {
        let device = cx.state()?.device_of(device)?;
        if value.value::<u64>()? != 0 {
            return Err(code::ERROR_INVALID_VALUE);
        }
        let device = &mut cx.state()?.devices[device as usize];
        match attribute {
            constant::GRAPH_MEM_ATTR_USED_MEM_HIGH => device.graph_used_high = device.graph_used,
            constant::GRAPH_MEM_ATTR_RESERVED_MEM_HIGH => device.graph_reserved_high = device.graph_used,
            _ => return Err(code::ERROR_INVALID_VALUE),
        }
        Ok(())
    }
    fn cuDeviceGraphMemTrim(cx, device: i32) {
        cx.state()?.device_of(device)?;
        Ok(())
    }

    fn cuModuleLoadData(cx, module: Out<Module>, image: ConstAddr) {
        cx.device()?;
        if image.number() == 0 {
            return Err(code::ERROR_INVALID_VALUE);
        }
        let state = cx.state()?;
        let made = state.unique();
        state.modules.insert(made, ());
        module.set(Module(made))
    }
    fn cuModuleUnload(cx, module: Module) {
        cx.state()?.modules.remove(&module.0).ok_or(code::ERROR_INVALID_HANDLE)
    }
    fn cuModuleGetFunction(cx, function: Out<Function>, module: Module, name: In<c_char>) {
        let name = name.text()?;
        let state = cx.state()?;
        if !state.modules.contains_key(&module.0) {
            return Err(code::ERROR_INVALID_HANDLE);
        }
        ranges_of(&name).ok_or(code::ERROR_NOT_FOUND)?;
        state.functions.push(name);
        function.set(Function(state.functions.len()))
    }
    fn cuLaunchKernel(cx, function: Function, _grid_x: u32, _grid_y: u32, _grid_z: u32, _block_x: u32, _block_y: u32, _block_z: u32, _shared_bytes: u32, stream: Stream, params: Out<*mut c_void>, _extra: Out<*mut c_void>) {
        let slot = cx.stream(stream)?;
        let name = cx.state()?.functions.get(function.0.wrapping_sub(1)).cloned().ok_or(code::ERROR_INVALID_HANDLE)?;
        let accesses = launch_accesses(ranges_of(&name).unwrap_or(0), &params)?;
        cx.state()?.submit(slot, Submission::Kernel(accesses), 0)
    }
    fn cuLaunchHostFunc(cx, stream: Stream, function: HostFn, data: Addr) {
        let slot = cx.stream(stream)?;
        cx.state()?.submit(slot, Submission::Host(function, data.number() as usize), 0)
    }
}

fn new_stream(cx: &mut Cx, stream: &Out<Stream>, flags: u32) -> R {
    let device = cx.device()?;
    if flags > constant::STREAM_NON_BLOCKING {
        return Err(code::ERROR_INVALID_VALUE);
    }
    let state = cx.state()?;
    let slot = state.new_stream(device, flags == constant::STREAM_DEFAULT, false);
    stream.set(Stream(state.streams[slot as usize].handle))
}

fn check_context(cx: &mut Cx, context: Context) -> R {
    if context == Context::NULL {
        return Ok(());
    }
    let device = device_of_context(context).ok_or(code::ERROR_INVALID_CONTEXT)?;
    match cx.state()?.devices.get(device as usize) {
        Some(device) if device.context_refs > 0 => Ok(()),
        _ => Err(code::ERROR_CONTEXT_IS_DESTROYED),
    }
}

fn capture_info(cx: &mut Cx, slot: u32, status: &Out<u32>, id: &Out<u64>, graph: &Out<Graph>) -> R {
    let found = cx.state()?.capture_info(slot);
    status.set(found.0)?;
    id.set_if_wanted(found.1);
    graph.set_if_wanted(Graph(found.2));
    Ok(())
}

fn forbid_captured(cx: &mut Cx, event: usize) -> R {
    let state = cx.state()?;
    let Some(id) = state.event_capture(event) else {
        return Ok(());
    };
    state.invalidate(id);
    state.violate(
        Mistake::Capture,
        "a query of, or wait for, an event that a capture recorded".to_owned(),
    );
    Err(code::ERROR_CAPTURED_EVENT)
}

fn pools(cx: &mut Cx) -> R {
    if cx.state()?.config.pools { Ok(()) } else { Err(code::ERROR_NOT_SUPPORTED) }
}

fn vmm(cx: &mut Cx) -> R {
    if cx.state()?.config.vmm { Ok(()) } else { Err(code::ERROR_NOT_SUPPORTED) }
}

/// A descriptor stands itself where an address could.
fn passed_fd(handle: Addr, kind: u32) -> R<i32> {
    if kind != constant::MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR {
        return Err(code::ERROR_NOT_SUPPORTED);
    }
    i32::try_from(handle.number()).map_err(|_| code::ERROR_INVALID_VALUE)
}

fn alloc_async(cx: &mut Cx, ptr: &Out<DevicePtr>, bytes: usize, pool: usize, slot: u32) -> R {
    pools(cx)?;
    let state = cx.state()?;
    let made = if state.streams[slot as usize].capture.is_some() {
        state.capture_alloc(slot, bytes as u64)?
    } else {
        state.pool_alloc(pool, bytes as u64, slot)?
    };
    ptr.set(made)
}

fn allocation_device(state: &crate::state::State, prop: &AllocationProp) -> R<u32> {
    if prop.kind != constant::MEM_ALLOCATION_TYPE_PINNED
        || prop.location.kind != constant::MEM_LOCATION_TYPE_DEVICE
    {
        return Err(code::ERROR_INVALID_VALUE);
    }
    let asked = prop.requested_handle_types;
    if asked & !constant::MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR != 0
        || (asked != 0 && !state.config.export_fd)
    {
        return Err(code::ERROR_NOT_SUPPORTED);
    }
    state.device_of(prop.location.id)
}

fn pin_time(state: &mut crate::state::State, bytes: usize) {
    state.now_ns += state.config.latency.pin_ns_per_mib * (bytes as u64 >> 20);
}

fn check_managed(cx: &mut Cx, ptr: DevicePtr, bytes: usize) -> R {
    match cx.state()?.region_at(ptr) {
        Some((start, region))
            if region.kind == Kind::Managed && ptr + bytes as u64 <= start + region.len =>
        {
            Ok(())
        }
        _ => Err(code::ERROR_INVALID_VALUE),
    }
}

fn prefetch(cx: &mut Cx, ptr: DevicePtr, bytes: usize, stream: Stream) -> R {
    check_managed(cx, ptr, bytes)?;
    let slot = cx.stream(stream)?;
    cx.state()?.submit(slot, Submission::Empty, 0)
}

fn pointer_attribute(cx: &mut Cx, data: Addr, attribute: u32, ptr: DevicePtr) -> R {
    let state = cx.state()?;
    let (start, region) = state.region_at(ptr).ok_or(code::ERROR_INVALID_VALUE)?;
    let host = matches!(region.kind, Kind::Pinned(_) | Kind::Registered(_));
    match attribute {
        constant::POINTER_ATTRIBUTE_CONTEXT
            if matches!(region.kind, Kind::Mapped(_) | Kind::PoolBlock(_)) =>
        {
            data.put(Context::NULL)
        }
        constant::POINTER_ATTRIBUTE_CONTEXT => data.put(context_of(region.device)),
        constant::POINTER_ATTRIBUTE_MEMORY_TYPE => {
            data.put(if host { constant::MEMORYTYPE_HOST } else { constant::MEMORYTYPE_DEVICE })
        }
        constant::POINTER_ATTRIBUTE_DEVICE_POINTER => data.put(ptr),
        constant::POINTER_ATTRIBUTE_HOST_POINTER if host || region.kind == Kind::Managed => {
            data.put(ptr)
        }
        constant::POINTER_ATTRIBUTE_BUFFER_ID => data.put(region.id),
        constant::POINTER_ATTRIBUTE_IS_MANAGED => data.put(u32::from(region.kind == Kind::Managed)),
        constant::POINTER_ATTRIBUTE_DEVICE_ORDINAL => data.put(region.device),
        constant::POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE => {
            data.put(u32::from(region.kind == Kind::Device && !state.config.mig))
        }
        constant::POINTER_ATTRIBUTE_RANGE_START_ADDR => data.put(start),
        constant::POINTER_ATTRIBUTE_RANGE_SIZE => data.put(region.len),
        constant::POINTER_ATTRIBUTE_MAPPED => data.put(1u32),
        constant::POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES => data.put(match region.kind {
            Kind::Mapped(handle) => {
                state.phys.get(&handle).map_or(0, |phys| u64::from(phys.handle_types))
            }
            Kind::PoolBlock(pool) => {
                state.pools.get(&pool).map_or(0, |pool| u64::from(pool.handle_types))
            }
            _ => 0,
        }),
        constant::POINTER_ATTRIBUTE_MEMPOOL_HANDLE => {
            data.put(if let Kind::PoolBlock(pool) = region.kind {
                MemPool(pool)
            } else {
                MemPool::NULL
            })
        }
        _ => Err(code::ERROR_INVALID_VALUE),
    }
}

/// How many ranges a kernel takes: the kernels are named `touch1` to `touch16`.
fn ranges_of(name: &str) -> Option<usize> {
    name.strip_prefix("touch")?.parse().ok().filter(|ranges| (1..=16).contains(ranges))
}

/// Parameters of a kernel, four for each range: address, bytes (64 bits each), mode, value (32 bits each).
/// Modes: 1 reads, 2 writes the value, 3 reads and writes, 5 reads and expects the value.
fn launch_accesses(ranges: usize, params: &Out<*mut c_void>) -> R<Vec<Access>> {
    let param = |index| params.nth(index);
    (0..ranges)
        .map(|range| {
            let ptr = param(4 * range)?.value::<u64>()?;
            let len = param(4 * range + 1)?.value::<u64>()?;
            let mode = param(4 * range + 2)?.value::<u32>()?;
            let value = param(4 * range + 3)?.value::<u32>()? as u8;
            let mode = match mode {
                1 => Mode::Read,
                2 => Mode::Write(value),
                3 => Mode::Update(value),
                5 => Mode::Expect(value),
                _ => return Err(code::ERROR_INVALID_VALUE),
            };
            Ok(Access { ptr, len, mode })
        })
        .collect()
}

/// The driver's text for a code: its name.
fn error_text(number: u32) -> R<*const c_char> {
    macro_rules! texts {
        ($($name:ident)*) => {
            match number {
                $(code::$name => Ok(concat!("CUDA_", stringify!($name), "\0").as_ptr().cast()),)*
                _ => Err(code::ERROR_INVALID_VALUE),
            }
        };
    }
    texts! {
        SUCCESS ERROR_INVALID_VALUE ERROR_OUT_OF_MEMORY ERROR_NOT_INITIALIZED ERROR_DEINITIALIZED ERROR_STUB_LIBRARY
        ERROR_NO_DEVICE ERROR_INVALID_DEVICE ERROR_INVALID_CONTEXT ERROR_ALREADY_MAPPED ERROR_NOT_MAPPED
        ERROR_PEER_ACCESS_UNSUPPORTED ERROR_OPERATING_SYSTEM ERROR_INVALID_HANDLE ERROR_ILLEGAL_STATE ERROR_NOT_FOUND
        ERROR_NOT_READY ERROR_ILLEGAL_ADDRESS ERROR_PEER_ACCESS_ALREADY_ENABLED ERROR_PEER_ACCESS_NOT_ENABLED
        ERROR_CONTEXT_IS_DESTROYED ERROR_HOST_MEMORY_ALREADY_REGISTERED ERROR_HOST_MEMORY_NOT_REGISTERED
        ERROR_LAUNCH_FAILED ERROR_NOT_PERMITTED ERROR_NOT_SUPPORTED ERROR_STREAM_CAPTURE_UNSUPPORTED
        ERROR_STREAM_CAPTURE_INVALIDATED ERROR_STREAM_CAPTURE_MERGE ERROR_STREAM_CAPTURE_UNMATCHED
        ERROR_STREAM_CAPTURE_UNJOINED ERROR_STREAM_CAPTURE_ISOLATION ERROR_STREAM_CAPTURE_IMPLICIT
        ERROR_CAPTURED_EVENT ERROR_STREAM_CAPTURE_WRONG_THREAD ERROR_UNKNOWN
    }
}

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
