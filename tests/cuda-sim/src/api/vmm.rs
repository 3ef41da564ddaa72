//! Virtual memory, other processes and other devices.

use super::*;

functions! {
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
}

fn vmm(cx: &mut Cx) -> R {
    if cx.state()?.config.vmm { Ok(()) } else { Err(code::ERROR_NOT_SUPPORTED) }
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
