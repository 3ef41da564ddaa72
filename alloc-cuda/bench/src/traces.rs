//! Sequences of allocations: what training steps, inference and the caches of language models ask
//! for. Each round is the same, as programs are; sizes and lifetimes follow real ones.

use crate::machine::Rng;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// One step of a trace.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    /// Block `id` comes: its size, the stream.
    Alloc { id: usize, bytes: u64, stream: usize },
    /// Block `id` goes, in its own stream's order.
    Free { id: usize },
    /// Another stream reads block `id`, after its own.
    Use { id: usize, stream: usize },
    /// That stream's last use of it has been submitted.
    End { id: usize, stream: usize },
    /// A kernel on a stream.
    Kernel { stream: usize },
}

/// A trace: what comes once, then rounds.
pub(crate) struct Trace {
    pub(crate) name: String,
    pub(crate) streams: usize,
    pub(crate) once: Vec<Step>,
    pub(crate) round: Vec<Step>,
}

struct Writer {
    next: usize,
    steps: Vec<Step>,
}

impl Writer {
    fn alloc(&mut self, bytes: u64, stream: usize) -> usize {
        let id = self.next;
        self.next += 1;
        self.steps.push(Step::Alloc { id, bytes, stream });
        self.steps.push(Step::Kernel { stream });
        id
    }

    fn free(&mut self, id: usize) {
        self.steps.push(Step::Free { id });
    }
}

/// A transformer's training step: weights and optimizer state stay; activations pile up in the
/// forward pass and go in the backward pass; workspaces come and go; a second stream prefetches
/// the batch, a third reduces gradients.
fn training(tokens: u64) -> Trace {
    let mut w = Writer { next: 0, steps: Vec::new() };
    let hidden = 2048u64;
    for _ in 0..24 {
        for bytes in [hidden * hidden * 3 * 2, hidden * hidden * 2, hidden * hidden * 8 * 2] {
            // Weight and two moments.
            w.alloc(bytes / 4, 0);
            w.alloc(bytes / 4, 0);
            w.alloc(bytes / 4, 0);
        }
        w.alloc(hidden * 4, 0);
    }
    let once = std::mem::take(&mut w.steps);
    let batch = w.alloc(tokens * 8, 1);
    w.steps.push(Step::Use { id: batch, stream: 0 });
    let mut kept = Vec::new();
    for layer in 0..24u64 {
        let act = tokens * hidden * 2;
        let norm = w.alloc(act, 0);
        let qkv = w.alloc(act * 3, 0);
        let scores = w.alloc(tokens * 1024 * 4 + layer * 96 * KIB, 0);
        let soft = w.alloc(tokens * 1024 * 4 + layer * 96 * KIB, 0);
        w.free(scores);
        let context = w.alloc(act, 0);
        let up = w.alloc(act * 4, 0);
        let gelu = w.alloc(act * 4, 0);
        let space = w.alloc((8 + layer % 5) * MIB + 300, 0);
        let down = w.alloc(act, 0);
        w.free(space);
        let statistics = w.alloc(tokens * 4, 0);
        kept.push([norm, qkv, soft, context, up, gelu, down, statistics]);
    }
    let loss = w.alloc(tokens * 32_000 * 2, 0);
    let mut grad = w.alloc(tokens * hidden * 2, 0);
    w.free(loss);
    for layer in kept.into_iter().rev() {
        let [norm, qkv, soft, context, up, gelu, down, statistics] = layer;
        for (activation, scale) in
            [(down, 1), (gelu, 4), (up, 4), (context, 1), (soft, 2), (qkv, 3), (norm, 1)]
        {
            let next = w.alloc(tokens * hidden * 2 * scale, 0);
            let space = w.alloc(MIB * 3 * scale + 512, 0);
            w.free(grad);
            w.free(activation);
            w.free(space);
            grad = next;
        }
        w.free(statistics);
        let bucket = w.alloc(25 * MIB, 0);
        w.steps.push(Step::Use { id: bucket, stream: 2 });
        w.free(bucket);
    }
    w.free(grad);
    w.free(batch);
    Trace { name: "training, transformer".to_owned(), streams: 3, once, round: w.steps }
}

/// A convolution network's training with varying image sizes: four rounds of different sizes make
/// the period.
fn vision(batch: u64) -> Trace {
    let mut w = Writer { next: 0, steps: Vec::new() };
    for i in 0..160u64 {
        w.alloc(64 * KIB + i * 37 * KIB, 0);
    }
    let once = std::mem::take(&mut w.steps);
    for scale in [224u64, 320, 256, 384] {
        let mut kept = Vec::new();
        for block in 0..40u64 {
            let side = (scale >> (block / 10)).max(1);
            let bytes = batch * side * side * (24 << (block / 10)) * 2;
            let space = w.alloc(bytes / 2 + 1024, 0);
            kept.push(w.alloc(bytes, 0));
            kept.push(w.alloc(bytes + 4096, 0));
            w.free(space);
        }
        let mut grad = w.alloc(MIB, 0);
        while let Some(id) = kept.pop() {
            let next = w.alloc(2 * MIB + kept.len() as u64 * 128 * KIB, 0);
            w.free(grad);
            w.free(id);
            grad = next;
        }
        w.free(grad);
    }
    Trace { name: "training, images".to_owned(), streams: 1, once, round: w.steps }
}

/// Inference: requests of varying length on four streams, blocks of one stream only.
fn inference(streams: usize, seed: u64) -> Trace {
    let mut w = Writer { next: 0, steps: Vec::new() };
    for _ in 0..96 {
        w.alloc(14 * MIB, 0);
    }
    let once = std::mem::take(&mut w.steps);
    let mut rng = Rng::new(seed);
    for request in 0..64 {
        let stream = request % streams;
        let tokens = 64 + rng.below(1000);
        let mut last = w.alloc(tokens * 4096 * 2, stream);
        for _ in 0..12 {
            let attention = w.alloc(tokens * tokens * 32 * 2 / 8 + 512, stream);
            let wide = w.alloc(tokens * 11_008 * 2, stream);
            let next = w.alloc(tokens * 4096 * 2, stream);
            for id in [last, attention, wide] {
                w.free(id);
            }
            last = next;
        }
        w.free(last);
    }
    Trace { name: format!("inference, {streams} streams"), streams, once, round: w.steps }
}

/// The cache of a language model: blocks of a sequence's tokens grow by the page and go together,
/// beside workspaces.
fn kv_cache(seed: u64) -> Trace {
    let mut w = Writer { next: 0, steps: Vec::new() };
    for _ in 0..64 {
        w.alloc(9 * MIB, 0);
    }
    let once = std::mem::take(&mut w.steps);
    let mut rng = Rng::new(seed);
    let mut sequences: Vec<Vec<usize>> = Vec::new();
    for _ in 0..600 {
        if sequences.len() < 48 && rng.below(3) == 0 {
            // The prompt at once.
            sequences.push(vec![w.alloc((1 + rng.below(40)) * MIB, 0)]);
        }
        for sequence in &mut sequences {
            if rng.below(4) == 0 {
                sequence.push(w.alloc(2 * MIB, 0));
            }
        }
        let space = w.alloc(8 * MIB + sequences.len() as u64 * 512 * KIB, 0);
        w.free(space);
        if sequences.len() > 8 && rng.below(4) == 0 {
            let at = rng.below(sequences.len() as u64) as usize;
            for id in sequences.swap_remove(at) {
                w.free(id);
            }
        }
    }
    for id in sequences.into_iter().flatten() {
        w.free(id);
    }
    Trace { name: "KV cache".to_owned(), streams: 1, once, round: w.steps }
}

/// Two streams that work in turn with blocks of the other's size.
fn pipeline(scale: u64) -> Trace {
    let mut w = Writer { next: 0, steps: Vec::new() };
    for _ in 0..40 {
        w.alloc(20 * MIB, 0);
    }
    let once = std::mem::take(&mut w.steps);
    for turn in 0..16 {
        let stream = turn % 2;
        let blocks: Vec<usize> =
            (0..12u64).map(|i| w.alloc((6 + i * scale % 17) * MIB, stream)).collect();
        for &id in &blocks {
            w.steps.push(Step::Use { id, stream: 1 - stream });
        }
        blocks.into_iter().for_each(|id| w.free(id));
    }
    Trace { name: "pipeline, 2 streams".to_owned(), streams: 2, once, round: w.steps }
}

/// All traces.
pub(crate) fn all() -> Vec<Trace> {
    vec![training(4096), vision(32), inference(4, 5), kv_cache(9), pipeline(5)]
}

/// The same with other sizes, lifetimes and numbers of streams: what holds for the committed ones
/// holds for these.
pub(crate) fn varied(seed: u64) -> Vec<Trace> {
    let n = (seed % 16) as usize;
    let mut traces = vec![
        training(2048 + seed * 389 % 4096 / 64 * 64),
        vision(20 + seed * 7 % 24),
        inference(2 + n % 7, seed * 31 + 1),
        kv_cache(seed * 17 + 2),
        pipeline(3 + seed % 11),
    ];
    for trace in &mut traces {
        trace.name = format!("{}, variant {seed}", trace.name);
    }
    traces
}
