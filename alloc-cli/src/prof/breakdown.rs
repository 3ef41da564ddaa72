//! `prof breakdown`: what a model needs, from one step of a run: weights, gradients, state of the optimizer,
//! activations, scratch memory. And `prof capacity`: how many sequences fit.
use std::collections::{BTreeMap, HashMap};

use serde_json::json;
use thermalloc_prof_format::{Block, component};

use super::Output;
use super::analysis::{Analysis, At, Sum, name_of};
use super::classes::{By, Moment};
use super::profile::{Event, float};
use super::report::head;
use super::table::{Table, bytes, percent, size};
use super::timeline::points;
use crate::failure::Failure;

/// Kept from step to step.
const KEPT: [u8; 4] =
    [component::WEIGHTS, component::OPTIMIZER, component::KV_CACHE, component::PYTHON];

/// The greatest amount of each component at one time, with what of the weights is told by age.
pub(crate) fn peaks(a: &Analysis) -> Result<Vec<(u8, f64, Sum)>, Failure> {
    let instant = a.at(At::Peak)?;
    let at_peak = a.by_component(&instant);
    let points = points(a, 2000);
    let mut rows: Vec<(u8, f64, Sum)> = Vec::new();
    for number in (1..component::NAMES.len()).filter_map(|number| u8::try_from(number).ok()) {
        let of = |sum: &(u8, Sum, _)| sum.0 == number;
        let sum = at_peak.iter().find(|row| of(row)).map_or(Sum::default(), |row| row.1);
        let most = points.iter().map(|p| p.by_component[usize::from(number)]).fold(0.0, f64::max);
        if sum.bytes > 0.0 || most > 0.0 {
            rows.push((number, most, sum));
        }
    }
    Ok(rows)
}

/// What of each component is allocated in a step: the mean of whole steps, since a median of samples would be biased. Nothing where no steps are known.
fn made_in_a_step(a: &Analysis) -> Option<[f64; component::NAMES.len()]> {
    let mut steps: BTreeMap<u64, [f64; component::NAMES.len()]> = BTreeMap::new();
    for event in &a.profile.events {
        if let Event::Alloc(block) = event
            && block.step > 0
        {
            let component = usize::from(a.component(block, Moment::of_block(block)).0);
            steps.entry(block.step).or_default()[component] += block.weight * float(block.size);
        }
    }
    // The first has what is made once, the last may have been cut.
    steps.pop_first();
    steps.pop_last();
    let steps: Vec<_> = steps.into_values().collect();
    (!steps.is_empty()).then(|| {
        let all = float(steps.len() as u64);
        std::array::from_fn(|component| steps.iter().map(|step| step[component]).sum::<f64>() / all)
    })
}

/// A block, at how many beginnings of steps it was there, and its bytes summed over them.
struct Seen {
    block: Block,
    /// The beginning before which `bytes` are summed.
    until: u64,
    bytes: f64,
}

impl Seen {
    fn sum_until(&mut self, begun: u64) {
        self.bytes += float(self.block.size) * float(begun - self.until);
        self.until = begun;
    }
}

/// What of each component was live when a step began, on the mean of all steps but the first, before which
/// not all was made. A program that replaces its weights in each step shows a sample of them in each, so
/// their error is much less than at any one moment. Nothing where fewer than two steps are known.
fn between_steps(a: &Analysis) -> Option<[Sum; component::NAMES.len()]> {
    let mut live: HashMap<u64, Seen> = HashMap::new();
    let mut gone: Vec<Seen> = Vec::new();
    let (mut step, mut begun) = (0, 0);
    for event in &a.profile.events {
        let present = match event {
            Event::Alloc(block) => block.step,
            Event::Step(event) => event.step,
            _ => 0,
        };
        if present > step {
            begun += u64::from(step > 0);
            step = present;
        }
        match event {
            Event::Alloc(block) => {
                live.insert(block.serial, Seen { block: *block, until: begun, bytes: 0.0 });
            }
            Event::Free(free) if free.flags & 1 == 0 => {
                if let Some(mut seen) = live.remove(&free.serial).filter(|seen| seen.until < begun)
                {
                    seen.sum_until(begun);
                    gone.push(seen);
                }
            }
            Event::Resize(resize) => {
                if let Some(seen) = live.get_mut(&resize.serial) {
                    seen.sum_until(begun);
                    seen.block.size = resize.size;
                }
            }
            Event::Retag(retag) => {
                if let Some(seen) = live.get_mut(&retag.serial) {
                    seen.block.tag = retag.tag;
                }
            }
            Event::Free(_) | Event::Step(_) => {}
        }
    }
    if begun == 0 {
        return None;
    }
    let mut sums = [Sum::default(); component::NAMES.len()];
    live.values_mut().for_each(|seen| seen.sum_until(begun));
    for seen in live.values().chain(&gone).filter(|seen| seen.bytes > 0.0) {
        let block = &seen.block;
        let component = a.component(block, Moment::of_block(block)).0;
        let sum = &mut sums[usize::from(component)];
        let mean = seen.bytes / float(begun);
        sum.bytes += block.weight * mean;
        sum.variance += block.weight * (block.weight - 1.0) * mean.powi(2);
        sum.samples += 1;
    }
    Some(sums)
}

pub(crate) fn report(a: &Analysis) -> Result<Output, Failure> {
    let rows = peaks(a)?;
    let between = between_steps(a);
    let between = |component: u8| between.as_ref().map(|sums| sums[usize::from(component)]);
    let made = made_in_a_step(a);
    let made = |component: u8| made.as_ref().map(|made| made[usize::from(component)]);
    let instant = a.at(At::Peak)?;
    let total: f64 = rows.iter().map(|(_, _, sum)| sum.bytes).sum();
    // What is kept is told best by many steps, the rest by the peak.
    let needed = |component: u8, sum: &Sum| match between(component) {
        Some(mean) if KEPT.contains(&component) => mean.bytes,
        _ => sum.bytes,
    };
    let of_weights = |(c, _, sum): &(u8, f64, Sum)| {
        if *c == component::WEIGHTS { needed(*c, sum) } else { 0.0 }
    };
    let weights: f64 = rows.iter().map(of_weights).sum();
    let mut text = head(&a.profile, &instant.what);
    text += "\n";
    let mut table = Table::new(&[
        "component",
        ">at the peak",
        ">share",
        ">between steps",
        ">times weights",
        ">most ever",
        ">made in a step",
        "kept",
    ]);
    for (component, most, sum) in &rows {
        table.row([
            name_of(*component).to_owned(),
            sum.text(),
            percent(sum.bytes, total),
            between(*component).map_or("-".to_owned(), |mean| mean.text()),
            if weights > 0.0 {
                format!("{:.2}", needed(*component, sum) / weights)
            } else {
                "-".to_owned()
            },
            bytes(*most),
            made(*component).map_or("-".to_owned(), bytes),
            if KEPT.contains(component) { "between steps" } else { "within a step" }.to_owned(),
        ]);
    }
    text += &table.text();
    let named = rows.iter().filter(|(c, ..)| *c != component::OTHER);
    let named: f64 = named.map(|(.., sum)| sum.bytes).sum();
    let guessed: f64 = a
        .by_component(&instant)
        .iter()
        .filter(|(component, ..)| *component == component::FRAMEWORK)
        .filter_map(|(.., by)| by.get(&By::Guess))
        .sum();
    text += &format!(
        "\nin all {}; with a component {}, without what is framework by guess {}\n",
        bytes(total),
        percent(named, total),
        percent(named - guessed, total)
    );
    let json = json!({
        "moment": instant.what, "bytes": total, "known_bytes": named - guessed,
        "components": rows.iter().map(|(c, most, sum)| json!({
            "component": name_of(*c), "bytes": sum.bytes, "error_bytes": sum.error(),
            "between_steps_bytes": between(*c).map(|mean| mean.bytes),
            "between_steps_error_bytes": between(*c).map(|mean| mean.error()),
            "most_bytes": most, "made_in_a_step_bytes": made(*c), "kept": KEPT.contains(c),
        })).collect::<Vec<_>>(),
    });
    Ok(Output { text, json, picture: None })
}

/// What a batch needs: what is kept, what each sequence adds.
pub(crate) fn capacity(a: &Analysis, sequences: u64, limit_bytes: u64) -> Result<Output, Failure> {
    let rows = peaks(a)?;
    let of = |wanted: &[u8]| -> f64 {
        rows.iter().filter(|(c, ..)| wanted.contains(c)).map(|(.., sum)| sum.bytes).sum()
    };
    let all: f64 = rows.iter().map(|(.., sum)| sum.bytes).sum();
    let cache = of(&[component::KV_CACHE]);
    let per_step = of(&[
        component::ACTIVATIONS,
        component::WORKSPACE,
        component::GRADIENTS,
        component::LOADER,
    ]);
    let fixed = all - cache - per_step;
    if cache + per_step <= 0.0 {
        return Err(Failure::cannot_run(
            "profile",
            "no block of it is a KV cache, an activation or scratch memory",
            "open a scope kv_cache around what keeps the cache",
        ));
    }
    let each = (cache + per_step) / float(sequences.max(1));
    let fit = ((float(limit_bytes) - fixed) / each).floor().max(0.0);
    let mut text = head(&a.profile, &a.at(At::Peak)?.what);
    text += &format!("measured with {sequences} sequences at a time\n\n");
    let mut table = Table::new(&[">bytes", "what"]);
    for (sum, what) in [
        (fixed, "whatever the number of sequences"),
        (cache / float(sequences.max(1)), "KV cache of a sequence"),
        (per_step / float(sequences.max(1)), "activations and scratch memory of a sequence"),
    ] {
        table.row([bytes(sum), what.to_owned()]);
    }
    text += &table.text();
    text += &format!("\nin {} fit {fit:.0} sequences\n", size(limit_bytes));
    let json = json!({
        "sequences": sequences, "fixed_bytes": fixed,
        "kv_cache_bytes_per_sequence": cache / float(sequences.max(1)),
        "step_bytes_per_sequence": per_step / float(sequences.max(1)),
        "limit_bytes": limit_bytes, "sequences_that_fit": fit,
    });
    Ok(Output { text, json, picture: None })
}

#[cfg(test)]
mod tests {
    use thermalloc_prof_format::{Free, Resize, source};

    use super::super::profile::{Profile, Tag};
    use super::super::symbols::Symbols;
    use super::*;

    /// Steps of 10 ms from 10 ms on. One block of weights of 1000 bytes stays; another of 600 is replaced in
    /// the middle of each step by one that has the chance of one in 4 to be seen, which is each fourth; 70
    /// are made and freed within each step; a third block of weights grows in step 3 from 100 to 200.
    fn analysis(steps: u64) -> Analysis {
        let mut profile = Profile { pid: 1, ..Profile::default() };
        let name = "weights".to_owned();
        let (component, source) = (component::WEIGHTS, source::SCOPE);
        profile.tags.insert(1, Tag { name, component, source, ..Tag::default() });
        let mut serial = 0;
        let mut events = Vec::new();
        let mut alloc = |size, time_ns, step, weight| {
            serial += 1;
            let block = Block { serial, time_ns, tag: 1, size, step, weight, ..Block::default() };
            (serial, Event::Alloc(block))
        };
        let free = |serial, time_ns| Event::Free(Free { serial, time_ns, ..Free::default() });
        events.push(alloc(1000, 1, 0, 1.0).1);
        let (growing, event) = alloc(100, 2, 0, 1.0);
        events.push(event);
        let mut before = None;
        for step in 1..=steps {
            let at = step * 10;
            let (passing, event) = alloc(70, at, step, 1.0);
            events.push(event);
            if step == 3 {
                events.push(Event::Resize(Resize {
                    serial: growing,
                    time_ns: at + 1,
                    size: 200,
                    ..Resize::default()
                }));
            }
            let replaced = (step % 4 == 0).then(|| alloc(600, at + 5, step, 4.0));
            if let Some(serial) = std::mem::replace(&mut before, replaced.as_ref().map(|r| r.0)) {
                events.push(free(serial, at + 5));
            }
            events.extend(replaced.map(|(_, event)| event));
            events.push(free(passing, at + 6));
        }
        profile.events = events;
        Analysis::with(profile, Symbols::default())
    }

    #[test]
    fn what_is_replaced_in_each_step_is_known_by_their_mean() {
        let a = analysis(401);
        let sums = between_steps(&a).unwrap();
        let weights = sums[usize::from(component::WEIGHTS)];
        // 400 beginnings but the first; at two of them the third had 100 bytes.
        let exact = 1000.0 + 600.0 + (200.0 * 398.0 + 100.0 * 2.0) / 400.0;
        assert!((weights.bytes - exact).abs() < 1e-6, "{} of {exact}", weights.bytes);
        // A hundred samples that stand for four each, each there at one beginning of 400.
        let error = (100.0 * 4.0 * 3.0 * (600.0f64 / 400.0).powi(2)).sqrt();
        assert!((weights.error() - error).abs() < 1e-6, "{} of {error}", weights.error());
    }

    #[test]
    fn one_step_has_nothing_between() {
        assert!(between_steps(&analysis(1)).is_none());
        let two = between_steps(&analysis(2)).unwrap();
        assert_eq!(two[usize::from(component::WEIGHTS)].bytes, 1100.0);
    }
}
