//! `vfork` that tells the allocator.
//!
//! The child runs on the parent thread's stack and thread-local storage, but the kernel has no
//! rseq area for it: a per-CPU cache operation of its own would not be restarted. So the thread
//! is flagged from before the system call until the parent runs again, in both processes.

use core::arch::naked_asm;

use libc::{c_int, pid_t};

use crate::hooks::{set_errno, vfork_enter, vfork_leave};

/// The parent's return: the kernel's result becomes the C one.
extern "C" fn parent(result: isize) -> pid_t {
    vfork_leave();
    match c_int::try_from(result) {
        Ok(pid) if pid >= 0 => pid,
        Ok(error) => {
            set_errno(-error);
            -1
        }
        Err(_) => -1,
    }
}

/// The return address must survive what the child does to the stack it shares: it stays in a
/// register that the kernel keeps for each process, and is pushed back after the call.
#[unsafe(naked)]
extern "C" fn flagged_vfork() -> pid_t {
    #[cfg(target_arch = "x86_64")]
    naked_asm!(
        ".cfi_startproc",
        "sub rsp, 8",
        ".cfi_def_cfa_offset 16",
        "call {enter}",
        "add rsp, 8",
        ".cfi_def_cfa_offset 8",
        "pop rdi",
        ".cfi_def_cfa_offset 0",
        ".cfi_register rip, rdi",
        "mov eax, {number}",
        "syscall",
        "push rdi",
        ".cfi_def_cfa_offset 8",
        ".cfi_offset rip, -8",
        "test rax, rax",
        "jz 2f",
        "mov rdi, rax",
        "jmp {parent}",
        "2:",
        "ret",
        ".cfi_endproc",
        enter = sym vfork_enter,
        number = const libc::SYS_vfork,
        parent = sym parent,
    );
    // x30 is the return address, and the kernel keeps it for each process.
    #[cfg(target_arch = "aarch64")]
    naked_asm!(
        ".cfi_startproc",
        "stp x29, x30, [sp, #-16]!",
        ".cfi_def_cfa_offset 16",
        ".cfi_offset x29, -16",
        ".cfi_offset x30, -8",
        "mov x29, sp",
        "bl {enter}",
        "ldp x29, x30, [sp], #16",
        ".cfi_def_cfa_offset 0",
        ".cfi_restore x29",
        ".cfi_restore x30",
        "mov x0, #{flags}",
        "mov x1, #0",
        "mov x2, #0",
        "mov x3, #0",
        "mov x4, #0",
        "mov x8, #{number}",
        "svc #0",
        "cbz x0, 2f",
        "b {parent}",
        "2:",
        "ret",
        ".cfi_endproc",
        enter = sym vfork_enter,
        flags = const libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD,
        number = const libc::SYS_clone,
        parent = sym parent,
    );
}

/// A jump, so that the return address is the caller's.
#[unsafe(naked)]
#[unsafe(no_mangle)]
extern "C" fn vfork() -> pid_t {
    #[cfg(target_arch = "x86_64")]
    naked_asm!("jmp {vfork}", vfork = sym flagged_vfork);
    #[cfg(target_arch = "aarch64")]
    naked_asm!("b {vfork}", vfork = sym flagged_vfork);
}

/// glibc's other name for it.
#[unsafe(naked)]
#[unsafe(no_mangle)]
extern "C" fn __vfork() -> pid_t {
    #[cfg(target_arch = "x86_64")]
    naked_asm!("jmp {vfork}", vfork = sym flagged_vfork);
    #[cfg(target_arch = "aarch64")]
    naked_asm!("b {vfork}", vfork = sym flagged_vfork);
}
