//! What the shared library tells of its machine to a program that asks, in C.

use std::ffi::c_char;

use thermalloc_cuda::driver::Call;

use crate::abi::{Arg, In, Out, put_text};
use crate::enter::with;
use crate::state::Fault;

/// Mistakes so far.
#[unsafe(no_mangle)]
extern "C" fn thermalloc_cuda_sim_mistakes() -> u64 {
    with(0, |state| state.violations_seen).unwrap_or(0)
}

/// Things that the program made and has not destroyed.
#[unsafe(no_mangle)]
extern "C" fn thermalloc_cuda_sim_leaks() -> u64 {
    with(0, |state| state.leaks().len() as u64).unwrap_or(0)
}

/// What the program has of a device's memory.
#[unsafe(no_mangle)]
extern "C" fn thermalloc_cuda_sim_used_bytes(device: u32) -> u64 {
    with(0, |state| state.devices.get(device as usize).map_or(0, |device| device.used)).unwrap_or(0)
}

/// Calls of one of the driver's functions.
///
/// # Safety
/// `symbol` is a C string.
#[unsafe(no_mangle)]
unsafe extern "C" fn thermalloc_cuda_sim_calls(symbol: *const c_char) -> u64 {
    // SAFETY: passed on as it came.
    let call = unsafe { named(symbol) };
    call.and_then(|call| with(0, |state| state.calls[call as usize])).unwrap_or(0)
}

/// # Safety
/// `symbol` is a C string.
unsafe fn named(symbol: *const c_char) -> Option<Call> {
    // SAFETY: a C string.
    let symbol = unsafe { In::from_raw(symbol) }.text().ok()?;
    Call::ALL.iter().copied().find(|call| call.symbol() == symbol)
}

/// Another process takes so much of a device.
#[unsafe(no_mangle)]
extern "C" fn thermalloc_cuda_sim_other_process(device: u32, bytes: u64) {
    with(0, |state| {
        if let Some(device) = state.devices.get_mut(device as usize) {
            device.other_process = bytes;
        }
    });
}

/// Makes calls of a function fail: after `skip` good ones, `times` with this code. Whether there is such
/// a function.
///
/// # Safety
/// `symbol` is a C string.
#[unsafe(no_mangle)]
unsafe extern "C" fn thermalloc_cuda_sim_fail(
    symbol: *const c_char,
    skip: u64,
    times: u64,
    code: u32,
) -> bool {
    // SAFETY: passed on as it came.
    let Some(call) = (unsafe { named(symbol) }) else {
        return false;
    };
    with(0, |state| state.faults.push(Fault { call, skip, times, one_in: 1, code })).is_some()
}

/// The text of a mistake or, behind those, of a leak; whether there is one of that number.
///
/// # Safety
/// `text` has room for `length` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn thermalloc_cuda_sim_text(
    number: usize,
    text: *mut c_char,
    length: i32,
) -> bool {
    let found = with(0, |state| {
        let mistake = state.violations.get(number).map(ToString::to_string);
        mistake
            .or_else(|| state.leaks().get(number - state.violations.len()).map(ToString::to_string))
    });
    // SAFETY: room as said.
    let text = unsafe { Out::from_raw(text) };
    found.flatten().is_some_and(|found| put_text(&text, length, &found).is_ok())
}
