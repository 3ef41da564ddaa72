//! sync
pub(crate) use core::sync::atomic;
pub(crate) mod lock;
