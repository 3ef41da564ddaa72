//! Call stacks, from inside `malloc`: no allocation, no lock, no loader, and no read of memory that may
//! not be there.
//!
//! A frame is left by its module's call frame information (`cfi`), whose outcome is kept in a cache
//! by return address; where there is no module (generated code), by the frame pointer. A walk ends
//! where a function says that it has no caller, where frames don't go upwards, and after
//! [`MOST_FRAMES`]. On AArch64 the frame pointers alone are followed, which its ABI asks for.

#[cfg(target_arch = "x86_64")]
mod cfi;
#[cfg(target_arch = "x86_64")]
mod modules;
pub(super) mod stack;
#[cfg(target_arch = "x86_64")]
mod x86_64;

pub(crate) use super::sites::MOST_FRAMES;
use super::sites::{BROKEN, CUT};
use stack::Stack;

/// Where a frame is: what is needed to find its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) pc: usize,
    pub(crate) sp: usize,
    pub(crate) fp: usize,
    /// `pc` is the next instruction of a frame that was interrupted, not one after a call.
    pub(crate) exact: bool,
}

/// What a frame's caller is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Caller {
    Frame(Frame),
    /// There is none.
    End,
    /// It can't be found.
    Unknown,
}

/// Return addresses from the caller of this function outwards, leaf first: their number and the
/// flags of the site.
#[inline(never)]
pub(crate) fn capture(out: &mut [u64; MOST_FRAMES]) -> (usize, u32) {
    walk(here(), &mut Stack::of_this_thread(), out)
}

/// Makes what a walk needs, outside of any block's path; false where there is no memory for it.
pub(crate) fn prepare() -> bool {
    #[cfg(target_arch = "x86_64")]
    return x86_64::prepare();
    #[cfg(target_arch = "aarch64")]
    true
}

/// Says that modules may have come or gone: what the cache knows may be of others.
pub(crate) fn modules_changed() {
    #[cfg(target_arch = "x86_64")]
    x86_64::modules_changed();
}

fn walk(mut frame: Frame, stack: &mut Stack, out: &mut [u64; MOST_FRAMES]) -> (usize, u32) {
    let mut len = 0;
    loop {
        let caller = match caller(frame, stack) {
            Caller::Frame(caller) => caller,
            Caller::End => return (len, 0),
            Caller::Unknown => return (len, BROKEN),
        };
        let Some(slot) = out.get_mut(len) else { return (len, CUT) };
        *slot = caller.pc as u64;
        len += 1;
        frame = caller;
    }
}

#[cfg(target_arch = "x86_64")]
use x86_64::{caller, here};

/// The frame of the function that this is part of.
#[cfg(target_arch = "aarch64")]
#[inline(always)]
fn here() -> Frame {
    let (fp, sp): (usize, usize);
    // SAFETY: reads registers.
    unsafe {
        core::arch::asm!("mov {}, x29", "mov {}, sp", out(reg) fp, out(reg) sp, options(nomem, nostack, preserves_flags));
    }
    Frame { pc: 1, sp, fp, exact: true }
}

#[cfg(target_arch = "aarch64")]
fn caller(frame: Frame, stack: &mut Stack) -> Caller {
    by_frame_pointer(frame, stack)
}

/// The caller by the frame record that the frame pointer points to: the caller's frame pointer and the
/// return address.
fn by_frame_pointer(frame: Frame, stack: &mut Stack) -> Caller {
    if frame.fp == 0 {
        return Caller::End;
    }
    if frame.fp < frame.sp || !frame.fp.is_multiple_of(8) {
        return Caller::Unknown;
    }
    let (Some(fp), Some(pc)) = (stack.read(frame.fp), stack.read(frame.fp + 8)) else {
        return Caller::Unknown;
    };
    // A return address of 0 is how the first frame of a thread looks.
    if pc == 0 {
        return Caller::End;
    }
    Caller::Frame(Frame { pc, sp: frame.fp + 16, fp, exact: false })
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "small numbers")]
mod tests {
    use super::*;
    use std::vec::Vec;

    unsafe extern "C" {
        fn backtrace(
            buffer: *mut *mut core::ffi::c_void,
            size: core::ffi::c_int,
        ) -> core::ffi::c_int;
    }

    /// Our stack, that of the C library, and our flags.
    type Both = (Vec<u64>, Vec<u64>, u32);

    /// The stack by both unwinders, from one frame.
    #[inline(never)]
    fn both() -> Both {
        prepare();
        let mut ours = [0; MOST_FRAMES];
        let mut theirs = [core::ptr::null_mut(); MOST_FRAMES];
        let (len, flags) = capture(&mut ours);
        // SAFETY: the buffer has that many places.
        let n = unsafe { backtrace(theirs.as_mut_ptr(), MOST_FRAMES as i32) };
        let theirs = theirs[..n as usize].iter().map(|p| p.addr() as u64).collect();
        (ours[..len].to_vec(), theirs, flags)
    }

    /// The first frame of both lies in the same function at different calls.
    fn assert_same((ours, theirs, flags): Both) {
        assert_eq!(flags, 0);
        assert_eq!(ours[1..], theirs[1..], "{ours:x?}\n{theirs:x?}");
        assert!(ours[0].abs_diff(theirs[0]) < 4096);
    }

    #[inline(never)]
    fn deep(levels: usize, at_the_end: &mut dyn FnMut()) {
        let local = core::hint::black_box([levels; 9]);
        if local[3] == 0 {
            at_the_end()
        } else {
            deep(local[4] - 1, at_the_end)
        }
        core::hint::black_box(&local);
    }

    #[test]
    fn stacks_are_those_of_the_c_library() {
        assert_same(both());
        for levels in [0, 1, 30, 80] {
            deep(levels, &mut || assert_same(both()));
        }
        std::thread::spawn(|| deep(10, &mut || assert_same(both()))).join().unwrap();
    }

    #[test]
    fn a_stack_that_is_too_deep_is_cut() {
        deep(400, &mut || {
            let (ours, theirs, flags) = both();
            assert_eq!((ours.len(), flags), (MOST_FRAMES, CUT));
            assert_eq!(ours[1..], theirs[1..]);
        });
    }

    extern "C" fn compare(
        a: *const core::ffi::c_void,
        b: *const core::ffi::c_void,
    ) -> core::ffi::c_int {
        assert_same(both());
        // SAFETY: `qsort` passes elements of the array.
        let [a, b] = [a, b].map(|at| unsafe { *at.cast::<i32>() });
        a - b
    }

    #[test]
    fn through_the_c_library() {
        let mut values = [3i32, 1, 2];
        // SAFETY: three elements of four bytes.
        unsafe { libc::qsort(values.as_mut_ptr().cast(), 3, 4, Some(compare)) };
        assert_eq!(values, [1, 2, 3]);
    }

    static IN_HANDLER: std::sync::Mutex<Option<Both>> = std::sync::Mutex::new(None);

    extern "C" fn on_signal(_: i32) {
        *IN_HANDLER.lock().unwrap() = Some(both());
    }

    fn raise_with(flags: i32) {
        // SAFETY: an action of zeros is the default one.
        let mut action: libc::sigaction = unsafe { core::mem::zeroed() };
        action.sa_sigaction = on_signal as extern "C" fn(i32) as usize;
        action.sa_flags = flags;
        // SAFETY: the handler does what it may where `raise` was called.
        unsafe { libc::sigaction(libc::SIGUSR2, &raw const action, core::ptr::null_mut()) };
        // SAFETY: as above.
        deep(5, &mut || assert_eq!(unsafe { libc::raise(libc::SIGUSR2) }, 0));
        assert_same(IN_HANDLER.lock().unwrap().take().unwrap());
    }

    #[test]
    fn through_signal_frames() {
        raise_with(0);
        let mut alternative = std::vec![0u8; 256 << 10];
        let stack = libc::stack_t {
            ss_sp: alternative.as_mut_ptr().cast(),
            ss_flags: 0,
            ss_size: alternative.len(),
        };
        // SAFETY: the memory outlives its use, which ends below.
        unsafe { libc::sigaltstack(&raw const stack, core::ptr::null_mut()) };
        raise_with(libc::SA_ONSTACK);
        let none = libc::stack_t { ss_flags: libc::SS_DISABLE, ..stack };
        // SAFETY: no handler runs on it any more.
        unsafe { libc::sigaltstack(&raw const none, core::ptr::null_mut()) };
    }

    #[test]
    fn nonsense_ends_the_walk() {
        let mut out = [0; MOST_FRAMES];
        let mut stack = Stack::of_this_thread();
        let words = [usize::MAX, 0, 8, 16, 0xDEAD_0000, 4096, 1 << 47];
        for pc in words {
            for sp in words {
                for fp in words {
                    let (len, _) = walk(Frame { pc, sp, fp, exact: true }, &mut stack, &mut out);
                    assert_eq!(len, 0);
                }
            }
        }
        // A stack of random words below the real one's registers.
        let mut random = 1u64;
        let noise: Vec<u64> = (0..4096)
            .map(|_| {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                [random >> 17, walk as *const () as u64 + random % 4096][random as usize >> 9 & 1]
            })
            .collect();
        let base = noise.as_ptr().addr();
        for i in 0..2000 {
            let frame = Frame {
                pc: walk as *const () as usize + i * 7,
                sp: base + i * 8,
                fp: base + i * 8 + 64,
                exact: i % 2 == 0,
            };
            walk(frame, &mut stack, &mut out);
        }
    }
}
