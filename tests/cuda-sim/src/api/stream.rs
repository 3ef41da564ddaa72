//! Streams, events and capture.

use super::*;

functions! {
    fn cuStreamCreate(cx, stream: Out<Stream>, flags: u32) {
        new_stream(cx, &stream, flags)
    }
    fn cuStreamCreateWithPriority(cx, stream: Out<Stream>, flags: u32, _priority: i32) {
        new_stream(cx, &stream, flags)
    }
    fn cuStreamDestroy_v2(cx, stream: Stream) {
        if stream.0 <= Stream::PER_THREAD.0 {
            return Err(code::ERROR_INVALID_HANDLE);
        }
        let slot = cx.stream(stream)?;
        cx.state()?.stream_destroy(slot);
        Ok(())
    }
    fn cuStreamQuery(cx, stream: Stream) {
        let slot = cx.stream(stream)?;
        cx.state()?.forbid_capture(slot)?;
        cx.state()?.settle(slot);
        let last = cx.state()?.last(slot);
        cx.let_host_run(last)?;
        cx.state()?.stream_query(slot)
    }
    fn cuStreamSynchronize(cx, stream: Stream) {
        let slot = cx.stream(stream)?;
        cx.state()?.forbid_capture(slot)?;
        cx.wait_stream(slot)
    }
    fn cuStreamWaitEvent(cx, stream: Stream, event: Event, _flags: u32) {
        let slot = cx.stream(stream)?;
        let state = cx.state()?;
        let event = state.event_index(event)?;
        if !state.capture_wait(slot, event)? {
            state.stream_wait(slot, event);
        }
        Ok(())
    }
    fn cuStreamGetFlags(cx, stream: Stream, flags: Out<u32>) {
        let slot = cx.stream(stream)?;
        flags.set(cx.state()?.streams[slot as usize].flags)
    }
    fn cuStreamGetCtx(cx, stream: Stream, context: Out<Context>) {
        let slot = cx.stream(stream)?;
        context.set(context_of(cx.state()?.streams[slot as usize].device))
    }
    fn cuStreamGetId(cx, stream: Stream, id: Out<u64>) {
        let slot = cx.stream(stream)?;
        id.set(cx.state()?.streams[slot as usize].number as u64)
    }
    fn cuStreamIsCapturing(cx, stream: Stream, status: Out<u32>) {
        let slot = cx.stream(stream)?;
        status.set(cx.state()?.capture_info(slot).0)
    }
    fn cuStreamBeginCapture_v2(cx, stream: Stream, mode: u32) {
        if mode > constant::STREAM_CAPTURE_MODE_RELAXED {
            return Err(code::ERROR_INVALID_VALUE);
        }
        let slot = cx.stream(stream)?;
        let thread = cx.thread;
        cx.state()?.begin_capture(slot, mode, thread)
    }
    fn cuStreamEndCapture(cx, stream: Stream, graph: Out<Graph>) {
        let slot = cx.stream(stream)?;
        let thread = cx.thread;
        graph.set(Graph::NULL)?;
        let made = cx.state()?.end_capture(slot, thread)?;
        graph.set(Graph(made))
    }
    fn cuStreamGetCaptureInfo_v2(cx, stream: Stream, status: Out<u32>, id: Out<u64>, graph: Out<Graph>, dependencies: Out<*const GraphNode>, count: Out<usize>) {
        let slot = cx.stream(stream)?;
        capture_info(cx, slot, &status, &id, &graph)?;
        dependencies.set_if_wanted(std::ptr::null());
        count.set_if_wanted(0);
        Ok(())
    }
    fn cuStreamGetCaptureInfo_v3(cx, stream: Stream, status: Out<u32>, id: Out<u64>, graph: Out<Graph>, dependencies: Out<*const GraphNode>, edges: Out<*const c_void>, count: Out<usize>) {
        let slot = cx.stream(stream)?;
        capture_info(cx, slot, &status, &id, &graph)?;
        dependencies.set_if_wanted(std::ptr::null());
        edges.set_if_wanted(std::ptr::null());
        count.set_if_wanted(0);
        Ok(())
    }
    fn cuThreadExchangeStreamCaptureMode(cx, mode: Out<u32>) {
        let new = mode.get()?;
        if new > constant::STREAM_CAPTURE_MODE_RELAXED {
            return Err(code::ERROR_INVALID_VALUE);
        }
        let old = cx.set_capture_mode(new)?;
        mode.set(old)
    }

    fn cuEventCreate(cx, event: Out<Event>, flags: u32) {
        cx.device()?;
        let made = cx.state()?.event_create(flags)?;
        event.set(made)
    }
    fn cuEventDestroy_v2(cx, event: Event) {
        cx.state()?.event_destroy(event)
    }
    fn cuEventRecord(cx, event: Event, stream: Stream) {
        let slot = cx.stream(stream)?;
        let state = cx.state()?;
        let event = state.event_index(event)?;
        if !state.capture_record(event, slot) {
            state.event_record(event, slot);
        }
        Ok(())
    }
    fn cuEventQuery(cx, event: Event) {
        let state = cx.state()?;
        let event = state.event_index(event)?;
        forbid_captured(cx, event)?;
        if let Some(epoch) = cx.state()?.event_epoch(event) {
            cx.let_host_run(epoch)?;
        }
        cx.state()?.event_query(event)
    }
    fn cuEventSynchronize(cx, event: Event) {
        let state = cx.state()?;
        let event = state.event_index(event)?;
        forbid_captured(cx, event)?;
        let Some(epoch) = cx.state()?.prepare_event_sync(event) else {
            return Ok(());
        };
        cx.wait(epoch)?;
        cx.state()?.host_saw_event(event);
        Ok(())
    }
    fn cuEventElapsedTime(cx, milliseconds: Out<f32>, start: Event, end: Event) {
        let state = cx.state()?;
        let (start, end) = (state.event_index(start)?, state.event_index(end)?);
        milliseconds.set(state.event_elapsed_ms(start, end)?)
    }
}

fn new_stream(cx: &mut Cx, stream: &Out<Stream>, flags: u32) -> R {
    let device = cx.device()?;
    if flags > constant::STREAM_NON_BLOCKING {
        return Err(code::ERROR_INVALID_VALUE);
    }
    let state = cx.state()?;
    let slot = state.new_stream(device, flags == constant::STREAM_DEFAULT, false);
    stream.set(Stream(state.streams[slot as usize].handle))
}

fn capture_info(cx: &mut Cx, slot: u32, status: &Out<u32>, id: &Out<u64>, graph: &Out<Graph>) -> R {
    let found = cx.state()?.capture_info(slot);
    status.set(found.0)?;
    id.set_if_wanted(found.1);
    graph.set_if_wanted(Graph(found.2));
    Ok(())
}

fn forbid_captured(cx: &mut Cx, event: usize) -> R {
    let state = cx.state()?;
    let Some(id) = state.event_capture(event) else {
        return Ok(());
    };
    state.invalidate(id);
    state.violate(
        Mistake::Capture,
        "a query of, or wait for, an event that a capture recorded".to_owned(),
    );
    Err(code::ERROR_CAPTURED_EVENT)
}
