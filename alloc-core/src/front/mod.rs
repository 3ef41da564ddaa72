//! front
pub(crate) mod size_class;
