//! What is hot and what is cold: decisions only, in numbers of pages and milliseconds. `extent`
//! acts on them.
pub(crate) mod decay;
pub(crate) mod demand;
pub(crate) mod regret;
