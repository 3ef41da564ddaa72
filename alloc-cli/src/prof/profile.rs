//! A profile file as reports want it: everything owned, snapshots apart from events, what is damaged
//! left out and counted.
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;

use thermalloc_prof_format::{
    self as format, Block, Damage, Extent, Free, Process, Record, Records, Resize, Retag,
    SnapshotBegin, Step, System, Text, Totals, space,
};

use crate::failure::Failure;

/// A file that code was mapped from.
#[derive(Clone, Debug, Default)]
pub(crate) struct Mapping {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) offset: u64,
    pub(crate) flags: u32,
    pub(crate) build_id: Vec<u8>,
    pub(crate) path: String,
}

/// A mapping of the process with the memory behind it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Region {
    pub(crate) start: u64,
    pub(crate) resident: u64,
    pub(crate) shared: u64,
    pub(crate) anonymous: u64,
    pub(crate) locked: u64,
    pub(crate) flags: u32,
    pub(crate) path: String,
}

/// An arena, or a pool of device memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pool {
    pub(crate) name: String,
    /// Threads that are bound to it.
    pub(crate) threads: u32,
    pub(crate) live: u64,
    pub(crate) pending: u64,
    pub(crate) free: u64,
    pub(crate) held: u64,
    /// 0: not known.
    pub(crate) peak: u64,
}

impl Pool {
    fn new(pool: &format::Pool<'_>) -> Self {
        let (name, index) = (string(pool.name), pool.index);
        let name = match (pool.space, pool.flags) {
            (space::HOST, 1) => "arenas of CPUs".to_owned(),
            (space::HOST, 2) => format!("  slabs of {index}"),
            (space::HOST, _) => format!("arena {index} {name}"),
            (kind, _) => {
                let kind = match kind {
                    space::PINNED => "pinned, ",
                    space::MANAGED => "managed, ",
                    _ => "",
                };
                format!("{kind}device {} {name}", pool.device).trim_end().to_owned()
            }
        };
        Self {
            name,
            threads: pool.threads,
            live: pool.live_bytes,
            pending: pool.pending_bytes,
            free: pool.free_bytes,
            held: pool.held_bytes,
            peak: pool.peak_bytes,
        }
    }
}

/// A call stack.
#[derive(Clone, Debug, Default)]
pub(crate) struct Site {
    /// Return addresses, leaf first.
    pub(crate) frames: Vec<u64>,
    pub(crate) flags: u32,
}

/// What a block was allocated for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tag {
    pub(crate) parent: u32,
    pub(crate) source: u8,
    pub(crate) component: u8,
    pub(crate) name: String,
    pub(crate) region: String,
}

/// What happened to a recorded block.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Event {
    Alloc(Block),
    Free(Free),
    Resize(Resize),
    Retag(Retag),
    Step(Step),
}

impl Event {
    pub(crate) fn time_ns(&self) -> u64 {
        match self {
            Event::Alloc(e) => e.time_ns,
            Event::Free(e) => e.time_ns,
            Event::Resize(e) => e.time_ns,
            Event::Retag(e) => e.time_ns,
            Event::Step(e) => e.time_ns,
        }
    }
}

/// How long the freed blocks of a site lived.
#[derive(Clone, Debug)]
pub(crate) struct Lifetimes {
    pub(crate) site: u32,
    /// Blocks by time: bin i ends at 2^(i+1) us.
    pub(crate) times: Vec<f64>,
    /// Blocks by steps.
    pub(crate) steps: Vec<f64>,
}

/// The state at one moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct Snapshot {
    pub(crate) time_ns: u64,
    pub(crate) number: u64,
    pub(crate) step: u64,
    pub(crate) reason: String,
    pub(crate) totals: Vec<Totals>,
    pub(crate) live: Vec<Block>,
    pub(crate) lifetimes: Vec<Lifetimes>,
    pub(crate) stats: BTreeMap<String, u64>,
    pub(crate) extents: Vec<Extent>,
    pub(crate) regions: Vec<Region>,
    pub(crate) pools: Vec<Pool>,
    pub(crate) system: Option<System>,
    /// Its end was written.
    pub(crate) whole: bool,
}

impl Snapshot {
    /// A figure of the allocator's; 0 where the file has none of the name.
    pub(crate) fn stat(&self, name: &str) -> u64 {
        self.stats.get(name).copied().unwrap_or(0)
    }
}

/// All of a file.
#[derive(Clone, Debug, Default)]
pub(crate) struct Profile {
    pub(crate) pid: u32,
    pub(crate) program: String,
    pub(crate) version: String,
    pub(crate) time_ns: u64,
    pub(crate) unix_ns: u64,
    pub(crate) period_bytes: u64,
    pub(crate) page_bytes: u64,
    pub(crate) mappings: Vec<Mapping>,
    pub(crate) sites: HashMap<u32, Site>,
    pub(crate) tags: HashMap<u32, Tag>,
    pub(crate) threads: HashMap<u32, (u32, String)>,
    pub(crate) snapshots: Vec<Snapshot>,
    pub(crate) events: Vec<Event>,
    pub(crate) lost_events: u64,
    pub(crate) lost_blocks: u64,
    pub(crate) lost_sites: u64,
    pub(crate) options: BTreeMap<String, String>,
    pub(crate) damage: Damage,
    /// The steps are those that the reader told from the events.
    pub(crate) steps_counted: bool,
}

fn string(text: Text<'_>) -> String {
    String::from_utf8_lossy(text.0).into_owned()
}

impl Profile {
    /// Reads a file.
    pub(crate) fn read(path: &Path) -> Result<Self, Failure> {
        let bytes = fs::read(path)
            .map_err(|why| Failure::not_found(path.display(), why, "give it a profile's path"))?;
        let profile = Self::parse(&bytes);
        if profile.pid == 0 {
            return Err(Failure::cannot_run(
                path.display(),
                "not a profile of thermalloc",
                "profiles end in .thprof, logs are what the option prof_events names",
            ));
        }
        Ok(profile)
    }

    /// Reads the bytes of a file; of what is no profile nothing is left.
    pub(crate) fn parse(bytes: &[u8]) -> Self {
        let mut profile = Self::default();
        let mut open = None;
        let mut records = Records::new(bytes);
        for record in records.by_ref() {
            profile.take(record, &mut open);
        }
        profile.damage = records.damage();
        profile.snapshots.extend(open);
        profile.add_end();
        profile
    }

    /// A log whose process wrote no dump at its end: the events say more than a dump before, or one that was cut.
    fn add_end(&mut self) {
        let Some(end_ns) = self.events.iter().map(Event::time_ns).max() else { return };
        let is_end = |s: &Snapshot| s.whole && (s.reason == "exit" || s.time_ns >= end_ns);
        if !self.snapshots.last().is_some_and(is_end) {
            self.snapshots.push(self.replayed(end_ns));
        }
    }

    fn take(&mut self, record: Record<'_>, open: &mut Option<Snapshot>) {
        match record {
            Record::Process(process) => self.process(process),
            Record::Mapping(m) => {
                let (build_id, path) = m.text.split(m.build_id_bytes);
                let mapping = Mapping {
                    start: m.start,
                    end: m.end,
                    offset: m.offset,
                    flags: m.flags,
                    build_id: build_id.0.to_vec(),
                    path: string(path),
                };
                // What was mapped later stands for what was there before.
                self.mappings.retain(|old| old.end <= mapping.start || old.start >= mapping.end);
                self.mappings.push(mapping);
            }
            Record::Site(s) => {
                let site = Site { frames: s.frames.iter().collect(), flags: s.flags };
                self.sites.insert(s.site, site);
            }
            Record::Tag(t) => {
                let (name, region) = t.text.split(t.name_bytes);
                let (name, region) = (string(name), string(region));
                let tag = Tag {
                    parent: t.parent,
                    source: t.source,
                    component: t.component,
                    name,
                    region,
                };
                self.tags.insert(t.tag, tag);
            }
            Record::Thread(t) => drop(self.threads.insert(t.thread, (t.tid, string(t.name)))),
            Record::Alloc(block) => self.events.push(Event::Alloc(block)),
            Record::Free(free) => self.events.push(Event::Free(free)),
            Record::Resize(resize) => self.events.push(Event::Resize(resize)),
            Record::Retag(retag) => self.events.push(Event::Retag(retag)),
            Record::Step(step) => self.events.push(Event::Step(step)),
            Record::Lost(lost) => {
                self.lost_events += lost.events;
                self.lost_blocks = self.lost_blocks.max(lost.blocks);
                self.lost_sites = self.lost_sites.max(lost.sites);
            }
            Record::Option(o) => {
                let (name, value) = o.text.split(o.name_bytes);
                self.options.insert(string(name), string(value));
            }
            Record::SnapshotBegin(begin) => {
                self.snapshots.extend(open.replace(Snapshot::new(&begin)));
            }
            Record::SnapshotEnd(end) => {
                if let Some(mut snapshot) = open.take() {
                    snapshot.whole = snapshot.number == end.number;
                    self.snapshots.push(snapshot);
                }
            }
            other => {
                if let Some(snapshot) = open {
                    snapshot.take(other);
                }
            }
        }
    }

    /// What a block is first marked as it is for from its birth on: marks come when that is known.
    pub(crate) fn mark_from_birth(&mut self) {
        let mut marks = HashMap::new();
        for event in &self.events {
            if let Event::Retag(retag) = event {
                marks.entry(retag.serial).or_insert(retag.tag);
            }
        }
        for event in &mut self.events {
            if let Event::Alloc(block) = event
                && let Some(&tag) = marks.get(&block.serial)
            {
                block.tag = tag;
            }
        }
    }

    fn process(&mut self, process: Process<'_>) {
        let (version, program) = process.text.split(process.version_bytes);
        self.pid = process.pid;
        (self.version, self.program) = (string(version), string(program));
        (self.time_ns, self.unix_ns) = (process.time_ns, process.unix_ns);
        (self.period_bytes, self.page_bytes) = (process.period_bytes, process.page_bytes.into());
    }

    /// The state at the end of a log, by its events, and the last dump for what a fork's child came with.
    fn replayed(&self, time_ns: u64) -> Snapshot {
        let dump = self.snapshots.iter().rev().find(|s| s.whole);
        let dumped = dump.into_iter().flat_map(|dump| &dump.live);
        let mut live: BTreeMap<u64, Block> = dumped.map(|b| (b.serial, *b)).collect();
        let mut totals: HashMap<(u32, u32, u32), Totals> = HashMap::new();
        let mut step = 0;
        for event in &self.events {
            replay(&mut live, event);
            match event {
                Event::Step(s) => step = s.step,
                Event::Alloc(b) => {
                    let total = of_key(&mut totals, b);
                    total.all_blocks += 1;
                    total.all_bytes += b.size;
                    total.weighted_all_blocks += b.weight;
                    total.weighted_all_bytes += b.weight * float(b.size);
                }
                _ => {}
            }
        }
        for b in live.values() {
            let total = of_key(&mut totals, b);
            total.live_blocks += 1;
            total.live_bytes += b.size;
            total.weighted_live_blocks += b.weight;
            total.weighted_live_bytes += b.weight * float(b.size);
        }
        Snapshot {
            time_ns,
            number: 0,
            step,
            reason: "end of the events".to_owned(),
            totals: totals.into_values().collect(),
            live: live.into_values().collect(),
            ..Snapshot::default()
        }
    }

    /// The last snapshot, which reports speak of.
    pub(crate) fn last(&self) -> Result<&Snapshot, Failure> {
        self.snapshots.last().ok_or_else(|| {
            Failure::cannot_run("profile", "no dump and no event in it", "profile it again")
        })
    }

    /// The mapping that an address lies in.
    pub(crate) fn mapping_of(&self, address: u64) -> Option<(usize, &Mapping)> {
        self.mappings
            .iter()
            .enumerate()
            .find(|(_, mapping)| (mapping.start..mapping.end).contains(&address))
    }

    /// Seconds since the file was begun.
    pub(crate) fn seconds(&self, time_ns: u64) -> f64 {
        float(time_ns.saturating_sub(self.time_ns)) / 1e9
    }

    /// What a reader should be told of the file itself.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.damage.any() {
            let d = self.damage;
            warnings.push(format!(
                "the file is damaged: {} bytes skipped, {} chunks missing{}",
                d.skipped_bytes,
                d.missing_chunks,
                if d.truncated { ", cut off at its end" } else { "" }
            ));
        }
        let cut = self.sites.values().filter(|site| site.flags != 0).count();
        if cut * 20 > self.sites.len() {
            let all = self.sites.len();
            warnings.push(format!(
                "{cut} of {all} call stacks are deeper than what was kept, or end early"
            ));
        }
        if self.lost_events > 0 {
            warnings.push(format!("{} events found no room", self.lost_events));
        }
        if self.lost_blocks > 0 {
            warnings.push(format!("{} blocks were chosen and not recorded", self.lost_blocks));
        }
        if self.lost_sites > 0 {
            warnings
                .push(format!("{} blocks have no call stack: no room for more", self.lost_sites));
        }
        if self.snapshots.last().is_some_and(|last| !last.whole && last.number > 0) {
            warnings.push("the last dump was cut: its totals are too low".to_owned());
        }
        warnings
    }
}

fn of_key<'a>(totals: &'a mut HashMap<(u32, u32, u32), Totals>, b: &Block) -> &'a mut Totals {
    let space = u32::from(b.space);
    totals.entry((b.site, b.tag, space)).or_insert_with(|| Totals {
        site: b.site,
        tag: b.tag,
        space,
        ..Totals::default()
    })
}

/// Applies an event to the live blocks, by serial.
pub(crate) fn replay(live: &mut BTreeMap<u64, Block>, event: &Event) {
    match event {
        Event::Alloc(block) => drop(live.insert(block.serial, *block)),
        Event::Free(free) if free.flags & 1 == 0 => drop(live.remove(&free.serial)),
        Event::Free(free) => {
            if let Some(block) = live.get_mut(&free.serial) {
                block.flags |= 1;
            }
        }
        Event::Resize(resize) => {
            if let Some(block) = live.get_mut(&resize.serial) {
                (block.address, block.size) = (resize.address, resize.size);
                block.usable = resize.usable;
            }
        }
        Event::Retag(retag) => {
            if let Some(block) = live.get_mut(&retag.serial) {
                block.tag = retag.tag;
            }
        }
        Event::Step(_) => {}
    }
}

impl Snapshot {
    fn new(begin: &SnapshotBegin<'_>) -> Self {
        Self {
            time_ns: begin.time_ns,
            number: begin.number,
            step: begin.step,
            reason: string(begin.reason),
            ..Self::default()
        }
    }

    fn take(&mut self, record: Record<'_>) {
        match record {
            Record::Totals(totals) => self.totals.push(totals),
            Record::Live(block) => self.live.push(block),
            Record::Lifetimes(l) => {
                let bins: Vec<f64> = l.bins.floats().collect();
                let (times, steps) = bins.split_at((l.time_bins as usize).min(bins.len()));
                self.lifetimes.push(Lifetimes {
                    site: l.site,
                    times: times.to_vec(),
                    steps: steps.to_vec(),
                });
            }
            Record::Stat(s) => {
                self.stats.insert(string(s.name), s.value);
            }
            Record::Extent(extent) => self.extents.push(extent),
            Record::Pool(pool) => self.pools.push(Pool::new(&pool)),
            Record::Region(r) => self.regions.push(Region {
                start: r.start,
                resident: r.resident_bytes,
                shared: r.shared_bytes,
                anonymous: r.anonymous_bytes,
                locked: r.locked_bytes,
                flags: r.flags,
                path: string(r.path),
            }),
            Record::System(system) => self.system = Some(system),
            _ => {}
        }
    }
}

/// Whether a block lies in memory of the host.
pub(crate) fn on_host(block: &Block) -> bool {
    matches!(block.space, space::HOST | space::PINNED)
}

/// A number for arithmetic with shares and weights.
#[allow(clippy::cast_precision_loss, reason = "figures for people")]
pub(crate) fn float(number: u64) -> f64 {
    number as f64
}

/// A whole number of an estimate.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "casts saturate")]
pub(crate) fn whole(number: f64) -> u64 {
    number.round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn born(serial: u64, time_ns: u64) -> Block {
        Block { serial, time_ns, size: 100, weight: 1.0, ..Block::default() }
    }

    /// A log with a dump at 20, and events until 30.
    fn log(reason: &str, whole: bool) -> Profile {
        let freed = |serial, time_ns| Free { serial, time_ns, ..Free::default() };
        let events = vec![
            Event::Alloc(born(2, 10)),
            Event::Alloc(born(3, 11)),
            Event::Free(freed(1, 12)),
            Event::Free(freed(2, 25)),
            Event::Alloc(born(4, 30)),
        ];
        // What a fork's child came with is in dumps only: 7.
        let live = vec![born(2, 10), born(3, 11), born(7, 1)];
        let reason = reason.to_owned();
        let dump = Snapshot { time_ns: 20, number: 5, reason, live, whole, ..Snapshot::default() };
        let mut profile = Profile { events, snapshots: vec![dump], ..Profile::default() };
        profile.add_end();
        profile
    }

    fn end(profile: &Profile) -> (u64, u64, Vec<u64>) {
        let last = profile.last().unwrap();
        (last.number, last.time_ns, last.live.iter().map(|block| block.serial).collect())
    }

    #[test]
    fn a_log_ends_with_its_events_where_no_dump_says_that_it_is_over() {
        assert_eq!(end(&log("peak", true)), (0, 30, vec![3, 4, 7]));
        assert_eq!(end(&log("peak", false)), (0, 30, vec![3, 4]), "of a dump that was cut");
        assert_eq!(end(&log("exit", true)), (5, 20, vec![2, 3, 7]));
        assert_eq!(end(&log("exit", false)), (0, 30, vec![3, 4]));
        let log = log("peak", true);
        let totals = &log.last().unwrap().totals[0];
        assert_eq!((totals.all_blocks, totals.live_blocks, totals.live_bytes), (3, 3, 300));
    }

    #[test]
    fn a_dump_is_its_own_end() {
        let dump = Snapshot { time_ns: 20, number: 5, whole: true, ..Snapshot::default() };
        let mut profile = Profile { snapshots: vec![dump], ..Profile::default() };
        profile.add_end();
        assert_eq!(profile.snapshots.len(), 1);
    }
}
