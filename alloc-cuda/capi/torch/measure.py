"""Time of a training step and the memory that it takes, under one allocator.
usage: measure.py native | thermalloc"""
import sys
import time

import torch

who = sys.argv[1]
if who == "thermalloc":
    import thermalloc.cuda as pool

    pool.use_with_torch()

torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 6).cuda()
optimizer = torch.optim.AdamW(model.parameters())


def step(length):
    x = torch.randn(8, length, 512, device="cuda")
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


lengths = [128 + 61 * (i % 7) for i in range(70)]
for length in lengths[:35]:
    step(length)
torch.cuda.synchronize()
start = time.perf_counter()
for length in lengths[35:]:
    step(length)
torch.cuda.synchronize()
ms = (time.perf_counter() - start) * 1000 / len(lengths[35:])
if who == "thermalloc":
    reserved = pool.stats()["reserved_peak_bytes"]
else:
    reserved = torch.cuda.max_memory_reserved()
print(f"{ms:.2f} ms, {reserved / 2**20:.0f} MiB reserved")
