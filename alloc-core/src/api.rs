//! The entry points: allocate, resize, free.
//!
//! Every function is callable from any thread at any time from the first instruction of the
//! process on. Sizes and alignments are bytes; a null result means out of memory.
