//! `prof breakdown`: what a model needs, from one step of a run: weights, gradients, state of the optimizer,
//! activations, scratch memory. And `prof capacity`: how many sequences fit.
use std::collections::BTreeMap;

use serde_json::json;
use thermalloc_prof_format::component;

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

pub(crate) fn report(a: &Analysis) -> Result<Output, Failure> {
    let rows = peaks(a)?;
    let made = made_in_a_step(a);
    let made = |component: u8| made.as_ref().map(|made| made[usize::from(component)]);
    let instant = a.at(At::Peak)?;
    let total: f64 = rows.iter().map(|(_, _, sum)| sum.bytes).sum();
    let weights: f64 =
        rows.iter().filter(|(c, ..)| *c == component::WEIGHTS).map(|(.., sum)| sum.bytes).sum();
    let mut text = head(&a.profile, &instant.what);
    text += "\n";
    let mut table = Table::new(&[
        "component",
        ">at the peak",
        ">share",
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
            if weights > 0.0 { format!("{:.2}", sum.bytes / weights) } else { "-".to_owned() },
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
