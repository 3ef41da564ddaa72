//! The background thread.
