//! `thermalloc prof`, `stats` and `top` on real programs, and its formats in the hands of their readers:
//! jeprof, Python's pickle and JSON, and where they are installed `go tool pprof` and torch's viewer.
//! pprof's format is checked by a strict decoder as well.
use std::collections::HashMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use serde_json::Value;
use thermalloc_tests::{Library, must, skipped, text};

const SCRATCH: &str = env!("CARGO_TARGET_TMPDIR");

/// 200 blocks of 64 KiB are leaked over a second, as many are freed; 2 MiB and 6 MiB blocks stay.
const PROGRAM: &str = r#"
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
__attribute__((weak)) uint32_t thermalloc_scope_push(const char *name);
__attribute__((weak)) void thermalloc_scope_pop(uint32_t token);
void *kept[400];
__attribute__((noinline)) void *planted_leak(int i) { return kept[i] = malloc(65536); }
__attribute__((noinline)) void *short_lived(void) { return malloc(65536); }
__attribute__((noinline)) void *filled_at_start(void) { return malloc(2 << 20); }
__attribute__((noinline)) void *model(void) { return memset(malloc(6 << 20), 1, 6 << 20); }
int main(int argc, char **argv) {
    uint32_t scope = thermalloc_scope_push("weights:encoder");
    kept[399] = model();
    thermalloc_scope_pop(scope);
    kept[398] = memset(filled_at_start(), 1, 2 << 20);
    for (int i = 0; i < 200; i++) {
        memset(planted_leak(i), 1, 65536);
        void *p = memset(short_lived(), 1, 65536);
        usleep(5000);
        free(p);
    }
    if (argc > 2) malloc(1UL << 46);
    else if (argc > 1) pause();
    return 0;
}
"#;

struct Made {
    library: PathBuf,
    program: PathBuf,
    log: PathBuf,
}

static MADE: LazyLock<Made> = LazyLock::new(|| {
    let library = Library::build(Path::new(SCRATCH)).shared;
    let folder = Path::new(SCRATCH).join("prof-cli");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("scratch folder");
    let (source, program) = (folder.join("leaky.c"), folder.join("leaky"));
    std::fs::write(&source, PROGRAM).expect("source");
    must(
        Command::new("gcc")
            .args(["-O1", "-g", "-fno-builtin", "-w", "-fPIE", "-pie", "-o"])
            .args([&program, &source]),
    );
    let prefix = folder.join("p");
    must(run(&library).args(["--exact", "-o"]).arg(&prefix).arg("--").arg(&program));
    let log = files(&folder, ".thlog").pop().expect("a log");
    Made { library, program, log }
});

fn files(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("folder");
    let paths = entries.map(|entry| entry.expect("entry").path());
    paths.filter(|path| path.to_string_lossy().ends_with(ending)).collect()
}

fn tool() -> Command {
    thermalloc_tests::tool(env!("CARGO_BIN_EXE_thermalloc"))
}

fn run(library: &Path) -> Command {
    let mut command = tool();
    command.args(["prof", "run", "--lib"]).arg(library);
    command
}

fn report(name: &str, more: &[&str]) -> String {
    text(&must(tool().args(["prof", name]).arg(&MADE.log).args(more)).stdout)
}

fn json(name: &str, more: &[&str]) -> Value {
    let said = report(name, &[&["--json"], more].concat());
    serde_json::from_str(&said).unwrap_or_else(|why| panic!("{why}: {said}"))
}

fn convert(to: &str) -> PathBuf {
    let path = MADE.log.with_extension(to);
    must(tool().args(["prof", "convert", "--to", to]).arg(&MADE.log).arg("-o").arg(&path));
    path
}

#[test]
fn the_report_has_components_scopes_and_sites() {
    let said = json("report", &[]);
    let components = said["components"].as_array().unwrap();
    let weights = components.iter().find(|row| row["component"] == "weights").unwrap();
    assert_eq!(weights["live_bytes"], f64::from(6 << 20));
    assert_eq!(weights["known_by"]["scope"], f64::from(6 << 20));
    assert_eq!(said["operators"][0]["name"], "weights:encoder");
    let live = said["live_bytes"].as_f64().unwrap();
    let least = f64::from((8 << 20) + 200 * 65536);
    assert!((least..least + 1e6).contains(&live), "{live}");
    let leak =
        said["sites"].as_array().unwrap().iter().find(|row| row["stack"][0] == "planted_leak");
    assert_eq!(leak.unwrap()["live_bytes"], f64::from(200 * 65536));
    assert_eq!(leak.unwrap()["stack"][1], "main", "the allocator's frames are left out");
    let grown = &said["growth"]["sites"][0];
    assert_eq!(grown["stack"][0], "planted_leak", "{grown}");
    let at: Vec<f64> =
        grown["live_bytes"].as_array().unwrap().iter().map(|b| b.as_f64().unwrap()).collect();
    assert!(at.len() == 4 && at.is_sorted() && at[0] > 0.0, "{at:?}");
    assert_eq!(at[3], f64::from(200 * 65536));
    assert_eq!(grown["growth_bytes"], at[3] - at[0]);
    let told = report("report", &[]);
    assert!(told.contains("planted_leak < main"), "{told}");
    assert!(told.contains("6.0 MiB"), "{told}");
}

#[test]
fn operators_hold_what_their_scopes_allocated() {
    let said = json("operators", &[]);
    let rows = said["operators"].as_array().unwrap();
    assert_eq!(rows.len(), 1, "{said:#}");
    assert_eq!(
        (&rows[0]["name"], &rows[0]["component"]),
        (&"weights:encoder".into(), &"weights".into())
    );
    assert_eq!(
        (&rows[0]["peak_bytes"], &rows[0]["most_bytes"]),
        (&f64::from(6 << 20).into(), &f64::from(6 << 20).into())
    );
    assert!(report("operators", &[]).contains("to the end  weights    weights:encoder"));
    let failed = tool().args(["prof", "operators", "--step", "3"]).arg(&MADE.log).output().unwrap();
    let told = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(!failed.status.success() && told.contains("no steps are known"), "{told}");
}

#[test]
fn the_planted_leak_is_the_only_one() {
    let said = json("leaks", &[]);
    let leaks = said["leaks"].as_array().unwrap();
    assert_eq!(leaks.len(), 1, "{said:#}");
    assert_eq!(leaks[0]["stack"][0], "planted_leak");
    let growth = leaks[0]["growth_bytes"].as_f64().unwrap();
    assert!((growth / 6.5e6 - 1.0).abs() < 0.3, "{growth}");
}

#[test]
fn the_resident_size_is_explained() {
    let said = json("rss", &[]);
    let share = said["explained_share"].as_f64().unwrap();
    assert!((0.97..=1.0).contains(&share), "{said:#}");
    let all = said["resident_bytes"].as_f64().unwrap();
    let of = |what: &str| {
        let terms = said["terms"].as_array().unwrap();
        terms.iter().find(|term| term["what"] == what).unwrap()["bytes"].as_f64().unwrap()
    };
    let live = of("live blocks, as asked for");
    assert!((7e6..all).contains(&live), "{live} of {all}");
    assert!(
        said["mappings"]
            .as_array()
            .unwrap()
            .iter()
            .any(|m| { m["path"].as_str().unwrap().contains("libc.so") })
    );
}

/// A program of the examples, which has the allocator within itself.
fn example(name: &str) -> PathBuf {
    let target = Path::new(SCRATCH).join("examples");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    must(
        Command::new(cargo)
            .args(["build", "--release", "--package", "thermalloc", "--example", name])
            .arg("--manifest-path")
            .arg(thermalloc_tests::root().join("Cargo.toml"))
            .arg("--target-dir")
            .arg(&target),
    );
    target.join("release/examples").join(name)
}

#[test]
fn the_resident_size_of_a_rust_service_is_explained() {
    let folder = Path::new(SCRATCH).join("store");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    // The figures are compared: samples 16 KiB apart make the error of 45 MB less than 1 MB.
    let sampled = "prof:true,prof_final:true,lg_prof_sample:14,prof_budget:0,prof_prefix:";
    let conf = format!("{sampled}{}", folder.join("s").display());
    let output = must(Command::new(example("store")).arg("6000").env("THERMALLOC_CONF", conf));
    let words = text(&output.stdout);
    let kept = words.split(", ").find_map(|part| part.strip_suffix(" bytes"));
    let kept: f64 = kept.unwrap_or_else(|| panic!("{words}")).parse().unwrap();
    let dump = files(&folder, ".exit.thprof").pop().expect("a dump");
    let said = text(&must(tool().args(["prof", "rss", "--json"]).arg(&dump)).stdout);
    let said: Value = serde_json::from_str(&said).unwrap();
    let share = said["explained_share"].as_f64().unwrap();
    assert!((0.97..=1.0).contains(&share), "{said:#}");
    let terms = said["terms"].as_array().unwrap();
    assert!(terms.iter().all(|term| term["bytes"].as_f64().unwrap() >= 0.0), "{said:#}");
    // The program knows the greatest part of what is live, and the kernel the sum.
    let live = terms[0]["bytes"].as_f64().unwrap();
    assert!((kept * 0.9..kept * 1.5).contains(&live), "{live} with {kept} of documents");
    let resident = said["resident_bytes"].as_f64().unwrap();
    let of_kernel = said["limits"]["resident_bytes"].as_f64().unwrap();
    assert!((resident / of_kernel - 1.0).abs() < 0.03, "{resident} of {of_kernel}");
    let report = text(&must(tool().args(["prof", "report"]).arg(&dump)).stdout);
    assert!(report.contains("documents"), "{report}");
}

#[test]
fn every_report_says_something_in_text_in_json_and_as_a_picture() {
    let log = MADE.log.to_string_lossy().into_owned();
    let cases: [(&str, &[&str], bool); 8] = [
        ("peak", &[], true),
        ("lifetimes", &[], true),
        ("fragmentation", &[], true),
        ("flame", &[], true),
        ("operators", &["--join-layers", "--name", "encoder"], false),
        ("breakdown", &[], false),
        ("compare", &[&log], false),
        ("report", &["--at", "end"], false),
    ];
    for (name, more, has_picture) in cases {
        assert!(report(name, more).lines().count() > 2, "{name}");
        assert!(json(name, more).as_object().is_some_and(|members| members.len() > 1), "{name}");
        let picture = MADE.log.with_extension(format!("{name}.svg"));
        let drawn =
            tool().args(["prof", name]).arg(&MADE.log).args(more).arg("-o").arg(&picture).output();
        assert_eq!(drawn.unwrap().status.success(), has_picture, "{name}");
        if has_picture {
            let svg = std::fs::read_to_string(&picture).unwrap();
            let parse = "import sys, xml.etree.ElementTree as e; e.parse(sys.argv[1])";
            must(Command::new("python3").args(["-c", parse]).arg(&picture));
            let fetches = ["<script src", "@import", "<image", "url(http"];
            assert!(fetches.iter().all(|fetch| !svg.contains(fetch)), "{name} needs a network");
        }
    }
    let lifetimes = report("lifetimes", &[]);
    let line = lifetimes.lines().find(|line| line.contains("short_lived")).unwrap();
    assert!(line.contains("200") && line.contains("ms"), "{line}");
}

#[test]
fn compare_shows_what_changed() {
    let early = MADE.log.with_extension("early");
    // The same log, at its end and at a tenth of a second: as two runs.
    std::fs::copy(&MADE.log, &early).unwrap();
    let said =
        text(&must(tool().args(["prof", "compare", "--json"]).args([&MADE.log, &early])).stdout);
    let said: Value = serde_json::from_str(&said).unwrap();
    let all = &said["components"]["in all"];
    assert_eq!(all["before_bytes"], all["after_bytes"]);
    assert_eq!(all["error_bytes"], 0.0);
}

#[test]
fn a_capacity_needs_something_that_sequences_use() {
    let refused =
        tool().args(["prof", "capacity", "--limit", "1G"]).arg(&MADE.log).output().unwrap();
    assert_eq!(refused.status.code(), Some(126));
    assert!(text(&refused.stderr).contains("KV cache"), "{refused:?}");
}

#[test]
fn jeprof_reads_heap_v2() {
    if Command::new("jeprof").arg("--version").output().is_err() {
        return skipped("jeprof (of libjemalloc-dev) is not installed");
    }
    let dump = convert("heap-v2");
    let out =
        must(Command::new("jeprof").args(["--text", "--show_bytes"]).args([&MADE.program, &dump]));
    let said = text(&out.stdout);
    let line =
        said.lines().find(|line| line.contains("planted_leak")).unwrap_or_else(|| panic!("{said}"));
    assert!(line.trim_start().starts_with("13107200"), "{said}");
}

#[test]
fn folded_stacks_end_in_the_function_that_asked() {
    let said = std::fs::read_to_string(convert("folded")).unwrap();
    assert!(said.lines().any(|line| line.ends_with(";main;planted_leak 13107200")), "{said}");
    assert!(said.lines().any(|line| {
        line.starts_with("weights;") && line.ends_with(";main;model;[weights:encoder] 6291456")
    }));
}

#[test]
fn chrome_counters_are_in_order() {
    let said: Value = serde_json::from_slice(&std::fs::read(convert("chrome")).unwrap()).unwrap();
    let events = said["traceEvents"].as_array().unwrap();
    let counters: Vec<&Value> =
        events.iter().filter(|e| e["ph"] == "C" && e["name"] == "live bytes").collect();
    assert!(counters.len() > 100);
    assert!(counters.is_sorted_by_key(|e| e["ts"].as_u64().expect("microseconds")));
    for event in events {
        assert!(event["pid"].is_u64() && event["name"].is_string(), "{event}");
        match event["ph"].as_str() {
            Some("C") => assert!(event["args"].as_object().unwrap().values().all(Value::is_u64)),
            Some("M" | "i") => {}
            other => panic!("{other:?}"),
        }
    }
    let most = counters.iter().map(|e| e["args"]["weights"].as_u64().unwrap()).max();
    assert_eq!(most, Some(6 << 20));
}

#[test]
fn the_torch_snapshot_is_read_by_pickle_and_by_torchs_viewer() {
    let snapshot = convert("torch");
    let check = "import pickle, sys\n\
        s = pickle.load(open(sys.argv[1], 'rb'))\n\
        assert s['segments'] and s['device_traces'][0]\n\
        for seg in s['segments']:\n    \
            at = seg['address']\n    \
            for b in seg['blocks']:\n        \
                assert b['address'] == at and b['state'] in ('active_allocated', 'inactive')\n        \
                at += b['size']\n    \
            assert at == seg['address'] + seg['total_size'] and seg['segment_pool_id'] == (0, 0)\n\
        names = {f['name'] for seg in s['segments'] for b in seg['blocks'] for f in b['frames']}\n\
        assert 'planted_leak' in names, names\n\
        print(sum(b['size'] for seg in s['segments'] for b in seg['blocks'] if b['frames']))";
    let said = text(&must(Command::new("python3").args(["-c", check]).arg(&snapshot)).stdout);
    assert!(said.trim().parse::<u64>().unwrap() >= 200 * 65536 + (8 << 20), "{said}");
    let viewer = std::env::var_os("TORCH_MEMORY_VIZ").map(PathBuf::from);
    let Some(viewer) = viewer.filter(|path| path.exists()) else {
        return skipped("TORCH_MEMORY_VIZ does not name torch's _memory_viz.py");
    };
    let told = text(&must(Command::new("python3").arg(&viewer).arg("trace").arg(&snapshot)).stdout);
    assert!(told.contains(" entries\n") && told.contains("[0:6.0MiB]"), "{told}");
    for mode in ["trace_plot", "segment_plot"] {
        let html = MADE.log.with_extension(format!("{mode}.html"));
        must(Command::new("python3").arg(&viewer).arg(mode).arg(&snapshot).arg("-o").arg(&html));
        assert!(std::fs::metadata(&html).unwrap().len() > 1000);
    }
}

/// Fields of a message: numbers, or bytes.
fn fields(mut bytes: &[u8]) -> Vec<(u64, u64, &[u8])> {
    fn varint(bytes: &mut &[u8]) -> u64 {
        let mut value = 0;
        for shift in (0..70).step_by(7) {
            let (&first, rest) = bytes.split_first().expect("a varint's end");
            *bytes = rest;
            value |= u64::from(first & 0x7f) << shift;
            if first < 0x80 {
                return value;
            }
        }
        panic!("a varint of more than ten bytes");
    }
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        match key & 7 {
            0 => fields.push((key >> 3, varint(&mut bytes), &[][..])),
            2 => {
                let len = usize::try_from(varint(&mut bytes)).unwrap();
                let (inner, rest) = bytes.split_at(len);
                fields.push((key >> 3, 0, inner));
                bytes = rest;
            }
            other => panic!("wire type {other}"),
        }
    }
    fields
}

fn packed(bytes: &[u8]) -> Vec<u64> {
    // A packed list is what fields of number 0 would be without their keys.
    let mut values = Vec::new();
    let (mut value, mut shift) = (0, 0);
    for &byte in bytes {
        value |= u64::from(byte & 0x7f) << shift;
        shift += 7;
        if byte < 0x80 {
            values.push(value);
            (value, shift) = (0, 0);
        }
    }
    assert_eq!(shift, 0, "the list ends within a number");
    values
}

#[test]
fn pprof_is_well_formed_and_says_the_same() {
    let mut bytes = Vec::new();
    let file = std::fs::File::open(convert("pprof")).unwrap();
    flate2::read::GzDecoder::new(file).read_to_end(&mut bytes).unwrap();
    let profile = fields(&bytes);
    let of = |number: u64| profile.iter().filter(move |field| field.0 == number);
    let strings: Vec<&str> = of(6).map(|f| str::from_utf8(f.2).unwrap()).collect();
    assert_eq!(strings[0], "");
    let string = |number: u64| strings[usize::try_from(number).unwrap()];
    let one = |bytes: &[u8], number: u64| {
        fields(bytes).iter().find(|field| field.0 == number).map_or(0, |field| field.1)
    };
    let types: Vec<&str> = of(1).map(|f| string(one(f.2, 1))).collect();
    assert_eq!(types, ["alloc_objects", "alloc_space", "inuse_objects", "inuse_space"]);
    let functions: HashMap<u64, &str> = of(5).map(|f| (one(f.2, 1), string(one(f.2, 2)))).collect();
    let mappings: Vec<u64> = of(3).map(|f| one(f.2, 1)).collect();
    assert_eq!(mappings[0], 1);
    assert!(string(one(of(3).next().unwrap().2, 5)).ends_with("/leaky"), "the program is first");
    let mut locations: HashMap<u64, Vec<&str>> = HashMap::new();
    for f in of(4) {
        let mapping = one(f.2, 2);
        assert!(mapping == 0 || mappings.contains(&mapping));
        let lines = fields(f.2).into_iter().filter(|field| field.0 == 4);
        let names = lines.map(|line| functions[&one(line.2, 1)]).collect();
        assert!(locations.insert(one(f.2, 1), names).is_none(), "an id twice");
    }
    let mut leak = [0; 4];
    for sample in of(2) {
        let parts = fields(sample.2);
        let list = |number: u64| packed(parts.iter().find(|part| part.0 == number).unwrap().2);
        let values = list(2);
        assert_eq!(values.len(), 4);
        let names: Vec<&str> = list(1).iter().flat_map(|id| locations[id].clone()).collect();
        assert!(!names.iter().any(|name| name.starts_with("malloc")), "{names:?}");
        if names.first() == Some(&"planted_leak") {
            leak.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        }
        assert!(
            parts.iter().filter(|part| part.0 == 3).any(|l| string(one(l.2, 1)) == "component")
        );
    }
    assert_eq!(leak, [200, 200 * 65536, 200, 200 * 65536]);
}

#[test]
fn go_reads_the_pprof_where_it_is_installed() {
    let Ok(go) = Command::new("go").arg("version").output() else {
        return skipped("go is not installed");
    };
    assert!(go.status.success());
    let path = convert("pprof");
    let out = must(
        Command::new("go")
            .args(["tool", "pprof", "-top", "-unit=B", "-tagfocus=component=weights"])
            .arg(&path)
            .env("HOME", SCRATCH),
    );
    let said = text(&out.stdout);
    assert!(said.contains("6291456B") && said.contains("model"), "{said}");
    assert!(!said.contains("planted_leak"), "{said}");
}

#[test]
fn other_files_are_refused_in_one_line() {
    let refused = tool().args(["prof", "report", "/proc/self/status"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(126));
    assert_eq!(text(&refused.stderr).lines().count(), 1);
    let missing = tool().args(["prof", "report", "/nonexistent"]).output().unwrap();
    assert_eq!(missing.status.code(), Some(127));
}

/// The log of a program that loads a library late and ends by `how`, and the library.
fn ended_early(how: &str) -> (PathBuf, PathBuf) {
    let folder = MADE.log.parent().unwrap().join(format!("early-{how}"));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let (program, plugin) = (folder.join("early_end"), folder.join("plugin.so"));
    thermalloc_tests::compile("prof/early_end.c", &program, &["-O1", "-fPIE", "-pie", "-ldl"]);
    thermalloc_tests::compile("prof/plugin.c", &plugin, &["-O1", "-shared", "-fPIC"]);
    let log = folder.join("events.thlog");
    let mut command = Command::new(&program);
    command.arg(&plugin).arg(how).env("LD_PRELOAD", &MADE.library);
    // No dump in between, which has the mappings too.
    command.env("THERMALLOC_CONF", format!("prof:true,prof_events:{}", log.display()));
    let ended = thermalloc_tests::output(&mut command);
    assert!(ended.status.success() || how == "kill", "{how}: {}", text(&ended.stderr));
    (log, plugin)
}

#[test]
fn a_process_that_ends_with_no_handler_leaves_a_log_with_names() {
    for how in ["_exit", "vfork", "quick_exit", "kill"] {
        let (log, plugin) = ended_early(how);
        let said = text(&must(tool().args(["prof", "report", "--json"]).arg(&log)).stdout);
        let said: Value = serde_json::from_str(&said).unwrap();
        let sites = said["sites"].as_array().unwrap();
        let early = f64::from(3 * (2 << 20));
        let site = sites.iter().find(|site| site["live_bytes"] == early);
        let site = site.unwrap_or_else(|| panic!("{how}: {said:#}"));
        let stack: Vec<&str> =
            site["stack"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
        let known = ["keep", "inner", "call", "main"];
        let at: Vec<_> = known.iter().map(|name| stack.iter().position(|s| s == name)).collect();
        assert!(at.is_sorted() && at.iter().all(Option::is_some), "{how}: {stack:?}");
        assert_eq!(said["warnings"].as_array().unwrap().len(), 0, "{how}: {said:#}");
        // Also where the file of a stack is gone, its name is known.
        std::fs::remove_file(&plugin).unwrap();
        let told = text(&must(tool().args(["prof", "report"]).arg(&log)).stdout);
        assert!(told.contains("plugin.so+0x"), "{how}: {told}");
    }
}

#[test]
fn a_log_that_was_cut_anywhere_is_still_read() {
    let whole = std::fs::read(&MADE.log).unwrap();
    for part in 1..8 {
        let cut = MADE.log.with_extension(format!("cut{part}"));
        std::fs::write(&cut, &whole[..whole.len() * part / 8 - 3]).unwrap();
        let output = tool().args(["prof", "report", "--json"]).arg(&cut).output().unwrap();
        if !output.status.success() {
            // Nothing of it but the head is whole.
            assert!(part < 4, "{output:?}");
            assert_eq!(text(&output.stderr).lines().count(), 1);
            continue;
        }
        let said: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(said["live_bytes"].as_f64().unwrap() > 6e6, "{said}");
        assert!(!said["warnings"].as_array().unwrap().is_empty());
    }
}

/// A process that is killed when the test ends.
struct Live(Child);

impl Drop for Live {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_live_process_is_read_asked_for_a_dump_and_read_when_stopped() {
    let folder = Path::new(SCRATCH).join("live");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let page = folder.join("page.%p");
    let conf = format!(
        "prof:true,lg_prof_sample:12,prof_prefix:{},stats_page:{}",
        folder.join("d").display(),
        page.display()
    );
    let child = Command::new(&MADE.program)
        .arg("wait")
        .env("LD_PRELOAD", &MADE.library)
        .env("THERMALLOC_CONF", conf)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let pid = child.id().to_string();
    let live = Live(child);
    std::thread::sleep(Duration::from_millis(3500));
    let said = must(tool().args(["stats", "--json", &pid])).stdout;
    let said: Value = serde_json::from_slice(&said).unwrap();
    assert!(said[0]["stats"]["allocated_bytes"].as_u64().unwrap() > 20 << 20, "{said}");
    let all = &said[0]["pools"][0];
    let [used, free, held] =
        ["live_bytes", "free_bytes", "held_bytes"].map(|part| all[part].as_u64().unwrap());
    assert!(all["name"] == "arenas of CPUs" && used > 20 << 20 && used + free == held, "{all}");
    let scrape = text(&must(tool().args(["stats", "--prometheus", &pid])).stdout);
    assert!(scrape.contains("component=\"weights\"} 6291456"), "{scrape}");
    must(tool().args(["stats", "--dump", &pid]));
    let until = Instant::now() + Duration::from_secs(20);
    while files(&folder, ".thprof").is_empty() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(100));
    }
    std::thread::sleep(Duration::from_millis(500));
    let dump = files(&folder, ".thprof").pop().expect("a dump");
    assert!(
        text(&must(tool().args(["prof", "report"]).arg(&dump)).stdout).contains("planted_leak")
    );
    // A process that does nothing any more is read all the same.
    must(Command::new("kill").args(["-STOP", &pid]));
    let screen = text(&must(tool().args(["top", "--once", &pid])).stdout);
    for part in
        ["leaky", "planted_leak < main", "weights", "[weights:encoder] model", "arenas of CPUs"]
    {
        assert!(screen.contains(part), "no {part} in\n{screen}");
    }
    drop(live);
    let page = folder.join(format!("page.{pid}"));
    assert!(page.exists(), "a killed process leaves its page");
}

/// Dumps that the program writes with these options: their reasons, and bytes of all.
fn dumps(name: &str, conf: &str, arguments: &[&str]) -> (Vec<String>, u64) {
    let folder = Path::new(SCRATCH).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let prefix = folder.join("d");
    must(
        Command::new(&MADE.program)
            .args(arguments)
            .env("LD_PRELOAD", &MADE.library)
            .env("THERMALLOC_CONF", format!("prof:true,prof_prefix:{},{conf}", prefix.display())),
    );
    let paths = files(&folder, ".thprof");
    let bytes = paths.iter().map(|path| std::fs::metadata(path).unwrap().len()).sum();
    let mut reasons: Vec<String> = paths
        .iter()
        .map(|path| {
            let path = path.to_string_lossy();
            let parts: Vec<&str> = path.rsplit('.').collect();
            let [_, why, live, time, number, pid, ..] = parts[..] else { panic!("{path}") };
            assert!(number.parse::<u32>().is_ok() && pid.parse::<u32>().is_ok(), "{path}");
            assert!(live.strip_suffix('M').is_some_and(|mib| mib.parse::<u32>().is_ok()), "{path}");
            assert!(time.len() == 16 && time.starts_with("20") && time.ends_with('Z'), "{path}");
            why.to_owned()
        })
        .collect();
    reasons.sort();
    (reasons, bytes)
}

#[test]
fn dumps_when_memory_is_out_when_a_limit_is_near_and_no_more_than_the_quota() {
    assert_eq!(dumps("oom", "prof_oom:true", &["a", "b"]).0, ["oom"]);
    assert_eq!(dumps("no-oom", "prof_final:true", &["a", "b"]).0, ["exit"]);
    let limit = "prof_limit_percent:99,limit_bytes:8388608";
    assert_eq!(dumps("limit", limit, &[]).0, ["limit"]);
    let quota = "lg_prof_interval:21,prof_final:true,prof_dumps";
    let (reasons, bytes) = dumps("quota", &format!("{quota}:3"), &[]);
    assert_eq!(reasons, ["interval"; 3]);
    let (fewer, within) = dumps("bytes", &format!("{quota}_bytes:{}", bytes / 2), &[]);
    assert!((1..3).contains(&fewer.len()) && within <= bytes / 2, "{within} of {bytes}: {fewer:?}");
}

#[test]
fn threads_inherit_scopes_where_the_launcher_is_told_so() {
    let preloaded = |more: &[&str]| {
        let prefix = Path::new(SCRATCH).join("inherit");
        let mut command = run(&MADE.library);
        let said = must(command.args(more).arg("-o").arg(prefix).args(["--", "/usr/bin/env"]));
        let said = text(&said.stdout);
        said.lines().find_map(|line| line.strip_prefix("LD_PRELOAD=").map(str::to_owned)).unwrap()
    };
    let library = MADE.library.display().to_string();
    assert_eq!(preloaded(&[]), library);
    let both =
        format!("{library}:{}", MADE.library.with_file_name("libthermalloc_threads.so").display());
    assert_eq!(preloaded(&["--inherit-scopes"]), both);
}

#[test]
fn programs_that_a_profiled_one_starts_are_not_profiled_and_its_forks_are() {
    let folder = Path::new(SCRATCH).join("children");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let script = "import os, subprocess, sys\n\
        subprocess.run([sys.executable, '-c', 'x = bytearray(3 << 20)'], check=True)\n\
        pid = os.fork()\n\
        if pid == 0:\n    y = bytearray(4 << 20); sys.exit(0)\n\
        os.waitpid(pid, 0)";
    let python = text(
        &must(Command::new("python3").args(["-c", "import sys; print(sys.executable, end='')"]))
            .stdout,
    );
    let prefix = folder.join("p");
    must(run(&MADE.library).arg("-o").arg(prefix).args(["--", &python, "-c", script]));
    let logs = files(&folder, ".thlog");
    assert_eq!(logs.len(), 2, "{logs:?}");
    assert_eq!(files(&folder, ".thprof").len(), 0);
    let all: Vec<String> = logs
        .iter()
        .map(|log| text(&must(tool().args(["prof", "flame"]).arg(log)).stdout))
        .collect();
    assert!(
        all.iter().any(|stacks| stacks.contains("4194305") || stacks.contains("PyByteArray")),
        "{all:?}"
    );
}
