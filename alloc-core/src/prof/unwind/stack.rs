//! Reads of a stack that can't fault. A thread's own stack, from where it stands up to its thread block
//! (or the first thread's arguments), is looked at once, page by page, and read directly from then on.
//! Other stacks (fibers, signal stacks) are asked for at every page: the kernel says whether an
//! address can be read.
use crate::front;
use crate::os::{linux, start};

/// How far a thread's own stack is looked at in one go.
const MOST_BYTES: usize = 4 << 20;

/// What is known to be readable.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stack {
    low: usize,
    high: usize,
}

impl Stack {
    /// The stack that the calling thread stands on.
    #[inline]
    pub(crate) fn of_this_thread() -> Self {
        let sp = stack_pointer();
        let (low, high) = front::known_stack();
        if (low..high).contains(&sp) {
            return Self { low: sp, high };
        }
        Self::look(sp)
    }

    #[cold]
    #[inline(never)]
    fn look(sp: usize) -> Self {
        let page = start::page_size();
        let low = sp & !(page - 1);
        let tops = [linux::thread_pointer(), start::first_stack_end()];
        let top = tops.into_iter().filter(|&top| top > sp).min();
        if let Some(top) = top.filter(|top| top - low <= MOST_BYTES) {
            // The thread block itself lies above its own address.
            let high = (top & !(page - 1)) + page;
            // Of a stack that was looked at, only what it has grown by.
            let (seen, same_high) = front::known_stack();
            let end = if same_high == high && low < seen { seen } else { high };
            if (low..end).step_by(page).all(linux::is_readable) {
                front::set_known_stack(low, high);
                return Self { low: sp, high };
            }
        }
        Self { low: sp, high: low + page }
    }

    /// The word at `address`; nothing where there is none, or it is below where the thread stands.
    #[inline(always)]
    pub(crate) fn read(&mut self, address: usize) -> Option<usize> {
        if address < self.low || address > self.high.wrapping_sub(8) {
            return self.read_elsewhere(address);
        }
        // SAFETY: between two addresses of a stack of which every page could be read.
        Some(unsafe { core::ptr::with_exposed_provenance::<usize>(address).read_unaligned() })
    }

    /// A walk may leave a signal stack for the one below it, or go on above what was looked at.
    #[cold]
    fn read_elsewhere(&mut self, address: usize) -> Option<usize> {
        if !linux::is_readable(address) {
            return None;
        }
        let page = start::page_size();
        if address >= self.high && address - self.high < page {
            self.high += page;
        } else {
            self.low = address & !(page - 1);
            self.high = self.low + page;
        }
        // SAFETY: the kernel has just read there.
        Some(unsafe { core::ptr::with_exposed_provenance::<usize>(address).read_unaligned() })
    }
}

#[inline(always)]
fn stack_pointer() -> usize {
    let sp;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: reads a register.
    unsafe {
        core::arch::asm!("mov {}, rsp", out(reg) sp, options(nomem, nostack, preserves_flags));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: reads a register.
    unsafe {
        core::arch::asm!("mov {}, sp", out(reg) sp, options(nomem, nostack, preserves_flags));
    }
    sp
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_is_there_and_nothing_else() {
        let local = core::hint::black_box([0x1234_5678usize, 9]);
        let at = local.as_ptr().addr();
        let mut stack = Stack::of_this_thread();
        assert_eq!(stack.read(at), Some(0x1234_5678));
        assert_eq!(stack.read(at + 8), Some(9));
        for bad in [0, 1, 4096, usize::MAX, usize::MAX - 7, 1 << 63, 1 << 47] {
            assert_eq!(stack.read(bad), None, "{bad:x}");
        }
        let heap = std::boxed::Box::new(77usize);
        assert_eq!(stack.read(core::ptr::from_ref(&*heap).addr()), Some(77), "as on another stack");
        assert_eq!(stack.read(at), Some(0x1234_5678), "and back");
    }

    #[test]
    fn a_guard_page_is_not_read() {
        let page = start::page_size();
        // SAFETY: a new mapping.
        let map = unsafe {
            let (rw, flags) =
                (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            libc::mmap(core::ptr::null_mut(), 2 * page, rw, flags, -1, 0)
        };
        // SAFETY: the second page of it.
        unsafe { libc::mprotect(map.wrapping_byte_add(page), page, libc::PROT_NONE) };
        let mut stack = Stack::of_this_thread();
        let at = map.expose_provenance();
        assert_eq!(stack.read(at + page - 8), Some(0));
        assert_eq!((stack.read(at + page - 4), stack.read(at + page)), (None, None));
        // SAFETY: nobody else uses it.
        unsafe { libc::munmap(map, 2 * page) };
    }

    #[test]
    fn the_own_stack_is_known_after_one_look() {
        std::thread::spawn(|| {
            let (low, high) = front::known_stack();
            assert_eq!((low, high), (0, 0));
            let _ = Stack::of_this_thread();
            let (low, high) = front::known_stack();
            assert!(low <= stack_pointer() && stack_pointer() < high);
            assert!(high > linux::thread_pointer());
        })
        .join()
        .unwrap();
    }
}
