"""Start the real SGLang server on a CPU: `python launch.py [SGLang options]`.

SGLang's HTTP server, scheduler, radix cache, seeds and sampler run as they are. Three things give way,
because they exist for accelerators only: the kernel library (`sgl_kernel/` beside this file stands in for
it), two torchvision operators, and, in deterministic mode, the batch-invariant Triton kernels, with
torch_native let in as attention backend. So its numerics here are **not** batch-invariant. SGLang runs this
file again for each of its processes: all patches stand at the top level. `RADIX=0` leaves the radix cache off
in deterministic mode, as SGLang does for backends that it does not know.
"""

# mypy: disable-error-code="import-not-found,import-untyped"

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (HERE, os.environ.get("PYTHONPATH"))))

import torch  # noqa: E402 (the path must stand first)

# The CUDA build of torchvision does not load beside a CPU torch, and looks only for the schemas of its
# operators.
torchvision = torch.library.Library("torchvision", "FRAGMENT")
for operator in ("nms", "qnms"):
    torchvision.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import sglang.srt.batch_invariant_ops as batch_invariant_ops  # noqa: E402
import sglang.srt.server_args as server_args  # noqa: E402

server_args.add_deterministic_attention_backend_choices(["torch_native"])
if os.environ.get("RADIX", "1") == "1":
    server_args.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
batch_invariant_ops.enable_batch_invariant_mode = lambda *args, **kwargs: None

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(server_args.prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
