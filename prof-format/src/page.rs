//! The statistics page: a file that a live process keeps mapped and writes every second (option
//! `stats_page`), and that others read without its help, also when it hangs.
//!
//! A header of words, then two buffers. Each holds one chunk of records, as a profile file does. The
//! writer fills the buffer that is not published and then publishes it, so that a writer that is
//! killed leaves a whole state. A reader copies the published buffer and takes it if the same one is
//! published still; the chunk's checksum says the rest.

/// What a page begins with; the last character is the version of the layout.
pub const MAGIC: u64 = u64::from_le_bytes(*b"THPAGE\0\x01");
/// Bytes before the first buffer.
pub const HEADER_BYTES: usize = 4096;
/// Bytes of a buffer.
pub const BUFFER_BYTES: usize = 192 << 10;
/// Bytes of a page.
pub const PAGE_BYTES: usize = HEADER_BYTES + 2 * BUFFER_BYTES;

/// Word of the header: [`MAGIC`].
pub const WORD_MAGIC: usize = 0;
/// Word: states published so far; the last one is in the buffer of its lowest bit.
pub const WORD_PUBLISHED: usize = 1;
/// Word: dumps that readers have asked for, which any of them adds to.
pub const WORD_REQUESTED: usize = 2;
/// Word: how many of these the process has seen.
pub const WORD_SERVED: usize = 3;
/// Word: the process's id.
pub const WORD_PID: usize = 4;
/// Word: when the last state was published, nanoseconds of CLOCK_MONOTONIC.
pub const WORD_TIME_NS: usize = 5;

/// Where the buffer of a state begins.
#[must_use]
pub fn buffer_at(published: u64) -> usize {
    if published & 1 == 0 { HEADER_BYTES } else { HEADER_BYTES + BUFFER_BYTES }
}
