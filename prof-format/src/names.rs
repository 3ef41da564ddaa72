//! The numbers that fields have, and the names of what they stand for.

/// Where a tag is from.
pub mod source {
    /// A scope of the program's.
    pub const SCOPE: u8 = 1;
    /// TensorFlow's annotation of the thread.
    pub const TENSORFLOW: u8 = 2;
    /// A device library, which names the user of its memory.
    pub const DEVICE: u8 = 3;
}

/// What a block is used for.
pub mod component {
    /// By number: what nobody said, then as in the manual.
    pub const NAMES: [&str; 11] = [
        "unknown",
        "weights",
        "activations",
        "gradients",
        "optimizer",
        "kv_cache",
        "workspace",
        "framework",
        "python",
        "loader",
        "other",
    ];
    /// Not said.
    pub const UNKNOWN: u8 = 0;
    /// Parameters of a model.
    pub const WEIGHTS: u8 = 1;
    /// Results of operators.
    pub const ACTIVATIONS: u8 = 2;
    /// Gradients.
    pub const GRADIENTS: u8 = 3;
    /// State of an optimizer.
    pub const OPTIMIZER: u8 = 4;
    /// Keys and values of attention.
    pub const KV_CACHE: u8 = 5;
    /// Scratch memory of operators.
    pub const WORKSPACE: u8 = 6;
    /// The framework's own.
    pub const FRAMEWORK: u8 = 7;
    /// Python objects.
    pub const PYTHON: u8 = 8;
    /// Input data and the pipeline that reads it.
    pub const LOADER: u8 = 9;
    /// None of these.
    pub const OTHER: u8 = 10;

    /// The component of this name.
    #[must_use]
    pub fn find(name: &[u8]) -> Option<u8> {
        let at = NAMES.iter().position(|known| known.as_bytes() == name)?;
        u8::try_from(at).ok()
    }
}

/// Where a block lies.
pub mod space {
    /// Memory of the host, from this allocator.
    pub const HOST: u8 = 0;
    /// Memory of a device.
    pub const DEVICE: u8 = 1;
    /// Memory of the host that a device driver has pinned.
    pub const PINNED: u8 = 2;
    /// Memory that moves between host and device.
    pub const MANAGED: u8 = 3;
}

/// What an extent is.
pub mod extent_state {
    /// By number.
    pub const NAMES: [&str; 7] = ["?", "slab", "block", "large", "sampled", "dirty", "clean"];
    /// A slab of one size class.
    pub const SLAB: u32 = 1;
    /// A block of a size class with pages of its own.
    pub const BLOCK: u32 = 2;
    /// A block above the size classes.
    pub const LARGE: u32 = 3;
    /// A recorded block of a size class, with pages of its own.
    pub const SAMPLED: u32 = 4;
    /// Free, resident.
    pub const DIRTY: u32 = 5;
    /// Free, with no memory behind it.
    pub const CLEAN: u32 = 6;
}
