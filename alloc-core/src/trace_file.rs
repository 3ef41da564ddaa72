//! The file of the option `trace_file`: what the page layer recorded, as lines of text that the
//! policy lab reads (`lab/src/trace.rs` has the format). The background thread opens the file,
//! appends and closes it, so that no descriptor is kept; what happens in the last quarter of a second
//! of a process is not written.
//!
//! A fork's child records nothing: the file is its parent's.
use core::ffi::CStr;

use crate::background;
use crate::control::options::{self, TEXT_BYTES};
use crate::control::text::Line;
use crate::extent::page_map::LG_PAGE;
use crate::extent::trace::{self, Event, Kind};
use crate::os::file::File;
use crate::os::{Errno, linux};
use crate::sync::atomic::{AtomicBool, Ordering};

/// What one write holds.
const CHUNK_BYTES: usize = 4096;
/// The longest line.
const LINE_BYTES: usize = 80;
/// Room for a path in which each `%p` has become ten digits.
pub(crate) const PATH_BYTES: usize = 6 * TEXT_BYTES;

/// Somebody empties the ring.
static WRITING: AtomicBool = AtomicBool::new(false);

/// Makes the file and begins to record, where the option asks for it. Called once, when the options
/// have been read; `report` gets a line where the file can't be made.
pub(crate) fn start(report: impl FnOnce(&[u8])) {
    let path = options::trace_file();
    if path.as_bytes().is_empty() {
        return;
    }
    let header =
        concat!("thermalloc-trace 1\n# recorded by thermalloc ", env!("CARGO_PKG_VERSION"), "\n");
    if let Err(Errno(errno)) = open(true).and_then(|file| file.write(header.as_bytes())) {
        let mut line = Line::<128>::new();
        line.str("thermalloc: option trace_file: \"").excerpt(path.as_bytes(), 40);
        line.str("\" can't be written (errno ").signed(errno.into()).str("): nothing is recorded");
        report(line.end().as_bytes());
        return;
    }
    trace::start();
    background::want();
}

/// Ends the recording, in a fork's child.
pub(crate) fn forget() {
    trace::stop();
}

/// Appends what was recorded since the last time. Called with no lock held.
pub(crate) fn write_out() {
    if !trace::on() || trace::is_empty() || WRITING.swap(true, Ordering::Acquire) {
        return;
    }
    if open(false).and_then(|file| append(&file)).is_err() {
        trace::stop();
    }
    WRITING.store(false, Ordering::Release);
}

fn append(file: &File) -> Result<(), Errno> {
    let mut chunk = Line::<CHUNK_BYTES>::new();
    let mut result = Ok(());
    let dropped = trace::take(|event| {
        if chunk.as_bytes().len() > CHUNK_BYTES - LINE_BYTES {
            result = result.and_then(|()| file.write(chunk.as_bytes()));
            chunk.clear();
        }
        add_line(&mut chunk, event);
    });
    result?;
    file.write(chunk.as_bytes())?;
    if dropped > 0 {
        chunk.clear();
        chunk.str("d ").unsigned(dropped).str("\n");
        file.write(chunk.as_bytes())?;
    }
    Ok(())
}

fn add_line<const N: usize>(line: &mut Line<N>, event: Event) {
    let letter = match event.kind {
        Kind::Alloc => "a ",
        Kind::Free => "f ",
        Kind::Resize => "r ",
    };
    line.str(letter).unsigned(event.at_us).str(" ").unsigned(event.page.into());
    if event.kind != Kind::Free {
        line.str(" ").unsigned(u64::from(event.pages) << LG_PAGE);
    }
    line.str("\n");
}

fn open(anew: bool) -> Result<File, Errno> {
    let mut line = Line::new();
    let path = expanded(options::trace_file().as_bytes(), &mut line).ok_or(Errno(libc::EINVAL))?;
    File::open(path, anew)
}

/// The path that an option gives, in `line`; `None` where it gives none.
pub(crate) fn expanded<'a>(option: &[u8], line: &'a mut Line<PATH_BYTES>) -> Option<&'a CStr> {
    if option.is_empty() {
        return None;
    }
    expand(option, linux::getpid(), line);
    line.bytes(b"\0");
    CStr::from_bytes_with_nul(line.as_bytes()).ok()
}

/// `path` with the process id for each `%p`.
fn expand<const N: usize>(path: &[u8], pid: i32, line: &mut Line<N>) {
    let mut rest = path;
    while let Some((first, after)) = rest.split_first() {
        if let Some(after) = rest.strip_prefix(b"%p") {
            line.signed(pid.into());
            rest = after;
        } else {
            line.bytes(&[*first]);
            rest = after;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_pid(path: &str) -> std::string::String {
        let mut line = Line::<PATH_BYTES>::new();
        expand(path.as_bytes(), i32::MAX, &mut line);
        std::string::String::from_utf8(line.as_bytes().to_vec()).unwrap()
    }

    #[test]
    fn the_process_id_has_its_place_in_a_path() {
        assert_eq!(with_pid("/tmp/a"), "/tmp/a");
        assert_eq!(with_pid("/%p/t%%p.%"), "/2147483647/t%2147483647.%");
        let most = "%p".repeat(TEXT_BYTES / 2);
        assert_eq!(with_pid(&most).len(), TEXT_BYTES / 2 * 10, "and is not cut");
    }

    #[test]
    fn the_longest_line_fits() {
        let mut line = Line::<200>::new();
        add_line(
            &mut line,
            Event { kind: Kind::Resize, at_us: u64::MAX, page: u32::MAX, pages: u32::MAX },
        );
        assert_eq!(line.as_bytes(), b"r 18446744073709551615 4294967295 17592186040320\n");
        assert!(line.as_bytes().len() <= LINE_BYTES);
        line.clear();
        add_line(&mut line, Event { kind: Kind::Free, at_us: 5, page: 7, pages: 9 });
        assert_eq!(line.as_bytes(), b"f 5 7\n");
    }
}
