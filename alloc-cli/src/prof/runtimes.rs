//! What runtimes without symbols are at: ONNX Runtime's and OpenVINO's wheels say nothing of their blocks but which
//! file asks. A model is loaded, then run again and again, and the calls by which a program enters the runtime
//! for either differ: the outermost calls of a stack within the runtime's files. Entries that keep coming run a
//! model; those that were over before one of these began load it. All of it is a guess, and needs a log of
//! some steps (or seconds): a dump does not tell what came before.
//!
//! A model that is loaded by the same calls while another one runs already looks as if it were run.
use std::collections::HashMap;

use thermalloc_prof_format::Block;
use thermalloc_prof_format::classes::Classes;

use super::classes::Moment;
use super::profile::{Event, Profile};
use super::symbols::Symbols;

/// Smaller blocks are objects of the runtime, whatever it is at.
const LARGE_BYTES: u64 = 4096;
/// Calls that tell entries apart: bindings to Python have one function through which all calls go.
const CALLS: usize = 2;

/// What a runtime was at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Load,
    Run,
}

/// The phase of each site that is a runtime's, where it can be told.
#[derive(Clone, Debug, Default)]
pub(crate) struct Phases(HashMap<u32, Phase>);

/// Return addresses, outermost first.
type Entry = [u64; CALLS];

/// The first and the last block that came by an entry.
#[derive(Clone, Copy, Debug)]
struct Span {
    first: Moment,
    last: Moment,
}

impl Phases {
    /// `is_old`: whether what was born at the first moment is kept at the second.
    pub(crate) fn of(
        profile: &Profile,
        symbols: &Symbols,
        classes: Classes<'_>,
        is_old: impl Fn(Moment, Moment) -> bool,
    ) -> Self {
        let mut files: HashMap<&str, bool> = HashMap::new();
        let mut is_runtime = |address: &u64| {
            let module = symbols.at(*address).module.as_str();
            *files.entry(module).or_insert_with(|| classes.is_runtime(module))
        };
        let mut entries: HashMap<u32, Entry> = HashMap::new();
        for (&id, site) in &profile.sites {
            let mut calls = site.frames.iter().rev().filter(|&address| is_runtime(address));
            if let Some(&outermost) = calls.next() {
                entries.insert(id, [outermost, calls.next().copied().unwrap_or(0)]);
            }
        }
        let spans = spans(profile, &entries);
        let keeps_coming = |span: &&Span| is_old(span.first, span.last);
        let runs: Vec<Span> = spans.values().filter(keeps_coming).copied().collect();
        let phase = |span: &Span| {
            // A large model is long in loading, too.
            let before = |run: &Span| span.last.time_ns <= run.first.time_ns;
            if runs.iter().any(before) {
                return Some(Phase::Load);
            }
            keeps_coming(&span).then_some(Phase::Run)
        };
        let phases: HashMap<Entry, Phase> =
            spans.iter().filter_map(|(&entry, span)| Some((entry, phase(span)?))).collect();
        let of_site = |(site, entry)| Some((site, *phases.get(&entry)?));
        Self(entries.into_iter().filter_map(of_site).collect())
    }

    /// What the runtime was at when it allocated a block, if that is one of its large ones.
    pub(crate) fn of_block(&self, block: &Block) -> Option<Phase> {
        self.0.get(&block.site).copied().filter(|_| block.size >= LARGE_BYTES)
    }
}

fn spans(profile: &Profile, entries: &HashMap<u32, Entry>) -> HashMap<Entry, Span> {
    let mut spans: HashMap<Entry, Span> = HashMap::new();
    for event in &profile.events {
        if let Event::Alloc(block) = event
            && let Some(&entry) = entries.get(&block.site)
        {
            let at = Moment::of_block(block);
            let span = spans.entry(entry).or_insert(Span { first: at, last: at });
            span.first.time_ns = span.first.time_ns.min(at.time_ns);
            span.last.time_ns = span.last.time_ns.max(at.time_ns);
            span.last.step = span.last.step.max(at.step);
            // Where the program began to count after it had begun to run.
            if span.first.step == 0 {
                span.first.step = at.step;
            }
        }
    }
    spans
}

#[cfg(test)]
mod tests {
    use super::super::analysis::{Analysis, At};
    use super::super::classes::By;
    use super::super::profile::{Site, Snapshot};
    use super::*;
    use thermalloc_prof_format::{Free, component};

    const RUNTIME: &str = "/v/onnxruntime/capi/onnxruntime_pybind11_state.cpython-311.so";
    const MS: u64 = 1_000_000;
    /// Sites: the making of a session, a run, a run on another thread, a known function, the interpreter.
    const LOAD: u32 = 1;
    const RUN: u32 = 2;
    const WORKER: u32 = 3;
    const KNOWN: u32 = 4;
    const PYTHON: u32 = 5;

    fn empty() -> (Profile, Symbols) {
        let (mut profile, mut symbols) = (Profile::default(), Symbols::default());
        for (address, name, module) in [
            (10, "malloc", "/usr/lib/libc.so.6"),
            (20, "state.so+0x1", RUNTIME),
            (21, "state.so+0x2", RUNTIME),
            (22, "state.so+0x3", RUNTIME),
            (23, "state.so+0x4", RUNTIME),
            (29, "state.so+0x9", RUNTIME),
            (30, "onnxruntime::session_state_utils::Save", RUNTIME),
            (40, "_PyEval_EvalFrameDefault", "/usr/bin/python3"),
        ] {
            symbols.set(address, name, module);
        }
        for (id, frames) in [
            (LOAD, vec![10, 20, 21, 29, 40]),
            (RUN, vec![10, 20, 22, 29, 40]),
            (WORKER, vec![10, 20, 23]),
            (KNOWN, vec![10, 30, 21, 29, 40]),
            (PYTHON, vec![10, 40]),
        ] {
            profile.sites.insert(id, Site { frames, flags: 0 });
        }
        (profile, symbols)
    }

    /// A block of a site, from its birth to its end, both in milliseconds and in steps.
    type Life = (u32, u64, [u64; 2], Option<[u64; 2]>);

    /// How each block is known when the log ends, or was when it was born if it is freed by then.
    fn known(lives: &[Life]) -> Vec<(&'static str, By)> {
        let (mut profile, symbols) = empty();
        let mut blocks = Vec::new();
        for (serial, &(site, size, [ms, step], end)) in (1..).zip(lives) {
            let block = Block {
                site,
                size,
                serial,
                step,
                weight: 1.0,
                time_ns: ms * MS,
                ..Block::default()
            };
            blocks.push(block);
            profile.events.push(Event::Alloc(block));
            if let Some([ms, _]) = end {
                let free =
                    Free { serial, time_ns: ms * MS, born_ns: block.time_ns, ..Free::default() };
                profile.events.push(Event::Free(free));
            }
        }
        profile.events.sort_by_key(Event::time_ns);
        let live = blocks.iter().zip(lives).filter(|(_, life)| life.3.is_none());
        let live = live.map(|(block, _)| *block).collect();
        let time_ns = profile.events.last().unwrap().time_ns();
        let step = blocks.iter().map(|block| block.step).max().unwrap();
        profile.snapshots.push(Snapshot {
            time_ns,
            step,
            live,
            whole: true,
            ..Snapshot::default()
        });
        let analysis = Analysis::with(profile, symbols);
        let end = analysis.at(At::End).unwrap().now;
        let name = |(component, by)| (component::NAMES[usize::from(component)], by);
        let at = |block: &Block, life: &Life| {
            analysis.component(block, if life.3.is_none() { end } else { Moment::of_block(block) })
        };
        blocks.iter().zip(lives).map(|(block, life)| name(at(block, life))).collect()
    }

    fn run(steps: u64, every_ms: u64, counts: bool) -> Vec<Life> {
        let step = |n| if counts { n + 1 } else { 0 };
        let at = |n: u64| [1000 + n * every_ms, step(n)];
        let life = |n| (RUN, 1 << 20, at(n), Some([1000 + n * every_ms + 1, step(n)]));
        (0..steps).map(life).collect()
    }

    #[test]
    fn a_model_is_loaded_and_run() {
        for (every_ms, counts) in [(500, false), (10, true)] {
            let mut lives: Vec<Life> = vec![
                (LOAD, 1 << 20, [100, 0], None),
                (LOAD, 1 << 20, [200, 0], Some([300, 0])),
                (LOAD, 100, [300, 0], None),
                (KNOWN, 1 << 20, [400, 0], None),
                (PYTHON, 1 << 20, [500, 0], None),
                (RUN, 1 << 20, [900, 0], Some([901, 0])),
                (RUN, 8 << 20, [1000, u64::from(counts)], None),
                (WORKER, 1 << 20, [1001, u64::from(counts)], None),
            ];
            lives.extend(run(9, every_ms, counts));
            lives.push((WORKER, 1 << 20, [1001 + 8 * every_ms, if counts { 9 } else { 0 }], None));
            // Steps of the program's begin after it has loaded its model: time tells the age of what is older.
            lives.push((PYTHON, 10, [6000, if counts { 9 } else { 0 }], None));
            let told = known(&lives);
            let expected = [
                ("weights", By::Guess),
                ("workspace", By::Guess),
                ("framework", By::Guess),
                ("weights", By::Stack),
                ("python", By::Stack),
                ("activations", By::Guess),
                ("activations", By::Guess),
                ("activations", By::Guess),
                ("activations", By::Guess),
            ];
            assert_eq!(told[..expected.len()], expected, "steps: {counts}");
        }
    }

    #[test]
    fn a_large_model_is_long_in_loading() {
        let mut lives: Vec<Life> = (0..10).map(|n| (LOAD, 1 << 30, [n * 1000, 0], None)).collect();
        lives.extend(
            (0..10).map(|n| (RUN, 1 << 20, [10_000 + n * 500, 0], Some([10_001 + n * 500, 0]))),
        );
        let told = known(&lives);
        assert!(told[..10].iter().all(|&known| known == ("weights", By::Guess)), "{told:?}");
        assert!(told[10..].iter().all(|&known| known == ("activations", By::Guess)), "{told:?}");
    }

    #[test]
    fn nothing_is_said_of_what_is_too_short_to_tell() {
        let mut lives: Vec<Life> = vec![(LOAD, 1 << 20, [100, 0], None)];
        lives.extend(run(3, 10, false));
        assert!(known(&lives).iter().all(|&known| known == ("framework", By::Guess)));
        // A model that is never run.
        let lives: Vec<Life> = vec![(LOAD, 1 << 20, [0, 0], None), (PYTHON, 10, [9000, 0], None)];
        assert_eq!(known(&lives)[0], ("framework", By::Guess));
    }

    #[test]
    fn a_dump_says_nothing_of_phases() {
        let (mut profile, symbols) = empty();
        let block = Block { site: LOAD, size: 1 << 20, weight: 1.0, ..Block::default() };
        let run = Block { site: RUN, time_ns: 5000 * MS, ..block };
        let snapshot =
            Snapshot { time_ns: 9000 * MS, live: vec![block, run], ..Snapshot::default() };
        profile.snapshots.push(snapshot);
        let analysis = Analysis::with(profile, symbols);
        let now = analysis.at(At::End).unwrap().now;
        assert_eq!(analysis.component(&block, now), (component::FRAMEWORK, By::Guess));
    }
}
