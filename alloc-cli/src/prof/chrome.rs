//! Counters for Perfetto and Chrome's trace viewer: live bytes by component over time, and steps.
use serde_json::{Value, json};
use thermalloc_prof_format::component;

use super::analysis::Analysis;
use super::profile::{Event, whole};
use super::timeline::points;

pub(crate) fn write(a: &Analysis) -> Value {
    let p = &a.profile;
    let us = |time_ns: u64| time_ns.saturating_sub(p.time_ns) / 1000;
    let mut events = vec![json!({
        "ph": "M", "pid": p.pid, "name": "process_name",
        "args": { "name": super::symbols::short(&p.program) },
    })];
    for point in points(a, 20_000) {
        let args: serde_json::Map<String, Value> = component::NAMES
            .iter()
            .zip(point.by_component)
            .skip(1)
            .map(|(name, bytes)| ((*name).to_owned(), json!(whole(bytes))))
            .collect();
        events.push(json!({
            "ph": "C", "ts": us(point.time_ns), "pid": p.pid, "name": "live bytes", "args": args,
        }));
    }
    for event in &p.events {
        if let Event::Step(step) = event {
            events.push(json!({
                "ph": "i", "s": "p", "ts": us(step.time_ns), "pid": p.pid, "tid": step.thread,
                "name": format!("step {}", step.step),
            }));
        }
    }
    for s in &p.snapshots {
        let args: serde_json::Map<String, Value> =
            ["active_bytes", "dirty_bytes", "metadata_bytes"]
                .iter()
                .filter(|name| s.stats.contains_key(**name))
                .map(|name| ((*name).to_owned(), json!(s.stat(name))))
                .collect();
        if !args.is_empty() {
            events.push(json!({
                "ph": "C", "ts": us(s.time_ns), "pid": p.pid, "name": "allocator", "args": args,
            }));
        }
    }
    json!({ "traceEvents": events, "displayTimeUnit": "ms", "otherData": { "version": p.version } })
}
