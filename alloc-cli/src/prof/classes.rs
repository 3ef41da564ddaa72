//! What memory is for. The order: a scope of the program's, TensorFlow's annotation, the call stack, and
//! for tensors how many steps they lived. Annotation and stack go by the rules of a text file that users
//! extend (`thermalloc_prof_format::classes`).
use std::collections::HashMap;
use std::fs;
use std::path::Path;

use thermalloc_prof_format::classes::Classes;
use thermalloc_prof_format::{Block, component, source};

use super::profile::{Event, Profile, Snapshot};
use super::symbols::{Place, Symbols, tidy};
use crate::failure::Failure;

/// A tensor that is as many steps old is a weight, or what else is kept: promoted.
pub(crate) const PROMOTED_STEPS: u64 = 3;
/// The same where no steps are known.
const PROMOTED_NS: u64 = 2_000_000_000;

/// What a component is told by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum By {
    Scope,
    Annotation,
    Stack,
    Age,
    Nothing,
}

impl By {
    pub(crate) fn word(self) -> &'static str {
        match self {
            By::Scope => "scope",
            By::Annotation => "annotation",
            By::Stack => "call stack",
            By::Age => "age",
            By::Nothing => "nothing",
        }
    }
}

/// Text of the rules of a user's, which go before the built-in ones.
#[derive(Clone, Debug, Default)]
pub(crate) struct UserRules(String);

impl UserRules {
    /// Reads and checks a file.
    pub(crate) fn read(file: Option<&Path>) -> Result<Self, Failure> {
        let Some(file) = file else { return Ok(Self::default()) };
        let hint = "see the head of the built-in rules, which 'thermalloc prof classes' prints";
        let text = fs::read_to_string(file)
            .map_err(|why| Failure::not_found(file.display(), why, hint))?;
        match Classes::new(&text) {
            Ok(_) => Ok(Self(text)),
            Err(bad) => {
                let why = format!("line {} is no rule: {}", bad.line, bad.text.trim());
                Err(Failure::cannot_run(file.display(), why, hint))
            }
        }
    }

    /// The rules in force.
    pub(crate) fn classes(&self) -> Classes<'_> {
        // It was checked when it was read.
        Classes::new(&self.0).or_else(|_| Classes::new("")).expect("the built-in rules")
    }
}

/// Components of a profile's blocks.
#[derive(Debug)]
pub(crate) struct Components {
    by_site: HashMap<u32, u8>,
    by_tag: HashMap<u32, (u8, By)>,
    /// The program counts steps.
    steps: bool,
}

impl Components {
    pub(crate) fn of(profile: &Profile, symbols: &Symbols, classes: Classes<'_>) -> Self {
        let mut of_address: HashMap<u64, Option<usize>> = HashMap::new();
        let mut by_site = HashMap::new();
        for (&id, site) in &profile.sites {
            let rules = site.frames.iter().filter_map(|&address| {
                *of_address.entry(address).or_insert_with(|| rule_of(classes, symbols.at(address)))
            });
            by_site.extend(rules.min().map(|rule| (id, classes.component(rule))));
        }
        let by_tag = profile
            .tags
            .keys()
            .filter_map(|&tag| of_tag(profile, classes, tag).map(|found| (tag, found)))
            .collect();
        let has_step = |b: &Block| b.step > 0;
        let steps = profile.snapshots.iter().any(|s| s.step > 0 || s.live.iter().any(has_step))
            || profile.events.iter().any(|e| matches!(e, Event::Alloc(b) if has_step(b)));
        Self { by_site, by_tag, steps }
    }

    /// What a block is for, at a moment, and how that is known.
    pub(crate) fn of_block(&self, block: &Block, now: Moment) -> (u8, By) {
        match self.known(block.site, block.tag) {
            None => (component::OTHER, By::Nothing),
            // Who says so himself knows better.
            Some((component::ACTIVATIONS, by)) if by != By::Scope && self.is_old(block, now) => {
                (component::WEIGHTS, By::Age)
            }
            Some(known) => known,
        }
    }

    /// What a site's blocks of a tag are for as a rule, whatever their age.
    pub(crate) fn of_pair(&self, site: u32, tag: u32) -> u8 {
        self.known(site, tag).map_or(component::OTHER, |known| known.0)
    }

    fn known(&self, site: u32, tag: u32) -> Option<(u8, By)> {
        let stack = self.by_site.get(&site).map(|&component| (component, By::Stack));
        match self.by_tag.get(&tag) {
            // That the framework is at work is the least that an annotation can say.
            Some(&(component::FRAMEWORK, By::Annotation)) if stack.is_some() => stack,
            Some(&known) => Some(known),
            None => stack,
        }
    }

    fn is_old(&self, block: &Block, now: Moment) -> bool {
        if self.steps && now.step > 0 && block.step > 0 {
            return now.step.saturating_sub(block.step) >= PROMOTED_STEPS;
        }
        now.time_ns.saturating_sub(block.time_ns) >= PROMOTED_NS
    }
}

fn rule_of(classes: Classes<'_>, place: &Place) -> Option<usize> {
    place
        .functions
        .iter()
        .filter_map(|function| classes.of_frame(tidy(&function.name), &place.module))
        .min()
}

fn of_tag(profile: &Profile, classes: Classes<'_>, tag: u32) -> Option<(u8, By)> {
    let mut at = tag;
    // A chain longer than this is a damaged file's.
    for _ in 0..1000 {
        let found = profile.tags.get(&at)?;
        if found.component != component::UNKNOWN {
            return Some((found.component, By::Scope));
        }
        if found.source == source::TENSORFLOW {
            let component = classes.of_annotation(&found.name, &found.region);
            return component.map(|component| (component, By::Annotation));
        }
        at = found.parent;
    }
    None
}

/// When something is asked about.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Moment {
    pub(crate) time_ns: u64,
    pub(crate) step: u64,
}

impl Moment {
    /// The moment of a snapshot. Where the program announced no steps, TensorFlow's own are taken from
    /// the youngest block.
    pub(crate) fn of(snapshot: &Snapshot) -> Self {
        let youngest = snapshot.live.iter().map(|block| block.step).max().unwrap_or(0);
        Self { time_ns: snapshot.time_ns, step: snapshot.step.max(youngest) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::profile::{Site, Tag};
    use super::*;

    fn profile() -> (Profile, Symbols) {
        let mut profile = Profile::default();
        let mut symbols = Symbols::default();
        for (address, name, module) in [
            (10, "malloc", "/usr/lib/libc.so.6"),
            (11, "dnnl::impl::malloc(unsigned long, int)", "/tf/libtensorflow_cc.so.2"),
            (12, "tensorflow::CPUAllocator::AllocateRaw", "/tf/libtensorflow_framework.so.2"),
            (13, "_PyEval_EvalFrameDefault", "/usr/bin/python3"),
            (14, "google::protobuf::Arena::New", "/tf/libtensorflow_framework.so.2"),
        ] {
            symbols.set(address, name, module);
        }
        for (id, frames) in [
            (1, vec![10, 11, 13]),
            (2, vec![10, 12, 13]),
            (3, vec![10, 13]),
            (4, vec![10, 14]),
            (5, vec![10]),
        ] {
            profile.sites.insert(id, Site { frames, flags: 0 });
        }
        let tag = |parent, source, component, name: &str, region: &str| Tag {
            parent,
            source,
            component,
            name: name.to_owned(),
            region: region.to_owned(),
        };
        for (id, tag) in [
            (1, tag(0, source::SCOPE, component::KV_CACHE, "kv_cache", "")),
            (2, tag(1, source::SCOPE, 0, "layer 3", "")),
            (3, tag(0, source::SCOPE, 0, "request", "")),
            (4, tag(0, source::TENSORFLOW, 0, "gradient_tape/a/MatMul", "output")),
            (5, tag(0, source::TENSORFLOW, 0, "model/relu", "output")),
            (6, tag(0, source::TENSORFLOW, 0, "model/conv", "temp")),
        ] {
            profile.tags.insert(id, tag);
        }
        (profile, symbols)
    }

    #[test]
    fn the_order_of_the_rules() {
        let (profile, symbols) = profile();
        let rules = UserRules::default();
        let components = Components::of(&profile, &symbols, rules.classes());
        let now = Moment { time_ns: 10_000_000_000, step: 0 };
        let of = |site, tag, time_ns| {
            let block = Block { site, tag, time_ns, ..Block::default() };
            components.of_block(&block, now)
        };
        let new = now.time_ns;
        assert_eq!(of(1, 2, new), (component::KV_CACHE, By::Scope), "the scope's parent says it");
        assert_eq!(of(1, 3, new), (component::WORKSPACE, By::Stack), "a scope without meaning");
        assert_eq!(of(2, 4, new), (component::GRADIENTS, By::Annotation));
        assert_eq!(of(2, 6, 0), (component::WORKSPACE, By::Annotation));
        assert_eq!(of(2, 5, new), (component::ACTIVATIONS, By::Annotation));
        assert_eq!(of(2, 5, 0), (component::WEIGHTS, By::Age), "ten seconds old");
        assert_eq!(of(3, 0, 0), (component::PYTHON, By::Stack));
        assert_eq!(of(4, 0, 0), (component::FRAMEWORK, By::Stack));
        assert_eq!(of(5, 0, 0), (component::OTHER, By::Nothing));
    }

    #[test]
    fn rules_of_a_file_come_first_and_a_wrong_line_is_named() {
        let (profile, symbols) = profile();
        let file = std::env::temp_dir().join(format!("thermalloc-rules-{}", std::process::id()));
        fs::write(&file, "weights symbol:google::protobuf::*\n").unwrap();
        let rules = UserRules::read(Some(&file)).unwrap();
        let components = Components::of(&profile, &symbols, rules.classes());
        assert_eq!(components.of_pair(4, 0), component::WEIGHTS);
        fs::write(&file, "# mine\nwights symbol:a\n").unwrap();
        let why = UserRules::read(Some(&file)).unwrap_err().to_string();
        assert!(why.contains("line 2 is no rule"), "{why}");
        fs::remove_file(&file).unwrap();
    }
}
