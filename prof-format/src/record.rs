//! The kinds of records.
use crate::bodies::{
    Block, Body as _, Extent, Free, Lifetimes, Lost, Mapping, Opt, Period, Pool, Process, Region,
    Resize, Retag, Site, SnapshotBegin, SnapshotEnd, Stat, Step, System, Tag, Thread, Totals,
};
use crate::wire::{Raw, frame};

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:literal $variant:ident($body:ty),)*) => {
        /// One record.
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub enum Record<'a> {
            $($(#[$doc])* $variant($body),)*
            /// One of a later version: its kind and all that follows its header.
            Unknown(u16, &'a [u8]),
        }

        impl<'a> Record<'a> {
            /// Writes the record to the start of `to`; how many bytes, or nothing where they do not fit.
            pub(crate) fn encode(&self, to: &mut [u8]) -> Option<usize> {
                match self {
                    $(Record::$variant(body) => body.encode($kind, to),)*
                    Record::Unknown(kind, rest) => frame(to, *kind, 0, rest).map(|(bytes, _)| bytes),
                }
            }

            /// The record of these parts.
            pub(crate) fn decode(raw: Raw<'a>) -> Self {
                match raw.kind {
                    $($kind => Record::$variant(<$body>::decode(raw)),)*
                    kind => Record::Unknown(kind, raw.all),
                }
            }
        }
    };
}

kinds! {
    /// First in a file: the process, and its clock.
    1 Process(Process<'a>),
    /// A mapping with code in it.
    2 Mapping(Mapping<'a>),
    /// A call stack.
    3 Site(Site<'a>),
    /// What blocks are allocated for.
    4 Tag(Tag<'a>),
    /// A thread that allocated.
    5 Thread(Thread<'a>),
    /// Log: a block was allocated.
    6 Alloc(Block),
    /// Log: it was freed.
    7 Free(Free),
    /// Log: it was resized.
    8 Resize(Resize),
    /// Log: it was given another tag.
    9 Retag(Retag),
    /// Log: the program began a step.
    10 Step(Step),
    /// Log: sampling goes on with other periods.
    11 Period(Period),
    /// Something was not recorded.
    12 Lost(Lost),
    /// A dump begins.
    13 SnapshotBegin(SnapshotBegin<'a>),
    /// Dump: what a site allocated under a tag.
    14 Totals(Totals),
    /// Dump: a recorded block that is live, as when it was allocated but for what was changed since.
    15 Live(Block),
    /// Dump: how long the freed blocks of a site lived.
    16 Lifetimes(Lifetimes<'a>),
    /// Dump: a figure of the allocator's.
    17 Stat(Stat<'a>),
    /// Dump: a run of the allocator's pages.
    18 Extent(Extent),
    /// The dump is whole.
    19 SnapshotEnd(SnapshotEnd),
    /// An option that is not at its default.
    20 Option(Opt<'a>),
    /// Dump: what an arena or a pool of device memory holds.
    21 Pool(Pool<'a>),
    /// Dump: a mapping with the memory behind it.
    32 Region(Region<'a>),
    /// Dump: what the system says of the process.
    33 System(System),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space;
    use crate::wire::{Field as _, Text, Words, split};

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
            Record::Live(BLOCK),
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
}
