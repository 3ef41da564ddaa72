//! Purging policies, one file each.
//!
//! A policy places blocks in pages of the machine and says when pages go back; the program that
//! touches them is `sim`'s. All of them see the same trace at the page layer: what their caches for
//! small blocks do is left out.

mod glibc;
mod jemalloc;
mod never;
mod tcmalloc;
mod thermalloc;

use std::sync::Arc;

use crate::machine::Machine;

/// The settings of the policy `thermalloc`.
pub type Settings = ::thermalloc::lab::Settings;

/// Where a block lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its first page.
    pub page: usize,
    /// Pages that are its own, at least those asked for.
    pub pages: usize,
}

/// A policy at work on a machine.
pub trait Policy {
    /// Finds pages for a block. `None`: there are none.
    fn alloc(&mut self, pages: usize) -> Option<Place>;
    /// Takes a block back.
    fn free(&mut self, place: Place);
    /// Makes a block longer or shorter where it is. `None`: it stays, and is to be moved.
    fn resize(&mut self, place: Place, pages: usize) -> Option<Place> {
        (pages <= place.pages).then_some(place)
    }
    /// Whether its background thread has reason to wake although it sleeps without a limit.
    fn wants_to_wake(&self) -> bool {
        false
    }
    /// What its background thread does on waking. Returns how long it sleeps then, microseconds;
    /// `None`: without a limit.
    fn wake(&mut self) -> Option<u64> {
        None
    }
    /// What else it has to say at the end.
    fn note(&self) -> Option<String> {
        None
    }
}

/// Which policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// thermalloc's page heap as shipped.
    Thermalloc,
    /// jemalloc as it is by default.
    Jemalloc,
    /// jemalloc with `background_thread:true`.
    JemallocBackground,
    /// gperftools' tcmalloc.
    Tcmalloc,
    /// glibc's malloc.
    Glibc,
    /// Nothing is ever given back.
    Never,
}

/// Every policy.
pub const ALL: [Kind; 6] = [
    Kind::Thermalloc,
    Kind::Jemalloc,
    Kind::JemallocBackground,
    Kind::Tcmalloc,
    Kind::Glibc,
    Kind::Never,
];

impl Kind {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Thermalloc => "thermalloc",
            Self::Jemalloc => "jemalloc",
            Self::JemallocBackground => "jemalloc-bg",
            Self::Tcmalloc => "tcmalloc",
            Self::Glibc => "glibc",
            Self::Never => "never",
        }
    }

    /// The policy of this name.
    #[must_use]
    pub fn by_name(name: &str) -> Option<Self> {
        ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// The policy, on a fresh machine.
    ///
    /// # Panics
    /// Where this process has no address space for the heap's tables.
    #[must_use]
    pub fn start(self, machine: &Arc<Machine>, settings: Settings) -> Box<dyn Policy> {
        let machine = Arc::clone(machine);
        match self {
            Self::Thermalloc => Box::new(thermalloc::Thermalloc::new(machine, settings)),
            Self::Jemalloc => Box::new(jemalloc::Jemalloc::new(machine, false)),
            Self::JemallocBackground => Box::new(jemalloc::Jemalloc::new(machine, true)),
            Self::Tcmalloc => Box::new(tcmalloc::Tcmalloc::new(machine)),
            Self::Glibc => Box::new(glibc::Glibc::new(machine)),
            Self::Never => Box::new(never::Never::default()),
        }
    }
}
