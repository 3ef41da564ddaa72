//! Live bytes by component over the time of a log, and what of it was there at the peak.
use std::collections::HashMap;

use serde_json::{Value, json};
use thermalloc_prof_format::{Block, component};

use super::Output;
use super::analysis::{Analysis, At, name_of, sorted};
use super::classes::Moment;
use super::profile::{Event, float};
use super::report::head;
use super::svg::{COLOURS, Frame, Svg};
use super::table::{Table, bytes, count, percent, span};
use crate::failure::Failure;

/// Live bytes by component at one time.
#[derive(Clone, Debug)]
pub(crate) struct Point {
    pub(crate) time_ns: u64,
    pub(crate) step: u64,
    pub(crate) by_component: [f64; component::NAMES.len()],
}

impl Point {
    pub(crate) fn sum(&self) -> f64 {
        self.by_component.iter().sum()
    }
}

/// The greatest state in each of `most` equal spans of time. A file without events has a point a dump.
pub(crate) fn points(a: &Analysis, most: u64) -> Vec<Point> {
    if a.profile.events.is_empty() {
        return a.profile.snapshots.iter().map(|s| of_blocks(a, &s.live, Moment::of(s))).collect();
    }
    let first = a.profile.events.first().map_or(0, Event::time_ns);
    let last = a.profile.events.last().map_or(0, Event::time_ns);
    let wide = (last.saturating_sub(first) / most).max(1);
    let mut live: HashMap<u64, (Block, usize, f64)> = HashMap::new();
    let mut now = [0.0; component::NAMES.len()];
    let mut step = 0;
    let mut points: Vec<Point> = Vec::new();
    for event in &a.profile.events {
        match event {
            Event::Alloc(b) => {
                // Its age is not known yet: what stays is told by the report of a moment.
                let moment = Moment { time_ns: b.time_ns, step: b.step };
                let component = usize::from(a.component(b, moment).0);
                let stands = b.weight * float(b.size);
                now[component] += stands;
                live.insert(b.serial, (*b, component, stands));
                step = step.max(b.step);
            }
            Event::Free(f) if f.flags & 1 == 0 => {
                if let Some((_, component, stood)) = live.remove(&f.serial) {
                    now[component] -= stood;
                }
            }
            Event::Resize(r) => {
                if let Some((block, component, stood)) = live.get_mut(&r.serial) {
                    now[*component] += block.weight * float(r.size) - *stood;
                    *stood = block.weight * float(r.size);
                }
            }
            Event::Retag(r) => {
                if let Some((block, component, stood)) = live.get_mut(&r.serial) {
                    block.tag = r.tag;
                    now[*component] -= *stood;
                    *component = usize::from(a.component(block, Moment::of_block(block)).0);
                    now[*component] += *stood;
                }
            }
            Event::Step(s) => step = s.step,
            Event::Free(_) => {}
        }
        let time_ns = event.time_ns();
        let point = Point { time_ns, step, by_component: now };
        let slot = time_ns.saturating_sub(first) / wide;
        match points.last_mut() {
            Some(last) if last.time_ns.saturating_sub(first) / wide == slot => {
                if point.sum() > last.sum() {
                    last.by_component = now;
                    last.step = step;
                }
            }
            _ => points.push(point),
        }
    }
    points
}

fn of_blocks(a: &Analysis, live: &[Block], now: Moment) -> Point {
    let mut by_component = [0.0; component::NAMES.len()];
    for block in live {
        by_component[usize::from(a.component(block, now).0)] += block.weight * float(block.size);
    }
    Point { time_ns: now.time_ns, step: now.step, by_component }
}

/// `prof peak`: the moment when most was live.
pub(crate) fn report(a: &Analysis, top: usize) -> Result<Output, Failure> {
    let instant = a.at(At::Peak)?;
    let mut text = head(&a.profile, &instant.what);
    let rows = a.by_component(&instant);
    let total: f64 = rows.iter().map(|(_, sum, _)| sum.bytes).sum();
    text += &format!("live: {}\n\n", bytes(total));
    let mut table = Table::new(&["component", ">at the peak", ">share", ">blocks"]);
    for (component, sum, _) in &rows {
        let share = percent(sum.bytes, total);
        table.row([name_of(*component).to_owned(), sum.text(), share, count(sum.blocks)]);
    }
    text += &table.text();
    let mut by: HashMap<(u32, u32), super::analysis::Sum> = HashMap::new();
    for block in &instant.live {
        by.entry((block.site, block.tag)).or_default().add(block);
    }
    let by = sorted(by);
    text += "\n";
    let mut table =
        Table::new(&[">at the peak", ">share", ">blocks", "operator or scope", "call site"]);
    for ((site, tag), sum) in by.iter().take(top) {
        table.row([
            sum.text(),
            percent(sum.bytes, total),
            count(sum.blocks),
            a.tag(*tag),
            a.line(*site, 2),
        ]);
    }
    text += &table.text();
    let points = points(a, 600);
    let steps = by_step(&points);
    if steps.len() > 1 {
        text += "\n";
        let mut table = Table::new(&[">step", ">peak"]);
        steps
            .iter()
            .rev()
            .take(top)
            .for_each(|(step, most)| table.row([step.to_string(), bytes(*most)]));
        text += &table.text();
    }
    let json = json!({
        "moment": instant.what, "live_bytes": total,
        "components": rows.iter().map(|(c, sum, _)| json!({ "component": name_of(*c), "bytes": sum.bytes, "error_bytes": sum.error() })).collect::<Vec<_>>(),
        "holders": by.iter().take(200).map(|((site, tag), sum)| json!({ "stack": a.names(*site), "what": a.tag(*tag), "bytes": sum.bytes, "blocks": sum.blocks })).collect::<Vec<_>>(),
        "timeline": points.iter().map(|p| point_json(a, p)).collect::<Vec<_>>(),
        "steps": steps.iter().map(|(step, most)| json!({ "step": step, "peak_bytes": most })).collect::<Vec<_>>(),
    });
    Ok(Output { text, json, picture: Some(draw(a, &points, &instant.what)) })
}

fn point_json(a: &Analysis, p: &Point) -> Value {
    let by: serde_json::Map<String, Value> = component::NAMES
        .iter()
        .zip(p.by_component)
        .filter(|(_, bytes)| *bytes > 0.0)
        .map(|(name, bytes)| ((*name).to_owned(), json!(bytes)))
        .collect();
    json!({ "seconds": a.profile.seconds(p.time_ns), "step": p.step, "bytes": by })
}

fn by_step(points: &[Point]) -> Vec<(u64, f64)> {
    let mut steps: Vec<(u64, f64)> = Vec::new();
    for point in points.iter().filter(|point| point.step > 0) {
        match steps.last_mut() {
            Some((step, most)) if *step == point.step => *most = most.max(point.sum()),
            _ => steps.push((point.step, point.sum())),
        }
    }
    steps
}

fn draw(a: &Analysis, points: &[Point], what: &str) -> String {
    let program = super::symbols::short(&a.profile.program);
    let mut svg = Svg::new(960.0, 420.0, &format!("{program}: live bytes by component; {what}"));
    let frame = Frame { left: 80.0, top: 40.0, width: 720.0, height: 320.0 };
    let most = points.iter().map(Point::sum).fold(1.0, f64::max);
    frame.grid(&mut svg, most, bytes);
    let begin = a.profile.seconds(points.first().map_or(0, |p| p.time_ns));
    let end = a.profile.seconds(points.last().map_or(0, |p| p.time_ns)).max(begin + 1e-9);
    let x = |p: &Point| frame.x((a.profile.seconds(p.time_ns) - begin) / (end - begin));
    let mut below = vec![0.0; points.len()];
    let mut row = 0.0;
    for (number, name) in component::NAMES.iter().enumerate() {
        let largest = points.iter().map(|p| p.by_component[number]).fold(0.0, f64::max);
        if largest <= 0.0 {
            continue;
        }
        let above: Vec<f64> = points
            .iter()
            .zip(&below)
            .map(|(p, below)| below + p.by_component[number].max(0.0))
            .collect();
        let upper = points.iter().zip(&above).map(|(p, y)| (x(p), frame.y(y / most)));
        let lower = points.iter().zip(&below).rev().map(|(p, y)| (x(p), frame.y(y / most)));
        let outline: Vec<(f64, f64)> = upper.chain(lower).collect();
        svg.area(&outline, COLOURS[number], &format!("{name}: at most {}", bytes(largest)));
        svg.rect([815.0, 48.0 + row, 12.0, 12.0], COLOURS[number], name);
        svg.text(832.0, 58.0 + row, "start", 12, &format!("{name} {}", bytes(largest)));
        row += 20.0;
        below = above;
    }
    for part in 0..=4 {
        let share = f64::from(part) / 4.0;
        svg.text(frame.x(share), 380.0, "middle", 11, &span(begin + (end - begin) * share));
    }
    svg.finish()
}
