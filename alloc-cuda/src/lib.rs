//! A stream-ordered pool of CUDA memory.
//!
//! Layers, each knowing only those below: `pool` (which heap serves a request) -> `heap` (blocks and
//! free memory of one stream) -> `bins`, `block`; and `pool` -> `stream` (epochs and events) -> `gpu`
//! (one device) -> `driver`, the one seam to the CUDA driver.
#![allow(clippy::cast_possible_truncation, reason = "usize and addresses of devices have 64 bits")]

mod background;
mod bins;
mod block;
mod capture;
mod chunk_map;
pub mod driver;
#[doc(hidden)]
pub mod fault;
mod gpu;
mod heap;
mod heat;
mod history;
mod oom;
mod pool;
mod stream;

pub use capture::{Capture, GraphMemory, PoolId, StreamFilter};
pub use gpu::Backing;
pub use oom::{AllocError, FreeError, Holder, OutOfMemory, PendingOn};
pub use pool::{OnStream, Pool, PoolBuilder, Reuse, TagGuard};

const _: () = assert!(usize::BITS == 64);
