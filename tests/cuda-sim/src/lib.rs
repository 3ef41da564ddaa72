//! A simulated CUDA driver that judges a program.
//!
//! As a library, [`Sim`] is a machine with a table of driver functions and a handle to look into it.
//! As a shared object, put into a folder of `LD_LIBRARY_PATH` under the name `libcuda.so.1`, it is what
//! real bindings load. `THERMALLOC_CUDA_SIM` then describes the machine in words, such as
//! `vram=1g,devices=2,no-pools,no-vmm,no-managed,no-export,mig,stub,version=11040,progress=lazy,seed=7`;
//! functions named `thermalloc_cuda_sim_*` tell of mistakes, leaks and calls. Its kernels are named
//! `touch1` to `touch16` and take for each range an address, a length, a mode and a value.
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
