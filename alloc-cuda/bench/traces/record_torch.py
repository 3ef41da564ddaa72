"""Records what real PyTorch programs ask an allocator for, without a GPU: the tensors that a model makes
on the CPU have the sizes and lifetimes that they have on a device. Workspaces of cuBLAS and cuDNN are not
among them.

usage: record_torch.py train|generate OUT.gz
"""

import gzip
import json
import sys
import tempfile

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

torch.set_num_threads(2)
torch.manual_seed(1)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, cache=None):
        batch, length, width = x.shape
        q, k, v = (
            t.reshape(batch, length, self.heads, -1).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        if cache is not None:
            if cache:
                k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
            cache[:] = [k, v]
        scores = (q @ k.transpose(2, 3)) * (width // self.heads) ** -0.5
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, words, width, heads, layers):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, tokens, caches=None):
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, caches[i] if caches is not None else None)
        return self.head(x)


def train():
    """Steps with batches of three lengths, as a loader that sorts by length gives them."""
    model = Model(8000, 384, 6, 6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    yield
    while True:
        for length in (256, 192, 320):
            tokens = torch.randint(0, 8000, (12, length))
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            loss.backward()
            del logits
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            del loss
        yield


def generate():
    """Prompts of several lengths, each continued with caches that grow by a token."""
    model = Model(8000, 512, 8, 8).eval()
    yield
    with torch.inference_mode():
        while True:
            for length, more in ((384, 10), (96, 16), (640, 6), (256, 12)):
                tokens = torch.randint(0, 8000, (20, length))
                caches = [[] for _ in model.blocks]
                for _ in range(more):
                    tokens = model(tokens, caches)[:, -1:].argmax(-1)
                del caches
            yield


def memory_events(run):
    """(bytes, address) of each allocation, negative of each free, in order."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof:
            run()
        prof.export_chrome_trace(file.name)
        events = json.load(open(file.name))["traceEvents"]
    found = [e for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] == 0]
    found.sort(key=lambda e: e["ts"])
    return [(int(e["args"]["Bytes"]), int(e["args"]["Addr"])) for e in found]


def write(once, rounds, path):
    """Blocks that the first part leaves, then one round, which begins and ends with these."""
    numbers, lines, following = {}, ["thermalloc-cuda-trace 1"], 0
    for part, events in (("once", once), ("round", rounds)):
        lines.append(part)
        for size, address in events:
            if size > 0:
                numbers[address] = following
                lines.append(f"a {following} {size} 0")
                following += 1
            elif address in numbers:
                lines.append(f"f {numbers.pop(address)}")
    with gzip.GzipFile(path, "wb", mtime=0) as out:
        out.write(("\n".join(lines) + "\n").encode())


def main():
    program = {"train": train, "generate": generate}[sys.argv[1]]()

    def settle():
        next(program)
        # Moments of the optimizer come with the first round.
        next(program)

    once = memory_events(settle)
    rounds = memory_events(lambda: next(program))
    write(once, rounds, sys.argv[2])


main()
