//! The transfer stacks: full batches of free blocks on their way from one CPU's cache to another's,
//! a lock-free stack a class.
//!
//! Invariants: a node is on one stack, or belongs to the one thread that popped it, and only that
//! thread touches its batch; nodes are never freed, so that a late reader of `next` reads a node;
//! every change of a stack's head counts its tag up, so that a late writer fails.
use crate::front::size_class::{CLASSES, SizeClass, class_bytes, is_extent};
#[cfg(any(test, loom))]
use crate::sync::array;
use crate::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed},
};
use crate::sync::{UnsafeCell, const_fn};

/// Most blocks in a batch: of [`SMALL_BYTES`] bytes and less, and half as many of larger ones.
pub(crate) const BATCH_MAX: usize = 64;
/// Of such blocks a batch is so few bytes that the stacks cost more than the memory.
const SMALL_BYTES: usize = 256;
const BATCH_BYTES: usize = 256 << 10;
/// Of blocks that are extents of their own: a batch is taken as one run and cut.
const EXTENT_BATCH_BYTES: usize = 1 << 20;
/// What one class may keep here, bytes.
const CLASS_CAP_BYTES: usize = 1 << 20;
const BATCHES_MIN: usize = 2;
const BATCHES_MAX: usize = 64;

#[repr(C, align(64))]
struct Node {
    /// Handle of the node below; read by threads that do not own the node.
    next: AtomicU32,
    batch: UnsafeCell<Batch>,
}

struct Batch {
    len: u32,
    blocks: [*mut u8; BATCH_MAX],
}

/// A node's index plus one; 0 = none.
type Handle = u32;

const HANDLE_BITS: u32 = 16;
const COUNT_BITS: u32 = 12;

/// A stack's head: handle of the top node, number of nodes, and the tag in the other bits.
#[derive(Clone, Copy)]
struct Head(u64);

impl Head {
    #[allow(clippy::cast_possible_truncation, reason = "masked")]
    fn top(self) -> Handle {
        (self.0 & ((1 << HANDLE_BITS) - 1)) as u32
    }

    #[allow(clippy::cast_possible_truncation, reason = "masked")]
    fn count(self) -> u32 {
        (self.0 >> HANDLE_BITS & ((1 << COUNT_BITS) - 1)) as u32
    }

    /// The head after this one. Only a stack whose limit is above the field's range wraps its
    /// count, and nobody asks for that one.
    fn next(self, top: Handle, count: u32) -> Self {
        let tag = (self.0 >> (HANDLE_BITS + COUNT_BITS)).wrapping_add(1);
        let count = u64::from(count & ((1 << COUNT_BITS) - 1));
        Self(tag << (HANDLE_BITS + COUNT_BITS) | count << HANDLE_BITS | u64::from(top))
    }
}

#[repr(align(64))]
struct Stack {
    head: AtomicU64,
    /// Fewest nodes since the background thread last looked.
    low: AtomicU32,
    /// Blocks in the nodes, for statistics.
    blocks: AtomicU32,
}

impl Stack {
    const_fn! {
        #[cfg(any(test, loom))]
        const fn new() -> Self {
            Self { head: AtomicU64::new(0), low: AtomicU32::new(0), blocks: AtomicU32::new(0) }
        }
    }

    fn count(&self) -> u32 {
        Head(self.head.load(Relaxed)).count()
    }

    /// False, and the node is still the caller's, where the stack has `limit` nodes already.
    fn push(&self, nodes: &[Node], handle: Handle, limit: u32) -> bool {
        let mut head = Head(self.head.load(Relaxed));
        while head.count() < limit {
            node(nodes, handle).next.store(head.top(), Relaxed);
            let new = head.next(handle, head.count().wrapping_add(1));
            match self.head.compare_exchange_weak(head.0, new.0, AcqRel, Relaxed) {
                Ok(_) => return true,
                Err(now) => head = Head(now),
            }
        }
        false
    }

    /// Pops a node, which is the caller's then; with the number of nodes left.
    fn pop(&self, nodes: &[Node]) -> Option<(Handle, u32)> {
        let mut head = Head(self.head.load(Acquire));
        while head.top() != 0 {
            // May be changing under us where somebody else pops it: then the exchange fails.
            let below = node(nodes, head.top()).next.load(Relaxed);
            let new = head.next(below, head.count().wrapping_sub(1));
            match self.head.compare_exchange_weak(head.0, new.0, AcqRel, Acquire) {
                Ok(_) => return Some((head.top(), new.count())),
                Err(now) => head = Head(now),
            }
        }
        None
    }
}

fn node(nodes: &[Node], handle: Handle) -> &Node {
    &nodes[handle as usize - 1]
}

/// Transfer stacks for classes `0..STACKS`, with `NODES` batches between them. All zero when new.
pub(crate) struct Transfer<const STACKS: usize, const NODES: usize> {
    stacks: [Stack; STACKS],
    /// Nodes without a batch.
    free: Stack,
    /// Nodes that were used at some time: the others are not resident.
    used: AtomicU32,
    nodes: [Node; NODES],
}

/// Enough for every class at its limit, with batches of [`batch_len`] blocks.
pub(crate) type ClassTransfer = Transfer<{ CLASSES + 1 }, 4096>;

// SAFETY: the blocks in a batch are addresses, and belong to whoever owns the node.
unsafe impl<const STACKS: usize, const NODES: usize> Send for Transfer<STACKS, NODES> {}
// SAFETY: the blocks in a batch belong to whoever owns the node, and nodes change hands through
// the stacks.
unsafe impl<const STACKS: usize, const NODES: usize> Sync for Transfer<STACKS, NODES> {}

/// Blocks of `class` that travel together: at most 256 KiB (extents: 1 MiB) and [`BATCH_MAX`].
pub(crate) fn batch_len(class: SizeClass) -> usize {
    let bytes = if is_extent(class) { EXTENT_BATCH_BYTES } else { BATCH_BYTES };
    let size = class_bytes(class).max(1);
    (bytes / size).clamp(1, if size <= SMALL_BYTES { BATCH_MAX } else { BATCH_MAX / 2 })
}

/// Most batches of `len` blocks that `class` may keep here.
#[allow(clippy::cast_possible_truncation, reason = "at most BATCHES_MAX")]
fn limit(class: SizeClass, len: usize) -> u32 {
    let batch_bytes = class_bytes(class).max(1) * len;
    (CLASS_CAP_BYTES / batch_bytes).clamp(BATCHES_MIN, BATCHES_MAX) as u32
}

impl<const STACKS: usize, const NODES: usize> Transfer<STACKS, NODES> {
    const HANDLES_FIT: () = assert!(NODES < 1 << HANDLE_BITS);

    const_fn! {
        #[cfg(any(test, loom))]
        pub(crate) const fn new() -> Self {
            Self {
                stacks: array![Stack::new(); STACKS],
                free: Stack::new(),
                used: AtomicU32::new(0),
                nodes: array![
                    Node {
                        next: AtomicU32::new(0),
                        batch: UnsafeCell::new(Batch { len: 0, blocks: [core::ptr::null_mut(); BATCH_MAX] }),
                    };
                    NODES
                ],
            }
        }
    }

    /// Leaves a batch of 1 to [`BATCH_MAX`] blocks of `class`. False, and the blocks are still the
    /// caller's, where that class has enough already or there is no node.
    #[allow(clippy::cast_possible_truncation, reason = "at most BATCH_MAX")]
    pub(crate) fn put(&self, class: SizeClass, blocks: &[*mut u8]) -> bool {
        debug_assert!((1..=BATCH_MAX).contains(&blocks.len()));
        let stack = &self.stacks[class as usize];
        let limit = limit(class, blocks.len());
        // Most refusals are seen here, before a node is taken.
        if stack.count() >= limit {
            return false;
        }
        let Some(handle) = self.take_node() else {
            return false;
        };
        self.fill(handle, blocks);
        let done = stack.push(&self.nodes, handle, limit);
        if done {
            stack.blocks.fetch_add(blocks.len() as u32, Relaxed);
        } else {
            self.free.push(&self.nodes, handle, u32::MAX);
        }
        done
    }

    /// Takes a batch of `class`, as far as it fits into `out`; the result is the number of blocks.
    #[allow(clippy::cast_possible_truncation, reason = "at most BATCH_MAX")]
    pub(crate) fn get(&self, class: SizeClass, out: &mut [*mut u8]) -> usize {
        let stack = &self.stacks[class as usize];
        let Some((handle, left)) = stack.pop(&self.nodes) else {
            stack.low.store(0, Relaxed);
            return 0;
        };
        if left < stack.low.load(Relaxed) {
            stack.low.store(left, Relaxed);
        }
        let (taken, rest) = self.empty(handle, out);
        stack.blocks.fetch_sub(taken as u32, Relaxed);
        // The rest of a batch goes back whatever the limit.
        let to = if rest { stack } else { &self.free };
        to.push(&self.nodes, handle, u32::MAX);
        taken
    }

    /// Hands up to `batches` batches of `class` to `f`; the result is the number of blocks.
    pub(crate) fn drain(
        &self,
        class: SizeClass,
        batches: u32,
        mut f: impl FnMut(&[*mut u8]),
    ) -> usize {
        let mut blocks = [core::ptr::null_mut(); BATCH_MAX];
        let mut total = 0;
        for _ in 0..batches {
            let taken = self.get(class, &mut blocks);
            if taken == 0 {
                break;
            }
            f(&blocks[..taken]);
            total += taken;
        }
        total
    }

    /// Forgets everything that is here, in a fork's child whose copy of it may not be whole.
    pub(crate) fn forget(&self) {
        for stack in self.stacks.iter().chain([&self.free]) {
            stack.head.store(0, Relaxed);
            stack.blocks.store(0, Relaxed);
        }
        self.used.store(0, Relaxed);
    }

    /// Blocks of `class` here, by a glance.
    pub(crate) fn blocks(&self, class: SizeClass) -> usize {
        self.stacks[class as usize].blocks.load(Relaxed) as usize
    }

    /// Batches of `class` here now.
    pub(crate) fn batches(&self, class: SizeClass) -> u32 {
        self.stacks[class as usize].count()
    }

    /// Batches of `class` that nobody needed since this was last asked.
    pub(crate) fn idle_batches(&self, class: SizeClass) -> u32 {
        let stack = &self.stacks[class as usize];
        let now = stack.count();
        stack.low.swap(now, Relaxed).min(now)
    }

    fn take_node(&self) -> Option<Handle> {
        let () = Self::HANDLES_FIT;
        if let Some((handle, _)) = self.free.pop(&self.nodes) {
            return Some(handle);
        }
        let mut used = self.used.load(Relaxed);
        while (used as usize) < NODES {
            match self.used.compare_exchange_weak(used, used + 1, Relaxed, Relaxed) {
                Ok(_) => return Some(used + 1),
                Err(now) => used = now,
            }
        }
        None
    }

    #[allow(clippy::cast_possible_truncation, reason = "at most BATCH_MAX")]
    fn fill(&self, handle: Handle, blocks: &[*mut u8]) {
        node(&self.nodes, handle).batch.with_mut(|batch| {
            // SAFETY: the caller owns the node.
            let batch = unsafe { &mut *batch };
            batch.blocks[..blocks.len()].copy_from_slice(blocks);
            batch.len = blocks.len() as u32;
        });
    }

    /// Moves the last blocks of a node's batch out; with whether some are left.
    #[allow(clippy::cast_possible_truncation, reason = "at most BATCH_MAX")]
    fn empty(&self, handle: Handle, out: &mut [*mut u8]) -> (usize, bool) {
        node(&self.nodes, handle).batch.with_mut(|batch| {
            // SAFETY: the caller owns the node.
            let batch = unsafe { &mut *batch };
            let len = batch.len as usize;
            let taken = len.min(out.len());
            out[..taken].copy_from_slice(&batch.blocks[len - taken..len]);
            batch.len -= taken as u32;
            (taken, taken < len)
        })
    }
}

#[cfg(test)]
fn block(n: usize) -> *mut u8 {
    core::ptr::without_provenance_mut(n * 16)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::front::size_class::class_of;
    use std::collections::BTreeSet;
    use std::vec::Vec;

    type Small = Transfer<{ CLASSES + 1 }, 200>;

    fn batch(first: usize, len: usize) -> Vec<*mut u8> {
        (first..first + len).map(block).collect()
    }

    #[test]
    fn a_node_is_nine_lines_and_a_new_one_is_zero() {
        assert_eq!(size_of::<Node>(), 576);
        static FRESH: Small = Small::new();
        let words = core::ptr::from_ref(&FRESH).cast::<[u64; size_of::<Small>() / 8]>();
        // SAFETY: plain words, which nobody writes.
        assert!(unsafe { &*words }.iter().all(|&word| word == 0));
    }

    #[test]
    fn batches_come_back_whole() {
        let transfer = Small::new();
        let mut out = [core::ptr::null_mut(); BATCH_MAX];
        assert_eq!(transfer.get(1, &mut out), 0);
        assert!(transfer.put(1, &batch(1, 32)));
        assert!(transfer.put(1, &batch(100, 5)));
        assert!(transfer.put(2, &batch(200, 7)));
        assert_eq!((transfer.batches(1), transfer.batches(2)), (2, 1));
        assert_eq!(transfer.get(1, &mut out), 5);
        assert_eq!(out[..5], batch(100, 5));
        // What does not fit stays.
        assert_eq!(transfer.get(1, &mut out[..20]), 20);
        assert_eq!(out[..20], batch(13, 20));
        assert_eq!(transfer.get(1, &mut out), 12);
        assert_eq!(out[..12], batch(1, 12));
        assert_eq!(transfer.get(1, &mut out), 0);
        assert_eq!(transfer.get(2, &mut out), 7);
        assert_eq!(transfer.used.load(Relaxed), 3, "nodes are used again");
    }

    #[test]
    fn classes_have_limits() {
        assert_eq!(limit(class_of(16), 32), 64);
        assert_eq!(limit(class_of(1024), 32), 32);
        assert_eq!(limit(class_of(32 << 10), 2), 16);
        assert_eq!(limit(class_of(1 << 20), 1), 2);
        let most = |class| limit(class, batch_len(class)) as usize;
        let all: usize = (1..=SizeClass::try_from(CLASSES).unwrap()).map(most).sum();
        assert!(all < 4096, "{all} nodes");
        let transfer = Small::new();
        let class = class_of(1024);
        for i in 0..32 {
            assert!(transfer.put(class, &batch(i * 32 + 1, 32)));
        }
        assert!(!transfer.put(class, &batch(2000, 32)));
        assert_eq!(transfer.batches(class), 32);
        assert!(transfer.put(class_of(2048), &batch(2000, 32)), "another class has its own");
        let mut seen = BTreeSet::new();
        assert_eq!(transfer.drain(class, 10, |blocks| seen.extend(blocks.iter().copied())), 320);
        assert_eq!(
            transfer.drain(class, u32::MAX, |blocks| seen.extend(blocks.iter().copied())),
            704
        );
        assert_eq!(seen, batch(1, 1024).into_iter().collect());
        assert!(transfer.put(class, &batch(1, 32)));
    }

    #[test]
    fn nodes_run_out() {
        let transfer = Transfer::<4, 3>::new();
        for class in [1, 1, 2] {
            assert!(transfer.put(class, &batch(1, 1)));
        }
        assert!(!transfer.put(3, &batch(1, 1)));
        assert_eq!(transfer.get(2, &mut [core::ptr::null_mut()]), 1);
        assert!(transfer.put(3, &batch(1, 1)));
    }

    #[test]
    fn idle_is_what_nobody_needed() {
        let transfer = Small::new();
        let mut out = [core::ptr::null_mut(); BATCH_MAX];
        let put = |n: usize| (0..n).for_each(|i| assert!(transfer.put(1, &batch(i + 1, 1))));
        put(10);
        assert_eq!(transfer.idle_batches(1), 0, "all of them came since");
        assert_eq!(transfer.idle_batches(1), 10);
        (0..4).for_each(|_| assert_eq!(transfer.get(1, &mut out), 1));
        put(3);
        assert_eq!(transfer.idle_batches(1), 6);
        assert_eq!(transfer.idle_batches(1), 9);
        transfer.drain(1, 9, |_| ());
        assert_eq!(transfer.get(1, &mut out), 0);
        put(5);
        assert_eq!(transfer.idle_batches(1), 0);
    }

    /// Threads carry blocks around between two stacks with too few nodes; at the end each block
    /// is in one place.
    #[test]
    fn threads_lose_and_double_nothing() {
        const BLOCKS: usize = 4 * 64;
        static TRANSFER: Transfer<3, 24> = Transfer::new();
        let carry = |first: usize| {
            let mut mine = batch(first, 64);
            let mut out = [core::ptr::null_mut(); BATCH_MAX];
            let mut seed = first as u64;
            for _ in 0..50_000 {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let class = SizeClass::from(seed >> 40 & 1 == 0) + 1;
                let len = 1 + (seed >> 41) as usize % 16;
                if seed >> 50 & 1 == 0 && len <= mine.len() {
                    if TRANSFER.put(class, &mine[mine.len() - len..]) {
                        mine.truncate(mine.len() - len);
                    }
                } else {
                    let taken = TRANSFER.get(class, &mut out[..len]);
                    mine.extend_from_slice(&out[..taken]);
                }
            }
            mine.into_iter().map(|block| block.addr()).collect::<Vec<_>>()
        };
        let mut all: Vec<usize> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|t| scope.spawn(move || carry(t * 64 + 1))).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        for class in [1, 2] {
            TRANSFER.drain(class, u32::MAX, |blocks| {
                all.extend(blocks.iter().map(|block| block.addr()))
            });
        }
        all.sort_unstable();
        assert_eq!(all, (1..=BLOCKS).map(|n| n * 16).collect::<Vec<_>>());
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;
    use std::vec::Vec;

    type Tiny = Transfer<2, 3>;

    fn check(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(preemptions);
        builder.check(model);
    }

    fn get(transfer: &Tiny) -> Vec<usize> {
        let mut out = [core::ptr::null_mut(); BATCH_MAX];
        let taken = transfer.get(1, &mut out);
        out[..taken].iter().map(|block| block.addr() / 16).collect()
    }

    fn sorted(parts: impl IntoIterator<Item = Vec<usize>>) -> Vec<usize> {
        let mut all: Vec<_> = parts.into_iter().flatten().collect();
        all.sort_unstable();
        all
    }

    /// The consumer's thread is last: loom misses that a writer which reads first races with
    /// readers before it.
    #[test]
    fn loom_two_producers_and_a_consumer() {
        check(5, || {
            let transfer = Arc::new(Tiny::new());
            let (one, two) = (Arc::clone(&transfer), Arc::clone(&transfer));
            let producer = thread::spawn(move || assert!(one.put(1, &[block(1), block(2)])));
            let consumer = thread::spawn(move || [get(&two), get(&two)]);
            assert!(transfer.put(1, &[block(3), block(4)]));
            producer.join().unwrap();
            let during = consumer.join().unwrap();
            let after = [get(&transfer), get(&transfer)];
            let all = sorted(during.into_iter().chain(after));
            assert_eq!(all, [1, 2, 3, 4]);
            assert!(get(&transfer).is_empty());
        });
    }

    /// A pop that is interrupted between its read of `next` and its exchange, while the same node
    /// leaves the top and returns to it over another.
    #[test]
    fn loom_a_node_that_came_back_is_seen() {
        check(5, || {
            let transfer = Arc::new(Tiny::new());
            assert!(transfer.put(1, &[block(1)]));
            assert!(transfer.put(1, &[block(2)]));
            let other = Arc::clone(&transfer);
            let slow = thread::spawn(move || get(&other));
            let (first, second) = (get(&transfer), get(&transfer));
            // The free stack gives the node freed last, so the second, then the first.
            let mut again = Vec::new();
            for n in [second.clone(), first.clone()].into_iter().flatten() {
                assert!(transfer.put(1, &[block(n + 10)]));
                again.push(n + 10);
            }
            let slow = slow.join().unwrap();
            let rest = [get(&transfer), get(&transfer), get(&transfer)];
            let gone = sorted([first, second, slow].into_iter().chain(rest));
            let put = sorted([std::vec![1, 2], again]);
            assert_eq!(gone, put);
        });
    }

    #[test]
    fn loom_a_consumer_puts_the_rest_back() {
        check(5, || {
            let transfer = Arc::new(Tiny::new());
            assert!(transfer.put(1, &[block(1), block(2), block(3)]));
            let other = Arc::clone(&transfer);
            let thread = thread::spawn(move || {
                let mut one = [core::ptr::null_mut()];
                let taken = other.get(1, &mut one);
                one[..taken].iter().map(|block| block.addr() / 16).collect::<Vec<_>>()
            });
            let mine = get(&transfer);
            let theirs = thread.join().unwrap();
            assert_eq!(sorted([mine, theirs, get(&transfer), get(&transfer)]), [1, 2, 3]);
        });
    }
}
