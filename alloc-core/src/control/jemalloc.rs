//! jemalloc's options: every name that its releases up to 5.3 read, and those of its successor.
//!
//! A row says how the value is written, what `opt.<name>` reads where nothing sets it, and what it
//! does here. A name that is also a row of our own table is that row: only its type is kept here.
//! Invariant: a stored value is one that jemalloc itself would accept.

use super::mallctl::Type;
use super::options::{self, Options};
use core::ffi::CStr;
use core::sync::atomic::{
    AtomicI64, AtomicU8,
    Ordering::{Relaxed, Release},
};

/// How a value is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Bool,
    /// C's `unsigned`.
    Unsigned,
    Size,
    Ssize,
    U64,
    I64,
    /// One of some words, stored as its index.
    Words(&'static [&'static CStr]),
    /// A number with a point, in units of 2^-16; -1 where that is allowed.
    Fraction,
    /// Letters of `malloc_stats_print`.
    Letters,
    /// Something that is not looked into.
    Text,
}

/// What an option does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// As in jemalloc.
    Same,
    /// Stands for something of ours.
    Mapped(&'static str),
    /// Accepted; why it does nothing.
    Nothing(&'static str),
}

/// Whether `opt.<name>` can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Read {
    /// As in jemalloc 5.3.
    Yes,
    /// jemalloc 5.3 has no such name.
    Never,
    /// jemalloc has it where it was built with something that does not exist here.
    NotBuilt,
}

/// One option of jemalloc.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    pub(crate) default: i64,
    pub(crate) read: Read,
    effect: Effect,
}

const fn row(name: &'static str, kind: Kind, default: i64, read: Read, effect: Effect) -> Row {
    Row { name, kind, default, read, effect }
}

const SLABS: &str = "Slabs have a shape of their own for each size class.";
const HPA: &str =
    "There is no second page allocator: huge pages are made of what was seen to be dense.";
const TCACHE: &str = "Caches belong to CPUs and tune themselves; `cpu_cache_bytes` is their bound.";
const PROF: &str = "Not one of this profiler's ([profiler.md](profiler.md)).";
const GUARDS: &str = "There are no guard pages.";
const FILL: &str = "Blocks are not filled (`config.fill` is false).";
const NEWER: &str = "Of jemalloc's successor, and internal to it.";

const DSS: &[&CStr] = &[c"disabled", c"primary", c"secondary"];
const METADATA_THP: &[&CStr] = &[c"disabled", c"auto", c"always"];
const PERCPU: &[&CStr] = &[c"percpu", c"phycpu", c"disabled"];
const JUNK: &[&CStr] = &[c"false", c"true", c"alloc", c"free"];
const THP: &[&CStr] = &[c"default", c"always", c"never"];
const TIME: &[&CStr] = &[c"default", c"high"];
const REALLOC: &[&CStr] = &[c"free", c"alloc", c"abort"];

use Effect::{Mapped, Nothing, Same};
use Kind::{Bool, Fraction, I64, Letters, Size, Ssize, Text, U64, Unsigned, Words};
use Read::{Never, NotBuilt, Yes};

/// Every name, sorted.
pub(crate) static ROWS: &[Row] = &[
    row("abort", Bool, 0, Yes, Nothing("What ends a process here is corruption, and always does.")),
    row("abort_conf", Bool, 0, Yes, Same),
    row("background_thread", Bool, 1, Yes, Same),
    row("bin_shards", Text, 0, Never, Nothing(SLABS)),
    row("cache_oblivious", Bool, 0, Yes, Nothing("Large blocks begin on a page.")),
    row("calloc_madvise_threshold", Text, 0, Never, Nothing(NEWER)),
    row("confirm_conf", Bool, 0, Yes, Same),
    row("debug_double_free_max_scan", Text, 0, Never, Nothing(NEWER)),
    row("dirty_decay_ms", Ssize, 2000, Yes, Mapped("0 has no hot window either.")),
    row("disable_large_size_classes", Text, 0, Never, Nothing(NEWER)),
    row("dss", Words(DSS), 0, Yes, Nothing("`sbrk` is never used.")),
    row("experimental_hpa_max_purge_nhp", Text, 0, Never, Nothing(NEWER)),
    row(
        "experimental_infallible_new",
        Bool,
        0,
        NotBuilt,
        Nothing("`operator new` throws, as the standard has it."),
    ),
    row("experimental_tcache_gc", Text, 0, Never, Nothing(NEWER)),
    row("hpa", Bool, 0, Yes, Nothing(HPA)),
    row("hpa_dirty_mult", Fraction, 1 << 14, Yes, Nothing(HPA)),
    row("hpa_hugification_threshold", Size, 2_040_109, Yes, Nothing(HPA)),
    row("hpa_hugification_threshold_ratio", Fraction, 0, Never, Nothing(HPA)),
    row("hpa_hugify_delay_ms", U64, 10_000, Yes, Nothing(HPA)),
    row("hpa_hugify_style", Text, 0, Never, Nothing(NEWER)),
    row("hpa_hugify_sync", Text, 0, Never, Nothing(NEWER)),
    row("hpa_min_purge_delay_ms", Text, 0, Never, Nothing(NEWER)),
    row("hpa_min_purge_interval_ms", U64, 5000, Yes, Nothing(HPA)),
    row("hpa_purge_threshold", Text, 0, Never, Nothing(NEWER)),
    row("hpa_purge_threshold_ratio", Text, 0, Never, Nothing(NEWER)),
    row("hpa_sec_batch_fill_extra", Size, 0, Yes, Nothing(HPA)),
    row("hpa_sec_bytes_after_flush", Size, 128 << 10, Yes, Nothing(HPA)),
    row("hpa_sec_max_alloc", Size, 32 << 10, Yes, Nothing(HPA)),
    row("hpa_sec_max_bytes", Size, 256 << 10, Yes, Nothing(HPA)),
    row("hpa_sec_nshards", Size, 4, Yes, Nothing(HPA)),
    row("hpa_slab_max_alloc", Size, 64 << 10, Yes, Nothing(HPA)),
    row("hpa_strict_min_purge_interval", Text, 0, Never, Nothing(NEWER)),
    row("huge_arena_pac_thp", Text, 0, Never, Nothing(NEWER)),
    row("junk", Words(JUNK), 0, NotBuilt, Nothing(FILL)),
    row(
        "lg_extent_max_active_fit",
        Size,
        6,
        Yes,
        Nothing("Free pages are found best fit, lowest first."),
    ),
    row("lg_prof_interval", Ssize, -1, NotBuilt, Nothing(PROF)),
    row("lg_prof_sample", Size, 19, NotBuilt, Nothing(PROF)),
    row("lg_san_uaf_align", Ssize, -1, NotBuilt, Nothing("Freed blocks are not kept aside.")),
    row("lg_tcache_flush_large_div", Unsigned, 1, Yes, Nothing(TCACHE)),
    row("lg_tcache_flush_small_div", Unsigned, 1, Yes, Nothing(TCACHE)),
    row("lg_tcache_max", Size, 20, Never, Nothing(TCACHE)),
    row("lg_tcache_nslots_mul", Ssize, 1, Yes, Nothing(TCACHE)),
    row("log", Text, 0, Never, Nothing("There is no log.")),
    row("max_background_threads", Size, 1, Yes, Nothing("There is one, which is enough.")),
    row(
        "metadata_thp",
        Words(METADATA_THP),
        0,
        Yes,
        Nothing("Tables grow in place and are a few per cent of what they describe."),
    ),
    row("mutex_max_spin", I64, 60, Yes, Nothing("How long a lock spins is fixed.")),
    row("muzzy_decay_ms", Ssize, 0, Yes, Same),
    row("narenas", Unsigned, 0, Yes, Same),
    row("narenas_ratio", Fraction, 1 << 16, Never, Nothing("There is an arena for each CPU.")),
    row(
        "oversize_threshold",
        Size,
        0,
        Yes,
        Nothing(
            "Large blocks come from the same warm pages as all others: no size is purged on free.",
        ),
    ),
    row("percpu_arena", Words(PERCPU), 0, Yes, Nothing("Arenas are always those of the CPUs.")),
    row("process_madvise_max_batch", Text, 0, Never, Nothing(NEWER)),
    row("prof", Bool, 0, NotBuilt, Nothing(PROF)),
    row("prof_accum", Bool, 0, NotBuilt, Nothing(PROF)),
    row("prof_active", Bool, 1, NotBuilt, Nothing(PROF)),
    row("prof_bt_max", Text, 0, Never, Nothing(PROF)),
    row("prof_final", Bool, 0, NotBuilt, Nothing(PROF)),
    row("prof_gdump", Bool, 0, NotBuilt, Nothing(PROF)),
    row("prof_leak", Bool, 0, NotBuilt, Nothing(PROF)),
    row("prof_leak_error", Bool, 0, NotBuilt, Nothing(PROF)),
    row("prof_log", Bool, 0, Never, Nothing(PROF)),
    row("prof_pid_namespace", Text, 0, Never, Nothing(PROF)),
    row("prof_prefix", Text, 0, NotBuilt, Nothing(PROF)),
    row("prof_recent_alloc_max", Ssize, 0, NotBuilt, Nothing(PROF)),
    row("prof_stats", Bool, 0, NotBuilt, Nothing(PROF)),
    row("prof_sys_thread_name", Bool, 0, NotBuilt, Nothing(PROF)),
    row("prof_thread_active_init", Bool, 1, NotBuilt, Nothing(PROF)),
    row("prof_time_resolution", Words(TIME), 0, NotBuilt, Nothing(PROF)),
    row("prof_unbias", Bool, 1, Never, Nothing(PROF)),
    row("retain", Bool, 1, Yes, Nothing("Address space is always kept.")),
    row("san_guard_large", Size, 0, Never, Nothing(GUARDS)),
    row("san_guard_small", Size, 0, Never, Nothing(GUARDS)),
    row("slab_sizes", Text, 0, Never, Nothing(SLABS)),
    row(
        "stats_interval",
        I64,
        -1,
        Yes,
        Nothing("Statistics are written when asked for, or at the end."),
    ),
    row(
        "stats_interval_opts",
        Letters,
        1,
        Yes,
        Nothing("Statistics are written when asked for, or at the end."),
    ),
    row("stats_print", Bool, 0, Yes, Same),
    row("stats_print_opts", Letters, 0, Yes, Same),
    row("tcache", Bool, 1, Yes, Mapped("`false` is `cpu_cache_bytes:0`.")),
    row("tcache_gc_delay_bytes", Size, 0, Yes, Nothing(TCACHE)),
    row("tcache_gc_incr_bytes", Size, 64 << 10, Yes, Nothing(TCACHE)),
    row("tcache_gc_interval_ms", Text, 0, Never, Nothing(NEWER)),
    row("tcache_max", Size, 1 << 20, Yes, Nothing(TCACHE)),
    row("tcache_ncached_max", Text, 0, Never, Nothing(TCACHE)),
    row("tcache_nslots_large", Unsigned, 20, Yes, Nothing(TCACHE)),
    row("tcache_nslots_small_max", Unsigned, 200, Yes, Nothing(TCACHE)),
    row("tcache_nslots_small_min", Unsigned, 20, Yes, Nothing(TCACHE)),
    row("thp", Words(THP), 0, Yes, Mapped("`default` makes huge pages of what is dense.")),
    row(
        "trust_madvise",
        Bool,
        1,
        Yes,
        Nothing("What the kernel gives back is known to be zero on Linux."),
    ),
    row("utrace", Bool, 0, NotBuilt, Nothing("Linux has no utrace.")),
    row("xmalloc", Bool, 0, NotBuilt, Nothing("A failure is null and ENOMEM.")),
    row("zero", Bool, 0, NotBuilt, Nothing(FILL)),
    row("zero_realloc", Words(REALLOC), 0, Yes, Same),
];

/// Families that grow with each release of jemalloc.
pub(crate) static FAMILIES: &[&str] = &["experimental_", "hpa_", "prof_", "san_"];

/// The letters of `malloc_stats_print`.
pub(crate) const LETTERS: &[u8; 10] = b"Jgmdablxeh";

/// Each letter once, and a NUL.
struct LettersCell([AtomicU8; LETTERS.len() + 1]);

impl LettersCell {
    const fn new() -> Self {
        Self([const { AtomicU8::new(0) }; LETTERS.len() + 1])
    }

    /// Adds letters; others are passed over, as jemalloc does.
    fn add(&self, text: &[u8]) {
        for &letter in text.iter().filter(|letter| LETTERS.contains(letter)) {
            for cell in &self.0 {
                let known = cell.load(Relaxed);
                if known == 0 {
                    cell.store(letter, Release);
                }
                if known == 0 || known == letter {
                    break;
                }
            }
        }
    }

    fn as_ptr(&self) -> *const u8 {
        self.0.as_ptr().cast()
    }
}

/// What `realloc(p, 0)` does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroRealloc {
    /// It frees the block and gives null.
    Free,
    /// It gives a block of the least size.
    Allocate,
    /// It ends the process.
    Abort,
}

/// What the options were set to when the process started.
pub(crate) struct Values {
    numbers: [AtomicI64; ROWS.len()],
    letters: [LettersCell; 2],
}

impl core::fmt::Debug for Values {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_list().entries(&self.numbers).finish()
    }
}

impl Values {
    pub(crate) const fn new() -> Self {
        let mut numbers = [const { AtomicI64::new(0) }; ROWS.len()];
        let mut i = 0;
        while i < numbers.len() {
            numbers[i] = AtomicI64::new(ROWS[i].default);
            i += 1;
        }
        Self { numbers, letters: [const { LettersCell::new() }; 2] }
    }

    /// Keeps what our own options of these names say now: `opt.<name>` is the value at the start.
    pub(crate) fn keep_own(&self, options: &Options) {
        for (row, number) in ROWS.iter().zip(&self.numbers) {
            if let Some(own) = row.own() {
                number.store(own.get_in(options), Relaxed);
            }
        }
    }

    /// The option of this name as a truth.
    pub(crate) fn is_set(&self, name: &str) -> bool {
        position(name.as_bytes())
            .and_then(|i| self.numbers.get(i))
            .is_some_and(|n| n.load(Relaxed) != 0)
    }

    pub(crate) fn zero_realloc(&self) -> ZeroRealloc {
        let number = position(b"zero_realloc").and_then(|at| self.numbers.get(at));
        match number.map(|number| number.load(Relaxed)) {
            Some(1) => ZeroRealloc::Allocate,
            Some(2) => ZeroRealloc::Abort,
            _ => ZeroRealloc::Free,
        }
    }

    /// The letters to print statistics with, a C string.
    pub(crate) fn stats_print_opts(&self) -> *const u8 {
        self.letters[0].as_ptr()
    }

    /// What `opt.<name>` of the row `index` reads: a number, or the address of a C string.
    pub(crate) fn read(&self, index: usize) -> u64 {
        let (Some(row), Some(number)) = (ROWS.get(index), self.numbers.get(index)) else {
            return 0;
        };
        let number = number.load(Relaxed);
        let at = usize::try_from(number).unwrap_or(0);
        match row.kind {
            Words(words) => words.get(at).map_or(0, |word| word.as_ptr().addr() as u64),
            Letters => {
                self.letters.get(row_letters(row)).map_or(0, |cell| cell.as_ptr().addr() as u64)
            }
            Text => c"".as_ptr().addr() as u64,
            _ => number.cast_unsigned(),
        }
    }

    /// Stores what `text` says; `false` where jemalloc would refuse it.
    pub(crate) fn load(&self, index: usize, text: &[u8]) -> bool {
        let (Some(row), Some(number)) = (ROWS.get(index), self.numbers.get(index)) else {
            return false;
        };
        if row.kind == Letters {
            if let Some(cell) = self.letters.get(row_letters(row)) {
                cell.add(text);
            }
            return true;
        }
        let Some(value) = row.parse(text) else { return false };
        number.store(value, Relaxed);
        true
    }
}

fn row_letters(row: &Row) -> usize {
    usize::try_from(row.default).unwrap_or(0)
}

impl Row {
    /// Our own option of this name.
    pub(crate) fn own(&self) -> Option<&'static options::Row> {
        options::find(self.name)
    }

    /// What it does. A row of our own table does what that says.
    pub(crate) fn effect(&self) -> Effect {
        match (self.effect, self.own()) {
            (Nothing(_), Some(_)) => Same,
            (effect, _) => effect,
        }
    }

    /// Whether `opt.<name>` can be read.
    pub(crate) fn readable(&self) -> bool {
        self.read == Yes || (self.read == NotBuilt && self.own().is_some())
    }

    /// The type of `opt.<name>`.
    pub(crate) fn ty(&self) -> Type {
        match self.kind {
            Bool => Type::Bool,
            Unsigned | Fraction => Type::Unsigned,
            Size => Type::Size,
            Ssize => Type::Ssize,
            U64 => Type::U64,
            I64 => Type::I64,
            Words(_) | Letters | Text => Type::Text,
        }
    }

    fn parse(&self, text: &[u8]) -> Option<i64> {
        match self.kind {
            Bool => [&b"false"[..], b"true"].iter().position(|word| *word == text),
            Words(words) => words.iter().position(|word| word.to_bytes() == text),
            Unsigned => return c_number(text).filter(|n| (0..=i64::from(u32::MAX)).contains(n)),
            Size | U64 => return c_number(text).filter(|n| *n >= 0),
            Ssize | I64 => return c_number(text).filter(|n| *n >= -1),
            Fraction => return fraction(text),
            Letters | Text => Some(0),
        }
        .and_then(|index| i64::try_from(index).ok())
    }
}

/// A number as `strtoumax` reads it: decimal, `0x` or `0`, with a sign.
fn c_number(text: &[u8]) -> Option<i64> {
    let (negative, digits) = match text.split_first()? {
        (b'-', rest) => (true, rest),
        (b'+', rest) => (false, rest),
        _ => (false, text),
    };
    let (radix, digits) = match digits {
        [b'0', b'x' | b'X', rest @ ..] => (16, rest),
        [b'0', rest @ ..] if !rest.is_empty() => (8, rest),
        _ => (10, digits),
    };
    if digits.is_empty() {
        return None;
    }
    let mut value = 0i64;
    for &digit in digits {
        let digit = char::from(digit).to_digit(radix)?;
        value = value.checked_mul(i64::from(radix))?.checked_add(i64::from(digit))?;
    }
    Some(if negative { -value } else { value })
}

/// `12.5` in units of 2^-16, or `-1`; as many digits after the point as fit are read.
pub(super) fn fraction(text: &[u8]) -> Option<i64> {
    if text == b"-1" {
        return Some(-1);
    }
    let point = text.iter().position(|&byte| byte == b'.').unwrap_or(text.len());
    let (whole, rest) = text.split_at_checked(point)?;
    let part = rest.get(1..).unwrap_or(&[]);
    if !text.iter().any(u8::is_ascii_digit) || !whole.iter().chain(part).all(u8::is_ascii_digit) {
        return None;
    }
    let digits = |text: &[u8]| {
        text.iter().try_fold(0i64, |sum, digit| {
            sum.checked_mul(10)?.checked_add(i64::from(digit - b'0')).filter(|sum| *sum < 1 << 40)
        })
    };
    let part = part.get(..9).unwrap_or(part);
    let scale = (0..part.len()).fold(1, |scale, _| scale * 10);
    let whole =
        digits(whole)?.checked_mul(1 << 16).filter(|fixed| *fixed <= i64::from(u32::MAX))?;
    Some(whole + digits(part)? * (1 << 16) / scale)
}

/// The index of the option of this name.
pub(crate) fn position(name: &[u8]) -> Option<usize> {
    ROWS.binary_search_by(|row| row.name.as_bytes().cmp(name)).ok()
}

/// Whether a jemalloc of some release may read this name.
pub(crate) fn is_name(name: &[u8]) -> bool {
    position(name).is_some() || FAMILIES.iter().any(|family| name.starts_with(family.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn row_of(name: &str) -> &'static Row {
        &ROWS[position(name.as_bytes()).unwrap()]
    }

    #[test]
    fn names_are_sorted_and_what_they_stand_for_exists() {
        assert!(ROWS.is_sorted_by(|a, b| a.name < b.name));
        let own: std::vec::Vec<_> =
            ROWS.iter().filter(|row| row.own().is_some()).map(|row| row.name).collect();
        for name in ["background_thread", "dirty_decay_ms", "muzzy_decay_ms", "narenas", "thp"] {
            assert!(own.contains(&name), "{name}");
        }
        for row in ROWS {
            let why = match row.effect {
                Same => continue,
                Mapped(what) | Nothing(what) => what,
            };
            assert!(why.ends_with('.') && !why.contains('|'), "{}", row.name);
        }
    }

    #[test]
    fn defaults_are_what_the_type_allows_and_agree_with_our_own() {
        let values = Values::new();
        values.keep_own(&Options::new());
        for (i, row) in ROWS.iter().enumerate() {
            let value = values.read(i);
            match row.kind {
                Words(words) => assert!(words.len() > usize::try_from(row.default).unwrap()),
                Bool => assert!(value <= 1, "{}", row.name),
                Unsigned | Fraction => assert!(u32::try_from(value).is_ok(), "{}", row.name),
                _ => {}
            }
            if let Some(own) = row.own() {
                assert_eq!(row.default, own.default, "{}", row.name);
            }
        }
    }

    #[test]
    fn values() {
        let cases = [
            ("abort", "true", Some(1)),
            ("abort", "1", None),
            ("retain", "false", Some(0)),
            ("dss", "secondary", Some(2)),
            ("dss", "", None),
            ("oversize_threshold", "0x800000", Some(8 << 20)),
            ("oversize_threshold", "010", Some(8)),
            ("oversize_threshold", "-1", None),
            ("oversize_threshold", "8M", None),
            ("mutex_max_spin", "-1", Some(-1)),
            ("mutex_max_spin", "-2", None),
            ("tcache_nslots_large", "4294967296", None),
            ("hpa_dirty_mult", "0.25", Some(1 << 14)),
            ("hpa_dirty_mult", "-1", Some(-1)),
            ("hpa_dirty_mult", "1.", Some(1 << 16)),
            ("hpa_dirty_mult", ".", None),
            ("hpa_dirty_mult", "1.2.3", None),
            ("hpa_dirty_mult", "99999999999999999999", None),
            ("bin_shards", "1-160:16|161-200:4", Some(0)),
        ];
        for (name, text, value) in cases {
            assert_eq!(row_of(name).parse(text.as_bytes()), value, "{name}:{text}");
        }
    }

    #[test]
    fn letters_are_kept_once_each() {
        let values = Values::new();
        let at = position(b"stats_print_opts").unwrap();
        assert!(values.load(at, b"JJ?a"));
        assert!(values.load(at, b"axJ"));
        // SAFETY: a C string of the table's own.
        let text = unsafe { CStr::from_ptr(values.stats_print_opts().cast()) };
        assert_eq!(text, c"Jax");
        assert!(values.load(at, b"Jgmdablxeh"));
        // SAFETY: as above.
        assert_eq!(unsafe { CStr::from_ptr(values.stats_print_opts().cast()) }.count_bytes(), 10);
    }

    proptest! {
        #[test]
        fn any_text_is_taken_or_refused(index in 0..ROWS.len(), text: std::vec::Vec<u8>, like in "-?(0x)?[0-9.]{0,24}") {
            let values = Values::new();
            for text in [&text[..], like.as_bytes()] {
                let before = values.read(index);
                if !values.load(index, text) {
                    prop_assert_eq!(values.read(index), before);
                }
            }
        }

        #[test]
        fn c_numbers_are_what_std_reads(number: i32) {
            prop_assert_eq!(c_number(std::format!("{number}").as_bytes()), Some(i64::from(number)));
            let hex = std::format!("{:#x}", number.unsigned_abs());
            prop_assert_eq!(c_number(hex.as_bytes()), Some(i64::from(number.unsigned_abs())));
            let octal = std::format!("0{:o}", number.unsigned_abs());
            prop_assert_eq!(c_number(octal.as_bytes()), Some(i64::from(number.unsigned_abs())));
        }
    }
}
