//! A program that takes memory by every way, with the library preloaded and the simulated driver.

use std::path::{Path, PathBuf};
use std::process::Command;

fn succeed(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{text}", output.status);
}

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Builds a library in a target folder of its own, since the outer cargo may hold the lock of its.
fn library(package: &str, file: &str) -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("libthermalloc_cuda_watch");
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--package", package, "--target-dir"]).arg(&target);
    succeed(cargo.arg("--manifest-path").arg(here().join("Cargo.toml")));
    target.join("debug").join(file)
}

#[test]
fn every_way_to_memory_is_seen() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("watched");
    let _not_there_yet = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("a folder");
    let me = std::env::current_exe().expect("this test");
    let driver = me.with_file_name("libthermalloc_cuda_sim.so");
    std::os::unix::fs::symlink(driver, folder.join("libcuda.so.1")).expect("a link");
    let runtime = folder.join("libcudart.so.12");
    let mut cc = Command::new("cc");
    cc.args(["-Wall", "-Werror", "-shared", "-fPIC", "-Wl,-soname,libcudart.so.12", "-o"]);
    let source = here().join("../../tests/cuda-sim/cudart.c");
    succeed(cc.arg(&runtime).arg(source).arg("-ldl"));
    let program = folder.join("watched");
    let mut cc = Command::new("cc");
    cc.args(["-Wall", "-Wextra", "-Werror", "-o"]).arg(&program);
    cc.arg(here().join("tests/watched.c")).arg(&runtime).arg(folder.join("libcuda.so.1"));
    succeed(cc.arg("-ldl"));
    let run = |argument: Option<&str>, preload: &[&Path]| {
        let mut command = Command::new("timeout");
        command.args(["-s", "KILL", "60", "env"]);
        let preload: Vec<_> = preload.iter().map(|path| path.display().to_string()).collect();
        if !preload.is_empty() {
            command.arg(format!("LD_PRELOAD={}", preload.join(":")));
        }
        command.arg("THERMALLOC_CONF=prof:true");
        command.arg(&program).args(argument).env("LD_LIBRARY_PATH", &folder);
        succeed(&mut command);
    };
    let watch = library("thermalloc-cuda-watch", "libthermalloc_cuda_watch.so");
    let host = library("thermalloc-capi", "libthermalloc.so");
    run(Some("unwatched"), &[]);
    run(None, &[&watch]);
    // The same in libthermalloc's ledger.
    run(Some("entered"), &[&watch, &host]);
}
