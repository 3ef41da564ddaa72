//! What the outside asks for. Decisions only; the page layer acts on them.
pub(crate) mod pressure;
pub(crate) mod thp;
