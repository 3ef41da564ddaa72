//! Explicit arenas of this process: their memory is apart, is counted apart, and goes as a whole.
use std::vec::Vec;

use super::*;
use crate::api;
use crate::arena::figures::ABOVE;
use crate::extended::{self, Cache, Request};
use crate::front::tcaches;
use crate::thread;

const EFAULT: Errno = Errno(libc::EFAULT);

/// One arena, which goes with the test.
struct Own(u32);

impl Own {
    fn new() -> Self {
        Own(create().unwrap())
    }

    fn request(&self) -> Request {
        Request { arena: Some(self.0), ..Request::default() }
    }

    fn alloc(&self, size: usize) -> *mut u8 {
        let p = extended::alloc(size, &self.request());
        assert!(!p.is_null());
        // SAFETY: a new block of that many bytes.
        unsafe { p.write_bytes(0xa5, size) };
        p
    }

    fn stats(&self) -> ArenaStats {
        stats(Which::One(self.0)).unwrap()
    }

    fn allocated(&self) -> u64 {
        self.stats().small.allocated + self.stats().large.allocated
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        if is_live(self.0) {
            // SAFETY: the test is through with its blocks.
            unsafe { destroy(self.0) }.unwrap();
        }
    }
}

fn free(p: *mut u8) {
    // SAFETY: the tests' own blocks.
    unsafe { api::free(p) }
}

fn usable(p: *mut u8) -> usize {
    // SAFETY: as above.
    unsafe { api::usable_size(p) }
}

/// Sizes of every kind of block.
const SIZES: [usize; 9] = [1, 16, 100, 1000, 5000, 32 << 10, 40_000, 900_000, 3 << 20];

fn page(p: *mut u8) -> usize {
    p.addr() >> LG_PAGE
}

#[test]
fn pages_of_an_arena_hold_nobody_elses_blocks() {
    let (a, b) = (Own::new(), Own::new());
    let mut blocks = Vec::new();
    for size in SIZES {
        for _ in 0..20 {
            blocks.push((0, api::alloc(size)));
            blocks.push((a.0, a.alloc(size)));
            blocks.push((b.0, b.alloc(size)));
        }
    }
    let pages = |of: u32| {
        let of_it = blocks.iter().filter(|(owner, _)| *owner == of);
        let pages = of_it.flat_map(|&(_, p)| page(p)..=page(p.wrapping_add(usable(p) - 1)));
        pages.collect::<std::collections::BTreeSet<usize>>()
    };
    let sets = [pages(0), pages(a.0), pages(b.0)];
    for (i, j) in [(0, 1), (0, 2), (1, 2)] {
        assert!(sets[i].is_disjoint(&sets[j]));
    }
    for &(owner, p) in &blocks {
        let found = lookup(p.addr()).unwrap();
        assert!(found == owner || (owner == 0 && found < auto_count()));
    }
    // Freed plainly, a block goes back to where it is from: the arena's next one is not another's.
    for (_, p) in blocks {
        free(p);
    }
    assert_eq!((a.allocated(), b.allocated()), (0, 0));
    let again: Vec<_> = (0..1000).map(|_| api::alloc(100)).collect();
    assert!(again.iter().all(|&p| lookup(p.addr()).unwrap() < auto_count()));
    again.into_iter().for_each(free);
}

#[test]
fn reset_frees_every_block_and_destroy_gives_all_back() {
    let arena = Own::new();
    for size in SIZES {
        for _ in 0..50 {
            arena.alloc(size);
        }
    }
    let before = arena.stats();
    assert!(before.pactive > 50 * 768 && before.resident >= 50 * (3 << 20));
    assert_eq!(before.small.nmalloc + before.large.nmalloc, 50 * SIZES.len() as u64);
    // SAFETY: nobody uses them.
    unsafe { reset(arena.0) }.unwrap();
    let after = arena.stats();
    assert_eq!((arena.allocated(), after.pactive), (0, 0));
    assert!(after.pdirty >= before.pactive, "they are kept for reuse");
    assert_eq!(after.small.ndalloc, after.small.nmalloc);
    let p = arena.alloc(100);
    assert_eq!(arena.allocated(), usable(p) as u64);
    // SAFETY: as above.
    unsafe { destroy(arena.0) }.unwrap();
    assert!(!is_live(arena.0) && stats(Which::One(arena.0)).is_none());
    // SAFETY: there is no such arena.
    assert_eq!(unsafe { destroy(arena.0) }, Err(EFAULT));
    // SAFETY: as above.
    assert_eq!(unsafe { reset(arena.0) }, Err(EFAULT));
    assert!(extended::alloc(10, &arena.request()).is_null());
    assert_eq!(lookup(p.addr()), None);
    let record = get(arena.0 - auto_count()).unwrap();
    assert!(record.heap.pages.dirty_hint() == 0, "nothing free is resident");
}

#[test]
fn an_index_is_used_again_and_counts_anew() {
    let arena = Own::new();
    let index = arena.0;
    arena.alloc(100);
    let gone = stats(Which::Destroyed).unwrap().small.nmalloc;
    drop(arena);
    assert!(stats(Which::Destroyed).unwrap().small.nmalloc > gone);
    let mut others = Vec::new();
    let again = loop {
        let next = Own::new();
        if next.0 == index {
            break next;
        }
        others.push(next);
    };
    assert_eq!(again.stats().small.nmalloc, 0);
    assert_eq!(&name(index).unwrap()[..7], b"manual_");
}

#[test]
fn automatic_arenas_are_neither_reset_nor_destroyed() {
    assert!(auto_count() > 0 && is_live(0) && !is_live(count() + 7));
    for index in [0, auto_count() - 1, count() + 7, u32::MAX] {
        // SAFETY: it does nothing.
        assert_eq!(unsafe { reset(index) }, Err(EFAULT));
        // SAFETY: as above.
        assert_eq!(unsafe { destroy(index) }, Err(EFAULT));
    }
    assert_eq!(purge(Which::One(count() + 7)), Err(EFAULT));
    assert_eq!(decay(Which::One(count() + 7)), Err(EFAULT));
    assert_eq!(decay_ms(count() + 7), Err(EFAULT));
    assert_eq!((purge(Which::One(0)), decay(Which::All)), (Ok(()), Ok(())));
}

#[test]
fn an_arena_has_its_own_decay() {
    let (at_once, never) = (Own::new(), Own::new());
    set_decay_ms(at_once.0, Some(0), None).unwrap();
    set_decay_ms(never.0, Some(-1), Some(-1)).unwrap();
    assert_eq!(decay_ms(at_once.0).unwrap().0, 0);
    assert_eq!(decay_ms(never.0), Ok((-1, -1)));
    assert_eq!(set_decay_ms(never.0, Some(-2), None), Err(EFAULT));
    for arena in [&at_once, &never] {
        free(arena.alloc(8 << 20));
    }
    assert_eq!(at_once.stats().pdirty, 0);
    assert_eq!(never.stats().pdirty, 2048);
    decay(Which::One(never.0)).unwrap();
    assert_eq!(never.stats().pdirty, 2048);
    purge(Which::One(never.0)).unwrap();
    assert_eq!(never.stats().pdirty, 0);
    assert!(never.stats().dirty_purged >= 2048);
}

#[test]
fn figures_by_class_add_up() {
    let arena = Own::new();
    let blocks: Vec<_> = SIZES.iter().map(|&size| arena.alloc(size)).collect();
    let mut classes = [ClassStats::default(); CLASSES + 2];
    assert!(class_stats(Which::One(arena.0), &mut classes));
    for &p in &blocks {
        let code = live(arena.0).unwrap().code_of(p);
        let class = &classes[if code == LARGE { ABOVE } else { usize::from(code) }];
        assert!(class.curregs > 0 && class.bytes >= usable(p) as u64);
        assert!(class.nmalloc == class.curregs + class.ndalloc);
        assert_eq!(class.curslabs > 0, usize::from(code) <= SLAB_CLASSES);
    }
    let bytes: u64 = classes.iter().map(|c| c.bytes).sum();
    assert_eq!(bytes, blocks.iter().map(|&p| usable(p) as u64).sum());
    assert_eq!(classes.iter().map(|c| c.pages).sum::<u64>(), arena.stats().pactive);
    blocks.into_iter().for_each(free);
}

#[test]
fn a_bound_thread_gets_all_from_its_arena() {
    let arena = Own::new();
    let index = arena.0;
    std::thread::spawn(move || {
        let before = api::alloc(100);
        thread::bind(index).unwrap();
        assert_eq!(thread::arena(), index);
        for size in SIZES {
            let p = api::alloc(size);
            assert_eq!(lookup(p.addr()), Some(index), "{size}");
            // SAFETY: the test's own block.
            let p = unsafe { api::realloc(p, size * 3) };
            assert_eq!(lookup(p.addr()), Some(index), "{size}");
            free(p);
            let p = api::alloc_aligned_zeroed(size, 8192);
            assert_eq!((lookup(p.addr()), p.addr() % 8192), (Some(index), 0));
            free(p);
        }
        free(before);
        // SAFETY: nobody uses them; but a thread is bound.
        assert_eq!(unsafe { destroy(index) }, Err(EFAULT));
        assert_eq!(stats(Which::One(index)).unwrap().nthreads, 1);
        thread::bind(0).unwrap();
        assert_eq!(thread::arena(), 0);
        assert_eq!(stats(Which::One(index)).unwrap().nthreads, 0);
        let p = api::alloc(100);
        assert!(lookup(p.addr()).unwrap() < auto_count());
        free(p);
        assert_eq!(thread::bind(count() + 7), Err(EFAULT));
        // What ends bound does not keep the arena.
        thread::bind(index).unwrap();
    })
    .join()
    .unwrap();
    drop(arena);
}

#[test]
fn a_bound_thread_has_a_cache_that_goes_with_it() {
    let arena = Own::new();
    let index = arena.0;
    std::thread::spawn(move || {
        thread::bind(index).unwrap();
        let p = api::alloc(100);
        free(p);
        let q = api::alloc(100);
        free(q);
        assert_eq!(p, q, "last in, first out");
        assert!(stats(Which::One(index)).unwrap().small.allocated >= 112);
        thread::flush_cache();
        let kept: Vec<_> = (0..10).map(|_| api::alloc(2000)).collect();
        kept.into_iter().for_each(free);
        assert!(stats(Which::One(index)).unwrap().small.allocated >= 2000);
    })
    .join()
    .unwrap();
    // The kernel may not have forgotten the thread yet.
    for _ in 0..1000 {
        crate::front::tend();
        if arena.allocated() == 0 {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    panic!("the cache of a thread that has ended keeps {} bytes", arena.allocated());
}

#[test]
fn a_thread_is_counted_to_the_byte() {
    std::thread::spawn(|| {
        free(api::alloc(100));
        let (allocated, deallocated) = (thread::allocated_place(), thread::deallocated_place());
        // SAFETY: these two are this thread's counters.
        let value = |place: *mut u64| unsafe { place.read() };
        let read = || (value(allocated), value(deallocated));
        assert_eq!(read(), (thread::allocated(), thread::deallocated()));
        let arena = Own::new();
        let (mut sum, start) = (0, read());
        let mut blocks = Vec::new();
        for size in SIZES.into_iter().cycle().take(300) {
            // The vector counts, too.
            let before = read().0;
            let p = if blocks.len() % 3 == 0 { arena.alloc(size) } else { api::alloc(size) };
            assert_eq!(read().0 - before, usable(p) as u64, "{size}");
            sum += usable(p) as u64;
            if blocks.len() == blocks.capacity() {
                blocks.reserve(400);
            }
            blocks.push(p);
        }
        let freed = read().1;
        blocks.iter().for_each(|&p| free(p));
        assert_eq!(read().1 - freed, sum);
        assert!(start.0 >= 100 && thread::peak() >= sum);
        thread::reset_peak();
        assert_eq!(thread::peak(), 0);
        let p = api::alloc(5 << 20);
        let before = read();
        // SAFETY: the test's own block.
        let q = unsafe { api::realloc(p, 9 << 20) };
        let after = read();
        assert_eq!((after.0 - before.0) - (after.1 - before.1), 4 << 20);
        free(q);
        assert!((5 << 20..15 << 20).contains(&thread::peak()));
    })
    .join()
    .unwrap();
}

#[test]
fn a_thread_without_a_cache_leaves_nothing_in_one() {
    std::thread::spawn(|| {
        assert!(thread::cache_enabled());
        thread::set_cache_enabled(false);
        assert!(!thread::cache_enabled());
        let blocks: Vec<_> = (0..100).map(|_| api::alloc(112)).collect();
        blocks.into_iter().for_each(free);
        thread::set_cache_enabled(true);
        free(api::alloc(112));
        assert!(thread::cache_enabled());
        thread::idle();
    })
    .join()
    .unwrap();
}

#[test]
fn an_explicit_cache_serves_one_arena_until_it_is_flushed() {
    let (a, b) = (Own::new(), Own::new());
    let id = tcaches::create().unwrap();
    let of = |arena: &Own| Request { cache: Cache::Explicit(id), ..arena.request() };
    let p = extended::alloc(100, &of(&a));
    assert_eq!(lookup(p.addr()), Some(a.0));
    // SAFETY: the test's own block.
    unsafe { extended::free(p, &of(&a)) };
    assert!(a.allocated() >= 112, "the cache holds it");
    let q = extended::alloc(100, &of(&a));
    assert_eq!(p, q, "last in, first out");
    let other = extended::alloc(100, &of(&b));
    assert_eq!(lookup(other.addr()), Some(b.0));
    // Freed into a cache of another arena's blocks it goes home.
    // SAFETY: as above.
    unsafe { extended::free(other, &of(&b)) };
    assert_eq!(b.allocated(), 0);
    // SAFETY: as above.
    unsafe { extended::free(q, &of(&a)) };
    tcaches::flush(id).unwrap();
    assert_eq!(a.allocated(), 0);
    let r = extended::alloc(100, &of(&b));
    // SAFETY: as above.
    unsafe { extended::free(r, &of(&b)) };
    assert!(b.allocated() > 0, "it serves the other now");
    // SAFETY: nobody uses them; the cache forgets its own.
    unsafe { reset(b.0) }.unwrap();
    let s = extended::alloc(100, &of(&b));
    assert!(b.allocated() >= 112);
    free(s);
    tcaches::destroy(id).unwrap();
    assert_eq!((tcaches::destroy(id), tcaches::flush(id)), (Err(EFAULT), Err(EFAULT)));
    let t = extended::alloc(100, &of(&b));
    assert_eq!(lookup(t.addr()), Some(b.0), "an unknown cache is none");
    free(t);
}

#[test]
fn blocks_grow_in_place_and_say_so() {
    let arena = Own::new();
    for of in [Request::default(), arena.request()] {
        let zero = Request { zero: true, ..of };
        let p = extended::alloc(100, &of);
        // SAFETY: the test's own block, as below.
        assert_eq!(unsafe { extended::resize_in_place(p, 5000, 0, &of) }, 112, "slots stay");
        free(p);
        let p = extended::alloc(40_000, &of);
        let mut have = usable(p);
        assert_eq!(Some(have), extended::good_size(40_000, 1));
        for size in [100_000, 900_000, 2_000_000, 9_000_000] {
            // SAFETY: as above.
            unsafe { p.write_bytes(7, have) };
            // SAFETY: as above.
            let now = unsafe { extended::resize_in_place(p, size, 0, &zero) };
            assert_eq!(now, usable(p));
            if now >= size {
                // SAFETY: as above.
                let bytes = unsafe { core::slice::from_raw_parts(p, now) };
                assert!(bytes[..have].iter().all(|&b| b == 7));
                assert!(bytes[have..].iter().all(|&b| b == 0));
            } else {
                assert_eq!(now, have);
            }
            have = now;
        }
        if of.arena.is_some() {
            assert!(have >= 9_000_000, "alone in its arena a block can grow");
        }
        // SAFETY: as above.
        let now = unsafe { extended::resize_in_place(p, 300_000, 0, &of) };
        assert!(now <= have && now >= 300_000.min(have));
        assert_eq!(now, usable(p));
        // SAFETY: as above.
        assert_eq!(unsafe { extended::resize_in_place(p, usize::MAX, 5, &of) }, now);
        free(p);
    }
    assert_eq!(arena.allocated(), 0);
}

#[test]
fn a_block_is_moved_to_the_arena_that_is_named() {
    let arena = Own::new();
    let p = api::alloc(1000);
    // SAFETY: the test's own block, as below.
    unsafe { p.write_bytes(9, 1000) };
    // SAFETY: as above.
    let q = unsafe { extended::realloc(p, 1000, &arena.request()) };
    assert_eq!(lookup(q.addr()), Some(arena.0));
    let plain = Request { zero: true, ..Request::default() };
    // SAFETY: as above.
    let r = unsafe { extended::realloc(q, 200_000, &plain) };
    assert_eq!(lookup(r.addr()), Some(arena.0), "no name: it stays");
    // SAFETY: as above.
    let bytes = unsafe { core::slice::from_raw_parts(r, usable(r)) };
    assert!(bytes[..1000].iter().all(|&b| b == 9) && bytes[1024..].iter().all(|&b| b == 0));
    let nowhere = Request { arena: Some(count() + 9), ..Request::default() };
    // SAFETY: as above.
    assert!(unsafe { extended::realloc(r, 500_000, &nowhere) }.is_null());
    // SAFETY: as above.
    assert!(unsafe { extended::realloc(r, usize::MAX, &arena.request()) }.is_null());
    free(r);
}

#[test]
fn a_named_automatic_arena_is_the_one_that_serves() {
    for index in 0..auto_count() {
        let request = Request { arena: Some(index), ..Request::default() };
        let p = extended::alloc(100, &request);
        assert_eq!(lookup(p.addr()), Some(index));
        // SAFETY: the test's own block.
        unsafe { extended::free(p, &Request { cache: Cache::Bypass, ..request }) };
    }
}

#[test]
fn figures_of_all_are_those_of_each() {
    let arena = Own::new();
    let keep = arena.alloc(1 << 20);
    let (all, process) = (stats(Which::All).unwrap(), crate::control::stats::snapshot());
    assert!(all.pactive << LG_PAGE >= 1 << 20 && process.active_bytes >= 1 << 20);
    // The sum over automatic arenas is the whole page layer's.
    let each: u64 = (0..count()).filter_map(|i| stats(Which::One(i))).map(|s| s.pactive).sum();
    let apart = each.abs_diff(stats(Which::All).unwrap().pactive);
    assert!(apart < 16_384, "other tests run meanwhile: {apart}");
    free(keep);
}
