//! A panic, which is a bug of ours: one line, and the end.
use core::fmt::{self, Write};

/// A line or two of text on the stack: what does not fit is cut off.
struct Text<const N: usize> {
    bytes: [u8; N],
    len: usize,
}

impl<const N: usize> Text<N> {
    fn format(args: fmt::Arguments<'_>) -> Self {
        let mut text = Self { bytes: [0; N], len: 0 };
        // Only "full" can go wrong, and then the beginning is what we want.
        let _ = text.write_fmt(args);
        text
    }

    fn as_str(&self) -> &str {
        self.bytes.get(..self.len).and_then(|b| str::from_utf8(b).ok()).unwrap_or("")
    }
}

impl<const N: usize> Write for Text<N> {
    fn write_str(&mut self, s: &str) -> fmt::Result {
        let room = self.bytes.get_mut(self.len..self.len + s.len()).ok_or(fmt::Error)?;
        room.copy_from_slice(s.as_bytes());
        self.len += s.len();
        Ok(())
    }
}

#[panic_handler]
fn panicked(info: &core::panic::PanicInfo<'_>) -> ! {
    let text = match info.location() {
        Some(at) => Text::<400>::format(format_args!(
            "internal error: {}:{}: {}",
            at.file(),
            at.line(),
            info.message()
        )),
        None => Text::<400>::format(format_args!("internal error: {}", info.message())),
    };
    crate::hooks::fatal(text.as_str())
}
