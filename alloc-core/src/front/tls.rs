//! Thread-local state: one initial-exec block of [`Tls`], defined in assembly because the compiler's
//! own thread-locals call `__tls_get_addr` in a shared library.
//!
//! Only its own thread touches a block, and a signal handler on that thread. All starts at
//! zero but for two CPU indices, and that state is valid: no CPU cache, and an event due at once.

use core::arch::asm;
use core::cell::{Cell, UnsafeCell};
use core::mem::{align_of, offset_of, size_of};

use super::thread_cache::ThreadCache;

/// The name of the block: hidden, and of this version, so that two versions of the crate can be in one program.
#[doc(hidden)]
#[macro_export]
macro_rules! __tls {
    () => {
        concat!(
            "thermalloc_tls_",
            env!("CARGO_PKG_VERSION_MAJOR"),
            "_",
            env!("CARGO_PKG_VERSION_MINOR"),
            "_",
            env!("CARGO_PKG_VERSION_PATCH")
        )
    };
}
use crate::__tls as symbol;

core::arch::global_asm!(
    ".pushsection .tdata.thermalloc,\"awT\",@progbits",
    ".p2align 5",
    concat!(".globl ", symbol!()),
    concat!(".hidden ", symbol!()),
    concat!(".type ", symbol!(), ",@tls_object"),
    concat!(".size ", symbol!(), ",{size}"),
    concat!(symbol!(), ":"),
    // The CPU of an area that the kernel doesn't know.
    ".zero {own_cpu}",
    ".long -1",
    ".zero {no_cpu} - {own_cpu} - 4",
    ".long -1",
    ".zero {size} - {no_cpu} - 4",
    ".popsection",
    size = const size_of::<Tls>(),
    own_cpu = const offset_of!(Tls, own) + RseqArea::CPU_ID as usize,
    no_cpu = const offset_of!(Tls, no_cpu),
);

/// The area that the kernel keeps up to date for a registered thread (`struct rseq`).
#[repr(C, align(32))]
pub(crate) struct RseqArea(pub(crate) UnsafeCell<[u32; 8]>);

impl RseqArea {
    /// Offset of `cpu_id`.
    pub(crate) const CPU_ID: isize = 4;
    /// Offset of `rseq_cs`, the only field that is ever written.
    pub(crate) const RSEQ_CS: isize = 8;
    /// Offset of `mm_cid`.
    pub(crate) const MM_CID: isize = 24;
}

/// What serves a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Mode {
    /// The thread was not set up yet.
    Unset = 0,
    /// The cache of the CPU it runs on.
    Cpu = 1,
    /// A cache of its own, where restartable sequences are refused.
    Thread = 2,
}

/// The state of one thread. The offsets of the first three fields and of `own` and `no_cpu` are
/// known to the assembly of `rseq`.
#[repr(C, align(32))]
pub(crate) struct Tls {
    /// Bytes that may be allocated until the next event.
    pub(crate) bytes_until_event: Cell<i64>,
    /// Distance from `own` to the rseq area that is registered for this thread.
    pub(crate) rseq_area: Cell<isize>,
    /// Distance from `no_cpu` to the CPU index; 0 sends every operation to the slow path.
    pub(crate) cpu_index: Cell<isize>,
    /// Bytes that will have been allocated when the next event comes.
    pub(crate) allocated_at_event: Cell<u64>,
    /// Registered where the C library knows nothing of rseq; written in vain by unregistered threads.
    pub(crate) own: RseqArea,
    /// The CPU index of a thread that must not use a CPU cache: always -1.
    no_cpu: Cell<i32>,
    pub(crate) mode: Cell<Mode>,
    /// Not 0 in a child that shares this memory (vfork): both caches are then out of bounds.
    pub(crate) vfork: Cell<u8>,
    /// Not 0 while the thread cache is in use: a signal handler then goes to the arena.
    pub(crate) busy: Cell<u8>,
    /// Why the thread has no CPU index and does all on the slow path: bits of `front::apart`, 0 for no
    /// such reason.
    pub(crate) apart: Cell<u8>,
    /// The arena of a thread that has no CPU index; the arena layer reduces it to its own number.
    pub(crate) arena: Cell<u32>,
    pub(crate) thread_cache: Cell<*mut ThreadCache>,
    /// The CPU index that was taken away for that; 0: not known yet.
    pub(crate) own_index: Cell<isize>,
    /// The arena that it asked for, and one more; 0: none.
    pub(crate) bound: Cell<u32>,
    /// Its entry among the threads that are bound, and one more; 0: none.
    pub(crate) binding: Cell<u32>,
    /// Usable bytes that it allocated and freed, kept while it is apart to be counted.
    pub(crate) allocated: Cell<u64>,
    pub(crate) deallocated: Cell<u64>,
    /// The most that the difference of the two was, above what it was at the last reset.
    pub(crate) peak: Cell<u64>,
    pub(crate) peak_base: Cell<u64>,
    /// Bytes from the last event to the next.
    pub(crate) event_interval: Cell<i64>,
    /// Profiler: the way to the next sample.
    pub(crate) sample_left: Cell<i64>,
    pub(crate) sample_period: Cell<u64>,
    pub(crate) random: Cell<u64>,
    /// Profiler: the thread's own stack, as far as it is known to be readable.
    pub(crate) stack_low: Cell<usize>,
    pub(crate) stack_high: Cell<usize>,
    /// Profiler: the tag of the innermost scope.
    pub(crate) scope: Cell<u32>,
    /// Profiler: the thread's number; 0: it has none yet.
    pub(crate) thread: Cell<u32>,
    /// Profiler: not 0 where the thread asked for none of its blocks to be recorded.
    pub(crate) unprofiled: Cell<u8>,
    /// Profiler: not 0 while a block is being recorded.
    pub(crate) recording: Cell<u8>,
}

impl Tls {
    /// Offset of the CPU index of a thread that must not use a CPU cache.
    pub(crate) const NO_CPU: usize = offset_of!(Tls, no_cpu);

    /// Where the first words are, which the sections read.
    pub(crate) fn words(&self) -> usize {
        (&raw const self.bytes_until_event).addr()
    }

    /// Whether the thread is served by a cache of its own, and nothing stands in the way now. The four
    /// bytes are one word, so this is one comparison.
    #[inline(always)]
    pub(crate) fn has_own_cache_free(&self) -> bool {
        let now = [self.mode.get() as u8, self.vfork.get(), self.busy.get(), self.apart.get()];
        u32::from_ne_bytes(now) == u32::from_ne_bytes([Mode::Thread as u8, 0, 0, 0])
    }
}

const _: () = {
    assert!(offset_of!(Tls, bytes_until_event) == 0);
    assert!(offset_of!(Tls, rseq_area) == 8);
    assert!(offset_of!(Tls, cpu_index) == 16);
    assert!(offset_of!(Tls, own) == 32);
    assert!(offset_of!(Tls, no_cpu) == 64);
    assert!(offset_of!(Tls, vfork) == 69);
    assert!(size_of::<Tls>() <= 256 && align_of::<Tls>() == 32);
};

/// Offset of the block from the thread pointer.
#[inline(always)]
pub(crate) fn offset() -> usize {
    let o: usize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: reads a word of the global offset table, which never changes once code runs.
    unsafe {
        asm!(
            concat!("mov {o}, qword ptr [rip + ", symbol!(), "@GOTTPOFF]"),
            o = out(reg) o,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        asm!(
            concat!("adrp {o}, :gottprel:", symbol!()),
            concat!("ldr {o}, [{o}, :gottprel_lo12:", symbol!(), "]"),
            o = out(reg) o,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    o
}

/// Where [`offset`] reads it; `None` where that is not known or the linker made it a constant.
pub(super) fn offset_word() -> Option<usize> {
    #[cfg(target_arch = "x86_64")]
    {
        let code: *const [u8; 7];
        // SAFETY: makes an address, and loads the offset.
        unsafe {
            asm!(
                concat!("2: mov {code}, qword ptr [rip + ", symbol!(), "@GOTTPOFF]"),
                "lea {code}, [rip + 2b]",
                code = out(reg) code,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        // SAFETY: the code of the load above.
        let [_, opcode, _, displacement @ ..] = unsafe { code.read() };
        let displacement = i32::from_le_bytes(displacement) as isize;
        (opcode == 0x8b).then(|| (code.addr() + 7).wrapping_add_signed(displacement))
    }
    #[cfg(target_arch = "aarch64")]
    None
}

/// The thread pointer, the base of every thread-local offset.
#[inline(always)]
pub(crate) fn thread_pointer() -> *mut u8 {
    let p: *mut u8;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the ABI keeps the thread pointer itself in the first word that it points to.
    unsafe {
        asm!("mov {p}, qword ptr fs:[0]", p = out(reg) p, options(pure, nomem, nostack, preserves_flags));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: reads a register.
    unsafe {
        asm!("mrs {p}, tpidr_el0", p = out(reg) p, options(pure, nomem, nostack, preserves_flags));
    }
    p
}

/// The calling thread's block. The reference must not reach another thread.
#[inline(always)]
pub(crate) fn tls() -> &'static Tls {
    let block = thread_pointer().wrapping_add(offset()).cast::<Tls>();
    // SAFETY: the loader put an initialised block there, aligned, for as long as the thread runs;
    // it is not `Sync`, so only this thread uses it.
    unsafe { &*block }
}

/// Takes `bytes` off what may be allocated until the next event; true when that is due.
#[inline(always)]
pub(crate) fn count(bytes: usize) -> bool {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: changes `bytes_until_event`, the first field of this thread's block, only.
    unsafe {
        asm!(
            "sub qword ptr fs:[{tls}], {bytes}",
            "js {due}",
            tls = in(reg) offset(),
            bytes = in(reg) bytes,
            due = label { return true },
            options(nostack)
        );
    }
    #[cfg(target_arch = "aarch64")]
    {
        let left = &tls().bytes_until_event;
        left.set(left.get().wrapping_sub_unsigned(bytes as u64));
        if left.get() < 0 {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thread_has_its_own_block() {
        let here = core::ptr::from_ref(tls()) as usize;
        assert_eq!(here % align_of::<Tls>(), 0);
        let there = std::thread::spawn(|| {
            let t = tls();
            assert_eq!((t.no_cpu.get(), t.cpu_index.get(), t.bytes_until_event.get()), (-1, 0, 0));
            assert!(count(16));
            t.bytes_until_event.set(32);
            assert!(!count(16) && !count(16) && count(16));
            assert_eq!(t.bytes_until_event.get(), -16);
            core::ptr::from_ref(t) as usize
        });
        assert_ne!(there.join().unwrap(), here);
    }
}
