//! `malloc_stats_print`: jemalloc's report, as text and as JSON.
//!
//! The JSON is the tree of names itself, walked; the text has jemalloc's lines and tables. Invariant:
//! nothing is allocated; each piece is handed on as a C string of at most [`PIECE_BYTES`].

use super::jemalloc::LETTERS;
use super::mallctl::{self, ARENAS_ALL, ARENAS_DESTROYED, DEPTH_MAX, Io, Leaf, Place, Type};
use super::text::Line;
use core::ffi::{CStr, c_char};

/// The longest piece, with its NUL.
pub const PIECE_BYTES: usize = 512;

/// What is to be in a report.
#[derive(Clone, Copy)]
struct Parts {
    json: bool,
    general: bool,
    merged: bool,
    destroyed: bool,
    each: bool,
    bins: bool,
    large: bool,
    mutexes: bool,
    extents: bool,
    hpa: bool,
}

impl Parts {
    /// `letters` are jemalloc's: J for JSON, each other one leaves something out.
    fn read(letters: &[u8]) -> Self {
        let wanted = |letter: u8| !letters.contains(&letter);
        let [json, general, merged, destroyed, each, bins, large, mutexes, hpa, extents] =
            LETTERS.map(wanted);
        let json = !json;
        Parts { json, general, merged, destroyed, each, bins, large, mutexes, extents, hpa }
    }

    /// Whether a part of an arena's figures is wanted.
    fn has(&self, name: &str) -> bool {
        match name {
            "bins" => self.bins,
            "lextents" => self.large,
            "mutexes" | "mutex" => self.mutexes,
            "extents" => self.extents,
            "hpa_shard" => self.hpa,
            _ => true,
        }
    }
}

/// Writes a report of this moment to `sink`.
pub fn write(letters: &[u8], sink: &mut dyn FnMut(&CStr)) {
    let parts = Parts::read(letters);
    let mut out = Out { line: Line::new(), sink };
    set("epoch", 1);
    if parts.json { json(&mut out, &parts) } else { text(&mut out, &parts) }
}

/// The same to standard error, or to what the program set to write messages.
pub fn write_message(letters: &[u8]) {
    match super::places::message() {
        Some(message) => write(letters, &mut |piece| {
            // SAFETY: the program's function of this type; the piece is a C string.
            unsafe { message(core::ptr::null_mut(), piece.as_ptr()) }
        }),
        None => write(letters, &mut |piece| {
            let _ = crate::os::linux::write(2, piece.to_bytes());
        }),
    }
}

/// What `stats_print` asks for, when the process ends.
extern "C" fn at_exit() {
    if super::options::OPTIONS.jemalloc.is_set("stats_print") {
        let letters = super::options::OPTIONS.jemalloc.stats_print_opts().cast::<c_char>();
        // SAFETY: a C string of the option table.
        write_message(unsafe { CStr::from_ptr(letters) }.to_bytes());
    }
}

/// Among the last things that a process runs; nothing is registered anywhere.
#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = at_exit;
#[cfg(test)]
const _: extern "C" fn() = at_exit;

struct Out<'a> {
    line: Line<PIECE_BYTES>,
    sink: &'a mut dyn FnMut(&CStr),
}

impl Out<'_> {
    /// Hands on what was written.
    fn flush(&mut self) {
        self.line.end_with_nul();
        if let Ok(piece) = CStr::from_bytes_with_nul(self.line.as_bytes()) {
            (self.sink)(piece);
        }
        self.line.clear();
    }

    fn str(&mut self, piece: &str) {
        self.line.str(piece);
        self.flush();
    }

    fn end(&mut self) {
        self.line.str("\n");
        self.flush();
    }
}

/// Reads a number by name, 0 where there is none.
fn number(name: &str) -> u64 {
    let mut mib = [0; DEPTH_MAX];
    let depth = mallctl::name_to_mib(name.as_bytes(), &mut mib).unwrap_or(0);
    figure(mib.get(..depth).unwrap_or(&[]))
}

fn figure(mib: &[usize]) -> u64 {
    match mallctl::place(mib) {
        Some(Place::End(leaf)) => leaf.value(mib).unwrap_or(0),
        _ => 0,
    }
}

fn set(name: &str, value: u64) {
    let new = (&raw const value).cast();
    let io = Io { new, new_len: size_of::<u64>(), ..Io::NONE };
    // SAFETY: eight bytes are written, and no pointer.
    let _ = unsafe { mallctl::by_name(name.as_bytes(), io) };
}

/// A place in the tree, with the indices that lead there.
#[derive(Clone, Copy)]
struct Node {
    mib: [usize; DEPTH_MAX],
    depth: usize,
    place: Place,
}

impl Node {
    const ROOT: Node = Node { mib: [0; DEPTH_MAX], depth: 0, place: Place::ROOT };

    fn child(&self, index: usize) -> Option<Node> {
        let mut child = Node { place: self.place.child(index)?, ..*self };
        *child.mib.get_mut(self.depth)? = index;
        child.depth += 1;
        Some(child)
    }

    /// The children that have names, in their order.
    fn children(&self) -> impl Iterator<Item = (&'static str, Node)> {
        let node = *self;
        (0..node.place.count()).filter_map(move |i| Some((node.place.name(i), node.child(i)?)))
    }

    fn find(&self, name: &str) -> Option<Node> {
        self.children().find(|(known, _)| *known == name).map(|(_, node)| node)
    }

    fn at(name: &str) -> Option<Node> {
        name.split('.').try_fold(Node::ROOT, |node, part| node.find(part))
    }

    /// The figure of a leaf below this node.
    fn figure(&self, name: &str) -> u64 {
        let leaf = name.split('.').try_fold(*self, |node, part| node.find(part));
        leaf.map_or(0, |leaf| leaf.value().unwrap_or(0))
    }

    fn value(&self) -> Option<u64> {
        match self.place {
            Place::End(leaf) => leaf.value(self.mib.get(..self.depth)?),
            _ => None,
        }
    }
}

fn show(line: &mut Line<PIECE_BYTES>, leaf: &Leaf, value: u64, quote: bool) {
    match leaf.ty {
        Type::Bool => drop(line.str(if value != 0 { "true" } else { "false" })),
        Type::Ssize | Type::I64 => drop(line.signed(value.cast_signed())),
        Type::Text => {
            let address = usize::try_from(value).unwrap_or(0);
            let text = core::ptr::with_exposed_provenance::<c_char>(address);
            let quote = if quote { "\"" } else { "" };
            line.str(quote);
            if !text.is_null() {
                // SAFETY: a text that the tree reads is a C string that stays.
                json_text(line, unsafe { CStr::from_ptr(text) }.to_bytes());
            }
            line.str(quote);
        }
        _ => drop(line.unsigned(value)),
    }
}

/// A text without what JSON would have to escape.
fn json_text(line: &mut Line<PIECE_BYTES>, text: &[u8]) {
    for &byte in text {
        let plain = (b' '..=b'~').contains(&byte) && byte != b'"' && byte != b'\\';
        line.bytes(&[if plain { byte } else { b'?' }]);
    }
}

// JSON

/// Writes `"name":` after a comma where it is not the first.
fn key(out: &mut Out<'_>, first: &mut bool, name: &str) {
    out.line.str(if *first { "\"" } else { ",\"" }).str(name).str("\":");
    *first = false;
}

/// A node's children that can be read, as members.
fn members(out: &mut Out<'_>, parts: &Parts, node: &Node, first: &mut bool) {
    for (name, child) in node.children().filter(|(name, _)| parts.has(name)) {
        match child.place {
            Place::End(leaf) => {
                if let Some(value) = child.value() {
                    // jemalloc calls these otherwise in its report.
                    let called = match name {
                        "uptime" => "uptime_ns",
                        "hpa_sec_bytes" => "sec_bytes",
                        _ => name,
                    };
                    key(out, first, called);
                    show(&mut out.line, &leaf, value, true);
                    out.flush();
                }
            }
            Place::List(..) if name == "arenas" => {}
            Place::List(..) => {
                key(out, first, name);
                out.str("[");
                array(out, parts, &child);
                out.str("]");
            }
            _ => {
                key(out, first, name);
                object(out, parts, &child);
            }
        }
    }
}

fn object(out: &mut Out<'_>, parts: &Parts, node: &Node) {
    out.str("{");
    members(out, parts, node, &mut true);
    out.str("}");
}

fn array(out: &mut Out<'_>, parts: &Parts, list: &Node) {
    for (index, node) in (0..).map_while(|index| Some((index, list.child(index)?))) {
        if index > 0 {
            out.line.str(",");
        }
        object(out, parts, &node);
    }
}

/// The arenas of a report, and what they are called in it.
fn arenas(parts: &Parts, visit: &mut dyn FnMut(&str, &Node)) {
    let Some(list) = Node::at("stats.arenas") else { return };
    let count = usize::try_from(number("arenas.narenas")).unwrap_or(0);
    let live = || (0..count).filter_map(|index| Some((index, list.child(index)?)));
    if parts.merged
        && (live().count() > 1 || !parts.each)
        && let Some(all) = list.child(ARENAS_ALL)
    {
        visit("merged", &all);
    }
    if parts.destroyed
        && let Some(destroyed) = list.child(ARENAS_DESTROYED)
    {
        visit("destroyed", &destroyed);
    }
    if parts.each {
        for (index, arena) in live() {
            let mut name = Line::<24>::new();
            name.unsigned(index as u64);
            visit(core::str::from_utf8(name.as_bytes()).unwrap_or("?"), &arena);
        }
    }
}

fn json(out: &mut Out<'_>, parts: &Parts) {
    out.str("{\"jemalloc\":{");
    let mut first = true;
    if parts.general {
        for name in ["version", "config", "opt", "arenas"] {
            let Some(node) = Node::at(name) else { continue };
            key(out, &mut first, name);
            match (node.place, node.value()) {
                (Place::End(leaf), Some(value)) => {
                    show(&mut out.line, &leaf, value, true);
                    out.flush();
                }
                _ => object(out, &Parts::read(b""), &node),
            }
        }
    }
    if let Some(stats) = Node::at("stats") {
        key(out, &mut first, "stats");
        object(out, parts, &stats);
    }
    if parts.merged || parts.destroyed || parts.each {
        key(out, &mut first, "stats.arenas");
        out.str("{");
        let mut first = true;
        arenas(parts, &mut |name, arena| {
            key(out, &mut first, name);
            object(out, parts, arena);
        });
        out.str("}");
    }
    out.str("}}");
}

// Text

fn text(out: &mut Out<'_>, parts: &Parts) {
    out.str("___ Begin jemalloc statistics ___\n");
    if parts.general {
        general(out);
    }
    totals(out, parts);
    arenas(parts, &mut |name, arena| {
        match name {
            "merged" => out.str("Merged arenas stats:\n"),
            "destroyed" => out.str("Destroyed arenas stats:\n"),
            _ => {
                out.line.str("arenas[").str(name).str("]:");
                out.end();
            }
        }
        arena_text(out, parts, arena);
    });
    out.str("--- End jemalloc statistics ---\n");
}

/// `name: value`, each on a line, of what can be read.
fn settings(out: &mut Out<'_>, title: &str, prefix: &str) {
    out.line.str(title);
    out.end();
    let Some(node) = Node::at(prefix) else { return };
    for (name, child) in node.children() {
        let (Place::End(leaf), Some(value)) = (child.place, child.value()) else { continue };
        out.line.str("  ").str(prefix).str(".").str(name).str(": ");
        let quote = leaf.ty == Type::Text;
        show(&mut out.line, &leaf, value, quote);
        // What may have changed since the process started.
        let now = match name {
            "background_thread" if prefix == "opt" => Some("background_thread"),
            "dirty_decay_ms" if prefix == "opt" => Some("arenas.dirty_decay_ms"),
            "muzzy_decay_ms" if prefix == "opt" => Some("arenas.muzzy_decay_ms"),
            _ => None,
        };
        if let Some(now) = now {
            out.line.str(" (").str(now).str(": ");
            show(&mut out.line, &leaf, number(now), false);
            out.line.str(")");
        }
        out.end();
    }
}

fn general(out: &mut Out<'_>) {
    if let Some(Node { place: Place::End(leaf), .. }) = Node::at("version") {
        out.line.str("Version: ");
        show(&mut out.line, &leaf, number("version"), true);
        out.end();
    }
    settings(out, "Build-time option settings", "config");
    settings(out, "Run-time option settings", "opt");
    for (title, name) in [
        ("Arenas", "arenas.narenas"),
        ("Quantum size", "arenas.quantum"),
        ("Page size", "arenas.page"),
        ("Maximum thread-cached size class", "arenas.tcache_max"),
        ("Number of bin size classes", "arenas.nbins"),
        ("Number of thread-cache bin size classes", "arenas.nhbins"),
        ("Number of large size classes", "arenas.nlextents"),
    ] {
        out.line.str(title).str(": ").unsigned(number(name));
        out.end();
    }
}

fn totals(out: &mut Out<'_>, parts: &Parts) {
    let figures = [
        ("Allocated: ", "stats.allocated"),
        (", active: ", "stats.active"),
        (", metadata: ", "stats.metadata"),
        (" (n_thp ", "stats.metadata_thp"),
        ("), resident: ", "stats.resident"),
        (", mapped: ", "stats.mapped"),
        (", retained: ", "stats.retained"),
    ];
    for (before, name) in figures {
        out.line.str(before).unsigned(number(name));
    }
    out.end();
    out.line.str("Count of realloc(non-null-ptr, 0) calls: ");
    out.line.unsigned(number("stats.zero_reallocs"));
    out.end();
    out.line.str("Background threads: ").unsigned(number("stats.background_thread.num_threads"));
    out.line.str(", num_runs: ").unsigned(number("stats.background_thread.num_runs"));
    out.line.str(", run_interval: ");
    out.line.unsigned(number("stats.background_thread.run_interval")).str(" ns");
    out.end();
    if parts.mutexes
        && let Some(mutexes) = Node::at("stats.mutexes")
    {
        mutex_table(out, &mutexes);
    }
}

/// One column of a table: its title, how wide it is, and the figure below a node.
struct Column {
    title: &'static str,
    width: usize,
    figure: &'static str,
}

const fn column(title: &'static str, width: usize) -> Column {
    Column { title, width, figure: title }
}

fn cell(out: &mut Out<'_>, width: usize, value: u64) {
    let mut digits = Line::<24>::new();
    digits.unsigned(value);
    right(out, width, digits.as_bytes());
}

fn right(out: &mut Out<'_>, width: usize, text: &[u8]) {
    for _ in text.len()..width {
        out.line.str(" ");
    }
    out.line.bytes(text);
}

fn left(out: &mut Out<'_>, width: usize, text: &str) {
    out.line.str(text);
    for _ in text.len()..width {
        out.line.str(" ");
    }
}

const MUTEX: [Column; 7] = [
    Column { title: "n_lock_ops", width: 16, figure: "num_ops" },
    Column { title: "n_waiting", width: 16, figure: "num_wait" },
    Column { title: "n_spin_acq", width: 16, figure: "num_spin_acq" },
    Column { title: "n_owner_switch", width: 16, figure: "num_owner_switch" },
    Column { title: "total_wait_ns", width: 16, figure: "total_wait_time" },
    Column { title: "max_wait_ns", width: 16, figure: "max_wait_time" },
    Column { title: "max_n_thds", width: 16, figure: "max_num_thds" },
];

fn mutex_table(out: &mut Out<'_>, mutexes: &Node) {
    left(out, 21, "");
    for column in &MUTEX {
        right(out, column.width, column.title.as_bytes());
    }
    out.end();
    for (name, mutex) in mutexes.children() {
        if matches!(mutex.place, Place::End(_)) {
            continue;
        }
        left(out, 21, name);
        for column in &MUTEX {
            cell(out, column.width, mutex.figure(column.figure));
        }
        out.end();
    }
}

fn arena_text(out: &mut Out<'_>, parts: &Parts, arena: &Node) {
    out.line.str("assigned threads: ").unsigned(arena.figure("nthreads"));
    out.end();
    let uptime_ns = arena.figure("uptime");
    out.line.str("uptime: ").unsigned(uptime_ns);
    out.end();
    out.str("dss allocation precedence: \"disabled\"\n");
    decay_table(out, arena);
    requests_table(out, arena, uptime_ns / 1_000_000_000);
    memory_table(out, arena);
    for (wanted, name) in [
        (parts.mutexes, "mutexes"),
        (parts.bins, "bins"),
        (parts.large, "lextents"),
        (parts.extents, "extents"),
        (parts.hpa, "hpa_shard"),
    ] {
        let Some(node) = arena.find(name).filter(|_| wanted) else { continue };
        match name {
            "mutexes" => mutex_table(out, &node),
            "bins" => size_table(out, "bins:", "arenas.bin", &node, &BINS),
            "lextents" => size_table(out, "large:", "arenas.lextent", &node, &LEXTENTS),
            "extents" => extent_table(out, &node),
            _ => hpa_text(out, &node),
        }
    }
}

fn decay_table(out: &mut Out<'_>, arena: &Node) {
    for (width, title) in [
        (9, "decaying:"),
        (6, "time"),
        (13, "npages"),
        (13, "sweeps"),
        (13, "madvises"),
        (13, "purged"),
    ] {
        right(out, width, title.as_bytes());
    }
    out.end();
    for (title, pages, ms, sweeps, madvises, purged) in [
        ("dirty:", "pdirty", "dirty_decay_ms", "dirty_npurge", "dirty_nmadvise", "dirty_purged"),
        ("muzzy:", "pmuzzy", "muzzy_decay_ms", "muzzy_npurge", "muzzy_nmadvise", "muzzy_purged"),
    ] {
        right(out, 9, title.as_bytes());
        match arena.figure(ms).cast_signed() {
            never if never < 0 => right(out, 6, b"N/A"),
            ms => cell(out, 6, ms.unsigned_abs()),
        }
        for name in [pages, sweeps, madvises, purged] {
            cell(out, 13, arena.figure(name));
        }
        out.end();
    }
}

const REQUESTS: [&str; 5] = ["nmalloc", "ndalloc", "nrequests", "nfills", "nflushes"];

fn requests_table(out: &mut Out<'_>, arena: &Node, uptime_s: u64) {
    left(out, 21, "");
    right(out, 16, b"allocated");
    for title in ["nmalloc", "ndalloc", "nrequests", "nfill", "nflush"] {
        right(out, 16, title.as_bytes());
        right(out, 10, b"(#/sec)");
    }
    out.end();
    let mut total = [0; REQUESTS.len() + 1];
    for (title, name) in [("small:", Some("small")), ("large:", Some("large")), ("total:", None)] {
        let node = name.and_then(|name| arena.find(name));
        left(out, 21, title);
        for (i, figure) in ["allocated"].into_iter().chain(REQUESTS).enumerate() {
            let Some(sum) = total.get_mut(i) else { continue };
            let value = node.map_or(*sum, |node| node.figure(figure));
            *sum += value;
            cell(out, 16, value);
            if i > 0 {
                cell(out, 10, per_second(value, uptime_s));
            }
        }
        out.end();
    }
}

fn per_second(count: u64, seconds: u64) -> u64 {
    count.checked_div(seconds).unwrap_or(count)
}

fn memory_table(out: &mut Out<'_>, arena: &Node) {
    left(out, 21, "");
    right(out, 16, b"");
    out.end();
    left(out, 21, "active:");
    cell(out, 16, arena.figure("pactive") * number("arenas.page"));
    out.end();
    for name in [
        "mapped",
        "retained",
        "base",
        "internal",
        "metadata_thp",
        "tcache_bytes",
        "tcache_stashed_bytes",
        "resident",
        "abandoned_vm",
        "extent_avail",
    ] {
        out.line.str(name).str(":").pad(21);
        cell(out, 16, arena.figure(name));
        out.end();
    }
}

const GAP: &str = "                     ---\n";

/// Figures by size; the first figure says whether a size was ever used.
const BINS: [Column; 9] = [
    column("nslabs", 13),
    column("nmalloc", 13),
    column("ndalloc", 13),
    column("nrequests", 13),
    column("curregs", 13),
    column("curslabs", 13),
    column("nonfull_slabs", 15),
    column("nfills", 13),
    column("nflushes", 13),
];

const LEXTENTS: [Column; 4] = [
    column("nmalloc", 13),
    column("ndalloc", 13),
    column("nrequests", 13),
    column("curlextents", 13),
];

fn size_table(out: &mut Out<'_>, title: &str, sizes: &str, list: &Node, columns: &[Column]) {
    let Some(sizes) = Node::at(sizes) else { return };
    left(out, 8, title);
    right(out, 12, b"size");
    right(out, 4, b"ind");
    right(out, 13, b"allocated");
    for column in columns {
        right(out, column.width, column.title.as_bytes());
    }
    out.end();
    let first = if title == "large:" { number("arenas.nbins") } else { 0 };
    let mut gap = false;
    for index in 0.. {
        let (Some(node), Some(size)) = (list.child(index), sizes.child(index)) else { break };
        let unused = columns.first().is_some_and(|column| node.figure(column.figure) == 0);
        if gap && !unused {
            out.str(GAP);
        }
        gap = unused;
        if unused {
            continue;
        }
        let size = size.figure("size");
        let live = node.figure("curregs").max(node.figure("curlextents"));
        cell(out, 20, size);
        cell(out, 4, first + index as u64);
        cell(out, 13, live.saturating_mul(size));
        for column in columns {
            cell(out, column.width, node.figure(column.figure));
        }
        out.end();
    }
    if gap {
        out.str(GAP);
    }
}

fn extent_table(out: &mut Out<'_>, list: &Node) {
    let kinds = [
        ("ndirty", "ndirty"),
        ("dirty", "dirty_bytes"),
        ("nmuzzy", "nmuzzy"),
        ("muzzy", "muzzy_bytes"),
        ("nretained", "nretained"),
        ("retained", "retained_bytes"),
    ];
    left(out, 8, "extents:");
    right(out, 12, b"size");
    right(out, 4, b"ind");
    for (title, _) in kinds {
        right(out, 13, title.as_bytes());
    }
    right(out, 13, b"ntotal");
    right(out, 13, b"total");
    out.end();
    let mut gap = false;
    for index in 0.. {
        let Some(node) = list.child(index) else { break };
        let figures = kinds.map(|(_, name)| node.figure(name));
        let [ndirty, dirty, nmuzzy, muzzy, nretained, retained] = figures;
        let unused = ndirty + nmuzzy + nretained == 0;
        if gap && !unused {
            out.str(GAP);
        }
        gap = unused;
        if unused {
            continue;
        }
        cell(out, 20, mallctl::extent_bytes(index) as u64);
        cell(out, 4, index as u64);
        figures.iter().for_each(|figure| cell(out, 13, *figure));
        cell(out, 13, ndirty + nmuzzy + nretained);
        cell(out, 13, dirty + muzzy + retained);
        out.end();
    }
    if gap {
        out.str(GAP);
    }
}

fn hpa_text(out: &mut Out<'_>, shard: &Node) {
    out.str("HPA shard stats:\n");
    for (title, name) in [
        ("Purge passes", "npurge_passes"),
        ("Purges", "npurges"),
        ("Hugeifies", "nhugifies"),
        ("Dehugifies", "ndehugifies"),
    ] {
        out.line.str("  ").str(title).str(": ").unsigned(shard.figure(name));
        out.end();
    }
}
