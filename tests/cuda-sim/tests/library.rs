//! The simulated driver as a `libcuda.so.1`, in processes that find it like the real one; and processes
//! that find something else, or nothing.

mod common;

use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::call;
use cudarc::driver::CudaContext;
use thermalloc_cuda::driver::{
    AccessDesc, AllocationProp, Driver, Error, Features, Function, IpcMemHandle, Location, MemPool,
    MemPoolProps, Module, PoolPtrExport, Stream, constant,
};

const CASE: &str = "THERMALLOC_CUDA_CASE";
const SIM: &str = "THERMALLOC_CUDA_SIM";

/// The case that this process is to be.
fn case() -> Option<String> {
    std::env::var(CASE).ok()
}

/// A fresh folder in which `libcuda.so.1` may be put.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _not_there_yet = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// A folder with the simulated driver in it.
fn simulated(name: &str) -> PathBuf {
    let beside = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let library = beside.join("libthermalloc_cuda_sim.so");
    let folder = folder(name);
    std::os::unix::fs::symlink(library, folder.join("libcuda.so.1")).unwrap();
    folder
}

fn command(test: &str, case: &str, folder: &Path, machine: &str) -> Command {
    let me = std::env::current_exe().unwrap();
    let mut command = Command::new("timeout");
    command.args(["-s", "KILL", "60"]).arg(me).args([
        test,
        "--exact",
        "--nocapture",
        "--test-threads=1",
    ]);
    command.env(CASE, case).env(SIM, machine).env("LD_LIBRARY_PATH", folder);
    command
}

#[track_caller]
fn succeeds(output: &Output) {
    assert!(
        output.status.success(),
        "{}\n{}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

#[track_caller]
fn run(test: &str, case: &str, folder: &Path, machine: &str) {
    let output = command(test, case, folder, machine).output().unwrap();
    succeeds(&output);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("1 passed"), "no test has this name: {test}");
}

#[test]
fn cudarc_loads_it_and_works() {
    if case().is_none() {
        let folder = simulated("cudarc");
        for machine in ["", "no-pools", "no-vmm", "mig", "progress=lazy", "progress=eager"] {
            run("cudarc_loads_it_and_works", "child", &folder, machine);
        }
        return;
    }
    assert!(CudaContext::device_count().unwrap() == 1);
    let context = CudaContext::new(0).unwrap();
    assert!(context.name().unwrap().contains("Simulated"));
    let (one, two) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let sent: Vec<u32> = (0..10_000).collect();
    let on_device = one.clone_htod(&sent).unwrap();
    let mut copy = two.alloc_zeros::<u32>(sent.len()).unwrap();
    two.memcpy_dtod(&on_device, &mut copy).unwrap();
    assert_eq!(two.clone_dtoh(&copy).unwrap(), sent);
    let event = one.record_event(None).unwrap();
    two.wait(&event).unwrap();
    context.synchronize().unwrap();
    assert_eq!(one.clone_dtoh(&on_device).unwrap(), sent);
}

#[test]
fn our_driver_loads_it() {
    if case().is_none() {
        let folder = simulated("driver");
        for machine in
            ["", "no-pools", "no-vmm", "no-pools,no-vmm,no-managed,no-export", "devices=2,vram=1g"]
        {
            run("our_driver_loads_it", "child", &folder, machine);
        }
        return;
    }
    let machine = std::env::var(SIM).unwrap();
    let driver = Driver::load().unwrap();
    assert_eq!(driver.version(), 12_080);
    let has = |word: &str| !machine.split(',').any(|other| other == word);
    let expected = Features {
        pools: has("no-pools"),
        vmm: has("no-vmm"),
        managed: has("no-managed"),
        export_fd: has("no-export"),
    };
    assert_eq!(driver.features(0).unwrap(), expected);
    let mut devices = 0;
    // SAFETY: a valid place to write to.
    unsafe { driver.device_get_count(&raw mut devices) }.unwrap();
    assert_eq!(devices, if machine.starts_with("devices=2") { 2 } else { 1 });
}

#[test]
fn cudarc_and_our_driver_share_one_context() {
    if case().is_none() {
        return run("cudarc_and_our_driver_share_one_context", "child", &simulated("shared"), "");
    }
    let context = CudaContext::new(0).unwrap();
    let driver = Driver::load().unwrap();
    let mut current = thermalloc_cuda::driver::Context::NULL;
    // SAFETY: a valid place to write to.
    unsafe { driver.ctx_get_current(&raw mut current) }.unwrap();
    assert_eq!(current.0, context.cu_ctx() as usize);
}

#[test]
fn what_is_wrong_with_a_driver_is_named() {
    let name = "what_is_wrong_with_a_driver_is_named";
    match case().as_deref() {
        None => {
            let folder = simulated("wrong");
            run(name, "stub", &folder, "stub");
            run(name, "old", &folder, "version=11020");
            run(name, "no device", &folder, "devices=0");
            let empty = self::folder("empty-library");
            let source = empty.join("empty.c");
            std::fs::write(&source, "int nothing;\n").unwrap();
            let library = empty.join("libcuda.so.1");
            succeeds(
                &Command::new("cc")
                    .args(["-shared", "-o"])
                    .arg(&library)
                    .arg(&source)
                    .output()
                    .unwrap(),
            );
            run(name, "symbol", &empty, "");
            run(name, "none", &self::folder("no-library"), "");
        }
        Some("stub") => assert_eq!(Driver::load().unwrap_err(), Error::Stub),
        Some("old") => assert_eq!(Driver::load().unwrap_err(), Error::TooOld { version: 11_020 }),
        Some("no device") => assert_eq!(Driver::load().unwrap_err().code(), Some(100)),
        Some("symbol") => {
            assert_eq!(Driver::load().unwrap_err(), Error::MissingSymbol { symbol: "cuInit" })
        }
        // A machine with a real driver finds that one.
        Some("none") => match Driver::load() {
            Ok(driver) => assert!(driver.version() > 0),
            Err(error) => assert!(error == Error::NoDriver || error.code().is_some(), "{error}"),
        },
        Some(other) => panic!("{other}"),
    }
}

#[test]
fn kernels_are_launched_by_name() {
    if case().is_none() {
        return run(
            "kernels_are_launched_by_name",
            "child",
            &simulated("kernels"),
            "progress=lazy",
        );
    }
    let m = Loaded::new();
    let (mut module, mut kernel, mut ptr) = (Module::NULL, Function::NULL, 0u64);
    call!(m, module_load_data(&raw mut module, c"any image".as_ptr().cast())).unwrap();
    assert!(call!(m, module_get_function(&raw mut kernel, module, c"unknown".as_ptr())).is_err());
    call!(m, module_get_function(&raw mut kernel, module, c"touch2".as_ptr())).unwrap();
    call!(m, mem_alloc(&raw mut ptr, 4096)).unwrap();
    let mut second = ptr + 8;
    let (mut len, mut write, mut value, mut other) = (4u64, 2u32, 0x5au32, 0xa5u32);
    let mut params: Vec<*mut c_void> = vec![
        (&raw mut ptr).cast(),
        (&raw mut len).cast(),
        (&raw mut write).cast(),
        (&raw mut value).cast(),
        (&raw mut second).cast(),
        (&raw mut len).cast(),
        (&raw mut write).cast(),
        (&raw mut other).cast(),
    ];
    let nothing = std::ptr::null_mut();
    call!(
        m,
        launch_kernel(kernel, 1, 1, 1, 1, 1, 1, 0, Stream::NULL, params.as_mut_ptr(), nothing)
    )
    .unwrap();
    assert_eq!(m.bytes(ptr), [0x5a, 0x5a, 0x5a, 0x5a, 0, 0, 0, 0]);
    assert_eq!(m.bytes(second), [0xa5, 0xa5, 0xa5, 0xa5, 0, 0, 0, 0]);
    call!(m, module_unload(module)).unwrap();
}

/// A driver with a current context, of this process's libcuda.
struct Loaded {
    driver: Driver,
}

impl Loaded {
    fn new() -> Self {
        let driver = Driver::load().unwrap();
        let loaded = Self { driver };
        let mut context = thermalloc_cuda::driver::Context::NULL;
        call!(loaded, primary_ctx_retain(&raw mut context, 0)).unwrap();
        call!(loaded, ctx_set_current(context)).unwrap();
        loaded
    }

    fn bytes(&self, ptr: u64) -> Vec<u8> {
        let mut bytes = vec![0u8; 8];
        call!(self, memcpy_dtoh(bytes.as_mut_ptr().cast(), ptr, 8)).unwrap();
        bytes
    }
}

#[test]
fn memory_crosses_to_another_process() {
    let name = "memory_crosses_to_another_process";
    match case().as_deref() {
        None => run(name, "exporter", &simulated("ipc"), ""),
        Some("exporter") => {
            let m = Loaded::new();
            let mut plain = 0;
            call!(m, mem_alloc(&raw mut plain, 4096)).unwrap();
            call!(m, memset_d8_async(plain, 0x11, 4096, Stream::NULL)).unwrap();
            call!(m, ctx_synchronize()).unwrap();
            let mut handle = IpcMemHandle([0; 64]);
            call!(m, ipc_get_mem_handle(&raw mut handle, plain)).unwrap();
            let mut here = 0;
            assert!(
                call!(m, ipc_open_mem_handle(&raw mut here, handle, 1)).is_err(),
                "not in the same process"
            );

            let chunk = mapped(&m, None);
            call!(m, memset_d8_async(chunk.0, 0x22, 4096, Stream::NULL)).unwrap();
            call!(m, ctx_synchronize()).unwrap();
            let mut fd = -1i32;
            let kind = constant::MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
            call!(m, mem_export_to_shareable_handle((&raw mut fd).cast(), chunk.1, kind, 0))
                .unwrap();
            // SAFETY: the descriptor is to survive exec.
            unsafe { libc::fcntl(fd, libc::F_SETFD, 0) };
            let (pool_fd, block) = exported_block(&m);
            let hex = hex_of(&handle.0);
            let mut importer = command(
                name,
                &format!("importer {fd} {hex} {pool_fd} {}", hex_of(&block.1)),
                &simulated("ipc-importer"),
                "",
            );
            succeeds(&importer.output().unwrap());
            assert_eq!(m.bytes(plain), [0x33; 8], "the importer's writes are seen");
            assert_eq!(m.bytes(chunk.0), [0x44; 8]);
            assert_eq!(m.bytes(block.0), [0x66; 8]);
        }
        Some(importer) => {
            let mut words = importer.split(' ').skip(1);
            let fd: i32 = words.next().unwrap().parse().unwrap();
            let handle = IpcMemHandle(bytes_of(words.next().unwrap()));
            let pool_fd: i32 = words.next().unwrap().parse().unwrap();
            let mut block = PoolPtrExport(bytes_of(words.next().unwrap()));
            let m = Loaded::new();
            let mut plain = 0;
            call!(m, ipc_open_mem_handle(&raw mut plain, handle, 1)).unwrap();
            assert_eq!(m.bytes(plain), [0x11; 8]);
            let chunk = mapped(&m, Some(fd));
            assert_eq!(m.bytes(chunk.0), [0x22; 8]);
            call!(m, memset_d8_async(plain, 0x33, 4096, Stream::NULL)).unwrap();
            call!(m, memset_d8_async(chunk.0, 0x44, 4096, Stream::NULL)).unwrap();
            call!(m, ctx_synchronize()).unwrap();
            call!(m, ipc_close_mem_handle(plain)).unwrap();

            let (mut pool, mut ptr) = (MemPool::NULL, 0);
            let shareable = pool_fd as usize as *mut c_void;
            let kind = constant::MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
            call!(m, mem_pool_import_from_shareable_handle(&raw mut pool, shareable, kind, 0))
                .unwrap();
            call!(m, mem_pool_import_pointer(&raw mut ptr, pool, &raw mut block)).unwrap();
            assert_eq!(m.bytes(ptr), [0x55; 8]);
            let mut own = 0;
            let refused =
                call!(m, mem_alloc_from_pool_async(&raw mut own, 512, pool, Stream::NULL));
            assert!(refused.is_err(), "an imported pool allocates nothing");
            call!(m, memset_d8_async(ptr, 0x66, 4096, Stream::NULL)).unwrap();
            call!(m, mem_free_async(ptr, Stream::NULL)).unwrap();
            call!(m, ctx_synchronize()).unwrap();
        }
    }
}

fn hex_of(bytes: &[u8; 64]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes_of(hex: &str) -> [u8; 64] {
    std::array::from_fn(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap())
}

/// A descriptor of a pool, a block of it, and what another process needs to find that.
fn exported_block(m: &Loaded) -> (i32, (u64, [u8; 64])) {
    let kind = constant::MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    let props = MemPoolProps::device(0, kind);
    let (mut pool, mut fd, mut ptr) = (MemPool::NULL, -1i32, 0);
    call!(m, mem_pool_create(&raw mut pool, &raw const props)).unwrap();
    call!(m, mem_pool_export_to_shareable_handle((&raw mut fd).cast(), pool, kind, 0)).unwrap();
    // SAFETY: the descriptor is to survive exec.
    unsafe { libc::fcntl(fd, libc::F_SETFD, 0) };
    call!(m, mem_alloc_from_pool_async(&raw mut ptr, 8192, pool, Stream::NULL)).unwrap();
    call!(m, memset_d8_async(ptr, 0x55, 8192, Stream::NULL)).unwrap();
    call!(m, ctx_synchronize()).unwrap();
    let mut data = PoolPtrExport([0; 64]);
    call!(m, mem_pool_export_pointer(&raw mut data, ptr)).unwrap();
    (fd, (ptr, data.0))
}

/// A mapped chunk: made here, or behind a descriptor.
fn mapped(m: &Loaded, fd: Option<i32>) -> (u64, u64) {
    let bytes = 2 << 20;
    let kind = constant::MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    let (mut ptr, mut handle) = (0, 0);
    call!(m, mem_address_reserve(&raw mut ptr, bytes, 0, 0, 0)).unwrap();
    match fd {
        Some(fd) => {
            let shareable = fd as usize as *mut c_void;
            call!(m, mem_import_from_shareable_handle(&raw mut handle, shareable, kind)).unwrap();
        }
        None => {
            let prop = AllocationProp::device(0, kind);
            call!(m, mem_create(&raw mut handle, bytes, &raw const prop, 0)).unwrap();
        }
    }
    call!(m, mem_map(ptr, bytes, 0, handle, 0)).unwrap();
    let desc = AccessDesc {
        location: Location::device(0),
        flags: constant::MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    call!(m, mem_set_access(ptr, bytes, &raw const desc, 1)).unwrap();
    (ptr, handle)
}

#[test]
fn a_c_program_asks_what_it_did_wrong() {
    let folder = simulated("c");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mistakes.c");
    let program = folder.join("mistakes");
    let mut compiler = Command::new("cc");
    compiler
        .args(["-Wall", "-Werror", "-o"])
        .arg(&program)
        .arg(&source)
        .arg(folder.join("libcuda.so.1"));
    succeeds(&compiler.output().unwrap());
    let output = Command::new(&program)
        .env("LD_LIBRARY_PATH", &folder)
        .env(SIM, "vram=1g")
        .output()
        .unwrap();
    succeeds(&output);
    let text = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "mistakes 2 leaks 1 used 4096 allocations 4");
    assert!(lines[1].starts_with("Race: write of 4096 bytes"), "{text}");
    assert!(lines[2].starts_with("DoubleFree: cuMemFree"), "{text}");
    assert!(lines[3].starts_with("Leak: device memory of 4096 bytes"), "{text}");
}

#[test]
fn a_runtime_finds_it_by_cu_get_proc_address() {
    let folder = simulated("runtime");
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (runtime, program) = (folder.join("libcudart.so.12"), folder.join("program"));
    let mut compiler = Command::new("cc");
    compiler.args(["-Wall", "-Werror", "-shared", "-fPIC", "-Wl,-soname,libcudart.so.12", "-o"]);
    succeeds(&compiler.arg(&runtime).arg(here.join("cudart.c")).output().unwrap());
    let mut compiler = Command::new("cc");
    compiler
        .args(["-Wall", "-Werror", "-o"])
        .arg(&program)
        .arg(here.join("tests/runtime.c"))
        .arg(&runtime);
    succeeds(&compiler.output().unwrap());
    let run =
        |folder: &Path| Command::new(&program).env("LD_LIBRARY_PATH", folder).output().unwrap();
    succeeds(&run(&folder));
    std::fs::remove_file(folder.join("libcuda.so.1")).unwrap();
    let alone = run(&folder);
    if !alone.status.success() {
        assert!(
            String::from_utf8_lossy(&alone.stderr).contains("CUDA error"),
            "no driver is an error, not a crash"
        );
    }
}
