//! The options' text form, `name:value,name:value`, and where it comes from: `MALLOC_CONF`, then
//! `THERMALLOC_CONF`, which wins.
//!
//! Invariants: any bytes are legal input; `MALLOC_CONF` belongs to other allocators too, so
//! nothing in it is ever complained of; a process writes at most one line. Runs before libc does.

use super::options::{Kind, OPTIONS, Options, ROWS, Row, find_bytes};
use super::text::Line;
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Room for the longest complaint with both excerpts at their longest.
const MESSAGE_BYTES: usize = 256;
const EXCERPT_BYTES: usize = 40;

/// The options of jemalloc 5.x and of its successor. People carry them over: each is accepted,
/// and those that are rows of our own table have their effect.
pub(crate) static JEMALLOC_NAMES: &[&str] = &[
    "abort",
    "abort_conf",
    "background_thread",
    "bin_shards",
    "cache_oblivious",
    "calloc_madvise_threshold",
    "confirm_conf",
    "debug_double_free_max_scan",
    "dirty_decay_ms",
    "disable_large_size_classes",
    "dss",
    "experimental_hpa_max_purge_nhp",
    "experimental_infallible_new",
    "experimental_tcache_gc",
    "hpa",
    "hpa_dirty_mult",
    "hpa_hugification_threshold",
    "hpa_hugification_threshold_ratio",
    "hpa_hugify_delay_ms",
    "hpa_hugify_style",
    "hpa_hugify_sync",
    "hpa_min_purge_delay_ms",
    "hpa_min_purge_interval_ms",
    "hpa_purge_threshold",
    "hpa_purge_threshold_ratio",
    "hpa_sec_batch_fill_extra",
    "hpa_sec_bytes_after_flush",
    "hpa_sec_max_alloc",
    "hpa_sec_max_bytes",
    "hpa_sec_nshards",
    "hpa_slab_max_alloc",
    "hpa_strict_min_purge_interval",
    "huge_arena_pac_thp",
    "junk",
    "lg_extent_max_active_fit",
    "lg_prof_interval",
    "lg_prof_sample",
    "lg_san_uaf_align",
    "lg_tcache_flush_large_div",
    "lg_tcache_flush_small_div",
    "lg_tcache_max",
    "lg_tcache_nslots_mul",
    "log",
    "max_background_threads",
    "metadata_thp",
    "mutex_max_spin",
    "muzzy_decay_ms",
    "narenas",
    "narenas_ratio",
    "oversize_threshold",
    "percpu_arena",
    "process_madvise_max_batch",
    "prof",
    "prof_accum",
    "prof_active",
    "prof_bt_max",
    "prof_final",
    "prof_gdump",
    "prof_leak",
    "prof_leak_error",
    "prof_log",
    "prof_pid_namespace",
    "prof_prefix",
    "prof_recent_alloc_max",
    "prof_stats",
    "prof_sys_thread_name",
    "prof_thread_active_init",
    "prof_time_resolution",
    "prof_unbias",
    "retain",
    "san_guard_large",
    "san_guard_small",
    "slab_sizes",
    "stats_interval",
    "stats_interval_opts",
    "stats_print",
    "stats_print_opts",
    "tcache",
    "tcache_gc_delay_bytes",
    "tcache_gc_incr_bytes",
    "tcache_gc_interval_ms",
    "tcache_max",
    "tcache_ncached_max",
    "tcache_nslots_large",
    "tcache_nslots_small_max",
    "tcache_nslots_small_min",
    "thp",
    "trust_madvise",
    "utrace",
    "xmalloc",
    "zero",
    "zero_realloc",
];

/// Families that grow with each release of jemalloc.
pub(crate) static JEMALLOC_FAMILIES: &[&str] = &["experimental_", "hpa_", "prof_", "san_"];

/// Something in the text that has no effect and that its writer should know of.
#[derive(Clone, Copy)]
enum Fault<'a> {
    Unknown(&'a [u8]),
    NoValue(&'a [u8]),
    Invalid(&'static Row, &'a [u8]),
}

/// Reads the options from the environment. To be called once, before the first option is read.
///
/// `env` yields the value of a variable, without the final NUL; `secure` says that the process
/// has other rights than its caller (`AT_SECURE`), whose environment then has no say; `report`
/// writes one line to standard error and is called at most once in a process.
pub(crate) fn load(
    env: impl Fn(&[u8]) -> Option<&'static [u8]>,
    secure: bool,
    mut report: impl FnMut(&[u8]),
) {
    static REPORTED: AtomicBool = AtomicBool::new(false);
    let Some(message) = load_in(&OPTIONS, env, secure) else {
        return;
    };
    if !REPORTED.swap(true, Relaxed) {
        report(message.as_bytes());
    }
}

fn load_in(
    options: &Options,
    env: impl Fn(&[u8]) -> Option<&'static [u8]>,
    secure: bool,
) -> Option<Line<MESSAGE_BYTES>> {
    if secure {
        return None;
    }
    if let Some(text) = env(b"MALLOC_CONF") {
        apply(options, text, Source::Shared, |_| {});
    }
    let (mut first, mut count) = (None, 0);
    if let Some(text) = env(b"THERMALLOC_CONF") {
        apply(options, text, Source::Own, |fault| {
            first.get_or_insert(fault);
            count += 1;
        });
    }
    first.map(|fault| message(options, fault, count))
}

/// Whose variable a text is from.
#[derive(Clone, Copy, PartialEq)]
enum Source {
    Own,
    /// Other allocators read it too, and may mean another thing by a name of ours: so it names no file.
    Shared,
}

fn apply<'a>(options: &Options, text: &'a [u8], source: Source, mut fault: impl FnMut(Fault<'a>)) {
    for item in text.split(|&byte| byte == b',').map(<[u8]>::trim_ascii) {
        let separator = item.iter().position(|&byte| byte == b':' || byte == b'=');
        let (name, value) = match separator.and_then(|at| item.split_at_checked(at)) {
            Some((name, rest)) => (name.trim_ascii_end(), rest.get(1..).map(<[u8]>::trim_ascii)),
            None => (item, None),
        };
        match (find_bytes(name), value) {
            (Some(row), _) if row.kind == Kind::Text && source == Source::Shared => {}
            (Some(row), Some(value)) if row.load_in(options, value) => {}
            (Some(row), Some(value)) => fault(Fault::Invalid(row, value)),
            _ if item.is_empty() || is_jemalloc_name(name) => {}
            (_, None) => fault(Fault::NoValue(name)),
            (None, Some(_)) => fault(Fault::Unknown(name)),
        }
    }
}

fn is_jemalloc_name(name: &[u8]) -> bool {
    JEMALLOC_NAMES.iter().any(|known| known.as_bytes() == name)
        || JEMALLOC_FAMILIES.iter().any(|family| name.starts_with(family.as_bytes()))
}

fn message(options: &Options, fault: Fault<'_>, count: u64) -> Line<MESSAGE_BYTES> {
    let mut line = Line::new();
    line.str("thermalloc: option ");
    match fault {
        Fault::Unknown(name) => {
            line.excerpt(name, EXCERPT_BYTES).str(": unknown: ");
            match nearest(name) {
                Some(known) => line.str("did you mean ").str(known).str("?"),
                None => line.str("ignored"),
            };
        }
        Fault::NoValue(name) => {
            line.excerpt(name, EXCERPT_BYTES).str(": has no value: write name:value");
        }
        Fault::Invalid(row, value) => {
            line.str(row.name).str(": \"").excerpt(value, EXCERPT_BYTES).str("\" is not ");
            expected(row, &mut line);
            line.str(": using ");
            row.show_short_in(options, EXCERPT_BYTES, &mut line);
        }
    }
    if count > 1 {
        line.str(" (and ").unsigned(count - 1).str(" more)");
    }
    line.end();
    line
}

fn expected(row: &Row, line: &mut Line<MESSAGE_BYTES>) {
    match row.kind {
        Kind::Bool | Kind::Thp | Kind::Hugetlb => {
            let words = row.kind.words();
            for (i, word) in words.iter().enumerate() {
                let before = if i == 0 {
                    ""
                } else if i + 1 == words.len() {
                    " or "
                } else {
                    ", "
                };
                line.str(before).str(word);
            }
            return;
        }
        Kind::Text => {
            line.str("a text of up to ").signed(row.max).str(" plain characters");
            return;
        }
        Kind::Bytes => line.str("a size from "),
        Kind::Ms | Kind::Count => line.str("a number from "),
    };
    row.show(row.min, line);
    line.str(" to ");
    row.show(row.max, line);
}

/// The option that a mistyped name most likely meant.
fn nearest(name: &[u8]) -> Option<&'static str> {
    let worst = (name.len() / 3).max(2);
    ROWS.iter()
        .filter_map(|row| Some((distance(name, row.name.as_bytes())?, row.name)))
        .filter(|&(distance, _)| distance <= worst)
        .min_by_key(|&(distance, _)| distance)
        .map(|(_, known)| known)
}

/// Levenshtein's distance of two short names; nothing for a long one.
fn distance(a: &[u8], b: &[u8]) -> Option<usize> {
    let mut costs = [0usize; EXCERPT_BYTES + 1];
    let costs = costs.get_mut(..=b.len())?;
    if a.len() > EXCERPT_BYTES {
        return None;
    }
    for (cost, start) in costs.iter_mut().zip(0..) {
        *cost = start;
    }
    for (i, from) in a.iter().enumerate() {
        let mut diagonal = i;
        let mut left = i + 1;
        let (head, rest) = costs.split_first_mut()?;
        *head = left;
        for (cost, to) in rest.iter_mut().zip(b) {
            let replaced = diagonal + usize::from(from != to);
            diagonal = *cost;
            *cost = replaced.min(diagonal + 1).min(left + 1);
            left = *cost;
        }
    }
    costs.last().copied()
}

#[cfg(test)]
mod tests {
    use super::super::options::find;
    use super::*;
    use proptest::prelude::*;
    use std::string::{String, ToString};
    use std::vec::Vec;

    fn load_texts(malloc: &[u8], own: &[u8], secure: bool) -> (Options, Option<String>) {
        let leak = |text: &[u8]| -> &'static [u8] { Vec::leak(text.to_vec()) };
        let (malloc, own) = (leak(malloc), leak(own));
        let env = |name: &[u8]| match name {
            b"MALLOC_CONF" => Some(malloc),
            b"THERMALLOC_CONF" => Some(own),
            _ => None,
        };
        let options = Options::new();
        let line = load_in(&options, env, secure);
        (options, line.map(|line| String::from_utf8(line.as_bytes().to_vec()).unwrap()))
    }

    fn value(options: &Options, name: &str) -> i64 {
        find(name).unwrap().get_in(options)
    }

    fn complaint(own: &str) -> Option<String> {
        load_texts(b"", own.as_bytes(), false).1
    }

    #[test]
    fn both_variables_are_read_and_ours_wins() {
        let (options, line) = load_texts(
            b"narenas:8,dirty_decay_ms:10000, muzzy_decay_ms = 10000,background_thread:false",
            b"dirty_decay_ms:3000,hot_window_ms:1000,hot_window_ms:2000,",
            false,
        );
        assert_eq!(line, None);
        assert_eq!(value(&options, "narenas"), 8);
        assert_eq!(value(&options, "dirty_decay_ms"), 3000);
        assert_eq!(value(&options, "hot_window_ms"), 2000);
        assert_eq!(value(&options, "background_thread"), 0);
    }

    #[test]
    fn a_file_is_named_by_our_own_variable_alone() {
        let path = |options: &Options| {
            let mut line = Line::<300>::new();
            find("trace_file").unwrap().show_in(options, &mut line);
            String::from_utf8(line.as_bytes().to_vec()).unwrap()
        };
        let (options, line) = load_texts(b"trace_file:/a,trace_file", b"", false);
        assert_eq!((path(&options), line), ("".into(), None));
        let (options, line) = load_texts(b"", b"trace_file: /a:b=%p ,rseq:false", false);
        assert_eq!((path(&options), line), ("/a:b=%p".into(), None));
        assert_eq!(value(&options, "rseq"), 0);
        let (options, _) = load_texts(b"", b"trace_file:/a", true);
        assert_eq!(path(&options), "");
        let long = "trace_file:/".to_string() + &"x".repeat(255);
        let (options, line) = load_texts(b"", long.as_bytes(), false);
        assert_eq!(path(&options), "");
        assert!(
            line.unwrap()
                .ends_with("...\" is not a text of up to 255 plain characters: using none\n")
        );
    }

    #[test]
    fn a_privileged_process_reads_nothing() {
        let (options, line) = load_texts(b"narenas:8", b"narenas:9,rseq:maybe", true);
        assert_eq!(line, None);
        assert_eq!(value(&options, "narenas"), 0);
    }

    #[test]
    fn complaints() {
        let cases = [
            (
                "hot_window_ms:abc",
                "option hot_window_ms: \"abc\" is not a number from 0 to 60000: using 5000",
            ),
            (
                "trace_file:/a\"b",
                "option trace_file: \"/a\"b\" is not a text of up to 255 plain characters: using none",
            ),
            (
                "trace_file:/a,trace_file:/<",
                "option trace_file: \"/<\" is not a text of up to 255 plain characters: using /a",
            ),
            ("trace_file", "option trace_file: has no value: write name:value"),
            ("rseq=1", "option rseq: \"1\" is not false or true: using true"),
            (
                "cpu_cache_bytes:2G",
                "option cpu_cache_bytes: \"2G\" is not a size from 0 to 1G: using 8M",
            ),
            ("hot_windw_ms:1", "option hot_windw_ms: unknown: did you mean hot_window_ms?"),
            ("colour:red", "option colour: unknown: ignored"),
            ("=1;;=", "option : unknown: ignored"),
            ("rseq", "option rseq: has no value: write name:value"),
            ("a\nb:\x1b[1m", "option a?b: unknown: ignored"),
            (
                "narenas:-5,colour:red,rseq:,narenas:7",
                "option narenas: \"-5\" is not a number from 0 to 4095: using 7 (and 2 more)",
            ),
        ];
        for (text, expected) in cases {
            let line = complaint(text).unwrap();
            assert_eq!(line, String::from("thermalloc: ") + expected + "\n", "{text}");
        }
    }

    #[test]
    fn silent() {
        for text in [
            "",
            ",",
            " , ,",
            "metadata_thp:maybe,prof_stats:99,prof_new_thing:1,junk,tcache_max:-4",
            "narenas:default",
        ] {
            assert_eq!(complaint(text), None, "{text}");
        }
        for name in JEMALLOC_NAMES.iter().filter(|name| find(name).is_none()) {
            assert_eq!(complaint(&(String::from(*name) + ":\u{1}odd")), None, "{name}");
        }
        for text in [
            "dirty_decay_ms:99999999999999999999999,narenas:-5",
            "-1",
            "1e99",
            "=1;;=",
            "colour:red",
            "rseq:x",
        ] {
            let (options, line) = load_texts(text.as_bytes(), b"", false);
            assert_eq!(line, None, "{text}");
            assert!(ROWS.iter().all(|row| row.get_in(&options) == row.default), "{text}");
        }
    }

    #[test]
    fn jemalloc_names_are_sorted_and_ours_among_them_are_rows() {
        assert!(JEMALLOC_NAMES.is_sorted());
        let ours = JEMALLOC_NAMES.iter().filter(|name| find(name).is_some());
        assert!(ours.eq(&[
            "background_thread",
            "dirty_decay_ms",
            "lg_prof_interval",
            "lg_prof_sample",
            "muzzy_decay_ms",
            "narenas",
            "prof",
            "prof_active",
            "prof_final",
            "prof_gdump",
            "prof_leak",
            "prof_prefix",
            "thp"
        ]));
    }

    #[test]
    fn one_line_a_process() {
        let mut lines = 0;
        for _ in 0..3 {
            let env = |name: &[u8]| (name == b"THERMALLOC_CONF").then_some(&b"colour:red"[..]);
            load(env, false, |_| lines += 1);
        }
        assert_eq!(lines, 1);
    }

    fn items() -> impl Strategy<Value = Vec<u8>> {
        let names: Vec<&str> = ROWS.iter().map(|row| row.name).chain(["thp", "x", ""]).collect();
        let item = (prop::sample::select(names), "[:= ]{0,2}", "-?[0-9]{0,20}[KMG]?|true|.{0,60}")
            .prop_map(|(name, separator, value)| String::from(name) + &separator + &value);
        prop::collection::vec(item, 0..6).prop_map(|items| items.join(",").into_bytes())
    }

    fn check(own: &[u8], malloc: &[u8]) -> Result<(), TestCaseError> {
        let (options, line) = load_texts(malloc, own, false);
        for row in ROWS {
            prop_assert!((row.min..=row.max).contains(&row.get_in(&options)), "{}", row.name);
        }
        if let Some(line) = line {
            prop_assert!(line.len() <= MESSAGE_BYTES);
            prop_assert!(line.starts_with("thermalloc: option "));
            prop_assert_eq!(line.find('\n'), Some(line.len() - 1));
            prop_assert!(line.trim_end().bytes().all(|byte| (b' '..=b'~').contains(&byte)));
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn any_bytes_are_legal(own: Vec<u8>, malloc: Vec<u8>) {
            check(&own, &malloc)?;
        }

        #[test]
        fn anything_like_options_is_legal(own in items(), malloc in items()) {
            check(&own, &malloc)?;
        }

        #[test]
        fn the_last_good_value_wins(values in prop::collection::vec(-100i64..=100_000, 1..8)) {
            let text: Vec<String> =
                values.iter().map(|v| String::from("hot_window_ms:") + &v.to_string()).collect();
            let (options, line) = load_texts(b"", text.join(",").as_bytes(), false);
            let good = |v: &&i64| (0..=60_000).contains(*v);
            prop_assert_eq!(value(&options, "hot_window_ms"), *values.iter().rev().find(good).unwrap_or(&5000));
            prop_assert_eq!(line.is_some(), !values.iter().all(|v| good(&v)));
        }

        #[test]
        fn distance_is_a_metric(a in "[ab]{0,8}", b in "[ab]{0,8}") {
            let (a, b) = (a.as_bytes(), b.as_bytes());
            let d = distance(a, b).unwrap();
            prop_assert_eq!(distance(b, a), Some(d));
            prop_assert_eq!(d == 0, a == b);
            prop_assert!(d >= a.len().abs_diff(b.len()) && d <= a.len().max(b.len()));
        }
    }
}
