//! Captures and graphs.
//!
//! What is submitted to a capturing stream becomes a node. A launch of the graph is judged against the
//! rest of the program like any work of its stream; nodes of one graph that nothing orders are judged
//! against each other when the capture ends.

use std::sync::Arc;

use thermalloc_cuda::driver::{DevicePtr, HostFn, code, constant};

use crate::clock::Epoch;
use crate::memory::{Access, Action, Kind, Mode, Piece, Place};
use crate::state::{Mistake, R, State};
use crate::stream::{StreamCapture, Work};

/// Something for a stream to do.
#[derive(Clone, Debug)]
pub(crate) enum Submission {
    Kernel(Vec<Access>),
    Fill {
        ptr: u64,
        len: u64,
        pattern: [u8; 4],
    },
    CopyDevice {
        to: u64,
        from: u64,
        len: u64,
    },
    CopyIn {
        to: u64,
        host: u64,
        len: u64,
    },
    CopyOut {
        host: u64,
        from: u64,
        len: u64,
    },
    Host(HostFn, usize),
    /// Allocation and free of a graph's own memory, joins.
    Empty,
}

pub(crate) struct Node {
    after: Vec<usize>,
    submission: Submission,
}

/// What a graph and its instances share.
pub(crate) struct Body {
    nodes: Vec<Node>,
    /// Own memory, and whether the graph frees it itself.
    allocs: Vec<(DevicePtr, bool)>,
}

pub(crate) struct GraphData {
    body: Arc<Body>,
    objects: Vec<(usize, u32)>,
}

pub(crate) struct ExecData {
    body: Arc<Body>,
    objects: Vec<usize>,
    pending: u64,
    destroyed: bool,
}

pub(crate) struct ObjectData {
    refs: u32,
    data: usize,
    destroy: HostFn,
}

pub(crate) struct Capture {
    origin: u32,
    pub(crate) mode: u32,
    pub(crate) thread: u64,
    pub(crate) invalid: bool,
    nodes: Vec<Node>,
    allocs: Vec<(DevicePtr, bool)>,
    objects: Vec<(usize, u32)>,
    members: Vec<u32>,
    handle: usize,
}

const GRAPH_TAG: usize = 0x6700_0000_0000;
const EXEC_TAG: usize = 0x6500_0000_0000;
const OBJECT_TAG: usize = 0x6f00_0000_0000;

impl State {
    /// Runs, or captures, what a stream is given.
    pub(crate) fn submit(&mut self, slot: u32, submission: Submission, duration_ns: u64) -> R {
        if self.streams[slot as usize].capture.is_some() {
            return self.capture_node(slot, submission);
        }
        self.forbid_implicit(slot)?;
        self.submit_now(slot, &submission, duration_ns);
        Ok(())
    }

    fn submit_now(&mut self, slot: u32, submission: &Submission, duration_ns: u64) -> Epoch {
        let epoch = self.begin(slot);
        let (work, bytes) = match submission {
            Submission::Empty => (Work::Nothing, 0),
            Submission::Host(function, data) => (Work::Host(*function, *data), 0),
            other => self.realise(epoch, other),
        };
        let latency = self.config.latency;
        let moved = (bytes * 1000).checked_div(latency.bytes_per_us).unwrap_or(0);
        self.push(
            epoch,
            work,
            if duration_ns == 0 { latency.kernel_ns + moved } else { duration_ns },
        );
        epoch
    }

    /// Judges all that an operation touches, and finds where the bytes are.
    fn realise(&mut self, epoch: Epoch, submission: &Submission) -> (Work, u64) {
        let mut actions = Vec::new();
        let mut bytes = 0;
        let keeps = self.config.data != crate::config::Data::None;
        let whole = match submission {
            Submission::Kernel(accesses) => accesses.iter().all(|access| {
                bytes += access.len;
                let (reads, writes) = match access.mode {
                    Mode::Read | Mode::Expect(_) => (true, false),
                    Mode::Write(_) => (false, true),
                    Mode::Update(_) => (true, true),
                };
                let pieces = self.touch(epoch, access.ptr, access.len, reads, writes);
                if let Some(pieces) = &pieces {
                    self.actions(access.mode, pieces, &mut actions);
                }
                pieces.is_some()
            }),
            Submission::Fill { ptr, len, pattern } => {
                bytes = *len;
                let pieces = self.touch(epoch, *ptr, *len, false, true);
                for to in pieces.iter().flatten().filter(|_| keeps) {
                    actions.push(Action::Fill { to: *to, pattern: *pattern, edges: false });
                }
                pieces.is_some()
            }
            Submission::CopyDevice { to, from, len } => {
                bytes = *len;
                let from = self.touch(epoch, *from, *len, true, false);
                let to = self.touch(epoch, *to, *len, false, true);
                self.copy(from, to, keeps, &mut actions)
            }
            Submission::CopyIn { to, host, len } => {
                bytes = *len;
                let from = self.host_pieces(epoch, *host, *len, false);
                let to = self.touch(epoch, *to, *len, false, true);
                match (from, to) {
                    // Memory that the driver does not know is read at once, as drivers do.
                    (None, Some(to)) => {
                        let data = if keeps { bytes_of(*host, *len) } else { Box::default() };
                        actions.push(Action::Store { data, to });
                        true
                    }
                    (from, to) => self.copy(from, to, keeps, &mut actions),
                }
            }
            Submission::CopyOut { host, from, len } => {
                bytes = *len;
                let from = self.touch(epoch, *from, *len, true, false);
                let pageable = Piece { place: Place::Host { at: *host }, len: *len };
                let to =
                    self.host_pieces(epoch, *host, *len, true).unwrap_or_else(|| vec![pageable]);
                self.copy(from, Some(to), keeps, &mut actions)
            }
            Submission::Host(..) | Submission::Empty => true,
        };
        match (whole, actions.is_empty()) {
            (false, _) => (Work::Fault, bytes),
            (true, true) => (Work::Nothing, bytes),
            (true, false) => (Work::Actions(actions.into_boxed_slice()), bytes),
        }
    }

    fn copy(
        &self,
        from: Option<Vec<Piece>>,
        to: Option<Vec<Piece>>,
        keeps: bool,
        actions: &mut Vec<Action>,
    ) -> bool {
        let (Some(from), Some(to)) = (from, to) else {
            return false;
        };
        if keeps {
            actions.push(Action::Copy { from, to });
        }
        true
    }

    /// The pieces of pinned, registered or managed host memory; `None` of any other.
    fn host_pieces(
        &mut self,
        epoch: Epoch,
        host: u64,
        len: u64,
        writes: bool,
    ) -> Option<Vec<Piece>> {
        self.region_at(host)?;
        self.touch(epoch, host, len, !writes, writes)
    }

    pub(crate) fn is_known_host(&self, host: u64) -> bool {
        self.region_at(host).is_some()
    }

    fn capture_node(&mut self, slot: u32, submission: Submission) -> R {
        let Some(part) = &self.streams[slot as usize].capture else {
            return Err(code::ERROR_ILLEGAL_STATE);
        };
        let (id, after) = (part.id, part.tail.clone());
        let Some(capture) = self.captures.get_mut(&id) else {
            return Err(code::ERROR_ILLEGAL_STATE);
        };
        if capture.invalid {
            return Err(code::ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        capture.nodes.push(Node { after, submission });
        let node = capture.nodes.len() - 1;
        if let Some(part) = &mut self.streams[slot as usize].capture {
            part.tail = vec![node];
        }
        Ok(())
    }

    pub(crate) fn invalidate(&mut self, id: u64) {
        if let Some(capture) = self.captures.get_mut(&id) {
            capture.invalid = true;
        }
    }

    /// The code of a stream that captures, where the call is not one that a capture can hold.
    pub(crate) fn forbid_capture(&mut self, slot: u32) -> R {
        let Some(id) = self.streams[slot as usize].capture.as_ref().map(|part| part.id) else {
            return Ok(());
        };
        self.invalidate(id);
        self.violate(
            Mistake::Capture,
            format!("a wait for or query of stream {slot} that captures"),
        );
        Err(code::ERROR_STREAM_CAPTURE_UNSUPPORTED)
    }

    /// Work of the legacy stream would have to wait for blocking streams that capture.
    fn forbid_implicit(&mut self, slot: u32) -> R {
        if self.captures.is_empty() {
            return Ok(());
        }
        let device = self.streams[slot as usize].device;
        if self.devices[device as usize].legacy != slot {
            return Ok(());
        }
        let captured =
            self.streams.iter().filter(|stream| stream.blocking && stream.device == device);
        let ids: Vec<u64> =
            captured.filter_map(|stream| stream.capture.as_ref().map(|part| part.id)).collect();
        if ids.is_empty() {
            return Ok(());
        }
        for id in ids {
            self.invalidate(id);
        }
        self.violate(
            Mistake::Capture,
            "work on the legacy stream while a blocking stream captures".to_owned(),
        );
        Err(code::ERROR_STREAM_CAPTURE_IMPLICIT)
    }

    /// Judges a call that a capture may not see: allocation, queries, waits.
    pub(crate) fn forbid_unsafe(&mut self, call: &str, thread: u64, thread_mode: u32) -> R {
        if self.captures.is_empty() || thread_mode == constant::STREAM_CAPTURE_MODE_RELAXED {
            return Ok(());
        }
        let forbids = |capture: &Capture| match capture.mode {
            constant::STREAM_CAPTURE_MODE_GLOBAL => {
                thread_mode == constant::STREAM_CAPTURE_MODE_GLOBAL || capture.thread == thread
            }
            constant::STREAM_CAPTURE_MODE_THREAD_LOCAL => capture.thread == thread,
            _ => false,
        };
        let mut forbidden = false;
        for capture in self.captures.values_mut().filter(|capture| forbids(capture)) {
            capture.invalid = true;
            forbidden = true;
        }
        if !forbidden {
            return Ok(());
        }
        self.violate(Mistake::Capture, format!("{call} while a stream captures"));
        Err(code::ERROR_STREAM_CAPTURE_UNSUPPORTED)
    }

    pub(crate) fn begin_capture(&mut self, slot: u32, mode: u32, thread: u64) -> R {
        let device = self.streams[slot as usize].device;
        if self.devices[device as usize].legacy == slot {
            return Err(code::ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        if self.streams[slot as usize].capture.is_some() {
            return Err(code::ERROR_ILLEGAL_STATE);
        }
        let id = self.unique() as u64;
        let handle = GRAPH_TAG | self.unique() << 4;
        self.streams[slot as usize].capture = Some(StreamCapture { id, tail: Vec::new() });
        self.captures.insert(
            id,
            Capture {
                origin: slot,
                mode,
                thread,
                invalid: false,
                nodes: Vec::new(),
                allocs: Vec::new(),
                objects: Vec::new(),
                members: vec![slot],
                handle,
            },
        );
        Ok(())
    }

    pub(crate) fn end_capture(&mut self, slot: u32, thread: u64) -> R<usize> {
        let id = self.streams[slot as usize]
            .capture
            .as_ref()
            .map(|part| part.id)
            .ok_or(code::ERROR_ILLEGAL_STATE)?;
        let capture = self.captures.get_mut(&id).ok_or(code::ERROR_ILLEGAL_STATE)?;
        if capture.origin != slot {
            capture.invalid = true;
            return Err(code::ERROR_STREAM_CAPTURE_UNMATCHED);
        }
        if capture.mode != constant::STREAM_CAPTURE_MODE_RELAXED && capture.thread != thread {
            return Err(code::ERROR_STREAM_CAPTURE_WRONG_THREAD);
        }
        let capture = self.captures.remove(&id).ok_or(code::ERROR_ILLEGAL_STATE)?;
        let tail =
            self.streams[slot as usize].capture.take().map(|part| part.tail).unwrap_or_default();
        let mut joined = true;
        for &member in &capture.members {
            if let Some(part) = self.streams[member as usize].capture.take() {
                joined &= part
                    .tail
                    .iter()
                    .all(|&node| tail.iter().any(|&last| capture.reaches(node, last)));
            }
        }
        if capture.invalid || !joined {
            self.drop_allocs(&capture.allocs);
            for (object, count) in capture.objects {
                self.object_release(object, count)?;
            }
            return Err(if capture.invalid {
                code::ERROR_STREAM_CAPTURE_INVALIDATED
            } else {
                code::ERROR_STREAM_CAPTURE_UNJOINED
            });
        }
        self.judge_nodes(&capture);
        let Capture { handle, nodes, allocs, objects, .. } = capture;
        self.graphs.insert(handle, GraphData { body: Arc::new(Body { nodes, allocs }), objects });
        Ok(handle)
    }

    /// Finds pairs of nodes that touch the same memory with nothing between them.
    fn judge_nodes(&mut self, capture: &Capture) {
        let touched: Vec<Vec<(u64, u64, bool)>> =
            capture.nodes.iter().map(|node| node.submission.touches()).collect();
        for later in 0..touched.len() {
            for earlier in 0..later {
                let clash = touched[later].iter().find(|a| {
                    touched[earlier]
                        .iter()
                        .any(|b| a.0 < b.0 + b.1 && b.0 < a.0 + a.1 && (a.2 || b.2))
                });
                if let Some(at) = clash.filter(|_| !capture.reaches(earlier, later)) {
                    let text = format!(
                        "nodes {earlier} and {later} of a graph touch {:#x}, {} bytes",
                        at.0, at.1
                    );
                    self.violate(Mistake::Race, text);
                }
            }
        }
    }

    /// The capture that a stream is in: status, id, graph.
    pub(crate) fn capture_info(&self, slot: u32) -> (u32, u64, usize) {
        let Some(part) = &self.streams[slot as usize].capture else {
            return (constant::STREAM_CAPTURE_STATUS_NONE, 0, 0);
        };
        match self.captures.get(&part.id) {
            Some(capture) if !capture.invalid => {
                (constant::STREAM_CAPTURE_STATUS_ACTIVE, part.id, capture.handle)
            }
            _ => (constant::STREAM_CAPTURE_STATUS_INVALIDATED, part.id, 0),
        }
    }

    /// Records an event of a stream that captures; whether it does.
    pub(crate) fn capture_record(&mut self, event: usize, slot: u32) -> bool {
        let Some(part) = &self.streams[slot as usize].capture else {
            return false;
        };
        self.events[event].captured = Some((part.id, part.tail.clone()));
        true
    }

    /// Waits for an event that a capture holds; whether it does.
    pub(crate) fn capture_wait(&mut self, slot: u32, event: usize) -> R<bool> {
        let captured = self.events[event].captured.clone();
        let mine = self.streams[slot as usize].capture.as_ref().map(|part| part.id);
        let Some((id, nodes)) = captured else {
            if let Some(id) = mine {
                self.invalidate(id);
                self.violate(
                    Mistake::Capture,
                    "a captured wait for an event from outside of the capture".to_owned(),
                );
                return Err(code::ERROR_STREAM_CAPTURE_ISOLATION);
            }
            return Ok(false);
        };
        let Some(capture) = self.captures.get_mut(&id) else {
            return Err(code::ERROR_CAPTURED_EVENT);
        };
        let part = match (&mut self.streams[slot as usize].capture, mine) {
            (Some(part), Some(mine)) if mine == id => part,
            (Some(_), _) => {
                capture.invalid = true;
                return Err(code::ERROR_STREAM_CAPTURE_MERGE);
            }
            (empty, _) => {
                capture.members.push(slot);
                empty.insert(StreamCapture { id, tail: Vec::new() })
            }
        };
        for node in nodes {
            if !part.tail.contains(&node) {
                part.tail.push(node);
            }
        }
        Ok(true)
    }

    /// The capture that an event was recorded in last, even if that is over.
    pub(crate) fn event_capture(&self, event: usize) -> Option<u64> {
        self.events[event].captured.as_ref().map(|(id, _)| *id)
    }

    /// Allocates a graph's own memory as a node.
    pub(crate) fn capture_alloc(&mut self, slot: u32, bytes: u64) -> R<DevicePtr> {
        let device = self.streams[slot as usize].device;
        let at = self.mem_alloc(device, bytes, Kind::Graph)?;
        self.capture_node(slot, Submission::Empty)?;
        let id = self.streams[slot as usize].capture.as_ref().map_or(0, |part| part.id);
        if let Some(capture) = self.captures.get_mut(&id) {
            capture.allocs.push((at, false));
        }
        let held = &mut self.devices[device as usize];
        held.graph_used += Self::alloc_charge(bytes);
        held.graph_used_high = held.graph_used_high.max(held.graph_used);
        held.graph_reserved_high = held.graph_reserved_high.max(held.graph_used);
        Ok(at)
    }

    pub(crate) fn capture_free(&mut self, slot: u32, at: DevicePtr) -> R {
        let id = self.streams[slot as usize].capture.as_ref().map_or(0, |part| part.id);
        let own = self
            .captures
            .get_mut(&id)
            .and_then(|capture| capture.allocs.iter_mut().find(|own| own.0 == at));
        let Some(own) = own.filter(|own| !own.1) else {
            self.invalidate(id);
            return Err(self.bad_free("a captured cuMemFreeAsync", at));
        };
        own.1 = true;
        self.capture_node(slot, Submission::Empty)
    }

    pub(crate) fn graph_memory_freed(&mut self, at: DevicePtr) {
        if let Some(region) = self.regions.get(&at).filter(|region| region.kind == Kind::Graph) {
            let (device, charge) = (region.device, Self::alloc_charge(region.len));
            self.devices[device as usize].graph_used -= charge;
        }
    }

    fn drop_allocs(&mut self, allocs: &[(DevicePtr, bool)]) {
        for &(at, _) in allocs
            .iter()
            .filter(|own| self.regions.get(&own.0).is_some_and(|r| r.kind == Kind::Graph))
            .collect::<Vec<_>>()
        {
            self.graph_memory_freed(at);
            let _gone = self.mem_free(at);
        }
    }

    fn drop_body(&mut self, body: Arc<Body>) {
        if let Some(body) = Arc::into_inner(body) {
            let own: Vec<_> = body.allocs.into_iter().filter(|(_, freed)| *freed).collect();
            self.drop_allocs(&own);
        }
    }

    fn graph_mut(&mut self, graph: usize) -> R<&mut GraphData> {
        if !self.graphs.contains_key(&graph) {
            self.violate(Mistake::BadHandle, format!("graph {graph:#x} does not exist"));
        }
        self.graphs.get_mut(&graph).ok_or(code::ERROR_INVALID_VALUE)
    }

    pub(crate) fn graph_create(&mut self) -> usize {
        let handle = GRAPH_TAG | self.unique() << 4;
        let body = Arc::new(Body { nodes: Vec::new(), allocs: Vec::new() });
        self.graphs.insert(handle, GraphData { body, objects: Vec::new() });
        handle
    }

    pub(crate) fn graph_destroy(&mut self, graph: usize) -> R {
        self.graph_mut(graph)?;
        if let Some(GraphData { body, objects }) = self.graphs.remove(&graph) {
            for (object, count) in objects {
                self.object_release(object, count)?;
            }
            self.drop_body(body);
        }
        Ok(())
    }

    pub(crate) fn graph_instantiate(&mut self, graph: usize) -> R<usize> {
        let data = self.graph_mut(graph)?;
        let body = Arc::clone(&data.body);
        let objects: Vec<usize> = data.objects.iter().map(|(object, _)| *object).collect();
        for object in &objects {
            if let Some(data) = self.objects.get_mut(object) {
                data.refs += 1;
            }
        }
        let exec = EXEC_TAG | self.unique() << 4;
        self.execs.insert(exec, ExecData { body, objects, pending: 0, destroyed: false });
        Ok(exec)
    }

    pub(crate) fn graph_launch(&mut self, exec: usize, slot: u32) -> R {
        let Some(data) = self.execs.get_mut(&exec).filter(|data| !data.destroyed) else {
            self.violate(
                Mistake::BadHandle,
                format!("instantiated graph {exec:#x} does not exist"),
            );
            return Err(code::ERROR_INVALID_VALUE);
        };
        if self.streams[slot as usize].capture.is_some() {
            return Err(code::ERROR_NOT_SUPPORTED);
        }
        data.pending += 1;
        let body = Arc::clone(&data.body);
        for node in &body.nodes {
            self.submit_now(slot, &node.submission, 0);
        }
        drop(body);
        let epoch = self.begin(slot);
        self.push(epoch, Work::GraphDone(exec), 0);
        Ok(())
    }

    pub(crate) fn graph_ran(&mut self, exec: usize) {
        if let Some(data) = self.execs.get_mut(&exec) {
            data.pending -= 1;
            if data.destroyed && data.pending == 0 {
                self.exec_drop(exec);
            }
        }
    }

    pub(crate) fn exec_destroy(&mut self, exec: usize) -> R {
        let Some(data) = self.execs.get_mut(&exec).filter(|data| !data.destroyed) else {
            self.violate(
                Mistake::BadHandle,
                format!("instantiated graph {exec:#x} is destroyed twice"),
            );
            return Err(code::ERROR_INVALID_VALUE);
        };
        data.destroyed = true;
        if data.pending == 0 {
            self.exec_drop(exec);
        }
        Ok(())
    }

    fn exec_drop(&mut self, exec: usize) {
        if let Some(ExecData { body, objects, .. }) = self.execs.remove(&exec) {
            for object in objects {
                let _known = self.object_release(object, 1);
            }
            self.drop_body(body);
        }
    }

    pub(crate) fn object_create(&mut self, data: usize, destroy: HostFn, refs: u32) -> usize {
        let object = OBJECT_TAG | self.unique() << 4;
        self.objects.insert(object, ObjectData { refs, data, destroy });
        object
    }

    pub(crate) fn object_retain(&mut self, object: usize, count: u32) -> R {
        self.objects.get_mut(&object).ok_or(code::ERROR_INVALID_VALUE)?.refs += count;
        Ok(())
    }

    pub(crate) fn object_release(&mut self, object: usize, count: u32) -> R {
        let Some(data) = self.objects.get_mut(&object).filter(|data| data.refs >= count) else {
            self.violate(
                Mistake::DoubleFree,
                format!("user object {object:#x} has not {count} references"),
            );
            return Err(code::ERROR_INVALID_VALUE);
        };
        data.refs -= count;
        if data.refs == 0 {
            self.deferred.push((data.destroy, data.data));
            self.objects.remove(&object);
        }
        Ok(())
    }

    /// Gives a graph, or the capture that makes it, references to an object.
    pub(crate) fn graph_retain(
        &mut self,
        graph: usize,
        object: usize,
        count: u32,
        moves: bool,
    ) -> R {
        if !moves {
            self.object_retain(object, count)?;
        }
        if let Some(capture) = self.captures.values_mut().find(|capture| capture.handle == graph) {
            capture.objects.push((object, count));
            return Ok(());
        }
        self.graph_mut(graph)?.objects.push((object, count));
        Ok(())
    }

    pub(crate) fn graph_release(&mut self, graph: usize, object: usize, count: u32) -> R {
        let data = self.graph_mut(graph)?;
        let held = data.objects.iter_mut().find(|(held, refs)| *held == object && *refs >= count);
        held.ok_or(code::ERROR_INVALID_VALUE)?.1 -= count;
        data.objects.retain(|(_, refs)| *refs > 0);
        self.object_release(object, count)
    }
}

impl Capture {
    /// Whether a node comes before another, or is it.
    fn reaches(&self, earlier: usize, later: usize) -> bool {
        let mut seen = vec![false; later + 1];
        let mut wanted = vec![later];
        while let Some(node) = wanted.pop() {
            if node == earlier {
                return true;
            }
            for &before in &self.nodes[node].after {
                if before >= earlier && !std::mem::replace(&mut seen[before], true) {
                    wanted.push(before);
                }
            }
        }
        false
    }
}

impl Submission {
    /// Address, length, whether written.
    fn touches(&self) -> Vec<(u64, u64, bool)> {
        match self {
            Self::Kernel(accesses) => accesses
                .iter()
                .map(|access| {
                    (
                        access.ptr,
                        access.len,
                        matches!(access.mode, Mode::Write(_) | Mode::Update(_)),
                    )
                })
                .collect(),
            Self::Fill { ptr, len, .. } => vec![(*ptr, *len, true)],
            Self::CopyDevice { to, from, len } => vec![(*from, *len, false), (*to, *len, true)],
            Self::CopyIn { to, host, len } => vec![(*host, *len, false), (*to, *len, true)],
            Self::CopyOut { host, from, len } => vec![(*from, *len, false), (*host, *len, true)],
            Self::Host(..) | Self::Empty => Vec::new(),
        }
    }
}

fn bytes_of(host: u64, len: u64) -> Box<[u8]> {
    // SAFETY: the program gives this memory to read, for as long as the call lasts.
    unsafe { std::slice::from_raw_parts(host as *const u8, len as usize) }.into()
}
