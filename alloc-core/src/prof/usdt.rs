//! Static probes of the names that OpenTelemetry's profiler looks for: `otel_memory:alloc` (address, size,
//! weight in bytes) and `otel_memory:free` (address). A tracer that attaches raises the probe's semaphore,
//! which also turns sampling on; else a probe costs a load.
use core::arch::{asm, global_asm};

use crate::sync::atomic::{AtomicU16, Ordering::Relaxed};
use thermalloc_prof_format::Block;

macro_rules! name {
    ($probe:literal) => {
        concat!(
            "thermalloc_",
            $probe,
            "_semaphore_",
            env!("CARGO_PKG_VERSION_MAJOR"),
            "_",
            env!("CARGO_PKG_VERSION_MINOR"),
            "_",
            env!("CARGO_PKG_VERSION_PATCH")
        )
    };
}

global_asm!(
    // What a tool compares to find how far the file's addresses have moved.
    ".pushsection .stapsdt.base,\"aG\",@progbits,.stapsdt.base,comdat",
    ".weak _.stapsdt.base",
    ".hidden _.stapsdt.base",
    "_.stapsdt.base: .space 1",
    ".size _.stapsdt.base, 1",
    ".popsection",
    ".pushsection .probes,\"aw\",@progbits",
    ".p2align 1",
    concat!(".globl ", name!("alloc")),
    concat!(".hidden ", name!("alloc")),
    concat!(".type ", name!("alloc"), ",@object"),
    concat!(".size ", name!("alloc"), ",2"),
    concat!(name!("alloc"), ": .short 0"),
    concat!(".globl ", name!("free")),
    concat!(".hidden ", name!("free")),
    concat!(".type ", name!("free"), ",@object"),
    concat!(".size ", name!("free"), ",2"),
    concat!(name!("free"), ": .short 0"),
    ".popsection",
);

/// The note that describes a probe at label 990.
macro_rules! note {
    ($probe:literal, $arguments:literal) => {
        concat!(
            ".pushsection .note.stapsdt,\"\",@note\n",
            ".balign 4\n",
            ".4byte 992f - 991f, 994f - 993f, 3\n",
            "991: .asciz \"stapsdt\"\n",
            "992: .balign 4\n",
            "993: .8byte 990b\n",
            ".8byte _.stapsdt.base\n",
            ".8byte ",
            name!($probe),
            "\n",
            ".asciz \"otel_memory\"\n",
            ".asciz \"",
            $probe,
            "\"\n",
            ".asciz \"",
            $arguments,
            "\"\n",
            "994: .balign 4\n",
            ".popsection",
        )
    };
}

macro_rules! semaphore {
    ($probe:literal) => {{
        let at: *const AtomicU16;
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an address of our own.
        unsafe {
            asm!(concat!("lea {}, [rip + ", name!($probe), "]"), out(reg) at, options(pure, nomem, nostack, preserves_flags));
        }
        #[cfg(target_arch = "aarch64")]
        // SAFETY: as above.
        unsafe {
            asm!(concat!("adrp {0}, ", name!($probe)), concat!("add {0}, {0}, :lo12:", name!($probe)),
                out(reg) at, options(pure, nomem, nostack, preserves_flags));
        }
        // SAFETY: two bytes, aligned, for as long as the library is loaded; tracers change them.
        unsafe { &*at }
    }};
}

/// Whether a tracer wants to see allocations.
#[inline]
pub(super) fn attached() -> bool {
    semaphore!("alloc").load(Relaxed) != 0
}

/// A block was recorded.
#[inline]
pub(super) fn alloc(block: &Block) {
    if attached() {
        #[allow(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "an estimate; casts saturate"
        )]
        let weight = (block.weight * block.size as f64) as u64;
        fire_alloc(block.address, block.size, weight);
    }
}

/// A recorded block was freed.
#[inline]
pub(super) fn free(block: &Block) {
    if semaphore!("free").load(Relaxed) != 0 {
        fire_free(block.address);
    }
}

#[cold]
#[inline(never)]
fn fire_alloc(address: u64, size: u64, weight: u64) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a `nop`, and a note about it.
    unsafe {
        asm!("990: nop", note!("alloc", "8@%rdi 8@%rsi 8@%rdx"),
            in("rdi") address, in("rsi") size, in("rdx") weight, options(nostack, preserves_flags));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        asm!("990: nop", note!("alloc", "8@x0 8@x1 8@x2"),
            in("x0") address, in("x1") size, in("x2") weight, options(nostack, preserves_flags));
    }
}

#[cold]
#[inline(never)]
fn fire_free(address: u64) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as above.
    unsafe {
        asm!("990: nop", note!("free", "8@%rdi"), in("rdi") address, options(nostack, preserves_flags));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        asm!("990: nop", note!("free", "8@x0"), in("x0") address, options(nostack, preserves_flags));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_attached_and_the_probes_may_be_passed() {
        assert!(!attached());
        fire_alloc(1, 2, 3);
        fire_free(1);
        alloc(&Block::default());
        free(&Block::default());
    }

    const ALONE: &str = "THERMALLOC_TEST_PROBES";

    #[test]
    fn a_tracer_turns_sampling_on() {
        if std::env::var_os(ALONE).is_none() {
            let again = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "prof::usdt::tests::a_tracer_turns_sampling_on"])
                .env(ALONE, "1")
                .output()
                .unwrap();
            let said = std::string::String::from_utf8_lossy(&again.stdout);
            assert!(again.status.success() && said.contains("1 passed"), "{said}");
            return;
        }
        let recorded = || crate::prof::counts()[..2].to_vec();
        let block = || {
            let p = crate::api::alloc(3 << 20);
            let seen = recorded();
            // SAFETY: a live block.
            unsafe { crate::api::free(p) };
            seen
        };
        assert_eq!(block(), [0, 0]);
        for probe in [semaphore!("alloc"), semaphore!("free")] {
            probe.store(1, Relaxed);
        }
        assert_eq!(block(), [1, 1]);
        assert_eq!(recorded(), [1, 0]);
        semaphore!("alloc").store(0, Relaxed);
        assert_eq!(block(), [1, 0]);
    }

    #[test]
    fn the_notes_are_in_the_file() {
        let file = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        for note in [&b"stapsdt\0"[..], b"otel_memory\0alloc\0", b"otel_memory\0free\0"] {
            assert!(file.windows(note.len()).any(|bytes| bytes == note));
        }
    }
}
