//! The end of the line: one line on stderr by one `write(2)`, then an abort. Allocates nothing and
//! takes no lock, since whatever called it may hold any.
use crate::os::linux;

const HINT: &str = "the program has damaged its heap; AddressSanitizer or valgrind shows where";

/// Ends the process because of `what`, seen at `addr`.
#[cold]
#[inline(never)]
pub(crate) fn fatal(what: &str, addr: usize) -> ! {
    let mut line = Line::new();
    line.push(b"thermalloc: ");
    line.push(what.as_bytes());
    line.push(b": 0x");
    line.push_hex(addr);
    line.push(b": ");
    line.push(HINT.as_bytes());
    let _ = linux::write(2, line.finish());
    abort()
}

/// Ends the process with the line `thermalloc: {what}`.
#[cold]
pub(crate) fn end_with(what: &[u8]) -> ! {
    let mut line = Line::new();
    line.push(b"thermalloc: ");
    line.push(what);
    let _ = linux::write(2, line.finish());
    abort()
}

/// As libc's, but for the locks that it takes.
fn abort() -> ! {
    let kill = || {
        linux::unblock_signal(libc::SIGABRT);
        let _ = linux::tgkill(linux::getpid(), linux::gettid(), libc::SIGABRT);
    };
    kill();
    // Still here: it is ignored, or a handler came back.
    linux::default_action(libc::SIGABRT);
    kill();
    linux::exit_group(134)
}

/// A line that is cut off where it gets too long.
struct Line {
    bytes: [u8; 256],
    len: usize,
}

impl Line {
    fn new() -> Self {
        Self { bytes: [0; 256], len: 0 }
    }

    fn push(&mut self, bytes: &[u8]) {
        // The last byte is the newline's.
        let room = &mut self.bytes[self.len..255];
        let len = bytes.len().min(room.len());
        room[..len].copy_from_slice(&bytes[..len]);
        self.len += len;
    }

    fn push_hex(&mut self, value: usize) {
        let digits = (usize::BITS - value.leading_zeros()).div_ceil(4).max(1);
        for digit in (0..digits).rev() {
            self.push(&[b"0123456789abcdef"[value >> (4 * digit) & 15]]);
        }
    }

    fn finish(&mut self) -> &[u8] {
        self.bytes[self.len] = b'\n';
        &self.bytes[..=self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    #[test]
    fn lines() {
        let mut line = Line::new();
        line.push_hex(0);
        line.push(b" ");
        line.push_hex(0xdead_beef_0120);
        assert_eq!(line.finish(), b"0 deadbeef0120\n");
        line.push(&[b'x'; 1000]);
        assert_eq!(line.finish().len(), 256);
    }

    /// Not a test but for its own child.
    #[test]
    fn dies() {
        if let Ok(how) = std::env::var("THERMALLOC_TEST_DIES") {
            if how == "ignored" {
                // SAFETY: ignoring a signal runs no code.
                unsafe { libc::signal(libc::SIGABRT, libc::SIG_IGN) };
            }
            linux::block_signals();
            fatal("double free", 0x7f00_1230);
        }
        let me = std::env::current_exe().unwrap();
        for how in ["default", "ignored"] {
            let mut child = Command::new(&me);
            child
                .args(["fatal::tests::dies", "--exact", "--nocapture"])
                .env("THERMALLOC_TEST_DIES", how);
            let output = child.output().unwrap();
            assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{how}");
            let stderr = std::string::String::from_utf8(output.stderr).unwrap();
            let line = std::format!("thermalloc: double free: 0x7f001230: {HINT}\n");
            assert!(stderr.ends_with(&line), "{stderr}");
        }
    }
}
