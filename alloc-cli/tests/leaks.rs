//! `thermalloc prof leaks` on programs that are not ours: each at steady work, where it finds nothing, and
//! with one thing that is kept, which it finds and puts first.
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use serde_json::Value;
use thermalloc_tests::{Library, must, skipped, text};

const SCRATCH: &str = env!("CARGO_TARGET_TMPDIR");

static LIBRARY: LazyLock<PathBuf> = LazyLock::new(|| Library::build(Path::new(SCRATCH)).shared);

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(SCRATCH).join("leaks").join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("scratch folder");
    folder
}

fn tool() -> Command {
    thermalloc_tests::tool(env!("CARGO_BIN_EXE_thermalloc"))
}

fn profiled(folder: &Path) -> Command {
    let mut command = tool();
    // Small programs: more samples than by default.
    command.args(["prof", "run", "--lg-sample", "16", "--lib"]).arg(&*LIBRARY);
    command.arg("-o").arg(folder.join("p")).arg("--");
    command
}

/// The innermost functions of each leak that the profile in `folder` shows, worst first.
fn leaks(folder: &Path) -> Vec<String> {
    let entries =
        std::fs::read_dir(folder).expect("folder").map(|entry| entry.expect("entry").path());
    let mut logs: Vec<_> =
        entries.filter(|path| path.extension().is_some_and(|ending| ending == "thlog")).collect();
    assert_eq!(logs.len(), 1, "{logs:?}");
    let said = must(tool().args(["prof", "leaks", "--json"]).arg(logs.remove(0))).stdout;
    let said: Value = serde_json::from_slice(&said).expect("JSON");
    let leaks = said["leaks"].as_array().expect("leaks").iter();
    leaks
        .map(|leak| {
            leak["stack"]
                .as_array()
                .expect("a stack")
                .iter()
                .take(8)
                .map(ToString::to_string)
                .collect()
        })
        .collect()
}

const PYTHON: &str = r#"
import ctypes, json, sys, time
libc = ctypes.CDLL(None)
libc.strdup.restype = ctypes.c_void_p
cache, text, i = {}, b"y" * 40000, 0
end = time.monotonic() + 4
while time.monotonic() < end:
    data = json.loads(json.dumps([{"k": j, "v": "x" * (j % 700)} for j in range(500)]))
    cache[i % 64] = data[i % 500]
    sorted(data, key=lambda d: -d["k"])
    i += 1
    if len(sys.argv) > 1:
        libc.strdup(text)
"#;

#[test]
fn of_python() {
    let which = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output();
    let Some(python) = which.ok().filter(|done| done.status.success()) else {
        return skipped("no python3");
    };
    let python = text(&python.stdout);
    for leaky in [false, true] {
        let folder = folder(if leaky { "python-leaky" } else { "python" });
        let script = folder.join("work.py");
        std::fs::write(&script, PYTHON).unwrap();
        must(profiled(&folder).arg(python.trim()).arg(&script).args(leaky.then_some("leak")));
        let found = leaks(&folder);
        if leaky {
            assert!(found.len() == 1 && found[0].contains("strdup"), "{found:?}");
        } else {
            assert_eq!(found, [""; 0]);
        }
    }
}

fn is_there(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|done| done.status.success())
}

/// A server that is ended with its test.
struct Server(std::process::Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn of_redis() {
    for needed in ["redis-server", "redis-benchmark", "redis-cli"] {
        if !is_there(needed) {
            return skipped(&format!("no {needed}"));
        }
    }
    for leaky in [false, true] {
        let folder = folder(if leaky { "redis-leaky" } else { "redis" });
        let socket = folder.join("s");
        let mut server = profiled(&folder);
        server.args(["redis-server", "--port", "0", "--save", "", "--unixsocket"]).arg(&socket);
        server.stdout(Stdio::null()).current_dir(&folder);
        let mut server = Server(server.spawn().unwrap());
        let until = Instant::now() + Duration::from_secs(30);
        while !socket.exists() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(50));
        }
        let load = |tests: &str, requests: &str| {
            let mut load = Command::new("redis-benchmark");
            load.arg("-s")
                .arg(&socket)
                .args(["-q", "-r", "5000", "-d", "500", "-t", tests, "-n", requests]);
            must(&mut load);
        };
        // The keys are filled in the beginning and written again later; a list grows for ever.
        load("set", "40000");
        for _ in 0..6 {
            load(if leaky { "set,rpush" } else { "set,get" }, "20000");
        }
        let mut stop = Command::new("redis-cli");
        // It answers by closing the connection.
        stop.arg("-s").arg(&socket).args(["shutdown", "nosave"]).output().unwrap();
        server.0.wait().unwrap();
        let found = leaks(&folder);
        if leaky {
            // By each path to it: elements, and nodes that hold them.
            let all = found.iter().all(|stack| stack.contains("pushGenericCommand"));
            assert!(all && found.iter().any(|stack| stack.contains("lpInsert")), "{found:?}");
        } else {
            assert_eq!(found, [""; 0]);
        }
    }
}
