//! Size classes: multiples of 16 to 128 bytes, above that eight to a doubling, so that at most
//! 12.5 % of a block is rounding. Classes up to [`SLAB_MAX`] bytes come from slabs, larger ones up
//! to [`CACHED_MAX`], and a huge page, are extents of their own that the per-CPU caches hold. Class codes start at
//! 1: code 0 of the class map means "no block starts here".

/// A class code, 1 to [`CLASSES`].
pub(crate) type SizeClass = u8;

/// Number of classes.
pub(crate) const CLASSES: usize = 113;
/// Sizes up to this have a class, and so are cached per CPU: 1 MiB.
pub(crate) const CACHED_MAX: usize = 1 << 20;
/// The one larger size that has a class: a huge page. Its blocks have that alignment.
pub(crate) const HUGE_BYTES: usize = 2 << 20;
/// The class of [`HUGE_BYTES`].
pub(crate) const HUGE_CLASS: SizeClass = 113;
/// Largest size that lives in a slab: 32 KiB.
pub const SLAB_MAX: usize = 32 << 10;
/// The class of [`SLAB_MAX`]; classes above it are extents of their own.
pub(crate) const SLAB_CLASSES: usize = 72;
/// Class-map code of the first page of a live block above [`CACHED_MAX`].
pub(crate) const LARGE: u8 = 200;

/// Class-map code of the first page of a live block that the profiler recorded and that has a class.
pub(crate) const RECORDED: u8 = 201;

/// Sizes up to this have their class in a table.
pub const TINY_MAX: usize = 1024;

/// Classes of sizes up to [`TINY_MAX`], by 16-byte step.
static TINY: [SizeClass; TINY_MAX / 16 + 1] = {
    let mut table = [1; TINY_MAX / 16 + 1];
    let mut i = 1;
    while i < table.len() {
        table[i] = compute(i * 16);
        i += 1;
    }
    table
};

/// Bytes of each class, by code; entry 0 is 0.
pub(crate) static CLASS_BYTES: [u32; 256] = {
    let mut table = [0; 256];
    let mut c = 1;
    while c <= CLASSES {
        table[c] = bytes_of(c);
        c += 1;
    }
    table
};

#[allow(clippy::cast_possible_truncation, reason = "codes are at most CLASSES")]
const fn compute(size: usize) -> SizeClass {
    if size <= 128 {
        return if size == 0 { 1 } else { size.div_ceil(16) as SizeClass };
    }
    let lg = (size - 1).ilog2() as usize;
    (8 + (lg - 7) * 8 + ((size - 1) >> (lg - 3)) - 8 + 1) as SizeClass
}

#[allow(clippy::cast_possible_truncation, reason = "at most CACHED_MAX")]
const fn bytes_of(code: usize) -> u32 {
    if code <= 8 {
        return 16 * code as u32;
    }
    if code == HUGE_CLASS as usize {
        return HUGE_BYTES as u32;
    }
    let k = code - 9;
    ((8 + k % 8 + 1) << (7 + k / 8 - 3)) as u32
}

/// The class of a block of `size` bytes up to [`TINY_MAX`], for the fast path.
#[inline(always)]
pub(crate) fn tiny_class(size: usize) -> usize {
    usize::from(TINY[(size + 15) >> 4])
}

/// The class of a block of `size` bytes above that, up to [`SLAB_MAX`], for the fast path.
#[inline(always)]
pub(crate) fn medium_class(size: usize) -> usize {
    usize::from(compute(size))
}

/// The class of a block of `size` bytes, which is at most [`CACHED_MAX`].
#[inline(always)]
pub(crate) fn class_of(size: usize) -> SizeClass {
    debug_assert!(size <= CACHED_MAX);
    if size <= TINY_MAX { TINY[(size + 15) >> 4] } else { compute(size) }
}

/// The size of a block of class `class`, bytes.
#[inline(always)]
pub(crate) fn class_bytes(class: SizeClass) -> usize {
    CLASS_BYTES[class as usize] as usize
}

/// Whether blocks of `class` are extents of their own.
#[inline]
pub(crate) fn is_extent(class: SizeClass) -> bool {
    usize::from(class) > SLAB_CLASSES
}

/// The smallest class for `size` bytes whose slots all have alignment `align` (a power of two),
/// if slabs start on a page of `page` bytes.
pub(crate) fn class_of_aligned(size: usize, align: usize, page: usize) -> Option<SizeClass> {
    if size > CACHED_MAX || align > page {
        return None;
    }
    let mut class = class_of(size.max(align));
    while class_bytes(class) & (align - 1) != 0 {
        class += 1;
        if class as usize > CLASSES {
            return None;
        }
    }
    Some(class)
}

/// As [`class_of_aligned`], where that is the class of the size and one of slabs. `None`: it has to be
/// looked for.
#[inline(always)]
pub(crate) fn class_at_once(size: usize, align: usize, page: usize) -> Option<SizeClass> {
    if size > SLAB_MAX || align > page {
        return None;
    }
    let class = class_of(size.max(align));
    (class_bytes(class) & (align - 1) == 0).then_some(class)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_fits_its_class_tightly() {
        for size in 1..=CACHED_MAX {
            let class = class_of(size);
            let bytes = class_bytes(class);
            assert!(bytes >= size, "{size} in class {class} of {bytes}");
            assert!(
                class == 1 || class_bytes(class - 1) < size,
                "{size} not in the smallest class"
            );
            assert!(size <= 128 || (bytes - size) * 8 <= bytes, "{size} wastes more than 12.5 %");
            assert_eq!(bytes % 16, 0);
        }
        assert_eq!(class_of(0), 1);
        assert_eq!(class_of(CACHED_MAX), HUGE_CLASS - 1);
        assert_eq!((class_bytes(HUGE_CLASS), HUGE_CLASS as usize), (HUGE_BYTES, CLASSES));
        assert_eq!(class_of(SLAB_MAX) as usize, SLAB_CLASSES);
        assert_eq!(class_bytes(class_of(SLAB_MAX + 1)) % 4096, 0);
    }

    #[test]
    fn aligned_classes_keep_their_alignment() {
        for (size, align) in (1..5000).flat_map(|size| (0..=13).map(move |lg| (size, 1 << lg))) {
            let known = class_at_once(size, align, 4096);
            assert!(known.is_none() || known == class_of_aligned(size, align, 4096));
        }
        for lg in 4..=12 {
            let align = 1 << lg;
            for size in (1..CACHED_MAX).step_by(317) {
                let class = class_of_aligned(size, align, 4096).unwrap();
                assert!(class_bytes(class) >= size && class_bytes(class).is_multiple_of(align));
            }
        }
        assert_eq!(class_of_aligned(100, 8192, 4096), None);
    }
}
