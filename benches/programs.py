"""The real programs of `run.py programs`: how each is set up, run and checked. All inputs are generated."""
import glob
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

LIBC = next(iter(glob.glob("/lib/*-linux-gnu/libc.so.6")), "/lib64/libc.so.6")


class Failed(Exception):
    pass


def clean_env():
    """The environment without anything that steers an allocator."""
    steers = re.compile(r"LD_PRELOAD|MALLOC_|_RJEM_|MIMALLOC_|TCMALLOC_|THERMALLOC_|GLIBC_TUNABLES|PYTHONMALLOC")
    return {k: v for k, v in os.environ.items() if not steers.match(k)}


def quiet(argv, **more):
    """Runs a command outside of the measurement, on the system's own allocator."""
    try:
        r = subprocess.run([str(a) for a in argv], env=clean_env(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **{"timeout": 300, **more})
    except subprocess.TimeoutExpired as e:
        raise Failed(f"{argv[0]}: no end after {e.timeout:.0f} s")
    if r.returncode:
        raise Failed(f"{argv[0]}: exit {r.returncode}: {r.stdout[-500:].decode(errors='replace')}")
    return r.stdout


def kill(process):
    """Ends a measured program with all its children, which share a process group of their own."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Program:
    needs = ()
    env = {}
    stdin = None
    # What to preload where the table says glibc: nothing, unless the program is linked to another allocator.
    glibc = ""

    def __init__(self, measure, work, scale):
        self.name, self.measure, self.work, self.scale = type(self).__name__, measure, work / type(self).__name__, scale
        self.missing = [n for n in self.needs if not shutil.which(n)]
        if not self.missing:
            shutil.rmtree(self.work, ignore_errors=True)
            self.work.mkdir(parents=True)
            self.setup()

    def times(self, n):
        return max(1, round(n * self.scale))

    def setup(self):
        """Makes the input, once."""

    def fresh(self, run):
        """Makes what one run will change."""

    def check(self, run, out):
        """Bytes that must not depend on the allocator."""
        return out

    def start(self, run, lib, env):
        argv = [self.measure]
        if lib or self.glibc:
            argv += ["--preload", lib or self.glibc]
        for k, v in {**self.env, **env}.items():
            argv += ["--set", f"{k}={v}"]
        argv += ["--", *map(str, self.command(run))]
        with open(run / "stdout", "wb") as out, open(run / "stderr", "wb") as err:
            stdin = open(self.stdin, "rb") if self.stdin else subprocess.DEVNULL
            return subprocess.Popen(argv, cwd=run, env=clean_env(), stdin=stdin, stdout=out, stderr=err, start_new_session=True)

    def finish(self, process, run, timeout):
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            kill(process)
            raise Failed(f"no end after {timeout} s")
        lines = (run / "stderr").read_text(errors="replace").splitlines()
        used = json.loads(lines.pop()) if lines and lines[-1].startswith('{"exit"') else {"exit": process.returncode}
        if used["exit"]:
            raise Failed(f"exit {used['exit']}: " + " / ".join(lines[-5:]))
        return used

    def run(self, lib, env, timeout=1200):
        """One measured run: its figures, with a hash of the checked output."""
        run = self.work / "run"
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir()
        self.fresh(run)
        used = self.finish(self.start(run, lib, env), run, timeout)
        used["check"] = hashlib.sha256(self.check(run, (run / "stdout").read_bytes())).hexdigest()[:12]
        return used


class python(Program):
    """CPython's own tests: threads, processes, fork."""

    tests = "test_json test_threading test_multiprocessing_fork test_subprocess".split()

    def setup(self):
        pyenv = sorted(glob.glob(os.path.expanduser("~/.pyenv/versions/3.1*/bin/python3")), reverse=True)
        for self.exe in ["/usr/bin/python3", sys.executable, *pyenv]:
            probe = [self.exe, "-c", "import " + ", ".join(f"test.{t}" for t in self.tests)]
            if os.path.exists(self.exe) and subprocess.run(probe, stderr=subprocess.DEVNULL).returncode == 0:
                return
        self.missing = ["python3 with its test package"]

    def command(self, run):
        # The test left out fails wherever a .pth file of the site imports threading.
        return [self.exe, "-m", "test", "-i", "test_import_from_another_thread", "-i", "test_recursion_limit", *(self.tests if self.scale >= 1 else self.tests[:2])]

    def check(self, run, out):
        return b"\n".join(re.findall(rb"^(?:All \d+ tests OK\.|.*Result: \w+)$", out, re.M))


class python_json(Program):
    """Each object of a Python program from malloc."""

    env = {"PYTHONMALLOC": "malloc", "PYTHONHASHSEED": "0"}
    script = """
import hashlib, json, random, sys
random.seed(1)
total = hashlib.sha256()
keep = []
for i in range(int(sys.argv[1])):
    rows = [{"id": j, "name": "n%d" % random.randrange(10**6), "tags": [random.randrange(99) for _ in range(8)]} for j in range(2000)]
    text = json.dumps(rows)
    keep = keep[-20:] + [json.loads(text)]
    total.update(text.encode())
print(total.hexdigest(), len(keep))
"""

    def command(self, run):
        return [sys.executable, "-c", self.script, self.times(150)]


class redis(Program):
    """redis-server, measured, under redis-benchmark, not measured. wall is the benchmark's.

    Debian's redis-server is linked to libjemalloc.so.2 and calls plain malloc and free: a preloaded library
    comes first, and so does glibc's own malloc when libc.so.6 is preloaded, which is the glibc row.
    """

    needs = ("redis-server", "redis-benchmark", "redis-cli")
    glibc = LIBC

    def command(self, run):
        return ["redis-server", "--port", "0", "--unixsocket", run / "s", "--save", "", "--appendonly", "no", "--dir", run]

    def cli(self, *args, **more):
        return quiet(["redis-cli", "-s", self.work / "run/s", *args], **more)

    def run(self, lib, env, timeout=600):
        run = self.work / "run"
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir()
        server = self.start(run, lib, env)
        try:
            self.wait_ready(run, server)
            n, start = self.times(1_000_000), time.monotonic()
            quiet(["redis-benchmark", "-s", run / "s", "-n", n, "-P", 16, "-q", "-t", "set,get,lpush,hset", "-r", 100000, "-d", 200],
                  timeout=timeout)
            wall = time.monotonic() - start
            self.cli("flushall")
            self.cli(input=b"".join(b"set key%d %s\n" % (i, b"v%d" % i * (i % 50 + 1)) for i in range(1000)))
            check = self.cli("mget", *(f"key{i}" for i in range(1000)))
            self.cli("shutdown", "nosave")
            used = self.finish(server, run, 60)
        finally:
            if server.poll() is None:
                kill(server)
        return {**used, "wall": round(wall, 4), "check": hashlib.sha256(check).hexdigest()[:12]}

    def wait_ready(self, run, server):
        for _ in range(200):
            if server.poll() is not None:
                self.finish(server, run, 1)
            if (run / "s").exists():
                return
            time.sleep(0.05)
        raise Failed("redis-server does not answer")


class gcc(Program):
    """gcc -O2 on large generated files."""

    needs = ("gcc",)

    def setup(self):
        rng = random.Random(7)
        for f in range(3):
            lines = ["#include <stdint.h>", "struct node { struct node *next; uint64_t key; double w[8]; };"]
            for i in range(self.times(150)):
                a, b, c = (rng.randrange(3, 1000) for _ in range(3))
                cases = " ".join(f"case {k}: x ^= x * {rng.randrange(3, 9999)}u + {k}; break;" for k in range(12))
                lines.append(f"""
static uint64_t mix{i}(uint64_t x) {{ switch (x % 16) {{ {cases} default: x += {a}; }} return x; }}
uint64_t f{f}_{i}(struct node *n, uint64_t *out, int len) {{
    uint64_t sum = {b}; double acc = 0;
    for (int i = 0; i < len; i++) {{
        for (int k = 0; k < 8; k++) acc += n->w[k] * (double)(out[i] % {c});
        sum += mix{i}(out[i] ^ n->key); out[i] = sum * {a}u; if (n->next) n = n->next;
    }}
    return sum + (uint64_t)acc{f" + f{f}_{i - 1}(n, out, len / 2)" if i else ""};
}}""")
            (self.work / f"g{f}.c").write_text("\n".join(lines))

    def command(self, run):
        return ["gcc", "-O2", "-c", *sorted(self.work.glob("*.c"))]

    def check(self, run, out):
        return b"".join(o.read_bytes() for o in sorted(run.glob("*.o")))


class sqlite(Program):
    """A generated workload on a database in memory."""

    needs = ("sqlite3",)

    def setup(self):
        n = self.times(300_000)
        self.stdin = self.work / "work.sql"
        self.stdin.write_text(f"""
create table t(id integer primary key, k integer, v text, w real);
insert into t with recursive g(i) as (select 1 union all select i + 1 from g where i < {n})
  select i, (i * 7919) % 10007, printf('row %d %s', i, hex(i * 104729)), i * 0.25 from g;
create index t_k on t(k);
create index t_v on t(v);
select k, count(*), sum(w), max(v) from t group by k order by 2 desc, k limit 50;
select length(group_concat(v, ',')), k % 97 as m from t group by m order by m;
update t set v = v || ' changed', w = w + k where id % 3 = 0;
delete from t where id % 11 = 0;
select a.k, count(*), sum(a.w + b.w) from t a join t b on a.k = b.k where a.id % 50 = 0 group by a.k order by 3 desc, 1 limit 50;
select id, sum(w) over (partition by k order by id) as s from t order by s desc, id limit 50;
select substr(v, 1, 8), count(distinct k) from t group by 1 order by 2 desc, 1 limit 50;
""")

    def command(self, run):
        return ["sqlite3", ":memory:"]


class git(Program):
    """git gc on a generated repository."""

    needs = ("git",)

    def setup(self):
        rng = random.Random(3)
        words = [f"word{i}" for i in range(2000)]
        files = [[" ".join(rng.choices(words, k=10)) for _ in range(120)] for _ in range(200)]
        stream = []
        for c in range(self.times(500)):
            stream.append(f"commit refs/heads/main\ncommitter A <a@example.org> {1_600_000_000 + c * 60} +0000\ndata 1\nc\n")
            for i in range(len(files)) if c == 0 else rng.sample(range(len(files)), 4):
                files[i][rng.randrange(120)] = " ".join(rng.choices(words, k=10))
                text = "\n".join(files[i])
                stream.append(f"M 100644 inline dir{i % 10}/file{i}\ndata {len(text)}\n{text}\n")
        self.origin = self.work / "origin.git"
        quiet(["git", "init", "-q", "--bare", "-b", "main", self.origin])
        quiet(["git", "-C", self.origin, "fast-import", "--quiet"], input="".join(stream).encode())

    def fresh(self, run):
        shutil.copytree(self.origin, run / "repo.git")

    def command(self, run):
        return ["git", "-C", run / "repo.git", "-c", "pack.threads=2", "gc", "--aggressive", "--quiet", "--prune=now"]

    def check(self, run, out):
        repo = run / "repo.git"
        quiet(["git", "-C", repo, "fsck", "--full", "--no-progress"])
        return quiet(["git", "-C", repo, "cat-file", "--batch-all-objects", "--batch-check"])


class cargo(Program):
    """cargo build --release of a generated crate, offline.

    rustup's x86-64 rustc has jemalloc linked in, which a preload does not replace: cargo, the linker and the
    build script run on the allocator under test, rustc on its own.
    """

    needs = ("cargo", "cc")

    def setup(self):
        src = self.work / "crate/src"
        src.mkdir(parents=True)
        (src.parent / "Cargo.toml").write_text('[package]\nname = "made"\nversion = "0.1.0"\nedition = "2021"\n\n[workspace]\n')
        n = self.times(60)
        for i in range(n):
            arms = "\n".join(f"            {k} => x.wrapping_mul({k * 31 + i + 3}) ^ {k}," for k in range(40))
            (src / f"m{i}.rs").write_text(f"""use std::collections::{{BTreeMap, HashMap}};
pub struct S<T> {{ map: BTreeMap<T, Vec<u64>>, pub seen: HashMap<T, String> }}
impl<T: Ord + std::hash::Hash + Clone + ToString> S<T> {{
    pub fn new() -> Self {{ S {{ map: BTreeMap::new(), seen: HashMap::new() }} }}
    pub fn add(&mut self, t: T, x: u64) -> u64 {{
        let y = match x % 41 {{
{arms}
            _ => x + {i},
        }};
        self.seen.entry(t.clone()).or_insert_with(|| t.to_string()).push_str(&y.to_string());
        self.map.entry(t).or_default().push(y);
        self.map.values().map(|v| v.iter().fold(0u64, |a, b| a.wrapping_add(*b))).fold(0, u64::wrapping_add)
    }}
}}
pub fn run() -> u64 {{
    let (mut a, mut b) = (S::<u32>::new(), S::<String>::new());
    (0..50).fold(0, |s, x| s ^ a.add(x as u32 % 7, x) ^ b.add(format!("k{{}}", x % 5), x * {i}))
}}
""")
        mods = "".join(f"mod m{i};\n" for i in range(n))
        (src / "main.rs").write_text(mods + "fn main() {\n" + "".join(f'    println!("{{}}", m{i}::run());\n' for i in range(n)) + "}\n")

    def command(self, run):
        return ["cargo", "build", "--release", "--offline", "--quiet", "--manifest-path", self.work / "crate/Cargo.toml",
                "--target-dir", run / "target"]

    def check(self, run, out):
        return quiet([run / "target/release/made"])


class z3(Program):
    """z3 on generated problems: equations of long bit vectors, and shop schedules in integers.

    Its search does not depend on addresses, so each allocator sees the same calls; the values it finds are compared.
    """

    needs = ("z3",)

    def setup(self):
        rng = random.Random(5)
        lines = []
        for _ in range(self.times(20)):
            lines += ["(push)", *self.schedule(rng, 13), "(check-sat)", "(pop)"]
        for bits in (128, 124, 120)[:self.times(3)] if self.scale >= 1 else (96,):
            lines += ["(push)", *self.equation(rng, bits), "(check-sat)", "(get-value (x y))", "(pop)"]
        (self.work / "problems.smt2").write_text("\n".join(lines) + "\n")

    @staticmethod
    def equation(rng, bits):
        odd = rng.randrange(1 << 20) | 1
        return [f"(declare-const x (_ BitVec {bits}))", f"(declare-const y (_ BitVec {bits}))",
                f"(assert (= (bvmul x y) (bvadd (bvmul x x) (_ bv{odd} {bits}))))",
                f"(assert (bvult x y))(assert (bvugt x (_ bv3 {bits})))",
                f"(assert (= (bvand (bvlshr x (_ bv2 {bits})) (_ bv7 {bits})) (_ bv5 {bits})))"]

    @staticmethod
    def schedule(rng, jobs):
        """Each job visits three machines in an order of its own; no machine does two things at once."""
        long = [[rng.randrange(1, 9) for _ in range(3)] for _ in range(jobs)]
        order = [rng.sample(range(3), 3) for _ in range(jobs)]
        lines = [f"(declare-const s{i}_{k} Int)" for i in range(jobs) for k in range(3)]
        lines += [f"(assert (>= s{i}_0 0))" for i in range(jobs)]
        lines += [f"(assert (>= s{i}_{k + 1} (+ s{i}_{k} {long[i][k]})))" for i in range(jobs) for k in range(2)]
        for i in range(jobs):
            for j in range(i):
                for k in range(3):
                    m = order[j].index(order[i][k])
                    lines.append(f"(assert (or (>= s{i}_{k} (+ s{j}_{m} {long[j][m]})) (>= s{j}_{m} (+ s{i}_{k} {long[i][k]}))))")
        busiest = max(sum(long[i][order[i].index(m)] for i in range(jobs)) for m in range(3))
        return lines + [f"(assert (<= (+ s{i}_2 {long[i][2]}) {busiest + 12}))" for i in range(jobs)]

    def command(self, run):
        return ["z3", self.work / "problems.smt2"]


ALL = [python, python_json, redis, gcc, sqlite, git, cargo, z3]
