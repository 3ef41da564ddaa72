//! The option table. A row is the field, the accessor, the parser arm, the name for control
//! access, the line of a report and the row of `docs/options.md`.
//!
//! Invariants: a stored value is always within its row's range; a read of a number is one relaxed
//! load. A text is set once, when the process starts, and consists of characters that no report has
//! to escape.
//!
//! ```
//! use thermalloc::control::options;
//! options::set("hot_window_ms", "8000")?;
//! assert_eq!(options::hot_window_ms(), 8000);
//! # Ok::<(), options::SetError>(())
//! ```

use super::text::Line;
use crate::policy::thp::{Hugetlb, Thp};
use core::ffi::{CStr, c_char};
use core::sync::atomic::{
    AtomicI64, AtomicU8, AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
};

const KIB: i64 = 1 << 10;
const MIB: i64 = 1 << 20;
const GIB: i64 = 1 << 30;
/// jemalloc's bound on a decay: what fits 64 bits as nanoseconds.
const DECAY_MAX_MS: i64 = 18_446_744_072_000;

/// How the value of an option is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `true` or `false`; stored as 1 or 0.
    Bool,
    /// Milliseconds.
    Ms,
    /// Bytes; K, M or G after the number multiplies by 2^10, 2^20 or 2^30.
    Bytes,
    /// A plain number.
    Count,
    /// What huge pages are used for: one of three words, stored as its index.
    Thp,
    /// Pages of the kernel's reserved pools: one of three words, stored as its index.
    Hugetlb,
    /// At most [`TEXT_BYTES`] printable ASCII characters, none of them `"`, `\`, `<`, `>`, `&` or a
    /// comma. As a number: how many there are.
    Text,
}

impl Kind {
    /// The words that a value is one of, by their indices; none where it is something else.
    #[must_use]
    pub fn words(self) -> &'static [&'static str] {
        match self {
            Kind::Bool => &["false", "true"],
            Kind::Thp => &["default", "always", "never"],
            Kind::Hugetlb => &["off", "2M", "1G"],
            _ => &[],
        }
    }

    /// The same, for C; a truth is no text there.
    pub(super) fn c_words(self) -> &'static [&'static CStr] {
        match self {
            Kind::Thp => &[c"default", c"always", c"never"],
            Kind::Hugetlb => &[c"off", c"2M", c"1G"],
            _ => &[],
        }
    }
}

/// The longest text of an option, bytes.
pub const TEXT_BYTES: usize = 255;

/// A text's place: written when the process starts.
#[derive(Debug)]
pub(crate) struct TextCell {
    /// The last stays 0.
    bytes: [AtomicU8; TEXT_BYTES + 1],
    len: AtomicUsize,
}

impl TextCell {
    const fn new() -> Self {
        Self { bytes: [const { AtomicU8::new(0) }; TEXT_BYTES + 1], len: AtomicUsize::new(0) }
    }

    fn store(&self, text: &[u8]) {
        let text = text.get(..TEXT_BYTES).unwrap_or(text);
        for (to, from) in self.bytes.iter().zip(text.iter().chain(&[0])) {
            to.store(*from, Relaxed);
        }
        self.len.store(text.len(), Release);
    }

    fn read(&self) -> Text {
        let mut text = Text { bytes: [0; TEXT_BYTES], len: self.len.load(Acquire) };
        for (to, from) in text.bytes.iter_mut().zip(&self.bytes) {
            *to = from.load(Relaxed);
        }
        text
    }
}

/// The value of an option that is a text; empty where nothing sets it.
#[derive(Clone, Copy, Debug)]
pub struct Text {
    bytes: [u8; TEXT_BYTES],
    len: usize,
}

impl Text {
    /// Its bytes, all of them printable ASCII.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or(&[])
    }
}

fn is_text(text: &[u8]) -> bool {
    let plain = |byte: &u8| (b' '..=b'~').contains(byte) && !b"\"\\<>&,".contains(byte);
    text.len() <= TEXT_BYTES && text.iter().all(plain)
}

/// Where a value is kept.
#[derive(Debug)]
enum Cell {
    Number(fn(&Options) -> &AtomicI64),
    Text(fn(&Options) -> &TextCell),
}

/// When an option may be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutability {
    /// Read once when the process starts: only the environment sets it.
    Start,
    /// May be set at any time.
    Live,
}

/// One option.
#[derive(Debug)]
#[non_exhaustive]
pub struct Row {
    /// Its name, in the environment and for control access.
    pub name: &'static str,
    /// How its value is written.
    pub kind: Kind,
    /// The value where nothing sets it.
    pub default: i64,
    /// The least value allowed.
    pub min: i64,
    /// The greatest value allowed.
    pub max: i64,
    /// When it may be set.
    pub mutability: Mutability,
    /// What it does.
    pub doc: &'static str,
    cell: Cell,
    in_force: fn(&Options, i64) -> i64,
}

/// Why an option was not set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetError {
    /// No option has this name.
    Unknown,
    /// The option is read only when the process starts.
    StartOnly,
    /// The value is not of the option's kind or not within its range.
    Invalid,
}

impl core::fmt::Display for SetError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            SetError::Unknown => "no such option",
            SetError::StartOnly => "set only when the process starts, by THERMALLOC_CONF",
            SetError::Invalid => "not a value of this option",
        })
    }
}

impl core::error::Error for SetError {}

/// The accessor's type.
trait Typed {
    fn from_raw(raw: i64) -> Self;
}
impl Typed for bool {
    #[inline]
    fn from_raw(raw: i64) -> Self {
        raw != 0
    }
}
impl Typed for Thp {
    fn from_raw(raw: i64) -> Self {
        match raw {
            1 => Thp::Always,
            2 => Thp::Never,
            _ => Thp::Evidence,
        }
    }
}
impl Typed for Hugetlb {
    fn from_raw(raw: i64) -> Self {
        match raw {
            1 => Hugetlb::Mib2,
            2 => Hugetlb::Gib1,
            _ => Hugetlb::Off,
        }
    }
}
impl Typed for i64 {
    #[inline]
    fn from_raw(raw: i64) -> Self {
        raw
    }
}
impl Typed for usize {
    #[inline]
    fn from_raw(raw: i64) -> Self {
        usize::try_from(raw).unwrap_or(0)
    }
}
impl Typed for u32 {
    #[inline]
    fn from_raw(raw: i64) -> Self {
        u32::try_from(raw).unwrap_or(0)
    }
}

macro_rules! type_of {
    (Bool) => {
        bool
    };
    (Ms) => {
        i64
    };
    (Bytes) => {
        usize
    };
    (Count) => {
        u32
    };
    (Thp) => {
        Thp
    };
    (Hugetlb) => {
        Hugetlb
    };
}

macro_rules! raw {
    (Bool, $value:expr) => {
        $value as i64
    };
    ($kind:ident, $value:expr) => {
        $value
    };
}

macro_rules! first_of {
    ($first:path $(, $other:path)*) => {
        $first
    };
}

/// Texts, which only start-up sets: `[name: doc;]`. Then numbers:
/// `name: Kind = default, least..=greatest, Start or Live, [function of the value in force,] doc;`
macro_rules! options {
    ([$($text:ident: $text_doc:literal;)*] $($name:ident: $kind:ident = $default:expr, $range:expr, $mutability:ident, $([$in_force:path],)? $doc:literal;)*) => {
        /// The values, one atomic a row.
        #[derive(Debug)]
        pub(crate) struct Options {
            $($name: AtomicI64,)*
            $($text: TextCell,)*
            pub(super) jemalloc: super::jemalloc::Values,
        }

        impl Options {
            /// Every option at its default.
            pub(crate) const fn new() -> Self {
                Options {
                    $($name: AtomicI64::new(raw!($kind, $default)),)*
                    $($text: TextCell::new(),)*
                    jemalloc: super::jemalloc::Values::new(),
                }
            }
        }

        /// Every option, in the order of the manual.
        pub static ROWS: &[Row] = &[$(Row {
            name: stringify!($name),
            kind: Kind::$kind,
            default: raw!($kind, $default),
            min: *$range.start(),
            max: *$range.end(),
            mutability: Mutability::$mutability,
            doc: $doc,
            cell: Cell::Number(|options| &options.$name),
            in_force: first_of!($($in_force,)? as_set),
        },)* $(Row {
            name: stringify!($text),
            kind: Kind::Text,
            default: 0,
            min: 0,
            max: TEXT_BYTES as i64,
            mutability: Mutability::Start,
            doc: $text_doc,
            cell: Cell::Text(|options| &options.$text),
            in_force: as_set,
        },)*];

        $(
            #[doc = $text_doc]
            #[must_use]
            pub fn $text() -> Text {
                OPTIONS.$text.read()
            }
        )*

        $(
            #[doc = $doc]
            #[inline]
            #[must_use]
            pub fn $name() -> type_of!($kind) {
                let stored = OPTIONS.$name.load(Relaxed);
                Typed::from_raw((first_of!($($in_force,)? as_set))(&OPTIONS, stored))
            }
        )*
    };
}

options! {
    [
        prof_prefix: "What the names of the profiler's dumps begin with: `PREFIX.PID.NUMBER.TIME.LIVE.WHY.thprof`. Empty is `thermalloc`, in the working directory.";
        prof_events: "Writes every event of recorded blocks to this file (`docs/profile-format.md`). `%p` in it becomes the process id, which a program that forks needs.";
        stats_page: "Keeps figures of the live process in this file, for `thermalloc top` and `stats`; `/dev/shm/thermalloc.%p` is where they look first. `%p` becomes the process id.";
        prof_classes: "A file of rules by which reports assign call stacks to components, before those that are built in. Noted in profiles for their readers.";
        trace_file: "Records every extent that the page layer gives out and takes back into this file, for the policy lab (`lab/README.md`). An absolute path, opened anew for each write; `%p` in it becomes the process id, which a program that starts others needs. Empty records nothing.";
    ]
    background_thread: Bool = true, 0..=1, Live, "Purge from a thread of thermalloc's own, so that memory goes back also when the program stops allocating.";
    hot_window_ms: Ms = 5000, 0..=60_000, Live, [zero_where_purged_at_once], "A page in use within this time is never purged; the peak demand of this time is kept as dirty pages. Reads as 0 while `dirty_decay_ms` is 0.";
    dirty_decay_ms: Ms = 2000, -1..=DECAY_MAX_MS, Live, "Pages beyond the hot window go back evenly over this time. -1 never purges; 0 purges at once, with no hot window.";
    muzzy_decay_ms: Ms = 0, -1..=DECAY_MAX_MS, Live, "What would go back is first only offered to the kernel (`MADV_FREE`), which takes it when memory is short, and goes back over this time. It still counts as resident until then. -1 leaves it with the offer; 0 gives back directly.";
    thp: Thp = 0, 0..=2, Start, "Transparent huge pages. `default` makes huge pages, in the background, of memory that was seen to be dense; `always` asks for them wherever memory is touched; `never` forbids them. The system's mode `never` makes `default` do nothing.";
    hugetlb: Hugetlb = 0, 0..=2, Start, "Take memory from the kernel's reserved huge pages of this size, as long as there are some, then ordinary memory. Such pages are never given back, and a fork's child that writes to them needs as many again.";
    cpu_cache_bytes: Bytes = 8 * MIB, 0..=GIB, Live, "The most that the cache of one CPU holds. A quarter of it is for blocks above 32 KiB, three quarters while those come and go within 128 us. 0 caches nothing.";
    limit_bytes: Bytes = 0, 0..=i64::MAX, Live, "Resident memory of thermalloc's own that it tries to stay below: near it what lies above the hot window's peak goes back at once, above it everything that is free. 0 sets no limit.";
    limit_percent: Count = 90, 0..=100, Live, "The same for the process's cgroup, in per cent of its memory.high or memory.max (v1: its limit), whichever is lower. 0 does not look at the cgroup.";
    rseq: Bool = true, 0..=1, Start, "Caches per CPU by restartable sequences. Off, or where the kernel or libc has none: caches per thread.";
    strip_deepbind: Bool = true, 0..=1, Live, "Drop RTLD_DEEPBIND from the flags of dlopen: a library loaded with it would free our blocks by another allocator.";
    prof: Bool = false, 0..=1, Start, "Record blocks with their call stacks, by samples, for profiles.";
    prof_active: Bool = true, 0..=1, Live, "Records go on; with `prof:true` only. A thread notices a change when it has allocated 2 MiB more.";
    lg_prof_sample: Count = 19, 0..=62, Live, "The mean distance between samples, as the base-2 logarithm of bytes. 0 records every block, each in pages of its own. Blocks above 1 MiB are all recorded.";
    prof_budget: Count = 3000, 0..=10_000_000, Live, "The most samples in a second in the long run, for which the distance between them is raised: a third each for blocks up to 32 KiB, up to 1 MiB and above. 0 sets no limit.";
    prof_seed: Count = 0, 0..=4_294_967_295, Start, "What the choice of samples begins with, for results that can be repeated. 0 begins anew in each process.";
    prof_limit_percent: Count = 0, 0..=100, Live, "Write a dump when the cgroup has so many per cent of its limit, or tasks in it wait for memory, or the process has reached `limit_bytes`. 0: none.";
    prof_oom: Bool = false, 0..=1, Start, "Write a dump when an allocation of the C library's functions fails, the first time.";
    prof_dumps: Count = 1000, 0..=4_294_967_295, Live, "The most dumps that a process writes to files of their own; 0 sets no limit.";
    prof_dumps_bytes: Bytes = 0, 0..=i64::MAX, Live, "The most bytes of such dumps together: the first that would go beyond is not kept, and no more are written. 0 sets no limit.";
    prof_pid: Count = 0, 0..=4_194_304, Start, "Record, and write profiles, in the process with this id only, and in its forks: not in the programs that it starts, which have the same environment.";
    prof_tensorflow: Bool = true, 0..=1, Live, "Read what TensorFlow says of each of its allocations: operator, step and kind.";
    lg_prof_interval: Count = -1, -1..=62, Live, "Write a dump each time that so many more bytes were allocated, as the base-2 logarithm. -1 and 0 write none.";
    prof_gdump: Bool = false, 0..=1, Live, "Write a dump when the program has grown beyond all that it was.";
    prof_final: Bool = false, 0..=1, Live, "Write a dump at the end of the process.";
    prof_jeprof: Bool = false, 0..=1, Live, "Write dumps as jemalloc does, for jeprof: `PREFIX.PID.NUMBER.LETTER.heap`.";
    prof_leak: Bool = false, 0..=1, Live, "Say on standard error what is still live at the end of the process.";
    narenas: Count = 0, 0..=4095, Start, "Number of arenas. 0 has one for each CPU.";
}

pub(crate) static OPTIONS: Options = Options::new();

/// Turns the profiler off for good, whatever the environment says.
pub(crate) fn forbid_prof() {
    OPTIONS.prof.store(0, Relaxed);
}

#[inline]
fn as_set(_: &Options, stored: i64) -> i64 {
    stored
}

/// A decay of 0 asks for purging at once; the window set before is in force again when it ends.
#[inline]
fn zero_where_purged_at_once(options: &Options, stored: i64) -> i64 {
    if options.dirty_decay_ms.load(Relaxed) == 0 { 0 } else { stored }
}

impl Row {
    /// The value in force; a boolean as 1 or 0, a text as its length.
    #[must_use]
    pub fn get(&self) -> i64 {
        self.get_in(&OPTIONS)
    }

    /// Sets a live option; a boolean as 1 or 0.
    ///
    /// # Errors
    /// Where the option is not live or the value is not within its range.
    pub fn set(&self, value: i64) -> Result<(), SetError> {
        self.set_in(&OPTIONS, value)
    }

    pub(super) fn get_in(&self, options: &Options) -> i64 {
        let stored = match self.cell {
            Cell::Number(cell) => cell(options).load(Relaxed),
            Cell::Text(cell) => cell(options).len.load(Relaxed).cast_signed() as i64,
        };
        (self.in_force)(options, stored)
    }

    /// The value in force as a C string that stays, where it is a word or a text.
    pub(super) fn c_text(&self) -> Option<*const c_char> {
        if let Cell::Text(cell) = self.cell {
            return Some(cell(&OPTIONS).bytes.as_ptr().cast());
        }
        let word = usize::try_from(self.get()).ok()?;
        self.kind.c_words().get(word).map(|word| word.as_ptr())
    }

    fn set_in(&self, options: &Options, value: i64) -> Result<(), SetError> {
        if self.mutability == Mutability::Start {
            return Err(SetError::StartOnly);
        }
        if !self.allows(value) {
            return Err(SetError::Invalid);
        }
        if let Cell::Number(cell) = self.cell {
            cell(options).store(value, Relaxed);
        }
        Ok(())
    }

    fn allows(&self, value: i64) -> bool {
        (self.min..=self.max).contains(&value)
    }

    /// Stores what `text` says, also in an option that only start-up may set; `false` where it
    /// says nothing that the option allows.
    pub(super) fn load_in(&self, options: &Options, text: &[u8]) -> bool {
        let Some(value) = self.parse(text) else { return false };
        match self.cell {
            Cell::Number(cell) => cell(options).store(value, Relaxed),
            Cell::Text(cell) => cell(options).store(if value == 0 { b"" } else { text }),
        }
        true
    }

    pub(super) fn parse(&self, text: &[u8]) -> Option<i64> {
        if text == b"default" {
            return Some(self.default);
        }
        let value = match self.kind {
            Kind::Bool | Kind::Thp | Kind::Hugetlb => {
                let mut words = self.kind.words().iter();
                i64::try_from(words.position(|word| word.as_bytes() == text)?).ok()?
            }
            Kind::Ms | Kind::Count => number(text)?,
            Kind::Bytes => bytes(text)?,
            Kind::Text if is_text(text) => i64::try_from(text.len()).ok()?,
            Kind::Text => return None,
        };
        self.allows(value).then_some(value)
    }

    /// The value in force of the process, as a program reads it.
    pub(crate) fn show_value<const N: usize>(&self, line: &mut Line<N>) {
        self.show_plain_in(&OPTIONS, line);
    }

    /// The value in force as a person writes it.
    pub(super) fn show_in<const N: usize>(&self, options: &Options, line: &mut Line<N>) {
        match self.cell {
            Cell::Number(_) => self.show(self.get_in(options), line),
            Cell::Text(cell) => drop(line.bytes(cell(options).read().as_bytes())),
        }
    }

    /// As [`Self::show_in`], a text cut to `max` bytes and `none` where it is empty.
    pub(super) fn show_short_in<const N: usize>(
        &self,
        options: &Options,
        max: usize,
        line: &mut Line<N>,
    ) {
        match self.cell {
            Cell::Number(_) => self.show_in(options, line),
            Cell::Text(cell) => match cell(options).read().as_bytes() {
                b"" => drop(line.str("none")),
                text => drop(line.excerpt(text, max)),
            },
        }
    }

    /// The value in force as a program reads it.
    pub(super) fn show_plain_in<const N: usize>(&self, options: &Options, line: &mut Line<N>) {
        match self.cell {
            Cell::Number(_) => self.show_plain(self.get_in(options), line),
            Cell::Text(_) => self.show_in(options, line),
        }
    }

    /// `value` as a person writes it.
    pub(super) fn show<const N: usize>(&self, value: i64, line: &mut Line<N>) {
        let (whole, unit) = match self.kind {
            Kind::Bytes if value == 0 => (value, ""),
            Kind::Bytes if value % GIB == 0 => (value / GIB, "G"),
            Kind::Bytes if value % MIB == 0 => (value / MIB, "M"),
            Kind::Bytes if value % KIB == 0 => (value / KIB, "K"),
            _ => (value, ""),
        };
        self.show_plain(whole, line);
        line.str(unit);
    }

    /// `value` as a program reads it: a word or a number of the option's unit.
    pub(super) fn show_plain<const N: usize>(&self, value: i64, line: &mut Line<N>) {
        match self.kind {
            _ if !self.kind.words().is_empty() => {
                let word = usize::try_from(value).ok().and_then(|i| self.kind.words().get(i));
                line.str(word.unwrap_or(&"?"))
            }
            _ => line.signed(value),
        };
    }
}

/// The option of this name.
#[must_use]
pub fn find(name: &str) -> Option<&'static Row> {
    find_bytes(name.as_bytes())
}

pub(super) fn find_bytes(name: &[u8]) -> Option<&'static Row> {
    ROWS.iter().find(|row| row.name.as_bytes() == name)
}

/// The value in force of the option of this name; a boolean as 1 or 0.
#[must_use]
pub fn get(name: &str) -> Option<i64> {
    find(name).map(Row::get)
}

/// Sets a live option, its value written as in the environment.
///
/// # Errors
/// Where no option has the name, or it is not live, or does not allow the value.
pub fn set(name: &str, value: &str) -> Result<(), SetError> {
    set_bytes(name.as_bytes(), value.as_bytes())
}

pub(super) fn set_bytes(name: &[u8], value: &[u8]) -> Result<(), SetError> {
    let row = find_bytes(name).ok_or(SetError::Unknown)?;
    if row.mutability == Mutability::Start {
        return Err(SetError::StartOnly);
    }
    row.set(row.parse(value).ok_or(SetError::Invalid)?)
}

pub(super) fn number(text: &[u8]) -> Option<i64> {
    let (negative, digits) = match text.split_first() {
        Some((b'-', digits)) => (true, digits),
        _ => (false, text),
    };
    if digits.is_empty() {
        return None;
    }
    let mut value = 0i64;
    for digit in digits {
        if !digit.is_ascii_digit() {
            return None;
        }
        value = value.checked_mul(10)?.checked_add(i64::from(digit - b'0'))?;
    }
    Some(if negative { -value } else { value })
}

fn bytes(text: &[u8]) -> Option<i64> {
    let (last, digits) = text.split_last()?;
    let unit = match last.to_ascii_uppercase() {
        b'K' => KIB,
        b'M' => MIB,
        b'G' => GIB,
        _ => return number(text),
    };
    number(digits)?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::string::ToString;

    fn row(name: &str) -> &'static Row {
        find(name).unwrap()
    }

    #[test]
    fn a_row_yields_everything_of_an_option() {
        let fresh = Options::new();
        for row in ROWS {
            assert_eq!(row.get_in(&fresh), row.default, "{}", row.name);
            assert!(row.allows(row.default), "{}", row.name);
            assert_eq!(row.parse(b"default"), Some(row.default));
            assert!(row.doc.ends_with('.'), "{}", row.name);
            if let Some(last) = row.kind.words().len().checked_sub(1) {
                assert_eq!((row.min, row.max), (0, last as i64), "{}", row.name);
            }
        }
        assert_eq!(hot_window_ms(), 5000);
        assert_eq!(cpu_cache_bytes(), 8 << 20);
        assert_eq!(narenas(), 0);
        assert!(rseq());
        assert_eq!(get("dirty_decay_ms"), Some(2000));
        assert!(trace_file().as_bytes().is_empty());
    }

    #[test]
    fn texts() {
        let (row, options) = (row("trace_file"), Options::new());
        let shown = || {
            let (mut shown, mut plain) = (Line::<300>::new(), Line::<300>::new());
            row.show_in(&options, &mut shown);
            row.show_plain_in(&options, &mut plain);
            assert_eq!(shown.as_bytes(), plain.as_bytes());
            std::string::String::from_utf8(shown.as_bytes().to_vec()).unwrap()
        };
        assert_eq!((row.get_in(&options), shown()), (0, "".into()));
        assert!(row.load_in(&options, b"/tmp/trace of: %p=x"));
        assert_eq!((row.get_in(&options), shown()), (19, "/tmp/trace of: %p=x".into()));
        for bad in ["a\"b", "a\\b", "a<b", "a>b", "a&b", "a,b", "a\nb", "\u{7f}", "\u{e4}"] {
            assert!(!row.load_in(&options, bad.as_bytes()), "{bad}");
        }
        assert!(!row.load_in(&options, &[b'x'; TEXT_BYTES + 1]));
        assert_eq!(shown(), "/tmp/trace of: %p=x", "what is refused changes nothing");
        assert!(row.load_in(&options, &[b'x'; TEXT_BYTES]));
        assert_eq!(shown(), "x".repeat(TEXT_BYTES));
        assert!(row.load_in(&options, b"/y"));
        assert_eq!(shown(), "/y");
        assert!(row.load_in(&options, b"default"));
        assert_eq!((row.get_in(&options), shown()), (0, "".into()));
        assert!(row.load_in(&options, b""), "empty is what it is by default");
        assert_eq!(set("trace_file", "/z"), Err(SetError::StartOnly));
        assert_eq!(row.set_in(&options, 1), Err(SetError::StartOnly));
    }

    #[test]
    fn no_name_twice() {
        for (i, row) in ROWS.iter().enumerate() {
            assert!(ROWS[..i].iter().all(|other| other.name != row.name));
        }
    }

    #[test]
    fn values() {
        let decay = row("dirty_decay_ms");
        assert_eq!(decay.parse(b"-1"), Some(-1));
        assert_eq!(decay.parse(b"0"), Some(0));
        for bad in ["", "-", "-2", "1e9", "+1", "0x10", "99999999999999999999999"] {
            assert_eq!(decay.parse(bad.as_bytes()), None, "{bad}");
        }
        let cache = row("cpu_cache_bytes");
        assert_eq!(cache.parse(b"512k"), Some(512 << 10));
        assert_eq!(cache.parse(b"1G"), Some(1 << 30));
        assert_eq!(cache.parse(b"4096"), Some(4096));
        for bad in ["", "K", "-1", "1025M", "9223372036854775807G", "8 M"] {
            assert_eq!(cache.parse(bad.as_bytes()), None, "{bad}");
        }
        assert_eq!(row("rseq").parse(b"false"), Some(0));
        assert_eq!(row("rseq").parse(b"no"), None);
        assert_eq!(row("thp").parse(b"never"), Some(2));
        assert_eq!(row("thp").parse(b"sometimes"), None);
        assert_eq!(row("hugetlb").parse(b"1G"), Some(2));
        assert_eq!(row("hugetlb").parse(b"2"), None);
        assert_eq!((thp(), hugetlb()), (Thp::Evidence, Hugetlb::Off));
    }

    #[test]
    fn decay_zero_hides_the_window_and_gives_it_back() {
        let options = Options::new();
        let (window, decay) = (row("hot_window_ms"), row("dirty_decay_ms"));
        window.set_in(&options, 3000).unwrap();
        decay.set_in(&options, 0).unwrap();
        assert_eq!(window.get_in(&options), 0);
        decay.set_in(&options, 1000).unwrap();
        assert_eq!(window.get_in(&options), 3000);
        decay.set_in(&options, -1).unwrap();
        assert_eq!(window.get_in(&options), 3000);
    }

    #[test]
    fn only_live_options_within_range_are_set() {
        let options = Options::new();
        assert_eq!(row("narenas").set_in(&options, 4), Err(SetError::StartOnly));
        assert_eq!(set("narenas", "4"), Err(SetError::StartOnly));
        assert_eq!(row("hot_window_ms").set_in(&options, 60_001), Err(SetError::Invalid));
        assert_eq!(row("hot_window_ms").get_in(&options), 5000);
        assert_eq!(set("hot_window_ms", "soon"), Err(SetError::Invalid));
        assert_eq!(set("hot_window", "1"), Err(SetError::Unknown));
    }

    proptest! {
        #[test]
        fn what_is_shown_reads_back(index in 0..ROWS.len(), value: i64, shift in 0u32..64) {
            let row = &ROWS[index];
            prop_assume!(row.kind != Kind::Text);
            let value = (value >> shift).clamp(row.min, row.max);
            let (mut shown, mut plain) = (Line::<64>::new(), Line::<64>::new());
            row.show(value, &mut shown);
            row.show_plain(value, &mut plain);
            prop_assert_eq!(row.parse(shown.as_bytes()), Some(value));
            prop_assert_eq!(row.parse(plain.as_bytes()), Some(value));
        }

        #[test]
        fn a_number_is_what_std_reads(text in "-?[0-9]{0,22}|[-+0-9a-z]{0,5}") {
            let expected = if text.starts_with('+') { None } else { text.parse::<i64>().ok() };
            // i64::MIN alone is refused: no range reaches it.
            prop_assert_eq!(number(text.as_bytes()), expected.filter(|&v| v != i64::MIN));
        }

        #[test]
        fn nothing_out_of_range_is_loaded(index in 0..ROWS.len(), text: std::vec::Vec<u8>, value: i64) {
            let (row, options) = (&ROWS[index], Options::new());
            row.load_in(&options, &text);
            row.load_in(&options, value.to_string().as_bytes());
            prop_assert!(row.allows(row.get_in(&options)));
        }
    }
}
