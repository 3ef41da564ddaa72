//! thermalloc's profile files: a sequence of chunks, each a sequence of records (`docs/profile-format.md`).
//!
//! The allocator writes with this crate, inside `malloc` and with memory of its own; tools read with
//! it. So nothing here allocates, and what is read borrows from the file's bytes.
//!
//! Invariants: a reader accepts any bytes and skips what it does not know; a record is never split
//! over chunks; fields are only ever added at the end of a record's body.
//!
//! ```
//! use thermalloc_prof_format::{ChunkWriter, Record, Records, Step};
//! let mut buffer = [0; 256];
//! let mut chunk = ChunkWriter::new(&mut buffer, 0);
//! assert!(chunk.push(&Record::Step(Step { time_ns: 5, step: 1, thread: 7, flags: 0 })));
//! let file = chunk.finish().unwrap();
//! let steps: usize = Records::new(file).filter(|r| matches!(r, Record::Step(_))).count();
//! assert_eq!(steps, 1);
//! ```
#![cfg_attr(not(test), no_std)]

mod bodies;
mod chunk;
pub mod classes;
mod names;
pub mod page;
mod record;
mod wire;

pub use bodies::{
    Block, Extent, Free, Lifetimes, Lost, Mapping, Opt, Period, Pool, Process, Region, Resize,
    Retag, Site, SnapshotBegin, SnapshotEnd, Stat, Step, System, Tag, Thread, Totals,
};
pub use chunk::{
    CHUNK_HEADER_BYTES, ChunkWriter, Chunks, Damage, MAGIC, MOST_PAYLOAD_BYTES, Records,
};
pub use names::{component, extent_state, source, space};
pub use record::Record;
pub use wire::{Text, Words};
