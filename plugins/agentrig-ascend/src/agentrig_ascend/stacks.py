"""Sets of versions that their makers publish for Ascend, and where their requirements contradict each other.

The algorithm `verl` needs verl 0.9: older versions lack `verl.trainer.ppo.v1`, so their sets are history. They are
kept so that the doctor recognizes them.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentrig.hardware import Stack

STACKS: Sequence[Stack] = (
    Stack(
        name="verl 0.5 on CANN 8.2",
        proof="history",
        versions={
            "python": "==3.11.*",
            "cann": "==8.2rc1",
            "torch": "==2.7.1",
            "torch_npu": "==2.7.1.dev20250724",
            "vllm": "==0.10.0",
            "vllm-ascend": "==0.10.0rc1",
            "verl": "==0.5.0",
        },
        algorithms=("verl",),
        source="the reference's own set; its verl has no verl.trainer.ppo.v1, which agentrig needs",
        clashes=(
            "torch_npu 2.7.1.dev20250724 is not on the usual package index: it comes with vllm-ascend's "
            "own index or container",
            "verl 0.5.0's extra [vllm] says vllm<=0.8.5: install verl without that extra",
        ),
    ),
    Stack(
        name="verl 0.8 on CANN 9.0",
        proof="history",
        versions={
            "python": "==3.11.*",
            "cann": "==9.0.0",
            "torch": "==2.9.0",
            "torch_npu": "==2.9.0.post2",
            "vllm": "==0.18.*",
            "vllm-ascend": "==0.18.*",
            "verl": "==0.8.*",
        },
        algorithms=("verl",),
        source="verl's documentation; its verl has no verl.trainer.ppo.v1, which agentrig needs",
        clashes=(
            "vllm-ascend 0.18 needs a Python below 3.12",
            "verl 0.8.0's extra [vllm] says vllm<=0.12.0: install verl without that extra",
        ),
    ),
    Stack(
        name="verl 0.9 on CANN 9.1",
        proof="contract-tested",
        versions={
            "python": "==3.12.*",
            "cann": "==9.1.0",
            "torch": "==2.10.0",
            "torch_npu": "==2.10.0.post4",
            "vllm": "==0.23.*",
            "vllm-ascend": "==0.23.*",
            "verl": "==0.9.*",
        },
        algorithms=("verl",),
        source="verl's documentation; not run here",
        clashes=(
            "vllm 0.23's wheel pins torch 2.11, and torch_npu is built for 2.10: build vllm from source with "
            "VLLM_TARGET_DEVICE=empty",
            "verl's list of NPU requirements says numpy<2, its 0.9.1 wheel numpy>=2: follow the wheel",
        ),
    ),
)
