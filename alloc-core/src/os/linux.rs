//! Linux: raw system calls only.
