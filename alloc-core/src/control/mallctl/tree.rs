//! The names. A leaf says its type, how it is read or written, and how it differs from jemalloc's;
//! `opt.*` and `thermalloc.*` are rows of the tables of options and statistics.

use super::super::jemalloc::{self, Effect};
use super::super::options::{self, Kind, Mutability, OPTIONS};
use super::super::stats;
use super::figures::{self, EXTENTS, HPA_SIZES, LEXTENTS};
use super::{
    ARENAS_ALL, ARENAS_DESTROYED, Act, At, Child, Domain, Done, Error, Got, Leaf, Node, Rows, Type,
};
use crate::arena::bin;
use crate::explicit::{self, ArenaStats, ClassStats, NAME_BYTES, Which};
use crate::front::size_class::{CACHED_MAX, SLAB_CLASSES, SizeClass};
use crate::os::start::page_size;
use crate::{background, prof, tcaches, thread};
use core::ffi::CStr;

use Type::{Bool, Pointer, Size, Ssize, Text, U64, Unsigned, Void};

/// What `version` reads: the release whose names these are, and ours.
const VERSION: &CStr = match CStr::from_bytes_with_nul(
    concat!("5.3.0-0-g0 thermalloc ", env!("CARGO_PKG_VERSION"), "\0").as_bytes(),
) {
    Ok(version) => version,
    Err(_) => panic!("one NUL"),
};

const OWN_VERSION: &CStr =
    match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
        Ok(version) => version,
        Err(_) => panic!("one NUL"),
    };

const fn leaf(name: &'static str, ty: Type, act: Act) -> Child {
    Child { name, node: Node::Leaf(Leaf { ty, act, effect: Effect::Same }) }
}

const fn read(name: &'static str, ty: Type, read: fn(At<'_>) -> Got) -> Child {
    leaf(name, ty, Act::Read(read))
}

const fn both(
    name: &'static str,
    ty: Type,
    read: fn(At<'_>) -> Got,
    write: fn(At<'_>, u64) -> Done,
) -> Child {
    leaf(name, ty, Act::ReadWrite(read, write))
}

const fn run(name: &'static str, run: fn(At<'_>) -> Done) -> Child {
    leaf(name, Void, Act::Run(run))
}

const fn named(name: &'static str, children: &'static [Child]) -> Child {
    Child { name, node: Node::Named(children) }
}

const fn listed(name: &'static str, domain: Domain, children: &'static [Child]) -> Child {
    Child { name, node: Node::Listed(domain, children) }
}

const fn absent(name: &'static str, ty: Type, why: &'static str) -> Child {
    leaf(name, ty, Act::Absent).nothing(why)
}

/// A figure that is always 0.
const fn zero(name: &'static str, ty: Type, why: &'static str) -> Child {
    read(name, ty, |_| Ok(0)).nothing(why)
}

impl Child {
    const fn with(self, effect: Effect) -> Self {
        match self.node {
            Node::Leaf(leaf) => {
                Child { name: self.name, node: Node::Leaf(Leaf { effect, ..leaf }) }
            }
            _ => panic!("a leaf"),
        }
    }

    const fn mapped(self, what: &'static str) -> Self {
        self.with(Effect::Mapped(what))
    }

    const fn nothing(self, why: &'static str) -> Self {
        self.with(Effect::Nothing(why))
    }
}

fn yes(truth: bool) -> Got {
    Ok(u64::from(truth))
}

fn text(text: &'static CStr) -> Got {
    Ok(text.as_ptr().expose_provenance() as u64)
}

fn size(bytes: usize) -> Got {
    Ok(bytes as u64)
}

fn word(at: At<'_>, part: usize) -> usize {
    at.get(part).copied().unwrap_or(0)
}

fn id(value: u64) -> Result<u32, Error> {
    u32::try_from(value).map_err(|_| Error::Fault)
}

impl Domain {
    /// Whether it has an entry of this index.
    pub(super) fn has(self, index: usize) -> bool {
        match self {
            Domain::Arena => {
                index <= explicit::count() as usize
                    || index == ARENAS_ALL
                    || index == ARENAS_DESTROYED
            }
            Domain::CountedArena => match which(index) {
                Ok(Which::One(arena)) => explicit::is_live(arena),
                Ok(Which::All) => true,
                Ok(Which::Destroyed) => explicit::stats(Which::Destroyed).is_some(),
                Err(_) => false,
            },
            Domain::Bin => index < SLAB_CLASSES,
            Domain::Lextent => index < LEXTENTS,
            Domain::Extent => index < EXTENTS,
            Domain::Hpa => index < HPA_SIZES,
        }
    }
}

/// Whom an index in place of an arena's means. That of one past the last has always meant all.
pub(super) fn which(index: usize) -> Result<Which, Error> {
    match index {
        ARENAS_ALL => Ok(Which::All),
        ARENAS_DESTROYED => Ok(Which::Destroyed),
        _ if index == explicit::count() as usize => Ok(Which::All),
        _ => u32::try_from(index).map(Which::One).map_err(|_| Error::Fault),
    }
}

/// The one arena that a name means.
fn one(at: At<'_>) -> Result<u32, Error> {
    match which(word(at, 1))? {
        Which::One(arena) => Ok(arena),
        _ => Err(Error::Fault),
    }
}

fn arena_stats(at: At<'_>, get: fn(&ArenaStats) -> u64) -> Got {
    figures::arena(which(word(at, 2))?, get)
}

fn class_stats(at: At<'_>, first: usize, get: fn(&ClassStats) -> u64) -> Got {
    figures::class(which(word(at, 2))?, first + word(at, 4), get)
}

fn bin_stats(at: At<'_>, get: fn(&ClassStats) -> u64) -> Got {
    class_stats(at, 1, get)
}

fn lextent_stats(at: At<'_>, get: fn(&ClassStats) -> u64) -> Got {
    class_stats(at, SLAB_CLASSES + 1, get)
}

fn extent_stats(at: At<'_>, kind: figures::Free, bytes: bool) -> Got {
    figures::free_pieces(which(word(at, 2))?, word(at, 4), kind, bytes)
}

fn shape(at: At<'_>) -> bin::Shape {
    let class = SizeClass::try_from(word(at, 2) + 1).unwrap_or(1);
    bin::shape(class, page_size())
}

const LOCKS: &str = "Locks keep no statistics.";

static MUTEX: &[Child] = &[
    zero("num_ops", U64, LOCKS),
    zero("num_wait", U64, LOCKS),
    zero("num_spin_acq", U64, LOCKS),
    zero("num_owner_switch", U64, LOCKS),
    zero("total_wait_time", U64, LOCKS),
    zero("max_wait_time", U64, LOCKS),
    zero("max_num_thds", Unsigned, LOCKS),
];

static MUTEXES: &[Child] = &[
    named("background_thread", MUTEX),
    named("max_per_bg_thd", MUTEX),
    named("ctl", MUTEX),
    named("prof", MUTEX),
    named("prof_thds_data", MUTEX),
    named("prof_dump", MUTEX),
    named("prof_recent_alloc", MUTEX),
    named("prof_recent_dump", MUTEX),
    named("prof_stats", MUTEX),
    run("reset", |_| Ok(())).nothing(LOCKS),
];

static ARENA_MUTEXES: &[Child] = &[
    named("large", MUTEX),
    named("extent_avail", MUTEX),
    named("extents_dirty", MUTEX),
    named("extents_muzzy", MUTEX),
    named("extents_retained", MUTEX),
    named("decay_dirty", MUTEX),
    named("decay_muzzy", MUTEX),
    named("base", MUTEX),
    named("tcache_list", MUTEX),
    named("hpa_shard", MUTEX),
    named("hpa_shard_grow", MUTEX),
    named("hpa_sec", MUTEX),
];

const HPA: &str = "There is no second page allocator.";

static HPA_SLABS: &[Child] = &[
    zero("npageslabs_nonhuge", Size, HPA),
    zero("npageslabs_huge", Size, HPA),
    zero("nactive_nonhuge", Size, HPA),
    zero("nactive_huge", Size, HPA),
    zero("ndirty_nonhuge", Size, HPA),
    zero("ndirty_huge", Size, HPA),
];

static HPA_SHARD: &[Child] = &[
    named("full_slabs", HPA_SLABS),
    named("empty_slabs", HPA_SLABS),
    listed("nonfull_slabs", Domain::Hpa, HPA_SLABS),
    zero("npurge_passes", U64, HPA),
    zero("npurges", U64, HPA),
    zero("nhugifies", U64, HPA),
    zero("ndehugifies", U64, HPA),
];

const REQUESTS: &str = "Reads as `nmalloc`: requests that a cache serves are not counted.";
const PURGES: &str = "Reads as `dirty_nmadvise`.";
const MUZZY: &str = "Counted with the dirty ones.";

static SMALL: &[Child] = &[
    read("allocated", Size, |at| arena_stats(at, |s| s.small.allocated)),
    read("nmalloc", U64, |at| arena_stats(at, |s| s.small.nmalloc)),
    read("ndalloc", U64, |at| arena_stats(at, |s| s.small.ndalloc)),
    read("nrequests", U64, |at| arena_stats(at, |s| s.small.nmalloc)).mapped(REQUESTS),
    read("nfills", U64, |at| arena_stats(at, |s| s.small.nfills)),
    read("nflushes", U64, |at| arena_stats(at, |s| s.small.nflushes)),
];

static LARGE: &[Child] = &[
    read("allocated", Size, |at| arena_stats(at, |s| s.large.allocated)),
    read("nmalloc", U64, |at| arena_stats(at, |s| s.large.nmalloc)),
    read("ndalloc", U64, |at| arena_stats(at, |s| s.large.ndalloc)),
    read("nrequests", U64, |at| arena_stats(at, |s| s.large.nmalloc)).mapped(REQUESTS),
    read("nfills", U64, |at| arena_stats(at, |s| s.large.nfills)),
    read("nflushes", U64, |at| arena_stats(at, |s| s.large.nflushes)),
];

static BINS: &[Child] = &[
    read("nmalloc", U64, |at| bin_stats(at, |s| s.nmalloc)),
    read("ndalloc", U64, |at| bin_stats(at, |s| s.ndalloc)),
    read("nrequests", U64, |at| bin_stats(at, |s| s.nmalloc)).mapped(REQUESTS),
    read("curregs", Size, |at| bin_stats(at, |s| s.curregs)),
    read("nfills", U64, |at| bin_stats(at, |s| s.nfills)),
    read("nflushes", U64, |at| bin_stats(at, |s| s.nflushes)),
    read("nslabs", U64, |at| bin_stats(at, |s| s.nslabs)),
    zero("nreslabs", U64, "How often a slab becomes the current one is not counted."),
    read("curslabs", Size, |at| bin_stats(at, |s| s.curslabs)),
    read("nonfull_slabs", Size, |at| bin_stats(at, |s| s.nonfull_slabs)),
    named("mutex", MUTEX),
];

static LEXTENT_FIGURES: &[Child] = &[
    read("nmalloc", U64, |at| lextent_stats(at, |s| s.nmalloc)),
    read("ndalloc", U64, |at| lextent_stats(at, |s| s.ndalloc)),
    read("nrequests", U64, |at| lextent_stats(at, |s| s.nmalloc)).mapped(REQUESTS),
    read("curlextents", Size, |at| lextent_stats(at, |s| s.curregs)),
];

const SHARED: &str =
    "Arena 0 stands for all automatic arenas, which share their pages; 0 for others.";

static EXTENT_FIGURES: &[Child] = &[
    read("ndirty", Size, |at| extent_stats(at, figures::Free::Dirty, false)).mapped(SHARED),
    read("nmuzzy", Size, |at| extent_stats(at, figures::Free::Muzzy, false)).mapped(SHARED),
    read("nretained", Size, |at| extent_stats(at, figures::Free::Clean, false)).mapped(SHARED),
    read("dirty_bytes", Size, |at| extent_stats(at, figures::Free::Dirty, true)).mapped(SHARED),
    read("muzzy_bytes", Size, |at| extent_stats(at, figures::Free::Muzzy, true)).mapped(SHARED),
    read("retained_bytes", Size, |at| extent_stats(at, figures::Free::Clean, true)).mapped(SHARED),
];

static ARENA_FIGURES: &[Child] = &[
    read("nthreads", Unsigned, |at| arena_stats(at, |s| u64::from(s.nthreads)))
        .mapped("Threads bound to it by `thread.arena`: others use the arena of their CPU."),
    read("uptime", U64, |at| arena_stats(at, |s| s.uptime_ns)),
    read("dss", Text, |_| text(c"disabled")).nothing("`sbrk` is never used."),
    read("dirty_decay_ms", Ssize, |at| arena_stats(at, |s| s.dirty_decay_ms.cast_unsigned())),
    read("muzzy_decay_ms", Ssize, |at| arena_stats(at, |s| s.muzzy_decay_ms.cast_unsigned())),
    read("pactive", Size, |at| arena_stats(at, |s| s.pactive)),
    read("pdirty", Size, |at| arena_stats(at, |s| s.pdirty)),
    read("pmuzzy", Size, |at| arena_stats(at, |s| s.pmuzzy)),
    read("mapped", Size, |at| arena_stats(at, |s| s.mapped)),
    read("retained", Size, |at| arena_stats(at, |s| s.retained)),
    zero("extent_avail", Size, "Records of extents are entries of one table."),
    read("dirty_npurge", U64, |at| arena_stats(at, |s| s.dirty_nmadvise)).mapped(PURGES),
    read("dirty_nmadvise", U64, |at| arena_stats(at, |s| s.dirty_nmadvise)),
    read("dirty_purged", U64, |at| arena_stats(at, |s| s.dirty_purged)),
    zero("muzzy_npurge", U64, MUZZY),
    zero("muzzy_nmadvise", U64, MUZZY),
    zero("muzzy_purged", U64, MUZZY),
    read("base", Size, |at| arena_stats(at, |s| s.metadata)),
    zero("internal", Size, "All metadata is `base`."),
    zero("metadata_thp", Size, "Tables are not made huge pages."),
    read("tcache_bytes", Size, |at| match which(word(at, 2))? {
        Which::All => figures::total(|s| s.cached_bytes),
        _ => Ok(0),
    })
    .mapped("Of all arenas together: a cache holds blocks of any."),
    zero("tcache_stashed_bytes", Size, "Freed blocks are not kept aside."),
    read("resident", Size, |at| arena_stats(at, |s| s.resident)),
    zero("abandoned_vm", Size, "No address space is given up."),
    zero("hpa_sec_bytes", Size, HPA),
    named("small", SMALL),
    named("large", LARGE),
    listed("bins", Domain::Bin, BINS),
    listed("lextents", Domain::Lextent, LEXTENT_FIGURES),
    listed("extents", Domain::Extent, EXTENT_FIGURES),
    named("mutexes", ARENA_MUTEXES),
    named("hpa_shard", HPA_SHARD),
];

static STATS: &[Child] = &[
    read("allocated", Size, |_| figures::total(|s| s.allocated_bytes))
        .mapped("Without what is in caches, which jemalloc counts."),
    read("active", Size, |_| figures::total(|s| s.active_bytes)),
    read("metadata", Size, |_| figures::total(|s| s.metadata_bytes)),
    zero("metadata_thp", Size, "Tables are not made huge pages."),
    read("resident", Size, |_| figures::total(|s| s.resident_bytes)),
    read("mapped", Size, |_| {
        figures::total(|s| {
            s.mapped_bytes.saturating_sub(s.retained_bytes).saturating_add(s.metadata_bytes)
        })
    }),
    read("retained", Size, |_| figures::total(|s| s.retained_bytes)),
    named(
        "background_thread",
        &[
            read("num_threads", Size, |_| yes(background::work().is_running)),
            read("num_runs", U64, |_| Ok(background::work().runs)),
            read("run_interval", U64, |_| Ok(background::work().interval_ns)),
        ],
    ),
    named("mutexes", MUTEXES),
    listed("arenas", Domain::CountedArena, ARENA_FIGURES),
    read("zero_reallocs", Size, |_| Ok(super::super::conf::zero_reallocs())),
];

static CONFIG: &[Child] = &[
    read("cache_oblivious", Bool, |_| yes(false)),
    read("debug", Bool, |_| yes(cfg!(debug_assertions))),
    read("fill", Bool, |_| yes(false)),
    read("lazy_lock", Bool, |_| yes(false)),
    read("malloc_conf", Text, |_| text(super::super::conf::BUILT_IN)),
    read("opt_safety_checks", Bool, |_| yes(false)),
    read("prof", Bool, |_| yes(true)),
    read("prof_libgcc", Bool, |_| yes(false)),
    read("prof_libunwind", Bool, |_| yes(false)),
    read("stats", Bool, |_| yes(true)),
    read("utrace", Bool, |_| yes(false)),
    read("xmalloc", Bool, |_| yes(false)),
];

static OPT: Rows = Rows {
    count: || jemalloc::ROWS.len(),
    name: |index| jemalloc::ROWS.get(index).map_or("", |row| row.name),
    leaf: |index| {
        let Some(row) = jemalloc::ROWS.get(index) else {
            return Leaf { ty: Void, act: Act::Absent, effect: Effect::Same };
        };
        let act = if row.readable() { Act::Read(opt) } else { Act::Absent };
        Leaf { ty: row.ty(), act, effect: row.effect() }
    },
};

fn opt(at: At<'_>) -> Got {
    let index = word(at, 1);
    let own = jemalloc::ROWS.get(index).and_then(jemalloc::Row::own);
    if let Some(text) = own.filter(|own| own.kind == Kind::Text).and_then(options::Row::c_text) {
        return Ok(text.expose_provenance() as u64);
    }
    let value = OPTIONS.jemalloc.read(index);
    // The default is a word in the table, and what it stands for is known here.
    let automatic =
        value == 0 && jemalloc::ROWS.get(index).is_some_and(|row| row.name == "narenas");
    Ok(if automatic { u64::from(explicit::auto_count()) } else { value })
}

/// What the counters of a thread are.
const COUNTED: &str =
    "Exact from when the thread first asks for one of its counters ([jemalloc.md](jemalloc.md)).";

static THREAD: &[Child] = &[
    both(
        "arena",
        Unsigned,
        |_| Ok(u64::from(thread::arena())),
        |_, arena| Ok(thread::bind(id(arena)?)?),
    )
    .mapped("An automatic one means the arena of the CPU."),
    read("allocated", U64, |_| Ok(thread::allocated())).mapped(COUNTED),
    read("allocatedp", Pointer, |_| Ok(thread::allocated_place().expose_provenance() as u64))
        .mapped(COUNTED),
    read("deallocated", U64, |_| Ok(thread::deallocated())).mapped(COUNTED),
    read("deallocatedp", Pointer, |_| Ok(thread::deallocated_place().expose_provenance() as u64))
        .mapped(COUNTED),
    named(
        "tcache",
        &[
            both(
                "enabled",
                Bool,
                |_| yes(thread::cache_enabled()),
                |_, enabled| {
                    thread::set_cache_enabled(enabled != 0);
                    Ok(())
                },
            ),
            run("flush", |_| {
                thread::flush_cache();
                Ok(())
            })
            .mapped("The thread's own cache, where it has one: caches belong to CPUs."),
        ],
    ),
    named(
        "peak",
        &[
            read("read", U64, |_| Ok(thread::peak()))
                .mapped("To the byte, above what it was at the last reset, or when the thread first asked for a counter."),
            run("reset", |_| {
                thread::reset_peak();
                Ok(())
            }),
        ],
    ),
    named(
        "prof",
        &[
            absent("name", Text, "Threads have the names that the kernel knows them by: ENOENT."),
            both(
                "active",
                Bool,
                |_| yes(options::prof() && thread::is_profiled()),
                |_, on| {
                    if profiles(on)? {
                        thread::set_profiled(on != 0);
                    }
                    Ok(())
                },
            ),
        ],
    ),
    run("idle", |_| {
        thread::idle();
        Ok(())
    }),
];

static TCACHE: &[Child] = &[
    leaf("create", Unsigned, Act::Create(|_| Ok(u64::from(tcaches::create()?)), false))
        .mapped("It holds blocks of one arena: the first that it serves."),
    leaf("flush", Unsigned, Act::Write(|_, cache| Ok(tcaches::flush(id(cache)?)?))),
    leaf("destroy", Unsigned, Act::Write(|_, cache| Ok(tcaches::destroy(id(cache)?)?))),
];

/// What `arena.<i>.extent_hooks` reads: functions of ours are not for others to call.
#[repr(C)]
struct Hooks([usize; 9]);
static HOOKS: Hooks = Hooks([0; 9]);

/// No bound: the window has one.
const GROW_LIMIT: usize = 1 << 42;

static ARENA: &[Child] = &[
    read("initialized", Bool, |at| match which(word(at, 1))? {
        Which::One(arena) => yes(explicit::is_live(arena)),
        Which::All => yes(true),
        Which::Destroyed => yes(explicit::stats(Which::Destroyed).is_some()),
    }),
    run("decay", |at| Ok(explicit::decay(which(word(at, 1))?)?))
        .mapped("All automatic arenas share their pages: of one means of all."),
    run("purge", |at| Ok(explicit::purge(which(word(at, 1))?)?))
        .mapped("All automatic arenas share their pages: of one means of all."),
    // SAFETY: whoever calls `by_name` uses no block of the arena any more.
    run("reset", |at| Ok(unsafe { explicit::reset(one(at)?) }?)),
    // SAFETY: as above.
    run("destroy", |at| Ok(unsafe { explicit::destroy(one(at)?) }?)),
    leaf(
        "dss",
        Text,
        Act::Word(
            |_| text(c"disabled"),
            |_, word| match word {
                b"disabled" => Ok(()),
                b"primary" | b"secondary" => Err(Error::Fault),
                _ => Err(Error::Invalid),
            },
        ),
    )
    .nothing("`sbrk` is never used: only `disabled` can be set."),
    both("oversize_threshold", Size, |_| Ok(0), |_, _| Ok(()))
        .nothing("Large blocks come from the same warm pages as all others."),
    both(
        "dirty_decay_ms",
        Ssize,
        |at| Ok(explicit::decay_ms(one(at)?)?.0.cast_unsigned()),
        |at, ms| Ok(explicit::set_decay_ms(one(at)?, Some(ms.cast_signed()), None)?),
    )
    .mapped("All automatic arenas share their pages: of one means of all."),
    both(
        "muzzy_decay_ms",
        Ssize,
        |at| Ok(explicit::decay_ms(one(at)?)?.1.cast_unsigned()),
        |at, ms| Ok(explicit::set_decay_ms(one(at)?, None, Some(ms.cast_signed()))?),
    )
    .mapped("All automatic arenas share their pages: of one means of all."),
    both(
        "extent_hooks",
        Pointer,
        |at| {
            explicit::decay_ms(one(at)?)?;
            Ok((&raw const HOOKS).expose_provenance() as u64)
        },
        |_, _| Err(Error::NotPermitted),
    )
    .mapped("Reads a table of null functions; hooks can't be set (EPERM)."),
    both("retain_grow_limit", Size, |_| size(GROW_LIMIT), |_, _| Ok(()))
        .nothing("Memory grows by an eighth, at most 64 MiB at a time."),
    leaf("name", Text, Act::Name(arena_name, |at, name| Ok(explicit::set_name(one(at)?, name)?)))
        .mapped("As in jemalloc's successor: the pointer that is read to points to 32 bytes."),
];

fn arena_name(at: At<'_>) -> Result<[u8; NAME_BYTES], Error> {
    Ok(explicit::name(one(at)?)?)
}

fn decay_option(name: &str, value: u64) -> Done {
    options::find(name)
        .ok_or(Error::NoEntry)?
        .set(value.cast_signed())
        .map_err(|_| Error::Fault)?;
    background::notice();
    Ok(())
}

static ARENAS: &[Child] = &[
    read("narenas", Unsigned, |_| Ok(u64::from(explicit::count()))),
    both(
        "dirty_decay_ms",
        Ssize,
        |_| Ok(options::dirty_decay_ms().cast_unsigned()),
        |_, ms| decay_option("dirty_decay_ms", ms),
    )
    .mapped("Of new arenas, and of the automatic ones at once."),
    both(
        "muzzy_decay_ms",
        Ssize,
        |_| Ok(options::muzzy_decay_ms().cast_unsigned()),
        |_, ms| decay_option("muzzy_decay_ms", ms),
    )
    .mapped("Of new arenas, and of the automatic ones at once."),
    read("quantum", Size, |_| size(16)),
    read("page", Size, |_| size(page_size())),
    read("hugepage", Size, |_| size(2 << 20)),
    read("tcache_max", Size, |_| size(CACHED_MAX)),
    read("nbins", Unsigned, |_| size(SLAB_CLASSES)),
    read("nhbins", Unsigned, |_| size(crate::front::size_class::CLASSES)),
    listed(
        "bin",
        Domain::Bin,
        &[
            read("size", Size, |at| size(figures::class_size(word(at, 2) + 1))),
            read("nregs", Unsigned, |at| size(shape(at).slots)),
            read("slab_size", Size, |at| size(shape(at).bytes)),
            read("nshards", Unsigned, |_| Ok(1)),
        ],
    ),
    read("nlextents", Unsigned, |_| size(LEXTENTS)),
    listed(
        "lextent",
        Domain::Lextent,
        &[read("size", Size, |at| size(figures::class_size(SLAB_CLASSES + 1 + word(at, 2))))
            .mapped(
                "The last stands for all sizes above 1 MiB but 2 MiB itself; they are whole pages.",
            )],
    ),
    leaf(
        "create",
        Unsigned,
        Act::Create(
            |hooks| match hooks {
                Some(hooks) if hooks != 0 => Err(Error::NotPermitted),
                _ => Ok(u64::from(explicit::create()?)),
            },
            true,
        ),
    )
    .mapped("At most 1024 at a time. Hooks can't be set (EPERM)."),
    leaf(
        "lookup",
        Unsigned,
        Act::Ask(|address| {
            let address = usize::try_from(address).map_err(|_| Error::Invalid)?;
            explicit::lookup(address).map(u64::from).ok_or(Error::Invalid)
        }),
    ),
];

/// Whether the process was started with the profiler; an error where something of it is to be switched on
/// that is not there.
fn profiles(on: u64) -> Result<bool, Error> {
    if on != 0 && !options::prof() { Err(Error::NoEntry) } else { Ok(options::prof()) }
}

/// A switch of the profiler's among the options.
fn switch(name: &str) -> Got {
    yes(options::prof() && options::find(name).ok_or(Error::NoEntry)?.get() != 0)
}

fn set_switch(name: &str, on: u64) -> Done {
    if profiles(on)? {
        let row = options::find(name).ok_or(Error::NoEntry)?;
        row.set(on.cast_signed()).map_err(|_| Error::Invalid)?;
        background::notice();
    }
    Ok(())
}

fn dump(_: At<'_>, path: Option<u64>) -> Done {
    profiles(1)?;
    let at = path.and_then(|at| usize::try_from(at).ok()).unwrap_or(0);
    let done = if at == 0 {
        prof::dump_to_prefix()
    } else {
        let path = core::ptr::with_exposed_provenance::<core::ffi::c_char>(at);
        // SAFETY: whoever calls `by_name` writes a C string here.
        prof::dump_heap_v2(unsafe { CStr::from_ptr(path) })
    };
    done.map_err(|_| Error::Fault)
}

fn reset_profile(_: At<'_>, lg_sample: Option<u64>) -> Done {
    profiles(1)?;
    let Some(lg_sample) = lg_sample else { return Ok(()) };
    let row = options::find("lg_prof_sample").ok_or(Error::NoEntry)?;
    // jemalloc takes what is too large for its largest.
    let lg_sample = i64::try_from(lg_sample).unwrap_or(row.max).min(row.max);
    row.set(lg_sample).map_err(|_| Error::Invalid)
}

static PROF: &[Child] = &[
    absent("thread_active_init", Bool, "New threads are always profiled: ENOENT."),
    both("active", Bool, |_| switch("prof_active"), |_, on| set_switch("prof_active", on)),
    leaf("dump", Text, Act::WriteMaybe(dump)).mapped(
        "A file that is named is written in jemalloc's format; else `prof_prefix` and `prof_jeprof` decide.",
    ),
    both("gdump", Bool, |_| switch("prof_gdump"), |_, on| set_switch("prof_gdump", on)),
    absent("prefix", Text, "Set where the process starts, by `prof_prefix`: ENOENT."),
    leaf("reset", Size, Act::WriteMaybe(reset_profile))
        .mapped("Sets the sample rate alone: what is recorded stays."),
    read("interval", U64, |_| {
        let lg = options::lg_prof_interval();
        Ok(if options::prof() && lg > 0 { 1 << lg } else { 0 })
    }),
    read("lg_sample", Size, |_| Ok(options::lg_prof_sample().into())),
    absent("log_start", Text, "The log is the option `prof_events`: ENOENT."),
    absent("log_stop", Void, "The log is the option `prof_events`: ENOENT."),
];

/// Our own options: read, and written where they are live.
static OWN_OPTIONS: Rows = Rows {
    count: || options::ROWS.len(),
    name: |index| options::ROWS.get(index).map_or("", |row| row.name),
    leaf: |index| {
        let Some(row) = options::ROWS.get(index) else {
            return Leaf { ty: Void, act: Act::Absent, effect: Effect::Same };
        };
        let ty = match row.kind {
            Kind::Bool => Bool,
            Kind::Ms => Ssize,
            Kind::Bytes => Size,
            Kind::Count => Unsigned,
            Kind::Text => Text,
            _ => Text,
        };
        let act = match row.mutability {
            Mutability::Live if ty != Text => Act::ReadWrite(own_option, set_own_option),
            _ => Act::Read(own_option),
        };
        Leaf { ty, act, effect: Effect::Same }
    },
};

fn own_option(at: At<'_>) -> Got {
    let row = options::ROWS.get(word(at, 2)).ok_or(Error::NoEntry)?;
    Ok(match row.c_text() {
        Some(text) => text.expose_provenance() as u64,
        None => row.get().cast_unsigned(),
    })
}

fn set_own_option(at: At<'_>, value: u64) -> Done {
    let row = options::ROWS.get(word(at, 2)).ok_or(Error::NoEntry)?;
    row.set(value.cast_signed()).map_err(|_| Error::Invalid)?;
    background::notice();
    Ok(())
}

/// Our own statistics, of the moment that `epoch` fixed; what is measured, of now.
static OWN_STATS: Rows = Rows {
    count: || stats::ROWS.len() + stats::MEASURED.len(),
    name: |index| own_stat(index).map_or("", |row| row.name),
    leaf: |_| Leaf { ty: U64, act: Act::Read(own_figure), effect: Effect::Same },
};

fn own_stat(index: usize) -> Option<&'static stats::Row> {
    stats::ROWS.iter().chain(stats::MEASURED).nth(index)
}

fn own_figure(at: At<'_>) -> Got {
    let row = own_stat(word(at, 2)).ok_or(Error::NoEntry)?;
    figures::row(row)
}

pub(super) static ROOT: &[Child] = &[
    read("version", Text, |_| text(VERSION)).mapped("`5.3.0-0-g0 thermalloc` and its version."),
    leaf(
        "epoch",
        U64,
        Act::WriteRead(
            |_, _| {
                figures::advance();
                Ok(())
            },
            |_| Ok(figures::epoch()),
        ),
    ),
    both(
        "background_thread",
        Bool,
        |_| yes(options::background_thread()),
        |_, on| {
            options::find("background_thread")
                .ok_or(Error::NoEntry)?
                .set(on.cast_signed())
                .map_err(|_| Error::Invalid)?;
            background::notice();
            Ok(())
        },
    )
    .mapped("It begins with the first megabyte of free pages."),
    both(
        "max_background_threads",
        Size,
        |_| Ok(1),
        |_, most| {
            if most == 0 { Err(Error::Invalid) } else { Ok(()) }
        },
    )
    .nothing("There is one, which is enough."),
    named("thread", THREAD),
    named("config", CONFIG),
    Child { name: "opt", node: Node::Rows(&OPT) },
    named("tcache", TCACHE),
    listed("arena", Domain::Arena, ARENA),
    named("arenas", ARENAS),
    named("prof", PROF),
    named("stats", STATS),
    named(
        "thermalloc",
        &[
            read("version", Text, |_| text(OWN_VERSION)),
            Child { name: "options", node: Node::Rows(&OWN_OPTIONS) },
            Child { name: "stats", node: Node::Rows(&OWN_STATS) },
        ],
    ),
];
