//! The error of an allocation that failed: what was asked for, what there is, and what would help.

use crate::driver::{Error, Stream};
use crate::gpu::Backing;
use std::fmt;

/// Why an allocation failed.
#[derive(Clone, Debug)]
pub enum AllocError {
    /// There is no memory for it, after all that could be done.
    OutOfMemory(Box<OutOfMemory>),
    /// The driver failed for another reason.
    Driver(Error),
    /// The size is beyond any device.
    TooLarge {
        /// The bytes asked for.
        bytes: u64,
    },
}

impl fmt::Display for AllocError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfMemory(report) => report.fmt(f),
            Self::Driver(error) => write!(f, "thermalloc: device memory: {error}"),
            Self::TooLarge { bytes } => {
                write!(f, "thermalloc: device memory: {bytes} bytes are more than any device has")
            }
        }
    }
}

impl std::error::Error for AllocError {}

impl From<Error> for AllocError {
    fn from(error: Error) -> Self {
        Self::Driver(error)
    }
}

impl AllocError {
    /// The report, where memory ran out.
    pub fn out_of_memory(&self) -> Option<&OutOfMemory> {
        match self {
            Self::OutOfMemory(report) => Some(report),
            _ => None,
        }
    }
}

/// Memory that waits for a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PendingOn {
    /// The stream that is not past its last use.
    pub stream: Stream,
    /// How much.
    pub bytes: u64,
}

/// Who has memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The tag that was set when it was allocated, or "untagged".
    pub name: String,
    /// The stream that it was allocated on.
    pub stream: Stream,
    /// Bytes, and blocks.
    pub bytes: u64,
    /// How many blocks.
    pub blocks: u64,
}

/// The state of the device when memory ran out.
#[derive(Clone, Debug)]
pub struct OutOfMemory {
    /// The device.
    pub device: i32,
    /// The bytes asked for, and on which stream.
    pub asked_bytes: u64,
    /// The stream.
    pub stream: Stream,
    /// The largest free block of this pool.
    pub largest_free_bytes: u64,
    /// All free bytes of this pool.
    pub free_bytes: u64,
    /// Bytes handed out.
    pub active_bytes: u64,
    /// Physical memory that this pool has.
    pub reserved_bytes: u64,
    /// Given back, but still in use by a stream.
    pub pending: Vec<PendingOn>,
    /// The most that this pool may have.
    pub limit_bytes: Option<u64>,
    /// Free on the device, whoever asks, and the size of the device; 0 if the driver did not say.
    pub device_free_bytes: u64,
    /// The size of the device.
    pub device_total_bytes: u64,
    /// Used by other processes and by other parts of this one.
    pub others_bytes: u64,
    /// How much of the free memory no block of the size asked for can use, percent.
    pub fragmentation_percent: u64,
    /// Who has most, largest first; at most three.
    pub holders: Vec<Holder>,
    /// Where the memory comes from.
    pub backing: Backing,
    /// Whether waiting for pending memory was allowed.
    pub may_wait: bool,
    /// What would help.
    pub hints: Vec<String>,
}

impl OutOfMemory {
    pub(crate) fn give_hints(&mut self) {
        let pending: u64 = self.pending.iter().map(|entry| entry.bytes).sum();
        let mut hints = Vec::new();
        if let Some(limit) = self.limit_bytes
            && self.reserved_bytes + self.asked_bytes > limit
            && self.device_free_bytes > self.asked_bytes
        {
            hints.push(format!(
                "the pool's own limit of {} is reached while the device has {} free: raise limit_bytes",
                Bytes(limit),
                Bytes(self.device_free_bytes)
            ));
        }
        if pending + self.free_bytes >= self.asked_bytes && pending > 0 {
            hints.push(if self.may_wait {
                "memory that was given back is still used by other streams: synchronise them, or end uses earlier with end_use".to_owned()
            } else {
                "memory that was given back is still used by other streams and waiting is off: set wait_ms, or synchronise".to_owned()
            });
        }
        if self.free_bytes >= self.asked_bytes {
            hints.push(match self.backing {
                Backing::Virtual => "enough is free, but in use order of other streams or in parts of less than 2 MiB: allocate on fewer streams".to_owned(),
                Backing::DriverPool | Backing::Plain => format!(
                    "enough is free but in pieces, and {} cannot join them: allocate the largest blocks first, or use a driver with virtual memory management",
                    self.backing
                ),
            });
        }
        if self.others_bytes > self.device_total_bytes / 4 {
            hints.push(format!(
                "others use {} of the device: other processes, and memory of this one that is not from this pool",
                Bytes(self.others_bytes)
            ));
        }
        if hints.is_empty() {
            hints.push(
                "the blocks in use leave no room: a smaller batch, or a device with more memory"
                    .to_owned(),
            );
        }
        self.hints = hints;
    }
}

/// Bytes for people.
pub(crate) struct Bytes(pub(crate) u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = ["B", "KiB", "MiB", "GiB", "TiB"];
        let unit = (self.0.max(1).ilog2() / 10).min(4);
        if unit == 0 {
            return write!(f, "{} B", self.0);
        }
        let scaled = self.0 as f64 / (1u64 << (10 * unit)) as f64;
        write!(f, "{scaled:.2} {}", units[unit as usize])
    }
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "thermalloc: out of device memory: device {}, stream {:#x}: {} asked for; ",
            self.device,
            self.stream.0,
            Bytes(self.asked_bytes)
        )?;
        write!(
            f,
            "the pool has {} ({} in use, {} free, largest free block {}, fragmentation {} %)",
            Bytes(self.reserved_bytes),
            Bytes(self.active_bytes),
            Bytes(self.free_bytes),
            Bytes(self.largest_free_bytes),
            self.fragmentation_percent
        )?;
        for entry in &self.pending {
            write!(f, "; {} pending on stream {:#x}", Bytes(entry.bytes), entry.stream.0)?;
        }
        write!(
            f,
            "; the device has {} of {} free, others use {}",
            Bytes(self.device_free_bytes),
            Bytes(self.device_total_bytes),
            Bytes(self.others_bytes)
        )?;
        if let Some(limit) = self.limit_bytes {
            write!(f, "; limit {}", Bytes(limit))?;
        }
        for holder in &self.holders {
            write!(
                f,
                "; {} has {} in {} blocks on stream {:#x}",
                holder.name,
                Bytes(holder.bytes),
                holder.blocks,
                holder.stream.0
            )?;
        }
        for hint in &self.hints {
            write!(f, "; hint: {hint}")?;
        }
        Ok(())
    }
}

/// Why a free was refused; the block, if there is one, is as it was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FreeError {
    /// The address is not of this pool.
    NotOurs,
    /// No block starts there.
    NotABlock,
    /// The block is not in use: it was freed before.
    DoubleFree,
}

impl fmt::Display for FreeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotOurs => "thermalloc: free of device memory: the address is not of this pool",
            Self::NotABlock => "thermalloc: free of device memory: no block starts at the address",
            Self::DoubleFree => "thermalloc: free of device memory: the block was freed before",
        })
    }
}

impl std::error::Error for FreeError {}
