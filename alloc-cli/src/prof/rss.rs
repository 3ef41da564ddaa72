//! `prof rss`: why the resident size is what it is. Every term is counted by itself, by the allocator or by
//! the kernel; what they don't explain is shown as the residual.
use std::collections::HashMap;

use serde_json::{Value, json};
use thermalloc_prof_format::{Extent, extent_state};

use super::Output;
use super::analysis::Analysis;
use super::profile::{Region, Snapshot, float, on_host};
use super::report::head;
use super::symbols::short;
use super::table::{Table, bytes, percent, size};
use crate::failure::Failure;

/// The allocator's pages for blocks.
const BLOCKS: u32 = 8;
/// Its tables.
const TABLES: u32 = 16;

/// Resident pages of the allocator, by what they are.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Pages {
    /// Blocks that are live, as they were asked for.
    pub(crate) live: f64,
    /// What they got beyond that.
    pub(crate) internal: f64,
    /// Free slots in slabs, and the ends of slabs.
    pub(crate) external: f64,
    /// Free blocks in caches.
    pub(crate) cached: f64,
    /// Free pages with memory behind them.
    pub(crate) dirty: f64,
    /// Pages of live blocks with nothing behind them: no part of the resident size.
    pub(crate) untouched: f64,
}

impl Pages {
    /// From the extents, whose residency the kernel told, and the shares of what lies in them.
    pub(crate) fn of(s: &Snapshot) -> Self {
        let mut pages = Self::default();
        let (mut slabs, mut slots, mut slab_bytes) = (0.0, 0.0, 0.0);
        let mut own = 0.0;
        for e in &s.extents {
            let resident = resident(e);
            match e.state {
                extent_state::SLAB => {
                    slabs += resident;
                    slab_bytes += float(e.bytes);
                    slots += float(u64::from(e.used)) * float(e.class_bytes.into());
                }
                extent_state::BLOCK | extent_state::LARGE | extent_state::SAMPLED => {
                    own += resident;
                    pages.untouched += float(e.bytes) - resident;
                }
                _ => pages.dirty += resident,
            }
        }
        // What blocks in slabs and blocks of their own were asked for, as samples tell.
        let share = internal_share(s);
        let cached = float(s.stat("cached_bytes")).min(slots);
        let occupied = if slab_bytes > 0.0 { slabs / slab_bytes } else { 0.0 };
        let live_slots = (slots - cached) * occupied;
        pages.cached = cached * occupied;
        pages.external = slabs - slots * occupied;
        pages.internal = (live_slots + own) * share;
        pages.live = (live_slots + own) * (1.0 - share);
        pages
    }
}

/// Resident bytes of an extent; those of a file that does not say are taken from its state.
pub(crate) fn resident(e: &Extent) -> f64 {
    match e.resident_bytes_plus_1 {
        0 if e.state == extent_state::CLEAN => 0.0,
        0 => float(e.bytes),
        bytes => float(bytes - 1),
    }
}

/// The part of live blocks' memory that was not asked for. Samples of size classes have pages of their own,
/// so their slots are counted by what such a block gets otherwise: its `usable`.
pub(crate) fn internal_share(s: &Snapshot) -> f64 {
    let (mut asked, mut got) = (0.0, 0.0);
    for block in s.live.iter().filter(|block| on_host(block)) {
        asked += block.weight * float(block.size);
        got += block.weight * float(block.usable);
    }
    if got > 0.0 { ((got - asked) / got).max(0.0) } else { 0.0 }
}

/// What a mapping that is not the allocator's is.
fn kind(region: &Region) -> &'static str {
    let path = region.path.as_str();
    match path {
        "[heap]" => "brk heap",
        _ if path.starts_with("[stack") => "stacks",
        _ if path.starts_with("[v") => "kernel's own",
        _ if path.starts_with("[anon") => "named anonymous",
        "" => "anonymous, not ours",
        _ if path.starts_with("/dev/shm")
            || path.starts_with("/memfd:")
            || path.starts_with("/SYSV") =>
        {
            "shared memory"
        }
        _ if path.starts_with("/dev/") => "devices",
        _ if region.anonymous > 0 => "file pages, written",
        _ if region.flags & 4 != 0 => "code",
        _ => "file pages",
    }
}

pub(crate) fn report(a: &Analysis, top: usize) -> Result<Output, Failure> {
    let p = &a.profile;
    let with_regions = p.snapshots.iter().filter(|s| !s.regions.is_empty());
    // The fullest: at a process's end there is little to see.
    let most = |s: &&Snapshot| s.regions.iter().map(|r| r.resident).sum::<u64>();
    let s = with_regions.max_by_key(most).ok_or_else(|| {
        Failure::cannot_run(
            "profile",
            "no mappings in it",
            "they are written by dumps of thermalloc 0.1 and later",
        )
    })?;
    let all: f64 = s.regions.iter().map(|r| float(r.resident)).sum();
    let of = |flag: u32| -> f64 {
        s.regions.iter().filter(|r| r.flags & flag != 0).map(|r| float(r.resident)).sum()
    };
    let (blocks, tables) = (of(BLOCKS), of(TABLES));
    let pages = Pages::of(s);
    let mut kinds: HashMap<&str, f64> = HashMap::new();
    let foreign: Vec<&Region> =
        s.regions.iter().filter(|r| r.flags & (BLOCKS | TABLES) == 0).collect();
    for region in &foreign {
        // Pages of a file that were written are the process's own, the others the file's.
        let anonymous = region.anonymous.min(region.resident);
        *kinds.entry(kind(region)).or_default() += float(anonymous);
        let file = Region { anonymous: 0, ..(*region).clone() };
        *kinds.entry(kind(&file)).or_default() += float(region.resident - anonymous);
    }
    let mut kinds: Vec<(&str, f64)> = kinds.into_iter().filter(|(_, sum)| *sum > 0.0).collect();
    kinds.sort_by(|a, b| b.1.total_cmp(&a.1));

    let terms: Vec<(&str, f64)> = [
        ("live blocks, as asked for", pages.live),
        ("rounding up within blocks", pages.internal),
        ("free within slabs", pages.external),
        ("free in caches of CPUs and threads", pages.cached),
        ("free pages kept warm or not yet purged", pages.dirty),
        ("thermalloc's tables", float(s.stat("metadata_bytes")).min(tables)),
    ]
    .into_iter()
    .chain(kinds.iter().copied())
    .collect();
    let explained: f64 = terms.iter().map(|(_, sum)| sum).sum();
    let residual = all - explained;

    let mut text = head(p, &format!("dump {} ({})", s.number, s.reason));
    text += &format!("resident: {}\n\n", bytes(all));
    let mut table = Table::new(&[">bytes", ">share", "what"]);
    for (what, sum) in &terms {
        table.row([bytes(*sum), percent(*sum, all), (*what).to_owned()]);
    }
    table.row([bytes(residual), percent(residual, all), "residual: not explained".to_owned()]);
    text += &table.text();
    text += &format!("\nexplained: {}\n", percent(all - residual.abs(), all));
    text += &format!("live blocks have {} that they never touched\n", bytes(pages.untouched));
    let dirty_said = float(s.stat("dirty_bytes"));
    text += &format!(
        "for comparison: the allocator counts {} dirty, the kernel {} of its pages and {} of its tables\n",
        bytes(dirty_said),
        bytes(blocks),
        bytes(tables)
    );
    let (warnings, limits) = limits(s, all);
    warnings.iter().for_each(|warning| text += &format!("warning: {warning}\n"));

    let mut listed = foreign.clone();
    listed.sort_by_key(|region| std::cmp::Reverse(region.resident));
    text += "\n";
    let mut table =
        Table::new(&[">resident", ">shared", ">address", "mapping that is not thermalloc's"]);
    for region in listed.iter().take(top) {
        let name = if region.path.is_empty() { "(anonymous)" } else { region.path.as_str() };
        table.row([
            size(region.resident),
            size(region.shared),
            format!("{:x}", region.start),
            name.to_owned(),
        ]);
    }
    text += &table.text();
    let files = by_file(&foreign);
    text += "\n";
    let mut table = Table::new(&[">resident", ">mappings", "file"]);
    for (name, bytes, mappings) in files.iter().take(top) {
        table.row([size(*bytes), mappings.to_string(), (*name).to_owned()]);
    }
    text += &table.text();
    let json = json!({
        "resident_bytes": all, "explained_share": (all - residual.abs()) / all,
        "residual_bytes": residual, "untouched_bytes": pages.untouched,
        "terms": terms.iter().map(|(what, sum)| json!({ "what": what, "bytes": sum })).collect::<Vec<_>>(),
        "mappings": listed.iter().map(|r| json!({
            "path": r.path, "start": r.start, "resident_bytes": r.resident,
            "shared_bytes": r.shared, "anonymous_bytes": r.anonymous, "locked_bytes": r.locked,
        })).collect::<Vec<_>>(),
        "limits": limits, "warnings": warnings,
    });
    Ok(Output { text, json, picture: None })
}

/// What is locked or pinned, beside what may be.
fn limits(s: &Snapshot, resident: f64) -> (Vec<String>, Value) {
    let Some(system) = s.system else { return (Vec::new(), Value::Null) };
    let pinned: u64 = s
        .live
        .iter()
        .filter(|block| block.space == thermalloc_prof_format::space::PINNED)
        .map(|block| block.usable)
        .sum();
    let pinned = pinned.max(system.pinned_bytes);
    let mut warnings = Vec::new();
    let held = pinned + system.locked_bytes;
    if system.memlock_limit_bytes != u64::MAX && held > system.memlock_limit_bytes / 10 * 8 {
        let (held, limit) = (size(held), size(system.memlock_limit_bytes));
        warnings
            .push(format!("{held} pinned or locked is near the limit RLIMIT_MEMLOCK of {limit}"));
    }
    if held > system.memory_bytes / 2 && system.memory_bytes > 0 {
        let (held, memory) = (size(held), size(system.memory_bytes));
        warnings.push(format!("{held} of the machine's {memory} are pinned or locked: nothing can be moved to swap or made huge pages"));
    }
    if system.swap_bytes > 0 && float(system.swap_bytes) > resident / 10.0 {
        warnings.push(format!("{} more are on swap", size(system.swap_bytes)));
    }
    let json = json!({
        "pinned_bytes": pinned, "locked_bytes": system.locked_bytes,
        "swap_bytes": system.swap_bytes, "memory_bytes": system.memory_bytes,
        "memlock_limit_bytes": (system.memlock_limit_bytes != u64::MAX).then_some(system.memlock_limit_bytes),
        "resident_bytes": system.resident_bytes,
        "peak_resident_bytes": system.peak_resident_bytes,
    });
    (warnings, json)
}

fn by_file<'a>(regions: &[&'a Region]) -> Vec<(&'a str, u64, usize)> {
    let mut files: HashMap<&str, (u64, usize)> = HashMap::new();
    for region in regions {
        let entry = files.entry(short(&region.path)).or_default();
        *entry = (entry.0 + region.resident, entry.1 + 1);
    }
    let mut files: Vec<_> = files
        .into_iter()
        .filter(|(name, _)| !name.is_empty())
        .map(|(name, (bytes, count))| (name, bytes, count))
        .collect();
    files.sort_by_key(|file| std::cmp::Reverse(file.1));
    files
}
