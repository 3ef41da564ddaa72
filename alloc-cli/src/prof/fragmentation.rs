//! `prof fragmentation`: memory that is held and not used, inside blocks and between them; a map of slabs
//! and extents over time, and who keeps nearly empty slabs.
use std::collections::{BTreeMap, HashMap};

use serde_json::json;
use thermalloc_prof_format::{Block, Extent, extent_state};

use super::Output;
use super::analysis::{Analysis, Sum, sorted};
use super::profile::{Snapshot, float};
use super::report::head;
use super::rss::{Pages, internal_share, resident};
use super::svg::{Frame, Svg};
use super::table::{Table, bytes, count, percent, size, span};
use crate::failure::Failure;

/// A slab with less than this share of its slots in use is nearly empty.
const NEARLY_EMPTY: f64 = 0.25;
/// Snapshots in the picture.
const MOST_ROWS: usize = 12;
/// Cells of a row of the map.
const CELLS: usize = 240;

#[derive(Clone, Copy, Debug, Default)]
struct Class {
    slabs: u64,
    bytes: u64,
    slots: u64,
    used: u64,
    nearly_empty: u64,
    nearly_empty_bytes: u64,
}

fn classes(s: &Snapshot) -> BTreeMap<u32, Class> {
    let mut classes: BTreeMap<u32, Class> = BTreeMap::new();
    for e in s.extents.iter().filter(|e| e.state == extent_state::SLAB) {
        let class = classes.entry(e.class_bytes).or_default();
        class.slabs += 1;
        class.bytes += e.bytes;
        class.slots += u64::from(e.slots);
        class.used += u64::from(e.used);
        if is_nearly_empty(e) {
            class.nearly_empty += 1;
            class.nearly_empty_bytes += e.bytes;
        }
    }
    classes
}

fn is_nearly_empty(e: &Extent) -> bool {
    e.state == extent_state::SLAB
        && e.used > 0
        && f64::from(e.used) < NEARLY_EMPTY * f64::from(e.slots.max(1))
}

/// Who may hold the slots of a class's nearly empty slabs: the sites whose blocks of the class live
/// longest. A sampled block lies in pages of its own, so what it says of its class is by its like.
fn pinned_by(s: &Snapshot, class_bytes: u32) -> Vec<(u32, Sum)> {
    let mut sites: HashMap<u32, Sum> = HashMap::new();
    let of_class = |block: &&Block| block.usable == u64::from(class_bytes);
    for block in s.live.iter().filter(of_class) {
        sites.entry(block.site).or_default().add(block);
    }
    sorted(sites)
}

pub(crate) fn report(all: &[Analysis], top: usize) -> Result<Output, Failure> {
    let a = all.last().ok_or_else(|| Failure::usage("no profile"))?;
    let fullest = a
        .profile
        .snapshots
        .iter()
        .filter(|s| !s.extents.is_empty())
        .max_by_key(|s| s.stat("active_bytes"));
    let s = match fullest {
        Some(s) => s,
        None => a.profile.last()?,
    };
    let pages = Pages::of(s);
    let share = internal_share(s);
    let active = float(s.stat("active_bytes"));
    let mut text = head(&a.profile, &format!("dump {} ({})", s.number, s.reason));
    text += &format!(
        "within blocks: {} ({:.1} % of what they got was not asked for)\n",
        bytes(pages.internal),
        share * 100.0
    );
    text += &format!(
        "between blocks, in active slabs: {} free, {} in caches ({} of active {})\n",
        bytes(pages.external),
        bytes(pages.cached),
        percent(pages.external + pages.cached, active),
        bytes(active)
    );
    text += &format!("between extents: {} free with memory behind it\n\n", bytes(pages.dirty));
    let classes = classes(s);
    let mut rows: Vec<(u32, Class)> = classes.into_iter().collect();
    let waste = |class: &Class| class.bytes - class.bytes * class.used / class.slots.max(1);
    rows.sort_by_key(|(_, class)| std::cmp::Reverse(waste(class)));
    let mut table = Table::new(&[
        ">class",
        ">slabs",
        ">pages",
        ">used",
        ">free",
        ">nearly empty",
        "held by (blocks that they stand for)",
    ]);
    for (bytes, class) in rows.iter().take(top) {
        let holders: Vec<String> = pinned_by(s, *bytes)
            .iter()
            .take(2)
            .map(|(site, sum)| format!("{} ({})", a.line(*site, 2), count(sum.blocks)))
            .collect();
        table.row([
            size((*bytes).into()),
            class.slabs.to_string(),
            size(class.bytes),
            percent(float(class.used), float(class.slots)),
            size(waste(class)),
            format!("{} ({})", class.nearly_empty, size(class.nearly_empty_bytes)),
            holders.join("; "),
        ]);
    }
    text += &table.text();
    let json = json!({
        "internal_bytes": pages.internal, "internal_share": share,
        "external_bytes": pages.external, "cached_bytes": pages.cached,
        "dirty_bytes": pages.dirty, "active_bytes": active,
        "classes": rows.iter().map(|(bytes, c)| json!({
            "class_bytes": bytes, "slabs": c.slabs, "bytes": c.bytes, "slots": c.slots, "used": c.used,
            "nearly_empty_slabs": c.nearly_empty, "free_bytes": waste(c),
            "held_by": pinned_by(s, *bytes).iter().take(5).map(|(site, sum)| json!({ "stack": a.names(*site), "blocks": sum.blocks })).collect::<Vec<_>>(),
        })).collect::<Vec<_>>(),
    });
    Ok(Output { text, json, picture: Some(draw(all, s, a)) })
}

fn colour(e: &Extent) -> String {
    match e.state {
        extent_state::SLAB => {
            let used = f64::from(e.used) / f64::from(e.slots.max(1));
            // From yellow, nearly empty, to blue, full.
            let mix = |from: f64, to: f64| super::profile::whole(from + (to - from) * used);
            format!("#{:02x}{:02x}{:02x}", mix(240.0, 0.0), mix(200.0, 90.0), mix(60.0, 170.0))
        }
        extent_state::BLOCK | extent_state::LARGE => "#009e73".to_owned(),
        extent_state::SAMPLED => "#006048".to_owned(),
        extent_state::DIRTY => "#d55e00".to_owned(),
        _ => "#f4f4f4".to_owned(),
    }
}

/// Each dump a row: the window of addresses from its first page to its last, in cells that have the
/// colour of what fills most of them.
fn draw(all: &[Analysis], chosen: &Snapshot, of: &Analysis) -> String {
    let mut dumps: Vec<(f64, &Snapshot)> = all
        .iter()
        .flat_map(|a| a.profile.snapshots.iter().map(|s| (a.profile.seconds(s.time_ns), s)))
        .filter(|(_, s)| !s.extents.is_empty())
        .collect();
    if dumps.len() > MOST_ROWS {
        let every = dumps.len().div_ceil(MOST_ROWS);
        dumps = dumps.into_iter().step_by(every).collect();
    }
    if dumps.is_empty() {
        dumps.push((of.profile.seconds(chosen.time_ns), chosen));
    }
    let axis = Axis::of(dumps.iter().flat_map(|(_, s)| &s.extents));
    #[allow(clippy::cast_precision_loss, reason = "a dozen rows")]
    let height = 90.0 + dumps.len() as f64 * 34.0;
    let mut svg = Svg::new(1100.0, height, "Slabs and extents by address, a row a dump");
    let frame = Frame { left: 110.0, top: 50.0, width: 970.0, height: 0.0 };
    let mut x = 110.0;
    for (name, colour) in [
        ("slab, full", "#005aaa"),
        ("slab, nearly empty", "#f0c83c"),
        ("block or large", "#009e73"),
        ("sampled block", "#006048"),
        ("free, resident", "#d55e00"),
        ("no memory", "#f4f4f4"),
    ] {
        svg.rect([x, 30.0, 12.0, 12.0], colour, name);
        svg.text(x + 16.0, 40.0, "start", 11, name);
        x += 150.0;
    }
    for (row, (seconds, s)) in dumps.iter().enumerate() {
        #[allow(clippy::cast_precision_loss, reason = "a dozen rows")]
        let y = frame.top + row as f64 * 34.0 + 4.0;
        svg.text(100.0, y + 18.0, "end", 11, &format!("{} {}", span(*seconds), s.reason));
        for (cell, (e, resident)) in cells(s, &axis).into_iter().enumerate() {
            let Some(e) = e else { continue };
            #[allow(clippy::cast_precision_loss, reason = "a few hundred cells")]
            let at = cell as f64 / CELLS as f64;
            let name = extent_state::name(e.state);
            let title = if e.state == extent_state::SLAB {
                format!(
                    "slab of {}: {} of {} used; {} resident here",
                    size(e.class_bytes.into()),
                    e.used,
                    e.slots,
                    bytes(resident)
                )
            } else {
                format!("{name}: {} resident here", bytes(resident))
            };
            let width = frame.width / 240.0;
            svg.rect([frame.x(at), y, width, 26.0], &colour(&e), &title);
        }
    }
    svg.finish()
}

/// Addresses without the gaps: each explicit arena lies far from the others.
struct Axis {
    /// Where a part begins and ends, and how much lies before it.
    parts: Vec<(u64, u64, u64)>,
}

impl Axis {
    fn of<'a>(extents: impl Iterator<Item = &'a Extent>) -> Self {
        let mut ranges: Vec<(u64, u64)> =
            extents.map(|e| (e.address, e.address + e.bytes)).collect();
        ranges.sort_unstable();
        let mut parts: Vec<(u64, u64, u64)> = Vec::new();
        for (begin, end) in ranges {
            match parts.last_mut() {
                Some(last) if begin <= last.1 => last.1 = last.1.max(end),
                last => {
                    let before = last.map_or(0, |(begin, end, before)| *before + *end - *begin);
                    parts.push((begin, end, before));
                }
            }
        }
        Self { parts }
    }

    fn length(&self) -> u64 {
        self.parts.last().map_or(1, |(begin, end, before)| before + end - begin)
    }

    fn at(&self, address: u64) -> u64 {
        let after = self.parts.partition_point(|part| part.0 <= address);
        let part = after.checked_sub(1).and_then(|at| self.parts.get(at));
        part.map_or(0, |(begin, _, before)| before + address - begin)
    }
}

/// By cell: the extent that has most of it, and the bytes with memory behind them.
fn cells(s: &Snapshot, axis: &Axis) -> Vec<(Option<Extent>, f64)> {
    let wide = (axis.length() / CELLS as u64).max(1);
    let mut cells: Vec<(Option<Extent>, u64, f64)> = vec![(None, 0, 0.0); CELLS];
    for e in &s.extents {
        let mut at = axis.at(e.address);
        let stop = at + e.bytes;
        while at < stop {
            let cell = at / wide;
            let next = ((cell + 1) * wide).min(stop);
            let index = usize::try_from(cell).unwrap_or(0).min(CELLS - 1);
            let part = next - at;
            let (holder, most, sum) = &mut cells[index];
            *sum += resident(e) * float(part) / float(e.bytes.max(1));
            if part > *most {
                (*holder, *most) = (Some(*e), part);
            }
            at = next;
        }
    }
    cells.into_iter().map(|(holder, _, sum)| (holder, sum)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn far_windows_are_drawn_side_by_side() {
        let extent = |address, bytes| Extent { address, bytes, ..Extent::default() };
        let extents = [extent(1 << 40, 300), extent(100, 50), extent(150, 50), extent(100, 50)];
        let axis = Axis::of(extents.iter());
        assert_eq!(axis.length(), 400);
        let at = [100, 150, 199, 1 << 40, (1 << 40) + 299].map(|address| axis.at(address));
        assert_eq!(at, [0, 50, 99, 100, 399]);
        let s = Snapshot { extents: extents.to_vec(), ..Snapshot::default() };
        assert!(cells(&s, &axis).iter().all(|(holder, _)| holder.is_some()), "no gap");
        assert_eq!(Axis::of([].into_iter()).length(), 1);
    }
}
