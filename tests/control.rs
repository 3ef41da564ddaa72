//! jemalloc's control by name, its options and its report, as programs meet them: the contract of every
//! name, where options come from, and Redis on libthermalloc in jemalloc's place.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::thread::sleep;
use std::time::{Duration, Instant};

use thermalloc_tests::{Library, compile, must, output, root, skipped, text};

const SCRATCH: &str = env!("CARGO_TARGET_TMPDIR");
const SIGABRT: i32 = 6;

fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| Library::build(Path::new(SCRATCH)))
}

fn scratch(name: &str) -> PathBuf {
    let file = Path::new(SCRATCH).join("control").join(name);
    std::fs::create_dir_all(file.parent().expect("a folder")).expect("scratch folder");
    file
}

/// Compiles a program and links it to the archive as it is installed.
fn linked(source: &str, name: &str, flags: &[&str]) -> PathBuf {
    static ARCHIVE: OnceLock<PathBuf> = OnceLock::new();
    let archive = ARCHIVE.get_or_init(|| {
        let prefix = scratch("prefix");
        let _ = std::fs::remove_dir_all(&prefix);
        must(
            Command::new("sh")
                .arg(root().join("alloc-capi/install.sh"))
                .arg(&prefix)
                .env("LIB_FROM", library().shared.parent().expect("folder")),
        );
        prefix.join("lib/libthermalloc.a")
    });
    let out = scratch(name);
    let mut args: Vec<&std::ffi::OsStr> = flags.iter().map(AsRef::as_ref).collect();
    args.push(archive.as_os_str());
    compile(source, &out, &args);
    out
}

fn run(program: &Path) -> Command {
    let mut command = Command::new("timeout");
    command.args(["-s", "KILL", "120"]).arg(program);
    for variable in ["MALLOC_CONF", "THERMALLOC_CONF"] {
        command.env_remove(variable);
    }
    command
}

#[test]
fn the_contract_of_every_name_under_three_prefixes() {
    for prefix in ["", "je_", "jemalloc_"] {
        let flag = format!("-DPREFIX={prefix}");
        let program = linked("mallctl.c", &format!("mallctl_{prefix}"), &[&flag]);
        check_json(&must(&mut run(&program)).stdout);
    }
}

/// What a reader of jemalloc's JSON looks for.
const READER: &str = "
import json, sys
report = json.load(open(sys.argv[1]))['jemalloc']
stats = report['stats']
assert 0 < stats['allocated'] <= stats['active'] <= stats['mapped'], stats
assert stats['active'] <= stats['resident'], stats
arenas = report['arenas']
assert len(arenas['bin']) == arenas['nbins'] and len(arenas['lextent']) == arenas['nlextents']
merged = report['stats.arenas']['merged']
assert merged['pactive'] * arenas['page'] == stats['active']
bins = zip(arenas['bin'], merged['bins'])
assert sum(b['size'] * s['curregs'] for b, s in bins) == merged['small']['allocated']
assert set(report['config']) >= {'prof', 'stats', 'fill'} and 'narenas' in report['opt']
assert 'uptime_ns' in merged and 'mutexes' in merged and 'hpa_shard' in merged
";

fn check_json(report: &[u8]) {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let file = scratch(&format!("report{}.json", COUNT.fetch_add(1, Relaxed)));
    std::fs::write(&file, report).expect("a file");
    must(Command::new("python3").args(["-c", READER]).arg(file));
}

/// The test itself is tested on jemalloc, where Debian's is installed.
#[test]
fn jemalloc_passes_the_same_contract() {
    let out = scratch("mallctl_reference");
    let source = root().join("tests/c/mallctl.c");
    let mut gcc = Command::new("gcc");
    gcc.args(["-std=gnu11", "-O1", "-fno-builtin", "-pthread", "-DREFERENCE"]);
    if !output(gcc.arg(source).arg("-o").arg(&out).arg("-ljemalloc")).status.success() {
        skipped("libjemalloc-dev is not installed");
        return;
    }
    must(&mut run(&out));
    must(&mut profiled(&out, "heap_reference"));
}

#[test]
fn the_profilers_names() {
    must(&mut profiled(&linked("mallctl.c", "mallctl_prof", &[]), "heap"));
}

/// A run of `mallctl.c` that looks at the profiler's names alone.
fn profiled(program: &Path, heap: &str) -> Command {
    let mut command = run(program);
    command.arg("prof").env("MALLOC_CONF", "prof:true,prof_prefix:heaps");
    command.env("HEAP_FILE", scratch(heap));
    command
}

#[test]
fn what_is_measured_is_what_the_kernel_says() {
    let program = linked("measured.c", "measured", &[]);
    must(&mut run(&program));
}

#[test]
fn forks_among_readers() {
    must(&mut run(&linked("mallctl_fork.c", "mallctl_fork", &[])));
}

#[test]
fn a_programs_own_variables() {
    for prefix in ["", "je_", "jemalloc_"] {
        let (conf, message) =
            (format!("-DNAME={prefix}malloc_conf"), format!("-DMESSAGE={prefix}malloc_message"));
        let expected = "1234 77 3 Jmdablxeh 1\n";
        // Linked to the archive, where the program's variable is the only one, and to the library.
        let archive = linked("conf_symbol.c", &format!("conf_{prefix}archive"), &[&conf, &message]);
        assert_eq!(text(&must(&mut run(&archive)).stdout), expected, "{prefix} archive");
        let shared = scratch(&format!("conf_{prefix}shared"));
        let library = library().shared.as_os_str();
        compile("conf_symbol.c", &shared, &[conf.as_ref(), message.as_ref(), library]);
        let mut command = run(&shared);
        command.env("LD_LIBRARY_PATH", soname());
        assert_eq!(text(&must(&mut command).stdout), expected, "{prefix} shared");
        command.env("MALLOC_CONF", "dirty_decay_ms:5");
        command.env("THERMALLOC_CONF", "muzzy_decay_ms:6");
        assert_eq!(text(&must(&mut command).stdout), "5 6 3 Jmdablxeh 1\n", "{prefix}");
    }
}

/// The link's name, seen in a mount namespace with an `/etc` of its own.
#[test]
fn the_name_behind_etc_malloc_conf() {
    let private = |script: &str, etc: &Path| {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--mount", "sh", "-ec", script, "sh"]);
        command.arg(etc);
        command
    };
    let etc = scratch("etc");
    let _ = std::fs::remove_dir_all(&etc);
    std::fs::create_dir(&etc).expect("a folder");
    if !private("mount --bind \"$1\" /etc", &etc).output().is_ok_and(|run| run.status.success()) {
        skipped("no mount namespace is to be had");
        return;
    }
    symlink("dirty_decay_ms:11,stats_print:true,stats_print_opts:J", etc.join("malloc.conf"))
        .expect("a link");
    let program = linked("one_block.c", "one_block_linked", &["-static"]);
    let run = output(
        private("mount --bind \"$1\" /etc; exec \"$PROGRAM\"", &etc)
            .env("PROGRAM", program)
            .env_remove("MALLOC_CONF")
            .env_remove("THERMALLOC_CONF"),
    );
    let report = text(&run.stderr);
    assert!(report.contains("\"dirty_decay_ms\":11,"), "{report}");
}

/// A folder with the library under the name that a linked program asks for, and under jemalloc's.
fn soname() -> PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let made = FOLDER.get_or_init(|| {
        for name in ["libthermalloc.so.0", "libjemalloc.so.2"] {
            let link = scratch(&format!("soname/{name}"));
            let _ = std::fs::remove_file(&link);
            symlink(&library().shared, link).expect("a link");
        }
        scratch("soname")
    });
    made.clone()
}

/// A program that allocates one block, with the library preloaded.
fn preloaded(variables: &[(&str, &str)]) -> Output {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    let program = PROGRAM.get_or_init(|| {
        let out = scratch("one_block");
        compile("one_block.c", &out, &["-fPIE", "-pie"]);
        out
    });
    let mut command = library().preload(program);
    command.env_remove("MALLOC_CONF").env_remove("THERMALLOC_CONF");
    output(command.envs(variables.iter().copied()))
}

#[test]
fn statistics_are_written_at_the_end() {
    let quiet = preloaded(&[]);
    assert!(quiet.status.success() && quiet.stderr.is_empty(), "{}", text(&quiet.stderr));
    let run = preloaded(&[("MALLOC_CONF", "stats_print:true")]);
    let report = text(&run.stderr);
    assert!(report.starts_with("___ Begin jemalloc statistics ___\nVersion: \"5.3.0-"), "{report}");
    assert!(report.ends_with("--- End jemalloc statistics ---\n"), "{report}");
    let run = preloaded(&[("MALLOC_CONF", "stats_print:true,stats_print_opts:J")]);
    assert!(text(&run.stderr).starts_with("{\"jemalloc\":{\"version\":"));
    let run = preloaded(&[("MALLOC_CONF", "stats_print:true,stats_print_opts:gmdablxeh")]);
    assert_eq!(text(&run.stderr).lines().count(), 5, "{}", text(&run.stderr));
}

#[test]
fn options_are_confirmed_and_wrong_ones_end_a_process() {
    let run = preloaded(&[
        ("TCMALLOC_RELEASE_RATE", "10"),
        ("MALLOC_ARENA_MAX", "2"),
        ("MALLOC_CONF", "confirm_conf:true,retain:true"),
    ]);
    let said = text(&run.stderr);
    for line in [
        "thermalloc: environment variable MALLOC_ARENA_MAX: \"2\": narenas:2: set",
        "thermalloc: environment variable TCMALLOC_RELEASE_RATE: \"10\": dirty_decay_ms:200: set",
        "thermalloc: environment variable MALLOC_CONF: \"confirm_conf:true,retain:true\"",
        "thermalloc: -- retain:true: no effect: Address space is always kept.",
    ] {
        assert!(said.lines().any(|known| known == line), "{line} is not in\n{said}");
    }
    let run = preloaded(&[("MALLOC_CONF", "abort_conf:true,colour:red")]);
    // `timeout` ends by the signal that ended the program, or with 128 more.
    use std::os::unix::process::ExitStatusExt;
    let aborted = run.status.signal() == Some(SIGABRT) || run.status.code() == Some(128 + SIGABRT);
    assert!(aborted, "{}: {}", run.status, text(&run.stderr));
    assert_eq!(
        text(&run.stderr).lines().filter(|line| line.starts_with("thermalloc: ")).count(),
        2
    );
    let run = preloaded(&[("MALLOC_CONF", "colour:red,retain:maybe,,::=,\u{1}")]);
    assert!(run.status.success() && run.stderr.is_empty(), "{}", text(&run.stderr));
}

#[test]
fn a_resize_to_nothing_does_what_the_option_says() {
    use std::os::unix::process::ExitStatusExt;
    let program = linked("zero_realloc.c", "zero_realloc", &[]);
    for (value, expected) in [("free", "null\n"), ("alloc", "a block of 16\n")] {
        let mut command = run(&program);
        command.env("MALLOC_CONF", format!("zero_realloc:{value}"));
        assert_eq!(text(&must(&mut command).stdout), expected, "{value}");
    }
    let aborted = output(run(&program).env("MALLOC_CONF", "zero_realloc:abort"));
    let status = aborted.status;
    assert!(status.signal() == Some(SIGABRT) || status.code() == Some(128 + SIGABRT), "{status}");
    assert!(text(&aborted.stderr).starts_with("thermalloc: realloc of a block to 0 bytes"));
}

/// Redis with Debian's jemalloc, or libthermalloc in its place.
struct Redis {
    server: Child,
    socket: PathBuf,
}

impl Redis {
    fn start(name: &str, variable: (&str, &Path)) -> Self {
        let socket = scratch(&format!("redis_{name}.sock"));
        let _ = std::fs::remove_file(&socket);
        let server = Command::new("redis-server")
            .args(["--port", "0", "--save", "", "--enable-debug-command", "yes", "--unixsocket"])
            .arg(&socket)
            .env(variable.0, variable.1)
            .stdout(Stdio::null())
            .spawn()
            .expect("redis-server");
        let redis = Redis { server, socket };
        let since = Instant::now();
        while redis.say(&["ping"]).trim() != "PONG" {
            assert!(since.elapsed() < Duration::from_secs(20), "{name}: redis does not answer");
            sleep(Duration::from_millis(50));
        }
        redis
    }

    fn say(&self, words: &[&str]) -> String {
        let mut client = Command::new("redis-cli");
        text(&output(client.arg("-s").arg(&self.socket).args(words)).stdout)
    }

    /// A row of `INFO memory`.
    fn info(&self, row: &str) -> u64 {
        let info = self.say(&["info", "memory"]);
        let line = info.lines().find_map(|line| line.strip_prefix(row)?.strip_prefix(':'));
        line.unwrap_or_else(|| panic!("no {row} in {info}")).trim().parse().expect("a number")
    }

    /// `INFO` shows what a timer of Redis's, ten times a second, has read.
    fn settle(&self) {
        sleep(Duration::from_millis(500));
    }

    fn resident(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.server.id()));
        let status = status.expect("status");
        let line = status.lines().find(|line| line.starts_with("VmRSS")).expect("VmRSS");
        line.split_whitespace().nth(1).expect("kB").parse::<u64>().expect("a number") << 10
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.say(&["shutdown", "nosave"]);
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// Keys of 200 bytes each.
const KEYS: u64 = 200_000;

fn use_redis(redis: &Redis) {
    assert!(redis.say(&["info", "memory"]).contains("mem_allocator:jemalloc-"));
    let keys = KEYS.to_string();
    assert_eq!(redis.say(&["debug", "populate", &keys, "key", "200"]).trim(), "OK");
    redis.settle();
    let rows = ["allocator_allocated", "allocator_active", "allocator_resident", "used_memory"];
    let [allocated, active, resident, used] = rows.map(|row| redis.info(row));
    assert!(used >= KEYS * 200, "{used}");
    assert!(
        used <= allocated && allocated <= active && active <= resident,
        "{rows:?}: {used} {allocated} {active} {resident}"
    );
    assert!(allocated - used < used / 10, "{allocated} of which Redis knows {used}");
    assert!(active - allocated < allocated / 5, "{active} for {allocated}");
    let full = redis.resident();
    assert!(full >= active, "{full} of which {active} are blocks");

    redis.say(&["flushall"]);
    assert_eq!(redis.say(&["memory", "purge"]).trim(), "OK");
    redis.settle();
    let [allocated, active, resident, _] = rows.map(|row| redis.info(row));
    assert!(allocated <= active && active <= resident, "{allocated} {active} {resident}");
    assert!(allocated < KEYS * 20, "{allocated} bytes of nothing");
    let empty = redis.resident();
    assert!(full - empty > KEYS * 200, "{full} before and {empty} after");

    let stats = redis.say(&["memory", "stats"]);
    assert!(
        stats.contains("allocator.allocated") && stats.contains("allocator.resident"),
        "{stats}"
    );
    let report = redis.say(&["memory", "malloc-stats"]);
    assert!(
        report.contains("Begin jemalloc statistics") && report.contains("thermalloc"),
        "{report}"
    );
    assert!(redis.say(&["memory", "doctor"]).len() > 20);
    // What Redis calls by name: sizes that do not fit are refused as jemalloc refuses them.
    assert_eq!(redis.say(&["config", "set", "jemalloc-bg-thread", "no"]).trim(), "OK");
    assert_eq!(redis.say(&["config", "set", "jemalloc-bg-thread", "yes"]).trim(), "OK");
    assert!(redis.say(&["debug", "mallctl", "stats.allocated"]).trim().parse::<u64>().is_ok());
    assert!(redis.say(&["debug", "mallctl-str", "version"]).contains("thermalloc"));
    assert!(redis.say(&["debug", "mallctl", "arenas.narenas"]).contains("Invalid argument"));
    assert!(redis.say(&["debug", "mallctl", "no.such.name"]).contains("No such file"));
    // It defragments only with a jemalloc of its own, and says so with ours as with Debian's.
    let defrag = redis.say(&["config", "set", "activedefrag", "yes"]);
    assert!(defrag.contains("modified Jemalloc") || defrag.trim() == "OK", "{defrag}");
}

#[test]
fn redis_with_ours_in_jemallocs_place() {
    let found = Command::new("redis-server").arg("--version").output();
    let dynamic = Command::new("sh").args(["-c", "ldd $(command -v redis-server)"]).output();
    let dynamic = dynamic.is_ok_and(|run| text(&run.stdout).contains("libjemalloc.so.2"));
    if !found.is_ok_and(|run| run.status.success()) || !dynamic {
        skipped("there is no redis-server with jemalloc as a shared library");
        return;
    }
    use_redis(&Redis::start("preloaded", ("LD_PRELOAD", &library().shared)));
    use_redis(&Redis::start("in_place", ("LD_LIBRARY_PATH", &soname())));
}
