//! Graphs, modules and launches.

use super::*;

functions! {
    fn cuGraphCreate(cx, graph: Out<Graph>, _flags: u32) {
        let made = cx.state()?.graph_create();
        graph.set(Graph(made))
    }
    fn cuGraphDestroy(cx, graph: Graph) {
        cx.state()?.graph_destroy(graph.0)
    }
    fn cuGraphInstantiateWithFlags(cx, exec: Out<GraphExec>, graph: Graph, _flags: u64) {
        let made = cx.state()?.graph_instantiate(graph.0)?;
        exec.set(GraphExec(made))
    }
    fn cuGraphExecDestroy(cx, exec: GraphExec) {
        cx.state()?.exec_destroy(exec.0)
    }
    fn cuGraphLaunch(cx, exec: GraphExec, stream: Stream) {
        let slot = cx.stream(stream)?;
        cx.state()?.graph_launch(exec.0, slot)
    }
    fn cuGraphRetainUserObject(cx, graph: Graph, object: UserObject, count: u32, flags: u32) {
        cx.state()?.graph_retain(graph.0, object.0, count, flags & constant::GRAPH_USER_OBJECT_MOVE != 0)
    }
    fn cuGraphReleaseUserObject(cx, graph: Graph, object: UserObject, count: u32) {
        cx.state()?.graph_release(graph.0, object.0, count)
    }
    fn cuUserObjectCreate(cx, object: Out<UserObject>, data: Addr, destroy: HostFn, count: u32, flags: u32) {
        if flags != constant::USER_OBJECT_NO_DESTRUCTOR_SYNC || count == 0 {
            return Err(code::ERROR_INVALID_VALUE);
        }
        let made = cx.state()?.object_create(data.number() as usize, destroy, count);
        object.set(UserObject(made))
    }
    fn cuUserObjectRetain(cx, object: UserObject, count: u32) {
        cx.state()?.object_retain(object.0, count)
    }
    fn cuUserObjectRelease(cx, object: UserObject, count: u32) {
        cx.state()?.object_release(object.0, count)
    }
    fn cuDeviceGetGraphMemAttribute(cx, device: i32, attribute: u32, value: Addr) {
        let device = cx.state()?.device_of(device)?;
        let device = &cx.state()?.devices[device as usize];
        value.put(match attribute {
            constant::GRAPH_MEM_ATTR_USED_MEM_CURRENT | constant::GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT => device.graph_used,
            constant::GRAPH_MEM_ATTR_USED_MEM_HIGH => device.graph_used_high,
            constant::GRAPH_MEM_ATTR_RESERVED_MEM_HIGH => device.graph_reserved_high,
            _ => return Err(code::ERROR_INVALID_VALUE),
        })
    }
    fn cuDeviceSetGraphMemAttribute(cx, device: i32, attribute: u32, value: Addr) {
        let device = cx.state()?.device_of(device)?;
        if value.value::<u64>()? != 0 {
            return Err(code::ERROR_INVALID_VALUE);
        }
        let device = &mut cx.state()?.devices[device as usize];
        match attribute {
            constant::GRAPH_MEM_ATTR_USED_MEM_HIGH => device.graph_used_high = device.graph_used,
            constant::GRAPH_MEM_ATTR_RESERVED_MEM_HIGH => device.graph_reserved_high = device.graph_used,
            _ => return Err(code::ERROR_INVALID_VALUE),
        }
        Ok(())
    }
    fn cuDeviceGraphMemTrim(cx, device: i32) {
        cx.state()?.device_of(device)?;
        Ok(())
    }

    fn cuModuleLoadData(cx, module: Out<Module>, image: ConstAddr) {
        cx.device()?;
        if image.number() == 0 {
            return Err(code::ERROR_INVALID_VALUE);
        }
        let state = cx.state()?;
        let made = state.unique();
        state.modules.insert(made, ());
        module.set(Module(made))
    }
    fn cuModuleUnload(cx, module: Module) {
        cx.state()?.modules.remove(&module.0).ok_or(code::ERROR_INVALID_HANDLE)
    }
    fn cuModuleGetFunction(cx, function: Out<Function>, module: Module, name: In<c_char>) {
        let name = name.text()?;
        let state = cx.state()?;
        if !state.modules.contains_key(&module.0) {
            return Err(code::ERROR_INVALID_HANDLE);
        }
        ranges_of(&name).ok_or(code::ERROR_NOT_FOUND)?;
        state.functions.push(name);
        function.set(Function(state.functions.len()))
    }
    fn cuLaunchKernel(cx, function: Function, _grid_x: u32, _grid_y: u32, _grid_z: u32, _block_x: u32, _block_y: u32, _block_z: u32, _shared_bytes: u32, stream: Stream, params: Out<*mut c_void>, _extra: Out<*mut c_void>) {
        let slot = cx.stream(stream)?;
        let name = cx.state()?.functions.get(function.0.wrapping_sub(1)).cloned().ok_or(code::ERROR_INVALID_HANDLE)?;
        let accesses = launch_accesses(ranges_of(&name).unwrap_or(0), &params)?;
        cx.state()?.submit(slot, Submission::Kernel(accesses), 0)
    }
    fn cuLaunchHostFunc(cx, stream: Stream, function: HostFn, data: Addr) {
        let slot = cx.stream(stream)?;
        cx.state()?.submit(slot, Submission::Host(function, data.number() as usize), 0)
    }
}

/// How many ranges a kernel takes: the kernels are named `touch1` to `touch16`.
fn ranges_of(name: &str) -> Option<usize> {
    name.strip_prefix("touch")?.parse().ok().filter(|ranges| (1..=16).contains(ranges))
}

/// Parameters of a kernel, four for each range: address, bytes (64 bits each), mode, value (32 bits each).
/// Modes: 1 reads, 2 writes the value, 3 reads and writes, 5 reads and expects the value.
fn launch_accesses(ranges: usize, params: &Out<*mut c_void>) -> R<Vec<Access>> {
    let param = |index| params.nth(index);
    (0..ranges)
        .map(|range| {
            let ptr = param(4 * range)?.value::<u64>()?;
            let len = param(4 * range + 1)?.value::<u64>()?;
            let mode = param(4 * range + 2)?.value::<u32>()?;
            let value = param(4 * range + 3)?.value::<u32>()? as u8;
            let mode = match mode {
                1 => Mode::Read,
                2 => Mode::Write(value),
                3 => Mode::Update(value),
                5 => Mode::Expect(value),
                _ => return Err(code::ERROR_INVALID_VALUE),
            };
            Ok(Access { ptr, len, mode })
        })
        .collect()
}
