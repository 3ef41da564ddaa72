//! libthermalloc: malloc's family, the C++ operators and what a preloaded allocator must interpose.
//!
//! Translation only: C and C++ names, types and error codes on one side, `thermalloc_core::api` on
//! the other. No policy is decided here. Everything that is exported is in `tests/c/exports.txt`.
#![no_std]

mod dlopen;
mod figures;
mod hooks;
mod host;
mod malloc;
mod new_failed;
mod operators;
mod vfork;
mod weak;

use core::fmt::{self, Write};

// The libc crate leaves the link directive to std when another package turns on its `std` feature.
#[link(name = "c")]
unsafe extern "C" {}

/// A line or two of text on the stack: what does not fit is cut off.
pub(crate) struct Text<const N: usize> {
    bytes: [u8; N],
    len: usize,
}

impl<const N: usize> Text<N> {
    pub(crate) fn format(args: fmt::Arguments<'_>) -> Self {
        let mut text = Self { bytes: [0; N], len: 0 };
        // Only "full" can go wrong, and then the beginning is what we want.
        let _ = text.write_fmt(args);
        text
    }

    pub(crate) fn as_str(&self) -> &str {
        self.bytes.get(..self.len).and_then(|b| str::from_utf8(b).ok()).unwrap_or("")
    }
}

impl<const N: usize> Write for Text<N> {
    fn write_str(&mut self, s: &str) -> fmt::Result {
        let room = self.bytes.get_mut(self.len..self.len + s.len()).ok_or(fmt::Error)?;
        room.copy_from_slice(s.as_bytes());
        self.len += s.len();
        Ok(())
    }
}

// A check with the test harness links std, which has a handler.
#[cfg(not(test))]
#[panic_handler]
fn panicked(info: &core::panic::PanicInfo<'_>) -> ! {
    let text = match info.location() {
        Some(at) => Text::<400>::format(format_args!(
            "internal error: {}:{}: {}",
            at.file(),
            at.line(),
            info.message()
        )),
        None => Text::<400>::format(format_args!("internal error: {}", info.message())),
    };
    hooks::fatal(text.as_str())
}

// The precompiled `core` was built for unwinding and names this in its unwind tables; nothing of
// ours unwinds. Weak and hidden: a Rust program that links the archive has std's own.
core::arch::global_asm!(
    ".pushsection .text.unlikely.rust_eh_personality, \"ax\", %progbits",
    ".weak rust_eh_personality",
    ".hidden rust_eh_personality",
    ".type rust_eh_personality, %function",
    "rust_eh_personality:",
    #[cfg(target_arch = "x86_64")]
    "ud2",
    #[cfg(target_arch = "aarch64")]
    "brk #1",
    ".size rust_eh_personality, . - rust_eh_personality",
    ".popsection",
);
