//! Programs in C and C++ on the finished library, with the simulated driver as `libcuda.so.1`, and
//! with none.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use thermalloc_prof_format::{Record, Records, page, space};

/// Builds the library in a target folder of its own, since the outer cargo may hold the lock of its;
/// where `THERMALLOC_CUDA_LIB_DIR` is set, takes it from that folder.
fn library() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let build = || {
        if let Some(folder) = std::env::var_os("THERMALLOC_CUDA_LIB_DIR") {
            return PathBuf::from(folder).join("libthermalloc_cuda.so");
        }
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("libthermalloc_cuda");
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args(["build", "--package", "thermalloc-cuda-capi", "--target-dir"]).arg(&target);
        succeed(cargo.arg("--manifest-path").arg(here().join("Cargo.toml")));
        target.join("debug/libthermalloc_cuda.so")
    };
    BUILT.get_or_init(build).clone()
}

/// libthermalloc, built beside it; where `THERMALLOC_LIB_DIR` is set, taken from that folder.
fn host_library() -> PathBuf {
    if let Some(folder) = std::env::var_os("THERMALLOC_LIB_DIR") {
        return PathBuf::from(folder).join("libthermalloc.so");
    }
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("libthermalloc_cuda");
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--package", "thermalloc-capi", "--target-dir"]).arg(&target);
    succeed(cargo.arg("--manifest-path").arg(here().join("Cargo.toml")));
    target.join("debug/libthermalloc.so")
}

/// The simulated driver, which cargo builds for this test.
fn driver() -> PathBuf {
    let me = std::env::current_exe().expect("this test");
    me.with_file_name("libthermalloc_cuda_sim.so")
}

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn succeed(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{text}", output.status);
    output
}

/// A folder with the library and, under its name, the simulated driver.
fn folder(name: &str, with_driver: bool) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _not_there_yet = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("a folder");
    let link = |from: PathBuf, to: &str| {
        assert!(from.is_file(), "{} was not built", from.display());
        std::os::unix::fs::symlink(from, folder.join(to)).expect("a link");
    };
    link(library(), "libthermalloc_cuda.so");
    if with_driver {
        link(driver(), "libcuda.so.1");
    }
    folder
}

fn compile(folder: &Path, compiler: &str, source: &str) -> PathBuf {
    let program = folder.join(source).with_extension("");
    let mut command = Command::new(compiler);
    command.args(["-Wall", "-Wextra", "-Werror", "-g", "-o"]).arg(&program);
    command.arg(here().join("tests").join(source));
    command.arg("-I").arg(here().join("include")).arg("-L").arg(folder);
    command.arg("-I").arg(here().join("../../alloc-capi/include"));
    if compiler == "cc" {
        command.arg("-lthermalloc_cuda");
    } else {
        command.arg(folder.join("libcuda.so.1"));
    }
    command.arg("-ldl").arg("-Wl,--allow-shlib-undefined");
    succeed(&mut command);
    program
}

fn run(folder: &Path, program: &Path, argument: Option<&Path>) {
    let mut command = Command::new("timeout");
    command.args(["-s", "KILL", "60"]).arg(program);
    command.args(argument).env("LD_LIBRARY_PATH", folder);
    command.env("THERMALLOC_CUDA_SIM", "vram=8g");
    command.env("THERMALLOC_CUDA_CONF", format!("record:{}/record.%d", folder.display()));
    succeed(&mut command);
}

#[test]
fn a_c_program_and_its_snapshot_in_python() {
    let folder = folder("c_api", true);
    let program = compile(&folder, "cc", "c_api.c");
    let pickle = folder.join("snapshot.pickle");
    run(&folder, &program, Some(&pickle));
    let check = here().join("tests/snapshot.py");
    succeed(Command::new("python3").arg(check).arg(&pickle));
}

#[test]
fn beside_libthermalloc_there_is_one_ledger_one_set_of_options_and_one_pace() {
    let folder = folder("host", true);
    let program = compile(&folder, "cc", "host.c");
    let host = host_library();
    for (argument, conf) in [
        ("ledger", "prof:true"),
        ("paced", "hot_window_ms:200,dirty_decay_ms:200"),
        ("no-thread", "hot_window_ms:200,dirty_decay_ms:200,background_thread:false"),
        ("live", "hot_window_ms:60000"),
    ] {
        let mut command = Command::new("timeout");
        command.args(["-s", "KILL", "60"]).arg(&program).arg(argument);
        command.env("LD_LIBRARY_PATH", &folder).env("LD_PRELOAD", &host);
        command.env("THERMALLOC_CONF", conf).env("THERMALLOC_CUDA_SIM", "vram=8g");
        succeed(&mut command);
    }
}

/// What whoever looks at the process from outside sees of its pool.
#[test]
fn the_hosts_statistics_page_has_a_row_of_the_pool() {
    let folder = folder("seen", true);
    let program = compile(&folder, "cc", "host.c");
    let page = folder.join("page");
    let mut command = Command::new("timeout");
    command.args(["-s", "KILL", "60"]).arg(&program).arg("seen");
    command.env("LD_LIBRARY_PATH", &folder).env("LD_PRELOAD", host_library());
    command.env("THERMALLOC_CONF", format!("stats_page:{}", page.display()));
    succeed(command.env("THERMALLOC_CUDA_SIM", "vram=8g"));
    let bytes = std::fs::read(&page).expect("the page");
    let word = page::WORD_PUBLISHED * 8;
    let published = u64::from_le_bytes(bytes[word..word + 8].try_into().expect("a word"));
    let state = &bytes[page::buffer_at(published)..][..page::BUFFER_BYTES];
    let mut rows = Records::new(state).filter_map(|record| match record {
        Record::Pool(pool) if pool.space == space::DEVICE => Some(pool),
        _ => None,
    });
    let row = rows.next().expect("a row");
    assert_eq!((row.device, row.live_bytes, row.pending_bytes), (0, 64 << 20, 0), "{row:?}");
    assert!(row.held_bytes >= 64 << 20 && row.peak_bytes >= row.held_bytes, "{row:?}");
    assert!(rows.next().is_none());
}

#[test]
fn without_a_driver_everything_is_an_error_and_nothing_a_crash() {
    let folder = folder("no_driver", false);
    let program = compile(&folder, "cc", "c_api.c");
    run(&folder, &program, Some(Path::new("no-driver")));
}

#[test]
fn pytorchs_callbacks_as_pytorch_calls_them() {
    let folder = folder("torch", true);
    succeed(Command::new("bash").arg(here().join("torch/build.sh")).arg(&folder));
    let program = compile(&folder, "c++", "torch_like.cpp");
    run(&folder, &program, None);
    // What it asked for was recorded, as far as the pool was looked at.
    let record = std::fs::read_to_string(folder.join("record.0")).expect("a record");
    let mut lines = record.lines();
    assert_eq!(lines.next(), Some("thermalloc-cuda-trace 1"));
    let has = |kind: &str| record.lines().any(|line| line.starts_with(kind));
    assert!(has("a 0 ") && has("f ") && has("u "), "{record}");
}

#[test]
fn the_python_module_works_and_wires_a_framework() {
    let folder = folder("python", true);
    succeed(Command::new("bash").arg(here().join("torch/build.sh")).arg(&folder));
    let mut command = Command::new("timeout");
    command.args(["-s", "KILL", "60", "python3"]).arg(here().join("tests/module.py"));
    command.arg(&folder).env("LD_LIBRARY_PATH", &folder);
    command.env("PYTHONPATH", here().join("../../python"));
    succeed(&mut command);
}
