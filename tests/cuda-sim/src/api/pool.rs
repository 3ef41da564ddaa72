//! The driver's memory pools.

use super::*;

functions! {
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
}

fn pools(cx: &mut Cx) -> R {
    if cx.state()?.config.pools { Ok(()) } else { Err(code::ERROR_NOT_SUPPORTED) }
}

/// A descriptor stands itself where an address could.
pub(super) fn passed_fd(handle: Addr, kind: u32) -> R<i32> {
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
