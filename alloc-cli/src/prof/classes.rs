//! What memory is for. A scope of the program's goes first; then TensorFlow's annotation and the call stack,
//! by the rules of a text file that users extend (`thermalloc_prof_format::classes`), whose order counts.
//! Two things are only seen in the whole of a profile: how many steps a block lived, and whether a
//! gradient is of a weight's size.
use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::Path;

use thermalloc_prof_format::classes::{Classes, Kind, Rule};
use thermalloc_prof_format::{Block, component, source};

use super::profile::{Event, Profile, Snapshot};
use super::runtimes::{Phase, Phases};
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
    /// Only whose code it is.
    Guess,
    Nothing,
}

impl By {
    pub(crate) fn word(self) -> &'static str {
        match self {
            By::Scope => "scope",
            By::Annotation => "annotation",
            By::Stack => "call stack",
            By::Age => "age",
            By::Guess => "guess",
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

/// What is known of blocks without their age.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Known {
    kept: u8,
    passing: u8,
    by: By,
}

impl Known {
    fn of(rule: Rule<'_>) -> Self {
        let by = match rule.kind {
            _ if rule.guess => By::Guess,
            Kind::Op | Kind::Region => By::Annotation,
            Kind::Symbol | Kind::Module => By::Stack,
        };
        Self { kept: rule.kept, passing: rule.passing, by }
    }

    fn nothing() -> Self {
        Self { kept: component::OTHER, passing: component::OTHER, by: By::Nothing }
    }
}

/// The first rules that hold: of all, and of those that are not of gradients.
#[derive(Clone, Copy, Debug, Default)]
struct First {
    of_all: Option<usize>,
    of_others: Option<usize>,
}

impl First {
    fn of(classes: Classes<'_>, rules: impl Iterator<Item = usize> + Clone) -> Self {
        let is_other = |&rule: &usize| {
            classes.rule(rule).is_some_and(|rule| rule.passing != component::GRADIENTS)
        };
        Self { of_all: rules.clone().min(), of_others: rules.filter(is_other).min() }
    }

    fn with(self, other: Self) -> Self {
        let first = |a: Option<usize>, b: Option<usize>| a.into_iter().chain(b).min();
        Self {
            of_all: first(self.of_all, other.of_all),
            of_others: first(self.of_others, other.of_others),
        }
    }
}

/// What a tag says: the program's word, or the rules that fit TensorFlow's.
#[derive(Clone, Copy, Debug)]
enum Said {
    Scope(u8),
    Rules(First),
    /// They hold for tensors only.
    RulesOfTensors(First),
}

/// Components of a profile's blocks.
#[derive(Debug)]
pub(crate) struct Components {
    rules: Vec<Known>,
    by_site: HashMap<u32, First>,
    by_tag: HashMap<u32, Said>,
    /// Sites that allocate tensors.
    tensors: HashSet<u32>,
    /// Sizes of weights; empty where none are known.
    weights: HashSet<u64>,
    /// What operators of TensorFlow allocate at a site: a size, or nothing where sizes differ.
    sizes: HashMap<(u32, u32), Option<u64>>,
    /// What runtimes without symbols were at.
    phases: Phases,
    /// The program counts steps.
    steps: bool,
}

impl Components {
    pub(crate) fn of(profile: &Profile, symbols: &Symbols, classes: Classes<'_>) -> Self {
        let mut of_address: HashMap<u64, First> = HashMap::new();
        let mut of_tensors: HashMap<u64, bool> = HashMap::new();
        let (mut by_site, mut tensors) = (HashMap::new(), HashSet::new());
        for (&id, site) in &profile.sites {
            let mut first = First::default();
            for &address in &site.frames {
                let of_frame =
                    of_address.entry(address).or_insert_with(|| of(classes, symbols.at(address)));
                first = first.with(*of_frame);
                let allocates = of_tensors.entry(address).or_insert_with(|| {
                    let functions = &symbols.at(address).functions;
                    functions.iter().any(|f| classes.allocates_tensors(tidy(&f.name)))
                });
                if *allocates {
                    tensors.insert(id);
                }
            }
            by_site.insert(id, first);
        }
        let by_tag = profile
            .tags
            .keys()
            .filter_map(|&tag| of_tag(profile, classes, tag).map(|found| (tag, found)))
            .collect();
        let has_step = |b: &Block| b.step > 0;
        let steps = profile.snapshots.iter().any(|s| s.step > 0 || s.live.iter().any(has_step))
            || profile.events.iter().any(|e| matches!(e, Event::Alloc(b) if has_step(b)));
        let rules = (0..).map_while(|index| classes.rule(index)).map(Known::of).collect();
        Self {
            rules,
            by_site,
            by_tag,
            tensors,
            weights: HashSet::new(),
            sizes: HashMap::new(),
            phases: Phases::of(profile, symbols, classes, |born, now| is_old(steps, born, now)),
            steps,
        }
    }

    /// Looks at all blocks for the sizes of weights and of what operators make. `component` says what a
    /// block becomes.
    pub(crate) fn learn<'a>(
        &mut self,
        blocks: impl Iterator<Item = &'a Block>,
        component: impl Fn(&Self, &Block) -> (u8, By),
    ) {
        for block in blocks {
            let (component, by) = component(self, block);
            if component == component::WEIGHTS && by != By::Guess {
                self.weights.insert(block.size);
            }
            if block.tag != 0 {
                let size = self.sizes.entry((block.tag, block.site)).or_insert(Some(block.size));
                *size = size.filter(|&size| size == block.size);
            }
        }
    }

    /// What a block is for, at a moment, and how that is known.
    pub(crate) fn of_block(&self, block: &Block, now: Moment) -> (u8, By) {
        let known = self.known(block.site, block.tag, self.may_be_gradient(block));
        if known.by == By::Guess
            && known.passing == component::FRAMEWORK
            && let Some(phase) = self.phases.of_block(block)
        {
            return (self.guessed(phase, block, now), By::Guess);
        }
        if known.kept != known.passing && self.is_old(block, now) {
            return (known.kept, By::Age);
        }
        (known.passing, known.by)
    }

    /// What a site's blocks of a tag are for as a rule, whatever their age and size.
    pub(crate) fn of_pair(&self, site: u32, tag: u32) -> u8 {
        self.known(site, tag, true).passing
    }

    fn known(&self, site: u32, tag: u32, may_be_gradient: bool) -> Known {
        let stack = self.by_site.get(&site).copied().unwrap_or_default();
        let first = match self.by_tag.get(&tag) {
            Some(&Said::Scope(component)) => {
                return Known { kept: component, passing: component, by: By::Scope };
            }
            Some(&Said::Rules(said)) => said.with(stack),
            Some(&Said::RulesOfTensors(said)) if self.tensors.contains(&site) => said.with(stack),
            Some(Said::RulesOfTensors(_)) | None => stack,
        };
        let rule = if may_be_gradient { first.of_all } else { first.of_others };
        rule.and_then(|rule| self.rules.get(rule)).copied().unwrap_or_else(Known::nothing)
    }

    /// A gradient is of a weight's size, and that does not depend on the batch.
    fn may_be_gradient(&self, block: &Block) -> bool {
        let varies = self.sizes.get(&(block.tag, block.site)) == Some(&None);
        self.weights.is_empty() || self.weights.contains(&block.size) && !varies
    }

    /// What a large block of a runtime is, of which nothing but the phase and the age is known.
    fn guessed(&self, phase: Phase, block: &Block, now: Moment) -> u8 {
        match phase {
            Phase::Load if self.is_old(block, now) => component::WEIGHTS,
            Phase::Load => component::WORKSPACE,
            Phase::Run => component::ACTIVATIONS,
        }
    }

    fn is_old(&self, block: &Block, now: Moment) -> bool {
        is_old(self.steps, Moment::of_block(block), now)
    }
}

/// Whether what was born at a moment is kept. `steps`: the program counts them.
fn is_old(steps: bool, born: Moment, now: Moment) -> bool {
    if steps && now.step > 0 && born.step > 0 {
        return now.step.saturating_sub(born.step) >= PROMOTED_STEPS;
    }
    now.time_ns.saturating_sub(born.time_ns) >= PROMOTED_NS
}

fn of(classes: Classes<'_>, place: &Place) -> First {
    let of = |first: First, name: &str| {
        let rules: Vec<usize> = classes.of_frame(tidy(name), &place.module).collect();
        first.with(First::of(classes, rules.into_iter()))
    };
    place.functions.iter().fold(First::default(), |first, function| of(first, &function.name))
}

fn of_tag(profile: &Profile, classes: Classes<'_>, tag: u32) -> Option<Said> {
    let mut at = tag;
    // A chain longer than this is a damaged file's.
    for _ in 0..1000 {
        let found = profile.tags.get(&at)?;
        if found.component != component::UNKNOWN {
            return Some(Said::Scope(found.component));
        }
        if found.source == source::TENSORFLOW {
            let rules: Vec<usize> = classes.of_annotation(&found.name, &found.region).collect();
            let first = First::of(classes, rules.into_iter());
            let of_all = !found.region.is_empty();
            return Some(if of_all { Said::Rules(first) } else { Said::RulesOfTensors(first) });
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
    /// When a block was allocated.
    pub(crate) fn of_block(block: &Block) -> Self {
        Self { time_ns: block.time_ns, step: block.step }
    }

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
            (15, "tensorflow::Something", "/tf/libtensorflow_framework.so.2"),
        ] {
            symbols.set(address, name, module);
        }
        for (id, frames) in [
            (1, vec![10, 11, 13]),
            (2, vec![10, 12, 13]),
            (3, vec![10, 13]),
            (4, vec![10, 14]),
            (5, vec![10]),
            (6, vec![10, 15, 13]),
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
        assert_eq!(of(1, 5, 0), (component::WORKSPACE, By::Stack), "of the earlier rule");
        assert_eq!(of(6, 0, 0), (component::FRAMEWORK, By::Guess));
        assert_eq!(of(2, 5, new), (component::ACTIVATIONS, By::Annotation));
        assert_eq!(of(2, 5, 0), (component::WEIGHTS, By::Age), "ten seconds old");
        assert_eq!(of(3, 0, 0), (component::PYTHON, By::Stack));
        assert_eq!(of(4, 0, 0), (component::FRAMEWORK, By::Stack));
        assert_eq!(of(5, 0, 0), (component::OTHER, By::Nothing));
    }

    #[test]
    fn a_gradient_is_of_a_weights_size_where_weights_are_known() {
        let (profile, symbols) = profile();
        let rules = UserRules::default();
        let mut components = Components::of(&profile, &symbols, rules.classes());
        let gradient = |size| Block { site: 2, tag: 4, size, ..Block::default() };
        let of = |components: &Components, size| {
            components.of_block(&gradient(size), Moment::default()).0
        };
        assert_eq!(of(&components, 100), component::GRADIENTS);
        let weight = Block { site: 2, tag: 5, size: 100, ..Block::default() };
        let now = Moment { time_ns: PROMOTED_NS, step: 0 };
        components.learn([weight].iter(), |known, block| known.of_block(block, now));
        assert_eq!(of(&components, 100), component::GRADIENTS);
        assert_eq!(of(&components, 101), component::ACTIVATIONS);
        // An operator whose outputs are as large as the batch is.
        components.learn([gradient(100), gradient(200)].iter(), |known, block| {
            known.of_block(block, Moment::default())
        });
        assert_eq!(of(&components, 100), component::ACTIVATIONS);
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
