//! `prof leaks`: call sites whose memory grows and stays. A leak is allocated again and again, and its blocks
//! get older than those that the site frees; a cache that fills stops growing, and a pool grows in
//! pieces that are used again. Ranked by growth times age, with the error that sampling leaves.
use std::collections::{BTreeMap, HashMap, HashSet};

use serde_json::json;
use thermalloc_prof_format::Block;

use super::Output;
use super::analysis::{Analysis, name_of};
use super::profile::{Profile, Snapshot, float, on_host, replay};
use super::report::head;
use super::table::{Table, bytes, count, span};
use crate::failure::Failure;

/// The time is cut in so many parts; a leak has blocks from most of the later ones.
const PARTS: usize = 8;
/// Less growth than this is nothing to look at.
const LEAST_BYTES: f64 = 64.0 * 1024.0;
/// Growth has to be so many standard errors.
const SURE: f64 = 2.0;

/// Functions that get memory for a pool of their own: what is in it is freed to it, not to us.
const POOLS: [&str; 14] = [
    "_PyObject_ArenaMalloc",
    "_PyMem_ArenaAlloc",
    "new_arena",
    "arena_map_get",
    "BFCAllocator::Extend",
    "BFCArena::Extend",
    "ArenaBlock",
    "google::protobuf::internal::ThreadSafeArena",
    "google::protobuf::Arena",
    "absl::base_internal::LowLevelAlloc",
    "llvm::BumpPtrAllocatorImpl",
    "npy_alloc_cache",
    "PyTokenizer",
    "__gnu_cxx::__pool",
];

/// A site that may leak.
#[derive(Clone, Debug)]
pub(crate) struct Leak {
    pub(crate) site: u32,
    pub(crate) component: u8,
    pub(crate) growth: f64,
    pub(crate) error: f64,
    pub(crate) live: f64,
    pub(crate) blocks: f64,
    /// Mean of its live blocks, seconds.
    pub(crate) age: f64,
    /// Parts of the time from which it has live blocks.
    pub(crate) parts: usize,
    /// Bytes a second.
    pub(crate) rate: f64,
    pub(crate) pool: bool,
}

impl Leak {
    fn score(&self) -> f64 {
        self.growth * self.age
    }
}

/// The state before and after, and since when the process ran.
struct Span {
    before: Vec<Block>,
    after: Vec<Block>,
    begin_ns: u64,
    before_ns: u64,
    after_ns: u64,
}

pub(crate) fn report(
    a: &Analysis,
    earlier: Option<&Profile>,
    top: usize,
) -> Result<Output, Failure> {
    let (span_of, how) = between(a, earlier)?;
    let all = find(a, &span_of);
    let (pools, leaks): (Vec<Leak>, Vec<Leak>) = all.into_iter().partition(|leak| leak.pool);
    let seconds = float(span_of.after_ns.saturating_sub(span_of.before_ns)) / 1e9;
    let mut text = head(&a.profile, &how);
    if leaks.is_empty() {
        text += "no site grows steadily and keeps what it allocates\n";
    } else {
        text += &format!("sites that grow and keep, over {}, worst first\n\n", span(seconds));
        text += &table(a, &leaks, top);
    }
    if !pools.is_empty() {
        text += "\npools that grew: what is in them is known to their owners only\n\n";
        text += &table(a, &pools, top);
    }
    let row = |leak: &Leak| {
        json!({
            "site": leak.site, "component": name_of(leak.component), "growth_bytes": leak.growth,
            "error_bytes": leak.error, "live_bytes": leak.live, "live_blocks": leak.blocks,
            "mean_age_s": leak.age, "bytes_per_second": leak.rate, "stack": a.names(leak.site),
        })
    };
    let json = json!({
        "how": how, "seconds": seconds,
        "leaks": leaks.iter().map(row).collect::<Vec<_>>(),
        "pools": pools.iter().map(row).collect::<Vec<_>>(),
        "warnings": a.profile.warnings(),
    });
    Ok(Output { text, json, picture: None })
}

fn table(a: &Analysis, leaks: &[Leak], top: usize) -> String {
    let mut table = Table::new(&[
        ">growth",
        ">+-",
        ">a second",
        ">live",
        ">blocks",
        ">mean age",
        "component",
        "call site",
    ]);
    for leak in leaks.iter().take(top) {
        table.row([
            bytes(leak.growth),
            bytes(leak.error),
            bytes(leak.rate),
            bytes(leak.live),
            count(leak.blocks),
            span(leak.age),
            name_of(leak.component).to_owned(),
            a.line(leak.site, 4),
        ]);
    }
    table.text()
}

/// What is compared: an earlier file's end, else the middle of the events or of the dumps, with the end.
fn between(a: &Analysis, earlier: Option<&Profile>) -> Result<(Span, String), Failure> {
    let last = a.profile.last()?;
    // At a process's end all is freed: what matters is the state before that.
    let last = settled(&a.profile, last);
    let begin_ns = a.profile.time_ns.min(first_birth(last));
    if let Some(earlier) = earlier {
        let first = earlier.last()?;
        if earlier.pid != a.profile.pid {
            return Err(Failure::cannot_run(
                "profiles",
                "they are of different processes",
                "'thermalloc prof compare' compares runs",
            ));
        }
        let (old, new) = if first.time_ns <= last.time_ns { (first, last) } else { (last, first) };
        let how = format!("dump {} against dump {}", old.number, new.number);
        return Ok((span_from(old.live.clone(), old.time_ns, new, begin_ns), how));
    }
    let half = begin_ns + last.time_ns.saturating_sub(begin_ns) / 2;
    if !a.profile.events.is_empty() {
        let mut live = BTreeMap::new();
        let events = a.profile.events.iter().take_while(|event| event.time_ns() <= half);
        events.for_each(|event| replay(&mut live, event));
        let how = "the first half of the events against the second".to_owned();
        return Ok((span_from(live.into_values().collect(), half, last, begin_ns), how));
    }
    let older =
        a.profile.snapshots.iter().rev().find(|s| s.time_ns <= half && s.number != last.number);
    if let Some(older) = older {
        let how = format!("dump {} against dump {}", older.number, last.number);
        return Ok((span_from(older.live.clone(), older.time_ns, last, begin_ns), how));
    }
    // One dump: what was born in the second half came on top, unless the site frees blocks of such an age.
    let lifetimes = longest(last);
    let mut before = Vec::new();
    let mut after = Vec::new();
    for block in &last.live {
        let age = last.time_ns.saturating_sub(block.time_ns);
        if block.time_ns <= half || lifetimes.get(&block.site).is_some_and(|&most| age <= most) {
            before.push(*block);
        }
        after.push(*block);
    }
    let how =
        "one dump: blocks of the second half that outlived those that their sites freed".to_owned();
    let (before_ns, after_ns) = (half, last.time_ns);
    Ok((Span { before, after, begin_ns, before_ns, after_ns }, how))
}

fn span_from(before: Vec<Block>, before_ns: u64, last: &Snapshot, begin_ns: u64) -> Span {
    Span { before, after: last.live.clone(), begin_ns, before_ns, after_ns: last.time_ns }
}

/// The fullest of the last two dumps: the one at the exit comes after the program has freed its memory.
fn settled<'a>(profile: &'a Profile, last: &'a Snapshot) -> &'a Snapshot {
    let bytes = |s: &Snapshot| s.live.iter().map(|b| b.weight * float(b.size)).sum::<f64>();
    match profile.snapshots.iter().rev().nth(1) {
        Some(before) if last.reason == "exit" && bytes(before) > 2.0 * bytes(last) => before,
        _ => last,
    }
}

fn first_birth(s: &Snapshot) -> u64 {
    s.live.iter().map(|block| block.time_ns).min().unwrap_or(s.time_ns)
}

/// By site: an age that hardly one of its freed blocks reached, nanoseconds.
fn longest(s: &Snapshot) -> HashMap<u32, u64> {
    let mut by_site: HashMap<u32, Vec<f64>> = HashMap::new();
    for l in &s.lifetimes {
        let bins = by_site.entry(l.site).or_default();
        bins.resize(bins.len().max(l.times.len()), 0.0);
        bins.iter_mut().zip(&l.times).for_each(|(sum, part)| *sum += part);
    }
    by_site
        .into_iter()
        .map(|(site, bins)| {
            let all: f64 = bins.iter().sum();
            let mut seen = 0.0;
            let bin = bins.iter().position(|part| {
                seen += part;
                seen >= 0.99 * all
            });
            // Bin i ends at 2^(i+1) us.
            (site, bin.map_or(0, |bin| 2000u64 << bin.min(40)))
        })
        .collect()
}

fn find(a: &Analysis, s: &Span) -> Vec<Leak> {
    let old: HashSet<u64> = s.before.iter().map(|block| block.serial).collect();
    let now = super::classes::Moment { time_ns: s.after_ns, step: 0 };
    let mut leaks: HashMap<u32, Leak> = HashMap::new();
    let mut parts: HashMap<u32, HashSet<usize>> = HashMap::new();
    let length = s.after_ns.saturating_sub(s.begin_ns).max(1);
    let fresh = |site, component| Leak {
        site,
        component,
        growth: 0.0,
        error: 0.0,
        live: 0.0,
        blocks: 0.0,
        age: 0.0,
        parts: 0,
        rate: 0.0,
        pool: false,
    };
    let variance = |b: &Block| b.weight * (b.weight - 1.0) * float(b.size).powi(2);
    for block in s.after.iter().filter(|block| on_host(block) || block.space == 1) {
        let component = a.component(block, now).0;
        let leak = leaks.entry(block.site).or_insert_with(|| fresh(block.site, component));
        let stands = block.weight * float(block.size);
        leak.live += stands;
        leak.blocks += block.weight;
        leak.age += stands * float(s.after_ns.saturating_sub(block.time_ns)) / 1e9;
        if !old.contains(&block.serial) {
            leak.error += variance(block);
        }
        let since = u128::from(block.time_ns.saturating_sub(s.begin_ns));
        let part = usize::try_from(since * PARTS as u128 / u128::from(length)).unwrap_or(0);
        parts.entry(block.site).or_default().insert(part.min(PARTS - 1));
    }
    let still: HashSet<u64> = s.after.iter().map(|block| block.serial).collect();
    let mut was: HashMap<u32, f64> = HashMap::new();
    for block in &s.before {
        *was.entry(block.site).or_default() += block.weight * float(block.size);
        if let Some(leak) = leaks.get_mut(&block.site).filter(|_| !still.contains(&block.serial)) {
            leak.error += variance(block);
        }
    }
    let seconds = float(s.after_ns.saturating_sub(s.before_ns)) / 1e9;
    let mut found: Vec<Leak> = leaks
        .into_values()
        .map(|mut leak| {
            leak.growth = leak.live - was.get(&leak.site).copied().unwrap_or(0.0);
            leak.error = leak.error.sqrt();
            leak.age /= leak.live.max(1.0);
            leak.rate = if seconds > 0.0 { leak.growth / seconds } else { 0.0 };
            // The last part is that of blocks which may still be on their way.
            let later = PARTS / 2..PARTS;
            leak.parts = parts
                .get(&leak.site)
                .map_or(0, |parts| parts.iter().filter(|part| later.contains(part)).count());
            leak
        })
        .filter(|leak| {
            leak.growth >= LEAST_BYTES && leak.growth > SURE * leak.error && leak.parts > PARTS / 4
        })
        .collect();
    for leak in &mut found {
        let names = a.names(leak.site);
        leak.pool = names.iter().take(8).any(|name| POOLS.iter().any(|pool| name.contains(pool)));
    }
    found.sort_by(|a, b| b.score().total_cmp(&a.score()));
    found
}

#[cfg(test)]
mod tests {
    use super::super::profile::Site;
    use super::super::symbols::Symbols;
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// Sites: 1 leaks a block a second; 2 is a cache that fills in the first two seconds; 3 replaces its
    /// block each second; 4 is a pool that grows.
    fn analysis() -> Analysis {
        let mut profile = Profile { pid: 1, ..Profile::default() };
        let mut symbols = Symbols::default();
        for (site, name) in [(1, "leak"), (2, "cache"), (3, "replace"), (4, "new_arena")] {
            let address = u64::from(site) * 100;
            profile.sites.insert(site, Site { frames: vec![address], flags: 0 });
            symbols.set(address, name, "/bin/a");
        }
        let mut serial = 0;
        let mut block = |site, second: u64| {
            serial += 1;
            let time_ns = second * SECOND;
            Block {
                site,
                time_ns,
                serial,
                size: 100_000,
                usable: 100_000,
                weight: 1.0,
                ..Block::default()
            }
        };
        let mut live = Vec::new();
        for second in 0..16 {
            live.push(block(1, second));
            live.push(block(4, second));
            if second < 2 {
                live.extend((0..50).map(|_| block(2, second)));
            }
        }
        live.push(block(3, 15));
        profile.snapshots.push(Snapshot {
            time_ns: 16 * SECOND,
            number: 1,
            live,
            ..Snapshot::default()
        });
        Analysis::with(profile, symbols)
    }

    #[test]
    fn a_leak_is_told_from_caches_and_pools() {
        let a = analysis();
        let (span, _) = between(&a, None).unwrap();
        let found = find(&a, &span);
        let names: Vec<(u32, bool)> = found.iter().map(|leak| (leak.site, leak.pool)).collect();
        assert_eq!(names.len(), 2, "{found:?}");
        assert!(names.contains(&(1, false)) && names.contains(&(4, true)), "{names:?}");
        let leak = found.iter().find(|leak| leak.site == 1).unwrap();
        assert!((leak.growth - 700_000.0).abs() <= 100_000.0, "{leak:?}");
        assert!((leak.rate - 100_000.0).abs() < 20_000.0, "{leak:?}");
    }

    #[test]
    fn growth_within_the_error_of_sampling_is_none() {
        let mut a = analysis();
        for block in &mut a.profile.snapshots[0].live {
            block.weight = 40.0;
        }
        let (span, _) = between(&a, None).unwrap();
        assert!(find(&a, &span).iter().all(|leak| leak.growth > SURE * leak.error));
    }

    #[test]
    fn dumps_of_two_processes_are_no_growth() {
        let a = analysis();
        let mut other = a.profile.clone();
        other.pid = 2;
        assert!(between(&a, Some(&other)).is_err());
    }
}
