//! The bodies of records: what each field means. Fields are only ever added at the end of a body.
use crate::wire::{Field as _, Raw, Tail as _, Text, Words, frame};

/// How a body is written and read.
pub(crate) trait Body<'a>: Sized {
    /// Writes a record of `kind` to the start of `to`; how many bytes, or nothing where they do not fit.
    fn encode(&self, kind: u16, to: &mut [u8]) -> Option<usize>;
    /// The body of these parts.
    fn decode(raw: Raw<'a>) -> Self;
}

macro_rules! bodies {
    ($(
        $(#[$doc:meta])*
        $name:ident {
            $($(#[$field_doc:meta])* $field:ident: $ty:ty,)*
            $(@ $(#[$tail_doc:meta])* $tail:ident: $tail_ty:ident,)?
        }
    )*) => {$(
        bodies!(@struct [$(#[$doc])*] $name { $($(#[$field_doc])* $field: $ty,)* } $($(#[$tail_doc])* $tail: $tail_ty)?);

        impl<'a> Body<'a> for bodies!(@ty $name $($tail)?) {
            fn encode(&self, kind: u16, to: &mut [u8]) -> Option<usize> {
                let tail: &[u8] = [$(self.$tail.bytes(),)? &[]][0];
                let body_bytes = 0 $(+ size_of::<$ty>())*;
                let (bytes, body) = frame(to, kind, body_bytes, tail)?;
                let mut at = 0;
                $(
                    self.$field.write(body.get_mut(at..)?);
                    at += size_of::<$ty>();
                )*
                debug_assert_eq!(at, body_bytes);
                Some(bytes)
            }

            fn decode(raw: Raw<'a>) -> Self {
                let mut at = 0;
                $(
                    let $field = <$ty>::read(raw.body.get(at..).unwrap_or(&[]));
                    at += size_of::<$ty>();
                )*
                let _ = at;
                Self { $($field,)* $($tail: $tail_ty::of(raw.tail),)? }
            }
        }
    )*};
    (@struct [$(#[$doc:meta])*] $name:ident { $($(#[$field_doc:meta])* $field:ident: $ty:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $ty,)*
        }
    };
    (@struct [$(#[$doc:meta])*] $name:ident { $($(#[$field_doc:meta])* $field:ident: $ty:ty,)* } $(#[$tail_doc:meta])* $tail:ident: $tail_ty:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        pub struct $name<'a> {
            $($(#[$field_doc])* pub $field: $ty,)*
            $(#[$tail_doc])* pub $tail: $tail_ty<'a>,
        }
    };
    (@ty $name:ident) => { $name };
    (@ty $name:ident $tail:ident) => { $name<'a> };
}

bodies! {
    /// The process: the first record of a file. Also says how monotonic times become wall-clock ones.
    Process {
        /// Process id.
        pid: u32,
        /// ELF's machine number: 62 is x86-64, 183 is AArch64.
        machine: u32,
        /// When the file was begun, nanoseconds of CLOCK_MONOTONIC, which all times of a file are.
        time_ns: u64,
        /// The same moment, nanoseconds since 1970.
        unix_ns: u64,
        /// Mean distance of samples, bytes; 0 where every block is recorded.
        period_bytes: u64,
        /// Blocks of at least this size are all recorded, unless the budget does not allow it.
        exact_bytes: u64,
        /// Bytes of the kernel's page.
        page_bytes: u32,
        /// Bytes of `text` that are the version of the allocator; the rest is the program's path.
        version_bytes: u32,
        @ /// Version, then path.
        text: Text,
    }
    /// A file mapped into the process with code in it, or another mapping that explains addresses.
    Mapping {
        /// First address.
        start: u64,
        /// Address after the last.
        end: u64,
        /// Offset in the file.
        offset: u64,
        /// 1 readable, 2 writable, 4 executable.
        flags: u32,
        /// Bytes of `text` that are the GNU build id; the rest is the file's path.
        build_id_bytes: u32,
        @ /// Build id, then path.
        text: Text,
    }
    /// A call stack. Comes before the first record that names it.
    Site {
        /// Its number, from 1. Site 0 is that of blocks whose stack is not known.
        site: u32,
        /// 1: the stack is deeper than the frames; 2: it could not be followed to its end.
        flags: u32,
        @ /// Return addresses, leaf first; the allocator's own frames among them.
        frames: Words,
    }
    /// What a block was allocated for. Comes before the first record that names it, and after its parent.
    Tag {
        /// Its number, from 1. Tag 0 says nothing.
        tag: u32,
        /// The tag of the scope around it, or 0.
        parent: u32,
        /// Where it is from: see [`source`](crate::source).
        source: u8,
        /// See [`component`](crate::component); 0 where nobody said so.
        component: u8,
        /// TensorFlow: the data type's number.
        dtype: u16,
        /// Bytes of `text` that are the name (a scope's, an operator's); the rest is the region of
        /// TensorFlow (`temp`, `output`, `persist` and the like).
        name_bytes: u32,
        @ /// Name, then region.
        text: Text,
    }
    /// A thread that allocated.
    Thread {
        /// Its number in this file.
        thread: u32,
        /// The kernel's id.
        tid: u32,
        @ /// Its name.
        name: Text,
    }
    /// A block that was allocated and recorded.
    Block {
        /// When.
        time_ns: u64,
        /// Unique in the process: what later records know it by.
        serial: u64,
        /// Its address.
        address: u64,
        /// Bytes asked for.
        size: u64,
        /// Bytes that it may use.
        usable: u64,
        /// How many blocks it stands for, at least 1; so it stands for `weight * size` bytes.
        weight: f64,
        /// Its call stack.
        site: u32,
        /// What for.
        tag: u32,
        /// Who.
        thread: u32,
        /// See [`space`](crate::space).
        space: u8,
        /// Device memory: the device's ordinal.
        device: u8,
        /// 1: was asked to be given back, but a stream still uses it.
        flags: u16,
        /// The program's step at that time, or 0.
        step: u64,
        /// Device memory: the stream.
        stream: u64,
    }
    /// A recorded block that was freed.
    Free {
        /// When.
        time_ns: u64,
        /// Which.
        serial: u64,
        /// Its address.
        address: u64,
        /// When it was allocated.
        born_ns: u64,
        /// By whom.
        thread: u32,
        /// 1: a stream still uses it, and a second record will follow.
        flags: u32,
        /// Device memory: the stream.
        stream: u64,
    }
    /// A recorded block that was resized where it is, or moved with its contents.
    Resize {
        /// When.
        time_ns: u64,
        /// Which.
        serial: u64,
        /// Its address now.
        address: u64,
        /// Bytes asked for now.
        size: u64,
        /// Bytes that it may use now.
        usable: u64,
        /// By whom.
        thread: u32,
        /// None yet.
        flags: u32,
    }
    /// A recorded block that was given another tag.
    Retag {
        /// When.
        time_ns: u64,
        /// Which.
        serial: u64,
        /// The tag from now on.
        tag: u32,
        /// By whom.
        thread: u32,
    }
    /// The program said that a step begins.
    Step {
        /// When.
        time_ns: u64,
        /// Its number.
        step: u64,
        /// The thread that said so.
        thread: u32,
        /// None yet.
        flags: u32,
    }
    /// Sampling goes on with other periods.
    Period {
        /// When.
        time_ns: u64,
        /// Mean distance of samples, bytes; 0 where every block is recorded.
        period_bytes: u64,
        /// The same among blocks of `exact_bytes` and more; 0: all of them are recorded.
        large_period_bytes: u64,
    }
    /// Something was not recorded.
    Lost {
        /// When it was noticed.
        time_ns: u64,
        /// Events that found no room, since the last such record.
        events: u64,
        /// Blocks that were chosen and not recorded: no memory, or the allocator was entered anew by a
        /// signal handler, since the last such record.
        blocks: u64,
        /// Stacks for which the table had no room.
        sites: u64,
    }
    /// A snapshot begins: the state of the ledger while the program runs on.
    SnapshotBegin {
        /// When.
        time_ns: u64,
        /// Counts the snapshots of the process, from 1.
        number: u64,
        /// The program's step.
        step: u64,
        /// As in [`Period`].
        period_bytes: u64,
        /// As in [`Period`].
        large_period_bytes: u64,
        @ /// Why: `exit`, `request`, `interval`, `peak`, `start`.
        reason: Text,
    }
    /// Snapshot: what a site allocated under a tag.
    Totals {
        /// Call stack.
        site: u32,
        /// What for.
        tag: u32,
        /// See [`space`](crate::space).
        space: u32,
        /// None yet.
        flags: u32,
        /// Recorded blocks that are live.
        live_blocks: u64,
        /// Bytes asked for in these.
        live_bytes: u64,
        /// Blocks recorded so far.
        all_blocks: u64,
        /// Bytes asked for in these.
        all_bytes: u64,
        /// Live blocks that these stand for.
        weighted_live_blocks: f64,
        /// Live bytes that these stand for.
        weighted_live_bytes: f64,
        /// Blocks allocated so far that these stand for.
        weighted_all_blocks: f64,
        /// Bytes allocated so far that these stand for.
        weighted_all_bytes: f64,
    }
    /// Snapshot: how long the freed blocks of a site lived.
    Lifetimes {
        /// Call stack.
        site: u32,
        /// What for.
        tag: u32,
        /// How many of the bins are times; the rest are steps.
        time_bins: u32,
        /// None yet.
        flags: u32,
        @ /// Floating-point numbers of blocks. Bin 0 of the times: below 2 us; bin i: from 2^i us to
        /// twice that, the last all above. Bin 0 of the steps: freed in the step that allocated it;
        /// bin i: after 2^(i-1) steps and less than twice that, the last all above.
        bins: Words,
    }
    /// Snapshot: a figure of the allocator's table of statistics.
    Stat {
        /// Its value.
        value: u64,
        /// 0 bytes, 1 count, 2 milliseconds, 3 microseconds, 4 per cent.
        unit: u32,
        /// 1: only goes up.
        flags: u32,
        @ /// Its name in that table.
        name: Text,
    }
    /// Snapshot: a run of pages of the allocator's.
    Extent {
        /// First address.
        address: u64,
        /// Length.
        bytes: u64,
        /// See [`extent_state`](crate::extent_state).
        state: u32,
        /// Slab, block: bytes of the size class.
        class_bytes: u32,
        /// Slab: slots.
        slots: u32,
        /// Slab: slots that are live or in a cache.
        used: u32,
        /// Bytes with memory behind them, plus 1; 0: not known.
        resident_bytes_plus_1: u64,
    }
    /// Snapshot: it is whole.
    SnapshotEnd {
        /// When.
        time_ns: u64,
        /// As in [`SnapshotBegin`].
        number: u64,
        /// Records of the snapshot, this one and its beginning included.
        records: u64,
    }
    /// An option in force that is not at its default.
    Opt {
        /// Bytes of `text` that are the name; the rest is the value.
        name_bytes: u32,
        /// None yet.
        flags: u32,
        @ /// Name, then value.
        text: Text,
    }
    /// Snapshot: what an arena of the host or a pool of device memory holds.
    Pool {
        /// An arena's index, or the pool's number.
        index: u32,
        /// Arenas: threads that are bound to it.
        threads: u32,
        /// Whose memory, see [`space`](crate::space): HOST is an arena.
        space: u8,
        /// Pools: the device's ordinal.
        device: u8,
        /// 1: all automatic arenas together, with the pages that they share; 2: one of them, which has slabs
        /// only.
        flags: u16,
        /// None yet.
        reserved: u32,
        /// Blocks in use, with their rounding. Arenas: those in a cache of a CPU or thread among them.
        live_bytes: u64,
        /// Pools: blocks that were given back, and that a stream still uses.
        pending_bytes: u64,
        /// Free memory: slots of slabs for one of the automatic arenas, else pages too.
        free_bytes: u64,
        /// The memory that it has.
        held_bytes: u64,
        /// The most that it had; 0: not known.
        peak_bytes: u64,
        @ /// Its name.
        name: Text,
    }
    /// Snapshot: a mapping of the process with memory behind it, as the kernel counts it.
    Region {
        /// First address.
        start: u64,
        /// Address after the last.
        end: u64,
        /// Bytes in memory.
        resident_bytes: u64,
        /// Those of them that other processes have mapped too.
        shared_bytes: u64,
        /// Those of them that are no file's.
        anonymous_bytes: u64,
        /// Bytes on swap.
        swap_bytes: u64,
        /// Bytes that may not leave memory.
        locked_bytes: u64,
        /// Bytes in huge pages.
        huge_bytes: u64,
        /// 1 readable, 2 writable, 4 executable, 8 the allocator's pages for blocks, 16 its tables.
        flags: u32,
        /// None yet.
        reserved: u32,
        @ /// The file's path, or the kernel's name in brackets, or nothing.
        path: Text,
    }
    /// Snapshot: what the system says of the process and of its limits; `u64::MAX` is no limit.
    System {
        /// Resident size as the kernel's quick counters have it.
        resident_bytes: u64,
        /// The greatest that it was.
        peak_resident_bytes: u64,
        /// On swap.
        swap_bytes: u64,
        /// Locked into memory.
        locked_bytes: u64,
        /// Pinned by drivers.
        pinned_bytes: u64,
        /// RLIMIT_MEMLOCK.
        memlock_limit_bytes: u64,
        /// Memory of the machine.
        memory_bytes: u64,
    }
}
