//! Memory that crosses a process boundary: descriptors of physical memory, handles of `cuMemAlloc`.
//!
//! The bytes are in a file, so another process with the simulated driver sees them too. Races are
//! judged within a process only.

use thermalloc_cuda::driver::{MemHandle, code, constant};

use crate::memory::{Kind, Phys, Place};
use crate::state::{R, State};

fn inode(fd: i32) -> R<(u64, u64)> {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: room for a stat.
    if unsafe { libc::fstat(fd, stat.as_mut_ptr()) } != 0 {
        return Err(code::ERROR_INVALID_VALUE);
    }
    // SAFETY: written just now.
    let stat = unsafe { stat.assume_init() };
    Ok((stat.st_ino, stat.st_size as u64))
}

fn duplicate(fd: i32) -> R<i32> {
    // SAFETY: no memory is involved.
    let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3) };
    if copy < 0 { Err(code::ERROR_OPERATING_SYSTEM) } else { Ok(copy) }
}

fn pack(fields: [u64; 4]) -> [u8; 64] {
    let mut handle = [0; 64];
    for (bytes, field) in handle.chunks_mut(8).zip(fields) {
        bytes.copy_from_slice(&field.to_ne_bytes());
    }
    handle
}

fn unpack(handle: &[u8; 64]) -> [u64; 4] {
    let field = |index: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&handle[8 * index..8 * index + 8]);
        u64::from_ne_bytes(bytes)
    };
    [field(0), field(1), field(2), field(3)]
}

impl State {
    pub(crate) fn export_phys(&mut self, handle: MemHandle, kind: u32) -> R<i32> {
        let phys = self.phys.get(&handle).ok_or(code::ERROR_INVALID_VALUE)?;
        if kind != constant::MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || phys.handle_types & kind == 0
        {
            return Err(code::ERROR_INVALID_VALUE);
        }
        match phys.place {
            Place::File { fd, .. } => duplicate(fd),
            Place::Host { .. } => Err(code::ERROR_INVALID_VALUE),
        }
    }

    /// Memory that this process made is itself; other memory is a new handle to the same bytes.
    pub(crate) fn import_phys(&mut self, fd: i32) -> R<MemHandle> {
        let (node, len) = inode(fd)?;
        let own = self.phys.iter().find(|(_, phys)| match phys.place {
            Place::File { fd, .. } if fd != self.vram_fd => {
                inode(fd).is_ok_and(|found| found.0 == node)
            }
            _ => false,
        });
        if let Some(handle) = own.map(|(&handle, _)| handle) {
            if let Some(phys) = self.phys.get_mut(&handle) {
                phys.handles += 1;
            }
            return Ok(handle);
        }
        if len == 0 || len % self.config.granularity_bytes != 0 {
            return Err(code::ERROR_INVALID_VALUE);
        }
        let fd = duplicate(fd)?;
        self.own_fds.push(fd);
        let base = self.fresh_phys(len);
        let handle_types = constant::MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        let place = Place::File { fd, offset: 0 };
        Ok(self.add_phys(Phys {
            len,
            device: 0,
            base,
            place,
            handle_types,
            handles: 1,
            mappings: 0,
            imported: true,
        }))
    }

    /// The legacy handle: of plain memory only.
    pub(crate) fn ipc_export(&mut self, ptr: u64) -> R<[u8; 64]> {
        if self.config.mig {
            return Err(code::ERROR_NOT_SUPPORTED);
        }
        let (start, region) = self.region_at(ptr).ok_or(code::ERROR_INVALID_VALUE)?;
        let Place::File { fd, offset } = region.place else {
            return Err(code::ERROR_INVALID_VALUE);
        };
        if region.kind != Kind::Device || start != ptr {
            return Err(code::ERROR_INVALID_VALUE);
        }
        Ok(pack([u64::from(std::process::id()), fd as u64, offset, region.len]))
    }

    /// A file of its own for memory that another process may open.
    pub(crate) fn own_file(&mut self) -> R<i32> {
        let fd = crate::memory::memfd()?;
        self.own_fds.push(fd);
        Ok(fd)
    }

    pub(crate) fn export_pool(&mut self, pool: usize, kind: u32) -> R<i32> {
        let pool = self.pool_mut(pool)?;
        if kind != constant::MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || pool.handle_types & kind == 0
        {
            return Err(code::ERROR_INVALID_VALUE);
        }
        duplicate(pool.fd)
    }

    pub(crate) fn import_pool(&mut self, device: u32, fd: i32) -> R<usize> {
        inode(fd)?;
        let fd = duplicate(fd)?;
        self.own_fds.push(fd);
        let made = self.new_pool(device, 0, fd);
        self.pool_mut(made)?.imported = true;
        Ok(made)
    }

    pub(crate) fn export_block(&mut self, ptr: u64) -> R<[u8; 64]> {
        let (start, region) = self.region_at(ptr).ok_or(code::ERROR_INVALID_VALUE)?;
        let (Kind::PoolBlock(pool), Place::File { offset, .. }) = (region.kind, region.place)
        else {
            return Err(code::ERROR_INVALID_VALUE);
        };
        let (len, offset) = (region.len, offset + (ptr - start));
        if self.pool_mut(pool)?.handle_types == 0 {
            return Err(code::ERROR_INVALID_VALUE);
        }
        Ok(pack([offset, len - (ptr - start), 0, 0]))
    }

    pub(crate) fn import_block(&mut self, pool: usize, data: &[u8; 64]) -> R<u64> {
        let found = self.pool_mut(pool)?;
        if !found.imported {
            return Err(code::ERROR_INVALID_VALUE);
        }
        let (device, fd) = (found.device, found.fd);
        let [offset, len, ..] = unpack(data);
        if len == 0 {
            return Err(code::ERROR_INVALID_VALUE);
        }
        let at =
            self.arena.alloc(Self::alloc_charge(len), 2 << 20).ok_or(code::ERROR_OUT_OF_MEMORY)?;
        self.add_region(at, len, Kind::Imported, device, Some(Place::File { fd, offset }));
        Ok(at)
    }

    pub(crate) fn ipc_open(&mut self, device: u32, handle: &[u8; 64]) -> R<u64> {
        let [pid, fd, offset, len] = unpack(handle);
        if pid == u64::from(std::process::id()) {
            return Err(code::ERROR_INVALID_CONTEXT);
        }
        let path = std::ffi::CString::new(format!("/proc/{pid}/fd/{fd}"))
            .map_err(|_| code::ERROR_INVALID_VALUE)?;
        // SAFETY: a C string.
        let fd = unsafe { libc::open(path.as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
        if fd < 0 || len == 0 {
            return Err(code::ERROR_MAP_FAILED);
        }
        self.own_fds.push(fd);
        let charge = Self::alloc_charge(len);
        let at = self.arena.alloc(charge, 2 << 20).ok_or(code::ERROR_OUT_OF_MEMORY)?;
        self.add_region(at, len, Kind::Imported, device, Some(Place::File { fd, offset }));
        Ok(at)
    }
}
