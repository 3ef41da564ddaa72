//! What is read of live processes, by their statistics pages (option `stats_page`).
pub(crate) mod page;
mod prometheus;
pub(crate) mod stats;
pub(crate) mod top;
