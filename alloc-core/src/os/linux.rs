//! Linux: raw system calls only.
use core::arch::asm;

use libc::c_long;

/// One system call. `nr` and the arguments are those of the kernel's ABI.
///
/// # Safety
/// The call must be sound with these arguments: memory that it writes or unmaps is the caller's.
#[inline(always)]
pub(crate) unsafe fn syscall(
    nr: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> isize {
    let result;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the kernel clobbers rax, rcx and r11 only; the caller answers for the call itself.
    unsafe {
        asm!("syscall", inlateout("rax") nr as isize => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the kernel clobbers x0 only; the caller answers for the call itself.
    unsafe {
        asm!("svc 0", in("x8") nr, inlateout("x0") a => result,
            in("x1") b, in("x2") c, in("x3") d, in("x4") e, in("x5") f, options(nostack));
    }
    result
}
