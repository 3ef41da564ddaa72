//! Passes on the disposition of SIGPIPE that the tool was started with.
//!
//! Rust's start-up ignores SIGPIPE and its exec sets it to the default, either of which may differ
//! from what the parent chose: a service manager that starts services with it ignored expects them
//! to survive a closed socket. So it is noted before Rust starts and restored last.
use std::io;
use std::mem;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

static IGNORED_AT_START: AtomicBool = AtomicBool::new(false);

#[used]
// SAFETY: the loader calls each entry of this section once before `main`; `note` is such a function.
#[unsafe(link_section = ".init_array")]
static NOTE: extern "C" fn() = note;

extern "C" fn note() {
    // SAFETY: all zeroes is a valid sigaction.
    let mut action: libc::sigaction = unsafe { mem::zeroed() };
    // SAFETY: a null new action only queries; `action` is valid for the write.
    let rc = unsafe { libc::sigaction(libc::SIGPIPE, ptr::null(), &raw mut action) };
    let ignored = rc == 0 && action.sa_sigaction == libc::SIG_IGN;
    IGNORED_AT_START.store(ignored, Ordering::Relaxed);
}

/// Replaces this process by `command`; comes back only with an error.
pub(crate) fn exec(command: &mut Command) -> io::Error {
    if IGNORED_AT_START.load(Ordering::Relaxed) {
        let restore = || {
            // SAFETY: ignoring a signal installs no handler.
            unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
            Ok(())
        };
        // SAFETY: no fork precedes this exec, and `signal` is async-signal-safe in any case.
        unsafe { command.pre_exec(restore) };
    }
    command.exec()
}
