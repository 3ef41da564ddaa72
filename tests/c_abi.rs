//! libthermalloc as C and C++ programs meet it: preloaded, linked, loaded late; and as the linker
//! left it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use thermalloc_tests::{Library, compile, must, output, root, text};

const SCRATCH: &str = env!("CARGO_TARGET_TMPDIR");
const SIGABRT: i32 = 6;

fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let library = Library::build(Path::new(SCRATCH));
        // The name that a linked program asks the loader for.
        let soname = scratch("soname/libthermalloc.so.0");
        let _ = std::fs::remove_file(&soname);
        std::os::unix::fs::symlink(&library.shared, soname).expect("soname link");
        library
    })
}

/// A file of this test run.
fn scratch(name: &str) -> PathBuf {
    let folder = Path::new(SCRATCH).join("c");
    let file = folder.join(name);
    std::fs::create_dir_all(file.parent().unwrap_or(&folder)).expect("scratch folder");
    file
}

/// Compiles a program that is to run with the library preloaded.
fn program(source: &str) -> PathBuf {
    let out = scratch(source).with_extension("preloaded");
    compile(source, &out, &["-fPIE", "-pie", "-ldl"]);
    out
}

/// Preloaded; linked to the shared library; linked to the archive; all of it static.
fn runs_every_way(source: &str) {
    must(&mut library().preload(&program(source)));

    let (shared, archive) = (&library().shared, &library().archive);
    let out = scratch(source).with_extension("shared");
    compile(source, &out, &[shared]);
    must(Command::new(&out).env("LD_LIBRARY_PATH", scratch("soname")));

    for (way, flag) in [
        ("archive", "-pie"),
        ("nopie", "-no-pie"),
        ("static", "-static"),
        ("staticpie", "-static-pie"),
    ] {
        let out = scratch(source).with_extension(way);
        compile(source, &out, &[archive.as_os_str(), flag.as_ref()]);
        must(&mut Command::new(&out));
    }
}

#[test]
fn entry_points() {
    runs_every_way("entry_points.c");
}

#[test]
fn operators() {
    runs_every_way("operators.cpp");
}

#[test]
fn new_failure() {
    runs_every_way("new_failure.cpp");
}

#[test]
fn new_failure_nothrow_retry() {
    must(&mut library().preload(&program("new_failure_nothrow_retry.cpp")));
}

#[test]
fn new_failure_with_the_runtime_loaded_locally() {
    let plugin = scratch("new_plugin.so");
    compile("new_plugin.cpp", &plugin, &["-shared", "-fPIC"]);
    must(library().preload(&program("new_local_runtime.c")).arg(plugin));
}

#[test]
fn new_failure_without_a_runtime_aborts_with_one_line() {
    use std::os::unix::process::ExitStatusExt;
    let run = output(&mut library().preload(&program("new_no_runtime.c")));
    // `timeout` ends by the signal that ended the program, or with 128 more.
    assert!(
        run.status.signal() == Some(SIGABRT) || run.status.code() == Some(128 + SIGABRT),
        "{}: {}",
        run.status,
        text(&run.stdout)
    );
    let line = text(&run.stderr);
    let ours: Vec<_> = line.lines().filter(|line| line.starts_with("thermalloc: ")).collect();
    assert_eq!(ours.len(), 1, "{line}");
    assert!(ours[0].starts_with(
        "thermalloc: operator new: out of memory and no C++ runtime to throw bad_alloc: "
    ));
}

#[test]
fn no_rust_frame_lies_below_a_throwing_new() {
    let code = text(
        &must(Command::new("objdump").args(["-d", "--no-show-raw-insn"]).arg(&library().shared))
            .stdout,
    );
    // "address: operation target <symbol>"; with an offset it is a jump within new_failed.
    let entries = code
        .lines()
        .filter(|line| line.contains("10new_failed10new_failed17h") && line.ends_with("E>"));
    let operations: Vec<_> = entries.filter_map(|line| line.split_whitespace().nth(1)).collect();
    assert!(!operations.is_empty(), "operator new does not reach new_failed");
    for operation in operations {
        assert!(
            operation.starts_with('j') || operation == "b",
            "reached by {operation}, not by a jump"
        );
    }
}

#[test]
fn deepbind_is_dropped_and_the_callers_runpath_found() {
    let (folder, plugins) = (scratch("deepbind/liba.so"), scratch("deepbind/plugins/libplugin.so"));
    compile("deepbind_plugin.c", &plugins, &["-shared", "-fPIC"]);
    compile(
        "deepbind_a.c",
        &folder,
        &["-shared", "-fPIC", "-Wl,--enable-new-dtags,-rpath,$ORIGIN/plugins"],
    );
    must(library().preload(&program("deepbind.c")).arg(folder));
    must(library().preload(&program("deepbind_option.c")).arg(plugins));
}

#[test]
fn vfork_child() {
    runs_every_way("vfork_child.c");
}

#[test]
fn nested_fork() {
    runs_every_way("nested_fork.c");
}

#[test]
fn loaded_late() {
    let out = scratch("loaded_late");
    compile("loaded_late.c", &out, &["-ldl"]);
    must(Command::new(out).arg(&library().shared));
}

#[test]
fn header() {
    for source in ["header.c", "header.cpp"] {
        let out = scratch(source).with_extension(source.replace('.', "_"));
        compile(source, &out, &["-pedantic".as_ref(), library().archive.as_os_str()]);
        must(&mut Command::new(&out));
    }
}

fn readelf(flag: &str) -> String {
    text(&must(Command::new("readelf").args(["-W", flag]).arg(&library().shared)).stdout)
}

#[test]
fn dynamic_section() {
    let dynamic = readelf("-d");
    let needed: Vec<_> = dynamic.lines().filter(|line| line.contains("(NEEDED)")).collect();
    assert!(needed.len() == 1 && needed[0].contains("[libc.so.6]"), "{needed:?}");
    assert!(dynamic.contains("[libthermalloc.so.0]"), "soname: {dynamic}");
    for flag in ["NODELETE", "NOW"] {
        assert!(
            dynamic.lines().any(|line| line.contains("FLAGS_1") && line.contains(flag)),
            "{flag}: {dynamic}"
        );
    }
    assert!(!dynamic.contains("TEXTREL"), "{dynamic}");
}

#[test]
fn program_headers() {
    let headers = readelf("-l");
    let of = |kind: &str| headers.lines().find(|line| line.trim_start().starts_with(kind));
    let stack = of("GNU_STACK").expect("GNU_STACK");
    assert!(stack.contains(" RW ") && !stack.contains("RWE"), "executable stack: {stack}");
    assert!(of("GNU_RELRO").is_some(), "no RELRO: {headers}");
    if let Some(tls) = of("TLS") {
        let size = tls.split_whitespace().nth(5).and_then(|size| size.strip_prefix("0x"));
        let size = size.and_then(|size| u64::from_str_radix(size, 16).ok()).expect("TLS size");
        assert!(
            size <= 1024,
            "{size} bytes of thread-local storage: too much for the surplus of dlopen"
        );
    }
}

#[test]
fn thread_locals_are_initial_exec() {
    let relocations = readelf("-r");
    assert!(relocations.contains("R_"), "{relocations}");
    for dynamic in ["DTPMOD", "TLSDESC", "__tls_get_addr"] {
        assert!(!relocations.contains(dynamic), "{dynamic}");
    }
}

#[test]
fn exported_symbols() {
    let nm = text(
        &must(Command::new("nm").args(["-D", "--defined-only"]).arg(&library().shared)).stdout,
    );
    let mut exported: Vec<_> =
        nm.lines().filter_map(|line| line.split_whitespace().nth(2)).collect();
    exported.sort_unstable();
    let file = root().join("tests/c/exports.txt");
    let listed = std::fs::read_to_string(&file).expect("exports.txt");
    let listed: Vec<_> = listed.lines().collect();
    assert_eq!(exported, listed, "what the library exports is not what {} lists", file.display());
}

#[test]
fn installs() {
    let prefix = scratch("prefix");
    let _ = std::fs::remove_dir_all(&prefix);
    must(
        Command::new("sh")
            .arg(root().join("alloc-capi/install.sh"))
            .arg(&prefix)
            .env("LIB_FROM", library().shared.parent().expect("folder")),
    );
    let lib = prefix.join("lib");
    let out = scratch("installed");
    must(
        Command::new("gcc")
            .arg(root().join("tests/c/header.c"))
            .arg(format!("-I{}", prefix.join("include").display()))
            .arg(format!("-L{}", lib.display()))
            .args(["-lthermalloc", "-o"])
            .arg(&out),
    );
    must(Command::new(&out).env("LD_LIBRARY_PATH", &lib));
    assert!(lib.join("libthermalloc.a").is_file());
    let pc = std::fs::read_to_string(lib.join("pkgconfig/thermalloc.pc")).expect("thermalloc.pc");
    assert!(pc.contains(&format!("prefix={}\n", prefix.display())) && !pc.contains('@'), "{pc}");
    stands_in_for_jemalloc(&prefix);
}

/// What is built with the installed `jemalloc.pc`, and what asks for jemalloc's library by its name.
fn stands_in_for_jemalloc(prefix: &Path) {
    let lib = prefix.join("lib/thermalloc");
    let pc = std::fs::read_to_string(lib.join("pkgconfig/jemalloc.pc")).expect("jemalloc.pc");
    let value = |name: &str| {
        let line = pc.lines().find_map(|line| line.strip_prefix(name)).expect("a line of it");
        let text = line.replace("${includedir}", &variable(&pc, "includedir"));
        let text = text.replace("${libdir}", &variable(&pc, "libdir"));
        text.replace("${prefix}", &prefix.display().to_string())
    };
    let out = scratch("jemalloc_mangled");
    let flags = format!("{} {}", value("Cflags:"), value("Libs:"));
    must(
        Command::new("gcc")
            .args(["-fno-builtin", "-o"])
            .arg(&out)
            .arg(root().join("tests/c/jemalloc_mangled.c"))
            .args(flags.split_whitespace()),
    );
    must(Command::new(&out).env("LD_LIBRARY_PATH", prefix.join("lib")));
    for name in ["libjemalloc.so", "libjemalloc.so.2"] {
        assert!(lib.join(name).is_file(), "{name}");
    }
}

/// A variable of a pkg-config file.
fn variable(pc: &str, name: &str) -> String {
    let line = pc.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    line.expect("a variable").to_owned()
}
