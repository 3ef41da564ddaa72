//! The records: a header of eight bytes (kind, length in words, bytes of the tail), a body of fixed
//! fields, little-endian, and a tail of text or words. The tail ends the record, so that fields may
//! be added to a body: an older reader ignores them, and a newer one reads them as 0 from an older
//! file.

/// A text that a record carries, mostly a name or path: UTF-8 as a rule, but a path can be anything.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Text<'a>(pub &'a [u8]);

impl core::fmt::Debug for Text<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "\"{}\"", self.0.escape_ascii())
    }
}

impl<'a> Text<'a> {
    /// The two parts of a text, of which the first has `bytes` bytes.
    #[must_use]
    pub fn split(self, bytes: u32) -> (Text<'a>, Text<'a>) {
        let (first, second) = self.0.split_at_checked(bytes as usize).unwrap_or((self.0, &[]));
        (Text(first), Text(second))
    }
}

/// Words of 64 bits that a record carries.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Words<'a>(&'a [u8]);

impl<'a> Words<'a> {
    /// The words of `bytes`, little-endian; a rest of less than eight bytes is ignored.
    #[must_use]
    pub fn from_bytes(bytes: &'a [u8]) -> Self {
        Self(bytes.get(..bytes.len() & !7).unwrap_or(&[]))
    }

    /// The words of a slice.
    #[cfg(target_endian = "little")]
    #[must_use]
    pub fn from_slice(words: &'a [u64]) -> Self {
        // SAFETY: the same memory, any byte of which is a `u8`.
        Self(unsafe { core::slice::from_raw_parts(words.as_ptr().cast(), size_of_val(words)) })
    }

    /// How many there are.
    #[must_use]
    pub fn len(self) -> usize {
        self.0.len() / 8
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0.is_empty()
    }

    /// The words in order.
    pub fn iter(self) -> impl ExactSizeIterator<Item = u64> + 'a {
        self.0.chunks_exact(8).map(u64::read)
    }

    /// The words in order as floating-point numbers.
    pub fn floats(self) -> impl ExactSizeIterator<Item = f64> + 'a {
        self.iter().map(f64::from_bits)
    }
}

impl core::fmt::Debug for Words<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// A field of fixed width.
trait Field: Sized {
    const BYTES: usize;
    fn read(bytes: &[u8]) -> Self;
    fn write(&self, to: &mut [u8]);
}

macro_rules! field {
    ($($ty:ty),*) => {$(
        impl Field for $ty {
            const BYTES: usize = size_of::<$ty>();
            fn read(bytes: &[u8]) -> Self {
                bytes.first_chunk().map_or_else(Self::default, |bytes| Self::from_le_bytes(*bytes))
            }
            fn write(&self, to: &mut [u8]) {
                if let Some(to) = to.first_chunk_mut() {
                    *to = self.to_le_bytes();
                }
            }
        }
    )*};
}
field!(u8, u16, u32, u64, f64);

/// What a tail is.
trait Tail<'a> {
    fn bytes(&self) -> &'a [u8];
    fn of(bytes: &'a [u8]) -> Self;
}

impl<'a> Tail<'a> for Text<'a> {
    fn bytes(&self) -> &'a [u8] {
        self.0
    }
    fn of(bytes: &'a [u8]) -> Self {
        Text(bytes)
    }
}

impl<'a> Tail<'a> for Words<'a> {
    fn bytes(&self) -> &'a [u8] {
        self.0
    }
    fn of(bytes: &'a [u8]) -> Self {
        Words::from_bytes(bytes)
    }
}

/// Bytes of a record's header.
const HEADER_BYTES: usize = 8;

macro_rules! records {
    ($(
        $(#[$doc:meta])*
        $kind:literal $variant:ident = $name:ident {
            $($(#[$field_doc:meta])* $field:ident: $ty:ty,)*
            $(@ $(#[$tail_doc:meta])* $tail:ident: $tail_ty:ident,)?
        }
    )*) => {
        $(records!(@struct [$(#[$doc])*] $name { $($(#[$field_doc])* $field: $ty,)* } $($(#[$tail_doc])* $tail: $tail_ty)?);)*

        /// One record.
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub enum Record<'a> {
            $($(#[$doc])* $variant(records!(@ty $name $($tail)?)),)*
            /// One of a later version: its kind and all that follows its header.
            Unknown(u16, &'a [u8]),
        }

        impl<'a> Record<'a> {
            /// Writes the record to the start of `to`; how many bytes, or nothing where they do not fit.
            pub(crate) fn encode(&self, to: &mut [u8]) -> Option<usize> {
                match self {
                    $(Record::$variant(record) => {
                        let tail: &[u8] = [$(record.$tail.bytes(),)? &[]][0];
                        let body_bytes = 0 $(+ <$ty>::BYTES)*;
                        let (bytes, body) = frame(to, $kind, body_bytes, tail)?;
                        let mut at = 0;
                        $(
                            record.$field.write(body.get_mut(at..)?);
                            at += <$ty>::BYTES;
                        )*
                        debug_assert_eq!(at, body_bytes);
                        Some(bytes)
                    })*
                    Record::Unknown(kind, rest) => frame(to, *kind, 0, rest).map(|(bytes, _)| bytes),
                }
            }

            /// The record of these parts.
            pub(crate) fn decode(raw: Raw<'a>) -> Self {
                match raw.kind {
                    $($kind => {
                        let mut at = 0;
                        $(
                            let $field = <$ty>::read(raw.body.get(at..).unwrap_or(&[]));
                            at += <$ty>::BYTES;
                        )*
                        let _ = at;
                        Record::$variant($name { $($field,)* $($tail: Tail::of(raw.tail),)? })
                    })*
                    kind => Record::Unknown(kind, raw.all),
                }
            }
        }
    };
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

records! {
    /// The process: the first record of a file. Also says how monotonic times become wall-clock ones.
    1 Process = Process {
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
    2 Mapping = Mapping {
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
    3 Site = Site {
        /// Its number, from 1. Site 0 is that of blocks whose stack is not known.
        site: u32,
        /// 1: the stack is deeper than the frames; 2: it could not be followed to its end.
        flags: u32,
        @ /// Return addresses, leaf first; the allocator's own frames among them.
        frames: Words,
    }
    /// What a block was allocated for. Comes before the first record that names it, and after its parent.
    4 Tag = Tag {
        /// Its number, from 1. Tag 0 says nothing.
        tag: u32,
        /// The tag of the scope around it, or 0.
        parent: u32,
        /// Where it is from: see [`source`].
        source: u8,
        /// See [`component`]; 0 where nobody said so.
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
    5 Thread = Thread {
        /// Its number in this file.
        thread: u32,
        /// The kernel's id.
        tid: u32,
        @ /// Its name.
        name: Text,
    }
    /// A block that was allocated and recorded.
    6 Alloc = Block {
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
        /// See [`space`].
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
    7 Free = Free {
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
    8 Resize = Resize {
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
    9 Retag = Retag {
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
    10 Step = Step {
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
    11 Period = Period {
        /// When.
        time_ns: u64,
        /// Mean distance of samples, bytes; 0 where every block is recorded.
        period_bytes: u64,
        /// The same among blocks of `exact_bytes` and more; 0: all of them are recorded.
        large_period_bytes: u64,
    }
    /// Something was not recorded.
    12 Lost = Lost {
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
    13 SnapshotBegin = SnapshotBegin {
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
    14 Totals = Totals {
        /// Call stack.
        site: u32,
        /// What for.
        tag: u32,
        /// See [`space`].
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
    /// Snapshot: a recorded block that is live.
    15 Live = LiveBlock {
        /// The block, as when it was allocated, but for what was changed since.
        time_ns: u64,
        /// As in [`Block`].
        serial: u64,
        /// As in [`Block`].
        address: u64,
        /// As in [`Block`].
        size: u64,
        /// As in [`Block`].
        usable: u64,
        /// As in [`Block`].
        weight: f64,
        /// As in [`Block`].
        site: u32,
        /// As in [`Block`].
        tag: u32,
        /// As in [`Block`].
        thread: u32,
        /// As in [`Block`].
        space: u8,
        /// As in [`Block`].
        device: u8,
        /// As in [`Block`].
        flags: u16,
        /// As in [`Block`].
        step: u64,
        /// As in [`Block`].
        stream: u64,
    }
    /// Snapshot: how long the freed blocks of a site lived.
    16 Lifetimes = Lifetimes {
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
    17 Stat = Stat {
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
    18 Extent = Extent {
        /// First address.
        address: u64,
        /// Length.
        bytes: u64,
        /// See [`extent_state`].
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
    19 SnapshotEnd = SnapshotEnd {
        /// When.
        time_ns: u64,
        /// As in [`SnapshotBegin`].
        number: u64,
        /// Records of the snapshot, this one and its beginning included.
        records: u64,
    }
    /// An option in force that is not at its default.
    20 Option = Opt {
        /// Bytes of `text` that are the name; the rest is the value.
        name_bytes: u32,
        /// None yet.
        flags: u32,
        @ /// Name, then value.
        text: Text,
    }
    /// Snapshot: a mapping of the process with memory behind it, as the kernel counts it.
    32 Region = Region {
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
    33 System = System {
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

/// Where a tag is from.
pub mod source {
    /// A scope of the program's.
    pub const SCOPE: u8 = 1;
    /// TensorFlow's annotation of the thread.
    pub const TENSORFLOW: u8 = 2;
    /// A device library, which names the user of its memory.
    pub const DEVICE: u8 = 3;
}

/// What a block is used for.
pub mod component {
    /// By number: what nobody said, then as in the manual.
    pub const NAMES: [&str; 11] = [
        "unknown",
        "weights",
        "activations",
        "gradients",
        "optimizer",
        "kv_cache",
        "workspace",
        "framework",
        "python",
        "loader",
        "other",
    ];
    /// Not said.
    pub const UNKNOWN: u8 = 0;
    /// Parameters of a model.
    pub const WEIGHTS: u8 = 1;
    /// Results of operators.
    pub const ACTIVATIONS: u8 = 2;
    /// Gradients.
    pub const GRADIENTS: u8 = 3;
    /// State of an optimizer.
    pub const OPTIMIZER: u8 = 4;
    /// Keys and values of attention.
    pub const KV_CACHE: u8 = 5;
    /// Scratch memory of operators.
    pub const WORKSPACE: u8 = 6;
    /// The framework's own.
    pub const FRAMEWORK: u8 = 7;
    /// Python objects.
    pub const PYTHON: u8 = 8;
    /// Input data and the pipeline that reads it.
    pub const LOADER: u8 = 9;
    /// None of these.
    pub const OTHER: u8 = 10;

    /// The component of this name.
    #[must_use]
    pub fn find(name: &[u8]) -> Option<u8> {
        let at = NAMES.iter().position(|known| known.as_bytes() == name)?;
        u8::try_from(at).ok()
    }
}

/// Where a block lies.
pub mod space {
    /// Memory of the host, from this allocator.
    pub const HOST: u8 = 0;
    /// Memory of a device.
    pub const DEVICE: u8 = 1;
    /// Memory of the host that a device driver has pinned.
    pub const PINNED: u8 = 2;
    /// Memory that moves between host and device.
    pub const MANAGED: u8 = 3;
}

/// What an extent is.
pub mod extent_state {
    /// By number.
    pub const NAMES: [&str; 7] = ["?", "slab", "block", "large", "sampled", "dirty", "clean"];
    /// A slab of one size class.
    pub const SLAB: u32 = 1;
    /// A block of a size class with pages of its own.
    pub const BLOCK: u32 = 2;
    /// A block above the size classes.
    pub const LARGE: u32 = 3;
    /// A recorded block of a size class, with pages of its own.
    pub const SAMPLED: u32 = 4;
    /// Free, resident.
    pub const DIRTY: u32 = 5;
    /// Free, with no memory behind it.
    pub const CLEAN: u32 = 6;
}

impl From<LiveBlock> for Block {
    fn from(b: LiveBlock) -> Self {
        let LiveBlock { time_ns, serial, address, size, usable, weight, site, tag, .. } = b;
        let LiveBlock { thread, space, device, flags, step, stream, .. } = b;
        Block {
            time_ns,
            serial,
            address,
            size,
            usable,
            weight,
            site,
            tag,
            thread,
            space,
            device,
            flags,
            step,
            stream,
        }
    }
}

impl From<Block> for LiveBlock {
    fn from(b: Block) -> Self {
        let Block { time_ns, serial, address, size, usable, weight, site, tag, .. } = b;
        let Block { thread, space, device, flags, step, stream, .. } = b;
        LiveBlock {
            time_ns,
            serial,
            address,
            size,
            usable,
            weight,
            site,
            tag,
            thread,
            space,
            device,
            flags,
            step,
            stream,
        }
    }
}

/// A record's parts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Raw<'a> {
    kind: u16,
    body: &'a [u8],
    tail: &'a [u8],
    all: &'a [u8],
}

/// The first record of a payload, and the rest; nothing where the lengths make no sense.
pub(crate) fn split(payload: &[u8]) -> Option<(Raw<'_>, &[u8])> {
    let kind = u16::read(payload.get(..2)?);
    let bytes = usize::from(u16::read(payload.get(2..4)?)) * 8;
    let tail_bytes = u32::read(payload.get(4..8)?) as usize;
    let (record, rest) = payload.split_at_checked(bytes)?;
    let all = record.get(HEADER_BYTES..)?;
    let (body, tail) =
        all.split_at_checked(all.len().checked_sub(tail_bytes.checked_next_multiple_of(8)?)?)?;
    Some((Raw { kind, body, tail: tail.get(..tail_bytes)?, all }, rest))
}

/// Writes header and tail of a record; its bytes, and the place of its body.
fn frame<'t>(
    to: &'t mut [u8],
    kind: u16,
    body_bytes: usize,
    tail: &[u8],
) -> Option<(usize, &'t mut [u8])> {
    let body_bytes = body_bytes.next_multiple_of(8);
    let bytes = HEADER_BYTES + body_bytes + tail.len().next_multiple_of(8);
    let words = u16::try_from(bytes / 8).ok()?;
    let tail_bytes = u32::try_from(tail.len()).ok()?;
    let record = to.get_mut(..bytes)?;
    record.fill(0);
    let (header, rest) = record.split_at_mut_checked(HEADER_BYTES)?;
    kind.write(header);
    words.write(header.get_mut(2..)?);
    tail_bytes.write(header.get_mut(4..)?);
    let (body, room) = rest.split_at_mut_checked(body_bytes)?;
    room.get_mut(..tail.len())?.copy_from_slice(tail);
    Some((bytes, body))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip(record: Record<'_>) -> usize {
        let mut buffer = [0xAA; 2048];
        let bytes = record.encode(&mut buffer).unwrap();
        assert_eq!(bytes % 8, 0);
        assert!(record.encode(&mut buffer[..bytes - 1]).is_none(), "it is not cut");
        let (raw, rest) = split(&buffer[..bytes]).unwrap();
        assert!(rest.is_empty());
        assert_eq!(Record::decode(raw), record);
        bytes
    }

    const BLOCK: Block = Block {
        time_ns: 1,
        serial: 2,
        address: 3,
        size: 4,
        usable: 5,
        weight: 1.25,
        site: 7,
        tag: 8,
        thread: 9,
        space: space::PINNED,
        device: 11,
        flags: 12,
        step: 13,
        stream: u64::MAX,
    };

    #[test]
    fn every_kind_comes_back_as_it_was() {
        let frames = [u64::MAX, 0, 0x1234_5678_9ABC];
        let bins = [0.5f64, 0.0, 1e300].map(f64::to_bits);
        let text = Text(b"version /a/path");
        let (words, bins) = (Words::from_slice(&frames), Words::from_slice(&bins));
        let records = [
            Record::Process(Process {
                pid: 1,
                machine: 62,
                time_ns: 3,
                unix_ns: 4,
                period_bytes: 5,
                exact_bytes: 6,
                page_bytes: 4096,
                version_bytes: 8,
                text,
            }),
            Record::Mapping(Mapping {
                start: 1,
                end: 2,
                offset: 3,
                flags: 4,
                build_id_bytes: 5,
                text,
            }),
            Record::Site(Site { site: 1, flags: 2, frames: words }),
            Record::Tag(Tag {
                tag: 1,
                parent: 2,
                source: 3,
                component: 4,
                dtype: 5,
                name_bytes: 7,
                text,
            }),
            Record::Thread(Thread { thread: 1, tid: 2, name: Text(b"") }),
            Record::Alloc(BLOCK),
            Record::Free(Free {
                time_ns: 1,
                serial: 2,
                address: 3,
                born_ns: 4,
                thread: 5,
                flags: 6,
                stream: 7,
            }),
            Record::Resize(Resize {
                time_ns: 1,
                serial: 2,
                address: 3,
                size: 4,
                usable: 5,
                thread: 6,
                flags: 7,
            }),
            Record::Retag(Retag { time_ns: 1, serial: 2, tag: 3, thread: 4 }),
            Record::Step(Step { time_ns: 1, step: 2, thread: 3, flags: 4 }),
            Record::Period(Period { time_ns: 1, period_bytes: 2, large_period_bytes: 3 }),
            Record::Lost(Lost { time_ns: 1, events: 2, blocks: 3, sites: 4 }),
            Record::SnapshotBegin(SnapshotBegin {
                time_ns: 1,
                number: 2,
                step: 3,
                period_bytes: 4,
                large_period_bytes: 5,
                reason: text,
            }),
            Record::Totals(Totals {
                site: 1,
                tag: 2,
                space: 3,
                flags: 4,
                live_blocks: 5,
                live_bytes: 6,
                all_blocks: 7,
                all_bytes: 8,
                weighted_live_blocks: 9.5,
                weighted_live_bytes: 10.5,
                weighted_all_blocks: 11.5,
                weighted_all_bytes: f64::MIN_POSITIVE,
            }),
            Record::Live(BLOCK.into()),
            Record::Lifetimes(Lifetimes { site: 1, tag: 2, time_bins: 2, flags: 4, bins }),
            Record::Stat(Stat { value: 1, unit: 2, flags: 3, name: text }),
            Record::Extent(Extent {
                address: 1,
                bytes: 2,
                state: 3,
                class_bytes: 4,
                slots: 5,
                used: 6,
                resident_bytes_plus_1: 7,
            }),
            Record::SnapshotEnd(SnapshotEnd { time_ns: 1, number: 2, records: 3 }),
            Record::Option(Opt { name_bytes: 1, flags: 2, text }),
        ];
        for (i, record) in records.into_iter().enumerate() {
            round_trip(record);
            let mut buffer = [0; 512];
            record.encode(&mut buffer).unwrap();
            assert_eq!(usize::from(u16::read(&buffer)), i + 1, "the kinds of the manual");
        }
        let region = Region {
            start: 1,
            end: 2,
            resident_bytes: 3,
            shared_bytes: 4,
            anonymous_bytes: 5,
            swap_bytes: 6,
            locked_bytes: 7,
            huge_bytes: 8,
            flags: 9,
            reserved: 10,
            path: text,
        };
        round_trip(Record::Region(region));
        round_trip(Record::System(System {
            resident_bytes: 1,
            peak_resident_bytes: 2,
            swap_bytes: 3,
            locked_bytes: 4,
            pinned_bytes: 5,
            memlock_limit_bytes: u64::MAX,
            memory_bytes: 6,
        }));
        assert_eq!(round_trip(Record::Alloc(BLOCK)), 88);
        assert_eq!(Block::from(LiveBlock::from(BLOCK)), BLOCK);
        assert!(bins.floats().eq([0.5, 0.0, 1e300]));
        assert_eq!(text.split(7), (Text(b"version"), Text(b" /a/path")));
        assert_eq!(text.split(70), (text, Text(b"")));
    }

    #[test]
    fn older_and_newer_records_are_read() {
        let mut buffer = [0; 64];
        // A body that is a word shorter, with a tail, as an older writer might have it.
        let (bytes, body) = frame(&mut buffer, 17, 8, b"name").unwrap();
        body.copy_from_slice(&7u64.to_le_bytes());
        let (raw, _) = split(&buffer[..bytes]).unwrap();
        let short = Record::Stat(Stat { value: 7, unit: 0, flags: 0, name: Text(b"name") });
        assert_eq!(Record::decode(raw), short);
        // One that is a word longer.
        let (bytes, body) = frame(&mut buffer, 17, 24, b"name").unwrap();
        body.fill(1);
        let (raw, _) = split(&buffer[..bytes]).unwrap();
        let ones = u32::from_le_bytes([1; 4]);
        let long = Stat {
            value: u64::from_le_bytes([1; 8]),
            unit: ones,
            flags: ones,
            name: Text(b"name"),
        };
        assert_eq!(Record::decode(raw), Record::Stat(long));
        let (bytes, _) = frame(&mut buffer, 999, 8, b"later").unwrap();
        let (raw, _) = split(&buffer[..bytes]).unwrap();
        assert!(matches!(Record::decode(raw), Record::Unknown(999, all) if all.len() == 16));
    }

    #[test]
    fn lengths_that_make_no_sense_are_refused() {
        assert!(split(&[0; 7]).is_none());
        assert!(split(&[0; 8]).is_none(), "a record of no words would never end");
        let mut header = [0; 16];
        header[2] = 2;
        assert!(split(&header).is_some());
        header[4] = 9;
        assert!(split(&header).is_none(), "a tail longer than the record");
        header[4..8].fill(0xFF);
        assert!(split(&header).is_none());
        let long = vec![0; 8 * 65_536];
        let mut buffer = vec![0; 9 * 65_536];
        let opt = Opt { name_bytes: 0, flags: 0, text: Text(&long) };
        assert!(Record::Option(opt).encode(&mut buffer).is_none());
    }

    #[test]
    fn components_have_names() {
        assert_eq!(component::find(b"kv_cache"), Some(component::KV_CACHE));
        assert_eq!(component::find(b"other"), Some(component::OTHER));
        assert_eq!(component::find(b"nothing"), None);
        assert_eq!(component::NAMES.len(), usize::from(component::OTHER) + 1);
    }
}
