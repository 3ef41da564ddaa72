//! front
pub(crate) mod size_class;
pub(crate) mod transfer;
