//! A block: a range of addresses that is in one state. The blocks of a region lie side by side
//! without a gap; one cache line each, linked by number.

/// Number of a block within its heap; 0 is none.
pub(crate) type BlockId = u32;

/// What a block is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum State {
    /// The number is not in use.
    #[default]
    Unused,
    /// Backed by memory and free, in the order of the heap's stream.
    Free,
    /// Handed out.
    Active,
    /// Given back, but work on another stream may still use it.
    Pending,
    /// Its memory is reached through a stitched block.
    Lent,
    /// Somebody maps or unmaps it at this moment.
    Busy,
    /// Addresses without memory.
    Gap,
}

/// A range of addresses.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct Block {
    pub(crate) addr: u64,
    pub(crate) bytes: u64,
    /// What the user asked for.
    pub(crate) requested: u64,
    /// The heap's stream is past it once this epoch is complete; of free blocks.
    pub(crate) stamp: u64,
    /// Neighbours in the region.
    pub(crate) prev: BlockId,
    pub(crate) next: BlockId,
    /// Neighbours in a list of free blocks.
    pub(crate) bin_prev: BlockId,
    pub(crate) bin_next: BlockId,
    pub(crate) region: u32,
    /// The stream in whose order it is used; of active blocks.
    pub(crate) user: u32,
    pub(crate) tag: u32,
    pub(crate) state: State,
    /// Whether uses on further streams are noted.
    pub(crate) shared: bool,
}

const _: () = assert!(size_of::<Block>() == 64);
