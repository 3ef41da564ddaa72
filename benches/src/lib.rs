//! What the measuring programs share: the process's own malloc, clocks, resident size, random numbers.
//!
//! Nothing here may allocate while a program measures: the allocator under test is the process's malloc, and
//! so is the one that Rust's collections use. Readings of /proc go through a buffer on the stack.

use std::fmt::Write;
use std::hint::black_box;
use std::time::Duration;

pub mod block;
pub mod pipe;
pub mod proc;

pub use block::Block;
pub use pipe::Pipe;

/// CPU time that the calling thread has used.
pub fn thread_cpu() -> Duration {
    clock(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// CPU time that the process has used.
pub fn cpu() -> Duration {
    clock(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// Monotonic time.
pub fn now() -> Duration {
    clock(libc::CLOCK_MONOTONIC)
}

fn clock(id: libc::clockid_t) -> Duration {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: t is a valid timespec to write to, and both clocks exist on Linux.
    unsafe { libc::clock_gettime(id, &mut t) };
    Duration::new(t.tv_sec.unsigned_abs(), u32::try_from(t.tv_nsec).unwrap_or(0))
}

/// The library whose `malloc` this process calls, so that a preload that did not work cannot go unseen.
pub fn library() -> String {
    let address = black_box(libc::malloc as *const libc::c_void);
    // SAFETY: all fields of a Dl_info are plain pointers, for which null is a value.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: info is valid to write to; dladdr accepts any address.
    if unsafe { libc::dladdr(address, &mut info) } == 0 || info.dli_fname.is_null() {
        return "unknown".into();
    }
    // SAFETY: dladdr succeeded, so dli_fname is a C string owned by the loader.
    unsafe { std::ffi::CStr::from_ptr(info.dli_fname) }.to_string_lossy().into_owned()
}

/// A small generator with a fixed seed: every allocator sees the same sequence.
pub struct Random(u64);

impl Random {
    /// A generator whose sequence depends on `seed` only.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// 64 random bits (xorshift64*).
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// Uniform in `0..n`.
    #[allow(
        clippy::cast_possible_truncation,
        reason = "the high half of a product of n is below n"
    )]
    pub fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.bits()) * n as u128) >> 64) as usize
    }

    /// Uniform in `low..=high`.
    pub fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high - low + 1)
    }

    /// Log-uniform over the powers of two from `1 << low` to `1 << high`: each doubling is equally likely.
    pub fn doubling(&mut self, low: u32, high: u32) -> usize {
        let octave = self.between(low as usize, high as usize - 1);
        self.between(1 << octave, 2 << octave)
    }
}

/// One JSON object on one line, in the order of the calls.
pub struct Json(String);

impl Json {
    /// Starts the line of `scenario`.
    pub fn new(scenario: &str) -> Self {
        Json("{".into()).text("scenario", scenario).text("library", &library())
    }

    /// Adds a string; it must need no escapes.
    pub fn text(mut self, key: &str, value: &str) -> Self {
        self.key(key);
        let _ = write!(self.0, "\"{value}\"");
        self
    }

    /// Adds a number.
    pub fn number(mut self, key: &str, value: f64) -> Self {
        self.key(key);
        let _ = write!(self.0, "{}", (value * 100.0).round() / 100.0);
        self
    }

    fn key(&mut self, key: &str) {
        let comma = if self.0.len() > 1 { ", " } else { "" };
        let _ = write!(self.0, "{comma}\"{key}\": ");
    }

    /// Prints the line.
    pub fn print(self) {
        println!("{}}}", self.0);
    }
}

/// The value of `--name` on the command line, or `default`.
pub fn option<T: std::str::FromStr>(name: &str, default: T) -> T {
    let flag = format!("--{name}");
    let Some(text) = std::env::args().skip_while(|a| *a != flag).nth(1) else {
        return default;
    };
    text.parse().unwrap_or_else(|_| {
        eprintln!("benches: --{name} {text}: not a value: see benches/README.md");
        std::process::exit(2)
    })
}
