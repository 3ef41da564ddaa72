//! The handle to a simulated machine.

use std::ffi::c_void;

use thermalloc_cuda::driver::{Call, Context, DevicePtr, Driver, Error, Stream, Table, code};

use crate::api::table_of;
use crate::capture::Submission;
use crate::config::Config;
use crate::enter::{self, Probe, enter, with};
use crate::memory::Access;
use crate::state::{Fault, Mistake, State, Violation};

/// A simulated machine. Dropping it ends it; calls through its table then fail.
///
/// A few can be there at once; a further one waits.
pub struct Sim {
    slot: usize,
}

impl Sim {
    /// A machine of its own.
    ///
    /// # Panics
    /// When the system has no memory or descriptors for it.
    pub fn new(config: Config) -> Self {
        match enter::install(config) {
            Ok(slot) => Self { slot },
            Err(code) => panic!("no simulated machine: {}", code::name(code)),
        }
    }

    /// The driver's functions, less those that this driver lacks.
    pub fn table(&self) -> Result<Table, Error> {
        let full = table_of(self.slot);
        let missing = self.with(|state| state.config.missing.clone());
        let lookup = |symbol: &std::ffi::CStr| -> *const c_void {
            let symbol = symbol.to_str().unwrap_or_default();
            if missing.iter().any(|call| call.symbol() == symbol) {
                std::ptr::null()
            } else {
                full.address(symbol)
            }
        };
        // SAFETY: these are the addresses that a table of the same type has under these names.
        unsafe { Table::load(lookup) }
    }

    /// A driver, initialised.
    pub fn driver(&self) -> Result<Driver, Error> {
        Driver::new(self.table()?)
    }

    /// Retains the primary context of a device and makes it the calling thread's.
    pub fn use_device(&self, driver: &Driver, device: i32) -> Result<Context, Error> {
        let mut context = Context::NULL;
        // SAFETY: a valid place to write to.
        unsafe { driver.primary_ctx_retain(&raw mut context, device) }?;
        // SAFETY: retained just now.
        unsafe { driver.ctx_set_current(context) }?;
        Ok(context)
    }

    fn with<T>(&self, body: impl FnOnce(&mut State) -> T) -> T {
        match with(self.slot, body) {
            Some(result) => result,
            None => unreachable!("a machine lives as long as its handle"),
        }
    }

    /// Launches a kernel that uses these ranges.
    pub fn launch(&self, stream: Stream, accesses: &[Access]) -> Result<(), Error> {
        self.launch_for(stream, accesses, 0)
    }

    /// As `launch`, for so many nanoseconds of virtual time; 0: as the machine's latencies say.
    pub fn launch_for(
        &self,
        stream: Stream,
        accesses: &[Access],
        duration_ns: u64,
    ) -> Result<(), Error> {
        let code = enter(self.slot, Call::cuLaunchKernel, |cx| {
            let slot = cx.stream(stream)?;
            cx.state()?.submit(slot, Submission::Kernel(accesses.to_vec()), duration_ns)
        });
        thermalloc_cuda::driver::check("cuLaunchKernel", code)
    }

    /// Judges that the host reads memory which the device uses too.
    pub fn host_reads(&self, ptr: DevicePtr, bytes: u64) {
        self.with(|state| state.host_access(ptr, bytes, false));
    }

    /// Judges that the host writes memory which the device uses too.
    pub fn host_writes(&self, ptr: DevicePtr, bytes: u64) {
        self.with(|state| state.host_access(ptr, bytes, true));
    }

    /// All mistakes so far; a thousand at most.
    pub fn violations(&self) -> Vec<Violation> {
        self.with(|state| state.violations.clone())
    }

    /// Mistakes since this was asked last.
    pub fn take_violations(&self) -> Vec<Violation> {
        self.with(|state| std::mem::take(&mut state.violations))
    }

    /// How many mistakes of a kind are kept.
    pub fn count(&self, mistake: Mistake) -> usize {
        self.with(|state| {
            state.violations.iter().filter(|violation| violation.mistake == mistake).count()
        })
    }

    /// What is there that the program made: to be asked at its end.
    pub fn leaks(&self) -> Vec<Violation> {
        self.with(|state| state.leaks())
    }

    /// Panics with the first mistakes, if there is one.
    ///
    /// # Panics
    /// That is what it is for.
    #[track_caller]
    pub fn assert_clean(&self) {
        let found = self.violations();
        let first: Vec<String> = found.iter().take(5).map(ToString::to_string).collect();
        assert!(found.is_empty(), "{} mistakes, among them:\n{}", found.len(), first.join("\n"));
    }

    /// Panics where there is a mistake, or something was left behind.
    ///
    /// # Panics
    /// That is what it is for.
    #[track_caller]
    pub fn assert_clean_and_empty(&self) {
        self.assert_clean();
        let leaks = self.leaks();
        let first: Vec<String> = leaks.iter().take(5).map(ToString::to_string).collect();
        assert!(leaks.is_empty(), "{} leaks, among them:\n{}", leaks.len(), first.join("\n"));
    }

    /// Makes calls of a function fail: after `skip` good ones, `times` with this code.
    pub fn fail(&self, call: Call, skip: u64, times: u64, code: u32) {
        self.with(|state| state.faults.push(Fault { call, skip, times, one_in: 1, code }));
    }

    /// Makes one call in `one_in` of a function fail, at random.
    pub fn fail_randomly(&self, call: Call, one_in: u64, code: u32) {
        self.with(|state| {
            state.faults.push(Fault { call, skip: 0, times: u64::MAX, one_in, code })
        });
    }

    /// No call is made to fail any more.
    pub fn fail_nothing(&self) {
        self.with(|state| state.faults.clear());
    }

    /// Another process takes so much of a device.
    pub fn set_other_process_bytes(&self, device: usize, bytes: u64) {
        self.with(|state| state.devices[device].other_process = bytes);
    }

    /// What this process has of a device.
    pub fn used_bytes(&self, device: usize) -> u64 {
        self.with(|state| state.devices[device].used)
    }

    /// The most that it had.
    pub fn peak_used_bytes(&self, device: usize) -> u64 {
        self.with(|state| state.devices[device].peak_used)
    }

    /// Pinned host memory, registered memory too.
    pub fn pinned_bytes(&self) -> u64 {
        self.with(|state| state.pinned)
    }

    /// Calls of a function so far.
    pub fn calls(&self, call: Call) -> u64 {
        self.with(|state| state.calls[call as usize])
    }

    /// Calls so far, of all functions.
    pub fn all_calls(&self) -> u64 {
        self.with(|state| state.calls.iter().sum())
    }

    /// Virtual time of the host.
    pub fn now_ns(&self) -> u64 {
        self.with(|state| state.now_ns)
    }

    /// The host does something else for a while.
    pub fn advance_ns(&self, ns: u64) {
        self.with(|state| state.now_ns += ns);
    }

    /// Changes the machine: latencies, limits, progress.
    pub fn configure(&self, change: impl FnOnce(&mut Config)) {
        self.with(|state| change(&mut state.config));
    }

    /// Sets who is asked, before each call that can block, whether a lock is held that it must not be
    /// made under.
    pub fn probe(&self, probe: Option<Probe>) {
        enter::set_probe(self.slot, probe);
    }

    /// Lets the device run all that it can without the host waiting for it.
    pub fn run_all(&self) {
        self.with(|state| {
            for slot in 0..state.streams.len() {
                state.run_what_may(state.last(slot as u32));
            }
        });
    }

    /// Pieces that shadow memory tells apart.
    pub fn shadow_pieces(&self) -> usize {
        self.with(|state| state.shadow.pieces())
    }
}

impl Drop for Sim {
    fn drop(&mut self) {
        enter::remove(self.slot);
    }
}
