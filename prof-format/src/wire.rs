//! How a record lies in a file: a header of eight bytes (kind, length in words, bytes of the tail), a body of
//! fixed fields, little-endian, and a tail of text or words. The tail ends the record, so that fields may
//! be added to a body: an older reader ignores them, and a newer one reads them as 0 from an older
//! file.

/// A text that a record carries, mostly a name or path: UTF-8 as a rule, but a path can be anything.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Text<'a>(pub &'a [u8]);

impl core::fmt::Debug for Text<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "\"{}\"", self.0.escape_ascii())
    }
}

impl<'a> Text<'a> {
    /// The two parts of a text, of which the first has `bytes` bytes.
    #[must_use]
    pub fn split(self, bytes: u32) -> (Text<'a>, Text<'a>) {
        let (first, second) = self.0.split_at_checked(bytes as usize).unwrap_or((self.0, &[]));
        (Text(first), Text(second))
    }
}

/// Words of 64 bits that a record carries.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Words<'a>(&'a [u8]);

impl<'a> Words<'a> {
    /// The words of `bytes`, little-endian; a rest of less than eight bytes is ignored.
    #[must_use]
    pub fn from_bytes(bytes: &'a [u8]) -> Self {
        Self(bytes.get(..bytes.len() & !7).unwrap_or(&[]))
    }

    /// The words of a slice.
    #[cfg(target_endian = "little")]
    #[must_use]
    pub fn from_slice(words: &'a [u64]) -> Self {
        // SAFETY: the same memory, any byte of which is a `u8`.
        Self(unsafe { core::slice::from_raw_parts(words.as_ptr().cast(), size_of_val(words)) })
    }

    /// How many there are.
    #[must_use]
    pub fn len(self) -> usize {
        self.0.len() / 8
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0.is_empty()
    }

    /// The words in order.
    pub fn iter(self) -> impl ExactSizeIterator<Item = u64> + 'a {
        self.0.chunks_exact(8).map(u64::read)
    }

    /// The words in order as floating-point numbers.
    pub fn floats(self) -> impl ExactSizeIterator<Item = f64> + 'a {
        self.iter().map(f64::from_bits)
    }
}

impl core::fmt::Debug for Words<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// A field of fixed width.
pub(crate) trait Field: Sized {
    fn read(bytes: &[u8]) -> Self;
    fn write(&self, to: &mut [u8]);
}

macro_rules! field {
    ($($ty:ty),*) => {$(
        impl Field for $ty {
            fn read(bytes: &[u8]) -> Self {
                bytes.first_chunk().map_or_else(Self::default, |bytes| Self::from_le_bytes(*bytes))
            }
            fn write(&self, to: &mut [u8]) {
                if let Some(to) = to.first_chunk_mut() {
                    *to = self.to_le_bytes();
                }
            }
        }
    )*};
}
field!(u8, u16, u32, u64, f64);

/// What a tail is.
pub(crate) trait Tail<'a> {
    fn bytes(&self) -> &'a [u8];
    fn of(bytes: &'a [u8]) -> Self;
}

impl<'a> Tail<'a> for Text<'a> {
    fn bytes(&self) -> &'a [u8] {
        self.0
    }
    fn of(bytes: &'a [u8]) -> Self {
        Text(bytes)
    }
}

impl<'a> Tail<'a> for Words<'a> {
    fn bytes(&self) -> &'a [u8] {
        self.0
    }
    fn of(bytes: &'a [u8]) -> Self {
        Words::from_bytes(bytes)
    }
}

/// Bytes of a record's header.
const HEADER_BYTES: usize = 8;

/// A record's parts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Raw<'a> {
    pub(crate) kind: u16,
    pub(crate) body: &'a [u8],
    pub(crate) tail: &'a [u8],
    pub(crate) all: &'a [u8],
}

/// The first record of a payload, and the rest; nothing where the lengths make no sense.
pub(crate) fn split(payload: &[u8]) -> Option<(Raw<'_>, &[u8])> {
    let kind = u16::read(payload.get(..2)?);
    let bytes = usize::from(u16::read(payload.get(2..4)?)) * 8;
    let tail_bytes = u32::read(payload.get(4..8)?) as usize;
    let (record, rest) = payload.split_at_checked(bytes)?;
    let all = record.get(HEADER_BYTES..)?;
    let (body, tail) =
        all.split_at_checked(all.len().checked_sub(tail_bytes.checked_next_multiple_of(8)?)?)?;
    Some((Raw { kind, body, tail: tail.get(..tail_bytes)?, all }, rest))
}

/// Writes header and tail of a record; its bytes, and the place of its body.
pub(crate) fn frame<'t>(
    to: &'t mut [u8],
    kind: u16,
    body_bytes: usize,
    tail: &[u8],
) -> Option<(usize, &'t mut [u8])> {
    let body_bytes = body_bytes.next_multiple_of(8);
    let bytes = HEADER_BYTES + body_bytes + tail.len().next_multiple_of(8);
    let words = u16::try_from(bytes / 8).ok()?;
    let tail_bytes = u32::try_from(tail.len()).ok()?;
    let record = to.get_mut(..bytes)?;
    record.fill(0);
    let (header, rest) = record.split_at_mut_checked(HEADER_BYTES)?;
    kind.write(header);
    words.write(header.get_mut(2..)?);
    tail_bytes.write(header.get_mut(4..)?);
    let (body, room) = rest.split_at_mut_checked(body_bytes)?;
    room.get_mut(..tail.len())?.copy_from_slice(tail);
    Some((bytes, body))
}
