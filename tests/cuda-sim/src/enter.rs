//! The way into a machine: slots, threads, and what is checked of every call.
//!
//! A C function has no room for an argument that says which machine is meant. So each function exists
//! once for each slot, and a table of functions belongs to the machine in its slot.

use std::cell::RefCell;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use thermalloc_cuda::driver::{Call, Context, HostFn, Stream, code};

use crate::clock::Epoch;
use crate::config::{Config, can_block};
use crate::state::{Mistake, R, State, device_of_context};
use crate::stream::Pump;

/// Slot 0 is that of the shared library; the others are handed to tests.
pub(crate) const SLOTS: usize = 9;

/// Says whether a lock is held by this thread that a call which can block must not be made under.
pub type Probe = fn(Call) -> bool;

struct Machine {
    state: Mutex<Option<Box<State>>>,
    probe: AtomicPtr<()>,
}

static MACHINES: [Machine; SLOTS] =
    [const { Machine { state: Mutex::new(None), probe: AtomicPtr::new(std::ptr::null_mut()) } };
        SLOTS];
static TAKEN: Mutex<[bool; SLOTS]> = Mutex::new([false; SLOTS]);
static FREED: Condvar = Condvar::new();
static GENERATION: AtomicU64 = AtomicU64::new(1);
static THREADS: AtomicU64 = AtomicU64::new(1);

/// Puts a machine into a free slot, waiting for one.
pub(crate) fn install(config: Config) -> R<usize> {
    let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
    let slot = loop {
        if let Some(slot) = (1..SLOTS).find(|slot| !taken[*slot]) {
            break slot;
        }
        taken = FREED.wait(taken).unwrap_or_else(PoisonError::into_inner);
    };
    let state = State::new(config, GENERATION.fetch_add(1, Ordering::Relaxed))?;
    *lock(slot) = Some(Box::new(state));
    taken[slot] = true;
    Ok(slot)
}

pub(crate) fn remove(slot: usize) {
    MACHINES[slot].probe.store(std::ptr::null_mut(), Ordering::Release);
    let gone = lock(slot).take();
    drop(gone);
    TAKEN.lock().unwrap_or_else(PoisonError::into_inner)[slot] = false;
    FREED.notify_one();
}

pub(crate) fn set_probe(slot: usize, probe: Option<Probe>) {
    let pointer = probe.map_or(std::ptr::null_mut(), |probe| probe as *mut ());
    MACHINES[slot].probe.store(pointer, Ordering::Release);
}

fn lock(slot: usize) -> MutexGuard<'static, Option<Box<State>>> {
    MACHINES[slot].state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Looks at or changes a machine beside the driver's functions.
pub(crate) fn with<T>(slot: usize, body: impl FnOnce(&mut State) -> T) -> Option<T> {
    lock(slot).as_deref_mut().map(body)
}

#[derive(Default)]
struct ThreadSlot {
    generation: u64,
    stack: Vec<Context>,
    capture_mode: u32,
    streams: Vec<Option<u32>>,
}

struct Thread {
    id: u64,
    in_host_function: bool,
    slots: [ThreadSlot; SLOTS],
}

thread_local! {
    static THREAD: RefCell<Thread> = RefCell::new(Thread {
        id: THREADS.fetch_add(1, Ordering::Relaxed),
        in_host_function: false,
        slots: Default::default(),
    });
}

/// A call on its way: the machine, locked, and the calling thread.
pub(crate) struct Cx {
    pub(crate) slot: usize,
    generation: u64,
    guard: Option<MutexGuard<'static, Option<Box<State>>>>,
    pub(crate) current: Context,
    pub(crate) thread: u64,
}

pub(crate) fn enter(slot: usize, call: Call, body: impl FnOnce(&mut Cx) -> R) -> u32 {
    match start(slot, call) {
        Ok(mut cx) => {
            let result = body(&mut cx);
            finish(cx, result)
        }
        Err(code) => code,
    }
}

fn start(slot: usize, call: Call) -> R<Cx> {
    let probe = MACHINES[slot].probe.load(Ordering::Acquire);
    let held = !probe.is_null() && can_block(call) && {
        // SAFETY: only `set_probe` writes here, and it writes a `Probe`.
        let probe = unsafe { std::mem::transmute::<*mut (), Probe>(probe) };
        probe(call)
    };
    let mut guard = lock(slot);
    if slot == 0 && guard.is_none() {
        *guard = State::new(Config::from_env(), 0).ok().map(Box::new);
    }
    let state = guard.as_deref_mut().ok_or(code::ERROR_DEINITIALIZED)?;
    let generation = state.generation;
    let caller = THREAD.try_with(|thread| {
        let thread = &mut *thread.borrow_mut();
        let mine = &mut thread.slots[slot];
        if mine.generation != generation {
            *mine = ThreadSlot { generation, ..ThreadSlot::default() };
        }
        Caller {
            current: mine.stack.last().copied().unwrap_or_default(),
            capture_mode: mine.capture_mode,
            thread: thread.id,
            in_host_function: thread.in_host_function,
        }
    });
    let caller = caller.map_err(|_| code::ERROR_DEINITIALIZED)?;
    before(state, call, held, &caller)?;
    Ok(Cx { slot, generation, guard: Some(guard), current: caller.current, thread: caller.thread })
}

fn finish(mut cx: Cx, result: R) -> u32 {
    let deferred = cx.state().map(|state| std::mem::take(&mut state.deferred)).unwrap_or_default();
    drop(cx);
    for (function, data) in deferred {
        call_host(function, data);
    }
    result.err().unwrap_or(code::SUCCESS)
}

/// What a call depends on of the thread that makes it.
struct Caller {
    current: Context,
    capture_mode: u32,
    thread: u64,
    in_host_function: bool,
}

/// Counts a call, and finds what makes it fail whatever it asks for.
fn before(state: &mut State, call: Call, held: bool, caller: &Caller) -> R {
    state.calls[call as usize] += 1;
    state.now_ns += state.config.latency.of(call);
    if held {
        state.violate(Mistake::CallUnderLock, format!("{} can block", call.symbol()));
    }
    if caller.in_host_function {
        state.violate(Mistake::CallInHostFunction, call.symbol().to_owned());
        return Err(code::ERROR_NOT_PERMITTED);
    }
    if let Some(code) = state.injected(call) {
        return Err(code);
    }
    if state.config.missing.contains(&call) {
        return Err(code::ERROR_NOT_SUPPORTED);
    }
    if !state.initialised && !works_uninitialised(call) {
        return Err(code::ERROR_NOT_INITIALIZED);
    }
    if !works_when_broken(call)
        && let Some(device) = device_of_context(caller.current)
        && state.devices.get(device as usize).is_some_and(|device| device.sticky != 0)
    {
        return Err(state.devices[device as usize].sticky);
    }
    if unsafe_in_capture(call) {
        state.forbid_unsafe(call.symbol(), caller.thread, caller.capture_mode)?;
    }
    Ok(())
}

fn works_uninitialised(call: Call) -> bool {
    use Call as C;
    matches!(
        call,
        C::cuInit
            | C::cuDriverGetVersion
            | C::cuGetErrorName
            | C::cuGetErrorString
            | C::cuGetProcAddress_v2
    )
}

/// Calls that do not tell of an earlier illegal access.
fn works_when_broken(call: Call) -> bool {
    use Call as C;
    works_uninitialised(call)
        || matches!(
            call,
            C::cuDeviceGet
                | C::cuDeviceGetCount
                | C::cuDeviceGetName
                | C::cuDeviceGetAttribute
                | C::cuDeviceTotalMem_v2
                | C::cuCtxGetCurrent
                | C::cuCtxSetCurrent
                | C::cuCtxPushCurrent_v2
                | C::cuCtxPopCurrent_v2
                | C::cuCtxGetDevice
                | C::cuDevicePrimaryCtxRetain
                | C::cuDevicePrimaryCtxRelease_v2
        )
}

/// Calls that a capture of mode global or thread-local forbids.
fn unsafe_in_capture(call: Call) -> bool {
    use Call as C;
    matches!(
        call,
        C::cuMemAlloc_v2
            | C::cuMemFree_v2
            | C::cuMemAllocManaged
            | C::cuMemHostAlloc
            | C::cuMemAllocHost_v2
            | C::cuMemFreeHost
            | C::cuMemHostRegister_v2
            | C::cuMemHostUnregister
            | C::cuMemcpyHtoD_v2
            | C::cuMemcpyDtoH_v2
            | C::cuEventQuery
            | C::cuEventSynchronize
            | C::cuCtxSynchronize
    )
}

fn call_host(function: HostFn, data: usize) {
    let inside = |inside| {
        let _no_thread_left =
            THREAD.try_with(|thread| thread.borrow_mut().in_host_function = inside);
    };
    inside(true);
    // SAFETY: the program gave this function to be called with this argument.
    unsafe { function(data as *mut std::ffi::c_void) };
    inside(false);
}

impl Cx {
    pub(crate) fn state(&mut self) -> R<&mut State> {
        let state = self.guard.as_deref_mut().and_then(|state| state.as_deref_mut());
        state.ok_or(code::ERROR_DEINITIALIZED)
    }

    fn thread<T>(&self, body: impl FnOnce(&mut ThreadSlot) -> T) -> R<T> {
        let slot = self.slot;
        let result = THREAD.try_with(|thread| body(&mut thread.borrow_mut().slots[slot]));
        result.map_err(|_| code::ERROR_DEINITIALIZED)
    }

    /// The contexts of this thread, the current one last.
    pub(crate) fn contexts<T>(&self, body: impl FnOnce(&mut Vec<Context>) -> T) -> R<T> {
        self.thread(|thread| body(&mut thread.stack))
    }

    pub(crate) fn set_capture_mode(&self, mode: u32) -> R<u32> {
        self.thread(|thread| std::mem::replace(&mut thread.capture_mode, mode))
    }

    /// The device of the current context.
    pub(crate) fn device(&self) -> R<u32> {
        device_of_context(self.current).ok_or(code::ERROR_INVALID_CONTEXT)
    }

    /// The slot of a stream handle, the default ones too.
    pub(crate) fn stream(&mut self, stream: Stream) -> R<u32> {
        match stream {
            Stream::NULL | Stream::LEGACY => {
                let device = self.device()? as usize;
                Ok(self.state()?.devices[device].legacy)
            }
            Stream::PER_THREAD => {
                let device = self.device()?;
                let index = device as usize;
                let known = self.thread(|thread| {
                    thread.streams.resize(thread.streams.len().max(index + 1), None);
                    thread.streams[index]
                })?;
                if let Some(slot) = known {
                    return Ok(slot);
                }
                let slot = self.state()?.new_stream(device, true, true);
                self.thread(|thread| thread.streams[index] = Some(slot))?;
                Ok(slot)
            }
            made => self.state()?.stream_slot(made),
        }
    }

    fn unlocked(&mut self, body: impl FnOnce()) -> R {
        self.guard = None;
        body();
        self.guard = Some(lock(self.slot));
        let generation = self.generation;
        if self.state()?.generation == generation { Ok(()) } else { Err(code::ERROR_DEINITIALIZED) }
    }

    /// Waits until an operation has run.
    pub(crate) fn wait(&mut self, epoch: Epoch) -> R {
        loop {
            match self.state()?.pump(epoch) {
                Pump::Done => break,
                Pump::Call(function, data, slot) => self.run_host(function, data, slot)?,
                Pump::Elsewhere => self.unlocked(std::thread::yield_now)?,
            }
        }
        let device = self.state()?.streams[epoch.slot as usize].device;
        match self.state()?.devices[device as usize].sticky {
            0 => Ok(()),
            sticky => Err(sticky),
        }
    }

    /// Lets a host function run that stands between a query and its answer.
    pub(crate) fn let_host_run(&mut self, epoch: Epoch) -> R {
        match self.state()?.host_function_before(epoch) {
            Some((function, data, slot)) => self.run_host(function, data, slot),
            None => Ok(()),
        }
    }

    fn run_host(&mut self, function: HostFn, data: usize, slot: u32) -> R {
        self.unlocked(|| call_host(function, data))?;
        self.state()?.host_function_done(slot);
        Ok(())
    }

    pub(crate) fn wait_stream(&mut self, slot: u32) -> R {
        let epoch = self.state()?.prepare_sync(slot);
        let result = self.wait(epoch);
        let state = self.state()?;
        state.host_saw_stream(slot);
        state.at_sync_point();
        result
    }

    pub(crate) fn wait_device(&mut self, device: u32) -> R {
        let mut result = Ok(());
        for slot in self.state()?.streams_of(device) {
            result = result.and(self.wait_stream(slot));
        }
        result
    }
}
