//! A block from the process's malloc, touched as a program would touch it.

use std::hint::black_box;
use std::ptr;

/// A pointer from malloc. It may move to another thread, which is the point of some cases.
#[derive(Clone, Copy)]
pub struct Block(*mut u8);

// SAFETY: malloc's blocks belong to the process, not to a thread; every holder here is the only one.
unsafe impl Send for Block {}

impl Block {
    /// No block; freeing it does nothing.
    pub const NONE: Block = Block(ptr::null_mut());

    /// malloc, with its first byte written.
    #[inline]
    pub fn new(size: usize) -> Self {
        // SAFETY: malloc accepts every size.
        Self::got(unsafe { libc::malloc(black_box(size)) }.cast())
    }

    /// calloc, with its first byte written.
    #[inline]
    pub fn zeroed(size: usize) -> Self {
        // SAFETY: calloc accepts every size.
        Self::got(unsafe { libc::calloc(1, black_box(size)) }.cast())
    }

    /// posix_memalign, with its first byte written.
    #[inline]
    pub fn aligned(align: usize, size: usize) -> Self {
        let mut p = ptr::null_mut();
        // SAFETY: p is valid to write to; an alignment that is not allowed is answered by an error.
        unsafe { libc::posix_memalign(&mut p, align, black_box(size)) };
        Self::got(p.cast())
    }

    /// realloc, with its first and last byte written.
    #[inline]
    pub fn resize(self, size: usize) -> Self {
        // SAFETY: self holds a block of malloc's that is handed over here.
        let block = Self::got(unsafe { libc::realloc(self.0.cast(), black_box(size)) }.cast());
        // SAFETY: the block has size >= 1 bytes.
        unsafe { block.0.wrapping_add(size - 1).write_volatile(1) };
        block
    }

    /// Writes one byte of each page, so that the whole block becomes resident.
    #[inline]
    pub fn touch_pages(self, size: usize) {
        for offset in (0..size).step_by(4096) {
            // SAFETY: offset < size, the block's size.
            unsafe { self.0.wrapping_add(offset).write_volatile(1) };
        }
    }

    /// Writes every byte.
    #[inline]
    pub fn fill(self, size: usize, byte: u8) {
        // SAFETY: the block has size bytes and is this thread's alone.
        unsafe { self.0.write_bytes(byte, size) };
        black_box(self.0);
    }

    /// Writes the first byte `times` times and reads it back each time.
    #[inline]
    pub fn poke(self, times: usize) {
        for i in 0..times {
            // SAFETY: a block has at least one byte.
            unsafe { self.0.write_volatile(i.to_le_bytes()[0]) };
            // SAFETY: as above; it was written.
            unsafe { self.0.read_volatile() };
        }
    }

    /// Reads the first byte.
    #[inline]
    pub fn first(self) -> u8 {
        // SAFETY: a block has at least one byte, which `new` wrote.
        unsafe { self.0.read_volatile() }
    }

    /// free.
    #[inline]
    pub fn free(self) {
        // SAFETY: a Block is null or a live block of malloc's, and each case frees each block once.
        unsafe { libc::free(black_box(self.0).cast()) };
    }

    #[inline]
    fn got(p: *mut u8) -> Self {
        let p = black_box(p);
        assert!(!p.is_null(), "out of memory");
        // SAFETY: p is a block of at least one byte (no case asks for 0).
        unsafe { p.write_volatile(1) };
        Block(p)
    }
}
