//! Devices, contexts and errors.

use super::*;

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

/// The older form, which does not say why it found nothing.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetProcAddress(
    symbol: *const c_char,
    function: *mut *mut c_void,
    version: i32,
    flags: u64,
) -> u32 {
    // SAFETY: passed on as it came.
    unsafe { cuGetProcAddress_v2::<0>(symbol, function, version, flags, std::ptr::null_mut()) }
}
