//! Blocks that the profiler recorded: those with a size class get pages of their own and a code of their
//! own in the class map, so that their free comes by the slow path and the frees of all others pay
//! nothing. Their extents, and those of large blocks, name the profiler's entry.
use super::Heap;
use crate::extent::page_map::PAGE;
use crate::extent::{Extent, State};
use crate::front::size_class::{HUGE_BYTES, HUGE_CLASS, LARGE, RECORDED, SizeClass, class_bytes};
use crate::os::Os;

impl<O: Os> Heap<O> {
    /// A block of `class` with pages of its own; null when memory is out.
    pub(crate) fn alloc_recorded(&self, class: SizeClass) -> *mut u8 {
        let block = || {
            let pages = self.pages.pages_for(class_bytes(class))?;
            let align = if class == HUGE_CLASS { HUGE_BYTES } else { PAGE };
            let taken = self.pages.alloc(pages, align, State::Recorded, class)?;
            self.given.count(class.into(), 1);
            let e = self.pages.space.extents.get(taken.id);
            e.set_bits(0);
            self.pages.space.window.set_code(e.start(), 1, RECORDED);
            Some(self.pages.space.window.address(e.start()))
        };
        block().map_or(core::ptr::null_mut(), core::ptr::with_exposed_provenance_mut)
    }

    /// Takes such a block back.
    ///
    /// # Safety
    /// As for [`Heap::give`].
    pub(crate) unsafe fn free_recorded(&self, block: *mut u8) {
        let id = self.extent_of(block, State::Recorded);
        let e = self.pages.space.extents.get(id);
        self.given.count_flush(e.code().into());
        e.set_state(State::Unused);
        self.pages.space.window.set_code(e.start(), 1, 0);
        self.pages.free(id);
    }

    /// The class of a block whose code is [`RECORDED`].
    pub(crate) fn recorded_class(&self, block: *mut u8) -> SizeClass {
        self.extents().get(self.extent_of(block, State::Recorded)).code()
    }

    /// The extent of a live block that may have an entry.
    fn extent_with_record(&self, block: *mut u8) -> Option<&Extent> {
        let window = &self.pages.space.window;
        let code = window.code_of(block.addr());
        if (code != LARGE && code != RECORDED) || block.addr() & (PAGE - 1) != 0 {
            return None;
        }
        let page = window.page_of(block.addr())?;
        let id = window.owner(page);
        let e = self.extents().get(id);
        let live = matches!(e.state(), State::Large | State::Recorded);
        (id != 0 && e.start() == page && live).then_some(e)
    }

    /// Whether [`Self::set_record`] would find a place for this block's entry.
    pub(crate) fn can_have_record(&self, block: *mut u8) -> bool {
        self.extent_with_record(block).is_some()
    }

    /// The profiler's entry of a block; 0 where it has none, or is none.
    pub(crate) fn record_at(&self, block: *mut u8) -> u32 {
        self.extent_with_record(block).map_or(0, Extent::bits)
    }

    /// Calls `visit` with the profiler's entry of every block that has one, while nobody frees any.
    pub(crate) fn for_each_record(&self, mut visit: impl FnMut(u32)) {
        self.for_all(|_, e| {
            if matches!(e.state(), State::Large | State::Recorded) && e.bits() != 0 {
                visit(e.bits());
            }
        });
    }

    /// Names the profiler's entry of a live block with pages of its own.
    pub(crate) fn set_record(&self, block: *mut u8, record: u32) {
        if let Some(e) = self.extent_with_record(block) {
            e.set_bits(record);
        }
    }
}
