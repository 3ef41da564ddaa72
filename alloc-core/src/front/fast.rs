//! The whole fast path of an allocation as one function of the C ABI, and where the words are that it
//! and the sections of `rseq` read: in the hot block, in the thread's block.

use core::mem::offset_of;

use super::hot::Hot;
use super::tls::{RseqArea, Tls};

pub use super::size_class::{SLAB_MAX, TINY_MAX};
/// Hot: the class of each size up to [`TINY_MAX`].
pub const TINY: usize = offset_of!(Hot, tiny);
/// Hot: the class of each size from there to [`SLAB_MAX`], by steps of 128 bytes.
pub const MEDIUM: usize = offset_of!(Hot, medium);
/// Hot: the table of regions.
pub const TABLE: usize = offset_of!(Hot, table);
/// Thread: the distance from its own rseq area to the one in use.
pub const AREA: usize = offset_of!(Tls, rseq_area);
/// Thread: the distance from [`NO_CPU`] to its CPU index.
pub const INDEX: usize = offset_of!(Tls, cpu_index);
/// Thread: the descriptor of its own rseq area.
pub const CS: usize = offset_of!(Tls, own) + RseqArea::RSEQ_CS.unsigned_abs();
/// Thread: a CPU index that has no region.
pub const NO_CPU: usize = Tls::NO_CPU;

/// Defines a function of the C ABI that allocates a block of as many bytes as its argument says: the
/// event counter, the class of a size of slabs and `rseq::pop`, and nothing else. Others do what it can't:
/// `large`, larger sizes, which are not counted yet, and `slow`, all that `rseq::pop` gave null for.
/// They take the same argument, `slow` the class as well, and it goes to them by a jump.
#[cfg(target_arch = "x86_64")]
#[doc(hidden)]
#[macro_export]
macro_rules! fast_alloc {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($large:path, $slow:path) -> $block:ty) => {
        $(#[$meta])*
        #[unsafe(naked)]
        $vis extern "C" fn $name(size: usize) -> $block {
            core::arch::naked_asm!(
                // Unwinders that interrupt it find its caller.
                ".cfi_startproc",
                "cmp rdi, {TINY_MAX}",
                "ja 22f",
                concat!("lea rax, [rip + ", $crate::__hot!(), " + {TINY}]"),
                "movzx esi, byte ptr [rax + rdi]",
                "21:",
                concat!("mov rdx, qword ptr [rip + ", $crate::__tls!(), "@GOTTPOFF]"),
                "sub qword ptr fs:[rdx], rdi",
                "js {slow}",
                concat!("mov rcx, qword ptr [rip + ", $crate::__hot!(), " + {TABLE}]"),
                $crate::__prologue!("rax", "r8", "rdx", "rcx"),
                "mov r9d, dword ptr [r8 + rsi*8]",
                "mov rax, qword ptr [r8 + r9*8 - 8]",
                "test rax, rax",
                "jz {slow}",
                "dec dword ptr [r8 + rsi*8]",
                "5:",
                "ret",
                "22:",
                "cmp rdi, {SLAB_MAX}",
                "ja {large}",
                "lea rsi, [rdi + 127]",
                "shr rsi, 7",
                concat!("lea rax, [rip + ", $crate::__hot!(), " + {MEDIUM}]"),
                "movzx esi, byte ptr [rax + rsi]",
                "jmp 21b",
                ".cfi_endproc",
                large = sym $large,
                slow = sym $slow,
                TINY_MAX = const $crate::embed::fast::TINY_MAX,
                TINY = const $crate::embed::fast::TINY,
                SLAB_MAX = const $crate::embed::fast::SLAB_MAX,
                MEDIUM = const $crate::embed::fast::MEDIUM,
                TABLE = const $crate::embed::fast::TABLE,
                AREA = const $crate::embed::fast::AREA,
                INDEX = const $crate::embed::fast::INDEX,
                CS = const $crate::embed::fast::CS,
                NO_CPU = const $crate::embed::fast::NO_CPU,
            )
        }
    };
}

/// As above, by the compiler.
#[cfg(target_arch = "aarch64")]
#[doc(hidden)]
#[macro_export]
macro_rules! fast_alloc {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($large:path, $slow:path) -> $block:ty) => {
        $(#[$meta])*
        $vis extern "C" fn $name(size: usize) -> $block {
            if size > $crate::embed::fast::SLAB_MAX {
                return $large(size);
            }
            let class = $crate::api::small_class(size);
            let p = $crate::api::alloc_of_class(class, size);
            if p.is_null() { $slow(size, class) } else { p.cast() }
        }
    };
}
