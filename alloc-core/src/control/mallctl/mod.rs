//! Control by name, as jemalloc's `mallctl`: a tree of names, whose leaves are read, written or run.
//!
//! A name is looked up to a list of indices (a MIB), one for each of its parts; a caller may change an
//! index in it and use it again. Invariants: nothing here allocates; an unknown name or index is
//! [`Error::NoEntry`], whatever it is; a refused call has changed nothing.

mod figures;
mod tree;

pub(crate) use self::figures::{extent_bytes, lock};
use super::jemalloc::Effect;
use crate::explicit::NAME_BYTES;
use crate::os::Errno;

/// An index in place of an arena's that means all of them.
pub const ARENAS_ALL: usize = 4096;
/// An index in place of an arena's that means those that were destroyed.
pub const ARENAS_DESTROYED: usize = 4097;
/// The most parts that a name has.
pub const DEPTH_MAX: usize = 7;

/// Why a call was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Error {
    /// Nothing has this name, or not in this build.
    NoEntry,
    /// It can't be read, or can't be written.
    NotPermitted,
    /// The value has another size, or is none that is allowed.
    Invalid,
    /// There is no memory for it.
    Again,
    /// It could not be done: for example, the arena is none that can be destroyed.
    Fault,
}

impl Error {
    /// The error number.
    #[must_use]
    pub fn code(self) -> i32 {
        match self {
            Error::NoEntry => libc::ENOENT,
            Error::NotPermitted => libc::EPERM,
            Error::Invalid => libc::EINVAL,
            Error::Again => libc::EAGAIN,
            Error::Fault => libc::EFAULT,
        }
    }
}

impl core::fmt::Display for Error {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Error::NoEntry => "no such name",
            Error::NotPermitted => "not to be read, or not to be written",
            Error::Invalid => "a value of another type, or not allowed",
            Error::Again => "out of memory",
            Error::Fault => "not possible now",
        })
    }
}

impl core::error::Error for Error {}

impl From<Errno> for Error {
    fn from(errno: Errno) -> Self {
        match errno.0 {
            libc::ENOENT => Error::NoEntry,
            libc::EPERM => Error::NotPermitted,
            libc::EINVAL => Error::Invalid,
            libc::EAGAIN | libc::ENOMEM => Error::Again,
            _ => Error::Fault,
        }
    }
}

/// A value's type, as C has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Type {
    Void,
    Bool,
    /// `unsigned`, which is also `uint32_t`.
    Unsigned,
    Size,
    Ssize,
    U64,
    I64,
    /// `const char *`.
    Text,
    /// Another pointer.
    Pointer,
}

impl Type {
    pub(crate) fn bytes(self) -> usize {
        match self {
            Type::Void => 0,
            Type::Bool => 1,
            Type::Unsigned => 4,
            _ => 8,
        }
    }

    #[cfg(test)]
    pub(crate) fn c_name(self) -> &'static str {
        match self {
            Type::Void => "void",
            Type::Bool => "bool",
            Type::Unsigned => "unsigned",
            Type::Size => "size_t",
            Type::Ssize => "ssize_t",
            Type::U64 => "uint64_t",
            Type::I64 => "int64_t",
            Type::Text => "const char *",
            Type::Pointer => "pointer",
        }
    }
}

/// A value, or why there is none: the bits of its type, zeros above.
type Got = Result<u64, Error>;
type Done = Result<(), Error>;
/// The indices of a name.
type At<'a> = &'a [usize];

/// What a leaf does.
#[derive(Clone, Copy, Debug)]
enum Act {
    Read(fn(At<'_>) -> Got),
    /// The value before the write is what is read.
    ReadWrite(fn(At<'_>) -> Got, fn(At<'_>, u64) -> Done),
    /// The value after the write is what is read.
    WriteRead(fn(At<'_>, u64) -> Done, fn(At<'_>) -> Got),
    Write(fn(At<'_>, u64) -> Done),
    /// As that, and a value need not be given.
    WriteMaybe(fn(At<'_>, Option<u64>) -> Done),
    Run(fn(At<'_>) -> Done),
    /// Reads the id of something new; where true, a pointer may be given.
    Create(fn(Option<u64>) -> Got, bool),
    /// Reads an answer to the pointer that is written.
    Ask(fn(u64) -> Got),
    /// An arena's name, which is copied to where the pointer that is read to points.
    Name(fn(At<'_>) -> Result<[u8; NAME_BYTES], Error>, fn(At<'_>, &[u8]) -> Done),
    /// A text that is set by a text.
    Word(fn(At<'_>) -> Got, fn(At<'_>, &[u8]) -> Done),
    /// Part of something that this build lacks.
    Absent,
}

/// The end of a name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Leaf {
    pub(crate) ty: Type,
    act: Act,
    /// How it differs from jemalloc's.
    #[cfg_attr(not(test), allow(dead_code, reason = "for the manual"))]
    pub(crate) effect: Effect,
}

/// What the indices of a list are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Domain {
    Arena,
    /// One with statistics.
    CountedArena,
    Bin,
    Lextent,
    /// A size of free pieces.
    Extent,
    /// jemalloc's sizes of partly used huge pages.
    Hpa,
}

/// The rows of a table as leaves.
#[derive(Debug)]
pub(crate) struct Rows {
    count: fn() -> usize,
    name: fn(usize) -> &'static str,
    leaf: fn(usize) -> Leaf,
}

#[derive(Debug)]
enum Node {
    Named(&'static [Child]),
    /// Each index has these children.
    Listed(Domain, &'static [Child]),
    Rows(&'static Rows),
    Leaf(Leaf),
}

#[derive(Debug)]
pub(crate) struct Child {
    name: &'static str,
    node: Node,
}

/// Where a lookup has come to.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    Names(&'static [Child]),
    List(Domain, &'static [Child]),
    Table(&'static Rows),
    End(Leaf),
}

impl Place {
    pub(crate) const ROOT: Place = Place::Names(tree::ROOT);

    fn of(node: &'static Node) -> Self {
        match node {
            Node::Named(children) => Place::Names(children),
            Node::Listed(domain, children) => Place::List(*domain, children),
            Node::Rows(rows) => Place::Table(rows),
            Node::Leaf(leaf) => Place::End(*leaf),
        }
    }

    /// How many children there are by name; none where they are listed.
    pub(crate) fn count(self) -> usize {
        match self {
            Place::Names(children) => children.len(),
            Place::Table(rows) => (rows.count)(),
            Place::List(..) | Place::End(_) => 0,
        }
    }

    /// The name of a child.
    pub(crate) fn name(self, index: usize) -> &'static str {
        match self {
            Place::Names(children) => children.get(index).map_or("", |child| child.name),
            Place::Table(rows) if index < (rows.count)() => (rows.name)(index),
            _ => "",
        }
    }

    /// The child at an index.
    pub(crate) fn child(self, index: usize) -> Option<Place> {
        match self {
            Place::Names(children) => children.get(index).map(|child| Place::of(&child.node)),
            Place::Table(rows) => (index < (rows.count)()).then(|| Place::End((rows.leaf)(index))),
            Place::List(domain, children) => domain.has(index).then_some(Place::Names(children)),
            Place::End(_) => None,
        }
    }

    /// What each entry of a list is.
    #[cfg(test)]
    pub(crate) fn entry(self) -> Place {
        match self {
            Place::List(_, children) => Place::Names(children),
            place => place,
        }
    }

    /// Whether these are the figures of a lock.
    #[cfg(test)]
    pub(crate) fn is_locks(self) -> bool {
        self.name(0) == "num_ops"
    }

    /// The child that a part of a name means, and its index.
    fn find(self, part: &[u8]) -> Option<(usize, Place)> {
        let index = match self {
            Place::List(..) => number(part)?,
            _ => (0..self.count()).find(|&index| self.name(index).as_bytes() == part)?,
        };
        Some((index, self.child(index)?))
    }
}

fn number(digits: &[u8]) -> Option<usize> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0usize, |sum, &digit| {
        let digit = digit.checked_sub(b'0').filter(|digit| *digit < 10)?;
        sum.checked_mul(10)?.checked_add(usize::from(digit))
    })
}

/// Looks `name` up, which may be the beginning of a name. Writes as many indices as there are parts,
/// or as fit; how many.
///
/// # Errors
/// Where nothing has this name.
pub fn name_to_mib(name: &[u8], mib: &mut [usize]) -> Result<usize, Error> {
    look_up(name, mib).map(|(depth, _)| depth)
}

/// The options are read, and the arenas made, when the allocator starts.
fn started() -> Done {
    if crate::process::ready() { Ok(()) } else { Err(Error::Again) }
}

fn look_up(name: &[u8], mib: &mut [usize]) -> Result<(usize, Place), Error> {
    started()?;
    let mut place = Place::ROOT;
    let mut depth = 0;
    for (part, slot) in name.split(|&byte| byte == b'.').zip(mib.iter_mut()) {
        (*slot, place) = place.find(part).ok_or(Error::NoEntry)?;
        depth += 1;
    }
    Ok((depth, place))
}

/// Where a caller's values are.
#[derive(Clone, Copy, Debug)]
pub struct Io {
    /// Where to read to; null reads nothing.
    pub old: *mut u8,
    /// How many bytes are there; afterwards, how many were written.
    pub old_len: *mut usize,
    /// What to write; null writes nothing.
    pub new: *const u8,
    /// How many bytes that has.
    pub new_len: usize,
}

impl Io {
    /// Reads nothing and writes nothing.
    pub const NONE: Io = Io {
        old: core::ptr::null_mut(),
        old_len: core::ptr::null_mut(),
        new: core::ptr::null(),
        new_len: 0,
    };

    fn reads(&self) -> bool {
        !self.old.is_null() || !self.old_len.is_null()
    }

    fn writes(&self) -> bool {
        !self.new.is_null() || self.new_len != 0
    }

    /// Gives a value of `len` bytes to the caller; where there is room for another size, as many bytes
    /// as fit.
    fn give(&self, value: u64, len: usize) -> Done {
        if self.old.is_null() || self.old_len.is_null() {
            return Ok(());
        }
        let bytes = value.to_ne_bytes();
        // SAFETY: not null, so it points to a length, says the caller of `by_name`.
        let room = unsafe { self.old_len.read() };
        let count = room.min(len).min(bytes.len());
        // SAFETY: there is room for `room` bytes.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), self.old, count) };
        // SAFETY: as above.
        unsafe { self.old_len.write(count) };
        if room == len { Ok(()) } else { Err(Error::Invalid) }
    }

    /// The value that the caller writes, of a type.
    fn take(&self, ty: Type) -> Result<Option<u64>, Error> {
        if self.new.is_null() {
            return Ok(None);
        }
        if self.new_len != ty.bytes() {
            return Err(Error::Invalid);
        }
        let mut bytes = [0; 8];
        // SAFETY: `new` points to `new_len` bytes, at most 8 by the test above.
        unsafe { core::ptr::copy_nonoverlapping(self.new, bytes.as_mut_ptr(), self.new_len) };
        let value = u64::from_ne_bytes(bytes);
        Ok(Some(if ty == Type::Bool { u64::from(value != 0) } else { value }))
    }

    /// Whether there is room for exactly `len` bytes; if not, the caller is told that none were written.
    fn has_room(&self, len: usize) -> bool {
        if self.old_len.is_null() {
            return false;
        }
        // SAFETY: not null, so it points to a length.
        let room = unsafe { self.old_len.read() };
        if !self.old.is_null() && room == len {
            return true;
        }
        // SAFETY: as above.
        unsafe { self.old_len.write(0) };
        false
    }
}

/// Reads, writes or runs what has this name.
///
/// # Errors
/// As [`Error`] says.
///
/// # Safety
/// Each of `io`'s pointers is null or valid for what it says, and a pointer that is written is of the
/// kind that the name asks for. What a name does may need more: an arena that is reset or destroyed
/// has no block that is used afterwards.
pub unsafe fn by_name(name: &[u8], io: Io) -> Result<(), Error> {
    let mut mib = [0; DEPTH_MAX];
    match look_up(name, &mut mib)? {
        // SAFETY: as the caller promises.
        (depth, Place::End(leaf)) if ends(name, depth) => unsafe {
            leaf.call(mib.get(..depth).unwrap_or(&[]), io)
        },
        _ => Err(Error::NoEntry),
    }
}

fn ends(name: &[u8], depth: usize) -> bool {
    name.split(|&byte| byte == b'.').count() == depth
}

/// As [`by_name`], by the indices that [`name_to_mib`] gave.
///
/// # Errors
/// As [`Error`] says.
///
/// # Safety
/// As for [`by_name`].
pub unsafe fn by_mib(mib: &[usize], io: Io) -> Result<(), Error> {
    started()?;
    match place(mib) {
        // SAFETY: as the caller promises.
        Some(Place::End(leaf)) => unsafe { leaf.call(mib, io) },
        _ => Err(Error::NoEntry),
    }
}

/// What the indices lead to.
pub(crate) fn place(mib: &[usize]) -> Option<Place> {
    mib.iter().try_fold(Place::ROOT, |place, &index| place.child(index))
}

impl Leaf {
    /// # Safety
    /// As for [`by_name`].
    unsafe fn call(&self, at: At<'_>, io: Io) -> Done {
        let len = self.ty.bytes();
        match self.act {
            Act::Absent => Err(Error::NoEntry),
            Act::Read(_) if io.writes() => Err(Error::NotPermitted),
            Act::Read(read) => io.give(read(at)?, len),
            Act::ReadWrite(read, write) => {
                let new = io.take(self.ty)?;
                io.give(read(at)?, len)?;
                new.map_or(Ok(()), |new| write(at, new))
            }
            Act::WriteRead(write, read) => {
                if let Some(new) = io.take(self.ty)? {
                    write(at, new)?;
                }
                io.give(read(at)?, len)
            }
            Act::Write(_) | Act::WriteMaybe(_) if io.reads() => Err(Error::NotPermitted),
            Act::WriteMaybe(write) => write(at, io.take(self.ty)?),
            Act::Write(write) => write(at, io.take(self.ty)?.ok_or(Error::Invalid)?),
            Act::Run(_) if io.reads() || io.writes() => Err(Error::NotPermitted),
            Act::Run(run) => run(at),
            Act::Create(_, false) if io.writes() => Err(Error::NotPermitted),
            Act::Create(create, _) => {
                if !io.has_room(len) {
                    return Err(Error::Invalid);
                }
                io.give(create(io.take(Type::Pointer)?)?, len)
            }
            Act::Ask(ask) => {
                let about = io.take(Type::Pointer)?.ok_or(Error::Invalid)?;
                io.give(ask(about)?, len)
            }
            Act::Name(get, set) => {
                let new = io.take(Type::Text)?;
                let name = get(at)?;
                if !io.old.is_null() && !io.old_len.is_null() {
                    if !io.has_room(len) {
                        return Err(Error::Invalid);
                    }
                    // SAFETY: there is room for a pointer, which is the caller's.
                    let to = unsafe { io.old.cast::<*mut u8>().read_unaligned() };
                    if to.is_null() {
                        return Err(Error::Invalid);
                    }
                    // SAFETY: it points to room for a name of that length.
                    unsafe { core::ptr::copy_nonoverlapping(name.as_ptr(), to, name.len()) };
                }
                // SAFETY: what is written is a C string.
                new.map_or(Ok(()), |new| set(at, unsafe { c_string(new) }?))
            }
            Act::Word(read, write) => {
                let new = io.take(Type::Text)?;
                io.give(read(at)?, len)?;
                // SAFETY: what is written is a C string.
                new.map_or(Ok(()), |new| write(at, unsafe { c_string(new) }?))
            }
        }
    }

    /// What can be done with it, as jemalloc's manual writes it.
    #[cfg(test)]
    pub(crate) fn access(&self) -> &'static str {
        match self.act {
            Act::Read(_) => "r-",
            Act::ReadWrite(..) | Act::WriteRead(..) | Act::Name(..) | Act::Word(..) => "rw",
            Act::Write(_) | Act::WriteMaybe(_) => "-w",
            Act::Run(_) => "--",
            Act::Create(_, true) | Act::Ask(_) => "rw",
            Act::Create(_, false) => "r-",
            Act::Absent => "ENOENT",
        }
    }

    /// What it reads, where it can be read: a walk through the tree.
    pub(crate) fn value(&self, at: &[usize]) -> Option<u64> {
        match self.act {
            Act::Read(read)
            | Act::ReadWrite(read, _)
            | Act::WriteRead(_, read)
            | Act::Word(read, _) => read(at).ok(),
            _ => None,
        }
    }
}

/// The text at an address that a caller wrote.
///
/// # Safety
/// It is null or the address of a C string.
unsafe fn c_string<'a>(address: u64) -> Result<&'a [u8], Error> {
    let at = usize::try_from(address).unwrap_or(0);
    if at == 0 {
        return Err(Error::Invalid);
    }
    let text = core::ptr::with_exposed_provenance::<core::ffi::c_char>(at);
    // SAFETY: the caller's promise.
    Ok(unsafe { core::ffi::CStr::from_ptr(text) }.to_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::string::String;
    use std::vec::Vec;

    /// Every name of the tree, with the first index of each list, and its leaf.
    fn leaves() -> Vec<(String, Leaf)> {
        fn walk(place: Place, name: &str, found: &mut Vec<(String, Leaf)>) {
            let below = |part: &str| {
                if name.is_empty() { part.into() } else { std::format!("{name}.{part}") }
            };
            match place {
                Place::End(leaf) => found.push((name.into(), leaf)),
                Place::List(..) => walk(place.entry(), &below("0"), found),
                _ => (0..place.count())
                    .for_each(|i| walk(place.child(i).unwrap(), &below(place.name(i)), found)),
            }
        }
        let mut found = Vec::new();
        walk(Place::ROOT, "", &mut found);
        found
    }

    #[test]
    fn names_lead_where_their_indices_lead() {
        let leaves = leaves();
        assert!(leaves.len() > 400, "{}", leaves.len());
        for (name, leaf) in leaves {
            let mut mib = [usize::MAX; DEPTH_MAX];
            let depth = name_to_mib(name.as_bytes(), &mut mib).unwrap();
            assert_eq!(depth, name.split('.').count(), "{name}");
            match place(&mib[..depth]) {
                Some(Place::End(found)) => assert_eq!(found.ty, leaf.ty, "{name}"),
                other => panic!("{name}: {other:?}"),
            }
            let why = match leaf.effect {
                Effect::Same => continue,
                Effect::Mapped(why) | Effect::Nothing(why) => why,
            };
            assert!(why.ends_with('.') && !why.contains('|'), "{name}: {why}");
        }
    }

    #[test]
    fn a_refused_read_tells_how_much_was_written() {
        for (name, leaf) in leaves() {
            if leaf.value(&[0; DEPTH_MAX]).is_none() {
                continue;
            }
            for room in 0..=16 {
                let mut value = [0xa5u8; 16];
                let mut len = room;
                let io = Io { old: value.as_mut_ptr(), old_len: &raw mut len, ..Io::NONE };
                // SAFETY: there is room for as many bytes as are told.
                let result = unsafe { by_name(name.as_bytes(), io) };
                let size = leaf.ty.bytes();
                assert_eq!(len, room.min(size), "{name}");
                assert_eq!(result.is_ok(), room == size, "{name}: {result:?}");
                assert!(value[len..].iter().all(|&byte| byte == 0xa5), "{name}");
            }
        }
    }

    proptest! {
        #[test]
        fn any_name_is_looked_up(bytes: Vec<u8>, like in "[a-z_]{0,9}(\\.([a-z_]{0,12}|[0-9]{0,21})){0,8}") {
            for name in [&bytes[..], like.as_bytes()] {
                let mut mib = [0; DEPTH_MAX];
                let depth = name_to_mib(name, &mut mib).unwrap_or(0);
                prop_assert!(depth <= DEPTH_MAX);
                if !like.starts_with("thread") && !like.starts_with("tcache") && !like.starts_with("arena") {
                    // SAFETY: nothing is given or taken, and what runs is harmless.
                    let _ = unsafe { by_name(name, Io::NONE) };
                }
            }
        }

        #[test]
        fn a_name_that_is_changed_a_little(index: prop::sample::Index, at: prop::sample::Index, byte: u8) {
            let leaves = leaves();
            let name = &index.get(&leaves).0;
            let mut bytes = name.clone().into_bytes();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            let mut mib = [0; DEPTH_MAX];
            let known = name_to_mib(&bytes, &mut mib);
            if bytes == name.as_bytes() {
                prop_assert!(known.is_ok());
            }
        }

        #[test]
        fn any_indices_are_followed(
            mib in prop::collection::vec(prop_oneof![0usize..200, Just(4096), Just(4097), any::<usize>()], 0..9),
            room in 0usize..17,
        ) {
            let end = place(&mib);
            let Some(Place::End(leaf)) = end else {
                // SAFETY: nothing is given or taken, and there is nothing to run.
                prop_assert_eq!(unsafe { by_mib(&mib, Io::NONE) }, Err(Error::NoEntry));
                return Ok(());
            };
            let mut value = [0xa5u8; 16];
            let mut len = room;
            if matches!(leaf.act, Act::Read(_) | Act::ReadWrite(..) | Act::WriteRead(..) | Act::Word(..)) {
                let io = Io { old: value.as_mut_ptr(), old_len: &raw mut len, ..Io::NONE };
                // SAFETY: there is room for as many bytes as are told.
                let _ = unsafe { by_mib(&mib, io) };
                prop_assert!(len <= room && value[len.max(leaf.ty.bytes().min(room))..].iter().all(|&byte| byte == 0xa5));
            }
        }

        #[test]
        fn wrong_sizes_are_refused_before_anything_is_done(index: prop::sample::Index, len in 0usize..17) {
            let leaves = leaves();
            let (name, leaf) = index.get(&leaves);
            prop_assume!(!matches!(leaf.act, Act::Create(..) | Act::Ask(_)) && len != leaf.ty.bytes());
            let value = [0u8; 16];
            let io = Io { new: value.as_ptr(), new_len: len, ..Io::NONE };
            // SAFETY: as many bytes are there.
            prop_assert!(unsafe { by_name(name.as_bytes(), io) }.is_err(), "{}", name);
        }
    }
}
