//! Linux: raw system calls only, since a program may define `mmap` or `write` itself. Nothing here
//! touches `errno`, takes a lock or is a cancellation point. The libc crate gives constants.
use core::arch::asm;
use core::cell::UnsafeCell;
use core::ffi::CStr;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

use libc::c_long;

use super::{Errno, Os, Range, start, vdso};

/// One system call. `nr` and the arguments are those of the kernel's ABI.
///
/// # Safety
/// The call must be sound with these arguments: memory that it writes or unmaps is the caller's.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) unsafe fn syscall(
    nr: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> isize {
    let result;
    // SAFETY: the kernel clobbers rax, rcx and r11 only; the caller answers for the call itself.
    unsafe {
        asm!("syscall", inlateout("rax") nr => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result
}

/// One system call. `nr` and the arguments are those of the kernel's ABI.
///
/// # Safety
/// The call must be sound with these arguments: memory that it writes or unmaps is the caller's.
#[cfg(target_arch = "aarch64")]
#[inline(always)]
pub(crate) unsafe fn syscall(
    nr: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> isize {
    let result;
    // SAFETY: the kernel clobbers x0 only; the caller answers for the call itself.
    unsafe {
        asm!("svc 0", in("x8") nr, inlateout("x0") a => result,
            in("x1") b, in("x2") c, in("x3") d, in("x4") e, in("x5") f, options(nostack));
    }
    result
}

fn check(result: isize) -> Result<usize, Errno> {
    match i32::try_from(-result) {
        Ok(errno @ 1..=4095) => Err(Errno(errno)),
        _ => Ok(result.cast_unsigned()),
    }
}

/// A C int, a signal among them, as the kernel expects it in a register.
fn int(value: i32) -> usize {
    (value as isize).cast_unsigned()
}

// Memory

const RW: usize = (libc::PROT_READ | libc::PROT_WRITE) as usize;
/// Maps `len` zero bytes, readable and writable, at exactly `addr`, where nothing may be mapped, with
/// `flags` as well.
fn map_fixed_noreplace(addr: usize, len: usize, flags: i32) -> Result<(), Errno> {
    let flags = int(flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE);
    // SAFETY: the flag forbids touching other mappings; kernels that do not know it read `addr` as a hint.
    let got = check(unsafe { syscall(libc::SYS_mmap, addr, len, RW, flags, int(-1), 0) })?;
    if got == addr {
        return Ok(());
    }
    // Linux before 4.17 maps elsewhere.
    // SAFETY: nobody has seen this mapping yet.
    let _ = unsafe { unmap(got, len) };
    Err(Errno(libc::EEXIST))
}

/// # Safety
/// Nothing refers to the range any more.
pub(crate) unsafe fn unmap(addr: usize, len: usize) -> Result<(), Errno> {
    // SAFETY: the caller's promise.
    check(unsafe { syscall(libc::SYS_munmap, addr, len, 0, 0, 0, 0) }).map(drop)
}

/// # Safety
/// The range is the caller's, and so are its contents where the advice drops them.
pub(crate) unsafe fn madvise(addr: usize, len: usize, advice: i32) -> Result<(), Errno> {
    // SAFETY: the caller's promise.
    check(unsafe { syscall(libc::SYS_madvise, addr, len, int(advice), 0, 0, 0) }).map(drop)
}

/// Stands for this process where a pidfd is asked for (Linux 6.14 and later).
const PIDFD_SELF: i32 = -10000;

/// Advises many ranges of the process behind `pidfd` in one call; the result is the number of
/// bytes advised, which may be less than all.
///
/// # Safety
/// As for [`madvise`], for each range.
unsafe fn process_madvise(pidfd: i32, ranges: &[Range], advice: i32) -> Result<usize, Errno> {
    let (nr, at) = (libc::SYS_process_madvise, ranges.as_ptr().addr());
    // SAFETY: the kernel reads `ranges`; the rest is the caller's promise.
    check(unsafe { syscall(nr, int(pidfd), at, ranges.len(), int(advice), 0, 0) })
}

/// How many of the first ranges `bytes` cover whole.
fn whole(ranges: &[Range], mut bytes: usize) -> usize {
    ranges
        .iter()
        .take_while(|range| {
            let whole = bytes >= range.len;
            bytes = bytes.saturating_sub(range.len);
            whole
        })
        .count()
}

/// Which pages are resident: bit 0 of one byte a page.
pub(crate) fn mincore(addr: usize, len: usize, pages: &mut [u8]) -> Result<(), Errno> {
    assert!(len.div_ceil(start::page_size()) <= pages.len());
    let to = pages.as_mut_ptr().expose_provenance();
    // SAFETY: the kernel writes a byte a page into `pages`, which is long enough.
    check(unsafe { syscall(libc::SYS_mincore, addr, len, to, 0, 0, 0) }).map(drop)
}

/// Whether the eight bytes at `addr` can be read: the kernel reads them as a set of signals, and then
/// finds that nothing is to be done with it.
pub(crate) fn is_readable(addr: usize) -> bool {
    const NOTHING: usize = usize::MAX;
    let bytes = size_of::<SignalSet>();
    // SAFETY: the kernel reads, if it can, and changes nothing.
    let result = unsafe { syscall(libc::SYS_rt_sigprocmask, NOTHING, addr, 0, bytes, 0, 0) };
    check(result) != Err(Errno(libc::EFAULT)) && addr != 0
}

/// Moves the pages of `[from, from + len)` over the mapping at `to`; `from` stays mapped, empty.
///
/// # Safety
/// Both ranges are the caller's; nothing needs the contents of the target.
pub(crate) unsafe fn move_pages(from: usize, to: usize, len: usize) -> Result<(), Errno> {
    let flags = int(libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP);
    // SAFETY: the caller's promise.
    check(unsafe { syscall(libc::SYS_mremap, from, len, len, flags, to, 0) }).map(drop)
}

// Clock, threads

/// The kernel's `struct timespec`.
#[repr(C)]
pub(crate) struct Timespec {
    pub(crate) sec: i64,
    pub(crate) nsec: i64,
}

impl Timespec {
    fn from_ms(ms: u64) -> Self {
        Self {
            sec: i64::try_from(ms / 1000).unwrap_or(i64::MAX),
            nsec: (ms % 1000 * 1_000_000).cast_signed(),
        }
    }
}

/// Milliseconds of the coarse monotonic clock.
pub(crate) fn now_ms() -> u64 {
    let now = clock(libc::CLOCK_MONOTONIC_COARSE);
    now.sec.cast_unsigned() * 1000 + now.nsec.cast_unsigned() / 1_000_000
}

/// Microseconds of the monotonic clock.
pub(crate) fn now_us() -> u64 {
    let now = clock(libc::CLOCK_MONOTONIC);
    now.sec.cast_unsigned() * 1_000_000 + now.nsec.cast_unsigned() / 1000
}

/// Nanoseconds of a clock: `CLOCK_MONOTONIC`, which profiles count in, or `CLOCK_REALTIME`.
pub(crate) fn now_ns(clock_id: libc::clockid_t) -> u64 {
    let now = clock(clock_id);
    now.sec.cast_unsigned() * 1_000_000_000 + now.nsec.cast_unsigned()
}

/// The calling thread's name, filled up with zero bytes.
pub(crate) fn thread_name() -> [u8; 16] {
    let mut name = [0; 16];
    let to = name.as_mut_ptr().expose_provenance();
    // SAFETY: the kernel writes at most 16 bytes.
    let _ = unsafe { syscall(libc::SYS_prctl, int(libc::PR_GET_NAME), to, 0, 0, 0, 0) };
    name
}

fn clock(id: i32) -> Timespec {
    vdso::clock_gettime(id).unwrap_or_else(|| {
        let mut now = Timespec { sec: 0, nsec: 0 };
        let to = (&raw mut now).expose_provenance();
        // SAFETY: the kernel writes `now`.
        let _ = unsafe { syscall(libc::SYS_clock_gettime, int(id), to, 0, 0, 0, 0) };
        now
    })
}

fn wait_on(word: &AtomicU32, op: i32, expected: u32, timeout_ms: Option<u64>) -> Result<(), Errno> {
    let limit = timeout_ms.map(Timespec::from_ms);
    let limit = limit.as_ref().map_or(0, |limit| core::ptr::from_ref(limit).expose_provenance());
    // SAFETY: the kernel only reads the word and the limit.
    check(unsafe {
        syscall(libc::SYS_futex, word.as_ptr().addr(), int(op), expected as usize, limit, 0, 0)
    })
    .map(drop)
}

/// Sleeps while `word` is `expected`: until a wake, or `EAGAIN`, `EINTR`, `ETIMEDOUT`.
pub(crate) fn futex_wait(
    word: &AtomicU32,
    expected: u32,
    timeout_ms: Option<u64>,
) -> Result<(), Errno> {
    wait_on(word, libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG, expected, timeout_ms)
}

/// Wakes up to `count` sleepers; the result is how many.
pub(crate) fn futex_wake(word: &AtomicU32, count: u32) -> usize {
    let op = int(libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG);
    let count = count.min(i32::MAX.cast_unsigned()) as usize;
    // SAFETY: the kernel uses the word's address as a key only.
    check(unsafe { syscall(libc::SYS_futex, word.as_ptr().addr(), op, count, 0, 0, 0) })
        .unwrap_or(0)
}

#[allow(clippy::cast_possible_truncation, reason = "the kernel's ids are C ints")]
pub(crate) fn gettid() -> i32 {
    // SAFETY: takes no argument, changes nothing.
    unsafe { syscall(libc::SYS_gettid, 0, 0, 0, 0, 0, 0) as i32 }
}

#[allow(clippy::cast_possible_truncation, reason = "the kernel's ids are C ints")]
pub(crate) fn getpid() -> i32 {
    // SAFETY: takes no argument, changes nothing.
    unsafe { syscall(libc::SYS_getpid, 0, 0, 0, 0, 0, 0) as i32 }
}

pub(crate) fn tgkill(pid: i32, tid: i32, signal: i32) -> Result<(), Errno> {
    // SAFETY: what the signal does is decided by its handler.
    check(unsafe { syscall(libc::SYS_tgkill, int(pid), int(tid), int(signal), 0, 0, 0) }).map(drop)
}

/// This thread's effective user.
pub(crate) fn geteuid() -> u32 {
    // SAFETY: reads the thread's credentials.
    let id = unsafe { syscall(libc::SYS_geteuid, 0, 0, 0, 0, 0, 0) };
    u32::try_from(id).unwrap_or(u32::MAX)
}

/// Sets user and group (real, effective, saved) of the calling thread alone, and drops its
/// supplementary groups. What the kernel refuses stays as it is.
pub(crate) fn set_thread_ids(user: [u32; 3], group: [u32; 3]) {
    let [u, eu, su] = user.map(|id| id as usize);
    let [g, eg, sg] = group.map(|id| id as usize);
    // SAFETY: changes the thread's credentials; the user last, as it takes the right to the rest.
    unsafe { syscall(libc::SYS_setgroups, 0, 0, 0, 0, 0, 0) };
    // SAFETY: as above.
    unsafe { syscall(libc::SYS_setresgid, g, eg, sg, 0, 0, 0) };
    // SAFETY: as above.
    unsafe { syscall(libc::SYS_setresuid, u, eu, su, 0, 0, 0) };
}

pub(crate) fn yield_now() {
    // SAFETY: takes no argument, changes nothing.
    let _ = unsafe { syscall(libc::SYS_sched_yield, 0, 0, 0, 0, 0, 0) };
}

/// The thread pointer: on x86-64 a thread without one (before libc has started) would fault here.
#[inline(always)]
pub(crate) fn thread_pointer() -> usize {
    let pointer;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the ABI keeps the thread pointer's own value at fs:0.
    unsafe {
        asm!("mov {}, qword ptr fs:[0]", out(reg) pointer, options(nostack, preserves_flags, readonly));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: reads a register.
    unsafe {
        asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nostack, preserves_flags, nomem));
    }
    pointer
}

const MEMBARRIER_RSEQ: i32 = 1 << 7;
const MEMBARRIER_REGISTER_RSEQ: i32 = 1 << 8;
const MEMBARRIER_FLAG_CPU: i32 = 1;

/// Announces that [`rseq_fence`] will be used.
pub(crate) fn rseq_fence_register() -> Result<(), Errno> {
    // SAFETY: sets a flag of the process.
    check(unsafe { syscall(libc::SYS_membarrier, int(MEMBARRIER_REGISTER_RSEQ), 0, 0, 0, 0, 0) })
        .map(drop)
}

/// Restarts the restartable sequences that run now, on `cpu` or everywhere, and is a full barrier
/// for the threads that run there.
pub(crate) fn rseq_fence(cpu: Option<usize>) -> Result<(), Errno> {
    let flags = if cpu.is_some() { MEMBARRIER_FLAG_CPU } else { 0 };
    // SAFETY: a barrier.
    check(unsafe {
        syscall(libc::SYS_membarrier, int(MEMBARRIER_RSEQ), int(flags), cpu.unwrap_or(0), 0, 0, 0)
    })
    .map(drop)
}

/// Registers this thread's rseq area.
///
/// # Safety
/// `area` is an rseq area of `len` bytes that stays valid while it is registered.
pub(crate) unsafe fn rseq_register(area: *mut u8, len: usize, signature: u32) -> Result<(), Errno> {
    let area = area.expose_provenance();
    // SAFETY: the caller's promise.
    check(unsafe { syscall(libc::SYS_rseq, area, len, 0, signature as usize, 0, 0) }).map(drop)
}

/// The CPUs that this thread may run on, as a bit set; the result is the number of bytes written.
pub(crate) fn sched_getaffinity(cpus: &mut [usize]) -> Result<usize, Errno> {
    let to = cpus.as_mut_ptr().expose_provenance();
    // SAFETY: the kernel writes at most the length given.
    check(unsafe { syscall(libc::SYS_sched_getaffinity, 0, size_of_val(cpus), to, 0, 0, 0) })
}

// Files

/// One `write(2)`; the result is the number of bytes written.
pub(crate) fn write(fd: i32, bytes: &[u8]) -> Result<usize, Errno> {
    // SAFETY: the kernel reads `bytes`.
    check(unsafe { syscall(libc::SYS_write, int(fd), bytes.as_ptr().addr(), bytes.len(), 0, 0, 0) })
}

/// Opens a file for reading.
pub(crate) fn open(path: &CStr) -> Result<i32, Errno> {
    let flags = int(libc::O_RDONLY | libc::O_CLOEXEC);
    // SAFETY: the kernel reads the path up to its end.
    let fd = check(unsafe {
        syscall(libc::SYS_openat, int(libc::AT_FDCWD), path.as_ptr().addr(), flags, 0, 0, 0)
    })?;
    i32::try_from(fd).map_err(|_| Errno(libc::EBADF))
}

/// Opens a file for appending, made anew and empty, or as it is. A pipe that nobody reads is refused.
pub(crate) fn open_append(path: &CStr, anew: bool) -> Result<i32, Errno> {
    let anew = if anew { libc::O_CREAT | libc::O_TRUNC } else { 0 };
    let flags = int(libc::O_WRONLY | libc::O_APPEND | libc::O_CLOEXEC | libc::O_NONBLOCK | anew);
    let (nr, at) = (libc::SYS_openat, int(libc::AT_FDCWD));
    // SAFETY: the kernel reads the path up to its end.
    let fd = check(unsafe { syscall(nr, at, path.as_ptr().addr(), flags, 0o600, 0, 0) })?;
    i32::try_from(fd).map_err(|_| Errno(libc::EBADF))
}

/// Makes a file of `bytes` zero bytes anew, with memory behind all of it, and maps it for sharing.
pub(crate) fn map_file(path: &CStr, bytes: usize) -> Result<*mut u8, Errno> {
    // Readers may have the old one mapped, and that is none of ours.
    unlink(path);
    let flags =
        int(libc::O_RDWR | libc::O_CREAT | libc::O_EXCL | libc::O_CLOEXEC | libc::O_NOFOLLOW);
    let (nr, at) = (libc::SYS_openat, int(libc::AT_FDCWD));
    // SAFETY: the kernel reads the path up to its end.
    let fd = check(unsafe { syscall(nr, at, path.as_ptr().addr(), flags, 0o600, 0, 0) })?;
    // A file without memory behind it would end a process that writes to it.
    // SAFETY: the descriptor is ours.
    let result =
        check(unsafe { syscall(libc::SYS_fallocate, fd, 0, 0, bytes, 0, 0) }).and_then(|_| {
            let shared = int(libc::MAP_SHARED);
            // SAFETY: a mapping at an address of the kernel's choice.
            check(unsafe { syscall(libc::SYS_mmap, 0, bytes, RW, shared, fd, 0) })
        });
    // SAFETY: the descriptor is ours and not used any more; the mapping stays.
    let _ = unsafe { syscall(libc::SYS_close, fd, 0, 0, 0, 0, 0) };
    result.map(core::ptr::with_exposed_provenance_mut)
}

/// Takes a name away from a file, if there is one.
pub(crate) fn unlink(path: &CStr) {
    let at = int(libc::AT_FDCWD);
    // SAFETY: the kernel reads the path up to its end.
    let _ = unsafe { syscall(libc::SYS_unlinkat, at, path.as_ptr().addr(), 0, 0, 0, 0) };
}

/// Where a symbolic link points to; the number of bytes, at most what `out` holds.
pub(crate) fn read_link(path: &CStr, out: &mut [u8]) -> Result<usize, Errno> {
    let (from, to) = (path.as_ptr().addr(), out.as_mut_ptr().expose_provenance());
    let nr = libc::SYS_readlinkat;
    // SAFETY: the kernel reads the path up to its end and writes at most the length given.
    check(unsafe { syscall(nr, int(libc::AT_FDCWD), from, to, out.len(), 0, 0) })
}

/// Closes a descriptor of ours.
pub(crate) fn close(fd: i32) {
    // SAFETY: the caller does not use it any more.
    let _ = unsafe { syscall(libc::SYS_close, int(fd), 0, 0, 0, 0, 0) };
}

/// One `ioctl(2)`.
///
/// # Safety
/// `argument` is the exposed address of what the request reads and writes, and of all that it points to.
pub(crate) unsafe fn ioctl(fd: i32, request: usize, argument: usize) -> Result<usize, Errno> {
    // SAFETY: as the caller promises.
    check(unsafe { syscall(libc::SYS_ioctl, int(fd), request, argument, 0, 0, 0) })
}

/// One `read(2)`; the result is the number of bytes read, 0 at the end.
pub(crate) fn read(fd: i32, buffer: &mut [u8]) -> Result<usize, Errno> {
    let to = buffer.as_mut_ptr().expose_provenance();
    // SAFETY: the kernel writes at most the length given.
    check(unsafe { syscall(libc::SYS_read, int(fd), to, buffer.len(), 0, 0, 0) })
}

/// Reads a file of any length, piece by piece.
pub(crate) fn read_pieces(path: &CStr, mut each: impl FnMut(&[u8])) -> Result<(), Errno> {
    let fd = open(path)?;
    let mut buffer = [0; 4096];
    let result = loop {
        match read(fd, &mut buffer) {
            Ok(0) => break Ok(()),
            Ok(len) => each(buffer.get(..len).unwrap_or(&[])),
            Err(Errno(libc::EINTR)) => {}
            Err(errno) => break Err(errno),
        }
    };
    close(fd);
    result
}

/// Reads a small file (of `/proc` or `/sys`) up to its end or the end of the buffer; the result
/// is the number of bytes. A full buffer may mean a longer file.
pub(crate) fn read_file(path: &CStr, buffer: &mut [u8]) -> Result<usize, Errno> {
    let fd = open(path)?;
    let mut len = 0;
    let result = loop {
        match read(fd, &mut buffer[len..]) {
            Ok(0) => break Ok(len),
            Ok(more) => len += more,
            Err(Errno(libc::EINTR)) => {}
            Err(errno) => break Err(errno),
        }
    };
    // SAFETY: the descriptor is ours and not used any more.
    let _ = unsafe { syscall(libc::SYS_close, int(fd), 0, 0, 0, 0, 0) };
    result
}

// Signals, the end

/// A set of signals as the kernel has it: bit n - 1 is signal n.
pub(crate) type SignalSet = u64;

fn sigprocmask(how: i32, set: SignalSet) -> SignalSet {
    let mut old = 0;
    let set = (&raw const set).expose_provenance();
    let to = (&raw mut old).expose_provenance();
    // SAFETY: the kernel reads and writes eight bytes each.
    let _ = unsafe {
        syscall(libc::SYS_rt_sigprocmask, int(how), set, to, size_of::<SignalSet>(), 0, 0)
    };
    old
}

/// Blocks every signal, also those that libc keeps for itself; the result is the mask before.
pub(crate) fn block_signals() -> SignalSet {
    sigprocmask(libc::SIG_SETMASK, !0)
}

/// Sets the mask back.
pub(crate) fn restore_signals(mask: SignalSet) {
    sigprocmask(libc::SIG_SETMASK, mask);
}

pub(crate) fn unblock_signal(signal: i32) {
    sigprocmask(libc::SIG_UNBLOCK, 1 << (signal - 1));
}

/// Gives a signal its default action.
pub(crate) fn default_action(signal: i32) {
    // The kernel's struct of four words; an all-zero one is SIG_DFL without flags.
    let action = [0usize; 4];
    let from = action.as_ptr().addr();
    // SAFETY: the kernel reads the struct; no handler stays behind that could be called wrongly.
    let _ = unsafe {
        syscall(libc::SYS_rt_sigaction, int(signal), from, 0, size_of::<SignalSet>(), 0, 0)
    };
}

pub(crate) fn exit_group(code: i32) -> ! {
    loop {
        // SAFETY: ends the process.
        let _ = unsafe { syscall(libc::SYS_exit_group, int(code), 0, 0, 0, 0, 0) };
    }
}

// A thread that libc does not know

/// Stands in for a thread's libc block: code of such a thread that reads the thread pointer, or
/// a stack protector that reads its canary, finds memory there.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct TlsBlock(UnsafeCell<[usize; 2 * TLS_HALF]>);

/// Words on each side of the thread pointer.
const TLS_HALF: usize = 64;

// SAFETY: written by `thread_pointer` only, whose caller has the block to itself.
unsafe impl Sync for TlsBlock {}

impl TlsBlock {
    pub(crate) const fn new() -> Self {
        Self(UnsafeCell::new([0; 2 * TLS_HALF]))
    }

    /// What [`spawn_raw`] takes: the block's middle, which holds its own address twice, as the
    /// x86-64 ABI and glibc have it.
    ///
    /// # Safety
    /// No thread uses the block.
    pub(crate) unsafe fn thread_pointer(&'static self) -> *mut u8 {
        // SAFETY: nobody else looks at the block, says the caller.
        let words = unsafe { &mut *self.0.get() };
        let middle = (&raw mut words[TLS_HALF]).cast::<u8>();
        words[TLS_HALF] = middle.expose_provenance();
        words[TLS_HALF + 2] = middle.addr();
        middle
    }
}

const CLONE: i32 = libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SYSVSEM
    | libc::CLONE_SETTLS
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_CHILD_CLEARTID;

/// Starts a thread that libc does not know, with every signal blocked. `tid` holds its id while
/// it lives and 0 afterwards; the child of a fork has to reset it. The result
/// is the id.
///
/// # Safety
/// `stack_top` is the aligned upper end of a stack, and `thread_pointer` of a [`TlsBlock`], that
/// no thread uses. `entry` accepts `arg`, calls nothing of libc and uses no thread-local variable.
pub(crate) unsafe fn spawn_raw(
    stack_top: *mut u8,
    thread_pointer: *mut u8,
    entry: extern "C" fn(*mut u8),
    arg: *mut u8,
    tid: &'static AtomicU32,
) -> Result<i32, Errno> {
    debug_assert!(stack_top.addr().is_multiple_of(16));
    let frame = stack_top.wrapping_sub(16).cast::<usize>();
    // SAFETY: the stack is ours, and larger than this.
    unsafe {
        frame.cast::<[usize; 2]>().write([entry as *const () as usize, arg.expose_provenance()])
    };
    let mask = block_signals();
    // SAFETY: the frame holds what the new thread pops; the rest is the caller's promise.
    let result = unsafe { clone_thread(frame, thread_pointer, tid.as_ptr()) };
    restore_signals(mask);
    check(result).map(|tid| i32::try_from(tid).unwrap_or(i32::MAX))
}

/// # Safety
/// `frame` is the lower end of a stack's top 16 bytes, which hold a function and its argument.
#[cfg(target_arch = "x86_64")]
unsafe fn clone_thread(frame: *mut usize, thread_pointer: *mut u8, tid: *mut u32) -> isize {
    let result;
    // SAFETY: the new thread has its own stack and leaves by `exit`; the old one sees a system call.
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "pop rax",
            "pop rdi",
            "call rax",
            "xor edi, edi",
            "mov eax, {exit}",
            "syscall",
            "ud2",
            "2:",
            exit = const libc::SYS_exit,
            inlateout("rax") libc::SYS_clone => result,
            in("rdi") int(CLONE), in("rsi") frame, in("rdx") tid, in("r10") tid, in("r8") thread_pointer,
            lateout("rcx") _, lateout("r11") _,
        );
    }
    result
}

/// # Safety
/// `frame` is the lower end of a stack's top 16 bytes, which hold a function and its argument.
#[cfg(target_arch = "aarch64")]
unsafe fn clone_thread(frame: *mut usize, thread_pointer: *mut u8, tid: *mut u32) -> isize {
    let result;
    // SAFETY: the new thread has its own stack and leaves by `exit`; the old one sees a system call.
    unsafe {
        asm!(
            "svc 0",
            "cbnz x0, 2f",
            "mov x29, xzr",
            "mov x30, xzr",
            "ldp x1, x0, [sp], #16",
            "blr x1",
            "mov x0, xzr",
            "mov x8, {exit}",
            "svc 0",
            "brk 1",
            "2:",
            exit = const libc::SYS_exit,
            in("x8") libc::SYS_clone, inlateout("x0") int(CLONE) => result,
            in("x1") frame, in("x2") tid, in("x3") thread_pointer, in("x4") tid,
            // The call is on the other side: here nothing but the link register is in doubt.
            lateout("x30") _,
        );
    }
    result
}

/// The kernel that this process runs on.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Linux;

/// Advises many ranges in as few calls as the kernel allows. Returns how many of the first ranges are
/// done; the one after them was refused.
///
/// # Safety
/// As for [`madvise`], for each range.
unsafe fn advise_all(ranges: &[Range], advice: i32) -> usize {
    /// Before Linux 6.13 the kernel doesn't take this advice from us for ourselves.
    static REFUSED: AtomicBool = AtomicBool::new(false);
    let mut done = 0;
    while done < ranges.len() {
        let rest = &ranges[done..];
        if rest.len() > 1 && !REFUSED.load(Relaxed) {
            // SAFETY: the caller's promise.
            match unsafe { process_madvise(PIDFD_SELF, rest, advice) } {
                Ok(bytes) => done += whole(rest, bytes),
                Err(Errno(libc::ENOSYS | libc::EBADF | libc::EPERM)) => {
                    REFUSED.store(true, Relaxed);
                }
                Err(_) => {}
            }
        }
        // The range that stopped the others is tried alone: its error, if it is one, is its own.
        match ranges.get(done) {
            // SAFETY: the caller's promise.
            Some(r) if unsafe { madvise(r.addr, r.len, advice) }.is_ok() => done += 1,
            _ => break,
        }
    }
    done
}

impl Os for Linux {
    #[inline]
    fn page_size(&self) -> usize {
        start::page_size()
    }

    fn map_at(&self, addr: usize, len: usize) -> Result<(), Errno> {
        // Much of it may never be touched.
        map_fixed_noreplace(addr, len, libc::MAP_NORESERVE)
    }

    unsafe fn purge(&self, addr: usize, len: usize) -> Result<(), Errno> {
        // SAFETY: the caller's promise.
        unsafe { madvise(addr, len, libc::MADV_DONTNEED) }
    }

    unsafe fn purge_all(&self, ranges: &[Range]) -> usize {
        // SAFETY: the caller's promise.
        unsafe { advise_all(ranges, libc::MADV_DONTNEED) }
    }

    unsafe fn purge_lazily(&self, ranges: &[Range]) -> usize {
        // SAFETY: the caller's promise.
        unsafe { advise_all(ranges, libc::MADV_FREE) }
    }

    fn collapse(&self, range: Range) -> Result<(), Errno> {
        // SAFETY: the contents stay as they are.
        unsafe { madvise(range.addr, range.len, libc::MADV_COLLAPSE) }
    }

    fn advise_huge(&self, range: Range, wanted: bool) -> Result<(), Errno> {
        let advice = if wanted { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
        // SAFETY: the contents stay as they are.
        unsafe { madvise(range.addr, range.len, advice) }
    }

    fn map_huge_at(&self, addr: usize, len: usize, lg_page: u32) -> Result<(), Errno> {
        let size = i32::try_from(lg_page).unwrap_or(0) << libc::MAP_HUGE_SHIFT;
        // Reserved: a touch that finds the pool empty would be a SIGBUS.
        map_fixed_noreplace(addr, len, libc::MAP_HUGETLB | size)
    }

    fn resident(&self, addr: usize, len: usize, pages: &mut [u8]) -> Result<(), Errno> {
        mincore(addr, len, pages)
    }

    unsafe fn move_pages(&self, from: usize, to: usize, len: usize) -> Result<(), Errno> {
        // SAFETY: the caller's promise.
        unsafe { move_pages(from, to, len) }
    }

    fn read_file(&self, path: &CStr, buffer: &mut [u8]) -> Result<usize, Errno> {
        read_file(path, buffer)
    }

    fn now_ms(&self) -> u64 {
        now_ms()
    }

    fn now_us(&self) -> u64 {
        now_us()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::boxed::Box;
    use std::vec;

    fn bytes(addr: usize, len: usize) -> &'static mut [u8] {
        // SAFETY: the test maps the range and has it to itself.
        unsafe {
            core::slice::from_raw_parts_mut(core::ptr::with_exposed_provenance_mut(addr), len)
        }
    }

    #[test]
    fn maps_purges_moves_unmaps() {
        let page = Linux.page_size();
        let len = 4 * page;
        let from = crate::os::fake::free_window(1 << 20);
        let to = from + len;
        Linux.map_at(from, len).unwrap();
        Linux.map_at(to, len).unwrap();
        assert_eq!(Linux.map_at(from + page, page), Err(Errno(libc::EEXIST)));
        bytes(from, len).fill(7);
        let mut pages = [0; 4];
        Linux.resident(from, len, &mut pages).unwrap();
        assert!(pages.iter().all(|page| page & 1 == 1));
        // SAFETY: the ranges are the test's.
        unsafe { Linux.move_pages(from, to, len) }.unwrap();
        assert_eq!((bytes(from, len)[0], bytes(to, len)[len - 1]), (0, 7));
        // SAFETY: as above.
        unsafe { Linux.purge(to, len) }.unwrap();
        assert!(bytes(to, len).iter().all(|&byte| byte == 0));
        // SAFETY: as above.
        unsafe { unmap(from, 2 * len) }.unwrap();
        assert_eq!(Linux.resident(from, len, &mut pages), Err(Errno(libc::ENOMEM)));
    }

    #[test]
    fn reads_small_files_and_facts() {
        let mut buffer = [0; 64];
        let len = read_file(c"/proc/self/comm", &mut buffer).unwrap();
        assert_eq!(buffer[..len], std::fs::read("/proc/self/comm").unwrap());
        assert_eq!(read_file(c"/proc/self/comm", &mut buffer[..2]), Ok(2));
        assert_eq!(read_file(c"/nonexistent", &mut buffer), Err(Errno(libc::ENOENT)));
        assert_eq!(getpid().cast_unsigned(), std::process::id());
        let mut cpus = [0; 128];
        let len = sched_getaffinity(&mut cpus).unwrap();
        assert!(len.is_multiple_of(8) && cpus.iter().any(|&word| word != 0));
    }

    #[test]
    fn the_clock_runs() {
        let before = now_ms();
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!((40..5000).contains(&(now_ms() - before)));
    }

    #[test]
    fn sleepers_wake_and_time_out() {
        let word = AtomicU32::new(1);
        assert_eq!(futex_wait(&word, 0, None), Err(Errno(libc::EAGAIN)));
        assert_eq!(futex_wait(&word, 1, Some(5)), Err(Errno(libc::ETIMEDOUT)));
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| futex_wait(&word, 1, Some(60_000)));
            while futex_wake(&word, 1) == 0 {
                yield_now();
            }
            assert_eq!(sleeper.join().unwrap(), Ok(()));
        });
    }

    #[test]
    fn fences_need_registration_only() {
        rseq_fence_register().unwrap();
        rseq_fence(None).unwrap();
        rseq_fence(Some(0)).unwrap();
    }

    /// Sleeps until the thread of [`spawn_raw`] has left its stack.
    fn wait_for_exit(tid: &AtomicU32) {
        loop {
            match tid.load(core::sync::atomic::Ordering::Acquire) {
                0 => return,
                // The kernel's own wake at a thread's end is not a private one.
                id => drop(wait_on(tid, libc::FUTEX_WAIT, id, Some(1000))),
            }
        }
    }

    struct Seen {
        thread_pointer: usize,
        tid: i32,
        mask: SignalSet,
    }

    extern "C" fn look(arg: *mut u8) {
        let seen = Seen {
            thread_pointer: thread_pointer(),
            tid: gettid(),
            mask: sigprocmask(libc::SIG_BLOCK, 0),
        };
        // SAFETY: the test waits for this thread's end before it looks.
        unsafe { arg.cast::<Seen>().write(seen) };
    }

    #[test]
    fn a_raw_thread_runs_and_ends() {
        static TLS: TlsBlock = TlsBlock::new();
        static TID: AtomicU32 = AtomicU32::new(0);
        let mask = sigprocmask(libc::SIG_BLOCK, 0);
        let mut stack = vec![0u128; 4096];
        for _ in 0..100 {
            let seen = Box::into_raw(Box::new(Seen { thread_pointer: 0, tid: 0, mask: 0 }));
            let top = stack.as_mut_ptr_range().end.cast();
            // SAFETY: the thread before has ended; `look` uses nothing of libc.
            let pointer = unsafe { TLS.thread_pointer() };
            // SAFETY: as above.
            let tid = unsafe { spawn_raw(top, pointer, look, seen.cast(), &TID) }.unwrap();
            wait_for_exit(&TID);
            // SAFETY: the thread has ended.
            let seen = unsafe { Box::from_raw(seen) };
            assert_eq!((seen.thread_pointer, seen.tid), (pointer.addr(), tid));
            let never = 1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1);
            assert_eq!(seen.mask, !never);
        }
        assert_eq!(sigprocmask(libc::SIG_BLOCK, 0), mask);
    }
}
