#!/usr/bin/env python3
"""The job of bench-train in PyTorch: same model, same weights, same batches, so the losses must be the same.

    OMP_NUM_THREADS=1 python gpt_train.py --save-init init.safetensors
    OMP_NUM_THREADS=1 python gpt_train.py --data text > pytorch.json
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 gpt_train.py --strategy ddp --data text > pytorch.json
    cargo run --release --bin bench-train -- --init init.safetensors --data text --expect pytorch.json

Prints one JSON object on rank 0. Needs torch, and safetensors for --save-init.
"""
import argparse, json, os, statistics, time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def arguments():
    p = argparse.ArgumentParser()
    p.add_argument("--strategy", choices=["single", "ddp", "zero1"], default="single")
    p.add_argument("--ctx", type=int, default=128)
    p.add_argument("--dim", type=int, default=256)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--head", choices=["tied", "untied"], default="tied")
    p.add_argument("--global-batch", type=int, default=16, help="sequences per step over all ranks")
    p.add_argument("--lr", type=float, default=3e-4)
    p.add_argument("--wd", type=float, default=0.1, help="applied to every parameter")
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--warmup", type=int, default=10, help="first steps left out of the timing")
    p.add_argument("--threads", type=int, default=1, help="threads per rank")
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: the GPU of LOCAL_RANK")
    p.add_argument("--seed", type=int, default=1234)
    p.add_argument("--data", help="file of bytes to train on")
    p.add_argument("--save-init", help="write the initial weights here (safetensors) and exit")
    return p.parse_args()


class Block(nn.Module):
    def __init__(self, a):
        super().__init__()
        d, self.h = a.dim, a.heads
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.fc, self.out = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(B, T, 3, self.h, D // self.h).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, D))
        return x + self.out(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, a.dim), nn.Embedding(a.ctx, a.dim)
        self.blocks = nn.ModuleList(Block(a) for _ in range(a.layers))
        self.lnf = nn.LayerNorm(a.dim)
        self.head = nn.Linear(a.dim, 256, bias=False)
        for name, p in self.named_parameters():  # GPT-2's initial values
            if p.dim() == 2:
                residual = name.endswith(("proj.weight", "out.weight"))
                nn.init.normal_(p, 0.0, 0.02 / ((2 * a.layers) ** 0.5 if residual else 1.0))
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        if a.head == "tied":
            self.head.weight = self.wte.weight

    def forward(self, x, y):
        h = self.wte(x) + self.wpe.weight[: x.shape[1]]
        for b in self.blocks:
            h = b(h)
        return F.cross_entropy(self.head(self.lnf(h)).flatten(0, 1), y.flatten())


def splitmix64(x):
    m = (1 << 64) - 1
    z = (x + 0x9E3779B97F4A7C15) & m
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & m
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & m
    return z ^ (z >> 31)


def batch(data, a, step, rank, world):
    """Row i of the global batch starts at splitmix64(seed << 32 + step * G + i) mod (len - ctx); rank r has the rows
    [r * G / world, (r + 1) * G / world)."""
    G = a.global_batch
    rows = range(rank * G // world, (rank + 1) * G // world)
    offsets = [splitmix64((a.seed << 32) + step * G + i) % (len(data) - a.ctx) for i in rows]
    t = torch.stack([data[o : o + a.ctx + 1] for o in offsets]).long()
    return t[:, :-1].contiguous(), t[:, 1:].contiguous()


def main():
    a = arguments()
    torch.set_num_threads(a.threads)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(a.seed)
    on_gpu = a.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    model = GPT(a)  # on the CPU first: the same weights for both devices
    if a.save_init:
        from safetensors.torch import save_model

        return save_model(model, a.save_init)
    if not a.data:
        raise SystemExit("--data is missing")
    with open(a.data, "rb") as f:
        data = torch.frombuffer(bytearray(f.read()), dtype=torch.uint8)

    model.to(a.device)
    net, settings = model, dict(lr=a.lr, weight_decay=a.wd, fused=True)
    if a.strategy != "single":
        dist.init_process_group("nccl" if on_gpu else "gloo")
        net = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if a.strategy == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, **settings)
    else:
        optimizer = torch.optim.AdamW(net.parameters(), **settings)

    def now():
        if on_gpu:  # otherwise it is the time of putting work on the stream
            torch.cuda.synchronize()
        return time.perf_counter()

    losses, times = [], []  # times: forward, backward, optimizer, in seconds
    for i in range(a.steps):
        x, y = (t.to(a.device) for t in batch(data, a, i, rank, world))
        t0 = now()
        loss = net(x, y)
        t1 = now()
        loss.backward()
        t2 = now()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        t3 = now()
        losses.append(loss.item())
        if i >= a.warmup:
            times.append((t1 - t0, t2 - t1, t3 - t2))
    if world > 1:
        everyone = [None] * world
        dist.all_gather_object(everyone, losses)
        losses = [sum(l) / world for l in zip(*everyone)]
    if rank == 0:
        forward, backward, step = (statistics.median(t) * 1e3 for t in zip(*times))
        total = statistics.median(sum(t) for t in times) * 1e3
        print(json.dumps({
            "strategy": a.strategy, "world": world, "torch": torch.__version__, **vars(a),
            "tokens_per_second": round(a.global_batch * a.ctx / total * 1e3, 1), "step_ms": round(total, 2),
            "forward_ms": round(forward, 2), "backward_ms": round(backward, 2), "optimizer_ms": round(step, 2),
            "losses": [round(l, 6) for l in losses],
        }))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
