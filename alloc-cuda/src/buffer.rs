//! Buffers for programs that use cudarc: typed memory of the pool that goes back when it is dropped.
//!
//! Invariant: a buffer that only its own stream uses costs no event. Once another stream uses it,
//! each user waits for the one before, and the memory is free when all are complete.

use crate::driver::Stream;
use crate::oom::AllocError;
use crate::pool::{OnStream, Pool};
use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{
    CudaEvent, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, DeviceSlice,
    DriverError, SyncOnDrop, ValidAsZeroBits,
};
use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

/// Why no buffer could be made.
#[derive(Debug)]
pub enum BufferError {
    /// There is no memory.
    Alloc(AllocError),
    /// A copy or a memset could not be submitted.
    Driver(DriverError),
}

impl fmt::Display for BufferError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Alloc(error) => error.fmt(f),
            // cudarc's own text calls the driver.
            Self::Driver(error) => write!(f, "thermalloc: buffer: code {}", error.0 as u32),
        }
    }
}

impl std::error::Error for BufferError {}

impl From<AllocError> for BufferError {
    fn from(error: AllocError) -> Self {
        Self::Alloc(error)
    }
}

impl From<DriverError> for BufferError {
    fn from(error: DriverError) -> Self {
        Self::Driver(error)
    }
}

/// The pool's stream of one of cudarc's.
fn stream_of(stream: &CudaStream) -> Stream {
    Stream(stream.cu_stream() as usize)
}

/// `len` values of type `T` on the device. Dropped, its memory goes back in the order of its stream:
/// nothing waits.
pub struct Buffer<T> {
    pool: Pool,
    ptr: u64,
    len: usize,
    stream: Arc<CudaStream>,
    /// Recorded after each use, once another stream has used it.
    used: OnceLock<CudaEvent>,
    marker: PhantomData<T>,
}

impl<T> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("ptr", &self.ptr).field("len", &self.len).finish()
    }
}

impl Pool {
    /// A buffer whose contents are not set.
    ///
    /// # Errors
    /// There is no memory.
    ///
    /// # Safety
    /// It is written before it is read.
    pub unsafe fn buffer<T: DeviceRepr>(
        &self,
        stream: &Arc<CudaStream>,
        len: usize,
    ) -> Result<Buffer<T>, AllocError> {
        let bytes = len.saturating_mul(size_of::<T>()) as u64;
        let ptr = self.alloc(bytes, stream_of(stream))?;
        Ok(Buffer {
            pool: self.clone(),
            ptr,
            len,
            stream: Arc::clone(stream),
            used: OnceLock::new(),
            marker: PhantomData,
        })
    }

    /// A buffer of zeros.
    ///
    /// # Errors
    /// There is no memory, or the memset could not be submitted.
    pub fn zeros<T: DeviceRepr + ValidAsZeroBits>(
        &self,
        stream: &Arc<CudaStream>,
        len: usize,
    ) -> Result<Buffer<T>, BufferError> {
        // SAFETY: it is set below, in the order of its stream.
        let mut buffer = unsafe { self.buffer::<T>(stream, len) }?;
        stream.memset_zeros(&mut buffer)?;
        Ok(buffer)
    }

    /// A copy of `values` on the device.
    ///
    /// # Errors
    /// There is no memory, or the copy could not be submitted.
    pub fn copied<T: DeviceRepr>(
        &self,
        stream: &Arc<CudaStream>,
        values: &[T],
    ) -> Result<Buffer<T>, BufferError> {
        // SAFETY: it is written below, in the order of its stream.
        let mut buffer = unsafe { self.buffer::<T>(stream, values.len()) }?;
        stream.memcpy_htod(values, &mut buffer)?;
        Ok(buffer)
    }

    /// The pool as seen from one of cudarc's streams.
    pub fn on_cudarc(&self, stream: &CudaStream) -> OnStream {
        self.on(stream_of(stream))
    }
}

impl<T> Buffer<T> {
    /// The device address.
    pub fn ptr(&self) -> u64 {
        self.ptr
    }

    /// How many values it has.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Orders `stream` after the buffer's users so far, and notes it as one.
    fn order<'a>(&'a self, stream: &'a CudaStream) -> SyncOnDrop<'a> {
        let is_own = stream.cu_stream() == self.stream.cu_stream();
        if is_own && self.used.get().is_none() {
            return SyncOnDrop::Record(None);
        }
        let context = self.stream.context();
        if self.used.get().is_none() {
            match context.new_event(None) {
                Ok(event) => {
                    context.record_err(event.record(&self.stream));
                    // Another thread may have been first; its event stands for the same.
                    let _ = self.used.set(event);
                }
                Err(error) => context.record_err::<()>(Err(error)),
            }
        }
        if !is_own && self.pool.record_use(self.ptr, stream_of(stream)).is_err() {
            // It is a live block of the pool for as long as this value lives.
            debug_assert!(false, "the buffer's block is gone");
        }
        let Some(event) = self.used.get() else {
            // Without an event the only order is to wait.
            context.record_err(self.stream.synchronize());
            return SyncOnDrop::sync_stream(stream);
        };
        context.record_err(stream.wait(event));
        SyncOnDrop::Record(Some((event, stream)))
    }

    /// The buffer as one of cudarc's slices, for functions that take nothing else.
    pub fn as_cuda_slice(&self) -> Borrowed<'_, T> {
        // SAFETY: the memory is a live block for that many values; the borrow keeps it from being
        // freed, and `Borrowed` never drops the slice.
        let slice = unsafe { self.stream.upgrade_device_ptr(self.ptr, self.len) };
        Borrowed { slice: Some(slice), marker: PhantomData }
    }
}

/// A buffer as a slice of cudarc's.
pub struct Borrowed<'a, T> {
    slice: Option<CudaSlice<T>>,
    marker: PhantomData<&'a Buffer<T>>,
}

impl<T> fmt::Debug for Borrowed<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Borrowed")
    }
}

impl<T> Deref for Borrowed<'_, T> {
    type Target = CudaSlice<T>;

    fn deref(&self) -> &CudaSlice<T> {
        match &self.slice {
            Some(slice) => slice,
            None => unreachable!("it is taken when dropped only"),
        }
    }
}

impl<T> Drop for Borrowed<'_, T> {
    fn drop(&mut self) {
        if let Some(slice) = self.slice.take() {
            slice.leak();
        }
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        // SAFETY: nobody can submit work with it any more; what was submitted was recorded.
        let freed = unsafe { self.pool.free(self.ptr) };
        debug_assert!(freed.is_ok(), "{freed:?}");
    }
}

impl<T> DeviceSlice<T> for Buffer<T> {
    fn len(&self) -> usize {
        self.len
    }

    fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }
}

impl<T> DevicePtr<T> for Buffer<T> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        (self.ptr, self.order(stream))
    }
}

impl<T> DevicePtrMut<T> for Buffer<T> {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        (self.ptr, self.order(stream))
    }
}
