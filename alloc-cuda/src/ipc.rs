//! Memory for other processes. Virtual memory travels as file descriptors, one for each chunk, and
//! never as a legacy handle; `cuMemAlloc`'s as a legacy handle; the driver's pool not at all.

use crate::driver::{Driver, Error, IpcMemHandle, constant};
use crate::gpu::Backing;
use crate::heap::CHUNK;
use crate::pool::Pool;
use std::fmt;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// A block on its way to another process.
#[derive(Debug)]
pub enum Export {
    /// Chunks of 2 MiB; the block begins `offset` bytes into the first.
    Fds {
        /// A descriptor for each chunk, to be sent over a Unix socket.
        fds: Vec<OwnedFd>,
        /// Where the block begins.
        offset: u64,
        /// Its size.
        bytes: u64,
    },
    /// A handle of `cuIpcGetMemHandle`.
    Legacy {
        /// The handle of the whole segment.
        handle: IpcMemHandle,
        /// Where the block begins.
        offset: u64,
        /// Its size.
        bytes: u64,
    },
}

/// Why a block cannot travel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ExportError {
    /// No block in use starts there.
    NotABlock,
    /// This backing has no way to it.
    Backing {
        /// The backing.
        backing: Backing,
        /// What would do.
        hint: &'static str,
    },
    /// The driver failed.
    Driver(Error),
}

impl fmt::Display for ExportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotABlock => {
                f.write_str("thermalloc: export of device memory: no block in use starts there")
            }
            Self::Backing { backing, hint } => write!(
                f,
                "thermalloc: export of device memory: a block of {backing} cannot be exported: hint: {hint}"
            ),
            Self::Driver(error) => write!(f, "thermalloc: export of device memory: {error}"),
        }
    }
}

impl std::error::Error for ExportError {}

impl From<Error> for ExportError {
    fn from(error: Error) -> Self {
        Self::Driver(error)
    }
}

/// Another process's block, mapped here until it is dropped.
#[derive(Debug)]
pub struct Imported {
    pool: Pool,
    base: u64,
    ptr: u64,
    bytes: u64,
    handles: Vec<u64>,
}

impl Imported {
    /// The address here.
    pub fn ptr(&self) -> u64 {
        self.ptr
    }

    /// The block's size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Pool {
    /// Makes a block in use reachable for other processes, by the way that its backing has.
    ///
    /// # Errors
    /// No block starts there, or its backing has no way.
    pub fn export(&self, ptr: u64) -> Result<Export, ExportError> {
        let (_, bytes, _) = self.block_at(ptr).ok_or(ExportError::NotABlock)?;
        let (shard, region) = self.inner.owner(ptr).ok_or(ExportError::NotABlock)?;
        let backing = self.backing();
        match backing {
            Backing::Virtual => {
                if !self.inner.gpu.exports_fds() {
                    let hint = "the device does not export file descriptors: use Backing::Plain";
                    return Err(ExportError::Backing { backing, hint });
                }
                let (handles, offset) = shard.heap().handles_of(region, ptr, bytes);
                let fds: Result<_, Error> =
                    handles.into_iter().map(|handle| export_fd(self.driver(), handle)).collect();
                Ok(Export::Fds { fds: fds?, offset, bytes })
            }
            Backing::Plain => {
                let base = shard.heap().segment_base(region).ok_or(ExportError::NotABlock)?;
                let _current = self.inner.gpu.enter()?;
                let mut handle = IpcMemHandle([0; 64]);
                // SAFETY: a valid place to write to, and a live allocation.
                unsafe { self.driver().ipc_get_mem_handle(&raw mut handle, base) }?;
                Ok(Export::Legacy { handle, offset: ptr - base, bytes })
            }
            Backing::DriverPool => {
                let hint = "use Backing::Virtual for file descriptors or Backing::Plain for legacy handles";
                Err(ExportError::Backing { backing, hint })
            }
        }
    }

    /// The legacy handle of a block and its offset within it.
    ///
    /// # Errors
    /// The backing has none: virtual memory never does.
    pub fn legacy_handle(&self, ptr: u64) -> Result<(IpcMemHandle, u64), ExportError> {
        let backing = self.backing();
        if backing != Backing::Plain {
            let hint = "legacy handles are of cuMemAlloc only: send the file descriptors of export, or use Backing::Plain";
            return Err(ExportError::Backing { backing, hint });
        }
        match self.export(ptr)? {
            Export::Legacy { handle, offset, .. } => Ok((handle, offset)),
            Export::Fds { .. } => Err(ExportError::NotABlock),
        }
    }

    /// Maps another process's block.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn import(&self, export: &Export) -> Result<Imported, Error> {
        let gpu = &self.inner.gpu;
        let _current = gpu.enter()?;
        match export {
            Export::Fds { fds, offset, bytes } => {
                let mut handles = Vec::new();
                for fd in fds {
                    match import_fd(&gpu.driver, fd) {
                        Ok(handle) => handles.push(handle),
                        Err(error) => {
                            handles.into_iter().for_each(|handle| gpu.release(handle));
                            return Err(error);
                        }
                    }
                }
                let span = handles.len() as u64 * CHUNK;
                let mapped = gpu.reserve(span).and_then(|base| {
                    let done = gpu.map(base, &handles).map(|()| base);
                    done.inspect_err(|_| gpu.unreserve(base, span))
                });
                match mapped {
                    Ok(base) => Ok(Imported {
                        pool: self.clone(),
                        base,
                        ptr: base + offset,
                        bytes: *bytes,
                        handles,
                    }),
                    Err(error) => {
                        handles.into_iter().for_each(|handle| gpu.release(handle));
                        Err(error)
                    }
                }
            }
            Export::Legacy { handle, offset, bytes } => {
                let mut base = 0;
                let flags = constant::IPC_MEM_LAZY_ENABLE_PEER_ACCESS;
                // SAFETY: a valid place to write to.
                unsafe { gpu.driver.ipc_open_mem_handle(&raw mut base, *handle, flags) }?;
                Ok(Imported {
                    pool: self.clone(),
                    base,
                    ptr: base + offset,
                    bytes: *bytes,
                    handles: Vec::new(),
                })
            }
        }
    }
}

fn export_fd(driver: &Driver, handle: u64) -> Result<OwnedFd, Error> {
    let mut fd: i32 = -1;
    let kind = constant::MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    // SAFETY: a valid place to write a descriptor to, and a live handle.
    unsafe { driver.mem_export_to_shareable_handle((&raw mut fd).cast(), handle, kind, 0) }?;
    // SAFETY: the driver made it for the caller.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn import_fd(driver: &Driver, fd: &OwnedFd) -> Result<u64, Error> {
    let mut handle = 0;
    let kind = constant::MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    let number = fd.as_raw_fd() as usize;
    let number = std::ptr::without_provenance_mut(number);
    // SAFETY: a valid place to write to; the descriptor is passed by value.
    unsafe { driver.mem_import_from_shareable_handle(&raw mut handle, number, kind) }?;
    Ok(handle)
}

impl Drop for Imported {
    fn drop(&mut self) {
        let gpu = &self.pool.inner.gpu;
        // Unmapping is not ordered with streams.
        if gpu.synchronize().is_err() {
            return;
        }
        let Ok(_current) = gpu.enter() else { return };
        if self.handles.is_empty() {
            // SAFETY: it was opened here and nobody uses it.
            let _ = unsafe { gpu.driver.ipc_close_mem_handle(self.base) };
            return;
        }
        let chunks = self.handles.len() as u64;
        gpu.unmap(self.base, chunks);
        gpu.unreserve(self.base, chunks * CHUNK);
        self.handles.iter().for_each(|&handle| gpu.release(handle));
    }
}
