//! The cache of a thread, where restartable sequences are refused.
//!
//! A cache belongs to the thread whose id it bears, and only that one touches its headers and
//! slots. There is no destructor: the cache of a thread that ended is found by its id, which no
//! longer names a thread of the process, and goes to a new thread or is emptied.

use core::ptr::null_mut;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize};

use super::room::{self, Account, Array, BATCH_MAX, Backend, Layout, slots};
use super::rseq::{Header, Region};
use super::size_class::{CLASSES, SizeClass};
use crate::os::{Errno, linux};

/// Bytes that the room of one thread may amount to.
/// Of the classes of slabs, and as much of those of extents.
const BUDGET_BYTES: usize = 256 << 10;
static LAYOUT: Layout = Layout::new(size_of::<ThreadCache>() / 8, slots(256, 64, 1, BUDGET_BYTES));

/// Caches of others that a new thread looks at in search of a dead one's.
const PROBES: usize = 16;
/// The owner of a cache that is being emptied: no thread has this id.
const REAPER: u32 = u32::MAX;

/// The cache of one thread; its slots follow.
#[repr(C)]
pub(crate) struct ThreadCache {
    region: Region,
    next: AtomicPtr<ThreadCache>,
    /// The owner's thread id, 0 if it has none, below a count of its owners so far: an id may come
    /// again.
    owner: AtomicU64,
    account: Account,
    arena: AtomicUsize,
}

#[allow(clippy::cast_possible_truncation, reason = "the id is the low half")]
fn thread_of(owner: u64) -> u32 {
    owner as u32
}

impl ThreadCache {
    /// Changes the owner, if it still is `old`.
    fn take_over(&self, old: u64, thread: u32) -> bool {
        let new = ((old >> 32) + 1) << 32 | u64::from(thread);
        self.owner.compare_exchange(old, new, AcqRel, Relaxed).is_ok()
    }

    fn forget_blocks(&self) {
        for class in 1..=CLASSES {
            let class = SizeClass::try_from(class).unwrap_or(0);
            self.region.set_header(class, LAYOUT.empty(class));
        }
        self.account.set(core::iter::empty());
    }

    /// For its owner. Null: it has none.
    #[inline(always)]
    pub(crate) fn pop(&self, class: SizeClass) -> *mut u8 {
        let Header { cur, .. } = self.region.header(class);
        // SAFETY: the word below `cur` is a block of the class or null; the cache is this thread's.
        let block = unsafe { self.region.slot(cur - 1).read() };
        if !block.is_null() {
            self.region.set_cur(class, cur - 1);
        }
        block
    }

    /// For its owner. False: there is no room.
    #[inline(always)]
    pub(crate) fn push(&self, class: SizeClass, block: *mut u8) -> bool {
        let Header { cur, end } = self.region.header(class);
        if cur == end {
            return false;
        }
        // SAFETY: a slot of the class below `end`; the cache is this thread's.
        unsafe { self.region.slot(cur).write(block) };
        self.region.set_cur(class, cur + 1);
        true
    }

    fn pop_range(&self, class: SizeClass, out: &mut [*mut u8]) -> usize {
        let mut header = self.region.header(class);
        let n = usize::from(header.cur - LAYOUT.first(class)).min(out.len());
        for block in &mut out[..n] {
            header.cur -= 1;
            // SAFETY: a slot of the class below `cur`; the cache is this thread's.
            *block = unsafe { self.region.slot(header.cur).read() };
        }
        self.region.set_header(class, header);
        n
    }

    fn push_range(&self, class: SizeClass, blocks: &[*mut u8]) -> usize {
        let mut header = self.region.header(class);
        let n = usize::from(header.end - header.cur).min(blocks.len());
        for &block in blocks[..n].iter().rev() {
            // SAFETY: a slot of the class below `end`; the cache is this thread's.
            unsafe { self.region.slot(header.cur).write(block) };
            header.cur += 1;
        }
        self.region.set_header(class, header);
        n
    }

    /// Gives all blocks to the backend; how many.
    fn flush(&self, backend: &impl Backend) -> usize {
        let mut flushed = 0;
        let mut blocks = [null_mut(); BATCH_MAX];
        for class in 1..=CLASSES {
            let class = SizeClass::try_from(class).unwrap_or(0);
            loop {
                let n = self.pop_range(class, &mut blocks);
                if n == 0 {
                    break;
                }
                backend.store(self.arena.load(Relaxed), class, &blocks[..n]);
                flushed += n;
            }
        }
        self.forget_blocks();
        flushed
    }
}

/// A cache in the hands of its owner.
struct Own<'a>(&'a ThreadCache);

impl Array for Own<'_> {
    fn layout(&self) -> &'static Layout {
        &LAYOUT
    }

    fn account(&self) -> &Account {
        &self.0.account
    }

    fn budget(&self, _class: SizeClass) -> usize {
        BUDGET_BYTES
    }

    fn arena(&self) -> usize {
        self.0.arena.load(Relaxed)
    }

    fn header(&self, class: SizeClass) -> Header {
        self.0.region.header(class)
    }

    fn replace(&self, class: SizeClass, old: Header, new: Header) -> bool {
        debug_assert_eq!(self.header(class), old);
        self.0.region.set_header(class, new);
        true
    }

    fn pop_batch(&self, class: SizeClass, out: &mut [*mut u8]) -> usize {
        self.0.pop_range(class, out)
    }

    fn push_batch(&self, class: SizeClass, blocks: &[*mut u8]) -> usize {
        self.0.push_range(class, blocks)
    }
}

/// The thread caches of a process. A cache once made stays in the list.
pub(crate) struct ThreadCaches {
    head: AtomicPtr<ThreadCache>,
    /// Where the next search for a dead thread's cache starts.
    probe: AtomicPtr<ThreadCache>,
}

impl ThreadCaches {
    pub(crate) const fn new() -> Self {
        ThreadCaches { head: AtomicPtr::new(null_mut()), probe: AtomicPtr::new(null_mut()) }
    }

    fn follow(link: &AtomicPtr<ThreadCache>) -> Option<&'static ThreadCache> {
        // SAFETY: null, or a cache, which lives for good.
        unsafe { link.load(Acquire).as_ref() }
    }

    fn iter(&self) -> impl Iterator<Item = &'static ThreadCache> {
        core::iter::successors(Self::follow(&self.head), |cache| Self::follow(&cache.next))
    }

    /// A cache for the calling thread, which has none; null where there is no memory for one.
    pub(crate) fn acquire(&self, backend: &impl Backend, arena: usize) -> *mut ThreadCache {
        let thread = own_id();
        let Some(cache) = self.adopt(thread).or_else(|| self.create(backend, thread)) else {
            return null_mut();
        };
        cache.arena.store(arena, Relaxed);
        core::ptr::from_ref(cache).cast_mut()
    }

    /// Takes over a cache without an owner, or that of a dead one: with this thread's id, or found
    /// by a few probes.
    fn adopt(&self, thread: u32) -> Option<&'static ThreadCache> {
        let owned_by = |cache: &ThreadCache, dead: &dyn Fn(u32) -> bool| {
            let owner = cache.owner.load(Acquire);
            dead(thread_of(owner)) && cache.take_over(owner, thread)
        };
        let free = |id: u32| id == 0 || id == thread;
        if let Some(cache) = self.iter().find(|cache| owned_by(cache, &free)) {
            return Some(cache);
        }
        let mut link = Self::follow(&self.probe).or_else(|| Self::follow(&self.head));
        for _ in 0..PROBES {
            let cache = link?;
            link = Self::follow(&cache.next);
            self.probe.store(cache.next.load(Relaxed), Relaxed);
            if owned_by(cache, &is_dead) {
                return Some(cache);
            }
        }
        None
    }

    /// A cache that is no thread's; null where there is no memory for one.
    pub(crate) fn create_unowned(&self, backend: &impl Backend) -> *mut ThreadCache {
        self.create(backend, REAPER)
            .map_or(null_mut(), |cache| core::ptr::from_ref(cache).cast_mut())
    }

    /// Forgets the blocks of a cache.
    ///
    /// # Safety
    /// As [`ThreadCaches::alloc`].
    pub(crate) unsafe fn forget(&self, cache: *mut ThreadCache) {
        // SAFETY: caches live for good.
        unsafe { &*cache }.forget_blocks();
    }

    fn create(&self, backend: &impl Backend, thread: u32) -> Option<&'static ThreadCache> {
        let cache = backend.map(LAYOUT.bytes).cast::<ThreadCache>();
        // SAFETY: null, or zeroed memory of at least a cache's size, which is a valid cache.
        let made = unsafe { cache.as_ref() }?;
        made.forget_blocks();
        made.owner.store(u64::from(thread), Relaxed);
        let link = |head| {
            made.next.store(head, Relaxed);
            Some(cache)
        };
        // The closure never says no.
        let _ = self.head.fetch_update(Release, Relaxed, link);
        Some(made)
    }

    /// A block of `class` from a thread's own cache; null where memory is out.
    ///
    /// # Safety
    /// `cache` is the calling thread's and not in use further up its stack.
    #[inline(always)]
    pub(crate) unsafe fn alloc(
        &self,
        backend: &impl Backend,
        cache: *mut ThreadCache,
        class: SizeClass,
    ) -> *mut u8 {
        // SAFETY: caches live for good.
        let cache = unsafe { &*cache };
        let block = cache.pop(class);
        if !block.is_null() {
            return block;
        }
        room::refill(&Own(cache), backend, class)
    }

    /// Takes a block of `class` into a thread's own cache.
    ///
    /// # Safety
    /// As [`ThreadCaches::alloc`]; the block is the caller's.
    #[inline(always)]
    pub(crate) unsafe fn free(
        &self,
        backend: &impl Backend,
        cache: *mut ThreadCache,
        class: SizeClass,
        block: *mut u8,
    ) {
        // SAFETY: caches live for good.
        let cache = unsafe { &*cache };
        if !cache.push(class, block) {
            room::overflow(&Own(cache), backend, class, block);
        }
    }

    /// Empties the calling thread's own cache; the number of blocks.
    ///
    /// # Safety
    /// As [`ThreadCaches::alloc`].
    pub(crate) unsafe fn flush(&self, backend: &impl Backend, cache: *mut ThreadCache) -> usize {
        // SAFETY: caches live for good.
        unsafe { &*cache }.flush(backend)
    }

    /// Empties the caches of dead threads; the number of blocks. For the background thread.
    pub(crate) fn reap(&self, backend: &impl Backend) -> usize {
        let mut flushed = 0;
        for cache in self.iter() {
            let owner = cache.owner.load(Acquire);
            let thread = thread_of(owner);
            if thread == 0
                || thread == REAPER
                || !is_dead(thread)
                || !cache.take_over(owner, REAPER)
            {
                continue;
            }
            flushed += cache.flush(backend);
            cache.owner.store(((owner >> 32) + 2) << 32, Release);
        }
        flushed
    }

    /// In the child of a fork, whose only thread has `own` (null: none): it has a new id, and what
    /// the other threads were doing to their caches is not known, so their blocks are lost to it.
    pub(crate) fn fork_child(&self, own: *mut ThreadCache) {
        for cache in self.iter() {
            let is_own = core::ptr::eq(cache, own);
            if !is_own {
                cache.forget_blocks();
            }
            let generation = (cache.owner.load(Relaxed) >> 32) + 1;
            let thread = if is_own { own_id() } else { 0 };
            cache.owner.store(generation << 32 | u64::from(thread), Release);
        }
    }

    /// Blocks of `class` in all thread caches, by a glance.
    pub(crate) fn cached_blocks(&self, class: SizeClass) -> usize {
        let blocks = |cache: &ThreadCache| {
            cache.region.header(class).cur.saturating_sub(LAYOUT.first(class))
        };
        self.iter().map(|cache| usize::from(blocks(cache))).sum()
    }

    /// Bytes of room in all thread caches, by a glance.
    pub(crate) fn used_bytes(&self) -> usize {
        self.iter().map(|cache| cache.account.used()).sum()
    }
}

fn own_id() -> u32 {
    linux::gettid().cast_unsigned()
}

/// Whether no thread of this process has the id.
fn is_dead(thread: u32) -> bool {
    // Signal 0 only asks.
    linux::tgkill(linux::getpid(), thread.cast_signed(), 0) == Err(Errno(libc::ESRCH))
}

#[cfg(test)]
mod tests {
    use super::super::room::testing::Tokens;
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
    use std::vec::Vec;

    fn alloc(
        caches: &ThreadCaches,
        tokens: &Tokens,
        cache: *mut ThreadCache,
        class: SizeClass,
    ) -> *mut u8 {
        // SAFETY: each test gives a cache to one thread.
        let block = unsafe { caches.alloc(tokens, cache, class) };
        if !block.is_null() {
            tokens.got(block);
        }
        block
    }

    fn free(
        caches: &ThreadCaches,
        tokens: &Tokens,
        cache: *mut ThreadCache,
        class: SizeClass,
        block: *mut u8,
    ) {
        tokens.gives(block);
        // SAFETY: as above.
        unsafe { caches.free(tokens, cache, class, block) };
    }

    #[test]
    fn blocks_stay_with_their_thread_within_its_budget() {
        let (caches, tokens) = (ThreadCaches::new(), Tokens::new(&[4, 40, 72], 2000));
        let cache = caches.acquire(&tokens, 0);
        for class in [4, 40, 72, 4] {
            let blocks: Vec<_> = (0..1000).map(|_| alloc(&caches, &tokens, cache, class)).collect();
            assert!(blocks.iter().all(|b| !b.is_null()));
            blocks.into_iter().for_each(|b| free(&caches, &tokens, cache, class, b));
            assert!(caches.used_bytes() <= 256 << 10);
        }
        assert!((32..=256).contains(&caches.cached_blocks(4)));
        let fetches = tokens.fetches.load(Relaxed);
        let block = alloc(&caches, &tokens, cache, 4);
        assert_eq!(tokens.fetches.load(Relaxed), fetches);
        free(&caches, &tokens, cache, 4, block);
        // SAFETY: the cache is this thread's.
        assert!(unsafe { &*cache }.flush(&tokens) > 32);
        assert_eq!((tokens.missing(), tokens.doubled.load(Relaxed)), (0, 0));
        assert_eq!(caches.used_bytes(), 0);
    }

    #[test]
    fn a_dead_threads_cache_is_found_and_a_living_ones_is_left_alone() {
        let (caches, tokens) = (ThreadCaches::new(), Tokens::new(&[4], 1000));
        let mine = caches.acquire(&tokens, 0);
        let block = alloc(&caches, &tokens, mine, 4);
        free(&caches, &tokens, mine, 4, block);
        let dead = std::thread::scope(|s| {
            let theirs = s.spawn(|| {
                let cache = caches.acquire(&tokens, 1);
                let block = alloc(&caches, &tokens, cache, 4);
                free(&caches, &tokens, cache, 4, block);
                assert_eq!(caches.reap(&tokens), 0, "nobody is dead");
                cache.addr()
            });
            theirs.join().unwrap()
        });
        assert_ne!(dead, mine.addr());
        wait_for_exit(&caches, dead);
        let heir =
            std::thread::scope(|s| s.spawn(|| caches.acquire(&tokens, 1).addr()).join().unwrap());
        assert_eq!(heir, dead, "the new thread got the dead one's cache");
        wait_for_exit(&caches, dead);
        let cached = caches.cached_blocks(4);
        assert!(caches.reap(&tokens) > 0);
        assert!(caches.cached_blocks(4) > 0 && caches.cached_blocks(4) < cached);
        assert_eq!(caches.reap(&tokens), 0);
        let heir =
            std::thread::scope(|s| s.spawn(|| caches.acquire(&tokens, 1).addr()).join().unwrap());
        assert_eq!((heir, caches.iter().count()), (dead, 2), "and once more after it was emptied");
    }

    /// A joined thread may still be on its way out of the kernel.
    fn wait_for_exit(caches: &ThreadCaches, cache: usize) {
        let cache = caches.iter().find(|c| core::ptr::from_ref(*c).addr() == cache).unwrap();
        while !is_dead(thread_of(cache.owner.load(Acquire))) {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_forked_child_keeps_its_own_and_forgets_the_others() {
        let (caches, tokens) = (ThreadCaches::new(), Tokens::new(&[4], 1000));
        let fill = |cache| {
            let block = alloc(&caches, &tokens, cache, 4);
            free(&caches, &tokens, cache, 4, block);
        };
        let mine = caches.acquire(&tokens, 0);
        fill(mine);
        let own = caches.cached_blocks(4);
        std::thread::scope(|s| drop(s.spawn(|| fill(caches.acquire(&tokens, 1)))));
        assert!(caches.cached_blocks(4) > own);
        caches.fork_child(mine);
        assert_eq!(caches.cached_blocks(4), own);
        let other =
            std::thread::scope(|s| s.spawn(|| caches.acquire(&tokens, 1).addr()).join().unwrap());
        assert!(other != mine.addr() && caches.iter().count() == 2);
    }

    #[test]
    fn threads_that_come_and_go_lose_nothing() {
        let (caches, tokens) = (ThreadCaches::new(), Tokens::new(&[4, 40], 5000));
        let stop = AtomicBool::new(false);
        std::thread::scope(|s| {
            let (caches, tokens, stop) = (&caches, &tokens, &stop);
            s.spawn(move || {
                while !stop.load(SeqCst) {
                    caches.reap(tokens);
                    std::thread::yield_now();
                }
            });
            for _ in 0..60 {
                let live: Vec<_> = (0..4).map(|_| s.spawn(move || churn(caches, tokens))).collect();
                live.into_iter().for_each(|thread| thread.join().unwrap());
            }
            stop.store(true, SeqCst);
        });
        assert!(caches.iter().count() <= 16, "{} caches", caches.iter().count());
        for cache in caches.iter() {
            cache.flush(&tokens);
        }
        assert_eq!((tokens.missing(), tokens.doubled.load(Relaxed)), (0, 0));
    }

    fn churn(caches: &ThreadCaches, tokens: &Tokens) {
        let cache = caches.acquire(tokens, 0);
        for round in 0..50 {
            let class = [4, 40][round % 2];
            let blocks: Vec<_> =
                (0..round * 7).map(|_| alloc(caches, tokens, cache, class)).collect();
            blocks
                .into_iter()
                .filter(|b| !b.is_null())
                .for_each(|b| free(caches, tokens, cache, class, b));
        }
    }
}
