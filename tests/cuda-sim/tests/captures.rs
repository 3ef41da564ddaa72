//! Captures and graphs.

mod common;

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};

use common::{MIB, Machine, call, strict};
use thermalloc_cuda::driver::{Error, Graph, GraphExec, Stream, UserObject, code, constant};
use thermalloc_cuda_sim::{Access, Mistake};

impl Machine {
    fn begin(&self, stream: Stream, mode: u32) {
        call!(self, stream_begin_capture(stream, mode)).unwrap();
    }

    fn end(&self, stream: Stream) -> Result<Graph, Error> {
        let mut graph = Graph::NULL;
        call!(self, stream_end_capture(stream, &raw mut graph))?;
        Ok(graph)
    }

    fn instantiate(&self, graph: Graph) -> GraphExec {
        let mut exec = GraphExec::NULL;
        call!(self, graph_instantiate(&raw mut exec, graph, 0)).unwrap();
        exec
    }

    fn try_alloc(&self, bytes: usize) -> Result<(), Error> {
        let mut ptr = 0;
        call!(self, mem_alloc(&raw mut ptr, bytes))
    }

    fn status(&self, stream: Stream) -> u32 {
        let mut status = 9;
        call!(self, stream_is_capturing(stream, &raw mut status)).unwrap();
        status
    }
}

const GLOBAL: u32 = constant::STREAM_CAPTURE_MODE_GLOBAL;
const THREAD_LOCAL: u32 = constant::STREAM_CAPTURE_MODE_THREAD_LOCAL;
const RELAXED: u32 = constant::STREAM_CAPTURE_MODE_RELAXED;

#[test]
fn captured_work_runs_when_the_graph_is_launched() {
    let m = Machine::new(strict());
    let (stream, other) = (m.stream(), m.stream());
    let ptr = m.alloc(4096);
    m.write(stream, ptr, 4096, 1);
    m.begin(stream, GLOBAL);
    assert_eq!(m.status(stream), constant::STREAM_CAPTURE_STATUS_ACTIVE);
    m.write(stream, ptr, 4096, 2);
    let graph = m.end(stream).unwrap();
    assert_eq!(m.status(stream), constant::STREAM_CAPTURE_STATUS_NONE);
    m.expect(stream, ptr, 4096, 1);
    m.sync(stream);
    let exec = m.instantiate(graph);
    call!(m, graph_destroy(graph)).unwrap();
    for _ in 0..3 {
        call!(m, graph_launch(exec, stream)).unwrap();
        m.expect(stream, ptr, 4096, 2);
        m.write(stream, ptr, 4096, 3);
    }
    m.sync(stream);
    m.sim.assert_clean();
    call!(m, graph_launch(exec, other)).unwrap();
    m.write(stream, ptr, 4096, 4);
    m.only(Mistake::Race);
    call!(m, graph_exec_destroy(exec)).unwrap();
    assert!(call!(m, graph_launch(exec, other)).is_err());
    m.only(Mistake::BadHandle);
}

#[test]
fn a_capture_forks_and_joins_by_events() {
    for join in [true, false] {
        let m = Machine::new(strict());
        let (a, b, fork, done) = (m.stream(), m.stream(), m.event(), m.event());
        let ptr = m.alloc(8192);
        m.begin(a, GLOBAL);
        m.write(a, ptr, 8192, 1);
        m.record(fork, a);
        m.wait(b, fork);
        assert_eq!(m.status(b), constant::STREAM_CAPTURE_STATUS_ACTIVE);
        m.write(b, ptr, 4096, 2);
        m.write(a, ptr + 4096, 4096, 3);
        if join {
            m.record(done, b);
            m.wait(a, done);
            m.expect(a, ptr, 4096, 2);
        }
        let graph = m.end(a);
        assert_eq!(graph.is_ok(), join);
        if let Err(error) = graph {
            assert_eq!(error.code(), Some(code::ERROR_STREAM_CAPTURE_UNJOINED));
        }
        assert_eq!(m.status(b), constant::STREAM_CAPTURE_STATUS_NONE);
        m.sim.assert_clean();
    }
}

#[test]
fn nodes_that_nothing_orders_race() {
    let m = Machine::new(strict());
    let (a, b, fork, done) = (m.stream(), m.stream(), m.event(), m.event());
    let ptr = m.alloc(8192);
    m.begin(a, GLOBAL);
    m.read(a, ptr, 8);
    m.record(fork, a);
    m.wait(b, fork);
    m.write(b, ptr, 4096, 2);
    m.write(a, ptr, 4096, 3);
    m.record(done, b);
    m.wait(a, done);
    m.read(a, ptr, 8);
    m.end(a).unwrap();
    m.only(Mistake::Race);
}

#[test]
fn what_a_capture_forbids() {
    let m = Machine::new(strict());
    let (stream, event) = (m.stream(), m.event());
    type Forbidden<'a> = (&'a str, &'a dyn Fn() -> Result<(), Error>, u32);
    let forbidden: [Forbidden; 5] = [
        ("query", &|| call!(m, stream_query(stream)), code::ERROR_STREAM_CAPTURE_UNSUPPORTED),
        (
            "synchronize",
            &|| call!(m, stream_synchronize(stream)),
            code::ERROR_STREAM_CAPTURE_UNSUPPORTED,
        ),
        ("allocate", &|| m.try_alloc(512), code::ERROR_STREAM_CAPTURE_UNSUPPORTED),
        (
            "query an event",
            &|| call!(m, event_query(event)),
            code::ERROR_STREAM_CAPTURE_UNSUPPORTED,
        ),
        (
            "synchronize all",
            &|| call!(m, ctx_synchronize()),
            code::ERROR_STREAM_CAPTURE_UNSUPPORTED,
        ),
    ];
    for (what, call, code) in forbidden {
        m.begin(stream, GLOBAL);
        assert_eq!(call().unwrap_err().code(), Some(code), "{what}");
        m.only(Mistake::Capture);
        assert_eq!(m.status(stream), constant::STREAM_CAPTURE_STATUS_INVALIDATED, "{what}");
        assert!(m.sim.launch(stream, &[]).is_err());
        assert_eq!(m.end(stream).unwrap_err().code(), Some(code::ERROR_STREAM_CAPTURE_INVALIDATED));
        assert_eq!(m.status(stream), constant::STREAM_CAPTURE_STATUS_NONE);
    }
    m.begin(stream, RELAXED);
    let ptr = m.alloc(512);
    assert!(m.ready(event), "a relaxed capture allows it");
    m.record(event, stream);
    let captured = call!(m, event_query(event)).unwrap_err();
    assert_eq!(captured.code(), Some(code::ERROR_CAPTURED_EVENT));
    m.only(Mistake::Capture);
    assert!(m.end(stream).is_err());
    m.free(ptr).unwrap();
    m.sim.assert_clean();
}

#[test]
fn the_mode_of_a_thread_decides_what_another_thread_forbids() {
    let m = Machine::new(strict());
    let stream = m.stream();
    let from_other_thread = |mode: u32| {
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                m.sim.use_device(&m.driver, 0).unwrap();
                let mut exchanged = mode;
                call!(m, thread_exchange_stream_capture_mode(&raw mut exchanged)).unwrap();
                assert_eq!(exchanged, GLOBAL);
                let mut ptr = 0;
                call!(m, mem_alloc(&raw mut ptr, 512)).is_ok()
            });
            other.join().unwrap()
        })
    };
    for (capture, thread, allowed) in [
        (GLOBAL, GLOBAL, false),
        (GLOBAL, THREAD_LOCAL, true),
        (GLOBAL, RELAXED, true),
        (THREAD_LOCAL, GLOBAL, true),
        (RELAXED, GLOBAL, true),
    ] {
        m.begin(stream, capture);
        assert_eq!(from_other_thread(thread), allowed, "{capture} {thread}");
        assert_eq!(m.end(stream).is_ok(), allowed);
        m.sim.take_violations();
    }
}

#[test]
fn the_legacy_stream_and_a_blocking_stream_that_captures() {
    let m = Machine::new(strict());
    let blocking = m.stream_with(constant::STREAM_DEFAULT);
    let ptr = m.alloc(512);
    assert!(call!(m, stream_begin_capture(Stream::NULL, GLOBAL)).is_err());
    m.begin(blocking, GLOBAL);
    let error = m.sim.launch(Stream::NULL, &[Access::read(ptr, 8)]).unwrap_err();
    assert_eq!(error.code(), Some(code::ERROR_STREAM_CAPTURE_IMPLICIT));
    m.only(Mistake::Capture);
    assert!(m.end(blocking).is_err());
}

#[test]
fn an_event_from_outside_does_not_enter_a_capture() {
    let m = Machine::new(strict());
    let (a, b, event) = (m.stream(), m.stream(), m.event());
    m.record(event, b);
    m.begin(a, GLOBAL);
    let error = call!(m, stream_wait_event(a, event, 0)).unwrap_err();
    assert_eq!(error.code(), Some(code::ERROR_STREAM_CAPTURE_ISOLATION));
    m.only(Mistake::Capture);
    assert!(m.end(a).is_err());
}

#[test]
fn an_event_stays_the_captures_until_it_is_recorded_again() {
    let m = Machine::new(strict());
    let (stream, event) = (m.stream(), m.event());
    m.begin(stream, GLOBAL);
    m.record(event, stream);
    m.end(stream).unwrap();
    let captured = call!(m, event_query(event)).unwrap_err();
    assert_eq!(captured.code(), Some(code::ERROR_CAPTURED_EVENT));
    m.only(Mistake::Capture);
    assert!(call!(m, stream_wait_event(stream, event, 0)).is_err());
    m.record(event, stream);
    while !m.ready(event) {}
    m.sim.assert_clean();
}

#[test]
fn memory_of_a_graph_lives_as_long_as_the_graph() {
    let m = Machine::new(strict());
    let stream = m.stream();
    m.begin(stream, GLOBAL);
    let ptr = m.alloc_async(MIB, stream).unwrap();
    m.write(stream, ptr, MIB, 4);
    m.free_async(ptr, stream).unwrap();
    let graph = m.end(stream).unwrap();
    let used = || {
        let mut used = 0u64;
        let attribute = constant::GRAPH_MEM_ATTR_USED_MEM_CURRENT;
        call!(m, device_get_graph_mem_attribute(0, attribute, (&raw mut used).cast())).unwrap();
        used
    };
    assert_eq!(used(), MIB);
    let exec = m.instantiate(graph);
    call!(m, graph_destroy(graph)).unwrap();
    call!(m, graph_launch(exec, stream)).unwrap();
    m.sync(stream);
    assert_eq!(used(), MIB);
    call!(m, graph_exec_destroy(exec)).unwrap();
    assert_eq!((used(), m.sim.used_bytes(0)), (0, 0));
    m.begin(stream, GLOBAL);
    m.alloc_async(MIB, stream).unwrap();
    m.sim.fail(
        thermalloc_cuda::driver::Call::cuMemcpyDtoDAsync_v2,
        0,
        1,
        code::ERROR_INVALID_VALUE,
    );
    assert!(call!(m, stream_synchronize(stream)).is_err());
    assert!(m.end(stream).is_err());
    assert_eq!(used(), 0, "a capture that fails keeps nothing");
    m.sim.take_violations();
    call!(m, stream_destroy(stream)).unwrap();
    m.sim.assert_clean_and_empty();
}

#[test]
fn user_objects_die_with_the_last_graph_that_runs() {
    unsafe extern "C" fn count(data: *mut c_void) {
        // SAFETY: the test's counter.
        unsafe { &*data.cast::<AtomicU32>() }.fetch_add(1, Ordering::Relaxed);
    }
    let m = Machine::new(strict());
    let stream = m.stream();
    let died = AtomicU32::new(0);
    let ptr = m.alloc(512);
    m.begin(stream, GLOBAL);
    m.write(stream, ptr, 512, 1);
    let (mut status, mut id, mut graph) = (0, 0, Graph::NULL);
    let nothing = std::ptr::null_mut();
    call!(
        m,
        stream_get_capture_info_v2(
            stream,
            &raw mut status,
            &raw mut id,
            &raw mut graph,
            nothing,
            std::ptr::null_mut()
        )
    )
    .unwrap();
    assert!(id != 0 && graph != Graph::NULL);
    let mut object = UserObject::NULL;
    let data = (&raw const died).cast_mut().cast();
    call!(
        m,
        user_object_create(
            &raw mut object,
            data,
            count,
            1,
            constant::USER_OBJECT_NO_DESTRUCTOR_SYNC
        )
    )
    .unwrap();
    call!(m, graph_retain_user_object(graph, object, 1, constant::GRAPH_USER_OBJECT_MOVE)).unwrap();
    assert_eq!(m.end(stream).unwrap(), graph, "the graph of the capture");
    let exec = m.instantiate(graph);
    call!(m, graph_destroy(graph)).unwrap();
    assert_eq!(died.load(Ordering::Relaxed), 0);
    call!(m, graph_launch(exec, stream)).unwrap();
    call!(m, graph_exec_destroy(exec)).unwrap();
    assert_eq!(died.load(Ordering::Relaxed), 0, "a launch is pending");
    m.sync(stream);
    assert_eq!(died.load(Ordering::Relaxed), 1);
    m.sim.assert_clean();
}
