//! jemalloc's functions as C and C++ programs meet them: by their three names, through our headers and
//! through jemalloc's own, and in the shape of TensorFlow's platform port.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use thermalloc_tests::{Library, compile, must, root, skipped, text};

const SCRATCH: &str = env!("CARGO_TARGET_TMPDIR");

fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| Library::build(Path::new(SCRATCH)))
}

/// A folder with our library under the given name.
fn folder_with(name: &str) -> PathBuf {
    let folder = Path::new(SCRATCH).join("named").join(name.replace('.', "_"));
    std::fs::create_dir_all(&folder).expect("folder");
    let link = folder.join(name);
    let _ = std::fs::remove_file(&link);
    std::os::unix::fs::symlink(&library().shared, link).expect("link");
    folder
}

/// A program linked to our shared library, found by its name.
fn linked(source: &str) -> Command {
    let out = Path::new(SCRATCH).join(source).with_extension("linked");
    let compat = root().join("alloc-capi/include/thermalloc/compat");
    compile(source, &out, &["-I".as_ref(), compat.as_os_str(), library().shared.as_os_str()]);
    run(&out, "libthermalloc.so.0")
}

/// The program, with a library of this name that is ours; killed after two minutes.
fn run(program: &Path, name: &str) -> Command {
    let mut command = Command::new("timeout");
    command.args(["-s", "KILL", "120"]).arg(program).env("LD_LIBRARY_PATH", folder_with(name));
    command
}

/// A program built with the system's jemalloc, header and library; `None` where it has none.
fn of_the_system(source: &str) -> Option<PathBuf> {
    if !Path::new("/usr/include/jemalloc/jemalloc.h").is_file() {
        skipped("libjemalloc-dev is not installed");
        return None;
    }
    let out = Path::new(SCRATCH).join(source).with_extension("system");
    compile(source, &out, &["-ljemalloc"]);
    Some(out)
}

#[test]
fn contracts_by_plain_names() {
    must(&mut linked("jemalloc_api.c"));
    must(linked("jemalloc_api.c").env("GLIBC_TUNABLES", "glibc.pthread.rseq=0"));
    must(linked("jemalloc_api.c").env("THERMALLOC_CONF", "narenas:1,background_thread:false"));
}

#[test]
fn contracts_by_prefixed_names() {
    must(&mut linked("jemalloc_api_je.c"));
    must(&mut linked("jemalloc_api_jemalloc.c"));
}

#[test]
fn contracts_in_a_static_program() {
    let out = Path::new(SCRATCH).join("jemalloc_api.static");
    compile("jemalloc_api.c", &out, &[library().archive.as_os_str(), "-static".as_ref()]);
    must(&mut Command::new(out));
}

/// The same program says of jemalloc what it says of us, else it does not say what jemalloc's manual does.
#[test]
fn a_program_built_for_jemalloc_runs_unchanged() {
    let Some(program) = of_the_system("jemalloc_system.c") else { return };
    must(Command::new("timeout").args(["-s", "KILL", "120"]).arg(&program));
    must(&mut library().preload(&program));
    must(&mut run(&program, "libjemalloc.so.2"));
}

#[test]
fn every_name_of_the_headers_is_there() {
    must(&mut linked("jemalloc_header.c"));
    must(&mut linked("jemalloc_header_cxx.cpp"));
    must(&mut linked("jemalloc_mangled.c"));
}

/// What a library exports.
fn exported(library: &Path) -> BTreeSet<String> {
    let nm = must(Command::new("nm").args(["-D", "--defined-only"]).arg(library));
    let names = text(&nm.stdout);
    names.lines().filter_map(|line| line.split_whitespace().nth(2)).map(str::to_owned).collect()
}

#[test]
fn every_name_that_jemalloc_exports_is_there_thrice() {
    let found = must(Command::new("gcc").arg("-print-file-name=libjemalloc.so"));
    let found = PathBuf::from(text(&found.stdout).trim());
    if !found.is_file() {
        return skipped("libjemalloc-dev is not installed");
    }
    let jemalloc = exported(&found);
    let ours = exported(&library().shared);
    assert!(jemalloc.contains("mallocx") && jemalloc.contains("_Znwm"));
    // The hooks are for its own tests.
    for name in jemalloc.iter().filter(|name| !name.starts_with("je_test_hooks_")) {
        let cxx = name.starts_with("_Z");
        for prefix in if cxx { &[""][..] } else { &["", "je_", "jemalloc_"][..] } {
            assert!(ours.contains(&format!("{prefix}{name}")), "{prefix}{name}");
        }
    }
}

#[test]
fn tensorflows_port() {
    must(&mut linked("tensorflow_port.cpp"));
}

#[test]
fn forks_among_arenas() {
    must(&mut linked("arena_fork.c"));
}

#[test]
fn an_idle_arena_gives_its_pages_back() {
    let options = "hot_window_ms:200,dirty_decay_ms:300";
    must(linked("arena_idle.c").env("THERMALLOC_CONF", options));
}

#[test]
fn threads_among_arenas() {
    must(&mut linked("arena_stress.c"));
    must(linked("arena_stress.c").env("GLIBC_TUNABLES", "glibc.pthread.rseq=0"));
    must(
        linked("arena_stress.c").env("THERMALLOC_CONF", "dirty_decay_ms:0,background_thread:false"),
    );
}
