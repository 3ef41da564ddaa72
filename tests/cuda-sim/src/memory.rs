//! Memory of the machine: what lies at each address, and what a kernel does to it.
//!
//! Device memory has an address in the arena, which nobody can dereference, and a place in a file,
//! where kernels and copies read and write it: so a mistake of the program never becomes one of ours.
//! Physical addresses are handed out once, so shadow memory never confuses two lives of a page.

use std::ops::Range;

use thermalloc_cuda::driver::{DevicePtr, MemHandle, code, constant};

use crate::clock::{Epoch, Epochs};
use crate::config::Data;
use crate::shadow::Known;
use crate::state::{Mistake, R, State};

/// What lies at an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// `cuMemAlloc`.
    Device,
    /// A block of a memory pool.
    PoolBlock(usize),
    /// Memory of a graph.
    Graph,
    Managed,
    /// `cuMemHostAlloc`.
    Pinned(u32),
    /// `cuMemHostRegister`.
    Registered(u32),
    /// `cuMemMap`.
    Mapped(MemHandle),
    /// Of another process.
    Imported,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Device => "device memory",
            Self::PoolBlock(_) => "pool block",
            Self::Graph => "graph memory",
            Self::Managed => "managed memory",
            Self::Pinned(_) => "pinned memory",
            Self::Registered(_) => "registered memory",
            Self::Mapped(_) => "mapping",
            Self::Imported => "imported memory",
        }
    }
}

/// Where bytes are kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    File { fd: i32, offset: u64 },
    Host { at: u64 },
}

impl Place {
    pub(crate) fn plus(self, bytes: u64) -> Self {
        match self {
            Self::File { fd, offset } => Self::File { fd, offset: offset + bytes },
            Self::Host { at } => Self::Host { at: at + bytes },
        }
    }
}

#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) len: u64,
    pub(crate) kind: Kind,
    pub(crate) place: Place,
    pub(crate) phys: u64,
    pub(crate) device: u32,
    /// A bit for each device that may.
    pub(crate) readable: u32,
    pub(crate) writable: u32,
    pub(crate) uses: Epochs,
    pub(crate) id: u64,
}

/// Memory that was there once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grave {
    pub(crate) end: u64,
    pub(crate) kind: Kind,
}

/// What `cuMemCreate` makes.
#[derive(Debug)]
pub(crate) struct Phys {
    pub(crate) len: u64,
    pub(crate) device: u32,
    pub(crate) base: u64,
    pub(crate) place: Place,
    pub(crate) handle_types: u32,
    pub(crate) handles: u32,
    pub(crate) mappings: u32,
    pub(crate) imported: bool,
}

/// How a kernel uses a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// Reads.
    Read,
    /// Reads, and finds this byte everywhere or reports wrong data.
    Expect(u8),
    /// Writes this byte everywhere.
    Write(u8),
    /// Reads, then writes this byte everywhere.
    Update(u8),
}

/// A range of memory that a kernel uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Access {
    /// First address.
    pub ptr: DevicePtr,
    /// Bytes.
    pub len: u64,
    /// How.
    pub mode: Mode,
}

impl Access {
    /// A read.
    pub fn read(ptr: DevicePtr, len: u64) -> Self {
        Self { ptr, len, mode: Mode::Read }
    }

    /// A read that expects a byte everywhere.
    pub fn expect(ptr: DevicePtr, len: u64, value: u8) -> Self {
        Self { ptr, len, mode: Mode::Expect(value) }
    }

    /// A write of a byte everywhere.
    pub fn write(ptr: DevicePtr, len: u64, value: u8) -> Self {
        Self { ptr, len, mode: Mode::Write(value) }
    }
}

/// A piece of memory that an operation uses when it runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) place: Place,
    pub(crate) len: u64,
}

/// Something that an operation does with bytes.
pub(crate) enum Action {
    Fill { to: Piece, pattern: [u8; 4], edges: bool },
    Expect { from: Piece, value: u8, edges: bool },
    Copy { from: Vec<Piece>, to: Vec<Piece> },
    Store { data: Box<[u8]>, to: Vec<Piece> },
}

pub(crate) fn memfd() -> R<i32> {
    // SAFETY: a valid name.
    let fd = unsafe { libc::memfd_create(c"vram".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(code::ERROR_OPERATING_SYSTEM);
    }
    // SAFETY: our own descriptor. Its holes cost nothing.
    unsafe { libc::ftruncate(fd, 1 << 60) };
    Ok(fd)
}

fn load(piece: Piece, at: u64, buffer: &mut [u8]) {
    match piece.place.plus(at) {
        Place::File { fd, offset } => {
            let pointer = buffer.as_mut_ptr().cast();
            // SAFETY: the buffer is ours, as long as said.
            let read = unsafe { libc::pread(fd, pointer, buffer.len(), offset as i64) };
            debug_assert!(read == buffer.len() as isize);
        }
        // SAFETY: host memory that the program gave us or that we mapped, still registered.
        Place::Host { at } => unsafe {
            std::ptr::copy_nonoverlapping(at as *const u8, buffer.as_mut_ptr(), buffer.len());
        },
    }
}

fn store(piece: Piece, at: u64, buffer: &[u8]) {
    match piece.place.plus(at) {
        Place::File { fd, offset } => {
            let pointer = buffer.as_ptr().cast();
            // SAFETY: the buffer is ours, as long as said.
            let written = unsafe { libc::pwrite(fd, pointer, buffer.len(), offset as i64) };
            debug_assert!(written == buffer.len() as isize);
        }
        // SAFETY: host memory that the program gave us or that we mapped, still registered.
        Place::Host { at } => unsafe {
            std::ptr::copy_nonoverlapping(buffer.as_ptr(), at as *mut u8, buffer.len());
        },
    }
}

const CHUNK: usize = 64 << 10;
const EDGE: u64 = 64;

/// The parts of a piece that are really touched.
fn parts(piece: Piece, edges: bool) -> impl Iterator<Item = Range<u64>> {
    let whole = !edges || piece.len <= 2 * EDGE;
    let (head, tail) =
        if whole { (0..piece.len, 0..0) } else { (0..EDGE, piece.len - EDGE..piece.len) };
    let chunks = move |part: Range<u64>| {
        (part.start..part.end).step_by(CHUNK).map(move |at| at..part.end.min(at + CHUNK as u64))
    };
    chunks(head).chain(chunks(tail))
}

pub(crate) fn perform(action: &Action) -> Result<(), String> {
    match action {
        Action::Fill { to, pattern, edges } => {
            for part in parts(*to, *edges) {
                // Parts begin at multiples of four, but for the tail of a piece that is touched at its edges,
                // which has one value.
                let bytes = pattern.repeat((part.end - part.start).div_ceil(4) as usize);
                let bytes = &bytes[..(part.end - part.start) as usize];
                store(*to, part.start, bytes);
            }
        }
        Action::Expect { from, value, edges } => {
            for part in parts(*from, *edges) {
                let mut bytes = vec![0; (part.end - part.start) as usize];
                load(*from, part.start, &mut bytes);
                if let Some(at) = bytes.iter().position(|byte| byte != value) {
                    let offset = part.start + at as u64;
                    return Err(format!(
                        "expected {value:#x}, found {:#x} at byte {offset}",
                        bytes[at]
                    ));
                }
            }
        }
        Action::Copy { from, to } => {
            let len: u64 = from.iter().map(|piece| piece.len).sum();
            let mut bytes = vec![0; len as usize];
            let mut at = 0;
            for piece in from {
                let end = at + piece.len as usize;
                load(*piece, 0, &mut bytes[at..end]);
                at = end;
            }
            scatter(&bytes, to);
        }
        Action::Store { data, to } => scatter(data, to),
    }
    Ok(())
}

fn scatter(bytes: &[u8], to: &[Piece]) {
    let mut rest = bytes;
    for piece in to {
        let (now, later) = rest.split_at((piece.len as usize).min(rest.len()));
        store(*piece, 0, now);
        rest = later;
    }
}

impl State {
    /// Adds a range of memory. `phys` of 0 takes fresh physical addresses.
    pub(crate) fn add_region(
        &mut self,
        at: u64,
        len: u64,
        kind: Kind,
        device: u32,
        place: Option<Place>,
    ) -> u64 {
        let phys = self.fresh_phys(len);
        let place = place.unwrap_or(Place::File { fd: self.vram_fd, offset: phys });
        let all = u32::MAX;
        self.insert_region(
            at,
            Region {
                len,
                kind,
                place,
                phys,
                device,
                readable: all,
                writable: all,
                uses: Epochs::default(),
                id: 0,
            },
        );
        phys
    }

    pub(crate) fn fresh_phys(&mut self, len: u64) -> u64 {
        let base = self.next_phys;
        self.next_phys += len.next_multiple_of(4096);
        base
    }

    pub(crate) fn insert_region(&mut self, at: u64, mut region: Region) {
        region.id = self.unique() as u64;
        let end = at + region.len;
        let before = self
            .graves
            .range(..at)
            .next_back()
            .filter(|(_, grave)| grave.end > at)
            .map(|(&at, _)| at);
        let inside: Vec<u64> =
            self.graves.range(at..end).map(|(&at, _)| at).chain(before).collect();
        for grave in inside {
            self.graves.remove(&grave);
        }
        self.regions.insert(at, region);
    }

    /// Takes a range of memory away; later accesses to it are told from those to nothing.
    pub(crate) fn bury(&mut self, at: u64) -> Option<Region> {
        let region = self.regions.remove(&at)?;
        self.graves.insert(at, Grave { end: at + region.len, kind: region.kind });
        Some(region)
    }

    pub(crate) fn region_at(&self, at: u64) -> Option<(u64, &Region)> {
        let (&start, region) = self.regions.range(..=at).next_back()?;
        (at < start + region.len).then_some((start, region))
    }

    /// Why there is nothing to free at an address.
    pub(crate) fn bad_free(&mut self, call: &str, at: u64) -> u32 {
        let dead = self.graves.range(..=at).next_back().filter(|(_, grave)| at < grave.end);
        let (mistake, was) = match (dead, self.region_at(at)) {
            (_, Some((start, region))) => (
                Mistake::BadFree,
                format!("{} from {start:#x}, {} bytes", region.kind.name(), region.len),
            ),
            (Some((_, grave)), None) => {
                (Mistake::DoubleFree, format!("{} that is gone", grave.kind.name()))
            }
            (None, None) => (Mistake::BadFree, "never memory".to_owned()),
        };
        self.violate(mistake, format!("{call} of {at:#x}: {was}"));
        code::ERROR_INVALID_VALUE
    }

    /// Judges an access of a stream's operation and gives the pieces that it touches; `None` where some
    /// of it is not memory.
    pub(crate) fn touch(
        &mut self,
        epoch: Epoch,
        ptr: u64,
        len: u64,
        reads: bool,
        writes: bool,
    ) -> Option<Vec<Piece>> {
        let mut pieces = Vec::with_capacity(1);
        let mut at = ptr;
        let end = ptr.saturating_add(len);
        let device = self.streams[epoch.slot as usize].device;
        let bit = 1u32 << device;
        let peers = self.devices[device as usize].peers | bit;
        while at < end {
            let Self { regions, shadow, streams, host, .. } = self;
            let found = regions.range_mut(..=at).next_back();
            let may = |region: &Region| {
                (!reads || region.readable & bit != 0)
                    && (!writes || region.writable & bit != 0)
                    && (region.kind != Kind::Device || peers & 1 << region.device != 0)
            };
            let (start, region) = match found {
                Some((&start, region)) if at < start + region.len && may(region) => (start, region),
                other => {
                    let denied = other.is_some_and(|(&start, region)| at < start + region.len);
                    self.illegal(epoch, at, denied);
                    return None;
                }
            };
            let offset = at - start;
            let part = (end - at).min(region.len - offset);
            let range = region.phys + offset..region.phys + offset + part;
            region.uses.add(epoch);
            pieces.push(Piece { place: region.place.plus(offset), len: part });
            let stream = &streams[epoch.slot as usize];
            let known = Known { stream: &stream.clock, host };
            let conflict = if writes {
                shadow.write(range.clone(), epoch, &known)
            } else {
                shadow.read(range.clone(), epoch, &known)
            };
            if let Some(conflict) = conflict {
                let verb = |wrote| if wrote { "write" } else { "read" };
                let text = format!(
                    "{} of {len} bytes at {ptr:#x} by operation {} of stream {} is not ordered after the {} by operation {} of stream {} (at {:#x}, {})",
                    verb(writes),
                    epoch.seq,
                    stream.number,
                    verb(conflict.earlier_wrote),
                    conflict.earlier.seq,
                    streams[conflict.earlier.slot as usize].number,
                    at + (conflict.at.max(range.start) - range.start),
                    region.kind.name(),
                );
                self.violate(Mistake::Race, text);
            }
            at += part;
        }
        Some(pieces)
    }

    fn illegal(&mut self, epoch: Epoch, at: u64, denied: bool) {
        let number = self.streams[epoch.slot as usize].number;
        let who = format!("operation {} of stream {number} touches {at:#x}", epoch.seq);
        let dead = self
            .graves
            .range(..=at)
            .next_back()
            .filter(|(_, grave)| at < grave.end)
            .map(|(_, grave)| grave.kind);
        match dead {
            _ if denied => {
                self.violate(Mistake::IllegalAddress, format!("{who}: no access was set"))
            }
            Some(kind) => {
                self.violate(Mistake::UseAfterFree, format!("{who}: {} that is gone", kind.name()))
            }
            None => self.violate(Mistake::IllegalAddress, format!("{who}: never memory")),
        }
    }

    /// The actions of a kernel's access, as far as the machine keeps data.
    pub(crate) fn actions(&self, mode: Mode, pieces: &[Piece], into: &mut Vec<Action>) {
        let edges = match self.config.data {
            Data::None => return,
            Data::Edges => true,
            Data::Full => false,
        };
        for &piece in pieces {
            match mode {
                Mode::Read => {}
                Mode::Expect(value) => into.push(Action::Expect { from: piece, value, edges }),
                Mode::Write(value) | Mode::Update(value) => {
                    into.push(Action::Fill { to: piece, pattern: [value; 4], edges });
                }
            }
        }
    }

    /// Judges an access of the host to memory that the device uses too.
    pub(crate) fn host_access(&mut self, ptr: u64, len: u64, writes: bool) {
        let end = ptr + len;
        let mut at = ptr;
        while at < end {
            let Some((start, region)) = self.region_at(at) else {
                return;
            };
            let part = (end - at).min(region.len - (at - start));
            let range = region.phys + (at - start)..region.phys + (at - start) + part;
            let known = Known { stream: &self.host, host: &self.host };
            if let Some(conflict) = self.shadow.judge(range, writes, &known) {
                let number = self.streams[conflict.earlier.slot as usize].number;
                let text = format!(
                    "the host {} {len} bytes at {ptr:#x} before operation {} of stream {number} is known complete",
                    if writes { "writes" } else { "reads" },
                    conflict.earlier.seq
                );
                self.violate(Mistake::Race, text);
                return;
            }
            at += part;
        }
    }

    /// Complains where a range goes away that the device may be using.
    fn check_unused(&mut self, call: &str, at: u64) {
        let Some(region) = self.regions.get(&at) else {
            return;
        };
        let Some(epoch) = region.uses.iter().find(|epoch| !self.host.covers(*epoch)) else {
            return;
        };
        let number = self.streams[epoch.slot as usize].number;
        let text = format!(
            "{call} of {at:#x}, {} bytes: operation {} of stream {number} is not known complete",
            region.len, epoch.seq
        );
        self.violate(Mistake::UnmapInUse, text);
    }

    fn drop_backing(&mut self, phys: Range<u64>, place: Place) {
        self.shadow.forget(phys.clone());
        if self.config.data != Data::None
            && let Place::File { fd, offset } = place
        {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            // SAFETY: our own file. A failure only keeps pages.
            unsafe { libc::fallocate(fd, mode, offset as i64, (phys.end - phys.start) as i64) };
        }
    }

    /// What a block of `cuMemAlloc` takes from the device.
    pub(crate) fn alloc_charge(bytes: u64) -> u64 {
        if bytes > 1 << 20 { bytes.next_multiple_of(2 << 20) } else { bytes.next_multiple_of(512) }
    }

    pub(crate) fn mem_alloc(&mut self, device: u32, bytes: u64, kind: Kind) -> R<DevicePtr> {
        if bytes == 0 {
            return Err(code::ERROR_INVALID_VALUE);
        }
        let charge = Self::alloc_charge(bytes);
        self.charge(device, charge)?;
        let align = if bytes > 1 << 20 { 2 << 20 } else { 512 };
        let Some(at) = self.arena.alloc(charge, align) else {
            self.discharge(device, charge);
            return Err(code::ERROR_OUT_OF_MEMORY);
        };
        self.add_region(at, bytes, kind, device, None);
        Ok(at)
    }

    /// Frees what `mem_alloc` made. The caller has waited for the device.
    pub(crate) fn mem_free(&mut self, at: u64) -> R {
        match self.regions.get(&at).map(|region| region.kind) {
            Some(Kind::Device | Kind::Graph | Kind::Imported) => {}
            Some(Kind::Managed) => return self.free_host_region("cuMemFree", at),
            _ => return Err(self.bad_free("cuMemFree", at)),
        }
        let Some(region) = self.bury(at) else {
            return Ok(());
        };
        let charge = Self::alloc_charge(region.len);
        if region.kind == Kind::Imported {
            // The bytes are another process's.
            self.shadow.forget(region.phys..region.phys + region.len);
        } else {
            self.drop_backing(region.phys..region.phys + region.len, region.place);
            self.discharge(region.device, charge);
        }
        self.arena.free(at, charge);
        Ok(())
    }

    pub(crate) fn host_alloc(&mut self, device: u32, bytes: u64, kind: Kind) -> R<u64> {
        if bytes == 0 {
            return Err(code::ERROR_INVALID_VALUE);
        }
        let pins = matches!(kind, Kind::Pinned(_));
        if pins && self.pinned + bytes > self.config.pinned_limit_bytes {
            return Err(code::ERROR_OUT_OF_MEMORY);
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a fresh mapping.
        let at =
            unsafe { libc::mmap(std::ptr::null_mut(), bytes as usize, protection, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(code::ERROR_OUT_OF_MEMORY);
        }
        let at = at as u64;
        if pins {
            self.pinned += bytes;
        }
        self.add_region(at, bytes, kind, device, Some(Place::Host { at }));
        Ok(at)
    }

    /// Frees host memory that we mapped. The caller has waited for the device.
    pub(crate) fn free_host_region(&mut self, call: &str, at: u64) -> R {
        match self.regions.get(&at).map(|region| region.kind) {
            Some(Kind::Pinned(_)) if call == "cuMemFreeHost" => {}
            Some(Kind::Managed) if call == "cuMemFree" => {}
            _ => return Err(self.bad_free(call, at)),
        }
        if let Some(region) = self.bury(at) {
            self.shadow.forget(region.phys..region.phys + region.len);
            if matches!(region.kind, Kind::Pinned(_)) {
                self.pinned -= region.len;
            }
            // SAFETY: mapped by `host_alloc` with this length.
            unsafe { libc::munmap(at as *mut libc::c_void, region.len as usize) };
        }
        Ok(())
    }

    pub(crate) fn unmap_host_memory(&mut self) {
        let ours = |region: &Region| matches!(region.kind, Kind::Pinned(_) | Kind::Managed);
        for (&at, region) in self.regions.iter().filter(|(_, region)| ours(region)) {
            // SAFETY: mapped by `host_alloc` with this length.
            unsafe { libc::munmap(at as *mut libc::c_void, region.len as usize) };
        }
    }

    pub(crate) fn host_register(&mut self, device: u32, at: u64, bytes: u64, flags: u32) -> R {
        if bytes == 0 || at == 0 {
            return Err(code::ERROR_INVALID_VALUE);
        }
        let before = self.regions.range(..at + bytes).next_back();
        if before.is_some_and(|(&start, region)| start + region.len > at) {
            return Err(code::ERROR_HOST_MEMORY_ALREADY_REGISTERED);
        }
        if self.pinned + bytes > self.config.pinned_limit_bytes {
            return Err(code::ERROR_OUT_OF_MEMORY);
        }
        self.pinned += bytes;
        self.add_region(at, bytes, Kind::Registered(flags), device, Some(Place::Host { at }));
        if flags & constant::MEMHOSTREGISTER_READ_ONLY != 0
            && let Some(region) = self.regions.get_mut(&at)
        {
            region.writable = 0;
        }
        Ok(())
    }

    pub(crate) fn host_unregister(&mut self, at: u64) -> R {
        if !matches!(self.regions.get(&at).map(|region| region.kind), Some(Kind::Registered(_))) {
            self.bad_free("cuMemHostUnregister", at);
            return Err(code::ERROR_HOST_MEMORY_NOT_REGISTERED);
        }
        self.check_unused("cuMemHostUnregister", at);
        // The program may unmap it next.
        for slot in 0..self.streams.len() {
            self.run_what_may(self.last(slot as u32));
        }
        if let Some(region) = self.bury(at) {
            self.pinned -= region.len;
            self.shadow.forget(region.phys..region.phys + region.len);
        }
        Ok(())
    }

    pub(crate) fn address_reserve(&mut self, bytes: u64, align: u64, hint: u64) -> R<u64> {
        let granule = self.config.granularity_bytes;
        if bytes == 0 || !bytes.is_multiple_of(granule) || (align != 0 && !align.is_power_of_two())
        {
            return Err(code::ERROR_INVALID_VALUE);
        }
        let at = if hint != 0 && hint.is_multiple_of(granule) && self.arena.alloc_at(hint, bytes) {
            hint
        } else {
            self.arena.alloc(bytes, align.max(granule)).ok_or(code::ERROR_OUT_OF_MEMORY)?
        };
        self.reservations.insert(at, bytes);
        Ok(at)
    }

    pub(crate) fn address_free(&mut self, at: u64, bytes: u64) -> R {
        if self.reservations.get(&at) != Some(&bytes) {
            self.violate(
                Mistake::BadFree,
                format!("cuMemAddressFree of {at:#x}, {bytes} bytes: not a reservation"),
            );
            return Err(code::ERROR_INVALID_VALUE);
        }
        if self.regions.range(at..at + bytes).next().is_some() {
            self.violate(
                Mistake::BadFree,
                format!("cuMemAddressFree of {at:#x}: something is still mapped there"),
            );
            return Err(code::ERROR_INVALID_VALUE);
        }
        self.reservations.remove(&at);
        self.arena.free(at, bytes);
        Ok(())
    }

    pub(crate) fn mem_create(
        &mut self,
        device: u32,
        bytes: u64,
        handle_types: u32,
    ) -> R<MemHandle> {
        let granule = self.config.granularity_bytes;
        if bytes == 0 || !bytes.is_multiple_of(granule) {
            return Err(code::ERROR_INVALID_VALUE);
        }
        self.charge(device, bytes)?;
        self.now_ns += self.config.latency.create_ns * (bytes / granule - 1);
        let base = self.fresh_phys(bytes);
        let exported = handle_types & constant::MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR != 0;
        let place = if exported {
            let fd = memfd()?;
            self.own_fds.push(fd);
            // SAFETY: our own descriptor. The length tells an importer how much there is.
            unsafe { libc::ftruncate(fd, bytes as i64) };
            Place::File { fd, offset: 0 }
        } else {
            Place::File { fd: self.vram_fd, offset: base }
        };
        let (handles, mappings, imported) = (1, 0, false);
        let phys =
            Phys { len: bytes, device, base, place, handle_types, handles, mappings, imported };
        Ok(self.add_phys(phys))
    }

    pub(crate) fn add_phys(&mut self, phys: Phys) -> MemHandle {
        let handle = 0x4d00_0000_0000 + self.next_handle;
        self.next_handle += 1;
        self.phys.insert(handle, phys);
        handle
    }

    pub(crate) fn mem_release(&mut self, handle: MemHandle) -> R {
        match self.phys.get_mut(&handle) {
            Some(phys) if phys.handles > 0 => {
                phys.handles -= 1;
                self.drop_phys_if_unused(handle);
                Ok(())
            }
            _ => {
                self.violate(
                    Mistake::DoubleFree,
                    format!("cuMemRelease of handle {handle:#x}: it has no reference"),
                );
                Err(code::ERROR_INVALID_VALUE)
            }
        }
    }

    fn drop_phys_if_unused(&mut self, handle: MemHandle) {
        let Some(phys) =
            self.phys.get(&handle).filter(|phys| phys.handles == 0 && phys.mappings == 0)
        else {
            return;
        };
        let (device, len, base, place, imported) =
            (phys.device, phys.len, phys.base, phys.place, phys.imported);
        self.phys.remove(&handle);
        if imported {
            self.shadow.forget(base..base + len);
        } else {
            self.discharge(device, len);
            self.drop_backing(base..base + len, place);
        }
        if let Place::File { fd, .. } = place
            && fd != self.vram_fd
            && self.config.data == Data::None
        {
            self.own_fds.retain(|own| *own != fd);
            // SAFETY: our own descriptor, which no pending operation will use.
            unsafe { libc::close(fd) };
        }
    }

    pub(crate) fn mem_map(&mut self, at: u64, bytes: u64, offset: u64, handle: MemHandle) -> R {
        let granule = self.config.granularity_bytes;
        let Some(phys) = self.phys.get(&handle) else {
            self.violate(
                Mistake::BadHandle,
                format!("cuMemMap of handle {handle:#x}: it does not exist"),
            );
            return Err(code::ERROR_INVALID_VALUE);
        };
        let (base, place, device, len) = (phys.base, phys.place, phys.device, phys.len);
        let whole =
            bytes > 0 && [bytes, offset, at].iter().all(|part| part.is_multiple_of(granule));
        // Drivers take no offset but 0, and the handle as a whole.
        if !whole || offset != 0 || bytes != len {
            return Err(code::ERROR_INVALID_VALUE);
        }
        let reserved = self.reservations.range(..=at).next_back();
        if reserved.is_none_or(|(&start, &len)| at + bytes > start + len) {
            return Err(code::ERROR_INVALID_VALUE);
        }
        let before = self.regions.range(..at + bytes).next_back();
        if before.is_some_and(|(&start, region)| start + region.len > at) {
            self.violate(
                Mistake::BadFree,
                format!("cuMemMap at {at:#x}: something is mapped there"),
            );
            return Err(code::ERROR_ALREADY_MAPPED);
        }
        if let Some(phys) = self.phys.get_mut(&handle) {
            phys.mappings += 1;
        }
        let kind = Kind::Mapped(handle);
        let uses = Epochs::default();
        self.insert_region(
            at,
            Region {
                len: bytes,
                kind,
                place,
                phys: base,
                device,
                readable: 0,
                writable: 0,
                uses,
                id: 0,
            },
        );
        Ok(())
    }

    /// The mappings that fill a range exactly.
    fn mappings_in(&self, at: u64, bytes: u64) -> Option<Vec<u64>> {
        let mut found = Vec::new();
        let mut next = at;
        for (&start, region) in self.regions.range(at..at + bytes) {
            if start != next || !matches!(region.kind, Kind::Mapped(_)) {
                return None;
            }
            next = start + region.len;
            found.push(start);
        }
        (bytes > 0 && next == at + bytes).then_some(found)
    }

    pub(crate) fn mem_unmap(&mut self, at: u64, bytes: u64) -> R {
        let Some(mappings) = self.mappings_in(at, bytes) else {
            return Err(self.bad_free("cuMemUnmap", at));
        };
        for start in mappings {
            self.check_unused("cuMemUnmap", start);
            let Some(region) = self.bury(start) else {
                continue;
            };
            let Kind::Mapped(handle) = region.kind else {
                continue;
            };
            if let Some(phys) = self.phys.get_mut(&handle) {
                phys.mappings -= 1;
            }
            self.drop_phys_if_unused(handle);
        }
        Ok(())
    }

    pub(crate) fn mem_set_access(&mut self, at: u64, bytes: u64, device: u32, flags: u32) -> R {
        let mappings = self.mappings_in(at, bytes).ok_or(code::ERROR_INVALID_VALUE)?;
        let bit = 1u32 << device;
        for start in mappings {
            let Some(region) = self.regions.get_mut(&start) else {
                continue;
            };
            region.readable &= !bit;
            region.writable &= !bit;
            match flags {
                constant::MEM_ACCESS_FLAGS_PROT_NONE => {}
                constant::MEM_ACCESS_FLAGS_PROT_READ => region.readable |= bit,
                constant::MEM_ACCESS_FLAGS_PROT_READWRITE => {
                    region.readable |= bit;
                    region.writable |= bit;
                }
                _ => return Err(code::ERROR_INVALID_VALUE),
            }
        }
        Ok(())
    }
}
