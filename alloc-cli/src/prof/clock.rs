//! Steps of a program that counts none itself. A step of training or inference allocates the same tensors as
//! the one before, so an operator's large outputs are a clock: of all operators of TensorFlow that come again
//! and again, the one whose number of times is the usual one, weighted by bytes.
use std::collections::HashMap;

use thermalloc_prof_format::{Block, source};

use super::profile::{Event, Profile};

/// What comes less often is no step.
const FEWEST: u64 = 4;

/// Numbers the steps in a log whose blocks have none. Steps are from 1; what comes before, while the
/// model is made, has none.
pub(crate) fn count_steps(profile: &mut Profile) {
    let counted = profile.events.iter().any(|event| match event {
        Event::Alloc(block) => block.step > 0,
        Event::Step(_) => true,
        _ => false,
    });
    if counted || profile.snapshots.iter().any(|s| s.step > 0) {
        return;
    }
    let Some(ticks) = ticks(profile) else { return };
    let at = |time_ns: u64| ticks.partition_point(|&tick| tick <= time_ns) as u64;
    for event in &mut profile.events {
        if let Event::Alloc(block) = event {
            block.step = at(block.time_ns);
        }
    }
    for snapshot in &mut profile.snapshots {
        snapshot.step = at(snapshot.time_ns);
        snapshot.live.iter_mut().for_each(|block| block.step = at(block.time_ns));
    }
    profile.steps_counted = true;
}

/// When the operator that is the clock allocated, in order.
fn ticks(profile: &Profile) -> Option<Vec<u64>> {
    let mut by_operator: HashMap<(u32, u32), (u64, u64)> = HashMap::new();
    for block in outputs(profile) {
        let (count, bytes) = by_operator.entry((block.tag, block.site)).or_default();
        *count += 1;
        *bytes += block.size;
    }
    let mut recurring: Vec<((u32, u32), (u64, u64))> =
        by_operator.into_iter().filter(|(_, (count, _))| *count >= FEWEST).collect();
    recurring.sort_by_key(|&(operator, (count, bytes))| (count, bytes, operator));
    let half = recurring.iter().map(|(_, (_, bytes))| bytes).sum::<u64>() / 2;
    let mut below = 0;
    let usual = recurring.iter().find(|(_, (_, bytes))| {
        below += bytes;
        below > half
    })?;
    let count = usual.1.0;
    // Of those with that count, the one with most bytes.
    let clock = recurring.iter().rev().find(|(_, (c, _))| *c == count)?.0;
    let ticks = outputs(profile).filter(|block| (block.tag, block.site) == clock);
    Some(ticks.map(|block| block.time_ns).collect())
}

/// Blocks that stand for themselves only, of which no time is missed.
fn outputs(profile: &Profile) -> impl Iterator<Item = &Block> {
    profile.events.iter().filter_map(|event| match event {
        Event::Alloc(block) if block.weight <= 1.0 => {
            let tag = profile.tags.get(&block.tag)?;
            let output = tag.source == source::TENSORFLOW && tag.region == "output";
            output.then_some(block)
        }
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::super::profile::Tag;
    use super::*;

    fn profile(blocks: &[(u64, u32, u64)]) -> Profile {
        let mut profile = Profile::default();
        let tag = |name: &str, region: &str| Tag {
            source: source::TENSORFLOW,
            name: name.to_owned(),
            region: region.to_owned(),
            ..Tag::default()
        };
        profile.tags.insert(1, tag("MatMul", "output"));
        profile.tags.insert(2, tag("while/MatMul", "output"));
        profile.tags.insert(3, tag("MatMul", "temp"));
        profile.events = blocks
            .iter()
            .map(|&(time_ns, tag, size)| {
                Event::Alloc(Block { time_ns, tag, size, weight: 1.0, ..Block::default() })
            })
            .collect();
        profile
    }

    #[test]
    fn the_operator_that_passes_most_bytes_counts() {
        let mut blocks = vec![(1, 3, 1 << 30)];
        for step in 1..=6 {
            blocks.push((step * 100, 1, 50 << 20));
            blocks.extend((1..=4).map(|i| (step * 100 + i, 2, 2 << 20)));
            blocks.push((step * 100 + 9, 3, 60 << 20));
        }
        let mut profile = profile(&blocks);
        count_steps(&mut profile);
        let steps = profile.events.iter().map(|event| match event {
            Event::Alloc(block) => (block.time_ns, block.step),
            _ => unreachable!("only blocks"),
        });
        for (time_ns, step) in steps {
            assert_eq!(step, time_ns / 100, "{time_ns}");
        }
        assert!(profile.steps_counted);
    }

    #[test]
    fn steps_of_the_programs_own_and_single_events_are_left_alone() {
        let mut own = profile(&[(100, 1, 1 << 20); 8]);
        if let Some(Event::Alloc(block)) = own.events.first_mut() {
            block.step = 7;
        }
        let mut few = profile(&[(100, 1, 1 << 20); 3]);
        for profile in [&mut own, &mut few] {
            count_steps(profile);
            assert!(!profile.steps_counted);
        }
    }
}
