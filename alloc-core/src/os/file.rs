//! Files that the library writes: opened for each write and closed, so that no descriptor is kept.
use core::cell::Cell;
use core::ffi::CStr;

use super::{Errno, linux};

/// An open file, to be appended to.
#[derive(Debug)]
pub(crate) struct File {
    descriptor: i32,
    /// Written through this one, and the most that may be.
    written: Cell<u64>,
    most: u64,
}

impl File {
    /// Opens `path`, which is made, or made empty, if it is to be begun `anew`.
    pub(crate) fn open(path: &CStr, anew: bool) -> Result<Self, Errno> {
        let descriptor = linux::open_append(path, anew)?;
        Ok(Self { descriptor, written: Cell::new(0), most: u64::MAX })
    }

    /// It is to have at most `bytes`: a write beyond is refused with `EDQUOT`.
    pub(crate) fn at_most(mut self, bytes: u64) -> Self {
        self.most = bytes;
        self
    }

    /// Bytes written.
    pub(crate) fn written(&self) -> u64 {
        self.written.get()
    }

    /// Writes all of `bytes`.
    pub(crate) fn write(&self, mut bytes: &[u8]) -> Result<(), Errno> {
        let written = self.written.get() + bytes.len() as u64;
        if written > self.most {
            return Err(Errno(libc::EDQUOT));
        }
        self.written.set(written);
        while !bytes.is_empty() {
            match linux::write(self.descriptor, bytes) {
                Ok(0) => return Err(Errno(libc::ENOSPC)),
                Ok(done) => bytes = &bytes[done..],
                Err(Errno(libc::EINTR)) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }
}

impl Drop for File {
    fn drop(&mut self) {
        linux::close(self.descriptor);
    }
}
