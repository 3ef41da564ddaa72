"""What the profiler says of models, against what the models say of themselves. Each test is skipped where its
framework is not there: run them with an interpreter that has it.
"""

import glob
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import thermalloc

REPORT = """
import json, thermalloc
def report(truth):
    thermalloc.dump("d.thprof")
    said = thermalloc.report("report", "d.thprof")
    rows = {row["component"]: row["live_bytes"] for row in said["components"]}
    guessed = sum(row["known_by"].get("guess", 0) for row in said["components"])
    known = said["live_bytes"] - rows.get("other", 0) - guessed
    print(json.dumps({"said": rows, "truth": truth, "known": known / said["live_bytes"]}), flush=True)
"""

TORCH = """
import torch
model = torch.nn.Sequential(
    torch.nn.Embedding(2000, 512), torch.nn.LayerNorm(512), torch.nn.Linear(512, 1024), torch.nn.GELU(),
    torch.nn.Linear(1024, 512), torch.nn.Linear(512, 2000),
)
optimizer = torch.optim.Adam(model.parameters())
x, y = torch.randint(0, 2000, (4, 32)), torch.randint(0, 2000, (128,))
with thermalloc.watch(model, optimizer) as watched:
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(model(x).reshape(-1, 2000), y).backward()
        optimizer.step()
    state = [v for s in optimizer.state.values() for v in s.values() if hasattr(v, "nbytes")]
    report({
        "weights": sum(p.nbytes for p in model.parameters()),
        "gradients": sum(p.grad.nbytes for p in model.parameters()),
        "optimizer": sum(v.nbytes for v in state),
    })
assert not watched._hooks
"""

TENSORFLOW = """
import keras, numpy, tensorflow as tf
i = keras.Input((24,), dtype="int32")
x = keras.layers.Embedding(2000, 512)(i)
x = x + keras.layers.Dense(512)(keras.layers.Dense(1024, activation="gelu")(x))
model = keras.Model(i, keras.layers.Dense(2000)(x))
optimizer = keras.optimizers.Adam(1e-3)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss=loss)
X = numpy.random.default_rng(1).integers(0, 2000, (32, 24)).astype("int32")
model.fit(X, X, batch_size=4, epochs=2, verbose=0)

@tf.function
def gradients(x, y):
    with tf.GradientTape() as tape:
        value = loss(y, model(x))
    # That of the embedding is a selection of its input's gradient.
    every = tape.gradient(value, model.trainable_variables)
    return [g for g in every if not isinstance(g, tf.IndexedSlices)]

# What is left over from training is older than what is asked about, and no longer an activation.
import time; time.sleep(2.1)
kept = gradients(X[:4], X[:4])
size = lambda tensors: sum(int(numpy.prod(t.shape)) * 4 for t in tensors)
report({
    "weights": size(model.trainable_variables), "gradients": size(kept),
    "optimizer": size(optimizer.variables),
})
"""

LEAKY = """
import sys
import numpy, tensorflow as tf
random = numpy.random.default_rng(1)
layers = [tf.Variable(random.standard_normal(s).astype("f4") * 0.05) for s in ((256, 512), (512, 1000))]
@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        hidden = tf.nn.relu(x @ layers[0])
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, hidden @ layers[1]))
    for variable, gradient in zip(layers, tape.gradient(loss, layers)):
        variable.assign_sub(gradient * 1e-3)
    return hidden
kept = []
for _ in range(300):
    x, y = tf.constant(random.random((128, 256), dtype="f4")), tf.constant(random.integers(0, 1000, 128), tf.int32)
    hidden = step(x, y)
    if len(sys.argv) > 1:
        kept.append(hidden)
"""


class Tests(unittest.TestCase):
    def profiled(self, program, folder, *arguments, options=()):
        script = os.path.join(folder, "script.py")
        with open(script, "w") as file:
            file.write(program)
        environment = dict(os.environ, PYTHONPATH=ROOT, TF_CPP_MIN_LOG_LEVEL="2")
        environment.pop("LD_PRELOAD", None)
        environment.pop("THERMALLOC_CONF", None)
        done = subprocess.run(
            [sys.executable, "-m", "thermalloc", "prof", *options, script, *arguments],
            env=environment, cwd=folder, capture_output=True, text=True, timeout=280, check=False,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def skip_without(self, framework):
        if importlib.util.find_spec(framework) is None:
            self.skipTest(f"{framework} is not installed in {sys.executable}")

    def said_and_true(self, framework, program):
        self.skip_without(framework)
        # So many samples that the blocks of a small model are hardly missed.
        fine = ["--no-events", "--conf", "lg_prof_sample:14", "--conf", "prof_budget:0"]
        with tempfile.TemporaryDirectory() as folder:
            printed = self.profiled(REPORT + program, folder, options=fine)
        said = json.loads(printed.splitlines()[-1])
        print(framework, said)
        for component, true in said["truth"].items():
            self.assertAlmostEqual(said["said"].get(component, 0) / true, 1, delta=0.05, msg=component)
        return said

    def test_pytorch_with_hooks(self):
        self.said_and_true("torch", TORCH)

    def test_tensorflow_unchanged(self):
        said = self.said_and_true("tensorflow", TENSORFLOW)
        self.assertGreater(said["known"], 0.95)

    def test_leaks_of_tensorflow(self):
        self.skip_without("tensorflow")
        for arguments in ([], ["leak"]):
            with tempfile.TemporaryDirectory() as folder:
                self.profiled(LEAKY, folder, *arguments)
                (log,) = glob.glob(os.path.join(folder, "*.thlog"))
                leaks = thermalloc.report("leaks", log)["leaks"]
            found = [any("MatMul" in function for function in leak["stack"]) for leak in leaks]
            self.assertEqual(found, [True] * len(arguments))


if __name__ == "__main__":
    unittest.main()
