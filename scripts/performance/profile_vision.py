"""Where the GPU time of a replayed step goes: kernels by total time.

python scripts/performance/profile_vision.py --case 1x768
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main() -> int:
    """Profile a few replays and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", default="1x768")
    parser.add_argument("--bucket", type=int, default=0, help="capacity; the case's own size without it")
    parser.add_argument("--max-frames", type=int, default=64)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--top", type=int, default=25)
    args = parser.parse_args()

    import torch
    from torch.profiler import ProfilerActivity, profile

    from bridge_cg_plugin.options import VisionGraphOptions
    from bridge_cg_plugin.upstream.helper import VisionTECudaGraphHelper
    from scripts.performance import tower

    tower.start_process()
    model = tower.build_tower()
    grads = tower.MainGrads(model)
    batch = tower.make_batch(tower.CASES[args.case], model)
    if not args.eager:
        options = VisionGraphOptions(
            impl="transformer_engine", buckets=(args.bucket or batch.tokens,), max_frames=args.max_frames, strict=True
        )
        helper = VisionTECudaGraphHelper(model, model.config, options=options)
        helper.create_cudagraphs()
    times = tower.median_times(lambda: tower.step(model, batch), 10)
    steps = 3
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            grads.zero()
            tower.step(model, batch)
        torch.cuda.synchronize()
    total, count = defaultdict(float), defaultdict(int)
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total[event.name] += event.self_device_time_total / 1e3 / steps
            count[event.name] += 1
    print(
        f"{args.case}: {times.ms:.2f} ms, host {times.host_ms:.2f} ms, GPU busy {sum(total.values()):.2f} ms, "
        f"{sum(count.values()) // steps} kernels"
    )
    for name, ms in sorted(total.items(), key=lambda item: -item[1])[: args.top]:
        print(f"{ms:8.3f} ms {count[name] // steps:5d}  {name[:110]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
