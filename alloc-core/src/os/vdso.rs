//! The kernel's own shared object in every process: its clock costs a few nanoseconds where the
//! system call costs a hundred, and the page layer reads the time with every extent.
use core::ffi::{CStr, c_char};
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use super::linux::Timespec;
use super::start;

#[cfg(target_arch = "x86_64")]
const CLOCK: &CStr = c"__vdso_clock_gettime";
#[cfg(target_arch = "aarch64")]
const CLOCK: &CStr = c"__kernel_clock_gettime";

type ClockGettime = unsafe extern "C" fn(i32, *mut Timespec) -> i32;

/// `CLOCK_FN` where there is no such function.
const NONE: usize = 1;
/// The address of the function; 0 before it was looked for.
static CLOCK_FN: AtomicUsize = AtomicUsize::new(0);

const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const DT_HASH: usize = 4;
const DT_STRTAB: usize = 5;
const DT_SYMTAB: usize = 6;
const SYMBOL_BYTES: usize = 24;

/// Reads clock `id`; `None` where the kernel offers no function for it.
pub(crate) fn clock_gettime(id: i32) -> Option<Timespec> {
    let function = match CLOCK_FN.load(Relaxed) {
        0 => find(),
        found => found,
    };
    if function == NONE {
        return None;
    }
    // SAFETY: the symbol table named it; the object stays mapped as long as the process.
    let clock = unsafe { core::mem::transmute::<usize, ClockGettime>(function) };
    let mut now = Timespec { sec: 0, nsec: 0 };
    // SAFETY: it writes `now` and nothing else, and takes no lock.
    (unsafe { clock(id, &raw mut now) } == 0).then_some(now)
}

#[cold]
fn find() -> usize {
    let base = start::facts().vdso;
    // SAFETY: the kernel's auxiliary vector says that its object is there.
    let found = if base == 0 { None } else { unsafe { Object(base).symbol(CLOCK) } };
    let function = found.unwrap_or(NONE);
    CLOCK_FN.store(function, Relaxed);
    function
}

/// An ELF object at this address, as loaded.
struct Object(usize);

impl Object {
    /// # Safety
    /// `at` is an address within the object, aligned for a `T`.
    unsafe fn read<T: Copy>(at: usize) -> T {
        // SAFETY: as the caller promises.
        unsafe { core::ptr::with_exposed_provenance::<T>(at).read() }
    }

    /// # Safety
    /// The object is a whole one.
    unsafe fn symbol(&self, name: &CStr) -> Option<usize> {
        // SAFETY: the offsets are those of Elf64_Ehdr and Elf64_Phdr, Elf64_Dyn and Elf64_Sym.
        #[allow(clippy::multiple_unsafe_ops_per_block, reason = "one walk, one reason")]
        unsafe {
            let headers = self.0 + Self::read::<usize>(self.0 + 32);
            let count = usize::from(Self::read::<u16>(self.0 + 56));
            let size = usize::from(Self::read::<u16>(self.0 + 54));
            let header = |kind| {
                (0..count).map(|i| headers + i * size).find(|&at| Self::read::<u32>(at) == kind)
            };
            let load = header(PT_LOAD)?;
            let bias = (self.0 + Self::read::<usize>(load + 8)).wrapping_sub(Self::read(load + 16));
            let dynamic = self.0 + Self::read::<usize>(header(PT_DYNAMIC)? + 8);
            let entry = |tag| {
                let mut at = dynamic;
                loop {
                    match Self::read::<usize>(at) {
                        0 => return None,
                        found if found == tag => {
                            return Some(bias.wrapping_add(Self::read(at + 8)));
                        }
                        _ => at += 16,
                    }
                }
            };
            let (symbols, strings) = (entry(DT_SYMTAB)?, entry(DT_STRTAB)?);
            // Without the old hash table: the linker puts the names right behind the symbols.
            let count = entry(DT_HASH).map_or((strings - symbols) / SYMBOL_BYTES, |hash| {
                Self::read::<u32>(hash + 4) as usize
            });
            (0..count).map(|i| symbols + i * SYMBOL_BYTES).find_map(|symbol| {
                let text = strings + Self::read::<u32>(symbol) as usize;
                let defined = Self::read::<u16>(symbol + 6) != 0;
                let text = core::ptr::with_exposed_provenance::<c_char>(text);
                (defined && CStr::from_ptr(text) == name)
                    .then(|| bias.wrapping_add(Self::read(symbol + 8)))
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_object_has_a_clock() {
        // SAFETY: the kernel put it there.
        let here = unsafe { libc::getauxval(libc::AT_SYSINFO_EHDR) } != 0;
        let now = clock_gettime(libc::CLOCK_MONOTONIC);
        assert_eq!(now.is_some(), here);
        let Some(now) = now else { return };
        let mut other = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: writes `other`.
        assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut other) }, 0);
        assert!((0..=1).contains(&(other.tv_sec - now.sec)));
        assert!(clock_gettime(-1).is_none(), "a clock that is none");
    }

    #[test]
    fn a_symbol_that_is_not_there_is_not_found() {
        let base = start::facts().vdso;
        if base != 0 {
            // SAFETY: the kernel's object.
            assert_eq!(unsafe { Object(base).symbol(c"__vdso_no_such_thing") }, None);
        }
    }
}
