//! libthermalloc in the same process: its settings, its ledger, and the pace of its background
//! thread. That thread cannot call a driver, having no libc under it; it wakes one of ours.
//!
//! Invariant: without libthermalloc all of this is nothing, and the pool does it for itself.

use crate::pools;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use thermalloc::control::host::{Companion, DeviceBlock, DevicePool, HostTable};
use thermalloc_cuda_pool::driver::Stream;
use thermalloc_cuda_pool::{Entry, Ledger, Pool, Space};

/// The longest between two looks where the host's background thread is not there.
const WAIT_S: i64 = 1;

/// libthermalloc's table, where the process has that library.
fn table() -> Option<&'static HostTable> {
    static TABLE: OnceLock<Option<&'static HostTable>> = OnceLock::new();
    *TABLE.get_or_init(|| {
        // SAFETY: the name is a C string.
        let symbol = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"thermalloc_host_v1".as_ptr()) };
        // SAFETY: the symbol is that of the host library, which is never unloaded.
        unsafe { HostTable::from_ptr(symbol.cast()) }
    })
}

fn option<T>(name: &str, parse: impl Fn(&str) -> Option<T>) -> Option<T> {
    let mut text = [0; 64];
    parse(table()?.option(name, &mut text)?)
}

/// The host's window.
pub(crate) fn window_ms() -> Option<u64> {
    option("hot_window_ms", |text| text.parse().ok())
}

/// The host's decay; within, `None`: memory never goes by itself.
#[allow(clippy::option_option, reason = "whether there is a host, and what it says")]
pub(crate) fn decay_ms() -> Option<Option<u64>> {
    option("dirty_decay_ms", |text| Some(u64::try_from(text.parse::<i64>().ok()?).ok()))
}

struct HostLedger(&'static HostTable);

impl Ledger for HostLedger {
    fn enter(&self, entry: &Entry<'_>) -> u64 {
        let block = DeviceBlock {
            struct_bytes: size_of::<DeviceBlock>(),
            address: entry.addr,
            size: entry.bytes,
            usable: entry.usable_bytes,
            stream: entry.stream.0 as u64,
            device: u32::try_from(entry.device).unwrap_or(u32::MAX),
            space: match entry.space {
                Space::Device => 1,
                Space::Pinned => 2,
                Space::Managed => 3,
            },
            user: std::ptr::null(),
            user_bytes: 0,
        };
        self.0.device_alloc(&block, entry.tag)
    }

    fn leave(&self, handle: u64, stream: Stream, pending: bool) {
        self.0.device_free(handle, stream.0 as u64, pending);
    }
}

/// The host's ledger.
pub(crate) fn ledger() -> Option<&'static dyn Ledger> {
    static LEDGER: OnceLock<Option<HostLedger>> = OnceLock::new();
    let ledger = LEDGER.get_or_init(|| table().map(HostLedger)).as_ref()?;
    Some(ledger)
}

/// Whether the host's background thread sets the pace; from the first call on, if it is there.
pub(crate) fn paces() -> bool {
    static COMPANION: Companion = Companion::new();
    static PACES: OnceLock<bool> = OnceLock::new();
    *PACES.get_or_init(|| {
        let Some(host) = table() else { return false };
        if !host.companion_add(&COMPANION) {
            return false;
        }
        let thread = std::thread::Builder::new().name("thermalloc-cuda".to_owned());
        thread.spawn(|| follow(COMPANION.looks())).is_ok()
    })
}

/// Lets the pools cool down each time the host's thread looks.
fn follow(looks: &'static AtomicU32) {
    loop {
        let seen = looks.load(Ordering::Relaxed);
        wait(looks, seen);
        // A host that was told to have no thread of its own has none here.
        if looks.load(Ordering::Relaxed) == seen && !has_thread() {
            continue;
        }
        for (pool, chosen) in pools::all() {
            let (mut window, mut decay) = pool.heat();
            if !chosen.window {
                window = window_ms().unwrap_or(window);
            }
            if !chosen.decay {
                decay = decay_ms().unwrap_or(decay);
            }
            pool.set_heat(window, decay);
            pool.poll();
            tell(pool);
        }
    }
}

/// Says what a pool holds, for whoever looks at the process.
fn tell(pool: &Pool) {
    let Some(host) = table() else { return };
    let stats = pool.stats();
    let device = u32::try_from(pool.ordinal()).unwrap_or(u32::MAX);
    let row = DevicePool {
        struct_bytes: size_of::<DevicePool>(),
        id: std::ptr::from_ref(pool).addr() as u64,
        device,
        space: 1,
        live_bytes: stats.active_bytes,
        pending_bytes: stats.pending_bytes,
        free_bytes: stats.free_bytes,
        held_bytes: stats.reserved_bytes,
        // 0 would say that the pool is no more.
        peak_bytes: stats.reserved_peak_bytes.max(1),
        name: std::ptr::null(),
        name_bytes: 0,
    };
    // Where there is no room for one more pool, this one is not seen.
    let _ = host.device_pool(&row, "");
}

fn has_thread() -> bool {
    option("background_thread", |text| Some(text == "true")).unwrap_or(false)
}

fn wait(word: &AtomicU32, seen: u32) {
    let most = libc::timespec { tv_sec: WAIT_S, tv_nsec: 0 };
    let op = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the word and the time live for the call; early returns are allowed for.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), op, seen, &raw const most) };
}
