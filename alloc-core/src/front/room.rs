//! Room: how many blocks of each class an array cache may hold, and how that changes.
//!
//! A class starts with no room, gets a batch at its first miss, and twice as much when it was empty
//! and full within [`SWING_US`], up to the maximum of its [`Layout`]: more room helps a cache that
//! runs empty and full by turns, not one that is only filled or only emptied, and not one that
//! others have to do with as rarely. Classes of extents, whose misses cost more, get it at every
//! miss and overflow. The room of all classes of a cache is
//! bounded in bytes, that of slabs and that of extents each (`used` <= `budget`): past that a class grows only at the cost of others.

use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};

use super::rseq::Header;
use super::size_class::{CLASS_BYTES, CLASSES, SLAB_CLASSES, SizeClass, class_bytes, is_extent};
pub(crate) use crate::arena::transfer::{BATCH_MAX, batch_len as batch};
use crate::os::linux;

/// Classes that a miss looks at for room.
const LOOKS: usize = 8;
/// A class of extents.
#[allow(clippy::cast_possible_truncation, reason = "CLASSES is below 256")]
const EXTENTS: SizeClass = CLASSES as SizeClass;
/// Misses that don't look, after one whose looks found nothing.
const REST: u32 = 16;
/// A miss and an overflow cost 0.3 us together: further apart than this they are not worth the memory.
const SWING_US: u32 = 128;

/// What the caches get their memory and their blocks from.
pub(crate) trait Backend {
    /// `bytes` zero bytes for good, aligned to a page; null where there are none.
    fn map(&self, bytes: usize) -> *mut u8;
    /// Blocks of `class` for the CPU or arena of index `arena`, at most `out.len()`; 0: no memory.
    fn fetch(&self, arena: usize, class: SizeClass, out: &mut [*mut u8]) -> usize;
    /// Takes blocks back, for whoever asks next.
    fn store(&self, arena: usize, class: SizeClass, blocks: &[*mut u8]);
    /// Takes blocks back to where they are from.
    fn take_home(&self, arena: usize, class: SizeClass, blocks: &[*mut u8]) {
        self.store(arena, class, blocks);
    }
}

/// Where the slots of each class are, in words from the start of the cache, and how many.
pub(crate) struct Layout {
    first: [u16; CLASSES + 1],
    max: [u16; CLASSES + 1],
    pub(crate) bytes: usize,
}

impl Layout {
    /// Lays out `max` slots a class from word `start` on, a null word below each class.
    #[allow(clippy::cast_possible_truncation, reason = "a position past 16 bits does not compile")]
    pub(crate) const fn new(start: usize, max: [u16; CLASSES + 1]) -> Self {
        let mut first = [0; CLASSES + 1];
        let mut word = start;
        let mut class = 1;
        while class <= CLASSES {
            word += 1;
            first[class] = word as u16;
            word += max[class] as usize;
            assert!(word <= u16::MAX as usize);
            class += 1;
        }
        Layout { first, max, bytes: word * 8 }
    }

    pub(crate) fn first(&self, class: SizeClass) -> u16 {
        self.first[class as usize]
    }

    pub(crate) fn max(&self, class: SizeClass) -> u16 {
        self.max[class as usize]
    }

    /// The header of a class without blocks and without room.
    pub(crate) fn empty(&self, class: SizeClass) -> Header {
        Header { cur: self.first(class), end: self.first(class) }
    }
}

/// Most slots of each class: `small` up to 1 KiB, above that what makes `bytes`, at most `middle`,
/// and at least `least`.
#[allow(clippy::cast_possible_truncation, reason = "at most `small` or `middle`")]
pub(crate) const fn slots(small: u16, middle: u16, least: u16, bytes: usize) -> [u16; CLASSES + 1] {
    let mut max = [0; CLASSES + 1];
    let mut class = 1;
    while class <= CLASSES {
        let size = CLASS_BYTES[class] as usize;
        let fit = bytes / size;
        max[class] = if size <= 1024 {
            small
        } else if fit > middle as usize {
            middle
        } else if fit < least as usize {
            least
        } else {
            fit as u16
        };
        class += 1;
    }
    max
}

/// What the room of one cache amounts to.
#[derive(Debug)]
pub(crate) struct Account {
    /// Bytes that the room of the classes of slabs, and of extents, would hold.
    used: [AtomicUsize; 2],
    /// Which class of the part gives way next.
    victim: [AtomicU32; 2],
    /// Misses that will not look for room in other classes.
    rest: [AtomicU32; 2],
    /// A bit a class: it was full when it last was full or empty.
    was_full: [AtomicU64; 2],
    /// When a class last was at the other end than before, microseconds.
    swung_us: [AtomicU32; CLASSES + 1],
}

/// At what end of its room a class is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Empty,
    Full,
}

/// Which part of the account `class` belongs to.
fn part(class: SizeClass) -> usize {
    usize::from(is_extent(class))
}

impl Account {
    pub(crate) fn used(&self) -> usize {
        self.used[0].load(Relaxed) + self.used[1].load(Relaxed)
    }

    /// What the room of the part that `class` does not belong to amounts to.
    pub(crate) fn used_beside(&self, class: SizeClass) -> usize {
        self.used[1 - part(class)].load(Relaxed)
    }

    /// Sets what the room amounts to, by a walk over `rooms`: bytes by class.
    pub(crate) fn set(&self, rooms: impl Iterator<Item = (SizeClass, usize)>) {
        let mut used = [0; 2];
        rooms.for_each(|(class, bytes)| used[part(class)] += bytes);
        self.used[0].store(used[0], Relaxed);
        self.used[1].store(used[1], Relaxed);
    }

    pub(crate) fn release(&self, class: SizeClass, bytes: usize) {
        self.used[part(class)].fetch_sub(bytes, Relaxed);
    }

    fn reserve(&self, class: SizeClass, bytes: usize, budget: usize) -> bool {
        let fits = |used: usize| used.checked_add(bytes).filter(|&sum| sum <= budget);
        self.used[part(class)].fetch_update(Relaxed, Relaxed, fits).is_ok()
    }

    /// Whether a miss of `class` may look for room in other classes.
    fn may_look(&self, class: SizeClass) -> bool {
        let rest = &self.rest[part(class)];
        let left = rest.load(Relaxed);
        rest.store(left.saturating_sub(1), Relaxed);
        left == 0
    }

    /// Notes that looking found nothing.
    fn looked_in_vain(&self, class: SizeClass) {
        self.rest[part(class)].store(REST, Relaxed);
    }

    /// Notes that `class` is at an end of its room; true: it was at the other one not long ago.
    fn swings(&self, class: SizeClass, at: At, now_us: impl FnOnce() -> u32) -> bool {
        let (word, bit) = (&self.was_full[usize::from(class / 64)], 1 << (class % 64));
        let before = match at {
            At::Empty => word.fetch_and(!bit, Relaxed),
            At::Full => word.fetch_or(bit, Relaxed),
        };
        if (before & bit != 0) == (at == At::Full) {
            return false;
        }
        let now_us = now_us();
        let last_us = self.swung_us[usize::from(class)].swap(now_us, Relaxed);
        now_us.wrapping_sub(last_us) <= SWING_US
    }

    #[allow(clippy::cast_possible_truncation, reason = "at most CLASSES")]
    fn next_victim(&self, of: usize) -> SizeClass {
        let (first, count) = [(1, SLAB_CLASSES), (SLAB_CLASSES + 1, CLASSES - SLAB_CLASSES)][of];
        let next = self.victim[of].load(Relaxed);
        self.victim[of].store((next + 1) % count as u32, Relaxed);
        (first as u32 + next) as SizeClass
    }
}

/// An array cache: of the current CPU, or of the calling thread. Between two calls it may have
/// become another CPU's; every operation then fails or works on that one, and none loses a block.
pub(crate) trait Array {
    fn layout(&self) -> &'static Layout;
    fn account(&self) -> &Account;
    /// The most bytes of room that the classes like `class` may have together: those of slabs, or
    /// those of extents.
    fn budget(&self, class: SizeClass) -> usize;
    /// The same for extents of a class that runs empty and full fast.
    fn budget_when_fast(&self, class: SizeClass) -> usize {
        self.budget(class)
    }
    /// The arena that serves it.
    fn arena(&self) -> usize;
    fn header(&self, class: SizeClass) -> Header;
    /// A clock, microseconds.
    #[allow(clippy::cast_possible_truncation, reason = "for differences")]
    fn now_us(&self) -> u32 {
        linux::now_us() as u32
    }
    /// Replaces a header if it still is `old`.
    fn replace(&self, class: SizeClass, old: Header, new: Header) -> bool;
    fn pop_batch(&self, class: SizeClass, out: &mut [*mut u8]) -> usize;
    /// Takes the first of `blocks` that there is room for; how many.
    fn push_batch(&self, class: SizeClass, blocks: &[*mut u8]) -> usize;
}

/// A block for a thread that found none of `class` in its cache, and more for the next misses; null:
/// no memory.
pub(crate) fn refill(array: &impl Array, backend: &impl Backend, class: SizeClass) -> *mut u8 {
    let mut blocks = [core::ptr::null_mut(); BATCH_MAX];
    // A cache that was parked may have what is needed.
    if array.pop_batch(class, &mut blocks[..1]) == 1 {
        return blocks[0];
    }
    grow(array, backend, class, At::Empty);
    let Header { cur, end } = array.header(class);
    let wanted = batch_now(array, class).min(usize::from(end.saturating_sub(cur)) + 1);
    let got = backend.fetch(array.arena(), class, &mut blocks[..wanted]);
    let Some((&mut block, rest)) = blocks[..got].split_first_mut() else {
        return core::ptr::null_mut();
    };
    let kept = array.push_batch(class, rest);
    if kept < rest.len() {
        backend.store(array.arena(), class, &rest[kept..]);
    }
    block
}

/// Takes a block of `class` that a cache had no room for.
pub(crate) fn overflow(
    array: &impl Array,
    backend: &impl Backend,
    class: SizeClass,
    block: *mut u8,
) {
    if array.header(class).end == array.layout().first(class) {
        // Nobody allocated of this class here: the block is of another cache's lines, and goes home, so
        // that two caches don't go on giving away parts of one line.
        grow(array, backend, class, At::Full);
        backend.take_home(array.arena(), class, &[block]);
        return;
    }
    let push = || array.push_batch(class, &[block]) == 1;
    if push() || (grow(array, backend, class, At::Full) && push()) {
        return;
    }
    let mut blocks = [block; BATCH_MAX];
    let popped = array.pop_batch(class, &mut blocks[1..batch_now(array, class)]);
    backend.store(array.arena(), class, &blocks[..=popped]);
}

/// Blocks that a miss fetches and an overflow gives back: of extents half the room, if that is more, since
/// all CPUs wait for one another where they come from.
fn batch_now(array: &impl Array, class: SizeClass) -> usize {
    if !is_extent(class) {
        return batch(class);
    }
    let room = array.header(class).end.saturating_sub(array.layout().first(class));
    batch(class).max(usize::from(room) / 2).min(BATCH_MAX)
}

/// Gives `class` more room, if that helps; false where it does not, or it has all it may have.
fn grow(array: &impl Array, backend: &impl Backend, class: SizeClass, at: At) -> bool {
    let Header { end, .. } = array.header(class);
    let (first, max) = (array.layout().first(class), array.layout().max(class));
    let fast = array.account().swings(class, at, || array.now_us());
    if !is_extent(class) && !fast && end > first {
        return false;
    }
    // What the other part of the classes gives back counts at once.
    let budget = || if fast { array.budget_when_fast(class) } else { array.budget(class) };
    let have = usize::from(end.saturating_sub(first));
    let left = usize::from(max) - have.min(usize::from(max));
    let size = class_bytes(class);
    // A small cache has room for more classes than one.
    let share = if is_extent(class) { usize::MAX } else { (budget() / size / 4).max(1) };
    let batch = batch(class).min(left).min(share).min(budget() / size);
    let mut more = have.max(batch).min(left);
    if more == 0 || batch == 0 {
        return false;
    }
    if !array.account().reserve(class, more * size, budget()) {
        more = batch;
        if !array.account().may_look(class) {
            return false;
        }
        steal(array, backend, class, more * size);
        if !array.account().reserve(class, more * size, budget()) {
            array.account().looked_in_vain(class);
            return false;
        }
    }
    let grown = change_end(array, class, |h| (h.end == end).then(|| end + narrow(more)));
    if grown.is_none() {
        array.account().release(class, more * size);
    }
    grown.is_some()
}

/// Takes `needed` bytes of room from other classes, if a few looks find it: first what they don't
/// use, then what a batch of theirs is in. A program that uses more classes than fit the budget
/// misses all the time, so a miss must stay cheap.
fn steal(array: &impl Array, backend: &impl Backend, class: SizeClass, needed: usize) {
    let mut freed = 0;
    // Others take back what extents had of their share while they were fast: for good, so all are looked at.
    let lent = array.account().used[1].load(Relaxed) > array.budget(EXTENTS);
    let (from, looks) = if lent { (1, CLASSES - SLAB_CLASSES) } else { (part(class), LOOKS) };
    for look in 0..looks {
        let victim = array.account().next_victim(from);
        if victim == class || array.header(victim).end <= array.layout().first(victim) {
            continue;
        }
        let wanted = (needed - freed).div_ceil(class_bytes(victim));
        if lent || look >= LOOKS / 2 {
            evict_batch(array, backend, victim, wanted);
        }
        freed += shrink(array, victim, wanted);
        if freed >= needed {
            return;
        }
    }
}

fn evict_batch(array: &impl Array, backend: &impl Backend, victim: SizeClass, wanted: usize) {
    let mut blocks = [core::ptr::null_mut(); BATCH_MAX];
    let n = array.pop_batch(victim, &mut blocks[..batch(victim).min(wanted)]);
    if n > 0 {
        backend.store(array.arena(), victim, &blocks[..n]);
    }
}

/// Takes up to `wanted` slots of unused room from `victim`; how many bytes.
fn shrink(array: &impl Array, victim: SizeClass, wanted: usize) -> usize {
    let unused = |h: Header| usize::from(h.end.saturating_sub(h.cur)).min(wanted);
    let old = change_end(array, victim, |h| (unused(h) > 0).then(|| h.end - narrow(unused(h))));
    let bytes = old.map_or(0, |h| unused(h) * class_bytes(victim));
    array.account().release(victim, bytes);
    bytes
}

/// Moves the end of a class's room; the header that was replaced. `None` where `new_end` has
/// nothing to do, or others keep getting in between.
fn change_end(
    array: &impl Array,
    class: SizeClass,
    new_end: impl Fn(Header) -> Option<u16>,
) -> Option<Header> {
    for _ in 0..4 {
        let old = array.header(class);
        let new = Header { end: new_end(old)?, ..old };
        if array.replace(class, old, new) {
            return Some(old);
        }
    }
    None
}

#[allow(clippy::cast_possible_truncation, reason = "a layout has at most u16::MAX words")]
fn narrow(slots: usize) -> u16 {
    debug_assert!(slots <= usize::from(u16::MAX));
    slots as u16
}

#[cfg(test)]
pub(super) mod testing {
    use super::*;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
    use std::vec::Vec;

    /// A backend whose blocks are numbers, and a record of who has each of them.
    pub(crate) struct Tokens {
        stock: Vec<Mutex<Vec<usize>>>,
        /// By token: whether it is in the hands of a user of the caches.
        out: Vec<AtomicBool>,
        total: usize,
        pub(crate) doubled: AtomicUsize,
        pub(crate) fetches: AtomicUsize,
    }

    impl Tokens {
        /// `per_class` tokens for each of `classes`.
        pub(crate) fn new(classes: &[SizeClass], per_class: usize) -> Self {
            let mut stock: Vec<_> = (0..=CLASSES).map(|_| Mutex::new(Vec::new())).collect();
            let mut next = 1;
            for &class in classes {
                stock[class as usize].get_mut().unwrap().extend(next..next + per_class);
                next += per_class;
            }
            Tokens {
                stock,
                out: (0..next).map(|_| AtomicBool::new(false)).collect(),
                total: next - 1,
                doubled: AtomicUsize::new(0),
                fetches: AtomicUsize::new(0),
            }
        }

        /// Records that a user got `token`.
        pub(crate) fn got(&self, token: *mut u8) {
            if self.out[token.addr()].swap(true, SeqCst) {
                self.doubled.fetch_add(1, SeqCst);
            }
        }

        /// Records that a user is about to give `token` away.
        pub(crate) fn gives(&self, token: *mut u8) {
            if !self.out[token.addr()].swap(false, SeqCst) {
                self.doubled.fetch_add(1, SeqCst);
            }
        }

        /// How many tokens are neither in stock nor with a user.
        pub(crate) fn missing(&self) -> usize {
            let out = self.out.iter().filter(|out| out.load(SeqCst)).count();
            let stock: usize = self.stock.iter().map(|class| class.lock().unwrap().len()).sum();
            self.total - out.min(self.total) - stock.min(self.total - out)
        }
    }

    impl Backend for Tokens {
        fn map(&self, bytes: usize) -> *mut u8 {
            let layout = std::alloc::Layout::from_size_align(bytes, 4096).unwrap();
            // SAFETY: `bytes` is not 0.
            unsafe { std::alloc::alloc_zeroed(layout) }
        }

        fn fetch(&self, _arena: usize, class: SizeClass, out: &mut [*mut u8]) -> usize {
            self.fetches.fetch_add(1, Relaxed);
            let mut stock = self.stock[class as usize].lock().unwrap();
            let n = out.len().min(stock.len());
            let from = stock.len() - n;
            for (block, token) in out.iter_mut().zip(stock.drain(from..)) {
                *block = core::ptr::without_provenance_mut(token);
            }
            n
        }

        fn store(&self, _arena: usize, class: SizeClass, blocks: &[*mut u8]) {
            self.stock[class as usize].lock().unwrap().extend(blocks.iter().map(|b| b.addr()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::Tokens;
    use super::*;
    use std::cell::{Cell, RefCell};
    use std::vec::Vec;

    static LAYOUT: Layout = Layout::new(128, slots(1024, 512, 2, 4 << 20));

    /// An array of one thread, as plain as can be.
    struct Plain {
        blocks: RefCell<Vec<Vec<*mut u8>>>,
        room: RefCell<Vec<u16>>,
        account: Account,
        budget: Cell<usize>,
        budget_of_extents: Cell<usize>,
        now_us: Cell<u32>,
    }

    impl Plain {
        fn new(budget: usize) -> Self {
            Plain {
                blocks: RefCell::new(std::vec![Vec::new(); CLASSES + 1]),
                room: RefCell::new(std::vec![0; CLASSES + 1]),
                // SAFETY: zero is what a new cache has.
                account: unsafe { core::mem::zeroed() },
                budget: Cell::new(budget),
                budget_of_extents: Cell::new(budget),
                now_us: Cell::new(0),
            }
        }

        fn alloc(&self, tokens: &Tokens, class: SizeClass) -> *mut u8 {
            let block = self.blocks.borrow_mut()[class as usize].pop();
            let block = block.unwrap_or_else(|| refill(self, tokens, class));
            if !block.is_null() {
                tokens.got(block);
            }
            block
        }

        fn free(&self, tokens: &Tokens, class: SizeClass, block: *mut u8) {
            tokens.gives(block);
            if self.push_batch(class, &[block]) == 0 {
                overflow(self, tokens, class, block);
            }
        }

        fn room_bytes(&self) -> usize {
            let room = self.room.borrow();
            (1..=CLASSES).map(|c| usize::from(room[c]) * CLASS_BYTES[c] as usize).sum()
        }
    }

    impl Array for Plain {
        fn layout(&self) -> &'static Layout {
            &LAYOUT
        }
        fn account(&self) -> &Account {
            &self.account
        }
        fn budget(&self, class: SizeClass) -> usize {
            let least = if is_extent(class) { self.budget_of_extents.get() } else { usize::MAX };
            self.budget_when_fast(class).min(least)
        }
        fn budget_when_fast(&self, class: SizeClass) -> usize {
            self.budget.get().saturating_sub(self.account.used_beside(class))
        }
        fn arena(&self) -> usize {
            0
        }
        fn now_us(&self) -> u32 {
            self.now_us.get()
        }
        fn header(&self, class: SizeClass) -> Header {
            let first = LAYOUT.first(class);
            let blocks = narrow(self.blocks.borrow()[class as usize].len());
            Header { cur: first + blocks, end: first + self.room.borrow()[class as usize] }
        }
        fn replace(&self, class: SizeClass, old: Header, new: Header) -> bool {
            assert_eq!(self.header(class), old);
            assert!(new.cur == old.cur && new.cur <= new.end);
            assert!(new.end - LAYOUT.first(class) <= LAYOUT.max(class));
            self.room.borrow_mut()[class as usize] = new.end - LAYOUT.first(class);
            true
        }
        fn pop_batch(&self, class: SizeClass, out: &mut [*mut u8]) -> usize {
            let blocks = &mut self.blocks.borrow_mut()[class as usize];
            let n = out.len().min(blocks.len());
            out[..n].fill_with(|| blocks.pop().unwrap());
            n
        }
        fn push_batch(&self, class: SizeClass, new: &[*mut u8]) -> usize {
            let blocks = &mut self.blocks.borrow_mut()[class as usize];
            let n = new.len().min(usize::from(self.room.borrow()[class as usize]) - blocks.len());
            blocks.extend(new[..n].iter().rev());
            n
        }
    }

    #[test]
    fn the_layout_keeps_a_null_word_below_each_class() {
        let mut free = 128;
        for class in 1..=CLASSES {
            let (first, max) = (usize::from(LAYOUT.first[class]), usize::from(LAYOUT.max[class]));
            assert_eq!(first, free + 1, "class {class}");
            assert!(max >= 2);
            free = first + max;
        }
        assert_eq!(LAYOUT.bytes, free * 8);
        assert!(LAYOUT.bytes <= 512 << 10);
    }

    #[test]
    fn a_class_doubles_up_to_its_maximum_and_then_misses_no_more() {
        let (array, tokens) = (Plain::new(8 << 20), Tokens::new(&[4], 2000));
        for _ in 0..7 {
            let blocks: Vec<_> = (0..1000).map(|_| array.alloc(&tokens, 4)).collect();
            assert!(blocks.iter().all(|b| !b.is_null()));
            blocks.into_iter().for_each(|b| array.free(&tokens, 4, b));
        }
        assert_eq!(array.room.borrow()[4], 1024);
        let before = tokens.fetches.load(Relaxed);
        let blocks: Vec<_> = (0..1000).map(|_| array.alloc(&tokens, 4)).collect();
        assert_eq!(tokens.fetches.load(Relaxed), before);
        blocks.into_iter().for_each(|b| array.free(&tokens, 4, b));
        assert_eq!(array.account.used(), 1024 * 64);
    }

    #[test]
    fn the_room_of_the_classes_keeps_to_the_budgets_and_moves_to_those_in_use() {
        let classes = [8, 32, 56, 80, 104];
        let (array, tokens) = (Plain::new(1 << 20), Tokens::new(&classes, 5000));
        let mut held: Vec<(SizeClass, *mut u8)> = Vec::new();
        let mut random = 1u64;
        for i in 0..40_000 {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            // First all classes, then the smallest alone.
            let class =
                if i < 20_000 { classes[(random >> 40) as usize % classes.len()] } else { 8 };
            if held.len() < 300 || random >> 63 == 0 {
                held.push((class, array.alloc(&tokens, class)));
            } else {
                let at = (random >> 33) as usize % held.len();
                let (class, block) = held.swap_remove(at);
                array.free(&tokens, class, block);
            }
            assert_eq!(array.room_bytes(), array.account.used());
            for part in &array.account.used {
                assert!(part.load(Relaxed) <= 1 << 20);
            }
        }
        held.drain(..)
            .filter(|(_, b)| !b.is_null())
            .for_each(|(class, b)| array.free(&tokens, class, b));
        for &class in &classes {
            let mut out = [core::ptr::null_mut(); 2048];
            let n = array.pop_batch(class, &mut out);
            tokens.store(0, class, &out[..n]);
        }
        assert_eq!((tokens.missing(), tokens.doubled.load(Relaxed)), (0, 0));
    }

    #[test]
    fn a_class_that_is_only_emptied_or_only_filled_has_room_for_a_batch_or_two() {
        let (array, tokens) = (Plain::new(8 << 20), Tokens::new(&[4], 4000));
        let blocks: Vec<_> = (0..2000).map(|_| array.alloc(&tokens, 4)).collect();
        assert_eq!(array.room.borrow()[4], 64);
        blocks.into_iter().for_each(|b| array.free(&tokens, 4, b));
        assert_eq!(array.room.borrow()[4], 128);
    }

    #[test]
    fn a_class_that_swings_slowly_gets_no_more_room() {
        for (apart_us, room) in [(SWING_US, 1024), (SWING_US + 1, 64)] {
            let (array, tokens) = (Plain::new(8 << 20), Tokens::new(&[4], 2000));
            for _ in 0..7 {
                let tick = || array.now_us.set(array.now_us.get() + apart_us);
                tick();
                let blocks: Vec<_> = (0..1000).map(|_| array.alloc(&tokens, 4)).collect();
                tick();
                blocks.into_iter().for_each(|b| array.free(&tokens, 4, b));
            }
            assert_eq!(array.room.borrow()[4], room);
        }
    }

    #[test]
    fn slabs_take_back_what_extents_had_while_they_were_fast() {
        let (array, tokens) = (Plain::new(4 << 20), Tokens::new(&[32, 89], 6000));
        array.budget_of_extents.set(1 << 20);
        // 128 KiB each.
        for _ in 0..6 {
            let blocks: Vec<_> = (0..30).map(|_| array.alloc(&tokens, 89)).collect();
            blocks.into_iter().for_each(|b| array.free(&tokens, 89, b));
        }
        assert!(array.account.used_beside(32) > 7 << 19, "{}", array.account.used_beside(32));
        for _ in 0..100 {
            let blocks: Vec<_> = (0..1000).map(|_| array.alloc(&tokens, 32)).collect();
            blocks.into_iter().for_each(|b| array.free(&tokens, 32, b));
            assert!(array.account.used() <= 4 << 20);
        }
        assert_eq!(array.account.used_beside(89), 1 << 20, "all that this class may have");
    }

    #[test]
    fn a_cache_of_no_budget_keeps_nothing() {
        let (array, tokens) = (Plain::new(0), Tokens::new(&[4], 10));
        let block = array.alloc(&tokens, 4);
        assert_eq!(tokens.fetches.load(Relaxed), 1);
        array.free(&tokens, 4, block);
        assert_eq!((array.account.used(), tokens.missing()), (0, 0));
    }

    #[test]
    fn the_first_block_of_a_class_that_was_only_freed_here_goes_home() {
        let (array, tokens) = (Plain::new(1 << 20), Tokens::new(&[4], 10));
        let mut out = [core::ptr::null_mut(); 2];
        tokens.fetch(0, 4, &mut out);
        out.iter().for_each(|&block| tokens.got(block));
        array.free(&tokens, 4, out[0]);
        assert!(array.blocks.borrow()[4].is_empty(), "it may share a line with another cache's");
        array.free(&tokens, 4, out[1]);
        assert_eq!(array.blocks.borrow()[4], [out[1]]);
    }

    #[test]
    fn shrinking_the_budget_lets_others_have_the_room() {
        let (array, tokens) = (Plain::new(1 << 20), Tokens::new(&[32, 40], 2000));
        for _ in 0..5 {
            let blocks: Vec<_> = (0..1000).map(|_| array.alloc(&tokens, 32)).collect();
            blocks.into_iter().for_each(|b| array.free(&tokens, 32, b));
        }
        let used = array.account.used();
        assert!(used > 512 << 10);
        array.budget.set(256 << 10);
        for _ in 0..40 {
            let blocks: Vec<_> = (0..100).map(|_| array.alloc(&tokens, 40)).collect();
            blocks.into_iter().for_each(|b| array.free(&tokens, 40, b));
        }
        assert!(array.account.used() < used);
    }
}
