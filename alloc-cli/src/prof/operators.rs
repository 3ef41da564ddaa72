//! `prof operators`: memory by operator of TensorFlow, or by scope and layer, and by step: what each holds, makes
//! and how long it keeps it. Of a log, since a dump says what is there and not what came and went.
use std::collections::{BTreeMap, BTreeSet, HashMap};

use clap::Args;
use serde_json::{Value, json};
use thermalloc_prof_format::{Block, component};

use super::Output;
use super::analysis::{Analysis, At, Instance, Sum, name_of};
use super::classes::Moment;
use super::profile::{Event, float};
use super::report::head;
use super::table::{Table, bytes, count, percent, span};
use crate::failure::Failure;

/// What is asked about.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct Choice {
    /// Only operators and scopes whose name has this in it
    #[arg(long, value_name = "TEXT")]
    name: Option<String>,

    /// One step: what each made in it, and what of each was live when most was
    #[arg(long, value_name = "N")]
    step: Option<u64>,

    /// Also what each made in each of the last N whole steps
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "step")]
    last: usize,

    /// Join operators whose names differ in numbers only: those of a model's layers
    #[arg(long)]
    join_layers: bool,
}

/// An operator or scope, or several that are joined.
#[derive(Debug, Default)]
struct Operator {
    name: String,
    tags: usize,
    at_peak: Sum,
    now: f64,
    most: f64,
    made: BTreeMap<u64, Sum>,
    lived: Vec<Lived>,
    freed_blocks: f64,
    live_blocks: f64,
    by_component: [f64; component::NAMES.len()],
}

/// How long a freed block lived, and how many it stands for.
#[derive(Clone, Copy, Debug)]
struct Lived {
    seconds: f64,
    steps: u64,
    blocks: f64,
}

impl Lived {
    fn text(&self) -> String {
        match self.steps {
            0 => span(self.seconds),
            1 => "1 step".to_owned(),
            steps => format!("{steps} steps"),
        }
    }
}

impl Operator {
    fn component(&self) -> &'static str {
        let most = self.by_component.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
        most.map_or("other", |(number, _)| name_of(u8::try_from(number).unwrap_or(0)))
    }

    /// The mean of whole steps; nothing where there are none.
    fn made_in_a_step(&self, whole: &[u64]) -> Option<f64> {
        let made = whole.iter().filter_map(|step| self.made.get(step)).map(|sum| sum.bytes);
        (!whole.is_empty()).then(|| made.sum::<f64>() / float(whole.len() as u64))
    }

    /// The median of what was freed; nothing where most of it is there to the end.
    fn kept(&self) -> Option<&Lived> {
        let mut below = 0.0;
        let middle = self.lived.iter().find(|lived| {
            below += lived.blocks;
            2.0 * below >= self.freed_blocks
        });
        middle.filter(|_| self.freed_blocks >= self.live_blocks)
    }
}

/// All of a log by operator. The first has what is no operator's.
struct Operators {
    all: Vec<Operator>,
    by_tag: HashMap<u32, usize>,
    /// Steps of which the beginning and the end are known.
    whole: Vec<u64>,
    steps: BTreeSet<u64>,
}

impl Operators {
    fn of(a: &Analysis, choice: &Choice) -> Self {
        let mut operators = Self {
            all: vec![Operator::default()],
            by_tag: HashMap::from([(0, 0)]),
            whole: Vec::new(),
            steps: BTreeSet::new(),
        };
        let mut by_name: HashMap<String, usize> = HashMap::new();
        let mut tags: Vec<u32> = a.profile.tags.keys().copied().collect();
        tags.sort_unstable();
        for tag in tags {
            let name = a.tag(tag);
            if choice.name.as_ref().is_some_and(|text| !name.contains(text.as_str())) {
                continue;
            }
            let name = if choice.join_layers { joined(&name) } else { name };
            let number = *by_name.entry(name).or_insert_with_key(|name| {
                operators.all.push(Operator { name: name.clone(), ..Operator::default() });
                operators.all.len() - 1
            });
            operators.by_tag.insert(tag, number);
        }
        operators.follow(a);
        operators
    }

    fn number(&self, tag: u32) -> usize {
        self.by_tag.get(&tag).copied().unwrap_or(0)
    }

    fn follow(&mut self, a: &Analysis) {
        // The block, its operator and its bytes, by serial.
        let mut live: HashMap<u64, (Block, usize, f64)> = HashMap::new();
        let (mut seen, mut step) = (BTreeSet::new(), 0);
        for event in &a.profile.events {
            match event {
                Event::Alloc(b) => {
                    let (number, stands) = (self.number(b.tag), b.weight * float(b.size));
                    let new = seen.insert(b.tag);
                    step = step.max(b.step);
                    let component = usize::from(a.component(b, Moment::of_block(b)).0);
                    let o = &mut self.all[number];
                    o.tags += usize::from(new);
                    o.by_component[component] += stands;
                    if b.step > 0 {
                        self.steps.insert(b.step);
                        o.made.entry(b.step).or_default().add(b);
                    }
                    live.insert(b.serial, (*b, number, 0.0));
                    self.moved(&mut live, b.serial, number, stands);
                }
                Event::Free(f) if f.flags & 1 == 0 => {
                    if let Some((b, number, stood)) = live.remove(&f.serial) {
                        let o = &mut self.all[number];
                        o.now -= stood;
                        let seconds = float(f.time_ns.saturating_sub(b.time_ns)) / 1e9;
                        let steps = step.saturating_sub(b.step);
                        o.lived.push(Lived { seconds, steps, blocks: b.weight });
                        o.freed_blocks += b.weight;
                    }
                }
                Event::Resize(r) => {
                    if let Some(&(b, number, _)) = live.get(&r.serial) {
                        self.moved(&mut live, r.serial, number, b.weight * float(r.size));
                    }
                }
                Event::Retag(r) => {
                    if let Some(&(.., stood)) = live.get(&r.serial) {
                        let number = self.number(r.tag);
                        self.moved(&mut live, r.serial, number, stood);
                    }
                }
                Event::Step(s) => step = s.step,
                Event::Free(_) => {}
            }
        }
        for (b, number, _) in live.values() {
            self.all[*number].live_blocks += b.weight;
        }
        self.all.iter_mut().for_each(|o| o.lived.sort_by(|a, b| a.seconds.total_cmp(&b.seconds)));
        // The first has what is made once, the last may have been cut.
        let steps = self.steps.iter().copied().skip(1);
        self.whole = steps.take(self.steps.len().saturating_sub(2)).collect();
    }

    /// A live block is of operator `to` now, and stands for so many bytes.
    fn moved(
        &mut self,
        live: &mut HashMap<u64, (Block, usize, f64)>,
        serial: u64,
        to: usize,
        stands: f64,
    ) {
        let Some((_, number, stood)) = live.get_mut(&serial) else { return };
        self.all[*number].now -= *stood;
        let o = &mut self.all[to];
        o.now += stands;
        o.most = o.most.max(o.now);
        (*number, *stood) = (to, stands);
    }

    /// Sums of live blocks by operator.
    fn sums(&self, instant: &Instance) -> Vec<Sum> {
        let mut sums = vec![Sum::default(); self.all.len()];
        instant.live.iter().for_each(|block| sums[self.number(block.tag)].add(block));
        sums
    }

    fn steps_known(&self) -> String {
        match (self.steps.first(), self.steps.last()) {
            (Some(first), Some(last)) => format!("its steps are {first} to {last}"),
            _ => "no steps are known".to_owned(),
        }
    }
}

pub(crate) fn report(a: &Analysis, choice: &Choice, top: usize) -> Result<Output, Failure> {
    if a.profile.events.is_empty() {
        return Err(Failure::cannot_run(
            "profile",
            "no events in it: a dump says what is live, not what came and went",
            "take a log, as 'thermalloc prof run' writes it; 'thermalloc prof report' has a dump's operators",
        ));
    }
    let operators = Operators::of(a, choice);
    if operators.all.iter().skip(1).all(|o| o.tags == 0) {
        let (why, hint) = match &choice.name {
            Some(text) => (
                format!("no operator or scope with \"{text}\" in its name"),
                "leave out --name to see all",
            ),
            None => (
                "no operator and no scope in it".to_owned(),
                "TensorFlow names its operators; else open scopes (thermalloc_scope_push)",
            ),
        };
        return Err(Failure::cannot_run("profile", why, hint));
    }
    match choice.step {
        Some(step) => of_step(a, operators, step, top),
        None => of_all(a, operators, choice.last, top),
    }
}

fn of_all(
    a: &Analysis,
    mut operators: Operators,
    last: usize,
    top: usize,
) -> Result<Output, Failure> {
    if last > 0 && operators.whole.is_empty() {
        return Err(no_step(format!("no whole step in it: {}", operators.steps_known())));
    }
    let instant = a.at(At::Peak)?;
    let sums = operators.sums(&instant);
    operators.all.iter_mut().zip(sums).for_each(|(o, sum)| o.at_peak = sum);
    let mut text = head(&a.profile, &instant.what);
    let total: f64 = instant.live.iter().map(|b| b.weight * float(b.size)).sum();
    let Operators { all, whole, .. } = &operators;
    text += &match whole.as_slice() {
        [] => "note: no whole step is known: what is made in one is not to be told\n".to_owned(),
        [first, .., last] => format!("means of steps {first} to {last}\n"),
        [only] => format!("of step {only}\n"),
    };
    let mut rows: Vec<&Operator> = all.iter().skip(1).filter(|o| o.tags > 0).collect();
    rows.sort_by(|a, b| {
        let key = |o: &Operator| [o.at_peak.bytes, o.most];
        key(b).partial_cmp(&key(a)).unwrap_or(std::cmp::Ordering::Equal).then(a.name.cmp(&b.name))
    });
    text += "\n";
    let mut table = Table::new(&[
        ">at the peak",
        ">share",
        ">most ever",
        ">made in a step",
        ">kept",
        "component",
        "operator or scope",
    ]);
    for o in rows.iter().take(top) {
        table.row([
            o.at_peak.text(),
            percent(o.at_peak.bytes, total),
            bytes(o.most),
            o.made_in_a_step(whole).map_or("-".to_owned(), bytes),
            o.kept().map_or("to the end".to_owned(), Lived::text),
            o.component().to_owned(),
            named(o),
        ]);
    }
    text += &table.text();
    let these: f64 = rows.iter().map(|o| o.at_peak.bytes).sum();
    text +=
        &format!("\nin all {}, of which {} are not of these\n", bytes(total), bytes(total - these));
    let columns = &whole[whole.len().saturating_sub(last)..];
    if !columns.is_empty() {
        text += &format!("\nmade in each step\n{}", matrix(&rows, columns, top));
    }
    let json = json!({
        "moment": instant.what, "bytes": total, "not_of_these_bytes": total - these, "whole_steps": whole,
        "operators": rows.iter().map(|o| json!({
            "name": o.name, "operators": o.tags, "component": o.component(),
            "peak_bytes": o.at_peak.bytes, "error_bytes": o.at_peak.error(), "most_bytes": o.most,
            "made_in_a_step_bytes": o.made_in_a_step(whole), "kept_seconds": o.kept().map(|lived| lived.seconds),
            "kept_steps": o.kept().map(|lived| lived.steps),
            "live_blocks": o.live_blocks, "freed_blocks": o.freed_blocks,
            "made_bytes_by_step": by_step(o, columns),
        })).collect::<Vec<_>>(),
    });
    Ok(Output { text, json, picture: None })
}

fn by_step(o: &Operator, steps: &[u64]) -> Value {
    let made = |step| o.made.get(step).map_or(0.0, |sum| sum.bytes);
    steps.iter().map(|step| (step.to_string(), json!(made(step)))).collect()
}

fn matrix(rows: &[&Operator], steps: &[u64], top: usize) -> String {
    let mut heads: Vec<String> = steps.iter().map(|step| format!(">step {step}")).collect();
    heads.push("operator or scope".to_owned());
    let mut table = Table::new(&heads.iter().map(String::as_str).collect::<Vec<_>>());
    let mut rows = rows.to_vec();
    let made = |o: &Operator| o.made_in_a_step(steps).unwrap_or(0.0);
    rows.sort_by(|a, b| made(b).total_cmp(&made(a)).then(a.name.cmp(&b.name)));
    for o in rows.into_iter().take(top).filter(|o| made(o) > 0.0) {
        let cell = |step| o.made.get(step).map_or("-".to_owned(), |sum| bytes(sum.bytes));
        table.row(steps.iter().map(cell).chain([named(o)]));
    }
    table.text()
}

/// A name for a table, with how many are joined in it, and without the calls of functions that all
/// operators of a function begin with.
fn named(o: &Operator) -> String {
    let mut name = o.name.as_str();
    while let Some((first, rest)) = name.split_once('/')
        && matches!(joined(first).as_str(), "StatefulPartitionedCall" | "PartitionedCall")
    {
        name = rest;
    }
    if o.tags > 1 { format!("{name} ({} of them)", o.tags) } else { name.to_owned() }
}

fn no_step(why: String) -> Failure {
    let hint = "announce steps by thermalloc_scope_step, or step() in Rust and Python";
    Failure::cannot_run("profile", why, hint)
}

fn of_step(a: &Analysis, operators: Operators, step: u64, top: usize) -> Result<Output, Failure> {
    let (Some(when), true) = (a.peak_of_step_ns(step), operators.steps.contains(&step)) else {
        return Err(no_step(format!("nothing made in step {step}: {}", operators.steps_known())));
    };
    let instant = a.replayed(when, &format!("step {step}, at its peak"));
    let live = operators.sums(&instant);
    let mut text = head(&a.profile, &instant.what);
    let total: f64 = live.iter().map(|sum| sum.bytes).sum();
    let made = |o: &Operator| o.made.get(&step).copied().unwrap_or_default();
    let made_in_all: f64 = operators.all.iter().map(|o| made(o).bytes).sum();
    text += &format!("live: {}; made in the step: {}\n\n", bytes(total), bytes(made_in_all));
    let mut rows: Vec<(&Operator, Sum, Sum)> = operators
        .all
        .iter()
        .zip(live)
        .skip(1)
        .map(|(o, live)| (o, made(o), live))
        .filter(|(_, made, live)| made.samples + live.samples > 0)
        .collect();
    rows.sort_by(|a, b| {
        let key = |row: &(&Operator, Sum, Sum)| [row.2.bytes.max(row.1.bytes), row.2.bytes];
        let order = key(b).partial_cmp(&key(a)).unwrap_or(std::cmp::Ordering::Equal);
        order.then(a.0.name.cmp(&b.0.name))
    });
    let mut table = Table::new(&[
        ">made",
        ">blocks",
        ">live at its peak",
        ">share",
        "component",
        "operator or scope",
    ]);
    for (o, made, live) in rows.iter().take(top) {
        table.row([
            made.text(),
            count(made.blocks),
            live.text(),
            percent(live.bytes, total),
            o.component().to_owned(),
            named(o),
        ]);
    }
    text += &table.text();
    let json = json!({
        "moment": instant.what, "step": step, "peak_seconds": a.profile.seconds(when),
        "peak_bytes": total, "made_bytes": made_in_all,
        "operators": rows.iter().map(|(o, made, live)| json!({
            "name": o.name, "operators": o.tags, "component": o.component(),
            "made_bytes": made.bytes, "made_blocks": made.blocks, "live_bytes": live.bytes,
            "error_bytes": live.error(),
        })).collect::<Vec<_>>(),
    });
    Ok(Output { text, json, picture: None })
}

/// A name without what tells layers apart: `_3` goes, as TensorFlow gives it to all but the first of a name,
/// and any other number becomes `*`, but for those that belong to a word (`Conv2D`, `AddV2`).
fn joined(name: &str) -> String {
    let mut out = String::with_capacity(name.len());
    let mut rest = name;
    while let Some(at) = rest.find(|c: char| c.is_ascii_digit()) {
        let (before, from) = rest.split_at(at);
        let digits = from.find(|c: char| !c.is_ascii_digit()).unwrap_or(from.len());
        let (number, after) = from.split_at(digits);
        out += before;
        let version = before.ends_with(|c: char| c.is_ascii_uppercase());
        if version || after.starts_with(char::is_alphabetic) {
            out += number;
        } else {
            // Of a part that is nothing else, something is to be left.
            let alone = |stem: &str| stem.is_empty() || stem.ends_with('/');
            match out.strip_suffix('_').filter(|stem| !alone(stem)) {
                Some(stem) => out.truncate(stem.len()),
                None => out.push('*'),
            }
        }
        rest = after;
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use thermalloc_prof_format::{Free, Retag, source};

    use super::super::profile::{Profile, Tag};
    use super::super::symbols::Symbols;
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn names_of_layers() {
        for (name, same) in [
            ("dense/kernel", "dense/kernel"),
            ("dense_12/kernel", "dense/kernel"),
            ("adam/dense_1_kernel_momentum/zeros", "adam/dense_kernel_momentum/zeros"),
            ("Conv2D_1 [temp]", "Conv2D [temp]"),
            ("layers.0.attention.11", "layers.*.attention.*"),
            ("block3_conv1/Relu", "block*_conv*/Relu"),
            ("kv_cache:layer 3", "kv_cache:layer *"),
            ("while/_7/x", "while/_*/x"),
            ("AddV2 [output]", "AddV2 [output]"),
            ("AddV2_7 [output]", "AddV2 [output]"),
            ("12", "*"),
        ] {
            assert_eq!(joined(name), same, "{name}");
        }
    }

    /// Five steps of 10 ms. In each, `a` and `a_1` make 100 and 200 bytes and free them after 4 ms, `b` makes 50
    /// that live into the next step; `w` made 1000 before, which stay. In step 3 `a` makes 5000 more.
    fn analysis() -> Analysis {
        let mut profile = Profile { pid: 1, ..Profile::default() };
        for (tag, name) in [(1, "a"), (2, "a_1"), (3, "b"), (4, "weights:w"), (5, "unused")] {
            let component = if tag == 4 { component::WEIGHTS } else { component::UNKNOWN };
            let source = source::SCOPE;
            let name = name.to_owned();
            profile.tags.insert(tag, Tag { name, component, source, ..Tag::default() });
        }
        let mut serial = 0;
        let mut events: Vec<(u64, Event)> = Vec::new();
        let mut block = |tag, size, step, from: u64, until: Option<u64>| {
            serial += 1;
            let time_ns = from * MS;
            let block = Block { serial, time_ns, tag, size, step, weight: 1.0, ..Block::default() };
            events.push((time_ns, Event::Alloc(block)));
            if let Some(time_ns) = until.map(|ms| ms * MS) {
                events.push((time_ns, Event::Free(Free { serial, time_ns, ..Free::default() })));
            }
        };
        block(4, 1000, 0, 1, None);
        block(0, 7, 0, 2, None);
        for step in 1..=5 {
            let at = step * 10;
            block(1, 100, step, at, Some(at + 4));
            block(2, 200, step, at + 1, Some(at + 5));
            block(3, 50, step, at + 2, Some(at + 11));
        }
        block(1, 5000, 3, 33, Some(34));
        events.sort_by_key(|(time_ns, _)| *time_ns);
        profile.events = events.into_iter().map(|(_, event)| event).collect();
        profile.snapshots.push(super::super::profile::Snapshot {
            time_ns: 100 * MS,
            number: 1,
            ..Default::default()
        });
        Analysis::with(profile, Symbols::default())
    }

    fn row(said: &Output, name: &str) -> Value {
        let rows = said.json["operators"].as_array().unwrap();
        rows.iter()
            .find(|row| row["name"] == name)
            .unwrap_or_else(|| panic!("{name}: {said:?}"))
            .clone()
    }

    #[test]
    fn calls_of_functions_are_left_out_of_tables() {
        let told = |name: &str| named(&Operator { name: name.to_owned(), ..Operator::default() });
        assert_eq!(told("StatefulPartitionedCall/PartitionedCall_3/dense/MatMul"), "dense/MatMul");
        assert_eq!(told("PartitionedCall"), "PartitionedCall");
        assert_eq!(told("dense/PartitionedCall/x"), "dense/PartitionedCall/x");
    }

    #[test]
    fn each_operator_by_step() {
        let a = analysis();
        let said = report(&a, &Choice { last: 2, ..Choice::default() }, 10).unwrap();
        assert_eq!(said.json["whole_steps"], json!([2, 3, 4]));
        let (first, weights) = (row(&said, "a"), row(&said, "weights:w"));
        assert_eq!(first["made_in_a_step_bytes"], (3 * 100 + 5000) as f64 / 3.0);
        assert_eq!((&first["most_bytes"], &first["peak_bytes"]), (&json!(5100.0), &json!(5100.0)));
        assert_eq!(first["made_bytes_by_step"], json!({ "3": 5100.0, "4": 100.0 }));
        assert_eq!((&first["kept_seconds"], &first["freed_blocks"]), (&json!(0.004), &json!(6.0)));
        let second = row(&said, "b");
        assert_eq!((&first["kept_steps"], &second["kept_steps"]), (&json!(0), &json!(1)));
        assert_eq!(second["kept_seconds"], 0.009);
        assert!(
            said.text.contains(" 4 ms  other ") && said.text.contains(" 1 step  other "),
            "{}",
            said.text
        );
        assert_eq!(row(&said, "b")["most_bytes"], 50.0, "freed before the next is made");
        assert_eq!(weights["kept_seconds"], Value::Null);
        assert_eq!(
            (&weights["component"], &weights["made_in_a_step_bytes"]),
            (&json!("weights"), &json!(0.0))
        );
        assert_eq!(said.json["not_of_these_bytes"], 7.0);
        assert_eq!(said.json["bytes"], (1000 + 7 + 5100 + 200 + 50) as f64);
        assert!(!said.text.contains("unused"), "{}", said.text);
        assert!(said.text.contains("to the end  weights    weights:w"), "{}", said.text);
        assert!(
            said.text.contains("step 3  step 4  operator or scope\n5.0 KiB   100 B  a\n"),
            "{}",
            said.text
        );
    }

    #[test]
    fn layers_are_joined_and_names_chosen() {
        let a = analysis();
        let choice = Choice { join_layers: true, name: Some("a".to_owned()), ..Choice::default() };
        let said = report(&a, &choice, 10).unwrap();
        let both = row(&said, "a");
        assert_eq!((&both["operators"], &both["most_bytes"]), (&json!(2), &json!(5300.0)));
        assert!(said.text.contains("a (2 of them)"), "{}", said.text);
        let choice = Choice { name: Some("nobody".to_owned()), ..Choice::default() };
        assert!(report(&a, &choice, 10).unwrap_err().to_string().contains("nobody"));
    }

    #[test]
    fn one_step() {
        let a = analysis();
        let said = report(&a, &Choice { step: Some(4), ..Choice::default() }, 10).unwrap();
        // a, a_1 and b of the step are there, and what is there always; b of step 3 went at 41 ms.
        assert_eq!(
            (&said.json["peak_bytes"], &said.json["made_bytes"]),
            (&json!(1357.0), &json!(350.0))
        );
        let weights = row(&said, "weights:w");
        assert_eq!((&weights["made_bytes"], &weights["live_bytes"]), (&json!(0.0), &json!(1000.0)));
        assert_eq!(row(&said, "b")["live_bytes"], 50.0);
        let failed = report(&a, &Choice { step: Some(9), ..Choice::default() }, 10).unwrap_err();
        assert!(failed.to_string().contains("its steps are 1 to 5"), "{failed}");
    }

    #[test]
    fn what_is_marked_later_is_anothers_from_then_on() {
        let mut profile = analysis().profile;
        // The first mark counts from birth on, the second from its time.
        for (time, tag) in [(60, 3), (61, 4)] {
            let retag = Retag { time_ns: time * MS, serial: 2, tag, thread: 0 };
            profile.events.push(Event::Retag(retag));
        }
        profile.mark_from_birth();
        let said =
            report(&Analysis::with(profile, Symbols::default()), &Choice::default(), 10).unwrap();
        assert_eq!(row(&said, "b")["most_bytes"], 57.0);
        assert_eq!(row(&said, "weights:w")["most_bytes"], 1007.0);
        assert_eq!(said.json["not_of_these_bytes"], 0.0);
    }

    #[test]
    fn what_a_file_lacks_is_said() {
        let empty = Analysis::with(
            Profile { snapshots: vec![Default::default()], ..Profile::default() },
            Symbols::default(),
        );
        let failed = report(&empty, &Choice::default(), 10).unwrap_err().to_string();
        assert!(failed.contains("no events"), "{failed}");
        let mut profile = analysis().profile;
        for event in &mut profile.events {
            if let Event::Alloc(block) = event {
                block.step = 0;
            }
        }
        let a = Analysis::with(profile.clone(), Symbols::default());
        let said = report(&a, &Choice::default(), 10).unwrap();
        assert_eq!(row(&said, "a")["made_in_a_step_bytes"], Value::Null);
        assert!(said.text.contains("no whole step is known"), "{}", said.text);
        for choice in
            [Choice { step: Some(1), ..Choice::default() }, Choice { last: 3, ..Choice::default() }]
        {
            let failed = report(&a, &choice, 10).unwrap_err().to_string();
            assert!(failed.contains("no steps are known"), "{failed}");
        }
        profile.tags.clear();
        let a = Analysis::with(profile, Symbols::default());
        let failed = report(&a, &Choice::default(), 10).unwrap_err().to_string();
        assert!(failed.contains("no operator and no scope"), "{failed}");
    }
}
