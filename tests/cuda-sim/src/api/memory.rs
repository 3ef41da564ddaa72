//! Memory: plain, managed and pinned, copies, what a pointer is.

use super::*;

functions! {
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
