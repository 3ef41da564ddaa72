//! The manual's pages on options and statistics, drawn from the tables.
//! `THERMALLOC_WRITE_DOCS=1 cargo test -p thermalloc docs_are_current` rewrites them.

use super::conf::{JEMALLOC_FAMILIES, JEMALLOC_NAMES};
use super::options::{self, Kind, Mutability};
use super::stats::{self, Span, Unit};
use super::text::Line;
use std::format;
use std::fs;
use std::string::String;
use std::vec::Vec;

const GENERATED: &str = "<!-- Generated from the tables in alloc-core/src/control. Do not edit: \
    THERMALLOC_WRITE_DOCS=1 cargo test -p thermalloc docs_are_current -->\n\n";

const OPTIONS_HEAD: &str = "# Options

Options are read once, when the process starts, from two environment variables of the same form:

    THERMALLOC_CONF=hot_window_ms:8000,cpu_cache_bytes:16M

`name:value` or `name=value`, separated by commas; spaces around them do not matter. `MALLOC_CONF` is read first and
`THERMALLOC_CONF` after it, and the last value of an option wins: so a setting made for jemalloc carries over, and one
made for thermalloc overrides it. The value `default` sets the default. A process with raised rights (set-user-ID and
the like) reads neither. An option that is a text is taken from `THERMALLOC_CONF` alone; its characters are those of
ASCII that can be printed, without `\"`, `\\`, `<`, `>`, `&` and the comma.

What is wrong in `THERMALLOC_CONF` has no effect and is reported on standard error in one line for the whole process.
Nothing in `MALLOC_CONF` is ever reported, as other allocators read it too.

*live* options may be set at any time: in Rust by `thermalloc::control::options::set`, in C by the table
`thermalloc_host_v1`. *start* options are fixed when the process starts.

| Option | Values | Default | Set | Meaning |
|---|---|---|---|---|
";

const JEMALLOC_HEAD: &str = "
## Options of jemalloc

Every option of jemalloc is accepted in both variables, so that a setting made for jemalloc does no harm. Those that
are options above take effect; the rest have none yet, whatever their value.

| Option | Effect |
|---|---|
";

const STATS_HEAD: &str = "# Statistics

Every figure that thermalloc reports, under the same name everywhere: `thermalloc::control::stats::snapshot()` in Rust,
the table `thermalloc_host_v1` in C, `malloc_stats` and `malloc_info`, and the JSON report. A figure *now* is a state and
goes up and down; a *total* counts from the start of the process. Figures are read one after the other while the program
runs: each is right of its moment, and sums of several may be off by what happened in between.

| Statistic | Unit | Span | Meaning |
|---|---|---|---|
";

fn shown(row: &options::Row, value: i64) -> String {
    let mut line = Line::<32>::new();
    row.show(value, &mut line);
    String::from_utf8(line.as_bytes().to_vec()).unwrap()
}

fn values(row: &options::Row) -> String {
    let range = format!("{} to {}", shown(row, row.min), shown(row, row.max));
    match row.kind {
        Kind::Bool | Kind::Thp | Kind::Hugetlb => {
            let words: Vec<_> = row.kind.words().iter().map(|word| format!("`{word}`")).collect();
            words.join(", ")
        }
        Kind::Ms => format!("{range} ms"),
        Kind::Bytes => format!("{range} bytes, with K, M or G"),
        Kind::Count => range,
        Kind::Text => format!("a text of up to {} characters", row.max),
    }
}

fn options_page() -> String {
    let mut page = String::from(GENERATED) + OPTIONS_HEAD;
    for row in options::ROWS {
        let set = match row.mutability {
            Mutability::Start => "start",
            Mutability::Live => "live",
        };
        let default = match row.kind {
            Kind::Text => "empty".into(),
            _ => shown(row, row.default),
        };
        let (name, values) = (row.name, values(row));
        page += &format!("| `{name}` | {values} | {default} | {set} | {} |\n", row.doc);
    }
    page += JEMALLOC_HEAD;
    for name in JEMALLOC_NAMES {
        let effect = if options::find(name).is_some() { "as above" } else { "none yet" };
        page += &format!("| `{name}` | {effect} |\n");
    }
    let families: Vec<String> = JEMALLOC_FAMILIES.iter().map(|f| format!("`{f}*`")).collect();
    page + &format!("| any other of {} | none yet |\n", families.join(", "))
}

fn stats_page() -> String {
    let mut page = String::from(GENERATED) + STATS_HEAD;
    for row in stats::ROWS {
        let unit = match row.unit {
            Unit::Bytes => "bytes",
            Unit::Count => "count",
            Unit::Milliseconds => "ms",
            Unit::Microseconds => "us",
            Unit::Percent => "%",
        };
        let span = match row.span {
            Span::Now => "now",
            Span::Total => "total",
        };
        page += &format!("| `{}` | {unit} | {span} | {} |\n", row.name, row.doc);
    }
    page
}

#[test]
fn docs_are_current() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs");
    for (file, page) in [("options.md", options_page()), ("stats.md", stats_page())] {
        let path = format!("{folder}/{file}");
        if std::env::var_os("THERMALLOC_WRITE_DOCS").is_some() {
            fs::create_dir_all(folder).unwrap();
            fs::write(&path, &page).unwrap();
        }
        let found = fs::read_to_string(&path).unwrap_or_default();
        assert!(
            found == page,
            "docs/{file} differs from the tables: set THERMALLOC_WRITE_DOCS=1 and run again"
        );
    }
}
