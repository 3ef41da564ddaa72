//! The numbers that fields have, and the names of what they stand for.
//!
//! Invariant: a number once given keeps its meaning; numbers of a module count up from 0.

macro_rules! numbered {
    ($(
        $(#[$module_doc:meta])*
        $module:ident: $ty:ty {
            $($(#[$doc:meta])* $constant:ident = $number:literal $name:literal,)*
        }
    )*) => {$(
        $(#[$module_doc])*
        pub mod $module {
            $($(#[$doc])* pub const $constant: $ty = $number;)*

            /// How many there are.
            pub const COUNT: usize = [$($number),*].len();
            /// The names by number.
            pub const NAMES: [&str; COUNT] = [$($name),*];

            /// The name of a number; that of 0 where a later version has it.
            #[must_use]
            pub fn name(number: $ty) -> &'static str {
                usize::try_from(number).ok().and_then(|at| NAMES.get(at)).unwrap_or(&NAMES[0])
            }

            /// The number of this name.
            #[must_use]
            pub fn find(name: &[u8]) -> Option<$ty> {
                let at = NAMES.iter().position(|known| known.as_bytes() == name)?;
                <$ty>::try_from(at).ok()
            }
        }
    )*};
}

numbered! {
    /// Where a tag is from.
    source: u8 {
        /// Nobody.
        NONE = 0 "none",
        /// A scope of the program's.
        SCOPE = 1 "scope",
        /// TensorFlow's annotation of the thread.
        TENSORFLOW = 2 "tensorflow",
        /// A device library, which names the user of its memory.
        DEVICE = 3 "device",
    }

    /// What a block is used for.
    component: u8 {
        /// Not said.
        UNKNOWN = 0 "unknown",
        /// Parameters of a model.
        WEIGHTS = 1 "weights",
        /// Results of operators.
        ACTIVATIONS = 2 "activations",
        /// Gradients.
        GRADIENTS = 3 "gradients",
        /// State of an optimizer.
        OPTIMIZER = 4 "optimizer",
        /// Keys and values of attention.
        KV_CACHE = 5 "kv_cache",
        /// Scratch memory of operators.
        WORKSPACE = 6 "workspace",
        /// The framework's own.
        FRAMEWORK = 7 "framework",
        /// Python objects.
        PYTHON = 8 "python",
        /// Input data and the pipeline that reads it.
        LOADER = 9 "loader",
        /// None of these.
        OTHER = 10 "other",
    }

    /// Where a block lies.
    space: u8 {
        /// Memory of the host, from this allocator.
        HOST = 0 "host",
        /// Memory of a device.
        DEVICE = 1 "device",
        /// Memory of the host that a device driver has pinned.
        PINNED = 2 "pinned",
        /// Memory that moves between host and device.
        MANAGED = 3 "managed",
    }

    /// What an extent is.
    extent_state: u32 {
        /// Not said.
        UNKNOWN = 0 "?",
        /// A slab of one size class.
        SLAB = 1 "slab",
        /// A block of a size class with pages of its own.
        BLOCK = 2 "block",
        /// A block above the size classes.
        LARGE = 3 "large",
        /// A recorded block of a size class, with pages of its own.
        SAMPLED = 4 "sampled",
        /// Free, resident.
        DIRTY = 5 "dirty",
        /// Free, with no memory behind it.
        CLEAN = 6 "clean",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_names_and_names_numbers() {
        assert_eq!(component::find(b"kv_cache"), Some(component::KV_CACHE));
        assert_eq!(component::find(b"other"), Some(component::OTHER));
        assert_eq!(component::find(b"nothing"), None);
        assert_eq!(component::COUNT, usize::from(component::OTHER) + 1);
        assert_eq!((component::name(1), component::name(200)), ("weights", "unknown"));
        assert_eq!(extent_state::name(extent_state::CLEAN), "clean");
        assert_eq!(extent_state::find(b"sampled"), Some(extent_state::SAMPLED));
        assert_eq!((space::name(space::PINNED), source::name(source::SCOPE)), ("pinned", "scope"));
    }
}
