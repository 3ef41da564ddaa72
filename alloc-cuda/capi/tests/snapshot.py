"""Reads a snapshot as PyTorch's viewer does. With torch, its own viewer reads it too.
usage: snapshot.py FILE"""
import importlib.util
import io
import os
import pickle
import subprocess
import sys

data = open(sys.argv[1], "rb").read()


class Plain(pickle.Unpickler):
    def find_class(self, module, name):
        raise ValueError(f"a snapshot needs no {module}.{name}")


s = Plain(io.BytesIO(data)).load()
assert set(s) == {"segments", "device_traces", "allocator_settings", "external_annotations"}, s.keys()
assert s["segments"], "no segment"
actions = {"alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map",
           "segment_unmap", "snapshot", "oom"}
for segment in s["segments"]:
    at = segment["address"]
    for block in segment["blocks"]:
        assert block["address"] == at, "blocks tile the segment"
        at += block["size"]
        assert block["state"] in ("active_allocated", "active_pending_free", "inactive")
    assert at == segment["address"] + segment["total_size"]
    assert segment["segment_type"] in ("small", "large")
trace = s["device_traces"][0]
assert {entry["action"] for entry in trace} <= actions
assert any(entry["action"] == "oom" for entry in trace)
assert any(entry["action"] == "alloc" and entry["size"] == 1000 for entry in trace)

viewer = os.environ.get("THERMALLOC_MEMORY_VIZ")
if viewer is None and importlib.util.find_spec("torch"):
    viewer = os.path.join(os.path.dirname(importlib.util.find_spec("torch").origin), "cuda", "_memory_viz.py")
if viewer:
    for command in ("trace", "segments", "memory"):
        out = subprocess.run([sys.executable, viewer, command, sys.argv[1]], capture_output=True, text=True)
        assert out.returncode == 0 or command != "trace", out.stderr
        print(out.stdout[:400])
