//! The profiler in a Rust program whose global allocator it is part of.

use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};
use std::path::PathBuf;

use thermalloc::Thermalloc;
use thermalloc::prof::{self, DumpError};
use thermalloc_prof_format::{Block, Record, Records};
use thermalloc_tests::{fork_once, must_again, this_again};

#[global_allocator]
static GLOBAL: Thermalloc = Thermalloc;

const CASE: &str = "THERMALLOC_TEST_PROFILER";
const EXACT: &str = "prof:true,lg_prof_sample:0";

unsafe extern "C" {
    fn backtrace(buffer: *mut *mut c_void, size: c_int) -> c_int;
}

/// Runs `test` again in a process with these options; true in that process.
fn in_a_process(test: &str, options: &str) -> bool {
    if std::env::var_os(CASE).is_some() {
        return true;
    }
    must_again(&this_again(test, (CASE, "1"), options));
    false
}

fn scratch(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name)
}

struct Profile {
    sites: HashMap<u32, (Vec<u64>, u32)>,
    tags: HashMap<u32, String>,
    live: Vec<Block>,
    allocated_bytes: u64,
}

fn dump(name: &str) -> Profile {
    let path = scratch(name);
    prof::dump(&CString::new(path.to_str().unwrap()).unwrap()).unwrap();
    let file = std::fs::read(path).unwrap();
    let mut profile = Profile {
        sites: HashMap::new(),
        tags: HashMap::new(),
        live: Vec::new(),
        allocated_bytes: 0,
    };
    let mut records = Records::new(&file);
    for record in records.by_ref() {
        match record {
            Record::Site(s) => {
                profile.sites.insert(s.site, (s.frames.iter().collect(), s.flags));
            }
            Record::Tag(t) => {
                profile.tags.insert(t.tag, String::from_utf8_lossy(t.text.0).into_owned());
            }
            Record::Live(b) => profile.live.push(b),
            Record::Stat(s) if s.name.0 == b"allocated_bytes" => profile.allocated_bytes = s.value,
            _ => {}
        }
    }
    assert!(!records.damage().any());
    profile
}

/// A block, and the stack that it was allocated on.
type Told = (Vec<u8>, Vec<u64>);

/// An allocation of `size` bytes, and the stack that the C library sees here.
#[inline(never)]
fn here(size: usize) -> Told {
    let block = std::hint::black_box(Vec::with_capacity(size));
    let mut frames = [std::ptr::null_mut(); 128];
    // SAFETY: the buffer has that many places.
    let n = unsafe { backtrace(frames.as_mut_ptr(), 128) };
    let stack = frames[..usize::try_from(n).unwrap()].iter().map(|f| f.addr() as u64).collect();
    (block, stack)
}

#[inline(never)]
fn deep<T>(levels: usize, f: &mut dyn FnMut() -> T) -> T {
    let local = std::hint::black_box([levels; 11]);
    let result = if local[5] == 0 { f() } else { deep(local[6] - 1, f) };
    std::hint::black_box(&local);
    result
}

#[test]
fn stacks_and_scopes_of_a_rust_program() {
    if !in_a_process("stacks_and_scopes_of_a_rust_program", EXACT) {
        return;
    }
    let mut told = vec![here(100_001)];
    for levels in [1, 20, 70] {
        told.push(deep(levels, &mut || here(100_010 + levels)));
    }
    told.push(std::thread::spawn(|| deep(3, &mut || here(100_090))).join().unwrap());
    told.push([3, 1, 2].into_iter().map(here).max_by_key(|(_, stack)| stack.len()).unwrap());
    let mut boxed: Box<dyn FnMut(usize) -> Told> = Box::new(here);
    told.push(boxed(100_091));

    let outer = prof::scope("weights:table");
    let weights = vec![1u8; 200_000];
    let captured = prof::capture();
    let inner = prof::scope("cache");
    let cache = vec![1u8; 200_001];
    drop(inner);
    let also = std::thread::spawn(move || {
        let _scope = captured.attach();
        vec![1u8; 200_002]
    });
    let also = also.join().unwrap();
    let inherited = std::thread::spawn(prof::inherit(|| vec![1u8; 200_005])).join().unwrap();
    drop(outer);
    let none = vec![1u8; 200_003];
    let marked = vec![1u8; 200_004];
    // SAFETY: a live block.
    assert!(!unsafe { prof::mark(marked.as_ptr()) }, "it is in the scope that there is");
    let scope = captured.attach();
    // SAFETY: as above.
    assert!(unsafe { prof::mark(marked.as_ptr()) });
    drop(scope);

    let p = dump("rust.thprof");
    let by_address: HashMap<u64, &Block> = p.live.iter().map(|b| (b.address, b)).collect();
    for (block, theirs) in &told {
        let b = by_address[&(block.as_ptr().addr() as u64)];
        let (ours, flags) = &p.sites[&b.site];
        assert_eq!((*flags, b.size), (0, block.capacity() as u64));
        assert!(ours.ends_with(&theirs[1..]), "{ours:x?}\n{theirs:x?}");
        assert!(ours.len() - theirs.len() < 30);
    }
    let scope = |block: &[u8]| {
        let tag = by_address[&(block.as_ptr().addr() as u64)].tag;
        p.tags.get(&tag).map_or("", String::as_str)
    };
    let scopes = [&weights, &cache, &also, &inherited, &none, &marked].map(|block| scope(block));
    assert_eq!(
        scopes,
        ["weights:table", "cache", "weights:table", "weights:table", "", "weights:table"]
    );
}

#[test]
fn every_live_byte_of_a_rust_program() {
    if !in_a_process("every_live_byte_of_a_rust_program", EXACT) {
        return;
    }
    let blocks: Vec<Vec<u8>> = (0..500).map(|i| vec![0; i * i]).collect();
    let grown: Vec<Vec<u8>> = (0..100)
        .map(|i| {
            let mut v = vec![1u8; 100 + i];
            v.reserve(i << 16);
            v.shrink_to(i << 10);
            v
        })
        .collect();
    let p = dump("rust_exact.thprof");
    // What the dump's own result takes is not in it.
    assert_eq!(p.live.iter().map(|b| b.usable).sum::<u64>(), p.allocated_bytes);
    let sizes: HashMap<u64, u64> = p.live.iter().map(|b| (b.address, b.size)).collect();
    for block in blocks.iter().chain(&grown).filter(|block| block.capacity() > 0) {
        assert_eq!(sizes[&(block.as_ptr().addr() as u64)], block.capacity() as u64);
    }
    let status = fork_once(|| {
        let block = vec![1u8; 12_345];
        let p = dump("rust_child.thprof");
        i32::from(
            !p.live.iter().any(|b| b.address == block.as_ptr().addr() as u64 && b.size == 12_345),
        )
    });
    assert_eq!(status, 0);
}

#[test]
fn off() {
    if !in_a_process("off", "") {
        return;
    }
    assert_eq!(prof::dump(c"/nonexistent/x"), Err(DumpError::Off));
    let _scope = prof::scope("weights");
    let block = vec![0u8; 3 << 20];
    // SAFETY: a live block.
    assert!(!unsafe { prof::mark(block.as_ptr()) });
}

#[test]
fn it_is_turned_off_and_on() {
    if !in_a_process("it_is_turned_off_and_on", "prof:true,prof_active:false") {
        return;
    }
    let blocks = || thermalloc::control::stats::snapshot().prof_blocks;
    let off = vec![0u8; 3 << 20];
    assert_eq!(blocks(), 0);
    thermalloc::control::options::set("prof_active", "true").unwrap();
    let on = vec![0u8; 3 << 20];
    assert_eq!(blocks(), 1);
    thermalloc::control::options::set("prof_active", "false").unwrap();
    let again = vec![0u8; 3 << 20];
    assert_eq!(blocks(), 1);
    drop((off, on, again));
    assert_eq!(thermalloc::control::stats::snapshot().prof_live_blocks, 0);
}
