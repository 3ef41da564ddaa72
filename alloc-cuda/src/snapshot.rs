//! The state of a pool in the form that PyTorch's memory viewer reads: a pickle of protocol 2.

use crate::block::State;
use crate::driver::Stream;
use crate::heap::{Kind, Source};
use crate::pool::{Inner, Pool};
use std::collections::HashMap;
use std::sync::Arc;

/// A value of a pickle, as far as a snapshot needs them.
enum Value {
    Int(i64),
    Bool(bool),
    Text(String),
    List(Vec<Value>),
    Tuple(Vec<Value>),
    Dict(Vec<(&'static str, Value)>),
}

impl Value {
    fn int(number: u64) -> Self {
        Self::Int(i64::try_from(number).unwrap_or(i64::MAX))
    }

    fn text(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

/// Lists are appended to in batches of this size.
const BATCH: usize = 1000;

fn write(value: &Value, out: &mut Vec<u8>) {
    match value {
        Value::Bool(yes) => out.push(if *yes { 0x88 } else { 0x89 }),
        Value::Int(number) => write_int(*number, out),
        Value::Text(text) => {
            out.push(b'X');
            out.extend((text.len() as u32).to_le_bytes());
            out.extend(text.as_bytes());
        }
        Value::List(items) => {
            out.push(b']');
            for batch in items.chunks(BATCH) {
                out.push(b'(');
                batch.iter().for_each(|item| write(item, out));
                out.push(b'e');
            }
        }
        Value::Tuple(items) => {
            out.push(b'(');
            items.iter().for_each(|item| write(item, out));
            out.push(b't');
        }
        Value::Dict(items) => {
            out.extend(b"}(");
            for (key, item) in items {
                write(&Value::text(key), out);
                write(item, out);
            }
            out.push(b'u');
        }
    }
}

fn write_int(number: i64, out: &mut Vec<u8>) {
    if let Ok(number) = u8::try_from(number) {
        out.extend([b'K', number]);
    } else if let Ok(number) = i32::try_from(number) {
        out.push(b'J');
        out.extend(number.to_le_bytes());
    } else {
        out.extend([0x8A, 8]);
        out.extend(number.to_le_bytes());
    }
}

fn pickle(value: &Value) -> Vec<u8> {
    let mut out = vec![0x80, 2];
    write(value, &mut out);
    out.push(b'.');
    out
}

/// The colours of PyTorch's timeline, by what a tag says.
fn category(tag: &str) -> &'static str {
    const KNOWN: [&str; 5] = ["weights", "kv_cache", "activations", "workspace", "framework"];
    KNOWN.iter().find(|&&known| tag.starts_with(known)).copied().unwrap_or("unknown")
}

fn stream_value(stream: Stream) -> Value {
    Value::int(stream.0 as u64)
}

impl Inner {
    fn segments(&self) -> Vec<Value> {
        let mut segments = Vec::new();
        for shard in self.all_shards() {
            let heap = shard.heap();
            for region in heap.regions().filter(|region| region.source != Source::View) {
                // A stretch of addresses with memory is what PyTorch calls a segment.
                let mut run: Vec<(u64, u64, u64, State, u32)> = Vec::new();
                let mut stretches = Vec::new();
                for (_, block) in heap.blocks_of(region) {
                    if block.state == State::Gap {
                        stretches.push(std::mem::take(&mut run));
                    } else {
                        run.push((
                            block.addr,
                            block.bytes,
                            block.requested,
                            block.state,
                            block.tag,
                        ));
                    }
                }
                stretches.push(run);
                for stretch in stretches.into_iter().filter(|stretch| !stretch.is_empty()) {
                    segments.push(self.segment(
                        &stretch,
                        shard.stream.handle,
                        shard.pool,
                        region.kind,
                        region.source == Source::Virtual,
                    ));
                }
            }
        }
        segments
    }

    fn segment(
        &self,
        blocks: &[(u64, u64, u64, State, u32)],
        stream: Stream,
        pool: u64,
        kind: Kind,
        is_expandable: bool,
    ) -> Value {
        let sum = |which: fn(State) -> bool| {
            blocks.iter().filter(|block| which(block.3)).map(|block| block.1).sum::<u64>()
        };
        let in_use = |state| matches!(state, State::Active | State::Lent);
        let total: u64 = blocks.iter().map(|block| block.1).sum();
        let allocated = sum(in_use);
        let pending = sum(|state| state == State::Pending);
        let requested: u64 =
            blocks.iter().filter(|block| in_use(block.3)).map(|block| block.2).sum();
        let list = blocks.iter().map(|&(addr, bytes, requested, state, tag)| {
            let state = match state {
                State::Active | State::Lent => "active_allocated",
                State::Pending | State::Busy => "active_pending_free",
                _ => "inactive",
            };
            Value::Dict(vec![
                ("address", Value::int(addr)),
                ("size", Value::int(bytes)),
                ("requested_size", Value::int(requested)),
                ("state", Value::text(state)),
                ("frames", self.frames(tag)),
            ])
        });
        Value::Dict(vec![
            ("device", Value::Int(i64::from(self.gpu.ordinal))),
            ("address", Value::int(blocks[0].0)),
            ("total_size", Value::int(total)),
            ("allocated_size", Value::int(allocated)),
            ("active_size", Value::int(allocated + pending)),
            ("requested_size", Value::int(requested)),
            ("stream", stream_value(stream)),
            ("segment_type", Value::text(if kind == Kind::Small { "small" } else { "large" })),
            ("segment_pool_id", Value::Tuple(vec![Value::Int(0), Value::int(pool)])),
            ("is_expandable", Value::Bool(is_expandable)),
            ("frames", Value::List(Vec::new())),
            ("blocks", Value::List(list.collect())),
        ])
    }

    /// A tag as the one frame of a stack.
    fn frames(&self, tag: u32) -> Value {
        if tag == 0 {
            return Value::List(Vec::new());
        }
        Value::List(vec![Value::Dict(vec![
            ("filename", Value::text("tag")),
            ("line", Value::Int(0)),
            ("name", Value::Text(self.tag_name(tag))),
        ])])
    }

    fn trace(&self) -> Value {
        let entries = self.history.entries();
        let mut names: HashMap<u32, String> = HashMap::new();
        let values = entries.iter().map(|entry| {
            let tag = names.entry(entry.tag).or_insert_with(|| self.tag_name(entry.tag)).clone();
            let mut fields = vec![
                ("action", Value::text(entry.action)),
                ("addr", Value::int(entry.addr)),
                ("size", Value::int(entry.bytes)),
                ("stream", stream_value(entry.stream)),
                ("time_us", Value::int(entry.time_ms * 1000)),
                ("frames", self.frames(entry.tag)),
                ("category", Value::text(category(&tag))),
            ];
            if entry.action == "oom" {
                fields.push(("device_free", Value::Int(0)));
            }
            Value::Dict(fields)
        });
        Value::List(values.collect())
    }

    fn snapshot(&self) -> Vec<u8> {
        let settings = Value::Dict(vec![
            ("PYTORCH_CUDA_ALLOC_CONF", Value::text("")),
            ("backend", Value::text("thermalloc")),
            ("expandable_segments", Value::Bool(true)),
        ]);
        let mut traces: Vec<Value> =
            (0..self.gpu.ordinal).map(|_| Value::List(Vec::new())).collect();
        traces.push(self.trace());
        pickle(&Value::Dict(vec![
            ("segments", Value::List(self.segments())),
            ("device_traces", Value::List(traces)),
            ("allocator_settings", settings),
            ("external_annotations", Value::List(Vec::new())),
        ]))
    }
}

impl Pool {
    /// The state and the history in the form that PyTorch's memory viewer reads.
    pub fn snapshot(&self) -> Vec<u8> {
        Arc::clone(&self.inner).snapshot()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pickle_is_what_python_writes() {
        let value = Value::Dict(vec![
            ("a", Value::List(vec![Value::Int(1), Value::Int(-2), Value::Int(1 << 40)])),
            ("b", Value::Tuple(vec![Value::Bool(true), Value::text("x")])),
        ]);
        let expected = b"\x80\x02}(X\x01\0\0\0a](K\x01J\xfe\xff\xff\xff\x8a\x08\0\0\0\0\0\x01\0\0eX\x01\0\0\0b(\x88X\x01\0\0\0xtu.";
        assert_eq!(pickle(&value), expected);
    }
}
