//! The options' text form, `name:value,name:value`, and where it comes from, the last of a name winning:
//! variables of glibc and tcmalloc, then jemalloc's places in its order, then `THERMALLOC_CONF`.
//!
//! Invariants: any bytes are legal input; what is written for jemalloc is also read by others, so
//! nothing in it is complained of unless it asks for that (`abort_conf`, `confirm_conf`); else a process
//! writes at most one line. Runs before libc does.

use super::jemalloc::{self, Effect, ZeroRealloc};
use super::options::{Kind, OPTIONS, Options, ROWS, Row, find, find_bytes};
use super::text::Line;
use core::ffi::CStr;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// Room for the longest complaint with both excerpts at their longest, and for what is confirmed.
const MESSAGE_BYTES: usize = 320;
const EXCERPT_BYTES: usize = 40;
/// Room for what a symbolic link says.
const LINK_BYTES: usize = 1024;

/// What was compiled in: the variable `THERMALLOC_MALLOC_CONF` of the build.
pub(super) const BUILT_IN: &CStr = {
    const TEXT: &str = match option_env!("THERMALLOC_MALLOC_CONF") {
        Some(text) => text,
        None => "",
    };
    const BYTES: [u8; TEXT.len() + 1] = {
        let mut bytes = [0; TEXT.len() + 1];
        let mut i = 0;
        while i < TEXT.len() {
            bytes[i] = TEXT.as_bytes()[i];
            i += 1;
        }
        bytes
    };
    match CStr::from_bytes_with_nul(&BYTES) {
        Ok(text) => text,
        Err(_) => panic!("THERMALLOC_MALLOC_CONF has a NUL"),
    }
};

/// jemalloc reads each of these under the prefix that it was built with.
const LINKS: [&CStr; 3] =
    [c"/etc/malloc.conf", c"/etc/je_malloc.conf", c"/etc/jemalloc_malloc.conf"];
const VARIABLES: [&str; 4] =
    ["MALLOC_CONF", "JE_MALLOC_CONF", "JEMALLOC_MALLOC_CONF", "_RJEM_MALLOC_CONF"];
const OWN_VARIABLE: &str = "THERMALLOC_CONF";
const CONFIRM: &[u8] = b"confirm_conf";

/// Where the texts are.
pub(crate) trait Outside {
    /// The value of an environment variable, without the final NUL.
    fn env(&self, name: &[u8]) -> Option<&'static [u8]>;
    /// The process has other rights than its caller (`AT_SECURE`), whose environment has no say.
    fn secure(&self) -> bool;
    /// The texts that the program defines as `malloc_conf`, under any prefix.
    fn symbols(&self) -> [Option<&'static [u8]>; 4];
    /// The same of `malloc_conf_2_conf_harder`, which is to win over the environment.
    fn harder(&self) -> Option<&'static [u8]>;
    /// Reads a symbolic link; how many bytes.
    fn link(&self, path: &CStr, buffer: &mut [u8]) -> Option<usize>;
    /// How many CPUs there may be.
    fn cpus(&self) -> usize;
}

/// Something in a text that has no effect and that its writer should know of.
#[derive(Clone, Copy)]
enum Fault<'a> {
    Unknown(&'a [u8]),
    NoValue(&'a [u8]),
    Invalid(&'static Row, &'a [u8]),
    /// A value that jemalloc would not take either.
    Refused(&'static str, &'a [u8]),
}

/// What came of reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Outcome {
    Read,
    /// `abort_conf` is set and something is wrong.
    Abort,
}

/// Reads the options. To be called once, before the first option is read. `report` writes a line to
/// standard error; it is called by the first call in a process only.
pub(crate) fn load(outside: &impl Outside, report: impl FnMut(&[u8])) -> Outcome {
    static REPORTED: AtomicBool = AtomicBool::new(false);
    load_once(&REPORTED, outside, report)
}

/// `reported`: whether it was called before.
fn load_once(
    reported: &AtomicBool,
    outside: &impl Outside,
    mut report: impl FnMut(&[u8]),
) -> Outcome {
    let silent = reported.swap(true, Relaxed);
    load_in(&OPTIONS, outside, |line| {
        if !silent {
            report(line);
        }
    })
}

/// Reads these two texts alone.
pub(super) fn try_texts(
    options: &Options,
    shared: &[u8],
    own: &[u8],
    report: &mut dyn FnMut(&[u8]),
) {
    let from = |name, own| From { what: "environment variable ", name, own };
    let confirm = last_truth(own, CONFIRM).or(last_truth(shared, CONFIRM)).unwrap_or(false);
    for (from, text) in [(from("MALLOC_CONF", false), shared), (from(OWN_VARIABLE, true), own)] {
        if read_text(options, from, text, confirm, report) == Outcome::Abort {
            break;
        }
    }
    options.jemalloc.keep_own(options);
}

pub(super) fn load_in(
    options: &Options,
    outside: &impl Outside,
    mut report: impl FnMut(&[u8]),
) -> Outcome {
    let mut confirm = false;
    let _ = each_text(outside, &mut |_, text| {
        if let Some(asked) = last_truth(text, CONFIRM) {
            confirm = asked;
        }
        Outcome::Read
    });
    if !outside.secure() {
        foreign(options, outside, confirm, &mut report);
    }
    let outcome =
        each_text(outside, &mut |from, text| read_text(options, from, text, confirm, &mut report));
    options.jemalloc.keep_own(options);
    outcome
}

/// Reads one text; what is wrong in it is said where it is ours alone, or somebody asked.
fn read_text(
    options: &Options,
    from: From,
    text: &[u8],
    confirm: bool,
    report: &mut dyn FnMut(&[u8]),
) -> Outcome {
    if confirm {
        let mut line = Line::<MESSAGE_BYTES>::new();
        line.str("thermalloc: ").str(from.what).str(from.name).str(": \"");
        line.excerpt(text, MESSAGE_BYTES / 2).str("\"").end();
        report(line.as_bytes());
    }
    let (mut first, mut count) = (None::<Fault<'_>>, 0);
    apply(options, text, from.own, |event| match event {
        Event::Fault(fault) => {
            first.get_or_insert(fault);
            count += 1;
        }
        Event::Set(name, value) if confirm => report(set_line(name, value).as_bytes()),
        Event::Set(..) => {}
    });
    let strict = options.jemalloc.is_set("abort_conf");
    if let Some(fault) = first.filter(|_| strict || confirm || from.own) {
        report(message(options, fault, count).as_bytes());
    }
    if strict && count > 0 { Outcome::Abort } else { Outcome::Read }
}

/// Which text it is.
#[derive(Clone, Copy)]
struct From {
    what: &'static str,
    name: &'static str,
    /// Ours alone: what is wrong in it is said, and it may name a file.
    own: bool,
}

/// Visits all texts in their order, until one ends it.
fn each_text(outside: &impl Outside, visit: &mut dyn FnMut(From, &[u8]) -> Outcome) -> Outcome {
    let shared = |what, name| From { what, name, own: false };
    let mut visit = |from, text: Option<&[u8]>| match text {
        Some(text) if !text.is_empty() => visit(from, text),
        _ => Outcome::Read,
    };
    if visit(shared("compiled in", ""), Some(BUILT_IN.to_bytes())) == Outcome::Abort {
        return Outcome::Abort;
    }
    for text in outside.symbols() {
        if visit(shared("symbol ", "malloc_conf"), text) == Outcome::Abort {
            return Outcome::Abort;
        }
    }
    for path in LINKS {
        let mut buffer = [0; LINK_BYTES];
        let text = outside.link(path, &mut buffer).and_then(|len| buffer.get(..len));
        let name = path.to_str().unwrap_or("");
        if visit(shared("name of the file behind ", name), text) == Outcome::Abort {
            return Outcome::Abort;
        }
    }
    let variable = |name: &str| outside.env(name.as_bytes()).filter(|_| !outside.secure());
    for name in VARIABLES {
        if visit(shared("environment variable ", name), variable(name)) == Outcome::Abort {
            return Outcome::Abort;
        }
    }
    if visit(shared("symbol ", "malloc_conf_2_conf_harder"), outside.harder()) == Outcome::Abort {
        return Outcome::Abort;
    }
    let own = From { what: "environment variable ", name: OWN_VARIABLE, own: true };
    visit(own, variable(OWN_VARIABLE))
}

static ZERO_REALLOCS: AtomicU64 = AtomicU64::new(0);

/// Counts a `realloc` to 0 bytes, and says what it is to do.
pub(crate) fn zero_realloc() -> ZeroRealloc {
    ZERO_REALLOCS.fetch_add(1, Relaxed);
    OPTIONS.jemalloc.zero_realloc()
}

/// How many there were.
pub(super) fn zero_reallocs() -> u64 {
    ZERO_REALLOCS.load(Relaxed)
}

/// One `name:value` or `name=value`.
fn items(text: &[u8]) -> impl Iterator<Item = (&[u8], Option<&[u8]>)> {
    text.split(|&byte| byte == b',').map(<[u8]>::trim_ascii).map(|item| {
        let separator = item.iter().position(|&byte| byte == b':' || byte == b'=');
        match separator.and_then(|at| item.split_at_checked(at)) {
            Some((name, rest)) => (name.trim_ascii_end(), rest.get(1..).map(<[u8]>::trim_ascii)),
            None => (item, None),
        }
    })
}

fn last_truth(text: &[u8], wanted: &[u8]) -> Option<bool> {
    let truth = |value: Option<&[u8]>| match value {
        Some(b"true") => Some(true),
        Some(b"false") => Some(false),
        _ => None,
    };
    items(text).filter(|(name, _)| *name == wanted).filter_map(|(_, value)| truth(value)).last()
}

enum Event<'a> {
    Fault(Fault<'a>),
    Set(&'static str, &'a [u8]),
}

fn apply<'a>(options: &Options, text: &'a [u8], own: bool, mut tell: impl FnMut(Event<'a>)) {
    for (name, value) in items(text) {
        let row = find_bytes(name);
        let jemalloc = jemalloc::position(name);
        tell(match (row, jemalloc, value) {
            // Other allocators read it too, and may mean another thing by a name of ours.
            (Some(row), None, _) if row.kind == Kind::Text && !own => continue,
            (Some(row), _, Some(value)) if row.load_in(options, value) => {
                Event::Set(row.name, value)
            }
            (Some(row), _, Some(value)) => Event::Fault(Fault::Invalid(row, value)),
            (None, Some(at), Some(value)) => load_jemalloc(options, at, value),
            (None, None, _) if name.is_empty() && value.is_none() => continue,
            (_, _, None) => Event::Fault(Fault::NoValue(name)),
            (None, None, Some(_)) if jemalloc::is_name(name) => continue,
            (None, None, Some(_)) => Event::Fault(Fault::Unknown(name)),
        });
    }
}

fn load_jemalloc<'a>(options: &Options, at: usize, value: &'a [u8]) -> Event<'a> {
    let name = jemalloc::ROWS.get(at).map_or("", |row| row.name);
    if !options.jemalloc.load(at, value) {
        return Event::Fault(Fault::Refused(name, value));
    }
    if name == "tcache" {
        set_caches(options, options.jemalloc.is_set("tcache"));
    }
    Event::Set(name, value)
}

/// jemalloc's caches on or off.
fn set_caches(options: &Options, wanted: bool) {
    let Some(row) = find("cpu_cache_bytes") else { return };
    if !wanted {
        row.load_in(options, b"0");
    } else if row.get_in(options) == 0 {
        row.load_in(options, b"default");
    }
}

fn set_line(name: &str, value: &[u8]) -> Line<MESSAGE_BYTES> {
    let mut line = Line::new();
    line.str("thermalloc: -- ").str(name).str(":").excerpt(value, EXCERPT_BYTES);
    let row = jemalloc::position(name.as_bytes()).and_then(|at| jemalloc::ROWS.get(at));
    match row.map(jemalloc::Row::effect) {
        Some(Effect::Nothing(why)) => line.str(": no effect: ").str(why),
        _ => line.str(": set"),
    };
    line.end();
    line
}

/// What a variable of another allocator means here: an option and its value.
type Meaning = fn(&Options, &[u8], usize) -> Option<(&'static str, i64)>;

/// Variables of glibc and of tcmalloc (gperftools).
pub(super) static FOREIGN: &[(&str, &str, Meaning)] = &[
    ("MALLOC_ARENA_MAX", "`narenas`.", |_, text, _| Some(("narenas", plain(text)?.clamp(1, 4095)))),
    (
        "MALLOC_TRIM_THRESHOLD_",
        "-1 (never) is `dirty_decay_ms:-1`; other values have no effect, as pages go by age.",
        |_, text, _| (plain(text)? == -1).then_some(("dirty_decay_ms", -1)),
    ),
    ("MALLOC_MMAP_THRESHOLD_", "None: no block is unmapped because it is large.", |_, _, _| None),
    (
        "TCMALLOC_MAX_TOTAL_THREAD_CACHE_BYTES",
        "`cpu_cache_bytes`, shared among the CPUs.",
        |_, text, cpus| {
            let each = plain(text)?.max(0) / i64::try_from(cpus.max(1)).ok()?;
            let most = find("cpu_cache_bytes")?.max;
            Some(("cpu_cache_bytes", each.min(most)))
        },
    ),
    (
        "TCMALLOC_RELEASE_RATE",
        "`dirty_decay_ms`: the default divided by it; 0 is -1.",
        |_, text, _| {
            let rate = jemalloc::fraction(text).filter(|rate| *rate >= 0)?;
            let row = find("dirty_decay_ms")?;
            let decay = row.default.checked_mul(1 << 16)?.checked_div(rate);
            Some((row.name, decay.map_or(-1, |ms| ms.max(1))))
        },
    ),
];

fn plain(text: &[u8]) -> Option<i64> {
    super::options::number(text.trim_ascii())
}

fn foreign(
    options: &Options,
    outside: &impl Outside,
    confirm: bool,
    report: &mut impl FnMut(&[u8]),
) {
    for (name, _, meaning) in FOREIGN {
        let Some(text) = outside.env(name.as_bytes()) else { continue };
        let meant = meaning(options, text, outside.cpus());
        let mut line = Line::<MESSAGE_BYTES>::new();
        line.str("thermalloc: environment variable ").str(name).str(": \"");
        line.excerpt(text, EXCERPT_BYTES).str("\": ");
        match meant {
            Some((option, value)) => {
                let mut shown = Line::<24>::new();
                shown.signed(value);
                let done = find(option).is_some_and(|row| row.load_in(options, shown.as_bytes()));
                line.str(option).str(":").signed(value);
                line.str(if done { ": set" } else { ": not allowed" });
            }
            None => drop(line.str("no effect")),
        }
        if confirm {
            report(line.end().as_bytes());
        }
    }
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
        Fault::Refused(name, value) => {
            line.str(name).str(": \"").excerpt(value, EXCERPT_BYTES);
            line.str("\" is not a value that jemalloc takes: ignored");
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

    /// A process to read options in.
    #[derive(Default)]
    struct Fake {
        variables: Vec<(&'static str, &'static [u8])>,
        secure: bool,
        symbols: [Option<&'static [u8]>; 4],
        harder: Option<&'static [u8]>,
        link: Option<&'static [u8]>,
    }

    impl Outside for Fake {
        fn env(&self, name: &[u8]) -> Option<&'static [u8]> {
            self.variables.iter().find(|(known, _)| known.as_bytes() == name).map(|pair| pair.1)
        }
        fn secure(&self) -> bool {
            self.secure
        }
        fn symbols(&self) -> [Option<&'static [u8]>; 4] {
            self.symbols
        }
        fn harder(&self) -> Option<&'static [u8]> {
            self.harder
        }
        fn link(&self, path: &CStr, buffer: &mut [u8]) -> Option<usize> {
            let text = self.link.filter(|_| path == c"/etc/malloc.conf")?;
            buffer[..text.len()].copy_from_slice(text);
            Some(text.len())
        }
        fn cpus(&self) -> usize {
            4
        }
    }

    fn load_from(fake: &Fake) -> (Options, Vec<String>, Outcome) {
        let options = Options::new();
        let mut lines = Vec::new();
        let outcome = load_in(&options, fake, |line| {
            lines.push(String::from_utf8(line.to_vec()).unwrap());
        });
        (options, lines, outcome)
    }

    fn load_texts(malloc: &[u8], own: &[u8], secure: bool) -> (Options, Option<String>) {
        let leak = |text: &[u8]| -> &'static [u8] { Vec::leak(text.to_vec()) };
        let variables = std::vec![("MALLOC_CONF", leak(malloc)), ("THERMALLOC_CONF", leak(own))];
        let (options, lines, _) = load_from(&Fake { variables, secure, ..Fake::default() });
        assert!(lines.len() <= 1, "{lines:?}");
        (options, lines.into_iter().next())
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
            ("junk", "option junk: has no value: write name:value"),
            (
                "metadata_thp:maybe",
                "option metadata_thp: \"maybe\" is not a value that jemalloc takes: ignored",
            ),
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
            "metadata_thp:auto,prof_stats:true,prof_new_thing:1,tcache_max:4096,retain:false",
            "narenas:default",
        ] {
            assert_eq!(complaint(text), None, "{text}");
        }
        for name in jemalloc::ROWS.iter().map(|row| row.name) {
            let text = String::from(name) + ":\u{1}odd";
            assert_eq!(load_texts(text.as_bytes(), b"", false).1, None, "{name}");
        }
        for text in [
            "junk,retain:maybe,tcache",
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
    fn jemallocs_places_in_its_order() {
        let all = || Fake {
            variables: std::vec![
                ("MALLOC_CONF", &b"narenas:4"[..]),
                ("JE_MALLOC_CONF", b"narenas:5"),
                ("THERMALLOC_CONF", b"narenas:7"),
            ],
            symbols: [Some(b"narenas:1,muzzy_decay_ms:11"), Some(b"narenas:2"), None, None],
            link: Some(b"narenas:3,retain:false"),
            harder: Some(b"narenas:6"),
            secure: false,
        };
        let narenas = |fake: &Fake| value(&load_from(fake).0, "narenas");
        let mut fake = all();
        assert_eq!(narenas(&fake), 7);
        fake.variables.pop();
        assert_eq!(narenas(&fake), 6);
        fake.harder = None;
        assert_eq!(narenas(&fake), 5);
        fake.variables.pop();
        assert_eq!(narenas(&fake), 4);
        fake.variables.pop();
        assert_eq!(narenas(&fake), 3);
        fake.link = None;
        assert_eq!(narenas(&fake), 2);
        fake.symbols[1] = None;
        assert_eq!(narenas(&fake), 1);
        let secure = Fake { secure: true, ..all() };
        let (options, lines, _) = load_from(&secure);
        assert_eq!(
            value(&options, "narenas"),
            6,
            "what the program and the system say still counts"
        );
        assert_eq!(value(&options, "muzzy_decay_ms"), 11);
        assert!(!options.jemalloc.is_set("retain"));
        assert!(lines.is_empty());
    }

    #[test]
    fn variables_of_other_allocators() {
        let cases: &[(&'static str, &'static str, &'static str, i64)] = &[
            ("MALLOC_ARENA_MAX", "2", "narenas", 2),
            ("MALLOC_ARENA_MAX", "0", "narenas", 1),
            ("MALLOC_ARENA_MAX", "two", "narenas", 0),
            ("MALLOC_TRIM_THRESHOLD_", "-1", "dirty_decay_ms", -1),
            ("MALLOC_TRIM_THRESHOLD_", "131072", "dirty_decay_ms", 2000),
            ("MALLOC_MMAP_THRESHOLD_", "1", "cpu_cache_bytes", 8 << 20),
            ("TCMALLOC_MAX_TOTAL_THREAD_CACHE_BYTES", "67108864", "cpu_cache_bytes", 16 << 20),
            (
                "TCMALLOC_MAX_TOTAL_THREAD_CACHE_BYTES",
                "9223372036854775807",
                "cpu_cache_bytes",
                1 << 30,
            ),
            ("TCMALLOC_MAX_TOTAL_THREAD_CACHE_BYTES", "-5", "cpu_cache_bytes", 0),
            ("TCMALLOC_RELEASE_RATE", "0", "dirty_decay_ms", -1),
            ("TCMALLOC_RELEASE_RATE", "10", "dirty_decay_ms", 200),
            ("TCMALLOC_RELEASE_RATE", "0.5", "dirty_decay_ms", 4000),
            ("TCMALLOC_RELEASE_RATE", "60000", "dirty_decay_ms", 1),
            ("TCMALLOC_RELEASE_RATE", "-1", "dirty_decay_ms", 2000),
        ];
        for &(variable, text, option, expected) in cases {
            let variables = std::vec![(variable, text.as_bytes())];
            let (options, lines, _) = load_from(&Fake { variables, ..Fake::default() });
            assert_eq!(value(&options, option), expected, "{variable}={text}");
            assert!(lines.is_empty());
            let variables = std::vec![(variable, text.as_bytes())];
            let (options, ..) = load_from(&Fake { variables, secure: true, ..Fake::default() });
            assert!(ROWS.iter().all(|row| row.get_in(&options) == row.default));
            let variables = std::vec![
                (variable, text.as_bytes()),
                ("MALLOC_CONF", b"narenas:9,dirty_decay_ms:9,cpu_cache_bytes:9"),
            ];
            let (options, ..) = load_from(&Fake { variables, ..Fake::default() });
            assert_eq!(value(&options, option), 9, "{variable} is weaker than MALLOC_CONF");
        }
    }

    #[test]
    fn what_is_confirmed() {
        let variables = std::vec![
            ("MALLOC_ARENA_MAX", &b"3"[..]),
            ("MALLOC_CONF", b"retain:false,dirty_decay_ms:100,colour:red"),
            ("THERMALLOC_CONF", b"confirm_conf:true"),
        ];
        let (options, lines, outcome) = load_from(&Fake { variables, ..Fake::default() });
        assert_eq!((value(&options, "dirty_decay_ms"), outcome), (100, Outcome::Read));
        assert_eq!(
            lines,
            [
                "thermalloc: environment variable MALLOC_ARENA_MAX: \"3\": narenas:3: set\n",
                "thermalloc: environment variable MALLOC_CONF: \"retain:false,dirty_decay_ms:100,colour:red\"\n",
                "thermalloc: -- retain:false: no effect: Address space is always kept.\n",
                "thermalloc: -- dirty_decay_ms:100: set\n",
                "thermalloc: option colour: unknown: ignored\n",
                "thermalloc: environment variable THERMALLOC_CONF: \"confirm_conf:true\"\n",
                "thermalloc: -- confirm_conf:true: set\n",
            ]
        );
    }

    #[test]
    fn abort_conf_ends_a_process_with_wrong_options() {
        let outcome = |text: &'static str| {
            let variables = std::vec![("MALLOC_CONF", text.as_bytes())];
            let (_, lines, outcome) = load_from(&Fake { variables, ..Fake::default() });
            (lines.len(), outcome)
        };
        assert_eq!(outcome("colour:red"), (0, Outcome::Read));
        assert_eq!(outcome("abort_conf:true,narenas:4,retain:true"), (0, Outcome::Read));
        for wrong in ["colour:red", "retain:maybe", "dirty_decay_ms:-2", "junk", "tcache_max:-4"] {
            let text = String::from("abort_conf:true,") + wrong;
            assert_eq!(outcome(text.leak()), (1, Outcome::Abort), "{wrong}");
        }
    }

    #[test]
    fn what_stands_for_something_of_ours() {
        let cache =
            |text: &str| value(&load_texts(text.as_bytes(), b"", false).0, "cpu_cache_bytes");
        assert_eq!(cache("tcache:false"), 0);
        assert_eq!(cache("tcache:false,tcache:true"), 8 << 20);
        assert_eq!(cache("cpu_cache_bytes:1M,tcache:true"), 1 << 20);
        assert_eq!(cache("tcache:maybe"), 8 << 20);
        let (options, _) = load_texts(b"stats_print:true,stats_print_opts:Jx", b"", false);
        assert!(options.jemalloc.is_set("stats_print"));
    }

    #[test]
    fn one_line_a_process() {
        let (mut lines, reported) = (0, AtomicBool::new(false));
        for _ in 0..3 {
            let variables = std::vec![("THERMALLOC_CONF", &b"colour:red"[..])];
            let fake = Fake { variables, ..Fake::default() };
            let outcome = load_once(&reported, &fake, |_| lines += 1);
            assert_eq!(outcome, Outcome::Read);
        }
        assert_eq!(lines, 1);
    }

    fn items() -> impl Strategy<Value = Vec<u8>> {
        let jemalloc = jemalloc::ROWS.iter().map(|row| row.name);
        let names: Vec<&str> =
            ROWS.iter().map(|row| row.name).chain(jemalloc).chain(["x", "hpa_x", ""]).collect();
        let item = (prop::sample::select(names), "[:= ]{0,2}", "-?[0-9]{0,20}[KMG]?|true|.{0,60}")
            .prop_map(|(name, separator, value)| String::from(name) + &separator + &value);
        prop::collection::vec(item, 0..6).prop_map(|items| items.join(",").into_bytes())
    }

    fn check(own: &[u8], malloc: &[u8]) -> Result<(), TestCaseError> {
        let leak = |text: &[u8]| -> &'static [u8] { Vec::leak(text.to_vec()) };
        let variables = std::vec![("MALLOC_CONF", leak(malloc)), ("THERMALLOC_CONF", leak(own))];
        let (options, lines, _) = load_from(&Fake { variables, ..Fake::default() });
        for row in ROWS {
            prop_assert!((row.min..=row.max).contains(&row.get_in(&options)), "{}", row.name);
        }
        for line in lines {
            prop_assert!(line.len() <= MESSAGE_BYTES);
            prop_assert!(line.starts_with("thermalloc: "));
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
