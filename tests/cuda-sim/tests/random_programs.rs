//! Random programs against a model that knows every operation and every order between them.
//!
//! The model keeps the whole graph of operations and asks it for a path; the simulator keeps clocks.
//! They have to agree on every access, and a program without a race has to find in memory what it
//! wrote, whatever the device does in between.
#![allow(clippy::cast_possible_truncation, reason = "small sizes")]

mod common;

use common::{Machine, call};
use thermalloc_cuda::driver::{Event, Stream, constant};
use thermalloc_cuda_sim::{Access, Config, Data, Mistake, Progress};

/// A generator of its own: the same programs for ever.
struct Rng(u64);

impl Rng {
    fn below(&mut self, limit: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % limit
    }
}

const BLOCKS: usize = 6;
const BLOCK_BYTES: u64 = 512;

#[derive(Clone, Default)]
struct Node {
    after: Vec<usize>,
    touches: Vec<(usize, bool)>,
}

/// Who is ordered after whom.
#[derive(Default)]
struct Model {
    nodes: Vec<Node>,
    /// For each stream, what its next operation is ordered after.
    tails: Vec<Vec<usize>>,
    /// For each event, what its last record stands for.
    events: Vec<Vec<usize>>,
    /// What the host knows to be complete.
    host: Vec<usize>,
}

impl Model {
    fn is_after(&self, node: usize, earlier: usize) -> bool {
        let mut seen = vec![false; node + 1];
        let mut wanted = vec![node];
        while let Some(next) = wanted.pop() {
            if next == earlier {
                return true;
            }
            for &before in &self.nodes[next].after {
                if before >= earlier && !std::mem::replace(&mut seen[before], true) {
                    wanted.push(before);
                }
            }
        }
        false
    }

    /// Adds an operation to a stream; how many blocks it races on.
    fn add(&mut self, stream: usize, touches: &[(usize, bool)]) -> usize {
        let mut after = self.tails[stream].clone();
        after.extend(&self.host);
        let node = self.nodes.len();
        self.nodes.push(Node { after, touches: touches.to_vec() });
        self.tails[stream] = vec![node];
        let clashes = |block: usize, writes: bool| {
            // A write hides what came before it: only what happened since counts, as in shadow memory.
            let mut found = false;
            for earlier in (0..node).rev() {
                for &(other, wrote) in &self.nodes[earlier].touches {
                    if other == block && (writes || wrote) && !self.is_after(node, earlier) {
                        found = true;
                    }
                }
                if self.nodes[earlier].touches.contains(&(block, true)) {
                    break;
                }
            }
            found
        };
        touches.iter().filter(|(block, writes)| clashes(*block, *writes)).count()
    }
}

/// Runs one random program; how many races it has.
fn program(seed: u64, progress: Progress, careful: bool) -> usize {
    let config = Config { seed, progress, data: Data::Full, ..Config::default() };
    let m = Machine::new(config);
    let mut rng = Rng(seed);
    let streams: Vec<Stream> = (0..4).map(|_| m.stream()).collect();
    let events: Vec<Event> = (0..4).map(|_| m.event()).collect();
    let base = m.alloc(BLOCKS as u64 * BLOCK_BYTES);
    let at = |block: usize| base + block as u64 * BLOCK_BYTES;
    let mut model = Model { tails: vec![vec![]; 4], events: vec![vec![]; 4], ..Model::default() };
    let mut value: [Option<u8>; BLOCKS] = [None; BLOCKS];
    // For the careful: who touched a block last.
    let mut owner = [0usize; BLOCKS];
    let mut races = 0;
    for step in 0..150 {
        let stream = rng.below(4);
        match rng.below(if careful { 6 } else { 10 }) {
            0..=4 => {
                let block = rng.below(BLOCKS);
                if careful && owner[block] != stream {
                    let event = rng.below(4);
                    m.record(events[event], streams[owner[block]]);
                    m.wait(streams[stream], events[event]);
                    let before = model.tails[owner[block]].clone();
                    model.events[event] = before.clone();
                    model.tails[stream].extend(before);
                }
                owner[block] = stream;
                let writes = rng.below(2) == 0;
                let written = step as u8;
                let access = match (writes, value[block]) {
                    (true, _) => Access::write(at(block), BLOCK_BYTES, written),
                    (false, Some(expected)) if careful => {
                        Access::expect(at(block), BLOCK_BYTES, expected)
                    }
                    (false, _) => Access::read(at(block), BLOCK_BYTES),
                };
                if writes {
                    value[block] = Some(written);
                }
                m.sim.launch(streams[stream], &[access]).unwrap();
                let expected = model.add(stream, &[(block, writes)]);
                let found = m.sim.take_violations();
                assert_eq!(found.len(), expected, "seed {seed}, step {step}: {found:?}");
                races += expected;
            }
            5 => {
                let event = rng.below(4);
                if m.ready(events[event]) {
                    let known = model.events[event].clone();
                    model.host.extend(known);
                }
            }
            6 => {
                let event = rng.below(4);
                m.record(events[event], streams[stream]);
                model.events[event] = model.tails[stream].clone();
            }
            7 | 8 => {
                let event = rng.below(4);
                m.wait(streams[stream], events[event]);
                let before = model.events[event].clone();
                model.tails[stream].extend(before);
            }
            _ => {
                m.sync(streams[stream]);
                let known = model.tails[stream].clone();
                model.host.extend(known);
            }
        }
    }
    call!(m, ctx_synchronize()).unwrap();
    assert_eq!(m.sim.count(Mistake::WrongData), 0, "seed {seed}");
    races
}

const PROGRESS: [Progress; 4] =
    [Progress::Lazy, Progress::Random, Progress::Eager, Progress::Timed];

#[test]
fn clocks_and_the_graph_of_all_operations_agree() {
    let mut races = 0;
    for seed in 0..400 {
        races += program(seed, PROGRESS[seed as usize % 4], false);
    }
    assert!(races > 1000, "{races}: the programs are not wild enough to tell anything");
}

#[test]
fn careful_programs_have_no_race_and_find_what_they_wrote() {
    for seed in 0..400 {
        assert_eq!(program(seed, PROGRESS[seed as usize % 4], true), 0, "seed {seed}");
    }
}

#[test]
fn the_legacy_stream_in_random_programs() {
    for seed in 0..100 {
        let m = Machine::new(Config { seed, data: Data::Full, ..Config::default() });
        let mut rng = Rng(seed);
        let mut streams: Vec<Stream> =
            (0..3).map(|_| m.stream_with(constant::STREAM_DEFAULT)).collect();
        streams.push(Stream::NULL);
        let ptr = m.alloc(512);
        // Between two users of other streams the legacy stream does something.
        for step in 0..100u8 {
            m.write(streams[rng.below(3)], ptr, 512, step);
            m.expect(Stream::NULL, ptr, 512, step);
        }
        call!(m, ctx_synchronize()).unwrap();
        m.sim.assert_clean();
    }
}

/// Every block is written where it is allocated, read where it is freed, and its bytes are its own: with
/// any set of reuse policies the driver's pool must neither race nor mix blocks up.
#[test]
fn the_drivers_pool_never_gives_a_block_too_early() {
    for seed in 0..120u64 {
        let config = Config { seed, data: Data::Edges, vram_bytes: 512 << 20, ..Config::default() };
        let m = Machine::new(Config { progress: PROGRESS[seed as usize % 4], ..config });
        let mut rng = Rng(seed);
        let pool = m.default_pool();
        for policy in 1..=3 {
            m.set_pool_attribute(pool, policy, seed >> policy & 1);
        }
        let threshold = [0, 64 << 20, u64::MAX][rng.below(3)];
        m.set_pool_attribute(pool, constant::MEMPOOL_ATTR_RELEASE_THRESHOLD, threshold);
        let streams: Vec<Stream> = (0..4).map(|_| m.stream()).collect();
        let event = m.event();
        let mut live: Vec<(u64, u64, usize, u8)> = Vec::new();
        for step in 0..400 {
            let stream = rng.below(4);
            if live.len() < 3 || rng.below(2) == 0 {
                let most = if rng.below(8) == 0 { 40 << 20 } else { 200 << 10 };
                let bytes = 1 + rng.below(most) as u64;
                let Ok(ptr) = m.alloc_async(bytes, streams[stream]) else {
                    continue;
                };
                let apart = live.iter().all(|(at, len, ..)| ptr + bytes <= *at || at + len <= ptr);
                assert!(apart, "seed {seed}, step {step}: blocks overlap");
                m.write(streams[stream], ptr, bytes, step as u8);
                live.push((ptr, bytes, stream, step as u8));
            } else {
                let (ptr, bytes, owner, value) = live.swap_remove(rng.below(live.len()));
                if owner != stream {
                    m.record(event, streams[owner]);
                    m.wait(streams[stream], event);
                }
                m.expect(streams[stream], ptr, bytes, value);
                m.free_async(ptr, streams[stream]).unwrap();
            }
            if rng.below(40) == 0 {
                m.sync(streams[stream]);
            }
            let used: u64 = live.iter().map(|(_, bytes, ..)| bytes.next_multiple_of(512)).sum();
            assert_eq!(m.pool_attribute(pool, constant::MEMPOOL_ATTR_USED_MEM_CURRENT), used);
            let reserved = m.pool_attribute(pool, constant::MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
            assert!(reserved >= used && reserved == m.sim.used_bytes(0));
        }
        for (ptr, _, owner, _) in live {
            m.free_async(ptr, streams[owner]).unwrap();
        }
        call!(m, ctx_synchronize()).unwrap();
        call!(m, mem_pool_trim_to(pool, 0)).unwrap();
        assert_eq!(m.sim.used_bytes(0), 0, "seed {seed}");
        m.sim.assert_clean();
    }
}

/// Chunks are mapped, written, unmapped when known unused and mapped elsewhere: they keep their bytes.
#[test]
fn chunks_keep_their_bytes_wherever_they_are_mapped() {
    const CHUNK: u64 = 2 << 20;
    for seed in 0..60u64 {
        let m = Machine::new(Config { seed, data: Data::Edges, ..Config::default() });
        let mut rng = Rng(seed);
        let streams: Vec<Stream> = (0..2).map(|_| m.stream()).collect();
        let range = m.reserve(8 * CHUNK);
        let chunks: Vec<u64> = (0..4).map(|_| m.create(CHUNK, 0).unwrap()).collect();
        // Which place a chunk is at, and what it holds.
        let mut place: [Option<usize>; 4] = [None; 4];
        let mut value: [Option<u8>; 4] = [None; 4];
        for step in 0..200 {
            let chunk = rng.below(4);
            match place[chunk] {
                None => {
                    let free =
                        (0..8).filter(|at| !place.contains(&Some(*at))).nth(rng.below(4)).unwrap();
                    let ptr = range + free as u64 * CHUNK;
                    m.map(ptr, CHUNK, chunks[chunk]).unwrap();
                    place[chunk] = Some(free);
                    if let Some(value) = value[chunk] {
                        m.expect(streams[rng.below(2)], ptr, CHUNK, value);
                    }
                }
                Some(at) => {
                    let ptr = range + at as u64 * CHUNK;
                    call!(m, ctx_synchronize()).unwrap();
                    if rng.below(2) == 0 {
                        m.write(streams[rng.below(2)], ptr, CHUNK, step as u8);
                        value[chunk] = Some(step as u8);
                    } else {
                        m.unmap(ptr, CHUNK).unwrap();
                        place[chunk] = None;
                    }
                }
            }
        }
        call!(m, ctx_synchronize()).unwrap();
        assert_eq!(m.sim.used_bytes(0), 4 * CHUNK);
        m.sim.assert_clean();
    }
}
