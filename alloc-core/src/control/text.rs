//! Text without allocation and without `core::fmt`: a line of fixed capacity.
//!
//! Invariant: what does not fit is cut; nothing here can panic.

/// A piece of text of at most `N` bytes.
pub(crate) struct Line<const N: usize> {
    buf: [u8; N],
    len: usize,
}

impl<const N: usize> Line<N> {
    pub(crate) const fn new() -> Self {
        Line { buf: [0; N], len: 0 }
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.buf.get(..self.len).unwrap_or(&[])
    }

    pub(crate) fn clear(&mut self) {
        self.len = 0;
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        for &byte in bytes {
            if let Some(slot) = self.buf.get_mut(self.len) {
                *slot = byte;
                self.len += 1;
            }
        }
        self
    }

    pub(crate) fn str(&mut self, text: &str) -> &mut Self {
        self.bytes(text.as_bytes())
    }

    pub(crate) fn unsigned(&mut self, mut number: u64) -> &mut Self {
        let mut digits = [0u8; 20];
        let mut used = 0;
        for slot in digits.iter_mut().rev() {
            *slot = b'0' + u8::try_from(number % 10).unwrap_or(0);
            number /= 10;
            used += 1;
            if number == 0 {
                break;
            }
        }
        let start = digits.len() - used;
        self.bytes(digits.get(start..).unwrap_or(&[]))
    }

    /// In hexadecimal digits, without a prefix.
    pub(crate) fn hex(&mut self, number: u64) -> &mut Self {
        let digits = 16 - (number | 1).leading_zeros() / 4;
        for at in (0..digits).rev() {
            let digit = usize::try_from(number >> (at * 4) & 15).unwrap_or(0);
            self.bytes(b"0123456789abcdef".get(digit..=digit).unwrap_or(&[]));
        }
        self
    }

    pub(crate) fn signed(&mut self, number: i64) -> &mut Self {
        if number < 0 {
            self.str("-");
        }
        self.unsigned(number.unsigned_abs())
    }

    /// Spaces up to `column`.
    pub(crate) fn pad(&mut self, column: usize) -> &mut Self {
        while self.len < column.min(N) {
            self.str(" ");
        }
        self
    }

    /// At most `max` bytes of foreign text, made harmless for a terminal.
    pub(crate) fn excerpt(&mut self, foreign: &[u8], max: usize) -> &mut Self {
        for &byte in foreign.iter().take(max) {
            let printable = byte == b' ' || byte.is_ascii_graphic();
            self.bytes(&[if printable { byte } else { b'?' }]);
        }
        if foreign.len() > max {
            self.str("...");
        }
        self
    }

    /// Makes it a C string; the NUL has its place even where the text was cut.
    pub(crate) fn end_with_nul(&mut self) -> &mut Self {
        self.len = self.len.min(N.saturating_sub(1));
        self.bytes(&[0])
    }

    /// Ends the line; the line break has its place even where the text was cut.
    pub(crate) fn end(&mut self) -> &mut Self {
        self.len = self.len.min(N.saturating_sub(1));
        self.str("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn numbers_read_as_std_writes_them(signed: i64, unsigned: u64) {
            let mut line = Line::<64>::new();
            line.signed(signed).str(" ").unsigned(unsigned).str(" ").hex(unsigned);
            let expected = std::format!("{signed} {unsigned} {unsigned:x}");
            prop_assert_eq!(line.as_bytes(), expected.as_bytes());
        }

        #[test]
        fn a_line_is_bounded_printable_and_ended(foreign: std::vec::Vec<u8>, max in 0usize..80) {
            let mut line = Line::<32>::new();
            line.excerpt(&foreign, max).end();
            let (last, rest) = line.as_bytes().split_last().unwrap();
            prop_assert_eq!(*last, b'\n');
            prop_assert!(rest.iter().all(|byte| (b' '..=b'~').contains(byte)));
        }
    }

    #[test]
    fn extremes_and_columns() {
        let mut line = Line::<64>::new();
        line.signed(i64::MIN).pad(24).unsigned(0).str(" ").hex(0).str(" ").hex(u64::MAX);
        assert_eq!(line.as_bytes(), b"-9223372036854775808    0 0 ffffffffffffffff");
        line.clear();
        line.pad(1000);
        assert_eq!(line.as_bytes().len(), 64);
    }
}
