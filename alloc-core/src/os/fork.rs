//! Fork handlers. They are put in place by a constructor: `pthread_atfork` takes a lock of libc's
//! and may allocate, so no allocation may wait for it. What they run is set when the allocator
//! starts, and may be set at any time.
use core::ffi::c_int;
use core::sync::atomic::{
    AtomicPtr,
    Ordering::{Acquire, Release},
};

/// What runs around a fork, all on the forking thread.
#[derive(Debug)]
pub(crate) struct Handlers {
    /// Before it.
    pub(crate) prepare: fn(),
    /// After it, in the parent.
    pub(crate) parent: fn(),
    /// After it, in the child.
    pub(crate) child: fn(),
}

static HANDLERS: AtomicPtr<Handlers> = AtomicPtr::new(core::ptr::null_mut());

/// Sets what runs around a fork. Where a fork is under way its later handlers run without the
/// first: they have to bear that.
pub(crate) fn register(handlers: &'static Handlers) {
    HANDLERS.store(core::ptr::from_ref(handlers).cast_mut(), Release);
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
    run(|handlers| handlers.child);
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
    use crate::os::linux;
    use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
    use std::process::Command;

    static CALLS: [AtomicU32; 3] = [const { AtomicU32::new(0) }; 3];
    static COUNTING: Handlers =
        Handlers { prepare: || count(0), parent: || count(1), child: || count(2) };

    fn count(which: usize) {
        CALLS[which].fetch_add(1, Relaxed);
    }

    fn calls() -> [u32; 3] {
        [0, 1, 2].map(|i| CALLS[i].load(Relaxed))
    }

    const ALONE: &str = "THERMALLOC_TEST_FORK_HANDLERS";

    /// In a process of its own: the other tests need the allocator's handlers.
    #[test]
    fn handlers_run_on_their_side() {
        if std::env::var_os(ALONE).is_none() {
            let child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "os::fork::tests::handlers_run_on_their_side"])
                .env(ALONE, "1")
                .output()
                .unwrap();
            let said = std::string::String::from_utf8_lossy(&child.stdout);
            assert!(child.status.success() && said.contains("1 passed"), "{said}");
            return;
        }
        register(&COUNTING);
        // SAFETY: the child makes system calls only.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            linux::exit_group(i32::from(calls() != [1, 0, 1]));
        }
        let mut status = -1;
        // SAFETY: `status` outlives the call.
        let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
        assert_eq!((waited, status), (pid, 0));
        assert_eq!(calls(), [1, 1, 0]);
    }
}
