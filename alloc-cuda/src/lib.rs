//! A stream-ordered pool of CUDA memory.
//!
//! Layers, each knowing only those below: `pool` -> `request` (an allocation, a free) -> `supply` (memory for
//! what the own heap does not serve), `ladder`, `cool` -> `shard` (streams and heaps) -> `heap` (blocks and
//! free memory of one stream) -> `bins`, `block`; and `pool` -> `stream` (events) -> `epochs`, and
//! `gpu` (one device) -> `driver`, the one seam to the CUDA driver.
#![allow(clippy::cast_possible_truncation, reason = "usize and addresses of devices have 64 bits")]

mod background;
mod bins;
mod block;
mod buffer;
mod builder;
mod capture;
mod chunk_map;
mod cool;
mod default_pool;
pub mod driver;
mod epochs;
#[doc(hidden)]
pub mod fault;
mod gpu;
mod heap;
mod heat;
mod history;
mod ipc;
mod ladder;
mod ledger;
mod managed;
mod oom;
mod pinned;
mod pool;
mod recent;
mod record;
mod request;
mod shard;
mod snapshot;
pub mod stats;
mod stream;
mod supply;
mod sync;

pub use buffer::{Borrowed, Buffer, BufferError};
pub use builder::{OnOutOfMemory, PoolBuilder, Reuse};
pub use capture::{Capture, GraphMemory, PoolId, StreamFilter};
pub use default_pool::{DefaultPool, DefaultPoolStats};
pub use gpu::Backing;
pub use ipc::{Export, ExportError, Imported};
pub use ledger::{Entry, Ledger, Space};
pub use managed::{Advice, Managed, Place};
pub use oom::{AllocError, FreeError, Holder, OutOfMemory, PendingOn};
pub use pinned::{PinnedError, PinnedPool, PinnedStats};
pub use pool::{OnStream, Pool, TagGuard};
pub use recent::RecentCall;

const _: () = assert!(usize::BITS == 64);
