//! Files that the library writes: opened for each write and closed, so that no descriptor is kept.
use core::ffi::CStr;

use super::{Errno, linux};

/// An open file, to be appended to.
#[derive(Debug)]
pub(crate) struct File(i32);

impl File {
    /// Opens `path`, which is made, or made empty, if it is to be begun `anew`.
    pub(crate) fn open(path: &CStr, anew: bool) -> Result<Self, Errno> {
        linux::open_append(path, anew).map(Self)
    }

    /// Writes all of `bytes`.
    pub(crate) fn write(&self, mut bytes: &[u8]) -> Result<(), Errno> {
        while !bytes.is_empty() {
            match linux::write(self.0, bytes) {
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
        linux::close(self.0);
    }
}
