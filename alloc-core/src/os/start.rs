//! What a process can know before libc has started: the auxiliary vector, the environment, the
//! number of CPUs and nodes. Everything is read where the kernel left it, through weak symbols or
//! files; nothing here is cached but the page size.
use core::ffi::{CStr, c_char};
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use super::linux;

/// The address of a variable or function of libc that may be missing; null where it is.
macro_rules! weak {
    ($symbol:literal) => {{
        let address: *const *const usize;
        #[cfg(target_arch = "x86_64")]
        // SAFETY: reads a slot of the global offset table.
        unsafe {
            core::arch::asm!(concat!(".weak ", $symbol), concat!("mov {}, qword ptr [rip + ", $symbol, "@GOTPCREL]"),
                out(reg) address, options(nostack, preserves_flags, readonly));
        }
        #[cfg(target_arch = "aarch64")]
        // SAFETY: reads a slot of the global offset table.
        unsafe {
            core::arch::asm!(concat!(".weak ", $symbol), concat!("adrp {0}, :got:", $symbol),
                concat!("ldr {0}, [{0}, :got_lo12:", $symbol, "]"),
                out(reg) address, options(nostack, preserves_flags, readonly));
        }
        address
    }};
}
#[cfg(not(loom))]
pub(crate) use weak;

const AT_RSEQ_FEATURE_SIZE: u64 = 27;

/// What the kernel told this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Facts {
    pub(crate) page_size: usize,
    /// Runs with more rights than its caller's: the environment is not to be trusted.
    pub(crate) secure: bool,
    /// Bytes of the rseq area that the kernel fills in; 0 = not said (before Linux 6.3).
    pub(crate) rseq_feature_size: usize,
    /// Where the kernel's own shared object lies; 0: nowhere.
    pub(crate) vdso: usize,
    /// Sixteen random bytes, zero where the kernel gave none. libc makes its canary of them:
    /// never show them.
    pub(crate) random: [u8; 16],
}

impl Facts {
    fn find(value: impl Fn(u64) -> Option<usize>) -> Option<Self> {
        let page_size = value(libc::AT_PAGESZ).filter(|size| size.is_power_of_two())?;
        let random = value(libc::AT_RANDOM).map_or([0; 16], |at| {
            // SAFETY: the kernel put the bytes on the first stack, which stays.
            unsafe { core::ptr::with_exposed_provenance::<[u8; 16]>(at).read() }
        });
        Some(Self {
            page_size,
            secure: value(libc::AT_SECURE).is_none_or(|secure| secure != 0),
            rseq_feature_size: value(AT_RSEQ_FEATURE_SIZE).unwrap_or(0),
            vdso: value(libc::AT_SYSINFO_EHDR).unwrap_or(0),
            random,
        })
    }

    fn from_stack() -> Option<Self> {
        let vector = Start::find()?.vector;
        Self::find(|key| {
            let mut at = vector;
            loop {
                // SAFETY: the vector is pairs of words that end in one whose key is 0.
                match unsafe { at.read() } {
                    [0, _] => return None,
                    [found, value] if found as u64 == key => return Some(value),
                    _ => at = at.wrapping_add(1),
                }
            }
        })
    }

    fn from_proc() -> Option<Self> {
        let mut vector = [0u8; 1024];
        let len = linux::read_file(c"/proc/self/auxv", &mut vector).ok()?;
        Self::find(|key| {
            let (pairs, _) = vector[..len].as_chunks::<16>();
            let words = pairs.iter().map(|pair| {
                let (words, _) = pair.as_chunks::<8>();
                (usize::from_ne_bytes(words[0]), usize::from_ne_bytes(words[1]))
            });
            words
                .take_while(|pair| pair.0 != 0)
                .find(|pair| pair.0 as u64 == key)
                .map(|pair| pair.1)
        })
    }

    /// No stack to be found and no /proc: trust nothing.
    fn unknown() -> Self {
        Self {
            page_size: probe_page_size(),
            secure: true,
            rseq_feature_size: 0,
            vdso: 0,
            random: [0; 16],
        }
    }
}

/// Reads the facts anew.
pub(crate) fn facts() -> Facts {
    Facts::from_stack().or_else(Facts::from_proc).unwrap_or_else(Facts::unknown)
}

/// Page size of this machine, bytes.
#[inline]
pub(crate) fn page_size() -> usize {
    static PAGE_SIZE: AtomicUsize = AtomicUsize::new(0);
    match PAGE_SIZE.load(Relaxed) {
        0 => {
            let size = facts().page_size;
            PAGE_SIZE.store(size, Relaxed);
            size
        }
        size => size,
    }
}

/// madvise refuses an address that is not on a page, and accepts an empty range that is.
fn probe_page_size() -> usize {
    let on_page = |addr: &usize| {
        // SAFETY: an empty range.
        unsafe { linux::madvise(*addr, 0, libc::MADV_DONTNEED) }.is_ok()
    };
    [4 << 10, 16 << 10].into_iter().find(on_page).unwrap_or(64 << 10)
}

/// An address just above the frames of the first thread's stack; 0 where that can't be found.
pub(crate) fn first_stack_end() -> usize {
    let symbol = weak!("__libc_stack_end");
    // SAFETY: null, or the address of a pointer variable.
    unsafe { symbol.as_ref() }.map_or(0, |end| end.addr())
}

/// What the kernel put on the first thread's stack: argc, argv, NULL, envp, NULL, pairs.
struct Start {
    envp: *const *const c_char,
    vector: *const [usize; 2],
}

impl Start {
    fn find() -> Option<Self> {
        // ld.so has the address of argc there; a static program's start code one word below it,
        // where a zero lies.
        let symbol = weak!("__libc_stack_end");
        if symbol.is_null() {
            return None;
        }
        // SAFETY: the symbol is a pointer variable.
        let at = unsafe { symbol.read() };
        if at.is_null() || !at.is_aligned() {
            return None;
        }
        // SAFETY: the variable points at the first stack, above which the arguments lie.
        let argc_at = if unsafe { at.read() } == 0 { at.wrapping_add(1) } else { at };
        // SAFETY: argc, and the word after it, which is at least argv's NULL.
        let [argc, first] = unsafe { argc_at.cast::<[usize; 2]>().read() };
        let argv = argc_at.wrapping_add(1);
        let envp = argv.wrapping_add(argc.checked_add(1)?);
        // The strings lie above all of this: otherwise it is not argc that was found.
        if argc == 0 || argc > 1 << 24 || first <= envp.addr() {
            return None;
        }
        // SAFETY: below argv's first string, so on the stack.
        if unsafe { envp.wrapping_sub(1).read() } != 0 {
            return None;
        }
        Some(Self { envp: envp.cast(), vector: skip_environment(envp) })
    }
}

/// The auxiliary vector after the environment. unsetenv moves the tail of the environment down,
/// which leaves more than one NULL.
fn skip_environment(envp: *const usize) -> *const [usize; 2] {
    let mut at = envp;
    // SAFETY: the environment ends in a NULL, and the vector after it starts with a key.
    while unsafe { at.read() } != 0 {
        at = at.wrapping_add(1);
    }
    // SAFETY: as above.
    while unsafe { at.read() } == 0 {
        at = at.wrapping_add(1);
    }
    at.cast()
}

/// Looks an environment variable up, without a lock: meant for the process's start. The value
/// stays where it is for as long as the program does not change that variable.
pub(crate) fn env(name: &[u8]) -> Option<&'static [u8]> {
    let symbol = weak!("environ").cast::<*const *const c_char>();
    // SAFETY: null, or the address of a pointer variable.
    let list = unsafe { symbol.as_ref() }.map_or(core::ptr::null(), |list| *list);
    // libc sets it late: earlier there is the kernel's list.
    let list = if list.is_null() { Start::find()?.envp } else { list };
    find_in(list, name)
}

fn find_in(mut list: *const *const c_char, name: &[u8]) -> Option<&'static [u8]> {
    loop {
        // SAFETY: the list ends in a NULL.
        let entry = unsafe { list.read() };
        if entry.is_null() {
            return None;
        }
        // SAFETY: an entry is a C string that lives as long as the variable is not changed.
        let entry = unsafe { CStr::from_ptr(entry) }.to_bytes();
        if let Some(value) = entry.strip_prefix(name).and_then(|rest| rest.strip_prefix(b"=")) {
            return Some(value);
        }
        list = list.wrapping_add(1);
    }
}

/// One more than the highest id in a list like `0-3,8-11`.
fn parse_count(list: &[u8]) -> Option<usize> {
    let list = list.strip_suffix(b"\n").unwrap_or(list);
    let mut highest = None;
    for id in list.split(|byte| matches!(byte, b',' | b'-')) {
        let id = str::from_utf8(id).ok()?.parse::<usize>().ok()?;
        highest = highest.max(Some(id));
    }
    highest?.checked_add(1)
}

fn count_from(path: &CStr) -> Option<usize> {
    let mut list = [0; 1024];
    let len = linux::read_file(path, &mut list).ok()?;
    // A list that fills the buffer may be cut short.
    if len == list.len() { None } else { parse_count(&list[..len]) }
}

fn cpus_from_affinity() -> Option<usize> {
    let mut cpus = [0usize; 128];
    linux::sched_getaffinity(&mut cpus).ok()?;
    let last = cpus.iter().rposition(|&word| word != 0)?;
    Some(last * 64 + 64 - cpus[last].leading_zeros() as usize)
}

/// One more than the highest CPU number that this machine can ever have; a guess of 64 where
/// nothing says. Numbers may have holes.
pub(crate) fn possible_cpus() -> usize {
    count_from(c"/sys/devices/system/cpu/possible").or_else(cpus_from_affinity).unwrap_or(64)
}

/// One more than the highest NUMA node that is online, or can be. Numbers may have holes.
pub(crate) fn numa_nodes() -> usize {
    count_from(c"/sys/devices/system/node/online")
        .or_else(|| count_from(c"/sys/devices/system/node/possible"))
        .unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;

    #[test]
    fn the_stack_and_proc_say_the_same() {
        let facts = Facts::from_stack().unwrap();
        assert_eq!(Some(facts), Facts::from_proc());
        // SAFETY: asks for a value.
        let libc_says = |key| usize::try_from(unsafe { libc::getauxval(key) }).unwrap();
        assert_eq!(facts.page_size, libc_says(libc::AT_PAGESZ));
        assert_eq!(facts.rseq_feature_size, libc_says(AT_RSEQ_FEATURE_SIZE));
        assert!(!facts.secure);
        assert_ne!(facts.random, [0; 16]);
        assert_eq!(page_size(), facts.page_size);
        assert_eq!(probe_page_size(), facts.page_size);
    }

    #[test]
    fn finds_variables() {
        let path = std::env::var("PATH").unwrap();
        assert_eq!(env(b"PATH"), Some(path.as_bytes()));
        assert_eq!(find_in(Start::find().unwrap().envp, b"PATH"), Some(path.as_bytes()));
        assert_eq!(env(b"PAT"), None);
        assert_eq!(env(b"THERMALLOC_NO_SUCH_VARIABLE"), None);
        let entries = [CString::from(c"AB=1"), CString::from(c"A="), CString::from(c"A=2")];
        let list =
            [entries[0].as_ptr(), entries[1].as_ptr(), entries[2].as_ptr(), core::ptr::null()];
        assert_eq!(find_in(list.as_ptr(), b"A"), Some(&b""[..]));
        assert_eq!(find_in(list.as_ptr(), b"AB"), Some(&b"1"[..]));
    }

    #[test]
    fn the_vector_is_found_behind_a_shortened_environment() {
        let stack = [0x7000usize, 0x7010, 0, 0, 0, 6, 4096, 0, 0];
        let vector = skip_environment(stack.as_ptr());
        // SAFETY: inside `stack`.
        assert_eq!(unsafe { vector.read() }, [6, 4096]);
    }

    #[test]
    fn lists_of_ids() {
        assert_eq!(parse_count(b"0\n"), Some(1));
        assert_eq!(parse_count(b"0-3,8-11\n"), Some(12));
        assert_eq!(parse_count(b"0-3,5"), Some(6));
        assert_eq!(parse_count(b"2,0-1\n"), Some(3));
        assert_eq!(parse_count(b"\n"), None);
        assert_eq!(parse_count(b"0-\n"), None);
        assert_eq!(parse_count(b"18446744073709551615"), None);
    }

    #[test]
    fn cpus_and_nodes() {
        let cpus = possible_cpus();
        assert!(cpus_from_affinity().unwrap() <= cpus);
        assert!(std::thread::available_parallelism().unwrap().get() <= cpus);
        assert!((1..=1024).contains(&numa_nodes()));
    }
}
