//! Arguments of C functions as the simulator sees them.
//!
//! An argument is wrapped where it comes in, on the caller's promise that it is what the driver's
//! manual says; behind that, reading and writing it is safe.

use std::ffi::{CStr, c_char, c_void};

use thermalloc_cuda::driver::{
    Context, Event, Function, Graph, GraphExec, HostFn, IpcEventHandle, IpcMemHandle, Location,
    MemPool, Module, Stream, UserObject, code,
};

use crate::state::R;

/// How an argument is passed in C, and what it is here.
pub(crate) trait Arg {
    type Raw;
    /// # Safety
    /// The raw argument is what the driver's manual asks for.
    unsafe fn from_raw(raw: Self::Raw) -> Self;
}

macro_rules! plain {
    ($($name:ty)*) => {$(
        impl Arg for $name {
            type Raw = Self;
            unsafe fn from_raw(raw: Self) -> Self {
                raw
            }
        }
    )*};
}

plain! { u8 u32 i32 u64 usize Context Stream Event MemPool Graph GraphExec UserObject Module Function Location HostFn IpcMemHandle IpcEventHandle }

/// Where a result goes.
pub(crate) struct Out<T>(*mut T);

impl<T> Arg for Out<T> {
    type Raw = *mut T;
    unsafe fn from_raw(raw: *mut T) -> Self {
        Self(raw)
    }
}

impl<T: Copy> Out<T> {
    pub(crate) fn set(&self, value: T) -> R {
        if self.0.is_null() {
            return Err(code::ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, and the caller promises room for a result.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// For results that one may leave out.
    pub(crate) fn set_if_wanted(&self, value: T) {
        let _left_out = self.set(value);
    }

    pub(crate) fn get(&self) -> R<T> {
        In(self.0.cast_const()).get()
    }
}

impl Out<*mut c_void> {
    /// One of an array of addresses.
    pub(crate) fn nth(&self, index: usize) -> R<Addr> {
        In(self.0.cast_const()).nth(index).map(Addr)
    }
}

/// Text that goes out into room of a given length.
pub(crate) fn put_text(to: &Out<c_char>, length: i32, text: &str) -> R {
    let length = usize::try_from(length).map_err(|_| code::ERROR_INVALID_VALUE)?;
    if length == 0 || to.0.is_null() {
        return Err(code::ERROR_INVALID_VALUE);
    }
    let kept = text.len().min(length - 1);
    // SAFETY: the caller promises room for `length` bytes.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), to.0.cast(), kept) };
    // SAFETY: `kept` is below `length`.
    let end = unsafe { to.0.add(kept) };
    // SAFETY: as above.
    unsafe { end.write(0) };
    Ok(())
}

/// A structure that comes in, or the first of several.
pub(crate) struct In<T>(*const T);

impl<T> Arg for In<T> {
    type Raw = *const T;
    unsafe fn from_raw(raw: *const T) -> Self {
        Self(raw)
    }
}

impl<T: Copy> In<T> {
    pub(crate) fn get(&self) -> R<T> {
        self.nth(0)
    }

    pub(crate) fn nth(&self, index: usize) -> R<T> {
        if self.0.is_null() {
            return Err(code::ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, and the caller promises as many as it says.
        let place = unsafe { self.0.add(index) };
        // SAFETY: as above.
        Ok(unsafe { place.read_unaligned() })
    }
}

impl In<c_char> {
    pub(crate) fn text(&self) -> R<String> {
        if self.0.is_null() {
            return Err(code::ERROR_INVALID_VALUE);
        }
        // SAFETY: the caller promises a C string.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_string_lossy().into_owned())
    }
}

/// An address of host memory, or of a value whose type another argument tells.
#[derive(Clone, Copy)]
pub(crate) struct Addr(*mut c_void);

impl Arg for Addr {
    type Raw = *mut c_void;
    unsafe fn from_raw(raw: *mut c_void) -> Self {
        Self(raw)
    }
}

impl Addr {
    pub(crate) fn number(self) -> u64 {
        self.0 as u64
    }

    pub(crate) fn put<T: Copy>(self, value: T) -> R {
        Out(self.0.cast::<T>()).set(value)
    }

    pub(crate) fn value<T: Copy>(self) -> R<T> {
        Out(self.0.cast::<T>()).get()
    }
}

/// An address of host memory that is only read.
pub(crate) struct ConstAddr(*const c_void);

impl Arg for ConstAddr {
    type Raw = *const c_void;
    unsafe fn from_raw(raw: *const c_void) -> Self {
        Self(raw)
    }
}

impl ConstAddr {
    pub(crate) fn number(&self) -> u64 {
        self.0 as u64
    }
}
