//! Which heap an address belongs to, without a lock: two levels of tables by chunk of 2 MiB.
//!
//! Invariant: an entry is written before the first block of its chunk is handed out, so whoever
//! frees a block finds it.

use crate::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

const LG_CHUNK: u32 = 21;
const LG_LEAF: u32 = if cfg!(loom) { 2 } else { 14 };
/// Addresses of devices have up to 49 bits.
const LG_ROOT: u32 = if cfg!(loom) { 1 } else { 49 - LG_CHUNK - LG_LEAF };
/// An entry is a pointer of 48 bits and the number of a region above it.
const POINTER: u64 = (1 << 48) - 1;

type Leaf = [AtomicU64; 1 << LG_LEAF];

/// The map.
pub(crate) struct ChunkMap {
    root: Box<[AtomicPtr<Leaf>]>,
}

impl ChunkMap {
    pub(crate) fn new() -> Self {
        let root = (0..1usize << LG_ROOT).map(|_| AtomicPtr::new(std::ptr::null_mut()));
        Self { root: root.collect() }
    }

    #[inline]
    fn split(addr: u64) -> (usize, usize) {
        let chunk = addr >> LG_CHUNK;
        ((chunk >> LG_LEAF) as usize, chunk as usize & ((1 << LG_LEAF) - 1))
    }

    /// The owner (as the pointer's number) and region of an address; (0, 0) if nobody's.
    #[inline]
    pub(crate) fn get(&self, addr: u64) -> (usize, u32) {
        let (root, leaf) = Self::split(addr);
        let Some(slot) = self.root.get(root) else { return (0, 0) };
        let table = slot.load(Ordering::Acquire);
        if table.is_null() {
            return (0, 0);
        }
        // SAFETY: a leaf that was published lives as long as the map.
        let table = unsafe { &*table };
        let entry = table[leaf].load(Ordering::Acquire);
        ((entry & POINTER) as usize, (entry >> 48) as u32)
    }

    /// Sets the owner of all chunks in a range; `false` where the map cannot hold that.
    pub(crate) fn set(&self, addr: u64, bytes: u64, owner: usize, region: u32) -> bool {
        if owner as u64 > POINTER || region > 0xFFFF || addr.saturating_add(bytes) >> 49 != 0 {
            return false;
        }
        let entry = if owner == 0 { 0 } else { u64::from(region) << 48 | owner as u64 };
        let mut at = addr >> LG_CHUNK << LG_CHUNK;
        while at < addr + bytes {
            let (root, leaf) = Self::split(at);
            let mut table = self.root[root].load(Ordering::Acquire);
            if table.is_null() {
                table = self.add_leaf(root);
            }
            // SAFETY: as in `get`.
            let table = unsafe { &*table };
            table[leaf].store(entry, Ordering::Release);
            at += 1 << LG_CHUNK;
        }
        true
    }

    fn add_leaf(&self, root: usize) -> *mut Leaf {
        let fresh: Box<[AtomicU64]> = (0..1 << LG_LEAF).map(|_| AtomicU64::new(0)).collect();
        let fresh: *mut Leaf = Box::into_raw(fresh).cast();
        let null = std::ptr::null_mut();
        match self.root[root].compare_exchange(null, fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => fresh,
            Err(other) => {
                // SAFETY: nobody else has seen it.
                drop(unsafe { Box::from_raw(fresh) });
                other
            }
        }
    }
}

impl Drop for ChunkMap {
    fn drop(&mut self) {
        for slot in &self.root {
            let leaf = slot.load(Ordering::Relaxed);
            if !leaf.is_null() {
                // SAFETY: it came from a box and is dropped once.
                drop(unsafe { Box::from_raw(leaf) });
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn addresses_find_their_owner() {
        let map = ChunkMap::new();
        assert_eq!(map.get(0x7000_0000_0000), (0, 0));
        assert!(map.set(0x7000_0000_0000, 5 << 20, 0xABCD_1234, 7));
        assert_eq!(map.get(0x7000_0040_0000), (0xABCD_1234, 7));
        assert_eq!(map.get(0x7000_0060_0000), (0, 0));
        assert!(!map.set(1 << 50, 1, 1, 1), "beyond the map");
        assert!(map.set(0x7000_0000_0000, 5 << 20, 0, 0));
        assert_eq!(map.get(0x7000_0000_0000), (0, 0));
        assert_eq!(map.get(u64::MAX), (0, 0));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    const BYTES: u64 = 1 << LG_CHUNK;

    #[test]
    fn loom_an_owner_that_is_found_is_there_as_a_whole() {
        loom::model(|| {
            let map = Arc::new(ChunkMap::new());
            let owners = Arc::new([UnsafeCell::new(0u64), UnsafeCell::new(0)]);
            // Both add the one leaf.
            let setters = [0usize, 1].map(|i| {
                let (map, owners) = (Arc::clone(&map), Arc::clone(&owners));
                thread::spawn(move || {
                    // SAFETY: nobody knows of this owner yet.
                    owners[i].with_mut(|owner| unsafe { *owner = 7 });
                    assert!(map.set(i as u64 * BYTES, BYTES, i + 1, 3));
                })
            });
            let look = || {
                [0usize, 1].map(|i| {
                    let (owner, region) = map.get(i as u64 * BYTES);
                    if owner != 0 {
                        assert_eq!((owner, region), (i + 1, 3));
                        // SAFETY: it was made before the map named it.
                        assert_eq!(owners[i].with(|owner| unsafe { *owner }), 7);
                    }
                    owner
                })
            };
            look();
            setters.into_iter().for_each(|setter| setter.join().unwrap());
            assert_eq!(look(), [1, 2]);
        });
    }

    #[test]
    fn loom_an_owner_in_a_leaf_that_is_there_is_there_as_a_whole() {
        loom::model(|| {
            let map = Arc::new(ChunkMap::new());
            let owner = Arc::new(UnsafeCell::new(0u64));
            assert!(map.set(0, BYTES, 1, 1));
            let setter = {
                let (map, owner) = (Arc::clone(&map), Arc::clone(&owner));
                thread::spawn(move || {
                    // SAFETY: nobody knows of this owner yet.
                    owner.with_mut(|owner| unsafe { *owner = 7 });
                    assert!(map.set(BYTES, BYTES, 2, 3));
                })
            };
            let found = map.get(BYTES);
            if found.0 != 0 {
                assert_eq!(found, (2, 3));
                // SAFETY: it was made before the map named it.
                assert_eq!(owner.with(|owner| unsafe { *owner }), 7);
            }
            setter.join().unwrap();
        });
    }
}
