//! The manual's pages on options and statistics, drawn from the tables.
//! `THERMALLOC_WRITE_DOCS=1 cargo test -p thermalloc docs_are_current` rewrites them.

use super::conf::FOREIGN;
use super::jemalloc::{self, Effect};
use super::mallctl::Place;
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

Options are read once, when the process starts:

    THERMALLOC_CONF=hot_window_ms:8000,cpu_cache_bytes:16M

`name:value` or `name=value`, separated by commas; spaces around them do not matter. The value `default` sets the
default. They come from these places, and the last value of an option wins:

1. variables of glibc and tcmalloc (below);
2. a text compiled in (`THERMALLOC_MALLOC_CONF` in the environment of the build; `config.malloc_conf` reads it);
3. the program's variable `malloc_conf`, also as `je_malloc_conf`, `jemalloc_malloc_conf` and `_rjem_malloc_conf`. A Rust
   program without libthermalloc defines the last;
4. the name that the symbolic link `/etc/malloc.conf` points to, then `/etc/je_malloc.conf`, `/etc/jemalloc_malloc.conf`;
5. `MALLOC_CONF`, then `JE_MALLOC_CONF`, `JEMALLOC_MALLOC_CONF` and `_RJEM_MALLOC_CONF`;
6. the program's variable `malloc_conf_2_conf_harder`;
7. `THERMALLOC_CONF`.

So a setting made for jemalloc carries over, and one made for thermalloc overrides it. A process with raised rights
(set-user-ID and the like) reads no environment. An option that is a text is taken from `THERMALLOC_CONF` alone, but for
`prof_prefix`, which is jemalloc's; its characters are those of ASCII that can be printed, without `\"`, `\\`, `<`, `>`, `&` and the comma.

What is wrong in `THERMALLOC_CONF` has no effect and is reported on standard error in one line for the whole process.
Nothing in the other places is reported, as other allocators read them too, but for two options of jemalloc's:
`confirm_conf:true` writes down what was read and what came of it, and `abort_conf:true` ends a process that was given
anything that is wrong.

*live* options may be set at any time: in Rust by `thermalloc::control::options::set`, in C by `mallctl`
(`thermalloc.options.<name>`) or the table `thermalloc_host_v1`. *start* options are fixed when the process starts.

| Option | Values | Default | Set | Meaning |
|---|---|---|---|---|
";

const JEMALLOC_HEAD: &str = "
## Options of jemalloc

Every option of jemalloc is accepted, so that a setting made for jemalloc does no harm, and `opt.<name>` reads what was
set. *same*: it does what it does in jemalloc, or is an option above. *mapped*: it stands for something here. *no effect*:
why.

| Option | Effect |
|---|---|
";

const FOREIGN_HEAD: &str = "
## Variables of glibc and tcmalloc

| Variable | Meaning |
|---|---|
";

const STATS_HEAD: &str = "# Statistics

Every figure that thermalloc reports, under the same name everywhere: `thermalloc::control::stats::snapshot()` in Rust,
`mallctl` (`thermalloc.stats.<name>`) and the table `thermalloc_host_v1` in C, `malloc_stats` and `malloc_info`, the JSON
and the Prometheus report. A figure *now* is a state and
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
    page += &jemalloc_options();
    page += FOREIGN_HEAD;
    for (name, meaning, _) in FOREIGN {
        page += &format!("| `{name}` | {meaning} |\n");
    }
    page
}

fn effect(effect: Effect) -> String {
    match effect {
        Effect::Same => "same".into(),
        Effect::Mapped(what) => format!("mapped: {what}"),
        Effect::Nothing(why) => format!("no effect: {why}"),
    }
}

fn jemalloc_options() -> String {
    let rows = jemalloc::ROWS.iter();
    let rows: String =
        rows.map(|row| format!("| `{}` | {} |\n", row.name, effect(row.effect()))).collect();
    let families: Vec<String> = jemalloc::FAMILIES.iter().map(|f| format!("`{f}*`")).collect();
    rows + &format!("| any other of {} | no effect |\n", families.join(", "))
}

/// Every name of the tree but those of a table: the options and the statistics are theirs.
fn names() -> String {
    fn walk(place: Place, name: &str, lists: usize, page: &mut String) {
        let below =
            |part: &str| if name.is_empty() { part.into() } else { format!("{name}.{part}") };
        match place {
            Place::End(leaf) => {
                let ty = leaf.ty.c_name();
                let how = leaf.access();
                *page += &format!("| `{name}` | {ty} {how} | {} |\n", effect(leaf.effect));
            }
            Place::List(_, _) => {
                let index = ["<i>", "<j>"][lists];
                walk(place.entry(), &below(index), lists + 1, page);
            }
            Place::Table(_) => {
                let of =
                    if name == "opt" { "see the options below" } else { "ours: each of its rows" };
                *page += &format!("| `{name}.<name>` | | {of} |\n");
            }
            Place::Names(_) if place.is_locks() => {
                *page += &format!("| `{name}.*` | | no effect: Locks keep no statistics: 0. |\n");
            }
            _ => {
                for index in 0..place.count() {
                    let child = place.child(index).unwrap();
                    walk(child, &below(place.name(index)), lists, page);
                }
            }
        }
    }
    let mut page = String::new();
    walk(Place::ROOT, "", 0, &mut page);
    page + "| `experimental.*` | | ENOENT: jemalloc promises nothing of them. |\n"
}

const COMPARE_HEAD: &str = "
Names of `mallctl` (jemalloc 5.3's, its successor's `arena.<i>.name` and `arenas.hugepage`, and ours below `thermalloc`).
*same*: the same contract. *mapped*: what is different. *no effect*: it can be read, and written where jemalloc lets it be,
and does nothing; why. Types and access (`r` read, `w` write, `-` neither: it is run) are jemalloc's.

| Name | Type, access | Here |
|---|---|---|
";

const COMPARE_OPTIONS: &str = "
Options (`MALLOC_CONF`), and the type that `opt.<name>` reads (none: jemalloc 5.3 has no such name, or not in a build
without what is missing here).

| Option | `opt.` | Here |
|---|---|---|
";

/// A part of `docs/compare.md`, which people write the rest of.
fn compare_part() -> String {
    let options: String = jemalloc::ROWS
        .iter()
        .map(|row| {
            let ty = if row.readable() { row.ty().c_name() } else { "" };
            format!("| `{}` | {ty} | {} |\n", row.name, effect(row.effect()))
        })
        .collect();
    String::from(COMPARE_HEAD) + &names() + COMPARE_OPTIONS + &options + "\n"
}

const PART_BEGINS: &str = "<!-- jemalloc's names, generated: see docs_are_current in alloc-core/src/control/docs.rs -->\n";
const PART_ENDS: &str = "<!-- end of what is generated -->\n";

/// `page` with the generated part as it is to be; at the end where there is none yet.
fn with_part(page: &str) -> String {
    let part = compare_part();
    let whole =
        |before: &str, after: &str| format!("{before}{PART_BEGINS}{part}{PART_ENDS}{after}");
    match page.split_once(PART_BEGINS) {
        Some((before, rest)) => {
            whole(before, rest.split_once(PART_ENDS).map_or("", |(_, after)| after))
        }
        None => whole(page, ""),
    }
}

fn stats_page() -> String {
    let mut page = String::from(GENERATED) + STATS_HEAD;
    for row in stats::ROWS.iter().chain(stats::MEASURED) {
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
    let path = format!("{folder}/compare.md");
    let found = fs::read_to_string(&path).unwrap_or_default();
    let page = with_part(&found);
    if std::env::var_os("THERMALLOC_WRITE_DOCS").is_some() {
        fs::write(&path, &page).unwrap();
    } else {
        assert!(
            found == page,
            "docs/compare.md differs from the tree: set THERMALLOC_WRITE_DOCS=1 and run again"
        );
    }
}
