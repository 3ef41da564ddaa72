//! A stream-ordered pool of CUDA memory.
//!
//! `driver` is the one seam to the CUDA driver: everything else calls through its table.

pub mod driver;
