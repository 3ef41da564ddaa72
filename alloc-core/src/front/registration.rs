//! The registration of threads for restartable sequences: by the C library, or by us where that knows
//! nothing of them. A thread that is registered has an area which the kernel keeps up to date; the
//! sections of `rseq` address it by two distances in the thread's block.

use core::arch::asm;
use core::mem::offset_of;

use super::tls::{self, RseqArea, Tls};
use crate::os::{linux, start};

/// The calling thread's CPU index now; `None` where it has no use of a CPU cache.
pub(crate) fn cpu() -> Option<usize> {
    let tls = tls::tls();
    let field = core::ptr::from_ref(tls)
        .cast::<u8>()
        .wrapping_add(Tls::NO_CPU)
        .wrapping_offset(tls.cpu_index.get());
    // SAFETY: `cpu_index` leads to `no_cpu` or to a field of the thread's rseq area.
    let index = unsafe { field.cast::<i32>().read_volatile() };
    usize::try_from(index).ok()
}

/// Lets the calling thread use the CPU caches: true if it is registered with the kernel, by its C
/// library or, where that knows nothing of rseq, by us. `index_field` is where in the rseq area the
/// CPU index is.
pub(crate) fn attach(index_field: isize) -> bool {
    let tls = tls::tls();
    let area = match c_library() {
        CLibrary::Registers(offset) => tls::thread_pointer().wrapping_offset(offset),
        CLibrary::Refuses => return false,
        CLibrary::Ignorant => {
            register_own(tls);
            tls.own.0.get().cast()
        }
    };
    attach_area(tls, area, index_field)
}

fn attach_area(tls: &Tls, area: *mut u8, index_field: isize) -> bool {
    // SAFETY: a thread's rseq area is readable as long as it runs.
    let cpu_id = unsafe { area.wrapping_offset(RseqArea::CPU_ID).cast::<i32>().read_volatile() };
    if cpu_id < 0 {
        return false;
    }
    let distance = area.addr().cast_signed() - core::ptr::from_ref(tls).addr().cast_signed();
    tls.rseq_area.set(distance - offset_of!(Tls, own).cast_signed());
    // A signal handler may come in between: the area has to be right before the index is.
    core::sync::atomic::compiler_fence(core::sync::atomic::Ordering::SeqCst);
    tls.cpu_index.set(distance + index_field - Tls::NO_CPU.cast_signed());
    true
}

/// The address of the rseq area that is in use for the calling thread.
pub(crate) fn area() -> usize {
    let tls = tls::tls();
    tls.own.0.get().addr().wrapping_add_signed(tls.rseq_area.get())
}

enum CLibrary {
    /// It registers every thread, with the area at this offset from the thread pointer.
    Registers(isize),
    /// It could, but was told not to, or the kernel or a sandbox said no.
    Refuses,
    /// It has no idea of rseq.
    Ignorant,
}

fn c_library() -> CLibrary {
    let (size, offset): (*const u32, *const isize);
    #[cfg(target_arch = "x86_64")]
    // SAFETY: reads the global offset table, where a missing weak symbol is null.
    unsafe {
        asm!(
            ".weak __rseq_size",
            ".weak __rseq_offset",
            "mov {size}, qword ptr [rip + __rseq_size@GOTPCREL]",
            "mov {offset}, qword ptr [rip + __rseq_offset@GOTPCREL]",
            size = out(reg) size,
            offset = out(reg) offset,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        asm!(
            ".weak __rseq_size",
            ".weak __rseq_offset",
            "adrp {size}, :got:__rseq_size",
            "ldr {size}, [{size}, :got_lo12:__rseq_size]",
            "adrp {offset}, :got:__rseq_offset",
            "ldr {offset}, [{offset}, :got_lo12:__rseq_offset]",
            size = out(reg) size,
            offset = out(reg) offset,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    if size.is_null() || offset.is_null() {
        return CLibrary::Ignorant;
    }
    // SAFETY: glibc (2.35 or newer) has a word there, set before any thread runs our code.
    match unsafe { size.read_volatile() } {
        0 => CLibrary::Refuses,
        // SAFETY: as above.
        _ => CLibrary::Registers(unsafe { offset.read_volatile() }),
    }
}

/// Bytes of the area that every kernel with rseq accepts.
const AREA_BYTES: usize = 32;
#[cfg(target_arch = "x86_64")]
const SIGNATURE: u32 = 0x5305_3053;
#[cfg(target_arch = "aarch64")]
const SIGNATURE: u32 = 0xd428_bc00;

/// Registers the area in the thread's block, which then gets a valid `cpu_id`. Only with an old
/// glibc: it frees no thread's memory before the kernel is done with it, while musl unmaps that of
/// a detached thread on the way out.
fn register_own(tls: &Tls) {
    if is_glibc() {
        register(tls);
    }
}

fn register(tls: &Tls) {
    // SAFETY: the area is 32 bytes, aligned, and lives as long as the thread. The kernel refuses
    // a second registration.
    let _ = unsafe { linux::rseq_register(tls.own.0.get().cast(), AREA_BYTES, SIGNATURE) };
}

fn is_glibc() -> bool {
    let f: usize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: reads the global offset table, where a missing weak symbol is null.
    unsafe {
        asm!(
            ".weak gnu_get_libc_version",
            "mov {f}, qword ptr [rip + gnu_get_libc_version@GOTPCREL]",
            f = out(reg) f,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        asm!(
            ".weak gnu_get_libc_version",
            "adrp {f}, :got:gnu_get_libc_version",
            "ldr {f}, [{f}, :got_lo12:gnu_get_libc_version]",
            f = out(reg) f,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    f != 0
}

/// Where in the rseq area the CPU index is: the dense `mm_cid` where the kernel has it and one
/// number says enough, else `cpu_id`.
pub(crate) fn index_field(many_nodes: bool) -> isize {
    let ends = RseqArea::MM_CID.unsigned_abs() + 4;
    if start::facts().rseq_feature_size >= ends && !many_nodes {
        RseqArea::MM_CID
    } else {
        RseqArea::CPU_ID
    }
}

/// Asks the kernel for [`fence`]; false where it has none.
pub(crate) fn register_fence() -> bool {
    linux::rseq_fence_register().is_ok()
}

/// After this no section that was running on `cpu` (`None`: on any) when it was called will commit.
pub(crate) fn fence(cpu: Option<usize>) -> bool {
    // A forked child may have to register again.
    linux::rseq_fence(cpu).is_ok() || (register_fence() && linux::rseq_fence(cpu).is_ok())
}

/// Registers the calling thread as with an old glibc, and pops from a region of one CPU index
/// that has a block; how many of the checks went well. For a process whose C library has no rseq.
#[cfg(test)]
pub(crate) fn register_for_test() -> usize {
    use super::rseq::{Entry, Header, Region, pop, push_code};
    let tls = tls::tls();
    let unknown = !attach_area(tls, tls.own.0.get().cast(), RseqArea::CPU_ID);
    register(tls);
    let mut good = usize::from(unknown);
    for field in [RseqArea::CPU_ID, RseqArea::MM_CID] {
        good += usize::from(attach_area(tls, tls.own.0.get().cast(), field) && cpu().is_some());
    }
    good += usize::from(tls.rseq_area.get() == 0);
    // A second registration changes nothing.
    register(tls);
    good += usize::from(attach_area(tls, tls.own.0.get().cast(), RseqArea::CPU_ID));
    // SAFETY: zero is a valid region; it is never freed.
    let region: &'static Region =
        std::boxed::Box::leak(std::boxed::Box::new(unsafe { core::mem::zeroed() }));
    let table: std::vec::Vec<Entry> =
        (0..8192).map(|_| Entry::new(core::ptr::from_ref(region).cast_mut())).collect();
    region.set_header(200, Header { cur: 64, end: 65 });
    let block = core::ptr::without_provenance_mut(16);
    // SAFETY: the table has an entry for every CPU; word 64 of the region is unused.
    let pushed = unsafe { push_code(table.as_ptr(), 200, block) }
        && !unsafe { push_code(table.as_ptr(), 200, block) };
    // SAFETY: as above.
    good + usize::from(pushed && unsafe { pop(table.as_ptr(), 200) } == block)
}
