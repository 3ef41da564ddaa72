//! The geometry of slabs: how many pages and slots a slab of each class has.
use super::slab::MOST_SLOTS;
use crate::extent::page_map::PAGE;
use crate::front::size_class::{SLAB_CLASSES, SizeClass, class_bytes};

/// Slabs have at least this many bytes, and as many more as hold 64 slots up to `ROOMY_BYTES`.
const LEAST_BYTES: usize = 16 << 10;
const ROOMY_BYTES: usize = 64 << 10;
/// A slab has at least this many slots.
const LEAST_SLOTS: usize = 8;

/// The shape of a class's slabs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Bytes of a slab, a multiple of the kernel's page.
    pub(crate) bytes: usize,
    pub(crate) slots: usize,
    /// 2^31 / (slot size / 16), rounded up.
    pub(crate) magic: u32,
}

/// The shape of `class`'s slabs where the kernel's page has `os_page` bytes.
pub(crate) fn shape(class: SizeClass, os_page: usize) -> Shape {
    debug_assert!((1..=SLAB_CLASSES).contains(&usize::from(class)));
    let size = class_bytes(class);
    let unit = os_page.max(PAGE);
    let most = size * MOST_SLOTS;
    let floor = (size * 64)
        .clamp(LEAST_BYTES, ROOMY_BYTES)
        .max(size * LEAST_SLOTS)
        .min(most)
        .next_multiple_of(unit);
    // The first length with at most 1/64 of waste, else the one with the least.
    let mut best = floor;
    for bytes in (floor..=floor + 16 * unit.min(LEAST_BYTES)).step_by(unit) {
        let waste = |b: usize| (b - (b / size).min(MOST_SLOTS) * size) * 1024 / b;
        if waste(bytes) < waste(best) {
            best = bytes;
        }
        if waste(best) <= 16 {
            break;
        }
    }
    #[allow(clippy::cast_possible_truncation, reason = "sizes are at least 16")]
    let magic = ((1u64 << 31).div_ceil(size as u64 / 16)) as u32;
    Shape { bytes: best, slots: (best / size).min(MOST_SLOTS), magic }
}

/// The index of the slot at `offset` bytes in a slab with `magic`. Exact, since slab and slot in
/// units of 16 bytes multiply to less than 2^31.
#[inline(always)]
pub(crate) fn slot_of(offset: usize, magic: u32) -> usize {
    ((offset >> 4) * magic as usize) >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_waste_little_and_slots_are_found() {
        for os_page in [4096, 16384, 65536] {
            for class in 1..=SizeClass::try_from(SLAB_CLASSES).unwrap() {
                let s = shape(class, os_page);
                let size = class_bytes(class);
                assert_eq!(s.bytes % os_page, 0);
                assert!(s.slots >= LEAST_SLOTS.min(MOST_SLOTS) && s.slots <= MOST_SLOTS);
                assert!(s.slots * size <= s.bytes);
                if os_page == 4096 {
                    assert!((s.bytes - s.slots * size) * 32 <= s.bytes, "class {class}: {s:?}");
                    assert!(s.bytes <= 320 << 10, "class {class}: {s:?}");
                }
                for slot in 0..s.slots {
                    for offset in [0, 1, size - 1] {
                        assert_eq!(slot_of(slot * size + offset, s.magic), slot, "{class} {slot}");
                    }
                }
            }
        }
    }
}
