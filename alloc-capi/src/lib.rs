//! libthermalloc: malloc's family, the C++ operators and what a preloaded allocator must interpose.
//!
//! Translation only: C and C++ names, types and error codes on one side, `thermalloc_core::api` on
//! the other. No policy is decided here. Everything that is exported is in `tests/c/exports.txt`.
#![no_std]

mod ctl;
mod dlopen;
mod extended;
mod figures;
mod hooks;
mod host;
mod malloc;
mod new_failed;
mod operators;
// A check with the test harness links std, which has a handler.
#[cfg(not(test))]
mod panic;
mod prof;
mod vfork;
mod weak;

// The libc crate leaves the link directive to std when another package turns on its `std` feature.
#[link(name = "c")]
unsafe extern "C" {}

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
