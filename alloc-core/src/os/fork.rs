//! Fork handlers. They are put in place by a constructor: `pthread_atfork` takes a lock of libc's
//! and may allocate, so no allocation may wait for it. What they run is set when the allocator
//! starts, and may be set at any time.
use core::ffi::c_int;
use core::sync::atomic::{
    AtomicI32, AtomicPtr, AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};

use super::linux;

/// What runs around a fork, all on the forking thread.
#[derive(Debug)]
pub(crate) struct Handlers {
    /// Before it.
    pub(crate) prepare: fn(),
    /// After it, in the parent.
    pub(crate) parent: fn(),
    /// After it, in the child, whose pid [`pid`] still shows as the parent's.
    pub(crate) child: fn(),
}

static HANDLERS: AtomicPtr<Handlers> = AtomicPtr::new(core::ptr::null_mut());
static PID: AtomicI32 = AtomicI32::new(0);
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// Sets what runs around a fork. Where a fork is under way its later handlers run without the
/// first: they have to bear that.
pub(crate) fn register(handlers: &'static Handlers) {
    PID.store(linux::getpid(), Relaxed);
    HANDLERS.store(core::ptr::from_ref(handlers).cast_mut(), Release);
}

/// The process that the allocator's state belongs to: it differs from `getpid` in a child that
/// came to be without the handlers (`vfork`, `_Fork`, a bare clone).
pub(crate) fn pid() -> i32 {
    PID.load(Relaxed)
}

/// Counts the forks between the first process and this one; counted up before `child` runs.
pub(crate) fn generation() -> u32 {
    GENERATION.load(Relaxed)
}

fn run(handler: impl FnOnce(&Handlers) -> fn()) {
    // SAFETY: null, or set by `register` from a `'static` reference.
    if let Some(handlers) = unsafe { HANDLERS.load(Acquire).as_ref() } {
        handler(handlers)();
    }
}

extern "C" fn prepare() {
    run(|handlers| handlers.prepare);
}

extern "C" fn parent() {
    run(|handlers| handlers.parent);
}

extern "C" fn child() {
    GENERATION.fetch_add(1, Relaxed);
    run(|handlers| handlers.child);
    PID.store(linux::getpid(), Relaxed);
}

unsafe extern "C" {
    fn pthread_atfork(
        prepare: Option<extern "C" fn()>,
        parent: Option<extern "C" fn()>,
        child: Option<extern "C" fn()>,
    ) -> c_int;
}

extern "C" fn install() {
    // SAFETY: the handlers stay, and are callable on any thread. Without them (no memory) a fork
    // of a program with threads is what it is without an allocator that knows of forks.
    let _ = unsafe { pthread_atfork(Some(prepare), Some(parent), Some(child)) };
}

#[used]
// SAFETY: the section holds pointers to functions that take argc, argv and envp or less.
#[unsafe(link_section = ".init_array")]
static INSTALL: extern "C" fn() = install;

#[cfg(test)]
mod tests {
    use super::*;

    static CALLS: [AtomicU32; 3] = [const { AtomicU32::new(0) }; 3];

    static COUNTING: Handlers = Handlers {
        prepare: || count(0),
        parent: || count(1),
        child: || {
            assert_ne!(pid(), linux::getpid());
            count(2);
        },
    };

    fn count(which: usize) {
        CALLS[which].fetch_add(1, Relaxed);
    }

    fn calls() -> [u32; 3] {
        [0, 1, 2].map(|i| CALLS[i].load(Relaxed))
    }

    #[test]
    fn handlers_run_on_their_side() {
        register(&COUNTING);
        let (home, generation_before, before) = (pid(), generation(), calls());
        assert_eq!(home, linux::getpid());
        // SAFETY: the child makes system calls only.
        let pid_seen = unsafe { libc::fork() };
        if pid_seen == 0 {
            let as_expected = calls()[1] == before[1]
                && calls()[2] == before[2] + 1
                && pid() == linux::getpid()
                && generation() == generation_before + 1;
            linux::exit_group(if as_expected { 0 } else { 1 });
        }
        let mut status = -1;
        // SAFETY: `status` outlives the call.
        let waited = unsafe { libc::waitpid(pid_seen, &raw mut status, 0) };
        assert_eq!(waited, pid_seen);
        assert_eq!(status, 0);
        // Other tests fork too.
        assert!(calls()[0] > before[0] && calls()[1] > before[1]);
        assert_eq!((calls()[2], pid(), generation()), (before[2], home, generation_before));
    }
}
