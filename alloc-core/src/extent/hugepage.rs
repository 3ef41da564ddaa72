//! Huge pages: what is known of each 2 MiB frame of the window, and the looks that turn dense frames
//! into huge pages in the background. A frame qualifies while every page of it is in use or dirty,
//! somebody uses it, and more than nine in ten are resident at two looks. The kernel is then asked
//! to collapse it (`MADV_COLLAPSE`), which needs no advice on the mapping and so splits none.
//!
//! Invariant, under the heap's lock: `backed` counts a frame's pages that are not clean, `in_use`
//! those of extents in use. A frame whose pages are given back is no huge page any more.
use super::base::Table;
use super::cache::Run;
use super::heap::PageHeap;
use super::page_map::LG_PAGE;
use crate::os::{Errno, Os, Range};
use crate::policy::pressure::Pressure;
use crate::policy::thp;
use crate::sync::atomic::{AtomicU8, AtomicU16, Ordering::Relaxed};

/// log2 of the pages of a frame.
const LG_FRAME: u32 = 9;
/// Pages of a frame.
pub(crate) const FRAME_PAGES: u32 = 1 << LG_FRAME;
/// Frames whose entries are read in one turn, that are looked at, and of those that are collapsed.
const READ_FRAMES: u32 = 1 << 14;
const LOOK_FRAMES: usize = 64;
const COLLAPSE_FRAMES: usize = 8;
/// The unit of `Frame::due`, milliseconds: wraps after 70 minutes, and no time is that far off.
const TICK_MS: u64 = 64;

/// What is known of a frame.
#[repr(C)]
pub(crate) struct Frame {
    in_use: AtomicU16,
    backed: AtomicU16,
    /// When it is to be looked at again, ticks.
    due: AtomicU16,
    state: AtomicU8,
    /// How often in a row it was found sparse, and [`USED`].
    sparse: AtomicU8,
}

/// Pages of the frame were taken since it was last looked at.
const USED: u8 = 1 << 7;

/// Not looked at since it was filled, or found sparse.
const NEW: u8 = 0;
/// Found dense.
const DENSE: u8 = 1;
/// A huge page.
const HUGE: u8 = 2;
/// Of the kernel's reserved pools: never given back.
const FIXED: u8 = 3;

impl Frame {
    fn is_huge(&self) -> bool {
        self.state.load(Relaxed) == HUGE
    }

    /// Whether somebody uses it, or did since the last look.
    fn is_wanted(&self) -> bool {
        self.in_use.load(Relaxed) > 0 || self.sparse.load(Relaxed) & USED != 0
    }

    fn forget(&self) {
        self.state.store(NEW, Relaxed);
        self.due.store(0, Relaxed);
        self.sparse.store(self.sparse.load(Relaxed) & USED, Relaxed);
    }
}

/// All frames.
pub(crate) struct Frames(Table<Frame>);

impl Frames {
    pub(crate) const fn new() -> Self {
        Self(Table::new())
    }

    /// Bytes of the table for a window of `bytes`.
    pub(crate) fn table_bytes(bytes: usize) -> usize {
        (bytes >> LG_PAGE >> LG_FRAME) * size_of::<Frame>()
    }

    pub(crate) fn place(&self, start: usize, bytes: usize) {
        self.0.place(start, bytes);
    }

    /// Sees to it that there are entries for `pages` pages.
    pub(crate) fn ensure(&self, os: &impl Os, pages: usize) -> Result<(), Errno> {
        self.0.ensure(os, (pages >> LG_FRAME) + 1)
    }

    fn get(&self, index: u32) -> &Frame {
        // SAFETY: entries are ensured before the pages that they describe are mapped, zero bytes are
        // an empty frame, and every field is an atomic.
        unsafe { &*self.0.at(index as usize) }
    }

    /// Calls `f` with every frame that `run` has pages in, and how many.
    fn each(&self, run: Run, mut f: impl FnMut(&Frame, u16)) {
        let mut at = run.start;
        while at < run.end() {
            let index = at >> LG_FRAME;
            let end = run.end().min((index + 1) << LG_FRAME);
            #[allow(clippy::cast_possible_truncation, reason = "at most FRAME_PAGES")]
            f(self.get(index), (end - at) as u16);
            at = end;
        }
    }

    /// Notes that the pages of `run`, whole frames, are of the kernel's reserved pools.
    pub(crate) fn fix(&self, run: Run) {
        self.each(run, |frame, _| frame.state.store(FIXED, Relaxed));
    }

    /// Whether `page` is of the kernel's reserved pools.
    pub(crate) fn is_fixed(&self, page: u32) -> bool {
        self.get(page >> LG_FRAME).state.load(Relaxed) == FIXED
    }

    /// Notes that the pages of `run` are in use.
    pub(crate) fn used(&self, run: Run) {
        self.each(run, |frame, n| {
            frame.in_use.store(frame.in_use.load(Relaxed) + n, Relaxed);
            frame.sparse.store(frame.sparse.load(Relaxed) | USED, Relaxed);
        });
    }

    /// Notes that the pages of `run` are not in use any more.
    pub(crate) fn unused(&self, run: Run) {
        self.each(run, |frame, n| {
            let in_use = frame.in_use.load(Relaxed);
            debug_assert!(in_use >= n);
            frame.in_use.store(in_use.saturating_sub(n), Relaxed);
        });
    }

    /// Notes that clean pages of `run` were taken.
    pub(crate) fn backed(&self, run: Run) {
        self.each(run, |frame, n| frame.backed.store(frame.backed.load(Relaxed) + n, Relaxed));
    }

    /// Notes that the pages of `run` are clean. Returns how many huge pages ended by that, and how many
    /// of them were given back only in part.
    pub(crate) fn unbacked(&self, run: Run) -> (u64, u64) {
        let (mut ended, mut split) = (0, 0);
        self.each(run, |frame, n| {
            let backed = frame.backed.load(Relaxed);
            debug_assert!(backed >= n);
            let left = backed.saturating_sub(n);
            frame.backed.store(left, Relaxed);
            if frame.is_huge() {
                ended += 1;
                split += u64::from(left > 0);
            }
            frame.forget();
        });
        (ended, split)
    }

    /// The part of `run`, which is free and cold, that may be given back now: at most `most` pages, huge
    /// pages whole, and not what is less than half of a huge page that is otherwise in use or warm. An
    /// empty run where a whole huge page comes next and is more than that.
    pub(crate) fn cold_part(&self, run: Run, most: u32) -> Option<Run> {
        let mut start = run.start;
        while start < run.end() && self.keeps(run, start >> LG_FRAME) {
            start = ((start >> LG_FRAME) + 1) << LG_FRAME;
        }
        let latest = run.end().min(start + most);
        let mut end = start;
        while end < latest && !self.keeps(run, end >> LG_FRAME) {
            let frame_end = run.end().min(((end >> LG_FRAME) + 1) << LG_FRAME);
            if frame_end > latest && self.get(end >> LG_FRAME).is_huge() {
                break;
            }
            end = frame_end.min(latest);
        }
        (start < run.end()).then(|| Run { start, pages: end - start })
    }

    /// Whether what `run` has of a frame stays, for the sake of the huge page.
    fn keeps(&self, run: Run, index: u32) -> bool {
        let frame = self.get(index);
        let first = index << LG_FRAME;
        let part = run.end().min(first + FRAME_PAGES) - run.start.max(first);
        let in_use = u32::from(frame.in_use.load(Relaxed));
        frame.is_huge() && part < FRAME_PAGES && in_use > FRAME_PAGES / 2
    }
}

/// What the looks found.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HugeCounts {
    /// Huge pages that stand.
    pub(crate) whole: u64,
    /// Huge pages given back only in part.
    pub(crate) split: u64,
    /// Frames that were collapsed, and how often the kernel refused.
    pub(crate) collapsed: u64,
    pub(crate) refused: u64,
    /// Time that collapsing took, microseconds.
    pub(crate) spent_us: u64,
}

/// The state of the looks. Under the heap's lock.
pub(crate) struct Looks {
    /// The frame that the next turn starts with.
    next: u32,
    /// Before this time nothing is collapsed.
    rest_until_ms: u64,
    /// When some frame is due again; `u64::MAX`: none is waited for.
    again_ms: u64,
    /// What the system allows, once read.
    system: Option<thp::System>,
    pub(crate) counts: HugeCounts,
}

impl Looks {
    pub(crate) const fn new() -> Self {
        Self {
            next: 0,
            rest_until_ms: 0,
            again_ms: u64::MAX,
            system: None,
            counts: HugeCounts { whole: 0, split: 0, collapsed: 0, refused: 0, spent_us: 0 },
        }
    }
}

/// One turn's frames.
struct Turn {
    frames: [u32; LOOK_FRAMES],
    len: usize,
    now_ms: u64,
}

impl<O: Os> PageHeap<O> {
    /// Looks at some frames and collapses some that are dense. Returns how long nothing will be
    /// due, milliseconds; `None`: no frame is waited for.
    pub(crate) fn hugify(&self) -> Option<u64> {
        let Some(_purging) = self.purging.try_lock() else { return Some(TICK_MS) };
        let turn = match self.frames_due() {
            Ok(turn) => turn,
            Err(rest) => return rest,
        };
        let mut dense = [0; COLLAPSE_FRAMES];
        let mut len = 0;
        for &index in &turn.frames[..turn.len] {
            if len < COLLAPSE_FRAMES && self.look(index, turn.now_ms) {
                dense[len] = index;
                len += 1;
            }
        }
        self.collapse(&dense[..len]);
        let mut inner = self.inner.lock();
        if len == COLLAPSE_FRAMES {
            // There may be more.
            inner.looks.again_ms = turn.now_ms;
        }
        let next = inner.looks.again_ms.max(inner.looks.rest_until_ms);
        (inner.looks.again_ms != u64::MAX).then(|| next.saturating_sub(turn.now_ms).max(TICK_MS))
    }

    /// The next frames that are full, not yet huge, and due for a look; or how long to rest.
    fn frames_due(&self) -> Result<Turn, Option<u64>> {
        let sp = &self.space;
        let mut inner = self.inner.lock();
        let now = sp.os.now_ms();
        let system = *inner.looks.system.get_or_insert_with(|| thp::system(&sp.os));
        let small = inner.demand.peak(now) << LG_PAGE < thp::WORTH_BYTES;
        let pressed = inner.pressure != Pressure::None;
        if system == thp::System::Never || small || pressed || sp.os.page_size() > 1 << LG_PAGE {
            return Err(None);
        }
        self.dense_sizes.turn_on();
        if now < inner.looks.rest_until_ms {
            return Err(Some(inner.looks.rest_until_ms - now));
        }
        let count = sp.window.pages() >> LG_FRAME;
        let mut turn = Turn { frames: [0; LOOK_FRAMES], len: 0, now_ms: now };
        let mut again = if count > READ_FRAMES { now + thp::AGAIN_MS.0 } else { u64::MAX };
        for _ in 0..count.min(READ_FRAMES) {
            let index = if inner.looks.next < count { inner.looks.next } else { 0 };
            let frame = sp.frames.get(index);
            let full = u32::from(frame.backed.load(Relaxed)) == FRAME_PAGES;
            if full && frame.is_wanted() && frame.state.load(Relaxed) < HUGE {
                let wait = wait_ms(frame.due.load(Relaxed), now);
                if wait == 0 && turn.len == LOOK_FRAMES {
                    again = now;
                    break;
                }
                if wait == 0 {
                    turn.frames[turn.len] = index;
                    turn.len += 1;
                    again = again.min(now + thp::DWELL_MS);
                } else {
                    again = again.min(now + wait);
                }
            }
            inner.looks.next = index + 1;
        }
        inner.looks.again_ms = again;
        Ok(turn)
    }

    /// Looks at a frame; whether it is to be collapsed. The caller holds `purging`.
    fn look(&self, index: u32, now_ms: u64) -> bool {
        let sp = &self.space;
        let mut resident = [0u8; FRAME_PAGES as usize];
        let addr = sp.window.address(index << LG_FRAME);
        let seen = sp.os.resident(addr, resident.len() << LG_PAGE, &mut resident).is_ok();
        let pages = resident.iter().filter(|&&page| page & 1 == 1).count();
        let dense = seen && thp::is_dense(pages, resident.len());
        let _inner = self.inner.lock();
        let frame = sp.frames.get(index);
        frame.sparse.store(frame.sparse.load(Relaxed) & !USED, Relaxed);
        if !dense {
            let times = frame.sparse.load(Relaxed) & !USED;
            frame.sparse.store((times + 1).min(16), Relaxed);
            let wait = (thp::AGAIN_MS.0 << times).min(thp::AGAIN_MS.1);
            frame.state.store(NEW, Relaxed);
            frame.due.store(tick(now_ms + wait), Relaxed);
            return false;
        }
        if frame.state.load(Relaxed) == DENSE {
            return true;
        }
        frame.state.store(DENSE, Relaxed);
        frame.due.store(tick(now_ms + thp::DWELL_MS), Relaxed);
        false
    }

    /// Collapses frames that were found dense twice. The caller holds `purging`, so that no page of
    /// them is given back meanwhile.
    fn collapse(&self, frames: &[u32]) {
        let sp = &self.space;
        let mut spent_us = 0;
        for &index in frames {
            let start = sp.os.now_us();
            let addr = sp.window.address(index << LG_FRAME);
            // Not while the frame may have become clean since the look.
            let full = u32::from(sp.frames.get(index).backed.load(Relaxed)) == FRAME_PAGES;
            let range = Range { addr, len: (FRAME_PAGES as usize) << LG_PAGE };
            let result = if full { sp.os.collapse(range) } else { Err(Errno(libc::EAGAIN)) };
            let mut inner = self.inner.lock();
            let end = sp.os.now_us();
            let looks = &mut inner.looks;
            spent_us += end.saturating_sub(start);
            looks.counts.spent_us += end.saturating_sub(start);
            looks.rest_until_ms = end / 1000 + thp::rest_ms(spent_us);
            let frame = sp.frames.get(index);
            match result {
                Ok(()) => {
                    frame.state.store(HUGE, Relaxed);
                    looks.counts.whole += 1;
                    looks.counts.collapsed += 1;
                }
                Err(_) => {
                    // Pinned or locked pages, no free huge page, or not for this process: later.
                    frame.state.store(NEW, Relaxed);
                    frame.due.store(tick(end / 1000 + thp::AGAIN_MS.1), Relaxed);
                    looks.counts.refused += 1;
                }
            }
        }
    }
}

fn tick(ms: u64) -> u16 {
    #[allow(clippy::cast_possible_truncation, reason = "ticks wrap")]
    let tick = (ms / TICK_MS) as u16;
    // 0 is: at once.
    tick.max(1)
}

/// How long until tick `due`, milliseconds.
fn wait_ms(due: u16, now_ms: u64) -> u64 {
    let ahead = due.wrapping_sub(tick(now_ms));
    if due == 0 || ahead > u16::MAX / 2 { 0 } else { u64::from(ahead) * TICK_MS }
}
