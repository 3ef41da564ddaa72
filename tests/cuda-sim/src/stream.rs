//! Streams, events, and the device that runs what was submitted to them.
//!
//! An operation runs only when every operation that its stream was told to wait for has run. That is
//! the device's own order; the clocks, by which accesses are judged, say what a correct program may
//! rely on.

use std::collections::VecDeque;

use thermalloc_cuda::driver::{Event, HostFn, Stream, code};

use crate::clock::{Clock, Epoch};
use crate::config::Progress;
use crate::memory::{Action, perform};
use crate::state::{Mistake, R, State};

/// What an operation does when it runs.
pub(crate) enum Work {
    Nothing,
    Actions(Box<[Action]>),
    Host(HostFn, usize),
    /// An illegal access.
    Fault,
    /// A graph of which this is a launch has run.
    GraphDone(usize),
}

pub(crate) struct Op {
    seq: u64,
    after: Vec<Epoch>,
    end_ns: u64,
    work: Work,
}

pub(crate) struct StreamSlot {
    pub(crate) handle: usize,
    pub(crate) number: usize,
    pub(crate) device: u32,
    /// Ordered with the legacy default stream.
    pub(crate) blocking: bool,
    pub(crate) alive: bool,
    is_default: bool,
    pub(crate) flags: u32,
    pub(crate) clock: Clock,
    pub(crate) submitted: u64,
    pub(crate) done: u64,
    queue: VecDeque<Op>,
    after: Vec<Epoch>,
    pub(crate) end_ns: u64,
    /// A host function of this stream is running.
    busy: bool,
    pub(crate) capture: Option<StreamCapture>,
}

/// The part of a stream in a capture.
pub(crate) struct StreamCapture {
    pub(crate) id: u64,
    pub(crate) tail: Vec<usize>,
}

impl StreamSlot {
    /// Made by the program, and not destroyed.
    pub(crate) fn is_users(&self) -> bool {
        self.alive && !self.is_default
    }
}

pub(crate) struct Record {
    epoch: Epoch,
    clock: Clock,
    end_ns: u64,
}

pub(crate) struct EventSlot {
    pub(crate) handle: usize,
    pub(crate) alive: bool,
    pub(crate) flags: u32,
    pub(crate) recorded: Option<Record>,
    /// The capture and the nodes that it was recorded behind.
    pub(crate) captured: Option<(u64, Vec<usize>)>,
    spare: Clock,
}

const STREAM_TAG: usize = 0x5700_0000_0000;
const EVENT_TAG: usize = 0x4500_0000_0000;
const SLOT_BITS: u32 = 12;
const EVENT_BITS: u32 = 20;

/// What has to happen before a wait can go on.
pub(crate) enum Pump {
    Done,
    /// A host function to call without the lock; then `host_function_done` with the slot.
    Call(HostFn, usize, u32),
    /// Another thread is in a host function that this waits for.
    Elsewhere,
}

enum Step {
    Ran,
    Empty,
    Behind(Epoch),
    Call(HostFn, usize),
    Busy,
}

impl State {
    pub(crate) fn new_stream(&mut self, device: u32, blocking: bool, is_default: bool) -> u32 {
        let reusable = |(slot, stream): (usize, &StreamSlot)| {
            let last = Epoch { slot: slot as u32, seq: stream.submitted };
            !stream.alive && self.host.covers(last) && stream.done == stream.submitted
        };
        let free = self.streams.iter().enumerate().position(reusable);
        let slot = free.unwrap_or(self.streams.len());
        let unique = self.unique();
        let submitted = free.map_or(0, |slot| self.streams[slot].submitted);
        let mut clock = Clock::default();
        clock.advance(Epoch { slot: slot as u32, seq: submitted });
        let stream = StreamSlot {
            handle: STREAM_TAG | unique << SLOT_BITS | slot,
            number: unique,
            device,
            blocking,
            alive: true,
            is_default,
            flags: u32::from(!blocking),
            clock,
            submitted,
            done: submitted,
            queue: VecDeque::new(),
            after: Vec::new(),
            end_ns: 0,
            busy: false,
            capture: None,
        };
        match free {
            Some(slot) => self.streams[slot] = stream,
            None => self.streams.push(stream),
        }
        slot as u32
    }

    /// The slot of a handle that `cuStreamCreate` returned.
    pub(crate) fn stream_slot(&mut self, stream: Stream) -> R<u32> {
        let slot = stream.0 & ((1 << SLOT_BITS) - 1);
        match self.streams.get(slot) {
            Some(found) if found.handle == stream.0 && found.alive => Ok(slot as u32),
            _ => {
                self.violate(Mistake::BadHandle, format!("stream {:#x} does not exist", stream.0));
                Err(code::ERROR_INVALID_HANDLE)
            }
        }
    }

    /// Takes the next place in a stream: what it waits for is fixed now.
    pub(crate) fn begin(&mut self, slot: u32) -> Epoch {
        let s = slot as usize;
        let legacy =
            self.devices.get(self.streams[s].device as usize).map_or(slot, |device| device.legacy);
        if legacy == slot {
            for other in 0..self.streams.len() {
                let stream = &self.streams[other];
                if other != s
                    && stream.blocking
                    && stream.alive
                    && stream.device == self.streams[s].device
                {
                    self.order_after_all(slot, other as u32);
                }
            }
        } else if self.streams[s].blocking {
            self.order_after_all(slot, legacy);
        }
        let stream = &mut self.streams[s];
        stream.submitted += 1;
        let epoch = Epoch { slot, seq: stream.submitted };
        stream.clock.advance(epoch);
        epoch
    }

    fn order_after_all(&mut self, slot: u32, other: u32) {
        let last = Epoch { slot: other, seq: self.streams[other as usize].submitted };
        if last.seq == 0 || self.streams[slot as usize].clock.covers(last) {
            return;
        }
        let (clock, end_ns) = {
            let other = &self.streams[other as usize];
            (other.clock.clone(), other.end_ns)
        };
        self.order_after(slot, last, &clock, end_ns);
    }

    fn order_after(&mut self, slot: u32, epoch: Epoch, clock: &Clock, end_ns: u64) {
        let pending = self.streams[epoch.slot as usize].done < epoch.seq;
        let stream = &mut self.streams[slot as usize];
        stream.clock.join(clock);
        stream.end_ns = stream.end_ns.max(end_ns);
        if pending && epoch.slot != slot {
            stream.after.push(epoch);
        }
    }

    /// Makes later work of one stream wait for all that another has by now: a dependency that the
    /// driver makes by itself.
    pub(crate) fn depend(&mut self, slot: u32, on: Epoch, clock: &Clock) {
        let end_ns = self.streams[on.slot as usize].end_ns;
        self.order_after(slot, on, clock, end_ns);
    }

    /// Puts the operation that `begin` made room for.
    pub(crate) fn push(&mut self, epoch: Epoch, work: Work, duration_ns: u64) {
        let now = self.now_ns;
        let stream = &mut self.streams[epoch.slot as usize];
        stream.end_ns = stream.end_ns.max(now) + duration_ns;
        let after = std::mem::take(&mut stream.after);
        stream.queue.push_back(Op { seq: epoch.seq, after, end_ns: stream.end_ns, work });
        let full = stream.queue.len() > self.config.queue_depth;
        match self.config.progress {
            Progress::Eager => self.run_what_may(epoch),
            Progress::Random if self.rng.below(2) == 0 => {
                let slot = self.rng.below(self.streams.len() as u64) as u32;
                self.step_unless_host(slot);
            }
            _ => {}
        }
        if full {
            let seq = self.streams[epoch.slot as usize].queue.front().map_or(0, |op| op.seq);
            self.run_what_may(Epoch { slot: epoch.slot, seq });
        }
    }

    /// Makes an operation of what a stream was told to wait for, so that it can be waited for itself.
    /// The legacy stream always waits for others.
    pub(crate) fn settle(&mut self, slot: u32) {
        if !self.streams[slot as usize].after.is_empty() || self.is_legacy(slot) {
            let epoch = self.begin(slot);
            self.push(epoch, Work::Nothing, 0);
        }
    }

    fn is_legacy(&self, slot: u32) -> bool {
        let device = self.streams[slot as usize].device as usize;
        self.devices.get(device).is_some_and(|device| device.legacy == slot)
    }

    /// Runs what it can without calling a host function.
    pub(crate) fn run_what_may(&mut self, epoch: Epoch) {
        let mut wanted = vec![epoch];
        while let Some(&next) = wanted.last() {
            if self.streams[next.slot as usize].done >= next.seq {
                wanted.pop();
                continue;
            }
            match self.step_unless_host(next.slot) {
                Step::Ran => {}
                Step::Behind(earlier) => wanted.push(earlier),
                Step::Empty | Step::Busy | Step::Call(..) => return,
            }
        }
    }

    fn step_unless_host(&mut self, slot: u32) -> Step {
        match self.streams[slot as usize].queue.front() {
            Some(Op { work: Work::Host(..), .. }) => Step::Busy,
            _ => self.step(slot),
        }
    }

    fn step(&mut self, slot: u32) -> Step {
        let s = slot as usize;
        if self.streams[s].busy {
            return Step::Busy;
        }
        let Some(op) = self.streams[s].queue.front() else {
            return Step::Empty;
        };
        let pending = |epoch: &&Epoch| self.streams[epoch.slot as usize].done < epoch.seq;
        if let Some(&earlier) = op.after.iter().find(pending) {
            return Step::Behind(earlier);
        }
        let Some(op) = self.streams[s].queue.pop_front() else {
            return Step::Empty;
        };
        match op.work {
            Work::Nothing => {}
            Work::Actions(actions) => self.perform_all(slot, &actions),
            Work::Fault => {
                let device = self.streams[s].device;
                if self.config.sticky_faults {
                    self.devices[device as usize].sticky = code::ERROR_ILLEGAL_ADDRESS;
                }
            }
            Work::GraphDone(exec) => self.graph_ran(exec),
            Work::Host(function, data) => {
                self.streams[s].busy = true;
                return Step::Call(function, data);
            }
        }
        self.streams[s].done = op.seq;
        Step::Ran
    }

    fn perform_all(&mut self, slot: u32, actions: &[Action]) {
        for action in actions {
            if let Err(found) = perform(action) {
                let number = self.streams[slot as usize].number;
                self.violate(Mistake::WrongData, format!("stream {number}: {found}"));
            }
        }
    }

    /// Runs what `epoch` needs, up to the next host function.
    pub(crate) fn pump(&mut self, epoch: Epoch) -> Pump {
        let mut wanted = vec![epoch];
        while let Some(&next) = wanted.last() {
            if self.streams[next.slot as usize].done >= next.seq {
                wanted.pop();
                continue;
            }
            match self.step(next.slot) {
                Step::Ran => {}
                Step::Behind(earlier) => wanted.push(earlier),
                Step::Call(function, data) => return Pump::Call(function, data, next.slot),
                Step::Busy => return Pump::Elsewhere,
                Step::Empty => {
                    wanted.pop();
                }
            }
        }
        Pump::Done
    }

    /// Starts the host function that an operation waits for, if nothing else comes before that.
    pub(crate) fn host_function_before(&mut self, epoch: Epoch) -> Option<(HostFn, usize, u32)> {
        let mut slot = epoch.slot;
        if self.streams[slot as usize].done >= epoch.seq {
            return None;
        }
        loop {
            // The front of a busy stream is behind what it is busy with.
            let op = self.streams[slot as usize]
                .queue
                .front()
                .filter(|_| !self.streams[slot as usize].busy)?;
            let pending = |epoch: &&Epoch| self.streams[epoch.slot as usize].done < epoch.seq;
            match op.after.iter().find(pending) {
                Some(earlier) => slot = earlier.slot,
                None if !matches!(op.work, Work::Host(..)) => return None,
                None if self.config.progress == Progress::Timed && op.end_ns > self.now_ns => {
                    return None;
                }
                None => break,
            }
        }
        match self.step(slot) {
            Step::Call(function, data) => Some((function, data, slot)),
            _ => None,
        }
    }

    pub(crate) fn host_function_done(&mut self, slot: u32) {
        let stream = &mut self.streams[slot as usize];
        stream.busy = false;
        stream.done += 1;
    }

    /// The last operation of a stream.
    pub(crate) fn last(&self, slot: u32) -> Epoch {
        Epoch { slot, seq: self.streams[slot as usize].submitted }
    }

    /// The host has waited for all of a stream, or found it complete.
    pub(crate) fn host_saw_stream(&mut self, slot: u32) {
        let Self { streams, host, .. } = self;
        host.join(&streams[slot as usize].clock);
    }

    /// Whether an operation is complete, after the progress that a query allows.
    fn poll(&mut self, epoch: Epoch, end_ns: u64) -> bool {
        if self.streams[epoch.slot as usize].done >= epoch.seq {
            return true;
        }
        match self.config.progress {
            Progress::Timed => {
                if end_ns > self.now_ns {
                    return false;
                }
                self.run_what_may(epoch);
            }
            Progress::Eager => self.run_what_may(epoch),
            Progress::Lazy | Progress::Random => {
                let mut slot = epoch.slot;
                // One operation of what it waits for; nothing waits in a circle.
                while let Step::Behind(earlier) = self.step_unless_host(slot) {
                    slot = earlier.slot;
                }
                // The one that asked learns of it the next time.
                return false;
            }
        }
        self.streams[epoch.slot as usize].done >= epoch.seq
    }

    pub(crate) fn stream_query(&mut self, slot: u32) -> R {
        let end_ns = self.streams[slot as usize].end_ns;
        if !self.poll(self.last(slot), end_ns) {
            return Err(code::ERROR_NOT_READY);
        }
        self.host_saw_stream(slot);
        self.at_sync_point();
        Ok(())
    }

    /// Ready for a wait of the host: nothing left that only a later operation would run.
    pub(crate) fn prepare_sync(&mut self, slot: u32) -> Epoch {
        self.settle(slot);
        if self.config.progress == Progress::Timed {
            self.now_ns = self.now_ns.max(self.streams[slot as usize].end_ns);
        }
        self.last(slot)
    }

    pub(crate) fn stream_destroy(&mut self, slot: u32) {
        self.settle(slot);
        self.streams[slot as usize].alive = false;
    }

    pub(crate) fn event_create(&mut self, flags: u32) -> R<Event> {
        let index = match self.free_events.pop() {
            Some(index) => index as usize,
            None if self.events.len() < 1 << EVENT_BITS => {
                self.events.push(EventSlot {
                    handle: 0,
                    alive: false,
                    flags: 0,
                    recorded: None,
                    captured: None,
                    spare: Clock::default(),
                });
                self.events.len() - 1
            }
            None => return Err(code::ERROR_OUT_OF_MEMORY),
        };
        let handle = EVENT_TAG ^ (self.unique() << EVENT_BITS | index);
        let event = &mut self.events[index];
        event.handle = handle;
        event.alive = true;
        event.flags = flags;
        event.recorded = None;
        event.captured = None;
        Ok(Event(handle))
    }

    pub(crate) fn event_index(&mut self, event: Event) -> R<usize> {
        let index = event.0 & ((1 << EVENT_BITS) - 1);
        match self.events.get(index) {
            Some(found) if found.handle == event.0 && found.alive => Ok(index),
            _ => {
                self.violate(Mistake::BadHandle, format!("event {:#x} does not exist", event.0));
                Err(code::ERROR_INVALID_HANDLE)
            }
        }
    }

    pub(crate) fn event_destroy(&mut self, event: Event) -> R {
        let index = self.event_index(event)?;
        let event = &mut self.events[index];
        event.alive = false;
        event.captured = None;
        if let Some(record) = event.recorded.take() {
            event.spare = record.clock;
        }
        self.free_events.push(index as u32);
        Ok(())
    }

    pub(crate) fn event_record(&mut self, event: usize, slot: u32) {
        // What a blocking stream and the legacy stream owe each other is fixed when they do something.
        if self.streams[slot as usize].blocking {
            let epoch = self.begin(slot);
            self.push(epoch, Work::Nothing, 0);
        } else {
            self.settle(slot);
        }
        let epoch = self.last(slot);
        let Self { events, streams, .. } = self;
        let (event, stream) = (&mut events[event], &streams[slot as usize]);
        event.captured = None;
        let mut clock = event
            .recorded
            .take()
            .map_or_else(|| std::mem::take(&mut event.spare), |record| record.clock);
        clock.copy_from(&stream.clock);
        event.recorded = Some(Record { epoch, clock, end_ns: stream.end_ns });
    }

    pub(crate) fn event_query(&mut self, event: usize) -> R {
        let Some(record) = &self.events[event].recorded else {
            return Ok(());
        };
        let (epoch, end_ns) = (record.epoch, record.end_ns);
        if !self.poll(epoch, end_ns) {
            return Err(code::ERROR_NOT_READY);
        }
        self.host_saw_event(event);
        Ok(())
    }

    pub(crate) fn host_saw_event(&mut self, event: usize) {
        let Self { events, host, .. } = self;
        if let Some(record) = &events[event].recorded {
            host.join(&record.clock);
        }
        self.at_sync_point();
    }

    pub(crate) fn event_epoch(&self, event: usize) -> Option<Epoch> {
        self.events[event].recorded.as_ref().map(|record| record.epoch)
    }

    /// What a wait for an event has to wait for.
    pub(crate) fn prepare_event_sync(&mut self, event: usize) -> Option<Epoch> {
        let record = self.events[event].recorded.as_ref()?;
        if self.config.progress == Progress::Timed {
            self.now_ns = self.now_ns.max(record.end_ns);
        }
        Some(record.epoch)
    }

    pub(crate) fn stream_wait(&mut self, slot: u32, event: usize) {
        let Some(record) = self.events[event].recorded.take() else {
            return;
        };
        if record.epoch.slot != slot {
            self.order_after(slot, record.epoch, &record.clock, record.end_ns);
        }
        self.events[event].recorded = Some(record);
    }

    pub(crate) fn event_elapsed_ms(&self, start: usize, end: usize) -> R<f32> {
        let ends = [start, end].map(|event| {
            self.events[event].recorded.as_ref().map(|record| (record.epoch, record.end_ns))
        });
        let [Some(start), Some(end)] = ends else {
            return Err(code::ERROR_INVALID_HANDLE);
        };
        if [start, end].iter().any(|(epoch, _)| self.streams[epoch.slot as usize].done < epoch.seq)
        {
            return Err(code::ERROR_NOT_READY);
        }
        Ok((end.1 as f64 - start.1 as f64) as f32 / 1e6)
    }

    /// Streams of a device that have work.
    pub(crate) fn streams_of(&self, device: u32) -> Vec<u32> {
        let of_device =
            |(slot, stream): (usize, &StreamSlot)| (stream.device == device).then_some(slot as u32);
        self.streams.iter().enumerate().filter_map(of_device).collect()
    }
}
