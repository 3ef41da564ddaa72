"""The Python module, and its wiring of PyTorch and CuPy with stand-ins that have their interface.
usage: module.py FOLDER"""
import ctypes
import os
import sys
import types

os.environ["THERMALLOC_CUDA_LIB"] = sys.argv[1]
import thermalloc.cuda as pool

assert pool.stats() == {}
pool.init(0, "history:100")
lib = pool.library()
ptr = lib.thermalloc_cuda_alloc(1000, 0, None)
assert ptr and pool.stats()["requested_bytes"] == 1000
assert "requested_bytes" in pool.report()
import pickle
assert pickle.loads(pool.snapshot())["segments"]
assert lib.thermalloc_cuda_free(ptr, 0) == 0
assert pool.trim() > 0
pool.keep_default_pool(1 << 20)
assert pool.default_pool_stats()["threshold_bytes"] == 1 << 20
try:
    pool.init(99)
    raise SystemExit("device 99 has a pool")
except pool.Error as error:
    assert "99" in str(error)

# PyTorch: the setters get addresses of functions.
functions = {}


class Setters:
    def __getattr__(self, name):
        return lambda address: functions.__setitem__(name, address)


class CUDAPluggableAllocator:
    def __init__(self, path, alloc, free):
        shim = ctypes.CDLL(path)
        self.alloc, self.free = getattr(shim, alloc), getattr(shim, free)
        self._allocator = Setters()

    def allocator(self):
        return self._allocator


torch, cuda, memory = (types.ModuleType(n) for n in ("torch", "torch.cuda", "torch.cuda.memory"))
memory.CUDAPluggableAllocator = CUDAPluggableAllocator
memory.change_current_allocator = lambda allocator: functions.__setitem__("current", allocator)
cuda.MemPool = lambda allocator: ("pool", allocator)
torch.cuda, cuda.memory = cuda, memory
sys.modules.update({"torch": torch, "torch.cuda": cuda, "torch.cuda.memory": memory})
allocator = pool.use_with_torch()
assert functions["current"] is allocator
assert all(isinstance(functions[name], int) and functions[name] for name in pool._SETTERS)
record = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(functions["set_record_stream_fn"])
record(None, None)
assert pool.torch_mem_pool() == ("pool", allocator._allocator)

# CuPy.
cupy = types.ModuleType("cupy")
cupy.cuda = types.SimpleNamespace(
    get_current_stream=lambda: types.SimpleNamespace(ptr=0),
    PythonFunctionAllocator=lambda malloc, free: types.SimpleNamespace(malloc=malloc, free=free),
    CFunctionAllocator=lambda *arguments: arguments,
    set_allocator=lambda allocator: functions.__setitem__("cupy", allocator),
    memory=types.SimpleNamespace(OutOfMemoryError=MemoryError),
)
sys.modules["cupy"] = cupy
made = pool.use_with_cupy()
ptr = functions["cupy"](5000, 0)
assert ptr and pool.stats()["requested_bytes"] == 5000
made.free(ptr, 0)
assert pool.stats()["requested_bytes"] == 0
param, malloc, free, owner = pool.cupy_c_allocator()
malloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)(malloc)
free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)(free)
ptr = malloc(None, 123, 0)
assert pool.stats()["requested_bytes"] == 123
free(None, ptr, 0)
