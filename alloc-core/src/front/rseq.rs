//! Restartable sequences: every critical section of the front end, for both architectures.
//!
//! A section reads the CPU index, works on that CPU's [`Region`] and commits by its last store. The
//! kernel sends a thread that is preempted, migrated or signalled in between back to the start, so
//! whatever it read or wrote before counts for nothing. A region can't change under a section:
//! others take it away by its table entry and a fence (see `entry`).
//!
//! A thread that isn't registered has CPU index -1, whose table entry is an empty region: it pops
//! null and pushes nothing, without a test of its own on the fast path.

use core::arch::asm;
use core::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, Ordering::Relaxed};

use super::fast;
use super::hot::{self, Hot};
use super::size_class::SizeClass;
use super::tls;
use crate::extent::page_map::{LG_PAGE, Reach};

/// A CPU's array caches: a [`Header`] for each class code, then the slots. The layout of the slots
/// is `room`'s; all positions are 8-byte words from the start of the region.
#[repr(C)]
pub(crate) struct Region {
    headers: [Words; 256],
}

/// A [`Header`] in memory. Words of 32 bits: a processor that forwards a store to the next load in no
/// time does so for these, not for halves of them.
#[repr(C, align(8))]
struct Words {
    cur: AtomicU32,
    end: AtomicU32,
}

/// Bytes of a header.
pub(crate) const HEADER_BYTES: usize = size_of::<Words>();

/// Where the blocks of a class end, and where its room ends. The slot below the first is always
/// null, and so is the word below an empty region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) cur: u16,
    pub(crate) end: u16,
}

impl Header {
    fn to_word(self) -> u64 {
        u64::from(self.cur) | u64::from(self.end) << 32
    }
}

impl Region {
    /// A glance at a header; another thread may change it at any time, also half of it.
    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "positions have 16 bits")]
    pub(crate) fn header(&self, class: SizeClass) -> Header {
        let Words { cur, end } = &self.headers[class as usize];
        Header { cur: cur.load(Relaxed) as u16, end: end.load(Relaxed) as u16 }
    }

    /// Writes a header. Only for the owner of a region that no section can reach.
    #[inline]
    pub(crate) fn set_header(&self, class: SizeClass, header: Header) {
        self.set_cur(class, header.cur);
        self.headers[class as usize].end.store(header.end.into(), Relaxed);
    }

    /// Writes where the blocks end, and no more. As [`Region::set_header`].
    #[inline(always)]
    pub(super) fn set_cur(&self, class: SizeClass, cur: u16) {
        self.headers[class as usize].cur.store(cur.into(), Relaxed);
    }

    /// The word at `position`, which is inside the region's slots.
    #[inline]
    pub(crate) fn slot(&self, position: u16) -> *mut *mut u8 {
        core::ptr::from_ref(self).cast_mut().cast::<*mut u8>().wrapping_add(position as usize)
    }
}

/// An entry of the table of regions by CPU index. The first two are for the indices -2 and -1.
pub(crate) type Entry = AtomicPtr<Region>;
/// Entries before that of CPU 0.
pub(crate) const BEFORE: usize = 2;

/// The counter of aborts: hidden, so that a section can reach it from any kind of library.
#[doc(hidden)]
#[macro_export]
macro_rules! __aborts_symbol {
    () => {
        concat!(
            "thermalloc_rseq_aborts_",
            env!("CARGO_PKG_VERSION_MAJOR"),
            "_",
            env!("CARGO_PKG_VERSION_MINOR"),
            "_",
            env!("CARGO_PKG_VERSION_PATCH")
        )
    };
}
use crate::__aborts_symbol as aborts_symbol;

core::arch::global_asm!(
    ".pushsection .bss.thermalloc,\"aw\",@nobits",
    ".p2align 3",
    concat!(".globl ", aborts_symbol!()),
    concat!(".hidden ", aborts_symbol!()),
    concat!(".type ", aborts_symbol!(), ",@object"),
    concat!(".size ", aborts_symbol!(), ",8"),
    concat!(aborts_symbol!(), ":"),
    ".zero 8",
    ".popsection",
);

/// How often a section was sent back to its start, over all threads.
pub(crate) fn aborts() -> u64 {
    let n: u64;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: reads the counter.
    unsafe {
        asm!(
            concat!("mov {n}, qword ptr [rip + ", aborts_symbol!(), "]"),
            n = out(reg) n,
            options(nostack, preserves_flags, readonly)
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        asm!(
            concat!("adrp {n}, ", aborts_symbol!()),
            concat!("ldr {n}, [{n}, :lo12:", aborts_symbol!(), "]"),
            n = out(reg) n,
            options(nostack, preserves_flags, readonly)
        );
    }
    n
}

/// What every section starts with, in terms of its registers. Label 2 is where it restarts, 3 the
/// descriptor, 4 to 5 the section itself, 7 the abort stub behind its signature.
#[cfg(target_arch = "x86_64")]
#[doc(hidden)]
#[macro_export]
macro_rules! __prologue {
    ($a:literal, $t:literal, $tls:literal, $table:literal) => {
        concat!(
            ".pushsection .data.rel.ro.thermalloc,\"aw\",@progbits\n",
            ".balign 32\n",
            "3:\n",
            ".long 0, 0\n",
            ".quad 4f, 5f - 4f, 7f\n",
            ".popsection\n",
            ".pushsection .text.unlikely.thermalloc,\"ax\",@progbits\n",
            ".byte 0x0f, 0xb9, 0x3d\n",
            ".long 0x53053053\n",
            "7:\n",
            "lock inc qword ptr [rip + ",
            $crate::__aborts_symbol!(),
            "]\n",
            "jmp 2f\n",
            ".popsection\n",
            "2:\n",
            "mov ",
            $a,
            ", qword ptr fs:[",
            $tls,
            " + {AREA}]\n",
            "lea ",
            $t,
            ", [rip + 3b]\n",
            "mov qword ptr fs:[",
            $tls,
            " + ",
            $a,
            " + {CS}], ",
            $t,
            "\n",
            "4:\n",
            "mov ",
            $t,
            ", qword ptr fs:[",
            $tls,
            " + {INDEX}]\n",
            "movsxd ",
            $t,
            ", dword ptr fs:[",
            $tls,
            " + ",
            $t,
            " + {NO_CPU}]\n",
            "mov ",
            $t,
            ", qword ptr [",
            $table,
            " + ",
            $t,
            "*8 + 16]\n",
        )
    };
}

#[cfg(target_arch = "x86_64")]
macro_rules! prologue {
    () => {
        $crate::__prologue!("{a}", "{t}", "{tls}", "{table}")
    };
}

#[cfg(target_arch = "aarch64")]
macro_rules! prologue {
    () => {
        concat!(
            ".pushsection .data.rel.ro.thermalloc,\"aw\",@progbits\n",
            ".balign 32\n",
            "3:\n",
            ".word 0, 0\n",
            ".xword 4f, 5f - 4f, 7f\n",
            ".popsection\n",
            ".pushsection .text.unlikely.thermalloc,\"ax\",@progbits\n",
            ".inst 0xd428bc00\n",
            "7:\n",
            "adrp {a}, ",
            aborts_symbol!(),
            "\n",
            "add {a}, {a}, :lo12:",
            aborts_symbol!(),
            "\n",
            "8:\n",
            "ldxr {t}, [{a}]\n",
            "add {t}, {t}, #1\n",
            "stxr {s:w}, {t}, [{a}]\n",
            "cbnz {s:w}, 8b\n",
            "b 2f\n",
            ".popsection\n",
            "2:\n",
            "ldr {a}, [{tls}, #{AREA}]\n",
            "add {a}, {a}, {tls}\n",
            "adrp {t}, 3b\n",
            "add {t}, {t}, :lo12:3b\n",
            "str {t}, [{a}, #{CS}]\n",
            "4:\n",
            "ldr {t}, [{tls}, #{INDEX}]\n",
            "add {t}, {t}, {tls}\n",
            "ldrsw {t}, [{t}, #{NO_CPU}]\n",
            "add {t}, {table}, {t}, lsl #3\n",
            "ldr {t}, [{t}, #16]\n",
        )
    };
}

/// A section: the lines after the prologue, then the operands of its own.
macro_rules! section {
    ([$($line:expr),* $(,)?], $table:expr, $($operand:tt)*) => {
        asm!(
            prologue!(),
            $($line,)*
            tls = in(reg) base(),
            table = in(reg) $table,
            AREA = const fast::AREA,
            INDEX = const fast::INDEX,
            CS = const fast::CS,
            NO_CPU = const fast::NO_CPU,
            $($operand)*
            options(nostack)
        )
    };
}

/// What the sections address the thread's block by: an offset to the segment base on x86, a
/// pointer elsewhere.
#[inline(always)]
fn base() -> usize {
    #[cfg(target_arch = "x86_64")]
    return tls::offset();
    #[cfg(target_arch = "aarch64")]
    return core::ptr::from_ref(tls::tls()) as usize;
}

/// Pops a block of `class` from the current CPU's region; null where it has none.
///
/// # Safety
/// `table` has an entry for every CPU index that the kernel may give to this thread; `class` is a
/// class.
#[inline(always)]
pub(crate) unsafe fn pop(table: *const Entry, class: usize) -> *mut u8 {
    let block: *mut u8;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every region of the table has 256 headers and `cur` in its slots, where the word
    // below is a block or null; the one store is the commit.
    unsafe {
        section!(
            [
                "mov {n:e}, dword ptr [{t} + {class}*8]",
                "mov {a}, qword ptr [{t} + {n}*8 - 8]",
                "test {a}, {a}",
                "jz 5f",
                "dec dword ptr [{t} + {class}*8]",
                "5:",
            ],
            table,
            class = in(reg) class,
            a = out(reg) block,
            t = out(reg) _,
            n = out(reg) _,
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        section!(
            [
                "add {t}, {t}, {class}, lsl #3",
                "ldr {n:w}, [{t}]",
                "sub {s}, {t}, {class}, lsl #3",
                "add {s}, {s}, {n}, lsl #3",
                "ldur {a}, [{s}, #-8]",
                "cbz {a}, 5f",
                "sub {n:w}, {n:w}, #1",
                "str {n:w}, [{t}]",
                "5:",
            ],
            table,
            class = in(reg) class,
            a = out(reg) block,
            t = out(reg) _,
            n = out(reg) _,
            s = out(reg) _,
        );
    }
    block
}

/// Pushes a block on the current CPU's region, under the class-map code of its page; false where that
/// has no room for it, as for every code that is no class, or where the address is not in the
/// window. What [`push`] does, with all that comes before it.
///
/// # Safety
/// As [`pop`], for the process's table; `block` belongs to the caller, if it is a block.
#[inline(always)]
pub(crate) unsafe fn push_block(block: *mut u8) -> bool {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as `push`; below the limit every page has a code.
    unsafe {
        asm!(
            "mov {page}, {block}",
            concat!("sub {page}, qword ptr [rip + ", hot::symbol!(), " + {BASE}]"),
            concat!("cmp {page}, qword ptr [rip + ", hot::symbol!(), " + {LIMIT}]"),
            "jae {not_here}",
            "shr {page}, {LG_PAGE}",
            concat!("mov {codes}, qword ptr [rip + ", hot::symbol!(), " + {CODES}]"),
            concat!("mov {table}, qword ptr [rip + ", hot::symbol!(), " + {TABLE}]"),
            prologue!(),
            "movzx {class:e}, byte ptr [{codes} + {page}]",
            "mov {a:e}, dword ptr [{t} + {class}*8]",
            "cmp {a:e}, dword ptr [{t} + {class}*8 + 4]",
            "jae {full}",
            "mov qword ptr [{t} + {a}*8], {block}",
            "inc dword ptr [{t} + {class}*8]",
            "5:",
            tls = in(reg) base(),
            block = in(reg) block,
            page = out(reg) _,
            codes = out(reg) _,
            table = out(reg) _,
            class = out(reg) _,
            a = out(reg) _,
            t = out(reg) _,
            not_here = label { return false },
            full = label { return false },
            AREA = const fast::AREA,
            INDEX = const fast::INDEX,
            CS = const fast::CS,
            NO_CPU = const fast::NO_CPU,
            BASE = const core::mem::offset_of!(Hot, reach) + core::mem::offset_of!(Reach, base),
            LIMIT = const core::mem::offset_of!(Hot, reach) + core::mem::offset_of!(Reach, limit_bytes),
            CODES = const core::mem::offset_of!(Hot, reach) + core::mem::offset_of!(Reach, codes),
            TABLE = const fast::TABLE,
            LG_PAGE = const LG_PAGE,
            options(nostack)
        );
        true
    }
    #[cfg(target_arch = "aarch64")]
    {
        let Hot { reach: Reach { base, limit_bytes, codes }, .. } = hot::hot();
        let offset = block.addr().wrapping_sub(base.load(Relaxed));
        // SAFETY: as the caller promises; below the limit every page has a code.
        offset < limit_bytes.load(Relaxed)
            && unsafe { push(hot::hot().table(), codes.load(Relaxed), offset >> LG_PAGE, block) }
    }
}

/// Pushes a block whose class-map code is byte `page` of `codes` on the current CPU's region; false
/// where that has no room for it, as for every code that is no class.
///
/// # Safety
/// As [`pop`]; `page` is within `codes`; `block` is not null and belongs to the caller.
#[inline(always)]
pub(crate) unsafe fn push(
    table: *const Entry,
    codes: *const AtomicU8,
    page: usize,
    block: *mut u8,
) -> bool {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as `pop`; a slot below `end` and not below `cur` is free.
    unsafe {
        section!(
            [
                "movzx {class:e}, byte ptr [{codes} + {page}]",
                "mov {a:e}, dword ptr [{t} + {class}*8]",
                "cmp {a:e}, dword ptr [{t} + {class}*8 + 4]",
                "jae {full}",
                "mov qword ptr [{t} + {a}*8], {block}",
                "inc dword ptr [{t} + {class}*8]",
                "5:",
            ],
            table,
            codes = in(reg) codes,
            page = in(reg) page,
            block = in(reg) block,
            class = out(reg) _,
            a = out(reg) _,
            t = out(reg) _,
            full = label { return false },
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        section!(
            [
                "ldrb {s:w}, [{codes}, {page}]",
                "add {s}, {t}, {s}, lsl #3",
                "ldr {a:w}, [{s}]",
                "ldr {n:w}, [{s}, #4]",
                "cmp {a:w}, {n:w}",
                "b.hs {full}",
                "str {block}, [{t}, {a}, lsl #3]",
                "add {a:w}, {a:w}, #1",
                "str {a:w}, [{s}]",
                "5:",
            ],
            table,
            codes = in(reg) codes,
            page = in(reg) page,
            block = in(reg) block,
            a = out(reg) _,
            t = out(reg) _,
            n = out(reg) _,
            s = out(reg) _,
            full = label { return false },
        );
    }
    true
}

/// As [`push`], with the code itself.
///
/// # Safety
/// As [`push`].
pub(super) unsafe fn push_code(table: *const Entry, code: u8, block: *mut u8) -> bool {
    let code = AtomicU8::new(code);
    // SAFETY: as the caller promises; one code is there.
    unsafe { push(table, &raw const code, 0, block) }
}

/// Replaces the header of `class`, if it is `old` and `region` is the current CPU's.
///
/// # Safety
/// As [`pop`]; `new` keeps to the slots that `room` lays out for the class.
#[inline(never)]
pub(crate) unsafe fn replace(
    table: *const Entry,
    region: &Region,
    class: SizeClass,
    old: Header,
    new: Header,
) -> bool {
    let mut done: u32 = 0;
    let region = core::ptr::from_ref(region);
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the one store is the commit, to a header of the current CPU.
    unsafe {
        section!(
            [
                "cmp {t}, {region}",
                "jne 6f",
                "cmp qword ptr [{t} + {class}*8], {old}",
                "jne 6f",
                "mov qword ptr [{t} + {class}*8], {new}",
                "5:",
                "mov {done:e}, 1",
                "6:",
            ],
            table,
            class = in(reg) class as usize,
            region = in(reg) region,
            old = in(reg) old.to_word(),
            new = in(reg) new.to_word(),
            done = inout(reg) done,
            a = out(reg) _,
            t = out(reg) _,
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        section!(
            [
                "cmp {t}, {region}",
                "b.ne 6f",
                "ldr {a}, [{t}, {class}, lsl #3]",
                "cmp {a}, {old}",
                "b.ne 6f",
                "str {new}, [{t}, {class}, lsl #3]",
                "5:",
                "mov {done:w}, #1",
                "6:",
            ],
            table,
            class = in(reg) class as usize,
            region = in(reg) region,
            old = in(reg) old.to_word(),
            new = in(reg) new.to_word(),
            done = inout(reg) done,
            a = out(reg) _,
            t = out(reg) _,
            s = out(reg) _,
        );
    }
    done != 0
}

/// Pops up to `out.len()` blocks of `class` from the current CPU's region.
///
/// # Safety
/// As [`pop`].
#[inline(never)]
pub(crate) unsafe fn pop_batch(
    table: *const Entry,
    class: SizeClass,
    out: &mut [*mut u8],
) -> usize {
    let popped: usize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as `pop`; before the commit only `out` is written, within its length.
    unsafe {
        section!(
            [
                "mov {n:e}, dword ptr [{t} + {class}*8]",
                "xor {i:e}, {i:e}",
                "8:",
                "cmp {i}, {len}",
                "jae 9f",
                "mov {a}, qword ptr [{t} + {n}*8 - 8]",
                "test {a}, {a}",
                "jz 9f",
                "mov qword ptr [{out} + {i}*8], {a}",
                "inc {i}",
                "dec {n:e}",
                "jmp 8b",
                "9:",
                "test {i}, {i}",
                "jz 5f",
                "mov dword ptr [{t} + {class}*8], {n:e}",
                "5:",
            ],
            table,
            class = in(reg) class as usize,
            out = in(reg) out.as_mut_ptr(),
            len = in(reg) out.len(),
            i = out(reg) popped,
            a = out(reg) _,
            t = out(reg) _,
            n = out(reg) _,
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        section!(
            [
                "add {s}, {t}, {class}, lsl #3",
                "ldr {n:w}, [{s}]",
                "mov {i}, xzr",
                "add {t}, {t}, {n}, lsl #3",
                "8:",
                "cmp {i}, {len}",
                "b.hs 9f",
                "ldr {a}, [{t}, #-8]!",
                "cbz {a}, 9f",
                "str {a}, [{out}, {i}, lsl #3]",
                "add {i}, {i}, #1",
                "b 8b",
                "9:",
                "cbz {i}, 5f",
                "sub {n:w}, {n:w}, {i:w}",
                "str {n:w}, [{s}]",
                "5:",
            ],
            table,
            class = in(reg) class as usize,
            out = in(reg) out.as_mut_ptr(),
            len = in(reg) out.len(),
            i = out(reg) popped,
            a = out(reg) _,
            t = out(reg) _,
            n = out(reg) _,
            s = out(reg) _,
        );
    }
    popped
}

/// Pushes the first blocks of `blocks` that there is room for, in such an order that they pop in
/// that of the slice; how many.
///
/// # Safety
/// As [`push`], for each block.
#[inline(never)]
pub(crate) unsafe fn push_batch(
    table: *const Entry,
    class: SizeClass,
    blocks: &[*mut u8],
) -> usize {
    let pushed: usize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as `push`; what is stored at and above `cur` before the commit is in nobody's way.
    unsafe {
        section!(
            [
                "xor {k:e}, {k:e}",
                "mov {n:e}, dword ptr [{t} + {class}*8]",
                "mov {i:e}, dword ptr [{t} + {class}*8 + 4]",
                "sub {i:e}, {n:e}",
                "jbe 5f",
                "cmp {i}, {len}",
                "cmova {i}, {len}",
                "test {i}, {i}",
                "jz 5f",
                "mov {k}, {i}",
                "8:",
                "mov {a}, qword ptr [{blocks} + {i}*8 - 8]",
                "mov qword ptr [{t} + {n}*8], {a}",
                "inc {n:e}",
                "dec {i}",
                "jnz 8b",
                "mov dword ptr [{t} + {class}*8], {n:e}",
                "5:",
            ],
            table,
            class = in(reg) class as usize,
            blocks = in(reg) blocks.as_ptr(),
            len = in(reg) blocks.len(),
            k = out(reg) pushed,
            i = out(reg) _,
            a = out(reg) _,
            t = out(reg) _,
            n = out(reg) _,
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        section!(
            [
                "mov {k}, xzr",
                "add {s}, {t}, {class}, lsl #3",
                "ldr {n:w}, [{s}]",
                "ldr {i:w}, [{s}, #4]",
                "subs {i:w}, {i:w}, {n:w}",
                "b.ls 5f",
                "cmp {i}, {len}",
                "csel {i}, {i}, {len}, lo",
                "cbz {i}, 5f",
                "mov {k}, {i}",
                "add {t}, {t}, {n}, lsl #3",
                "add {n:w}, {n:w}, {i:w}",
                "8:",
                "sub {i}, {i}, #1",
                "ldr {a}, [{blocks}, {i}, lsl #3]",
                "str {a}, [{t}], #8",
                "cbnz {i}, 8b",
                "str {n:w}, [{s}]",
                "5:",
            ],
            table,
            class = in(reg) class as usize,
            blocks = in(reg) blocks.as_ptr(),
            len = in(reg) blocks.len(),
            k = out(reg) pushed,
            i = out(reg) _,
            a = out(reg) _,
            t = out(reg) _,
            n = out(reg) _,
            s = out(reg) _,
        );
    }
    pushed
}
