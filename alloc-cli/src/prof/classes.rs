//! What memory is for. The order: a scope of the program's, TensorFlow's annotation, the call stack, and
//! for tensors how many steps they lived. Annotation and stack go by the rules of a text file that users
//! extend; the built-in one is `data/components.txt`, which says how a rule is written.
use std::collections::HashMap;
use std::fs;
use std::path::Path;

use thermalloc_prof_format::{Block, component, source};

use super::profile::{Profile, Snapshot};
use super::symbols::{Place, Symbols, tidy};
use crate::failure::Failure;

const BUILT_IN: &str = include_str!("../../data/components.txt");

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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Op,
    Region,
    Symbol,
    Module,
}

/// What a rule says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Is(u8),
    Tensor,
}

#[derive(Clone, Debug)]
struct Rule {
    verdict: Verdict,
    what: What,
    text: String,
    at_start: bool,
    at_end: bool,
}

impl Rule {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        let (verdict, what) = (words.next()?, words.next()?);
        let verdict = match verdict {
            "tensor" => Verdict::Tensor,
            name => Verdict::Is(component::find(name.as_bytes()).filter(|&known| known != 0)?),
        };
        let what = match what {
            "op" => What::Op,
            "region" => What::Region,
            "symbol" => What::Symbol,
            "module" => What::Module,
            _ => return None,
        };
        let pattern = words.collect::<Vec<_>>().join(" ");
        let text = pattern.strip_prefix('^').unwrap_or(&pattern);
        let at_start = text.len() < pattern.len();
        let at_end = text.ends_with('$');
        let text = text.strip_suffix('$').unwrap_or(text).to_owned();
        (!text.is_empty()).then_some(Self { verdict, what, text, at_start, at_end })
    }

    fn fits(&self, name: &str) -> bool {
        match (self.at_start, self.at_end) {
            (false, false) => name.contains(&self.text),
            (true, false) => name.starts_with(&self.text),
            (false, true) => name.ends_with(&self.text),
            (true, true) => name == self.text,
        }
    }
}

/// The rules in force.
#[derive(Clone, Debug, Default)]
pub(crate) struct Classes {
    rules: Vec<Rule>,
}

impl Classes {
    /// The built-in rules behind those of `file`.
    pub(crate) fn read(file: Option<&Path>) -> Result<Self, Failure> {
        let mut rules = Vec::new();
        if let Some(file) = file {
            let hint = "see 'thermalloc prof classes' for the rules and how they are written";
            let text = fs::read_to_string(file)
                .map_err(|why| Failure::not_found(file.display(), why, hint))?;
            rules = Self::parse(&text)
                .map_err(|why| Failure::cannot_run(file.display(), why, hint))?
                .rules;
        }
        rules.extend(Self::built_in().rules);
        Ok(Self { rules })
    }

    /// The text of the built-in rules.
    pub(crate) fn built_in_text() -> &'static str {
        BUILT_IN
    }

    fn built_in() -> Self {
        Self::parse(BUILT_IN).unwrap_or_default()
    }

    fn parse(text: &str) -> Result<Self, String> {
        let mut rules = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let rule = Rule::parse(line);
            rules.push(rule.ok_or_else(|| format!("line {}: no rule: {line}", number + 1))?);
        }
        Ok(Self { rules })
    }

    fn of_annotation(&self, name: &str, region: &str) -> Option<Verdict> {
        self.rules
            .iter()
            .find(|rule| match rule.what {
                What::Op => rule.fits(name),
                What::Region => rule.fits(region),
                _ => false,
            })
            .map(|rule| rule.verdict)
    }

    fn of_place(&self, place: &Place) -> Option<Verdict> {
        place.functions.iter().find_map(|function| {
            let name = tidy(&function.name);
            self.rules
                .iter()
                .find(|rule| match rule.what {
                    What::Symbol => rule.fits(name),
                    What::Module => rule.fits(&place.module),
                    _ => false,
                })
                .map(|rule| rule.verdict)
        })
    }
}

/// Components of a profile's blocks.
#[derive(Debug)]
pub(crate) struct Components {
    by_site: HashMap<u32, Verdict>,
    by_tag: HashMap<u32, (Verdict, By)>,
    /// The program counts steps.
    steps: bool,
}

impl Components {
    pub(crate) fn of(profile: &Profile, symbols: &Symbols, classes: &Classes) -> Self {
        let mut of_address: HashMap<u64, Option<Verdict>> = HashMap::new();
        let mut by_site = HashMap::new();
        for (&id, site) in &profile.sites {
            let verdict = site.frames.iter().find_map(|&address| {
                *of_address.entry(address).or_insert_with(|| classes.of_place(symbols.at(address)))
            });
            by_site.extend(verdict.map(|verdict| (id, verdict)));
        }
        let by_tag = profile
            .tags
            .keys()
            .filter_map(|&tag| of_tag(profile, classes, tag).map(|found| (tag, found)))
            .collect();
        let steps = profile.snapshots.iter().any(|s| s.live.iter().any(|b| b.step > 0) || s.step > 0)
            || profile.events.iter().any(
                |e| matches!(e, super::profile::Event::Alloc(b) if b.step > 0),
            );
        Self { by_site, by_tag, steps }
    }

    /// What a block is for, at a moment, and how that is known.
    pub(crate) fn of_block(&self, block: &Block, now: Moment) -> (u8, By) {
        let (verdict, by) = match self.by_tag.get(&block.tag) {
            Some(&found) => found,
            None => match self.by_site.get(&block.site) {
                Some(&verdict) => (verdict, By::Stack),
                None => return (component::OTHER, By::Nothing),
            },
        };
        match verdict {
            Verdict::Is(component) => (component, by),
            Verdict::Tensor if self.is_old(block, now) => (component::WEIGHTS, By::Age),
            Verdict::Tensor => (component::ACTIVATIONS, by),
        }
    }

    /// What a site's blocks of a tag are for as a rule, whatever their age.
    pub(crate) fn of_pair(&self, site: u32, tag: u32) -> u8 {
        let verdict = self.by_tag.get(&tag).map(|found| found.0);
        match verdict.or_else(|| self.by_site.get(&site).copied()) {
            Some(Verdict::Is(component)) => component,
            Some(Verdict::Tensor) => component::ACTIVATIONS,
            None => component::OTHER,
        }
    }

    fn is_old(&self, block: &Block, now: Moment) -> bool {
        if self.steps && now.step > 0 && block.step > 0 {
            return now.step.saturating_sub(block.step) >= PROMOTED_STEPS;
        }
        now.time_ns.saturating_sub(block.time_ns) >= PROMOTED_NS
    }
}

fn of_tag(profile: &Profile, classes: &Classes, tag: u32) -> Option<(Verdict, By)> {
    let mut at = tag;
    // A chain longer than this is a damaged file's.
    for _ in 0..1000 {
        let found = profile.tags.get(&at)?;
        if found.component != component::UNKNOWN {
            return Some((Verdict::Is(found.component), By::Scope));
        }
        if found.source != source::SCOPE {
            return classes
                .of_annotation(&found.name, &found.region)
                .map(|verdict| (verdict, By::Annotation));
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
        for (id, frames) in
            [(1, vec![10, 11, 13]), (2, vec![10, 12, 13]), (3, vec![10, 13]), (4, vec![10, 14]), (5, vec![10])]
        {
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
        let components = Components::of(&profile, &symbols, &Classes::built_in());
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
    fn rules_of_a_file_come_first() {
        let (profile, symbols) = profile();
        let mut classes = Classes::parse("# mine\nweights symbol ^google::protobuf").unwrap();
        classes.rules.extend(Classes::built_in().rules);
        let components = Components::of(&profile, &symbols, &classes);
        assert_eq!(components.of_pair(4, 0), component::WEIGHTS);
    }

    #[test]
    fn what_is_no_rule_is_said_with_its_line() {
        assert!(Classes::parse(BUILT_IN).unwrap().rules.len() > 80);
        for wrong in ["weights symbol", "wights symbol a", "weights file a", "unknown op a"] {
            let why = Classes::parse(&format!("\n{wrong}\n")).unwrap_err();
            assert!(why.starts_with("line 2: "), "{why}");
        }
    }
}
