#!/usr/bin/env python3
"""Makes the pictures and the examples of profiler.md anew, from one training run of TensorFlow, one run of redis under its
own benchmark and one of alloc-core/examples/store.rs.

  cargo build --release -p thermalloc-capi -p thermalloc-cli && cargo build --release -p thermalloc --example store
  docs/pictures.py --python VENV/bin/python

VENV has TensorFlow (with Keras). An example of profiler.md is a block of text below a line such as

  <!-- example: tf report --top 5; from growth; until dump -->

which says of which run (tf, redis, store), what `thermalloc prof` is asked, and where what is shown begins and ends.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
WIDE = 118
PICTURES = {
    "flame": ("redis", ["flame"]),
    "peak": ("tf", ["peak"]),
    "lifetimes": ("tf", ["lifetimes"]),
    "fragmentation": ("tf", ["fragmentation"]),
}

# 16 steps of a small language model: 47.6 MiB of weights, of which 7.8 are an embedding with sparse gradients.
TRAIN = """
import keras, numpy
from keras import layers
tokens = keras.Input((24,), dtype="int32")
x = layers.Embedding(2000, 1024)(tokens)
for _ in range(2):
    y = layers.LayerNormalization()(x)
    x = x + layers.Dense(1024)(layers.Dense(2048, activation="gelu")(y))
model = keras.Model(tokens, layers.Dense(2000)(x))
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
data = numpy.random.default_rng(1).integers(0, 2000, (16 * 8, 24)).astype("int32")
model.fit(data, data, batch_size=8, verbose=0)
print(sum(v.numpy().nbytes for v in model.variables), sum(v.numpy().nbytes for v in model.optimizer.variables))
"""


class Runs:
    """The programs, each run once."""

    def __init__(self, options, folder):
        self.options, self.folder = options, Path(folder)

    def prof_run(self, name, *command):
        prefix = self.folder / name
        return [self.options.tool, "prof", "run", "--lib", self.options.lib, "-o", str(prefix), "--", *command]

    def log(self, name):
        (log,) = self.folder.glob(f"{name}.*.th*")
        return str(log)

    def tf(self):
        # oneDNN's pool would take tensors together, so that no operator's would be seen.
        environment = dict(os.environ, TF_ENABLE_ONEDNN_OPTS="0", TF_CPP_MIN_LOG_LEVEL="3")
        subprocess.run(self.prof_run("tf", self.options.python, "-c", TRAIN), env=environment, check=True)

    def redis(self):
        port = "7397"
        server = self.prof_run("redis", "redis-server", "--port", port, "--save", "", "--dir", str(self.folder))
        server = subprocess.Popen(server, stdout=subprocess.DEVNULL)
        for _ in range(100):
            time.sleep(0.1)
            if subprocess.run(["redis-cli", "-p", port, "ping"], capture_output=True, check=False).stdout == b"PONG\n":
                break
        load = ["redis-benchmark", "-p", port, "-q", "-n", "400000", "-r", "10000000", "-d", "200", "-P", "8"]
        subprocess.run([*load, "-t", "set,lpush,hset"], stdout=subprocess.DEVNULL, check=True)
        subprocess.run(["redis-cli", "-p", port, "shutdown", "nosave"], check=False)
        server.wait(60)

    def store(self):
        conf = f"prof:true,prof_final:true,prof_prefix:{self.folder / 'store'}"
        subprocess.run([self.options.store], env=dict(os.environ, THERMALLOC_CONF=conf), stdout=subprocess.DEVNULL, check=True)


def line_with(text, lines, asked):
    """The first line that has it."""
    for number, line in enumerate(lines):
        if text in line:
            return number
    sys.exit(f"{asked}: the report has no line with {text!r}:\n" + "\n".join(lines))


def example(options, log, asked):
    """What the tool says: the lines `from` one that has a text in it `until` another, none of them too long."""
    command, *cuts = [part.strip() for part in asked.split(";")]
    report, *more = shlex.split(command)
    said = subprocess.run([options.tool, "prof", report, log, *more], capture_output=True, text=True, check=True).stdout
    lines = said.rstrip().splitlines()
    for kind, value in (cut.split(" ", 1) for cut in cuts):
        if kind == "from":
            lines = lines[line_with(value, lines, asked):]
        elif kind == "until":
            lines = lines[:line_with(value, lines, asked)]
    # Where things lie on this machine is of no interest.
    lines = [re.sub(r"(^|(?<= ))/\S*/(?=site-packages/|examples/|[\w.-]+ \(process)", "", line) for line in lines]
    return "\n".join(line if len(line) <= WIDE else line[: WIDE - 2] + ".." for line in lines).rstrip()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    release = Path(os.environ.get("CARGO_TARGET_DIR", HERE.parent / "target")) / "release"
    parser.add_argument("--tool", default=str(release / "thermalloc"))
    parser.add_argument("--lib", default=str(release / "libthermalloc.so"))
    parser.add_argument("--store", default=str(release / "examples" / "store"))
    parser.add_argument("--python", required=True, help="an interpreter that has TensorFlow")
    options = parser.parse_args()
    page = HERE / "profiler.md"
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(options, folder)
        runs.tf(), runs.redis(), runs.store()

        def renewed(match):
            run, asked = match[1].split(" ", 1)
            return f"<!-- example: {match[1]} -->\n```text\n{example(options, runs.log(run), asked)}\n```\n"

        text = page.read_text()
        page.write_text(re.sub(r"<!-- example: ([^\n]*) -->\n```text\n(?:(?!```).*\n)*```\n", renewed, text))
        for name, (run, command) in PICTURES.items():
            picture = HERE / f"profiler-{name}.svg"
            subprocess.run([options.tool, "prof", *command, runs.log(run), "-o", str(picture)], check=True)


if __name__ == "__main__":
    main()
