//! `thermalloc run` as a process: what the program sees, and what the caller sees of it.
//!
//! The preloaded library is a stand-in made here: these tests are about the tool, and need no
//! built allocator.
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, symlink};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;

const SIGPIPE: i32 = 13;
const SIGTERM: i32 = 15;

static LIBRARY: LazyLock<PathBuf> = LazyLock::new(|| {
    compile("libthermalloc.so", "int thermalloc_stand_in;", &["-shared", "-fPIC"])
});

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::create_dir_all(&folder).unwrap();
    folder
}

fn compile(name: &str, source: &str, flags: &[&str]) -> PathBuf {
    let target = folder("built").join(name);
    let code = target.with_extension("c");
    fs::write(&code, source).unwrap();
    let status =
        Command::new("gcc").args(flags).arg("-o").args([&target, &code]).status().expect("gcc");
    assert!(status.success());
    target
}

/// `thermalloc run --lib STAND-IN`, with an environment of its own.
fn tool() -> Command {
    let mut command = bare();
    command.arg("--lib").arg(&*LIBRARY);
    command
}

fn bare() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_thermalloc"));
    command.arg("run");
    for variable in ["LD_PRELOAD", "THERMALLOC_CONF", "THERMALLOC_LIB"] {
        command.env_remove(variable);
    }
    command
}

fn stdout(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(output.stderr, b"", "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// The one line of an error, which must be all that was printed.
fn error_line(output: &Output, code: i32) -> String {
    assert_eq!(output.status.code(), Some(code), "{output:?}");
    assert_eq!(output.stdout, b"", "{output:?}");
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert!(text.starts_with("thermalloc: ") && text.ends_with('\n'));
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.split(": ").count() >= 4, "what, why and hint: {text}");
    text
}

fn error(command: &mut Command, code: i32) -> String {
    error_line(&command.output().unwrap(), code)
}

fn variable(command: &mut Command, name: &str) -> String {
    let text = stdout(command.arg("env"));
    let prefix = format!("{name}=");
    let value = text.lines().find_map(|line| line.strip_prefix(&prefix));
    value.unwrap_or_default().to_owned()
}

#[test]
fn the_library_is_in_the_program() {
    let maps = stdout(tool().args(["cat", "/proc/self/maps"]));
    assert!(maps.contains(LIBRARY.to_str().unwrap()), "{maps}");
}

#[test]
fn the_programs_exit_code_is_ours() {
    for code in [0, 1, 2, 42, 126, 127, 255] {
        let script = format!("exit {code}");
        let output = tool().args(["--", "sh", "-c", &script]).output().unwrap();
        assert_eq!(output.status.code(), Some(code));
        assert_eq!((output.stdout, output.stderr), (vec![], vec![]));
    }
}

#[test]
fn the_programs_death_by_a_signal_is_ours() {
    let status = tool().args(["sh", "-c", "kill -TERM $$"]).status().unwrap();
    assert_eq!(status.signal(), Some(SIGTERM));
}

#[test]
fn the_process_is_the_programs() {
    let child = tool()
        .args(["sh", "-c", "echo $$ $0"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let pid = child.id();
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{pid} sh\n"));
}

#[test]
fn a_sigpipe_that_was_ignored_stays_ignored_and_else_not() {
    let tool = env!("CARGO_BIN_EXE_thermalloc");
    let library = LIBRARY.to_str().unwrap();
    let mask = |before: &str| {
        let script = format!("{before} exec {tool} run --lib {library} cat /proc/self/status");
        let text = stdout(Command::new("sh").args(["-c", &script]));
        let line = text.lines().find_map(|line| line.strip_prefix("SigIgn:"));
        u64::from_str_radix(line.unwrap().trim(), 16).unwrap() >> (SIGPIPE - 1) & 1
    };
    assert_eq!(mask("trap '' PIPE;"), 1);
    assert_eq!(mask(""), 0);
}

#[test]
fn a_preload_that_was_there_is_kept_behind_ours() {
    let other = compile("libother.so", "int other;", &["-shared", "-fPIC"]);
    let (ours, other) = (LIBRARY.to_str().unwrap(), other.to_str().unwrap());
    assert_eq!(variable(&mut tool(), "LD_PRELOAD"), ours);
    let both = variable(tool().env("LD_PRELOAD", other), "LD_PRELOAD");
    assert_eq!(both, format!("{ours}:{other}"));
    let nested = variable(tool().env("LD_PRELOAD", &both), "LD_PRELOAD");
    assert_eq!(nested, both);
}

#[test]
fn options_are_merged_behind_the_inherited_ones() {
    assert_eq!(variable(&mut tool(), "THERMALLOC_CONF"), "");
    let inherited = variable(tool().env("THERMALLOC_CONF", "stats:true"), "THERMALLOC_CONF");
    assert_eq!(inherited, "stats:true");
    let merged = variable(
        tool()
            .env("THERMALLOC_CONF", "stats:true")
            .args(["--conf", "thp:never", "--hot-window-ms", "7000"])
            .args(["--dirty-decay-ms", "-1", "--cpu-cache-bytes=4M"])
            .args(["--no-background-thread", "--conf", "hot_window_ms:1"]),
        "THERMALLOC_CONF",
    );
    assert_eq!(
        merged,
        "stats:true,hot_window_ms:7000,dirty_decay_ms:-1,cpu_cache_bytes:4M,\
         background_thread:false,thp:never,hot_window_ms:1"
    );
}

#[test]
fn arguments_behind_the_program_are_the_programs() {
    let echo = |args: &[&str]| stdout(tool().args(["printf", "%s|"]).args(args));
    assert_eq!(
        echo(&["--force", "-x", "--", "--lib", "", "--help"]),
        "--force|-x|--|--lib||--help|"
    );
    let after_dashes = stdout(tool().args(["--", "printf", "%s|", "--", "-V"]));
    assert_eq!(after_dashes, "--|-V|");
}

#[test]
fn usage_errors() {
    assert!(error(&mut tool(), 2).contains("PROGRAM"));
    assert!(error(tool().args(["--nonsense", "true"]), 2).contains("--nonsense"));
    assert!(error(tool().args(["--hot-window-ms", "soon", "true"]), 2).contains("soon"));
    assert!(error(tool().args(["--dirty-decay-ms", "-2", "true"]), 2).contains("-2"));
    assert!(error(tool().args(["--conf", "stats", "true"]), 2).contains("NAME:VALUE"));
}

#[test]
fn help_names_every_option_and_goes_to_stdout() {
    let text = stdout(bare().arg("--help"));
    for option in [
        "--lib",
        "--hot-window-ms",
        "--dirty-decay-ms",
        "--cpu-cache-bytes",
        "--no-background-thread",
        "--conf",
        "--force",
    ] {
        assert!(text.contains(option), "{option}: {text}");
    }
    let version = stdout(Command::new(env!("CARGO_BIN_EXE_thermalloc")).arg("--version"));
    assert_eq!(version, format!("thermalloc {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn the_library_is_found_by_variable_beside_the_tool_and_in_lib() {
    let by_variable =
        stdout(bare().env("THERMALLOC_LIB", &*LIBRARY).args(["cat", "/proc/self/maps"]));
    assert!(by_variable.contains(LIBRARY.to_str().unwrap()));

    let prefix = folder("prefix");
    fs::remove_dir_all(&prefix).unwrap();
    for name in ["bin", "lib"] {
        fs::create_dir_all(prefix.join(name)).unwrap();
    }
    let installed = prefix.join("bin/thermalloc");
    fs::hard_link(env!("CARGO_BIN_EXE_thermalloc"), &installed).unwrap();
    // Started through a link, as package managers do: the tool's real place counts.
    let link = folder("links").join("thermalloc");
    let _ = fs::remove_file(&link);
    symlink(&installed, &link).unwrap();
    for place in ["lib/libthermalloc.so", "bin/libthermalloc.so"] {
        fs::copy(&*LIBRARY, prefix.join(place)).unwrap();
        let mut command = Command::new(&link);
        command.arg("run").env_remove("LD_PRELOAD").env_remove("THERMALLOC_LIB");
        let value = variable(&mut command, "LD_PRELOAD");
        assert_eq!(Path::new(&value), prefix.join(place));
    }
}

#[test]
fn a_library_that_cannot_be_loaded_is_named() {
    let with = |path: &str| {
        let mut command = bare();
        command.args(["--lib", path, "true"]);
        command
    };
    let missing = error(&mut with("/nonexistent/libthermalloc.so"), 127);
    assert!(missing.contains("/nonexistent/libthermalloc.so: no such file: give --lib"));
    let mut by_variable = bare();
    by_variable.env("THERMALLOC_LIB", "/nonexistent.so").arg("true");
    assert!(error(&mut by_variable, 127).contains("give THERMALLOC_LIB"));
    assert!(error(&mut with("/etc/passwd"), 126).contains("not a shared library"));

    let spaced = folder("a folder").join("libthermalloc.so");
    fs::copy(&*LIBRARY, &spaced).unwrap();
    assert!(error(&mut with(spaced.to_str().unwrap()), 126).contains("white space"));
}

#[test]
fn a_relative_library_path_is_made_absolute() {
    let mut command = bare();
    command.current_dir(LIBRARY.parent().unwrap()).args(["--lib", "libthermalloc.so"]);
    let value = variable(&mut command, "LD_PRELOAD");
    assert_eq!(Path::new(&value), &*LIBRARY);
}

#[test]
fn a_tool_without_a_library_says_how_to_get_one() {
    let alone = folder("alone").join("thermalloc");
    let _ = fs::remove_file(&alone);
    fs::hard_link(env!("CARGO_BIN_EXE_thermalloc"), &alone).unwrap();
    let mut command = Command::new(&alone);
    command.args(["run", "true"]).env_remove("THERMALLOC_LIB");
    let output = command.output().unwrap();
    // Where one is installed for the system it is rightly found.
    if output.status.success() {
        let cache = fs::read("/etc/ld.so.cache").unwrap();
        assert!(String::from_utf8_lossy(&cache).contains("libthermalloc.so"));
    } else {
        let line = error_line(&output, 127);
        assert!(line.contains("libthermalloc.so") && line.contains("cargo build --release"));
    }
}

#[test]
fn programs_that_are_not_there_or_not_programs() {
    assert!(error(tool().arg("no-such-program"), 127).contains("not found in PATH"));
    assert!(error(tool().arg("/no/such/program"), 127).contains("no such file"));
    assert!(error(tool().arg("/etc/passwd"), 126).contains("not executable"));
    assert!(error(tool().arg("/etc"), 126).contains("is a directory"));
    assert!(error(tool().arg(""), 127).contains("no such program"));
    let orphan = script("orphan", "#!/no/such/interpreter\n");
    assert!(error(tool().arg(&orphan), 127).contains("interpreter"));
}

/// Written by another process: a file that a sibling test's fork holds open for writing cannot be
/// executed. (Links instead of copies of the tool are for the same reason.)
fn script(name: &str, text: &str) -> PathBuf {
    let path = folder("scripts").join(name);
    let text_file = path.with_extension("txt");
    fs::write(&text_file, text).unwrap();
    let status = Command::new("install").args(["-m", "755"]).args([&text_file, &path]).status();
    assert!(status.unwrap().success());
    path
}

#[test]
fn scripts_run_with_and_without_a_first_line() {
    let with = script("with", "#!/bin/sh\necho with $1\n");
    assert_eq!(stdout(tool().arg(&with).arg("a")), "with a\n");
    let without = script("without", "echo without $1\n");
    assert_eq!(stdout(tool().arg(&without).arg("b")), "without b\n");
}

#[test]
fn a_static_program_needs_force() {
    let program = compile("static", "int main(void) { return 7; }", &["-static"]);
    let line = error(tool().arg(&program), 126);
    assert!(line.contains("statically linked") && line.contains("--force"));
    let forced = tool().arg("--force").arg(&program).status().unwrap();
    assert_eq!(forced.code(), Some(7));

    let text = format!("#!{}\n", program.display());
    let of_static = script("of-static", &text);
    assert!(error(tool().arg(&of_static), 126).contains("statically linked"));
}

#[test]
fn a_program_with_raised_privileges_needs_force() {
    let program = if fs::metadata("/proc/self").unwrap().uid() == 0 {
        let copy = compile("setuid", "int main(void) { return 7; }", &[]);
        chown(&copy, Some(65534), None).unwrap();
        fs::set_permissions(&copy, fs::Permissions::from_mode(0o4755)).unwrap();
        copy
    } else {
        PathBuf::from("/usr/bin/passwd")
    };
    let line = error(tool().arg(&program), 126);
    assert!(line.contains("raised privileges") && line.contains("--force"));
}
