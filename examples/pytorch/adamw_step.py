#!/usr/bin/env python3
"""The optimizer benchmark of gpu-check in PyTorch: one AdamW step on one parameter, on the GPU.

    python adamw_step.py --elements 50000000

Prints one JSON object. Needs torch with CUDA.
"""
import argparse, json, statistics, time

import torch


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--elements", type=int, default=50_000_000)
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--warmup", type=int, default=10)
    a = p.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch has no CUDA here")
    weight = torch.nn.Parameter(torch.ones(a.elements, device="cuda"))
    weight.grad = torch.full_like(weight, 0.01)
    optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.1, fused=True)
    times = []
    for step in range(a.steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.step()
        torch.cuda.synchronize()
        if step >= a.warmup:
            times.append(time.perf_counter() - start)
    print(json.dumps({"torch": torch.__version__, "elements": a.elements, "step_ms": round(statistics.median(times) * 1e3, 4)}))


if __name__ == "__main__":
    main()
