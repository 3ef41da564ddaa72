//! The profiler in real processes: exact mode agrees with the statistics to the byte, samples are within
//! their error, stacks are those that the C library sees, and nothing that happens beside it disturbs.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use thermalloc_prof_format::{
    Block, Damage, Record, Records, component, extent_state, source, space,
};
use thermalloc_tests::{Library, compile, must, root, skipped, text};

const SCRATCH: &str = env!("CARGO_TARGET_TMPDIR");

fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| Library::build(Path::new(SCRATCH)))
}

fn scratch(name: &str) -> PathBuf {
    let file = Path::new(SCRATCH).join("prof").join(name);
    std::fs::create_dir_all(file.parent().expect("folder")).expect("scratch folder");
    file
}

fn program(source: &str, flags: &[&str]) -> PathBuf {
    let out = scratch(&format!("{}{}", source.replace('/', "_"), flags.concat()));
    let include = format!("-I{}", root().join("alloc-capi/include").display());
    let flags = [&["-fPIE", "-pie", "-pthread", "-ldl", &include], flags].concat();
    compile(source, &out, &flags);
    out
}

/// A program that needs names of jemalloc's.
fn linked(name: &str) -> PathBuf {
    let out = scratch(name);
    let shared = library().shared.to_string_lossy().into_owned();
    let include = format!("-I{}", root().join("alloc-capi/include").display());
    compile(&format!("prof/{name}.c"), &out, &["-fPIE", "-pie", &include, &shared]);
    out
}

/// The interpreter itself, not a script that looks for it.
fn python() -> PathBuf {
    let found =
        must(Command::new("python3").args(["-c", "import sys; print(sys.executable, end='')"]));
    PathBuf::from(text(&found.stdout))
}

/// One for all tests: while it is written nobody can load it.
fn plugin() -> PathBuf {
    static PLUGIN: OnceLock<PathBuf> = OnceLock::new();
    let made = PLUGIN.get_or_init(|| {
        let out = scratch("plugin.so");
        compile("prof/plugin.c", &out, &["-shared", "-fPIC", "-O2"]);
        out
    });
    made.clone()
}

/// A dump as it was read.
#[derive(Debug, Default)]
struct Profile {
    sites: HashMap<u32, (Vec<u64>, u32)>,
    tags: HashMap<u32, (u32, u8, u8, String)>,
    live: Vec<Block>,
    /// By site, tag and space: live blocks and bytes, all blocks and bytes, and the same by weight.
    totals: Vec<([u32; 3], [u64; 4], [f64; 4])>,
    stats: HashMap<String, u64>,
    extents: Vec<(u32, u64, u32, u32)>,
    mappings: Vec<(u64, u64, String)>,
    events: Vec<Record<'static>>,
    lost: (u64, u64, u64),
    whole: usize,
    options: HashMap<String, String>,
}

impl Profile {
    fn read(path: &Path) -> Self {
        let file = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        // Events are kept, and the program is short.
        let file: &'static [u8] = file.leak();
        let mut records = Records::new(file);
        let mut p = Profile::default();
        let string = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let mut in_snapshot = None;
        for (i, record) in records.by_ref().enumerate() {
            assert!(i > 0 || matches!(record, Record::Process(_)), "{record:?} is first");
            match record {
                Record::Site(s) => {
                    p.sites.insert(s.site, (s.frames.iter().collect(), s.flags));
                }
                Record::Tag(t) => {
                    assert!(t.parent == 0 || p.tags.contains_key(&t.parent));
                    let name = string(t.text.split(t.name_bytes).0.0);
                    p.tags.insert(t.tag, (t.parent, t.source, t.component, name));
                }
                Record::Live(b) => {
                    assert!(b.site == 0 || p.sites.contains_key(&b.site), "{b:?}");
                    assert!(b.tag == 0 || p.tags.contains_key(&b.tag), "{b:?}");
                    p.live.push(b);
                }
                Record::Totals(t) => p.totals.push((
                    [t.site, t.tag, t.space],
                    [t.live_blocks, t.live_bytes, t.all_blocks, t.all_bytes],
                    [
                        t.weighted_live_blocks,
                        t.weighted_live_bytes,
                        t.weighted_all_blocks,
                        t.weighted_all_bytes,
                    ],
                )),
                Record::Stat(s) => drop(p.stats.insert(string(s.name.0), s.value)),
                Record::Extent(e) => p.extents.push((e.state, e.bytes, e.slots, e.used)),
                Record::Mapping(m) => {
                    let path = string(m.text.split(m.build_id_bytes).1.0);
                    p.mappings.push((m.start, m.end, path));
                }
                Record::Option(o) => {
                    let (name, value) = o.text.split(o.name_bytes);
                    p.options.insert(string(name.0), string(value.0));
                }
                Record::Lost(l) => p.lost = (p.lost.0 + l.events, l.blocks, l.sites),
                Record::SnapshotBegin(b) => {
                    // What is read is the last one.
                    (p.live, p.totals, p.extents) = Default::default();
                    in_snapshot = Some((b.number, i as u64));
                }
                Record::SnapshotEnd(e) => {
                    let (number, begin) = in_snapshot.take().expect("a beginning");
                    assert_eq!((e.number, e.records), (number, i as u64 - begin + 1));
                    p.whole += 1;
                }
                Record::Alloc(_)
                | Record::Free(_)
                | Record::Resize(_)
                | Record::Retag(_)
                | Record::Step(_)
                | Record::Period(_) => p.events.push(record),
                Record::Process(_) | Record::Thread(_) | Record::Lifetimes(_) => {}
                Record::Region(_) | Record::System(_) | Record::Pool(_) => {}
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(records.damage(), Damage::default());
        p
    }

    fn sum(&self, figure: usize) -> u64 {
        self.totals.iter().map(|(_, plain, _)| plain[figure]).sum()
    }

    fn weighted(&self, figure: usize) -> f64 {
        self.totals.iter().map(|(_, _, weighted)| weighted[figure]).sum()
    }

    fn path(&self, mut tag: u32) -> Vec<&str> {
        let mut path = Vec::new();
        while let Some((parent, _, _, name)) = self.tags.get(&tag) {
            path.insert(0, name.as_str());
            tag = *parent;
        }
        path
    }
}

/// Runs a program with the library and these options; what it said and what it dumped.
fn profile(program: &Path, options: &str, arguments: &[&Path]) -> (Output, Profile) {
    let name = program.file_name().unwrap().to_string_lossy();
    let unique = format!(
        "{name}.{:x}.thprof",
        options.len() * 1000 + options.bytes().map(usize::from).sum::<usize>()
    );
    let dump = scratch(&unique);
    let _ = std::fs::remove_file(&dump);
    let output = must(
        library()
            .preload(program)
            .args(arguments)
            .env("THERMALLOC_CONF", options)
            .env("DUMP", &dump)
            .env("DUMP_CHILD", dump.with_extension("child")),
    );
    (output, Profile::read(&dump))
}

const EXACT: &str = "prof:true,lg_prof_sample:0,prof_budget:0";

#[test]
fn exact_mode_agrees_with_the_statistics_to_the_byte() {
    let (output, p) = profile(&program("prof/exact.c", &[]), EXACT, &[]);
    let usable: u64 = p.live.iter().map(|b| b.usable).sum();
    assert_eq!(usable, p.stats["allocated_bytes"], "every live block is known");
    assert_eq!(p.stats["prof_live_blocks"], p.live.len() as u64);
    assert_eq!((p.stats["prof_missed"], p.lost, p.whole), (0, (0, 0, 0), 1));
    assert_eq!(p.sum(1), p.live.iter().map(|b| b.size).sum::<u64>());
    assert_eq!(p.sum(0), p.live.len() as u64);
    assert_eq!((p.weighted(0), p.weighted(1)), (p.sum(0) as f64, p.sum(1) as f64));
    assert!(p.live.iter().all(|b| b.weight == 1.0 && b.site != 0 && b.space == space::HOST));
    let by_address: HashMap<u64, &Block> = p.live.iter().map(|b| (b.address, b)).collect();
    let mut told = 0;
    for line in text(&output.stdout).lines() {
        let words: Vec<u64> = line.split(' ').skip(1).map(|w| w.parse().unwrap()).collect();
        let b = by_address.get(&words[0]).unwrap_or_else(|| panic!("{line} is not in the profile"));
        assert_eq!((b.size, b.usable), (words[1], words[2]), "{line}");
        told += 1;
    }
    assert_eq!(told, 400);
    assert!(p.live.len() < 420, "{} blocks: more than those of the program and libc", p.live.len());
    assert_eq!(p.options["lg_prof_sample"], "0");
    // The extents tile what is mapped.
    let extents: u64 = p.extents.iter().map(|e| e.1).sum();
    assert_eq!(extents, p.stats["mapped_bytes"]);
    let of = |state| p.extents.iter().filter(|e| e.0 == state).count() as u64;
    assert_eq!(of(extent_state::LARGE), p.stats["large_live_blocks"]);
    assert!(of(extent_state::SAMPLED) > 300);
}

#[test]
fn exact_mode_has_room_for_large_programs() {
    let (stacks, each) = (200_000, 5);
    let arguments = [Path::new("200000"), Path::new("5")];
    let (_, p) = profile(&program("prof/many.c", &["-O1"]), EXACT, &arguments);
    assert_eq!((p.stats["prof_missed"], p.lost, p.whole), (0, (0, 0, 0), 1));
    let usable: u64 = p.live.iter().map(|b| b.usable).sum();
    assert_eq!(usable, p.stats["allocated_bytes"], "every live block is known");
    assert_eq!(p.sum(1), p.live.iter().map(|b| b.size).sum::<u64>());
    assert_eq!([p.sum(0), p.stats["prof_live_blocks"]], [p.live.len() as u64; 2]);
    let mut by_site: HashMap<u32, u64> = HashMap::new();
    p.live.iter().for_each(|b| *by_site.entry(b.site).or_default() += 1);
    let full = by_site.values().filter(|&&blocks| blocks == each).count();
    assert_eq!(full, stacks, "each stack has its own site");
    // What was freed at once counts as well.
    assert!(p.sum(2) - p.sum(0) >= stacks as u64 * each, "{} of {}", p.sum(0), p.sum(2));
}

#[test]
fn an_exact_log_of_threads_loses_nothing_while_dumps_are_written() {
    let log = scratch("many.thlog");
    let _ = std::fs::remove_file(&log);
    // Dumps in between, of up to 200,000 blocks: what four threads do meanwhile is more than fits the ring.
    let options = format!("{EXACT},lg_prof_interval:21,prof_events:{}", log.display());
    let mut command = library().preload(&program("prof/many.c", &["-O1"]));
    must(command.args(["40000", "5", "threads"]).env("THERMALLOC_CONF", options));
    let p = Profile::read(&log);
    assert!(p.whole >= 2, "{} dumps", p.whole);
    assert_eq!((p.lost, p.stats["prof_missed"]), ((0, 0, 0), 0));
    let count = |of: fn(&Record<'_>) -> bool| p.events.iter().filter(|e| of(e)).count() as u64;
    let (made, freed) =
        (count(|e| matches!(e, Record::Alloc(_))), count(|e| matches!(e, Record::Free(_))));
    assert_eq!((made, made - freed), (p.sum(2), p.live.len() as u64));
    assert!(made >= 400_000, "{made}");
}

/// Steps of a program with explicit arenas and caches: what it told of each and what the ledger had.
fn arenas(options: &str) -> Vec<(String, Vec<[u64; 3]>, Profile)> {
    let dump = scratch(&format!("arenas.{}", options.len()));
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    let program = PROGRAM.get_or_init(|| linked("arenas"));
    let mut command = library().preload(program);
    let output = must(command.env("THERMALLOC_CONF", options).env("DUMP", &dump));
    let mut steps: Vec<(String, Vec<[u64; 3]>)> = Vec::new();
    for line in text(&output.stdout).lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let [step, address, size, usable] = words[..] else { panic!("{line}") };
        let told = [address, size, usable].map(|word| word.parse().unwrap());
        match steps.last_mut() {
            Some((last, all)) if last == step => all.push(told),
            _ => steps.push((step.to_owned(), vec![told])),
        }
    }
    steps.push(("nothing".to_owned(), Vec::new()));
    let read = |(step, told): (String, Vec<[u64; 3]>)| {
        let p = Profile::read(&PathBuf::from(format!("{}.{step}", dump.display())));
        (step, told, p)
    };
    steps.into_iter().map(read).collect()
}

#[test]
fn explicit_arenas_and_caches_agree_to_the_byte_after_each_step() {
    let steps = arenas(EXACT);
    assert_eq!(steps.len(), 19);
    for (step, told, p) in &steps {
        let usable: u64 = p.live.iter().map(|b| b.usable).sum();
        assert_eq!(usable, p.stats["allocated_bytes"], "{step}: every live block is known");
        assert_eq!((p.stats["prof_missed"], p.lost), (0, (0, 0, 0)), "{step}");
        assert_eq!(p.sum(1), p.live.iter().map(|b| b.size).sum::<u64>(), "{step}");
        let by_address: HashMap<u64, &Block> = p.live.iter().map(|b| (b.address, b)).collect();
        for &[address, size, usable] in told {
            let b = by_address.get(&address).unwrap_or_else(|| panic!("{step}: {size} is missing"));
            assert_eq!((b.size, b.usable), (size, usable), "{step}");
        }
        // Beside them only what the C library has for itself.
        let others = p.live.len() - told.len();
        assert!(others < 10, "{step}: {others} more");
        let extents: u64 = p.extents.iter().map(|e| e.1).sum();
        assert_eq!(extents, p.stats["mapped_bytes"], "{step}: those of all arenas");
    }
}

#[test]
fn samples_in_explicit_arenas_and_caches_come_and_go() {
    let steps = arenas("prof:true,lg_prof_sample:14,prof_budget:0,prof_seed:3");
    for (step, told, p) in &steps {
        let by_address: HashMap<u64, [u64; 2]> =
            told.iter().map(|&[address, size, usable]| (address, [size, usable])).collect();
        let mut known = 0;
        for b in &p.live {
            if let Some(told) = by_address.get(&b.address) {
                assert_eq!([b.size, b.usable], *told, "{step}");
                known += 1;
            }
        }
        assert!(p.live.len() - known < 10, "{step}: {} stay", p.live.len() - known);
        let large = told.iter().filter(|[_, size, _]| *size > 1 << 20).count();
        assert!(known >= large && (told.is_empty() || known > 0), "{step}: {known} of {large}");
        assert_eq!(p.stats["prof_live_blocks"], p.live.len() as u64, "{step}");
        assert_eq!((p.stats["prof_missed"], p.lost), (0, (0, 0, 0)), "{step}");
    }
}

/// Every stack that the program told is that of the block's site, from the first frame that both can
/// have on.
///
/// `open`: how many of them begin where nobody says that there is no caller, as fibers do.
fn assert_stacks(output: &Output, p: &Profile, least: usize, open: usize) {
    let by_address: HashMap<u64, &Block> = p.live.iter().map(|b| (b.address, b)).collect();
    let (mut told, mut broken) = (0, 0);
    for line in text(&output.stdout).lines() {
        let words: Vec<u64> = line.split(' ').skip(1).map(|w| w.parse().unwrap()).collect();
        let block = by_address[&words[0]];
        assert_eq!(block.size, words[1]);
        let (ours, flags) = &p.sites[&block.site];
        // Theirs begins in the function that told it, ours in the allocator: they meet in its caller.
        let theirs = &words[4..];
        assert!(ours.ends_with(theirs) && theirs.len() >= 2, "{ours:x?}\n{theirs:x?}");
        assert!(ours.len() - theirs.len() <= 10, "{ours:x?}\n{theirs:x?}");
        assert_ne!(*flags, 1, "{ours:x?} was cut");
        broken += usize::from(*flags != 0);
        told += 1;
    }
    assert!(broken <= open, "{broken}");
    assert!(told >= least, "{told}");
}

#[test]
fn stacks_of_c_programs_are_those_of_backtrace() {
    for flags in [
        &["-O2"][..],
        &["-O0"],
        &["-O2", "-fno-omit-frame-pointer"],
        &["-O3", "-mavx2", "-fcf-protection"],
        &["-O2", "-fno-plt", "-Wl,-z,lazy"],
    ] {
        let (output, p) = profile(&program("prof/stacks.c", flags), EXACT, &[&plugin()]);
        assert_stacks(&output, &p, 17, 3);
    }
}

#[test]
fn stacks_of_cpp_programs_are_those_of_backtrace() {
    for flags in [&["-O2"][..], &["-O0"]] {
        let (output, p) = profile(&program("prof/stacks.cpp", flags), EXACT, &[]);
        assert_stacks(&output, &p, 8, 0);
    }
}

#[test]
fn stacks_of_cpython_are_those_of_backtrace() {
    let helper = scratch("python_helper.so");
    compile("prof/python_helper.c", &helper, &["-shared", "-fPIC", "-O2"]);
    let script = scratch("script.py");
    std::fs::write(
        &script,
        "import ctypes, sys, json, re\n\
         helper = ctypes.CDLL(sys.argv[1])\n\
         def deep(n):\n    return deep(n - 1) if n else helper.here(ctypes.c_size_t(5000 + n))\n\
         class C:\n    def __lt__(self, other):\n        deep(2); return False\n\
         deep(0); deep(12)\n\
         sorted([C(), C()])\n\
         re.sub('a', lambda m: str(deep(3)), 'a')\n\
         helper.finish()\n",
    )
    .unwrap();
    let dump = scratch("python.thprof");
    let output = must(
        library()
            .preload(&python())
            .args([&script, &helper])
            .env("THERMALLOC_CONF", EXACT)
            .env("DUMP", &dump),
    );
    let p = Profile::read(&dump);
    assert_stacks(&output, &p, 4, 0);
    let broken = p.sites.values().filter(|(_, flags)| *flags == 2).count();
    assert_eq!(broken, 0, "of {} stacks", p.sites.len());
    assert!(p.sites.len() > 1000);
    assert_eq!(p.live.iter().map(|b| b.usable).sum::<u64>(), p.stats["allocated_bytes"]);
}

#[test]
fn threads_inherit_scopes_where_that_is_wanted() {
    if !library().threads.is_file() {
        return skipped("libthermalloc_threads.so was not built");
    }
    let dump = scratch("threads.thprof");
    let mut preload = library().shared.clone().into_os_string();
    preload.push(":");
    preload.push(&library().threads);
    let program = program("prof/threads.c", &["-O2"]);
    let output = must(
        Command::new("timeout")
            .args(["-s", "KILL", "60"])
            .arg(&program)
            .env("LD_PRELOAD", preload)
            .env("THERMALLOC_CONF", EXACT)
            .env("DUMP", &dump),
    );
    let p = Profile::read(&dump);
    assert_stacks(&output, &p, 3, 0);
    let path = |size: u64| p.path(p.live.iter().find(|b| b.size == size).unwrap().tag);
    assert_eq!(path(300_001), ["workspace:pool"]);
    assert_eq!(path(300_002), ["workspace:pool"]);
    assert!(path(300_003).is_empty());
    assert_eq!(p.live.iter().map(|b| b.usable).sum::<u64>(), p.stats["allocated_bytes"]);
}

#[test]
fn samples_are_within_three_standard_errors() {
    let program = program("prof/program.c", &["-O1"]);
    for (lg, seed) in [(19, 1), (16, 2), (14, 3), (12, 4)] {
        let options = format!("prof:true,lg_prof_sample:{lg},prof_seed:{seed},prof_budget:0");
        let (output, p) = profile(&program, &options, &[]);
        let said = text(&output.stdout);
        let truth: Vec<f64> = said.split_whitespace().map(|w| w.parse().unwrap()).collect();
        let [live_bytes, live_blocks, all_bytes, all_blocks] = truth[..] else { panic!("{said}") };
        let period = f64::from(1u32 << lg);
        // The errors that the program's sizes must have, from the manual's formula.
        let sizes = [24.0, 100.0, 300.0, 2000.0, 9000.0, 70000.0];
        let share = |blocks: f64, of: &[f64], power: i32| -> f64 {
            // All sizes come about as often.
            of.iter()
                .map(|size: &f64| {
                    let hit = 1.0 - (-size / period).exp();
                    blocks / of.len() as f64 * (1.0 - hit) / hit * size.powi(power)
                })
                .sum::<f64>()
                .sqrt()
        };
        let checks = [
            ("live blocks", p.weighted(0), live_blocks, share(live_blocks, &sizes[..4], 0)),
            ("live bytes", p.weighted(1), live_bytes, share(live_blocks, &sizes[..4], 2)),
            ("all blocks", p.weighted(2), all_blocks, share(all_blocks, &sizes, 0)),
            ("all bytes", p.weighted(3), all_bytes, share(all_blocks, &sizes, 2)),
        ];
        for (what, estimate, truth, error) in checks {
            let off = (estimate - truth).abs() / error;
            assert!(off < 3.0, "{what} at 2^{lg}: {estimate:.0} for {truth:.0} +- {error:.0}");
        }
        assert_eq!((p.stats["prof_missed"], p.lost), (0, (0, 0, 0)));
    }
}

#[test]
fn a_budget_bounds_the_samples_and_keeps_the_sums() {
    let program = program("prof/program.c", &["-O1"]);
    let (output, p) =
        profile(&program, "prof:true,lg_prof_sample:6,prof_seed:5,prof_budget:2000", &[]);
    let said = text(&output.stdout);
    let truth: Vec<f64> = said.split_whitespace().map(|w| w.parse().unwrap()).collect();
    assert!(p.stats["prof_blocks"] < 40_000, "{} of 240,000 blocks", p.stats["prof_blocks"]);
    assert!((p.weighted(3) / truth[2] - 1.0).abs() < 0.2, "{} of {}", p.weighted(3), truth[2]);
}

#[test]
fn scopes_steps_marks_and_devices() {
    let log = scratch("scopes.events");
    let options = format!("prof:true,prof_events:{}", log.display());
    let (_, p) = profile(&program("prof/scopes.c", &[]), &options, &[]);
    let by_size =
        |size: u64| *p.live.iter().find(|b| b.size == size).unwrap_or_else(|| panic!("{size}"));
    let told = |mib: u64| {
        let b = by_size(mib << 20);
        (p.path(b.tag), b.step, b.weight)
    };
    let (none, outer): (Vec<&str>, _) = (vec![], vec!["weights:encoder"]);
    let inner = vec!["weights:encoder", "layer 1"];
    assert_eq!(told(2), (none.clone(), 0, 1.0));
    assert_eq!(told(5), (outer.clone(), 7, 1.0));
    assert_eq!(told(3), (inner.clone(), 7, 1.0), "attached on another thread");
    assert_eq!(told(4), (none, 7, 1.0));
    assert_eq!(told(6), (inner.clone(), 7, 1.0));
    assert_eq!(told(7), (outer, 7, 1.0));
    assert_eq!(told(9), (inner, 7, 1.0), "marked, then resized");
    let tag = p.tags.values().find(|t| t.3 == "weights:encoder").unwrap();
    assert_eq!((tag.1, tag.2), (source::SCOPE, component::WEIGHTS));
    let threads: Vec<_> = [3, 4, 5].map(|mib| by_size(mib << 20).thread).to_vec();
    assert!(threads[0] == threads[1] && threads[0] != threads[2]);

    let devices: Vec<_> = p.live.iter().filter(|b| b.space != space::HOST).collect();
    assert_eq!(devices.len(), 2);
    let nccl = devices.iter().find(|b| b.space == space::DEVICE).unwrap();
    assert_eq!((nccl.size, nccl.usable, nccl.device, nccl.stream), (1000, 2048, 3, 5));
    assert_eq!(p.tags[&nccl.tag].3, "nccl");
    let pinned = devices.iter().find(|b| b.space == space::PINNED).unwrap();
    assert_eq!(pinned.flags, 1, "asked to be given back");

    let log = Profile::read(&log);
    assert_eq!((log.whole, log.live.len()), (1, p.live.len()), "a dump at the end");
    let mut live = HashMap::new();
    let mut kinds = [0; 6];
    for event in &log.events {
        match event {
            Record::Alloc(b) => {
                assert!(b.site == 0 || log.sites.contains_key(&b.site));
                assert!(live.insert(b.serial, *b).is_none());
                kinds[0] += 1;
            }
            Record::Free(f) if f.flags == 0 => {
                let b = live.remove(&f.serial).expect("it was allocated");
                assert_eq!((b.address, b.time_ns), (f.address, f.born_ns));
                assert!(f.time_ns >= b.time_ns);
                kinds[1] += 1;
            }
            Record::Free(_) => kinds[2] += 1,
            Record::Resize(r) => {
                let b = live.get_mut(&r.serial).unwrap();
                (b.address, b.size, b.usable) = (r.address, r.size, r.usable);
                kinds[3] += 1;
            }
            Record::Retag(r) => {
                live.get_mut(&r.serial).unwrap().tag = r.tag;
                kinds[4] += 1;
            }
            Record::Step(s) => {
                assert_eq!(s.step, 7);
                kinds[5] += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(kinds[1..], [1, 2, 1, 1, 1], "{kinds:?}");
    for b in &p.live {
        let mut event = live.remove(&b.serial).expect("in the log");
        event.flags = b.flags;
        assert_eq!(event, *b);
    }
    assert!(live.is_empty());
}

#[test]
fn tensorflows_annotations_become_tags() {
    let library = scratch("tf/libtensorflow_framework.so.2");
    compile("prof/annotation.cpp", &library, &["-shared", "-fPIC"]);
    let program = program("prof/tensorflow.c", &[]);
    let said = |options: &str| {
        let (_, p) = profile(&program, options, &[&library]);
        let told = |mib: u64| {
            let b = p.live.iter().find(|b| b.size == mib << 20).unwrap();
            let tag = p.tags.get(&b.tag).cloned().unwrap_or_default();
            (tag.3, tag.1, b.step)
        };
        [2, 3, 4, 5].map(told)
    };
    let (tf, none) = (source::TENSORFLOW, (String::new(), 0, 0));
    let scope = (String::from("kv_cache"), source::SCOPE, 0);
    let [nothing, output, temp, scoped] = said("prof:true");
    assert_eq!(nothing, none, "no operator is at work");
    assert_eq!(output, (String::from("functional_1/conv_b_1/Relu"), tf, 30));
    assert_eq!(temp, (String::from("gradient_tape/dense/MatMul"), tf, 31), "on its thread");
    assert_eq!(scoped, scope, "what the program says goes first");
    assert_eq!(said("prof:true,prof_tensorflow:false"), [none.clone(), none.clone(), none, scope]);
    assert_eq!(said("prof:true,background_thread:false")[1], output, "without the thread");
}

#[test]
fn nothing_that_happens_beside_it_disturbs() {
    let program = program("prof/busy.c", &["-O1"]);
    for options in [
        "prof:true,lg_prof_sample:10,prof_budget:0",
        "prof:true,lg_prof_sample:0",
        "prof:true,lg_prof_sample:12,rseq:false,background_thread:false",
    ] {
        let log = scratch(&format!("busy.{}.%p.events", options.len()));
        let all = format!("{options},prof_events:{}", log.display());
        let (output, p) = profile(&program, &all, &[&plugin()]);
        assert_eq!(text(&output.stdout), "");
        assert_eq!((p.whole, p.lost.2), (1, 0));
        let child = scratch(&format!(
            "{}.{:x}.child",
            program.file_name().unwrap().to_string_lossy(),
            all.len() * 1000 + all.bytes().map(usize::from).sum::<usize>()
        ));
        assert_eq!(Profile::read(&child).whole, 1);
        // All threads are over: what they had is gone.
        let big = p.live.iter().filter(|b| b.size > 100_000).count();
        assert!(big <= 1, "{big}");
        let names: Vec<_> = p.tags.values().map(|t| t.3.as_str()).collect();
        assert!(names.contains(&"weights:odd") && names.contains(&"activations"));
        let parent = std::fs::read_dir(log.parent().unwrap()).unwrap().filter_map(|entry| {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            name.starts_with(&format!("busy.{}.", options.len())).then_some(path)
        });
        let mut logs = 0;
        for log in parent {
            let read = Profile::read(&log);
            let mut live = std::collections::HashSet::new();
            let mut unknown = 0u64;
            for event in &read.events {
                match event {
                    Record::Alloc(b) => assert!(live.insert(b.serial)),
                    Record::Free(f) => unknown += u64::from(!live.remove(&f.serial)),
                    _ => {}
                }
            }
            logs += 1;
            std::fs::remove_file(log).unwrap();
            if read.lost.0 == 0 && read.whole > 0 {
                assert_eq!(unknown, 0);
            }
        }
        assert!(logs > 1, "the children have logs of their own");
    }
}

#[test]
fn what_the_options_ask_for_at_the_end_and_between() {
    let folder = scratch("ends");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let options = format!(
        "prof:true,prof_final:true,prof_leak:true,lg_prof_interval:22,prof_gdump:true,prof_prefix:{}/p",
        folder.display()
    );
    let output = must(
        library()
            .preload(&python())
            .args(["-c", "x=[bytearray(3<<20) for i in range(50)]"])
            .env("THERMALLOC_CONF", options),
    );
    let said = text(&output.stderr);
    assert!(said.starts_with("thermalloc: leak: about "), "{said}");
    assert_eq!(said.lines().count(), 1);
    let mut reasons = HashMap::<String, usize>::new();
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let parts: Vec<_> = name.split('.').collect();
        assert_eq!((parts[0], parts[6], parts.len()), ("p", "thprof", 7), "{name}");
        *reasons.entry(parts[5].to_owned()).or_default() += 1;
        assert_eq!(Profile::read(&path).whole, 1);
    }
    assert_eq!(reasons["exit"], 1);
    assert!(reasons["interval"] >= 10, "{reasons:?}");
    assert!(reasons["peak"] >= 1, "{reasons:?}");
}

#[test]
fn jemallocs_names_steer_the_profiler() {
    let folder = scratch("names");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let (heap, prefix) = (folder.join("a.heap"), folder.join("p"));
    let mut command = library().preload(&linked("mallctl"));
    let options = format!("prof:true,prof_budget:0,prof_prefix:{}", prefix.display());
    must(command.arg(&heap).env("MALLOC_CONF", options));
    let text = std::fs::read_to_string(&heap).unwrap();
    assert!(text.starts_with("heap_v2/1\n") && text.contains(": 7654321 ["), "{text}");
    let mut dumps = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
    let dump = dumps.find(|path| path.extension().is_some_and(|e| e == "thprof"));
    let p = Profile::read(&dump.expect("a dump by the prefix"));
    assert!(p.live.iter().any(|b| b.size == 7_654_321));
}

#[test]
fn dumps_as_jemalloc_writes_them() {
    let folder = scratch("heap_v2");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let prefix = folder.join("jeprof");
    let options =
        format!("{EXACT},prof_final:true,prof_jeprof:true,prof_prefix:{}", prefix.display());
    let script = "x=[bytearray((5 << 20) + i) for i in range(10)]; import os; y=b'a'*300000";
    let python = python();
    must(library().preload(&python).args(["-c", script]).env("THERMALLOC_CONF", options));
    let mut files = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
    let file = files.next().expect("a dump");
    assert!(files.next().is_none());
    let name = file.file_name().unwrap().to_string_lossy().into_owned();
    assert!(name.starts_with("jeprof.") && name.ends_with(".0.f.heap"), "{name}");
    let text = std::fs::read_to_string(&file).unwrap();
    let (head, maps) = text.split_once("\nMAPPED_LIBRARIES:\n").unwrap();
    let mut lines = head.lines();
    assert_eq!(lines.next(), Some("heap_v2/1"));
    let figures = |line: &str| -> Vec<u64> {
        let line = line.strip_prefix("  t*: ").unwrap_or_else(|| panic!("{line}"));
        line.split([':', ' ', '[', ']'])
            .filter(|w| !w.is_empty())
            .map(|w| w.parse().unwrap())
            .collect()
    };
    let sum = figures(lines.next().unwrap());
    let mut of_sites = [0; 4];
    let mut sites = 0;
    while let Some(site) = lines.next().filter(|line| !line.is_empty()) {
        let frames: Vec<_> = site.split(' ').collect();
        assert_eq!(frames[0], "@");
        assert!(frames[1..].iter().all(|f| u64::from_str_radix(&f[2..], 16).unwrap() > 4096));
        for (total, figure) in of_sites.iter_mut().zip(figures(lines.next().unwrap())) {
            *total += figure;
        }
        sites += 1;
    }
    assert_eq!(of_sites[..], sum[..]);
    assert!(sites > 500 && sum[2] > sum[0] && sum[3] > 50 << 20, "{sites}: {sum:?}");
    assert!(maps.contains("libthermalloc.so") && maps.lines().all(|line| line.contains('-')));
}

#[test]
fn off_it_does_nothing() {
    let output = must(
        library()
            .preload(&python())
            .args([
                "-c",
                "import ctypes;print(ctypes.CDLL(None).thermalloc_prof_dump(b'/nonexistent/x'))",
            ])
            .env("THERMALLOC_CONF", "prof_final:true,prof_leak:true"),
    );
    assert_eq!(text(&output.stdout).trim(), libc::ENOTSUP.to_string());
    assert_eq!(text(&output.stderr), "");
}

#[test]
fn probes_are_where_tracers_look() {
    let notes = text(&must(Command::new("readelf").arg("-n").arg(&library().shared)).stdout);
    for part in ["stapsdt", "otel_memory", "Name: alloc", "Name: free", "8@%rdi 8@%rsi 8@%rdx"] {
        assert!(notes.contains(part), "{part}: {notes}");
    }
    let semaphores: Vec<_> = notes.match_indices("Semaphore: 0x").collect();
    assert_eq!(semaphores.len(), 2);
    assert!(!notes.contains("Semaphore: 0x0000000000000000"), "{notes}");
}
