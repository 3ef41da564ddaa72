//! What the tests share: the finished C library, a C compiler, processes with the library preloaded.
//!
//! Needs gcc, g++ (with binutils) and python3. A test that needs more says in a line that it is skipped where that is
//! missing.

pub mod model;

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// libthermalloc as a user gets it.
#[derive(Debug)]
pub struct Library {
    /// `libthermalloc.so`.
    pub shared: PathBuf,
    /// `libthermalloc.a`.
    pub archive: PathBuf,
    /// `libthermalloc_threads.so`.
    pub threads: PathBuf,
}

impl Library {
    /// Builds the release library below `scratch`, the test's `CARGO_TARGET_TMPDIR`; where
    /// `THERMALLOC_LIB_DIR` is set, takes the library from that folder instead.
    ///
    /// # Panics
    /// When the build fails.
    #[must_use]
    pub fn build(scratch: &Path) -> Self {
        let folder = std::env::var_os("THERMALLOC_LIB_DIR").map_or_else(
            || {
                // A target folder of its own: the outer cargo may hold the lock of its.
                let target = scratch.join("libthermalloc");
                let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
                must(
                    Command::new(cargo)
                        .args([
                            "build",
                            "--release",
                            "--package",
                            "thermalloc-capi",
                            "--package",
                            "thermalloc-threads",
                            "--target-dir",
                        ])
                        .arg(&target)
                        .arg("--manifest-path")
                        .arg(root().join("Cargo.toml")),
                );
                target.join("release")
            },
            PathBuf::from,
        );
        let library = Self {
            shared: folder.join("libthermalloc.so"),
            archive: folder.join("libthermalloc.a"),
            threads: folder.join("libthermalloc_threads.so"),
        };
        for file in [&library.shared, &library.archive] {
            assert!(file.is_file(), "{} was not built", file.display());
        }
        library
    }

    /// A command for `program` with the library preloaded, killed after two minutes.
    #[must_use]
    pub fn preload(&self, program: &Path) -> Command {
        let mut variable = OsString::from("LD_PRELOAD=");
        variable.push(&self.shared);
        let mut command = Command::new("timeout");
        command.args(["-s", "KILL", "120", "env"]).arg(variable).arg(program);
        command
    }
}

/// The root of the repository.
#[must_use]
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Runs a command that has to succeed; its output.
///
/// # Panics
/// When it can't be run or fails, with all it wrote.
pub fn must(command: &mut Command) -> Output {
    let output = output(command);
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    output
}

/// Runs a command to its end, whatever it is.
///
/// # Panics
/// When it can't be run.
pub fn output(command: &mut Command) -> Output {
    command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

/// The test program that calls this again, for `case` of its test `test`, in an environment where `variable`
/// names the case; killed after a minute. What became of it.
///
/// # Panics
/// When it can't be run.
#[must_use]
pub fn this_again(test: &str, (variable, case): (&str, &str), options: &str) -> Output {
    let me = std::env::current_exe().expect("this program");
    output(
        Command::new("timeout")
            .args(["-s", "KILL", "60"])
            .arg(me)
            .args([test, "--exact", "--nocapture", "--test-threads=1"])
            .env(variable, case)
            .env("THERMALLOC_CONF", options),
    )
}

/// What [`this_again`] gave has to be a test that passed.
///
/// # Panics
/// When it failed, or there was no such test; with all it wrote.
pub fn must_again(output: &Output) {
    let said = text(&output.stdout);
    let passed = output.status.success() && said.contains("1 passed");
    assert!(passed, "{}\n{said}{}", output.status, text(&output.stderr));
}

/// The wait status of a fork's child that does `in_child` and exits with its result; a child that hangs
/// dies of an alarm after 30 seconds.
///
/// # Panics
/// When there can be no child.
pub fn fork_once(in_child: fn() -> i32) -> i32 {
    // SAFETY: the child keeps to what it is given, the allocator and system calls.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: no more than a system call.
        unsafe { libc::alarm(30) };
        let status = in_child();
        // SAFETY: ends the child.
        unsafe { libc::_exit(status) };
    }
    assert!(child > 0, "fork failed");
    let mut status = -1;
    // SAFETY: the child is ours.
    while unsafe { libc::waitpid(child, &raw mut status, 0) } != child {}
    status
}

/// Bytes that a program wrote, for people.
#[must_use]
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Compiles `tests/c/{source}` with `args` into `out`: g++ for `.cpp`, else gcc; every warning is
/// an error, and calls of the allocator are not optimised away.
///
/// # Panics
/// When the compiler refuses it.
pub fn compile<S: AsRef<OsStr>>(source: &str, out: &Path, args: &[S]) {
    let (compiler, std) =
        if source.ends_with(".cpp") { ("g++", "-std=c++17") } else { ("gcc", "-std=gnu11") };
    must(
        Command::new(compiler)
            .args([std, "-O1", "-g", "-fno-builtin", "-pthread", "-Wall", "-Wextra", "-Werror"])
            .args(["-Wno-unused-result", "-Wno-deprecated-declarations"])
            .arg("-I")
            .arg(root().join("alloc-capi/include"))
            .arg(root().join("tests/c").join(source))
            .args(args)
            .arg("-o")
            .arg(out),
    );
}

/// Says that a test did not run, past the harness, which keeps what a passing test writes.
pub fn skipped(why: &str) {
    use std::io::Write;
    let name = std::thread::current().name().unwrap_or("a test").to_owned();
    let _ = writeln!(std::io::stderr(), "skipped: {name}: {why}");
}

/// The tool at `path`, untouched by what the environment says of allocators, and killed after two minutes.
#[must_use]
pub fn tool(path: &str) -> Command {
    let mut command = Command::new("timeout");
    command.args(["-s", "KILL", "120", path]);
    for variable in ["LD_PRELOAD", "THERMALLOC_CONF", "THERMALLOC_LIB"] {
        command.env_remove(variable);
    }
    command
}
