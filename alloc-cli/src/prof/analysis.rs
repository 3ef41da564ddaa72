//! What all reports share: the blocks that were live at a moment, each with its component, and the call
//! stacks with names, without the allocator's own frames.
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::time::{Duration, Instant};

use thermalloc_prof_format::{Block, component};

use super::classes::{By, Components, Moment, UserRules};
use super::clock;
use super::profile::{Event, Profile, Snapshot, float, replay};
use super::symbols::{Function, Place, Symbols, is_allocator, tidy};
use crate::failure::Failure;

/// Which moment of a profile a report speaks of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum At {
    /// When most bytes were live; a file without events has its dumps to choose from.
    Peak,
    /// The last dump.
    End,
    /// So many seconds after the file was begun.
    Seconds(f64),
}

impl std::str::FromStr for At {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "peak" => Ok(At::Peak),
            "end" => Ok(At::End),
            seconds => seconds
                .parse()
                .ok()
                .filter(|seconds: &f64| *seconds >= 0.0)
                .map(At::Seconds)
                .ok_or_else(|| "expected peak, end or a number of seconds".to_owned()),
        }
    }
}

/// A sum of recorded blocks, for what they stand for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sum {
    pub(crate) bytes: f64,
    pub(crate) blocks: f64,
    pub(crate) variance: f64,
    pub(crate) samples: u64,
}

impl Sum {
    pub(crate) fn add(&mut self, block: &Block) {
        self.bytes += block.weight * float(block.size);
        self.blocks += block.weight;
        self.variance += block.weight * (block.weight - 1.0) * float(block.size).powi(2);
        self.samples += 1;
    }

    pub(crate) fn merge(&mut self, other: &Sum) {
        self.bytes += other.bytes;
        self.blocks += other.blocks;
        self.variance += other.variance;
        self.samples += other.samples;
    }

    /// The standard error of `bytes`.
    pub(crate) fn error(&self) -> f64 {
        self.variance.max(0.0).sqrt()
    }

    /// Bytes and their error as a report shows them.
    pub(crate) fn text(&self) -> String {
        let error = self.error();
        if error < 0.5 {
            return super::table::bytes(self.bytes);
        }
        format!("{} +- {}", super::table::bytes(self.bytes), super::table::bytes(error))
    }
}

/// The live blocks of one moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct Instance {
    pub(crate) what: String,
    pub(crate) now: Moment,
    pub(crate) live: Vec<Block>,
}

/// A profile with names and components.
#[derive(Debug)]
pub(crate) struct Analysis {
    pub(crate) profile: Profile,
    pub(crate) symbols: Symbols,
    pub(crate) components: Components,
    pub(crate) symbolized_in: Duration,
    /// Logs: when each block was freed, or the end. What a tensor becomes is known from its birth on.
    ends: HashMap<u64, Moment>,
}

impl Analysis {
    /// Reads and names a profile. `classes`: a file of rules, else the one that the process was given.
    pub(crate) fn read(path: &Path, classes: Option<&Path>, lines: bool) -> Result<Self, Failure> {
        let profile = Profile::read(path)?;
        Self::of(profile, classes, lines)
    }

    pub(crate) fn of(
        profile: Profile,
        classes: Option<&Path>,
        lines: bool,
    ) -> Result<Self, Failure> {
        let mut profile = profile;
        clock::count_steps(&mut profile);
        profile.mark_from_birth();
        let noted = profile.options.get("prof_classes").filter(|path| !path.is_empty());
        let noted = noted.map(Path::new).filter(|path| path.exists());
        let rules = UserRules::read(classes.or(noted))?;
        let begin = Instant::now();
        let symbols = Symbols::of(&profile, lines);
        let symbolized_in = begin.elapsed();
        let components = Components::of(&profile, &symbols, rules.classes());
        Ok(Self::joined(profile, symbols, components, symbolized_in))
    }

    #[cfg(test)]
    pub(crate) fn with(profile: Profile, symbols: Symbols) -> Self {
        let rules = UserRules::default();
        let components = Components::of(&profile, &symbols, rules.classes());
        Self::joined(profile, symbols, components, Duration::ZERO)
    }

    fn joined(
        profile: Profile,
        symbols: Symbols,
        mut components: Components,
        symbolized_in: Duration,
    ) -> Self {
        let ends = ends(&profile);
        let born = profile.events.iter().filter_map(|event| match event {
            Event::Alloc(block) => Some(block),
            _ => None,
        });
        components
            .learn(born, |known, block| become_of(known, &ends, block, Moment::of_block(block)));
        for snapshot in &profile.snapshots {
            let now = Moment::of(snapshot);
            components
                .learn(snapshot.live.iter(), |known, block| become_of(known, &ends, block, now));
        }
        Self { profile, symbols, components, symbolized_in, ends }
    }

    /// The live blocks at a moment.
    pub(crate) fn at(&self, at: At) -> Result<Instance, Failure> {
        let last = self.profile.last()?;
        if self.profile.events.is_empty() {
            let bytes = |s: &&Snapshot| -> u64 {
                s.live.iter().map(|b| super::profile::whole(b.weight * float(b.size))).sum()
            };
            let chosen = match at {
                At::End => last,
                At::Peak => self.profile.snapshots.iter().max_by_key(bytes).unwrap_or(last),
                At::Seconds(seconds) => self
                    .profile
                    .snapshots
                    .iter()
                    .rev()
                    .find(|s| self.profile.seconds(s.time_ns) <= seconds)
                    .unwrap_or(last),
            };
            return Ok(of_snapshot(chosen, &self.profile));
        }
        match at {
            At::End => Ok(of_snapshot(last, &self.profile)),
            At::Peak => Ok(self.replayed(self.peak_ns(|_| true).unwrap_or(0), "at its peak")),
            At::Seconds(seconds) => {
                let until = self.profile.time_ns + super::profile::whole(seconds * 1e9);
                Ok(self.replayed(until, "then"))
            }
        }
    }

    /// When most bytes were live, of the moments in steps that `within` says; nothing where there is none.
    fn peak_ns(&self, within: impl Fn(u64) -> bool) -> Option<u64> {
        // The weight of each live block, and what it stands for.
        let mut live: HashMap<u64, (f64, f64)> = HashMap::new();
        let (mut bytes, mut most, mut when, mut step) = (0.0, 0.0, None, 0);
        for event in &self.profile.events {
            match event {
                Event::Alloc(b) => {
                    let stands = b.weight * float(b.size);
                    let before = live.insert(b.serial, (b.weight, stands));
                    bytes += stands - before.map_or(0.0, |(_, stood)| stood);
                    step = step.max(b.step);
                }
                Event::Free(f) if f.flags & 1 == 0 => {
                    bytes -= live.remove(&f.serial).map_or(0.0, |(_, stood)| stood);
                }
                Event::Resize(r) => {
                    if let Some((weight, stood)) = live.get_mut(&r.serial) {
                        let stands = *weight * float(r.size);
                        bytes += stands - *stood;
                        *stood = stands;
                    }
                }
                Event::Step(s) => step = s.step,
                Event::Free(_) | Event::Retag(_) => {}
            }
            if bytes > most && within(step) {
                (most, when) = (bytes, Some(event.time_ns()));
            }
        }
        when
    }

    /// When most was live in a step; nothing where there is no such step.
    pub(crate) fn peak_of_step_ns(&self, step: u64) -> Option<u64> {
        self.peak_ns(|present| present == step)
    }

    /// The blocks that the events up to a time have left, those of that time with them.
    pub(crate) fn replayed(&self, until_ns: u64, what: &str) -> Instance {
        let mut live = BTreeMap::new();
        let mut now = Moment { time_ns: until_ns, step: 0 };
        for event in self.profile.events.iter().take_while(|event| event.time_ns() <= until_ns) {
            match event {
                Event::Step(step) => now.step = step.step,
                Event::Alloc(block) => now.step = now.step.max(block.step),
                _ => {}
            }
            replay(&mut live, event);
        }
        let seconds = self.profile.seconds(until_ns);
        Instance {
            what: format!("{what}, {} after its start", super::table::span(seconds)),
            now,
            live: live.into_values().collect(),
        }
    }

    /// The component of a block at a moment, by the age that it had then, or reached.
    pub(crate) fn component(&self, block: &Block, now: Moment) -> (u8, By) {
        become_of(&self.components, &self.ends, block, now)
    }

    /// The frames of a site, leaf first, without the allocator's.
    pub(crate) fn places(&self, site: u32) -> Vec<(u64, &Place)> {
        let Some(site) = self.profile.sites.get(&site) else { return Vec::new() };
        let mut places: Vec<(u64, &Place)> =
            site.frames.iter().map(|&address| (address, self.symbols.at(address))).collect();
        let own = |place: &Place| {
            place.functions.last().is_some_and(|f| is_allocator(&f.name, &place.module))
        };
        // Inlined parts of it may have a caller's frames between them, so all up to the last one.
        let ours = places.iter().take(24).rposition(|(_, place)| own(place));
        // Where a whole program is the allocator's, something is better than nothing.
        if let Some(last) = ours.filter(|last| last + 1 < places.len()) {
            places.drain(..=last);
        }
        places
    }

    /// The functions of a site, leaf first, with those that were inlined.
    pub(crate) fn functions(&self, site: u32) -> Vec<&Function> {
        self.places(site).into_iter().flat_map(|(_, place)| &place.functions).collect()
    }

    /// Names of a site's functions, leaf first.
    pub(crate) fn names(&self, site: u32) -> Vec<&str> {
        self.functions(site).into_iter().map(|function| tidy(&function.name)).collect()
    }

    /// A site in one line: the innermost functions that say something.
    pub(crate) fn line(&self, site: u32, frames: usize) -> String {
        let names = self.names(site);
        if names.is_empty() {
            return "(unknown)".to_owned();
        }
        let dull = |name: &&&str| {
            let name = **name;
            !(PASSING_ON.iter().any(|part| name.ends_with(part))
                || name.starts_with("std::")
                || name.starts_with("core::")
                || name.starts_with("alloc::")
                || name.starts_with("__gnu_cxx::")
                || name.starts_with("<alloc::"))
        };
        let mut told: Vec<&str> = names.iter().filter(dull).take(frames).copied().collect();
        if told.is_empty() {
            told = names.iter().take(frames).copied().collect();
        }
        told.dedup();
        told.into_iter().map(shorten).collect::<Vec<_>>().join(" < ")
    }

    /// What a tag says: its path of scopes, or an operator with its region.
    pub(crate) fn tag(&self, tag: u32) -> String {
        let mut parts = Vec::new();
        let mut at = tag;
        while let Some(found) = self.profile.tags.get(&at).filter(|_| parts.len() < 32) {
            let region = if found.region.is_empty() {
                String::new()
            } else {
                format!(" [{}]", found.region)
            };
            parts.push(format!("{}{region}", found.name));
            at = found.parent;
        }
        parts.reverse();
        parts.join("/")
    }

    /// The live bytes of a moment by component, most first.
    pub(crate) fn by_component(&self, instant: &Instance) -> Vec<(u8, Sum, BTreeMap<By, f64>)> {
        let mut sums: BTreeMap<u8, (Sum, BTreeMap<By, f64>)> = BTreeMap::new();
        for block in &instant.live {
            let (component, by) = self.component(block, instant.now);
            let (sum, known) = sums.entry(component).or_default();
            sum.add(block);
            *known.entry(by).or_default() += block.weight * float(block.size);
        }
        let mut rows: Vec<_> = sums.into_iter().map(|(c, (sum, by))| (c, sum, by)).collect();
        rows.sort_by(|a, b| b.1.bytes.total_cmp(&a.1.bytes));
        rows
    }

    /// The live bytes of the last dump's sums by component, most first: for a page, which has no blocks.
    pub(crate) fn totals_by_component(&self) -> Result<Vec<(u8, u64)>, Failure> {
        let mut sums: BTreeMap<u8, f64> = BTreeMap::new();
        for totals in &self.profile.last()?.totals {
            let component = self.components.of_pair(totals.site, totals.tag);
            *sums.entry(component).or_default() += totals.weighted_live_bytes;
        }
        let mut rows: Vec<(u8, u64)> =
            sums.into_iter().map(|(c, sum)| (c, super::profile::whole(sum))).collect();
        rows.sort_by_key(|row| std::cmp::Reverse(row.1));
        Ok(rows)
    }

    /// The live bytes of a moment by site, most first.
    pub(crate) fn by_site(&self, instant: &Instance) -> Vec<(u32, Sum)> {
        let mut sums: HashMap<u32, Sum> = HashMap::new();
        for block in &instant.live {
            sums.entry(block.site).or_default().add(block);
        }
        sorted(sums)
    }
}

fn become_of(
    components: &Components,
    ends: &HashMap<u64, Moment>,
    block: &Block,
    now: Moment,
) -> (u8, By) {
    let end = ends.get(&block.serial).copied().unwrap_or(now);
    components.of_block(block, if end.time_ns > now.time_ns { end } else { now })
}

fn ends(profile: &Profile) -> HashMap<u64, Moment> {
    let mut ends = HashMap::new();
    let mut now = Moment::default();
    let mut open = HashMap::new();
    for event in &profile.events {
        now.time_ns = event.time_ns();
        match event {
            Event::Step(step) => now.step = step.step,
            Event::Alloc(block) => {
                now.step = now.step.max(block.step);
                open.insert(block.serial, ());
            }
            Event::Free(free) if free.flags & 1 == 0 && open.remove(&free.serial).is_some() => {
                ends.insert(free.serial, now);
            }
            _ => {}
        }
    }
    ends.extend(open.into_keys().map(|serial| (serial, now)));
    ends
}

/// Functions that pass a request on, and say nothing of who asks.
const PASSING_ON: [&str; 12] = [
    "::AlignedMalloc",
    "CPUAllocator::AllocateRaw",
    "tensorflow::Tensor::Tensor",
    "TensorBuffer::TensorBuffer",
    "OpKernelContext::allocate_tensor",
    "OpKernelContext::allocate_temp",
    "OpKernelContext::allocate_output",
    "_PyObject_Malloc",
    "PyMem_RawMalloc",
    "c10::alloc_cpu",
    "DefaultCPUAllocator::allocate",
    "_upb_Arena_SlowMalloc_dont_copy_me__upb_internal_use_only",
];

/// Sums by something, most bytes first.
pub(crate) fn sorted<K: Ord + Copy>(sums: HashMap<K, Sum>) -> Vec<(K, Sum)> {
    let mut rows: Vec<_> = sums.into_iter().collect();
    rows.sort_by(|a, b| b.1.bytes.total_cmp(&a.1.bytes).then(a.0.cmp(&b.0)));
    rows
}

fn of_snapshot(snapshot: &Snapshot, profile: &Profile) -> Instance {
    let seconds = super::table::span(profile.seconds(snapshot.time_ns));
    let what = if snapshot.number == 0 {
        format!("at the end of the log, {seconds} after its start")
    } else {
        format!("dump {} ({})", snapshot.number, snapshot.reason)
    };
    Instance { what, now: Moment::of(snapshot), live: snapshot.live.clone() }
}

/// A name that fits a line.
pub(crate) fn shorten(name: &str) -> String {
    const MOST: usize = 72;
    if name.chars().count() <= MOST {
        return name.to_owned();
    }
    // The insides of templates go first.
    let mut short = String::new();
    let mut depth = 0usize;
    for c in name.chars() {
        match c {
            '<' => {
                if depth == 0 {
                    short.push_str("<..");
                }
                depth += 1;
            }
            '>' if depth > 0 => {
                depth -= 1;
                if depth == 0 {
                    short.push('>');
                }
            }
            c if depth == 0 => short.push(c),
            _ => {}
        }
    }
    if short.chars().count() > MOST {
        let skip = short.chars().count() - MOST + 2;
        short = format!("..{}", short.chars().skip(skip).collect::<String>());
    }
    short
}

/// A component's name.
pub(crate) fn name_of(number: u8) -> &'static str {
    component::NAMES.get(usize::from(number)).copied().unwrap_or("other")
}
