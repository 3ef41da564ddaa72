//! A simulated CUDA driver that judges a program.
//!
//! As a library, [`Sim`] is a machine with a table of driver functions and a handle to look into it.
//! As a shared object, it is a `libcuda.so.1` that real bindings load.
//!
//! Memory accesses are judged when they are submitted, by vector clocks over streams, events and host
//! waits: a race is found whether or not the run happened to show it. Streams run lazily and honour
//! waits, so polling paths are walked too. Everything follows from the seed.
#![allow(non_snake_case, reason = "the driver's names")]
#![allow(clippy::cast_possible_truncation, reason = "sizes of a simulated machine on 64 bits")]
#![allow(clippy::ptr_as_ptr, reason = "addresses are numbers here")]

mod abi;
mod api;
mod arena;
mod capture;
mod clock;
mod config;
mod enter;
mod ipc;
mod memory;
mod pool;
mod report;
mod rng;
mod shadow;
mod sim;
mod state;
mod stream;

pub use config::{Config, Data, Latency, Progress, can_block};
pub use enter::Probe;
pub use memory::{Access, Mode};
pub use sim::Sim;
pub use state::{Mistake, Violation};
