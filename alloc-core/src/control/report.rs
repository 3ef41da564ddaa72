//! Every statistic and every option as text, as JSON, and as the XML of glibc's `malloc_info`.
//!
//! Invariant: each piece handed to the sink is one whole line; names are identifiers and values
//! numbers, `true` and `false`, or texts of harmless characters, so that nothing needs escaping.

use core::ffi::CStr;

use super::options::{self, Kind, OPTIONS, Options};
use super::stats::{self, Span, Stats};
use super::text::Line;
use crate::os::linux::Linux;
use crate::policy::thp;

/// Room for the longest text of an option.
const LINE_BYTES: usize = 320;
const VALUE_COLUMN: usize = 24;

macro_rules! thp_files {
    ($($name:literal: $file:literal,)*) => {
        [$(($name, match CStr::from_bytes_with_nul(
            concat!("/sys/kernel/mm/transparent_hugepage/", $file, "enabled\0").as_bytes(),
        ) {
            Ok(path) => path,
            Err(_) => panic!("a path has one NUL"),
        }),)*]
    };
}

/// What the system says of transparent huge pages, and of the smaller sizes that newer kernels have.
const SYSTEM: [(&str, &CStr); 8] = thp_files! {
    "thp": "",
    "thp_16k": "hugepages-16kB/",
    "thp_32k": "hugepages-32kB/",
    "thp_64k": "hugepages-64kB/",
    "thp_128k": "hugepages-128kB/",
    "thp_512k": "hugepages-512kB/",
    "thp_1m": "hugepages-1024kB/",
    "thp_2m": "hugepages-2048kB/",
};

/// The form of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// For people: a line for each row.
    Text,
    /// One object, `{"thermalloc": {"version", "stats", "options"}}`.
    Json,
    /// As `malloc_info` writes it, with `<statistic>` and `<option>` elements added.
    MallocInfo,
    /// The statistics as Prometheus reads them: `thermalloc_<name>`, a counter's name with `_total`.
    Prometheus,
}

/// Writes a report of this moment, line by line, to `sink`.
pub fn write(format: Format, sink: &mut dyn FnMut(&[u8])) {
    write_of(format, &stats::snapshot(), &OPTIONS, sink);
}

fn write_of(format: Format, stats: &Stats, options: &Options, sink: &mut dyn FnMut(&[u8])) {
    let mut out = Out { line: Line::new(), sink };
    match format {
        Format::Text => text(&mut out, stats, options),
        Format::Json => json(&mut out, stats, options),
        Format::MallocInfo => malloc_info(&mut out, stats, options),
        Format::Prometheus => prometheus(&mut out, stats),
    }
}

struct Out<'a> {
    line: Line<LINE_BYTES>,
    sink: &'a mut dyn FnMut(&[u8]),
}

impl Out<'_> {
    fn end(&mut self) {
        self.line.end();
        (self.sink)(self.line.as_bytes());
        self.line.clear();
    }

    fn whole(&mut self, line: &str) {
        self.line.str(line);
        self.end();
    }
}

fn text(out: &mut Out<'_>, stats: &Stats, options: &Options) {
    out.whole(concat!("thermalloc ", env!("CARGO_PKG_VERSION")));
    out.whole("statistics");
    for row in stats::ROWS {
        out.line.str("  ").str(row.name).pad(VALUE_COLUMN).unsigned(row.get(stats));
        let word = row.unit.word();
        if !word.is_empty() {
            out.line.str(" ").str(word);
        }
        out.end();
    }
    out.whole("options");
    for row in options::ROWS {
        out.line.str("  ").str(row.name).pad(VALUE_COLUMN);
        row.show_in(options, &mut out.line);
        out.end();
    }
    out.whole("system");
    for (name, path) in SYSTEM {
        let mut buffer = [0; 128];
        if let Some(mode) = thp::mode(&Linux, path, &mut buffer) {
            out.line.str("  ").str(name).pad(VALUE_COLUMN).str(mode);
            out.end();
        }
    }
}

fn json(out: &mut Out<'_>, stats: &Stats, options: &Options) {
    out.whole(concat!("{\"thermalloc\":{\"version\":\"", env!("CARGO_PKG_VERSION"), "\","));
    out.whole("\"stats\":{");
    for (i, row) in stats::ROWS.iter().enumerate() {
        member(out, i, row.name).unsigned(row.get(stats));
        out.end();
    }
    out.whole("},\"options\":{");
    for (i, row) in options::ROWS.iter().enumerate() {
        let bare =
            row.kind == Kind::Bool || (row.kind != Kind::Text && row.kind.words().is_empty());
        let quote = if bare { "" } else { "\"" };
        row.show_plain_in(options, member(out, i, row.name).str(quote));
        out.line.str(quote);
        out.end();
    }
    out.whole("}}}");
}

/// The text format 0.0.4: a backslash is the only character of the documentation that it escapes.
fn prometheus(out: &mut Out<'_>, stats: &Stats) {
    for row in stats::ROWS {
        let (kind, suffix) = match row.span {
            Span::Now => ("gauge", ""),
            Span::Total => ("counter", "_total"),
        };
        out.line.str("# HELP thermalloc_").str(row.name).str(suffix).str(" ").str(row.doc);
        out.end();
        out.line.str("# TYPE thermalloc_").str(row.name).str(suffix).str(" ").str(kind);
        out.end();
        out.line.str("thermalloc_").str(row.name).str(suffix).str(" ").unsigned(row.get(stats));
        out.end();
    }
}

fn member<'a>(out: &'a mut Out<'_>, index: usize, name: &str) -> &'a mut Line<LINE_BYTES> {
    out.line.str(if index == 0 { "\"" } else { ",\"" }).str(name).str("\":")
}

/// One heap, as arenas share the page layer; `fast` is what the caches hold, `rest` the dirty
/// pages, `mmap` the blocks with pages of their own. No figure is kept for `max` of `system`.
fn malloc_info(out: &mut Out<'_>, stats: &Stats, options: &Options) {
    out.whole("<malloc version=\"1\">");
    out.whole("<heap nr=\"0\">");
    out.whole("<sizes>");
    out.whole("</sizes>");
    free_totals(out, stats);
    sizes(out, stats);
    out.whole("</heap>");
    free_totals(out, stats);
    total(out, "mmap", stats.large_live_blocks, stats.large_live_bytes);
    sizes(out, stats);
    for row in stats::ROWS {
        out.line.str("<statistic name=\"").str(row.name).str("\" unit=\"").str(row.unit.word());
        out.line.str("\" value=\"").unsigned(row.get(stats)).str("\"/>");
        out.end();
    }
    for row in options::ROWS {
        out.line.str("<option name=\"").str(row.name).str("\" value=\"");
        row.show_plain_in(options, &mut out.line);
        out.whole("\"/>");
    }
    out.whole("</malloc>");
}

fn free_totals(out: &mut Out<'_>, stats: &Stats) {
    total(out, "fast", stats.cached_blocks, stats.cached_bytes);
    total(out, "rest", stats.dirty_extents, stats.dirty_bytes);
}

fn total(out: &mut Out<'_>, kind: &str, count: u64, size: u64) {
    out.line.str("<total type=\"").str(kind).str("\" count=\"").unsigned(count);
    out.line.str("\" size=\"").unsigned(size).str("\"/>");
    out.end();
}

fn sizes(out: &mut Out<'_>, stats: &Stats) {
    for (element, kind, size) in [
        ("system", "current", stats.resident_bytes),
        ("aspace", "total", stats.mapped_bytes),
        ("aspace", "mprotect", stats.mapped_bytes),
    ] {
        out.line.str("<").str(element).str(" type=\"").str(kind);
        out.line.str("\" size=\"").unsigned(size).str("\"/>");
        out.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::stats::Counters;
    use std::string::{String, ToString};
    use std::vec::Vec;

    fn report(format: Format) -> (Stats, String) {
        let stats = Stats::read(&Counters {
            allocated_bytes: 4242,
            dirty_bytes: u64::MAX,
            cached_blocks: 7,
            ..Counters::default()
        });
        let mut lines: Vec<u8> = Vec::new();
        write_of(format, &stats, &Options::new(), &mut |line| {
            assert_eq!(line.iter().position(|&byte| byte == b'\n'), Some(line.len() - 1));
            lines.extend(line);
        });
        (stats, String::from_utf8(lines).unwrap())
    }

    #[test]
    fn text_has_every_row() {
        let (stats, text) = report(Format::Text);
        for row in stats::ROWS {
            let mut words =
                text.lines().find(|l| l.trim_start().starts_with(row.name)).unwrap().split(' ');
            let value = words.rfind(|word| word.parse::<u64>().is_ok()).unwrap();
            assert_eq!(value, row.get(&stats).to_string(), "{}", row.name);
        }
        assert!(text.contains("  cpu_cache_bytes       8M\n"));
        assert!(text.contains("  allocated_bytes       4242 bytes\n"));
    }

    /// A reader of just the JSON that reports consist of: strict on structure, no escapes.
    fn json_value<'a>(rest: &mut &'a str, path: &str, found: &mut Vec<(String, &'a str)>) {
        *rest = rest.trim_start();
        if let Some(mut inner) = rest.strip_prefix('{') {
            loop {
                inner = inner.trim_start().strip_prefix('"').expect("a name");
                let (name, value) = inner.split_once("\":").expect("the end of a name");
                assert!(name.bytes().all(|b| b == b'_' || b.is_ascii_lowercase()), "{name}");
                inner = value;
                json_value(&mut inner, &(String::from(path) + "." + name), found);
                inner = inner.trim_start();
                if let Some(end) = inner.strip_prefix('}') {
                    *rest = end;
                    return;
                }
                inner = inner.strip_prefix(',').expect("a comma or the end");
            }
        }
        let end = rest.find([',', '}', '\n']).unwrap();
        let quoted = rest[..end].len() >= 2 && rest.starts_with('"') && rest[..end].ends_with('"');
        let bare = ["true", "false"].contains(&&rest[..end]) || rest[..end].parse::<i128>().is_ok();
        assert!(quoted || bare, "{path}: {}", &rest[..end]);
        found.push((String::from(path), &rest[..end]));
        *rest = &rest[end..];
    }

    #[test]
    fn json_is_well_formed_and_has_every_row() {
        let (stats, text) = report(Format::Json);
        let (mut rest, mut found) = (text.as_str(), Vec::new());
        json_value(&mut rest, "", &mut found);
        assert_eq!(rest, "\n");
        assert_eq!(found.len(), 1 + stats::ROWS.len() + options::ROWS.len());
        let value = |path: &str| found.iter().find(|(p, _)| p == path).unwrap().1;
        for row in stats::ROWS {
            let path = String::from(".thermalloc.stats.") + row.name;
            assert_eq!(value(&path), row.get(&stats).to_string());
        }
        assert_eq!(value(".thermalloc.options.cpu_cache_bytes"), "8388608");
        assert_eq!(value(".thermalloc.options.rseq"), "true");
        assert_eq!(value(".thermalloc.options.thp"), "\"default\"");
        assert_eq!(value(".thermalloc.options.trace_file"), "\"\"");
    }

    #[test]
    fn the_longest_text_is_shown_whole() {
        let options = Options::new();
        let path = "x".repeat(options::TEXT_BYTES);
        assert!(options::find("trace_file").unwrap().load_in(&options, path.as_bytes()));
        for (format, around) in [
            (Format::Text, ["            ", "\n"]),
            (Format::Json, [",\"trace_file\":\"", "\"\n"]),
            (Format::MallocInfo, ["<option name=\"trace_file\" value=\"", "\"/>\n"]),
        ] {
            let mut text = Vec::new();
            write_of(format, &Stats::default(), &options, &mut |line| text.extend(line));
            let text = String::from_utf8(text).unwrap();
            assert!(text.contains(&(around[0].to_string() + &path + around[1])), "{text}");
        }
    }

    #[test]
    fn prometheus_has_every_row_with_its_kind() {
        let (stats, text) = report(Format::Prometheus);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 3 * stats::ROWS.len());
        for (row, lines) in stats::ROWS.iter().zip(lines.chunks(3)) {
            let total = if row.span == Span::Total { "_total" } else { "" };
            let name = String::from("thermalloc_") + row.name + total;
            assert_eq!(lines[0], String::from("# HELP ") + &name + " " + row.doc);
            let kind = if row.span == Span::Total { " counter" } else { " gauge" };
            assert_eq!(lines[1], String::from("# TYPE ") + &name + kind);
            assert_eq!(lines[2], name + " " + &row.get(&stats).to_string());
            assert!(!row.doc.contains('\\'), "{}: would have to be escaped", row.name);
        }
    }

    #[test]
    fn malloc_info_is_balanced_and_has_glibcs_elements() {
        let (_, text) = report(Format::MallocInfo);
        let mut open = Vec::new();
        for line in text.lines() {
            assert!(line.starts_with('<') && line.ends_with('>'), "{line}");
            assert_eq!(line.matches('"').count() % 2, 0, "{line}");
            if let Some(name) = line.strip_prefix("</") {
                assert_eq!(open.pop(), name.strip_suffix('>'));
            } else if !line.ends_with("/>") {
                open.push(line[1..].split([' ', '>']).next().unwrap());
            }
        }
        assert!(open.is_empty());
        assert!(text.starts_with("<malloc version=\"1\">\n<heap nr=\"0\">\n<sizes>\n"));
        assert_eq!(text.matches("<total type=\"fast\" count=\"7\" size=\"0\"/>").count(), 2);
        assert!(text.contains("<option name=\"narenas\" value=\"0\"/>\n"));
    }
}
