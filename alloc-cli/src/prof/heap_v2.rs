//! jemalloc's `heap_v2` text, which jeprof reads: the plain counts of what was recorded, from which the reader
//! estimates by the period.
use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::analysis::{Analysis, Instance};
use super::profile::whole;

/// The dump of a moment. jeprof's formula has one period for all; blocks of another weight are entered as
/// so many that the formula finds what they stand for.
pub(crate) fn write(a: &Analysis, instant: &Instance) -> String {
    // Weights are fixed here, so that a period that changed, and large blocks, are told rightly.
    let mut sites: BTreeMap<u32, [f64; 4]> = BTreeMap::new();
    for block in &instant.live {
        let row = sites.entry(block.site).or_default();
        row[0] += block.weight;
        row[1] += block.weight * super::profile::float(block.size);
    }
    for totals in a.profile.snapshots.last().map_or(&[][..], |last| &last.totals) {
        let row = sites.entry(totals.site).or_default();
        row[2] += totals.weighted_all_blocks;
        row[3] += totals.weighted_all_bytes;
    }
    let mut all = [0.0; 4];
    for row in sites.values() {
        all.iter_mut().zip(row).for_each(|(sum, part)| *sum += part);
    }
    // A period of 1 makes the reader's correction nothing.
    let mut text = format!("heap_v2/1\n  t*: {}\n", figures(&all));
    for (site, row) in &sites {
        text.push('@');
        for (frame, _) in a.places(*site) {
            let _ = write!(text, " {frame:#x}");
        }
        let _ = write!(text, "\n  t*: {}\n", figures(row));
    }
    text.push_str("\nMAPPED_LIBRARIES:\n");
    for m in &a.profile.mappings {
        let flag = |bit: u32, letter| if m.flags & bit == 0 { '-' } else { letter };
        let flags: String = [flag(1, 'r'), flag(2, 'w'), flag(4, 'x'), 'p'].into_iter().collect();
        let _ = writeln!(
            text,
            "{:x}-{:x} {flags} {:08x} 00:00 0 {:>26}{}",
            m.start, m.end, m.offset, "", m.path
        );
    }
    text
}

fn figures(row: &[f64; 4]) -> String {
    let [live, live_bytes, all, all_bytes] = row.map(whole);
    format!("{live}: {live_bytes} [{all}: {all_bytes}]")
}
