//! PyTorch's memory snapshot, of the host's memory: a slab or extent is a segment, so that torch's viewer
//! draws who lies where. Blocks that were recorded have their stacks; what else of a slab is in use
//! is one block without a name.
use std::collections::HashMap;

use serde_json::{Value, json};
use thermalloc_prof_format::{Extent, extent_state, space};

use super::analysis::Analysis;
use super::profile::{Event, Snapshot};
use crate::failure::Failure;

/// Frames of a stack; more are cut.
const MOST_FRAMES: usize = 40;
/// Events; older ones are left out, as torch does it.
const MOST_EVENTS: usize = 200_000;

pub(crate) fn write(a: &Analysis) -> Result<Vec<u8>, Failure> {
    let s = a
        .profile
        .snapshots
        .iter()
        .filter(|s| !s.extents.is_empty())
        .max_by_key(|s| s.stat("active_bytes"))
        .or(a.profile.snapshots.last());
    let segments = s.map_or(Vec::new(), |s| segments(a, s));
    let settings = json!({ "PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1,
        "garbage_collection_threshold": 0.0, "expandable_segments": false, "backend": "thermalloc" });
    let snapshot = json!({
        "segments": segments, "device_traces": [traces(a)], "allocator_settings": settings,
    });
    let mut bytes = vec![0x80, 2];
    pickle(&mut bytes, &snapshot);
    bytes.push(b'.');
    Ok(bytes)
}

fn frames(a: &Analysis, site: u32) -> Vec<Value> {
    let functions = a.functions(site);
    functions
        .iter()
        .take(MOST_FRAMES)
        .map(|f| json!({ "filename": f.file, "line": f.line, "name": super::symbols::tidy(&f.name) }))
        .collect()
}

fn segments(a: &Analysis, s: &Snapshot) -> Vec<Value> {
    let by_address: HashMap<u64, &thermalloc_prof_format::Block> =
        s.live.iter().filter(|b| b.space == space::HOST).map(|b| (b.address, b)).collect();
    s.extents
        .iter()
        .filter(|e| e.state != extent_state::CLEAN)
        .map(|e| {
            let (used, blocks) = blocks(a, e, &by_address);
            json!({
                "device": 0, "address": e.address, "total_size": e.bytes, "stream": 0,
                "segment_type": if e.state == extent_state::SLAB { "small" } else { "large" },
                "segment_pool_id": [0, 0], "is_expandable": false, "frames": [],
                "allocated_size": used, "active_size": used, "requested_size": used, "blocks": blocks,
            })
        })
        .collect()
}

fn blocks(
    a: &Analysis,
    e: &Extent,
    by_address: &HashMap<u64, &thermalloc_prof_format::Block>,
) -> (u64, Vec<Value>) {
    let block = |address: u64, size: u64, requested: u64, state: &str, frames: Vec<Value>| {
        json!({ "address": address, "size": size, "requested_size": requested, "state": state,
            "frames": frames })
    };
    let used = match e.state {
        extent_state::DIRTY => 0,
        extent_state::SLAB => (u64::from(e.used) * u64::from(e.class_bytes)).min(e.bytes),
        _ => e.bytes,
    };
    let mut blocks = Vec::new();
    if let Some(known) = by_address.get(&e.address).filter(|_| e.state != extent_state::SLAB) {
        blocks.push(block(
            e.address,
            e.bytes,
            known.size,
            "active_allocated",
            frames(a, known.site),
        ));
        return (used, blocks);
    }
    if used > 0 {
        blocks.push(block(e.address, used, used, "active_allocated", Vec::new()));
    }
    if used < e.bytes {
        blocks.push(block(e.address + used, e.bytes - used, 0, "inactive", Vec::new()));
    }
    (used, blocks)
}

fn traces(a: &Analysis) -> Vec<Value> {
    let events = &a.profile.events;
    let mut sizes: HashMap<u64, (u64, u32)> = HashMap::new();
    let mut traces = Vec::new();
    let us = |time_ns: u64| (a.profile.unix_ns + time_ns.saturating_sub(a.profile.time_ns)) / 1000;
    for event in &events[events.len().saturating_sub(MOST_EVENTS)..] {
        match event {
            Event::Alloc(b) => {
                sizes.insert(b.serial, (b.size, b.site));
                traces.push(json!({ "action": "alloc", "addr": b.address, "size": b.size,
                    "stream": 0, "time_us": us(b.time_ns), "frames": frames(a, b.site) }));
            }
            Event::Free(f) if f.flags & 1 == 0 => {
                let Some((size, site)) = sizes.remove(&f.serial) else { continue };
                let frames = frames(a, site);
                for action in ["free_requested", "free_completed"] {
                    traces.push(json!({ "action": action, "addr": f.address, "size": size,
                        "stream": 0, "time_us": us(f.time_ns), "frames": frames }));
                }
            }
            _ => {}
        }
    }
    traces
}

/// Python's pickle, protocol 2, of plain data. `segment_pool_id` is a tuple, since it is a key.
fn pickle(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::Null => out.push(b'N'),
        Value::Bool(true) => out.push(0x88),
        Value::Bool(false) => out.push(0x89),
        Value::Number(number) => pickle_number(out, number),
        Value::String(text) => pickle_text(out, text),
        Value::Array(items) => {
            out.extend(b"](");
            items.iter().for_each(|item| pickle(out, item));
            out.push(b'e');
        }
        Value::Object(members) => {
            out.extend(b"}(");
            for (name, value) in members {
                pickle_text(out, name);
                match value {
                    Value::Array(items) if name == "segment_pool_id" => {
                        out.push(b'(');
                        items.iter().for_each(|item| pickle(out, item));
                        out.push(b't');
                    }
                    value => pickle(out, value),
                }
            }
            out.push(b'u');
        }
    }
}

fn pickle_number(out: &mut Vec<u8>, number: &serde_json::Number) {
    if let Some(whole) = number.as_i64() {
        // LONG1: eight bytes and a sign.
        out.extend([0x8a, 8]);
        out.extend(whole.to_le_bytes());
    } else if let Some(whole) = number.as_u64() {
        out.extend([0x8a, 9]);
        out.extend(whole.to_le_bytes());
        out.push(0);
    } else {
        out.push(b'G');
        out.extend(number.as_f64().unwrap_or(0.0).to_be_bytes());
    }
}

fn pickle_text(out: &mut Vec<u8>, text: &str) {
    out.push(b'X');
    out.extend(u32::try_from(text.len()).unwrap_or(0).to_le_bytes());
    out.extend(text.as_bytes());
}
