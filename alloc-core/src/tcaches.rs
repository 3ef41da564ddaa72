//! Explicit caches (jemalloc's `tcache.create`): a program makes one and names it in its calls
//! (`MALLOCX_TCACHE`), one thread at a time. It holds blocks of one arena.
use crate::os::Errno;

/// `tcache.create`: a new cache's id. `EAGAIN`: there are too many, or no memory for it.
pub(crate) fn create() -> Result<u32, Errno> {
    Err(Errno(libc::EAGAIN))
}

/// `tcache.flush`: gives its blocks back. `EFAULT`: there is no such cache.
pub(crate) fn flush(id: u32) -> Result<(), Errno> {
    let _ = id;
    Err(Errno(libc::EFAULT))
}

/// `tcache.destroy`: the same, and the id may be used anew.
pub(crate) fn destroy(id: u32) -> Result<(), Errno> {
    let _ = id;
    Err(Errno(libc::EFAULT))
}
