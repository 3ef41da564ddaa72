//! Addresses: ranges handed out of one reservation of the process, so that a device address is never
//! that of host memory.

use std::collections::BTreeMap;

/// Free ranges, lowest first.
pub(crate) struct Arena {
    base: u64,
    len: u64,
    free: BTreeMap<u64, u64>,
}

const ARENA_BYTES: u64 = 1 << 42;

impl Arena {
    pub(crate) fn new() -> Result<Self, u32> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let mut len = ARENA_BYTES;
        while len >= 1 << 36 {
            // SAFETY: a fresh reservation that is never accessed.
            let base = unsafe {
                libc::mmap(std::ptr::null_mut(), len as usize, libc::PROT_NONE, flags, -1, 0)
            };
            if base != libc::MAP_FAILED {
                let base = base as u64;
                return Ok(Self { base, len, free: BTreeMap::from([(base, len)]) });
            }
            len /= 4;
        }
        Err(thermalloc_cuda::driver::code::ERROR_OPERATING_SYSTEM)
    }

    pub(crate) fn alloc(&mut self, bytes: u64, align: u64) -> Option<u64> {
        let (start, len, at) = self.free.iter().find_map(|(&start, &len)| {
            let at = start.next_multiple_of(align);
            (at.checked_add(bytes)? <= start + len).then_some((start, len, at))
        })?;
        self.take(start, len, at, bytes);
        Some(at)
    }

    /// A range at a given place, if that is free.
    pub(crate) fn alloc_at(&mut self, at: u64, bytes: u64) -> bool {
        let Some((&start, &len)) = self.free.range(..=at).next_back() else {
            return false;
        };
        if at.checked_add(bytes).is_none_or(|end| end > start + len) {
            return false;
        }
        self.take(start, len, at, bytes);
        true
    }

    fn take(&mut self, start: u64, len: u64, at: u64, bytes: u64) {
        self.free.remove(&start);
        if at > start {
            self.free.insert(start, at - start);
        }
        if at + bytes < start + len {
            self.free.insert(at + bytes, start + len - at - bytes);
        }
    }

    pub(crate) fn free(&mut self, mut at: u64, mut bytes: u64) {
        if let Some((&before, &len)) = self.free.range(..at).next_back()
            && before + len == at
        {
            self.free.remove(&before);
            at = before;
            bytes += len;
        }
        if let Some(after) = self.free.remove(&(at + bytes)) {
            bytes += after;
        }
        self.free.insert(at, bytes);
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: our own reservation, and nothing in it was ever accessible.
        unsafe { libc::munmap(self.base as *mut libc::c_void, self.len as usize) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_aligned_apart_and_come_back() {
        let mut arena = Arena::new().unwrap();
        let a = arena.alloc(512, 512).unwrap();
        let b = arena.alloc(4 << 20, 2 << 20).unwrap();
        assert_eq!(b % (2 << 20), 0);
        assert!(b >= a + 512 || a >= b + (4 << 20));
        assert!(!arena.alloc_at(b, 512));
        arena.free(b, 4 << 20);
        assert!(arena.alloc_at(b, 512));
        arena.free(b, 512);
        arena.free(a, 512);
        assert_eq!(arena.free.len(), 1);
    }
}
