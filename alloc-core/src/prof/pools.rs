//! What each arena of the host and each pool of device memory holds: rows of the statistics page and of
//! dumps. Arenas are looked at when a row is written; a device library tells of its pools when it likes.
//!
//! Invariant: a slot of [`POOLS`] belongs to one pool of its library from its first report until that says
//! that the pool is gone; its figures are each right of some moment of the last report.
use core::array::from_fn;

use crate::arena::slab::free_slots;
use crate::explicit;
use crate::extent::State;
use crate::extent::page_map::LG_PAGE;
use crate::front::size_class::class_bytes;
use crate::process::HEAP;
use crate::sync::atomic::{
    AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};
use thermalloc_prof_format::{Pool, Record, Text, space};

/// Automatic arenas, and explicit ones, that have rows.
const MOST_ARENAS: usize = 64;
/// Pools of device memory that have rows.
const MOST_POOLS: usize = 32;
/// Bytes of a pool's name that are kept.
const NAME_BYTES: usize = 32;

const AUTOMATIC_TOGETHER: u16 = 1;
const AUTOMATIC: u16 = 2;

/// A pool of device memory as its library describes it. Layout of the C header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DevicePool {
    /// Bytes of this struct.
    pub struct_bytes: usize,
    /// What tells it from all others of the process; not 0.
    pub id: u64,
    /// The device's ordinal.
    pub device: u32,
    /// 1 device, 2 pinned host, 3 managed memory.
    pub space: u32,
    /// Blocks in use, with their rounding.
    pub live_bytes: u64,
    /// Blocks given back that a stream still uses.
    pub pending_bytes: u64,
    /// Free memory.
    pub free_bytes: u64,
    /// The memory that it has.
    pub held_bytes: u64,
    /// The most that it had; 0: the pool is no more.
    pub peak_bytes: u64,
    /// Its name, or null.
    pub name: *const u8,
    /// Bytes of `name`.
    pub name_bytes: usize,
}

struct Slot {
    /// 0: free.
    id: AtomicU64,
    /// The device, and the space above it.
    place: AtomicU64,
    figures: [AtomicU64; 5],
    name: [AtomicU64; NAME_BYTES / 8],
}

static POOLS: [Slot; MOST_POOLS] = [const {
    Slot {
        id: AtomicU64::new(0),
        place: AtomicU64::new(0),
        figures: [const { AtomicU64::new(0) }; 5],
        name: [const { AtomicU64::new(0) }; NAME_BYTES / 8],
    }
}; MOST_POOLS];

/// Takes down what a library says of a pool; false: there is no room for another.
pub(crate) fn report(pool: &DevicePool, name: &[u8]) -> bool {
    let known = POOLS.iter().find(|slot| slot.id.load(Acquire) == pool.id);
    if pool.peak_bytes == 0 {
        known.inspect(|slot| slot.id.store(0, Release));
        return true;
    }
    let Some(slot) = known.or_else(|| claim(pool.id)) else { return false };
    slot.place.store(u64::from(pool.space) << 32 | u64::from(pool.device), Relaxed);
    let mut padded = [0; NAME_BYTES];
    let len = name.len().min(NAME_BYTES);
    padded[..len].copy_from_slice(&name[..len]);
    let (words, _) = padded.as_chunks::<8>();
    for (to, word) in slot.name.iter().zip(words) {
        to.store(u64::from_ne_bytes(*word), Relaxed);
    }
    let figures =
        [pool.live_bytes, pool.pending_bytes, pool.free_bytes, pool.held_bytes, pool.peak_bytes];
    slot.figures.iter().zip(figures).for_each(|(to, figure)| to.store(figure, Relaxed));
    true
}

fn claim(id: u64) -> Option<&'static Slot> {
    let mut free = POOLS.iter();
    free.find(|slot| slot.id.compare_exchange(0, id, AcqRel, Relaxed).is_ok())
}

/// A row for each arena that holds something and for each pool.
pub(super) fn each(mut push: impl FnMut(&Record<'_>)) {
    automatic(&mut push);
    explicit_arenas(&mut push);
    for (number, slot) in POOLS.iter().enumerate() {
        if slot.id.load(Acquire) != 0 {
            slot.push(number, &mut push);
        }
    }
}

impl Slot {
    #[allow(clippy::cast_possible_truncation, reason = "takes a word apart; ordinals are small")]
    fn push(&self, number: usize, push: &mut impl FnMut(&Record<'_>)) {
        let [live_bytes, pending_bytes, free_bytes, held_bytes, peak_bytes] =
            from_fn(|i| self.figures[i].load(Relaxed));
        let words: [[u8; 8]; NAME_BYTES / 8] =
            from_fn(|i| self.name[i].load(Relaxed).to_ne_bytes());
        let place = self.place.load(Relaxed);
        push(&Record::Pool(Pool {
            index: number as u32,
            space: (place >> 32) as u8,
            device: place as u8,
            live_bytes,
            pending_bytes,
            free_bytes,
            held_bytes,
            peak_bytes,
            name: Text(until_zero(words.as_flattened())),
            ..Pool::default()
        }));
    }
}

fn until_zero(bytes: &[u8]) -> &[u8] {
    bytes.split(|&byte| byte == 0).next().unwrap_or(&[])
}

fn automatic(push: &mut impl FnMut(&Record<'_>)) {
    // Bytes of each one's slabs, and of what is used of them.
    let mut arenas = [(0, 0); MOST_ARENAS];
    let (mut live, mut used_pages) = (0, 0);
    HEAP.pages.glance(|e| {
        let bytes = u64::from(e.pages()) << LG_PAGE;
        let used = match e.state() {
            State::Slab => {
                let slots = u32::from(e.slots());
                let used = slots - free_slots(e.ctl.load(Relaxed)).min(slots);
                u64::from(used) * class_bytes(e.code()) as u64
            }
            State::Block | State::Recorded => class_bytes(e.code()) as u64,
            State::Large => bytes,
            _ => return,
        };
        live += used;
        used_pages += bytes;
        if e.state() == State::Slab
            && let Some(arena) = arenas.get_mut(usize::from(e.arena()))
        {
            arena.0 += bytes;
            arena.1 += used;
        }
    });
    let counts = HEAP.pages.counts();
    let free_pages = (counts.dirty + counts.muzzy) << LG_PAGE;
    push(&Record::Pool(Pool {
        flags: AUTOMATIC_TOGETHER,
        live_bytes: live,
        free_bytes: used_pages.saturating_sub(live) + free_pages,
        held_bytes: used_pages + free_pages,
        name: Text(b"automatic"),
        ..Pool::default()
    }));
    for (index, &(held, used)) in (0..).zip(&arenas) {
        if held > 0 {
            push(&Record::Pool(Pool {
                index,
                flags: AUTOMATIC,
                live_bytes: used,
                free_bytes: held.saturating_sub(used),
                held_bytes: held,
                name: Text(b"auto"),
                ..Pool::default()
            }));
        }
    }
}

fn explicit_arenas(push: &mut impl FnMut(&Record<'_>)) {
    for arena in explicit::live_arenas().take(MOST_ARENAS) {
        let counts = arena.heap.pages.counts();
        let live = arena.heap.usage().out_bytes as u64;
        let active = counts.in_use << LG_PAGE;
        let free_pages = (counts.dirty + counts.muzzy) << LG_PAGE;
        let name = arena.name();
        push(&Record::Pool(Pool {
            index: arena.index(),
            threads: arena.threads(),
            space: space::HOST,
            live_bytes: live,
            free_bytes: active.saturating_sub(live) + free_pages,
            held_bytes: active + free_pages,
            name: Text(until_zero(&name)),
            ..Pool::default()
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::extended::{self, Request};
    use std::string::String;
    use std::vec::Vec;

    fn rows() -> Vec<(String, u8, u8, [u64; 4])> {
        let mut rows = Vec::new();
        each(|record| {
            let Record::Pool(p) = record else { panic!("{record:?}") };
            let name = String::from_utf8(p.name.0.to_vec()).unwrap();
            let figures = [p.live_bytes, p.pending_bytes, p.free_bytes, p.held_bytes];
            rows.push((name, p.space, p.device, figures));
        });
        rows
    }

    #[test]
    fn pools_come_change_and_go() {
        let mut pool = DevicePool {
            struct_bytes: size_of::<DevicePool>(),
            id: 77,
            device: 3,
            space: 1,
            live_bytes: 10,
            pending_bytes: 4,
            free_bytes: 6,
            held_bytes: 20,
            peak_bytes: 30,
            name: core::ptr::null(),
            name_bytes: 0,
        };
        assert!(report(&pool, b"weights of a long name that is cut off"));
        pool.live_bytes = 11;
        assert!(report(&pool, b"weights"));
        let device = || rows().into_iter().filter(|row| row.1 == space::DEVICE);
        assert_eq!(device().collect::<Vec<_>>(), [(String::from("weights"), 1, 3, [11, 4, 6, 20])]);
        for id in 100..100 + MOST_POOLS as u64 - 1 {
            assert!(report(&DevicePool { id, ..pool }, b""));
        }
        assert!(!report(&DevicePool { id: 1, ..pool }, b""), "full");
        for id in (100..100 + MOST_POOLS as u64 - 1).chain([77]) {
            assert!(report(&DevicePool { id, peak_bytes: 0, ..pool }, b""));
        }
        assert_eq!(device().count(), 0);
    }

    #[test]
    fn arenas_have_rows() {
        crate::process::ready();
        let arena = crate::Arena::new().unwrap();
        let request = Request { arena: Some(arena.index()), ..Request::default() };
        let block = extended::alloc(3 << 20, &request);
        let all = rows();
        let row = |name: &str| all.iter().find(|row| row.0 == name).map(|row| row.3);
        let figures = row(&std::format!("manual_{}", arena.index())).unwrap();
        assert_eq!((figures[0], figures[2], figures[3]), (3 << 20, 0, 3 << 20), "{all:?}");
        assert!(row("automatic").is_some_and(|f| f[0] + f[2] == f[3]), "{all:?}");
        // SAFETY: a live block.
        unsafe { extended::free(block, &request) };
    }
}
