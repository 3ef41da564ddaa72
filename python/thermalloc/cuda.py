"""The device pool in Python: wires it into PyTorch and CuPy, and reads its statistics.

    import thermalloc.cuda as pool
    pool.use_with_torch()          # before CUDA is initialised
    pool.use_with_cupy()
    print(pool.report())

Nothing here needs a framework but the function for it. `libthermalloc_cuda.so` is looked for in
$THERMALLOC_CUDA_LIB (a file or a folder), beside this file, and on the loader's path.
"""

import ctypes
import os

_SETTERS = {
    "set_init_fn": "thermalloc_torch_init",
    "set_reset_fn": "thermalloc_torch_reset",
    "set_memory_fraction_fn": "thermalloc_torch_memory_fraction",
    "set_base_alloc_fn": "thermalloc_torch_base_alloc",
    "set_record_stream_fn": "thermalloc_torch_record_stream",
    "set_begin_allocate_to_pool": "thermalloc_torch_begin_allocate_to_pool",
    "set_end_allocate_to_pool_fn": "thermalloc_torch_end_allocate_to_pool",
    "set_release_pool": "thermalloc_torch_release_pool",
}

_library = None
_torch_allocator = None
_owners = []


class Error(RuntimeError):
    """What the library says went wrong."""


def _find(name):
    places = []
    given = os.environ.get("THERMALLOC_CUDA_LIB")
    if given:
        places.append(os.path.join(given if os.path.isdir(given) else os.path.dirname(given), name))
    places.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), name))
    for place in places:
        if os.path.exists(place):
            return place
    return name


def library():
    """The C library, loaded once."""
    global _library
    if _library is None:
        lib = ctypes.CDLL(_find("libthermalloc_cuda.so"), mode=ctypes.RTLD_GLOBAL)
        p, size, i = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for name, result, arguments in (
            ("init", i, (i, ctypes.c_char_p)),
            ("alloc", p, (size, i, p)),
            ("free", i, (p, i)),
            ("free_on", i, (p, i, p)),
            ("record_use", i, (p, i, p)),
            ("end_use", i, (p, i, p)),
            ("trim", size, (i, size)),
            ("poll", None, (i,)),
            ("set_limit", i, (i, size)),
            ("set_fraction", i, (i, ctypes.c_double)),
            ("set_wait", i, (i, ctypes.c_uint64)),
            ("stat_count", size, ()),
            ("stat_name", ctypes.c_char_p, (size,)),
            ("stats", size, (i, p, size)),
            ("report", size, (i, p, size)),
            ("snapshot", size, (i, p, size)),
            ("last_error", ctypes.c_char_p, ()),
            ("default_pool_keep", i, (i, size)),
            ("default_pool_stats", i, (i, p)),
        ):
            function = getattr(lib, "thermalloc_cuda_" + name)
            function.restype, function.argtypes = result, arguments
        _library = lib
    return _library


def _check(code):
    if code != 0:
        raise Error(library().thermalloc_cuda_last_error().decode())


def init(device=0, conf=None):
    """Makes a device's pool, with settings such as "limit_percent:80,history:100000"."""
    _check(library().thermalloc_cuda_init(device, conf.encode() if conf else None))


def stats(device=0):
    """The statistics as a dictionary; empty where the device has no pool yet."""
    lib = library()
    values = (ctypes.c_uint64 * lib.thermalloc_cuda_stat_count())()
    count = lib.thermalloc_cuda_stats(device, values, len(values))
    return {lib.thermalloc_cuda_stat_name(n).decode(): values[n] for n in range(count)}


def _bytes(function, device):
    room = function(device, None, 0)
    while True:
        out = ctypes.create_string_buffer(max(room, 1))
        got = function(device, out, room)
        if got <= room:
            return out.raw[:got]
        room = got


def report(device=0):
    """The statistics as text."""
    return _bytes(library().thermalloc_cuda_report, device).decode()


def snapshot(device=0, path=None):
    """The pickle that https://pytorch.org/memory_viz reads; written to `path` if that is given."""
    data = _bytes(library().thermalloc_cuda_snapshot, device)
    if path:
        with open(path, "wb") as file:
            file.write(data)
    return data


def trim(device=0, keep_bytes=0):
    """Gives free memory back; the bytes that went."""
    return library().thermalloc_cuda_trim(device, keep_bytes)


def set_limit(bytes=None, device=0):
    """The most that the pool may have; None: no limit."""
    _check(library().thermalloc_cuda_set_limit(device, bytes or 0))


def set_wait(ms=None, device=0):
    """How long an allocation that finds no memory waits for other streams; None: not at all."""
    _check(library().thermalloc_cuda_set_wait(device, ms or 0))


def torch_allocator():
    """The pool as a torch.cuda.memory.CUDAPluggableAllocator with all its hooks."""
    global _torch_allocator
    if _torch_allocator is None:
        from torch.cuda.memory import CUDAPluggableAllocator

        library()
        path = _find("libthermalloc_cuda_torch.so")
        allocator = CUDAPluggableAllocator(path, "thermalloc_torch_alloc", "thermalloc_torch_free")
        shim = ctypes.CDLL(path)
        for setter, symbol in _SETTERS.items():
            # Older versions of PyTorch lack some.
            set_function = getattr(allocator._allocator, setter, None)
            if set_function is not None:
                set_function(ctypes.cast(getattr(shim, symbol), ctypes.c_void_p).value)
        _torch_allocator = allocator
    return _torch_allocator


def use_with_torch():
    """Serves all of PyTorch's device memory. To be called before CUDA is initialised.

    PyTorch's own statistics and snapshot are then empty: use those of this module."""
    import torch

    allocator = torch_allocator()
    torch.cuda.memory.change_current_allocator(allocator)
    return allocator


def torch_mem_pool():
    """A torch.cuda.MemPool whose segments come from the pool: PyTorch keeps its own statistics.

        with torch.cuda.use_mem_pool(pool.torch_mem_pool()): ...
    """
    import torch

    return torch.cuda.MemPool(torch_allocator().allocator())


def use_with_cupy():
    """Serves all of CuPy's device memory, in the order of CuPy's current stream."""
    import cupy

    lib = library()

    def malloc(size, device):
        if size == 0:
            return 0
        stream = cupy.cuda.get_current_stream().ptr
        ptr = lib.thermalloc_cuda_alloc(size, device, stream)
        if not ptr:
            raise cupy.cuda.memory.OutOfMemoryError(size, 0)
        return ptr

    def free(ptr, device):
        if ptr:
            lib.thermalloc_cuda_free(ptr, device)

    allocator = cupy.cuda.PythonFunctionAllocator(malloc, free)
    _owners.append(allocator)
    cupy.cuda.set_allocator(allocator.malloc)
    return allocator


def cupy_c_allocator():
    """CuPy's CFunctionAllocator on the pool: quicker, for programs on the default stream only."""
    import cupy

    lib = library()

    def address(name):
        return ctypes.cast(getattr(lib, name), ctypes.c_void_p).value

    return cupy.cuda.CFunctionAllocator(
        0, address("thermalloc_cuda_cupy_malloc"), address("thermalloc_cuda_cupy_free"), lib
    )


def keep_default_pool(bytes, device=0):
    """Lets the device's default pool keep `bytes` over synchronisations: for JAX, and TensorFlow with
    TF_GPU_ALLOCATOR=cuda_malloc_async."""
    _check(library().thermalloc_cuda_default_pool_keep(device, bytes))


def default_pool_stats(device=0):
    """What the device's default pool has."""
    values = (ctypes.c_uint64 * 5)()
    _check(library().thermalloc_cuda_default_pool_stats(device, values))
    names = ("reserved_bytes", "reserved_peak_bytes", "used_bytes", "used_peak_bytes", "threshold_bytes")
    return dict(zip(names, values))
