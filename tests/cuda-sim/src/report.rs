//! What the shared library tells of its machine to a program that asks, in C.

use std::ffi::c_char;

use crate::abi::{Arg, Out, put_text};
use crate::enter::with;

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
    // SAFETY: a C string.
    let symbol = unsafe { crate::abi::In::from_raw(symbol) };
    let named = symbol.text().ok().and_then(|symbol| {
        thermalloc_cuda::driver::Call::ALL.iter().find(|call| call.symbol() == symbol)
    });
    named.and_then(|call| with(0, |state| state.calls[*call as usize])).unwrap_or(0)
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
