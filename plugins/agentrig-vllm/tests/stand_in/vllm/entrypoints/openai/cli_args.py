"""vLLM's command line: the options that agentrig gives, of the types that vLLM has."""

from __future__ import annotations

import json


def make_arg_parser(parser):
    for name in ("model", "dtype", "generation-config", "logprobs-mode", "worker-cls"):
        parser.add_argument(f"--{name}")
    for name in ("served-model-name", "lora-target-modules"):
        parser.add_argument(f"--{name}", nargs="+")
    for name in (
        "seed",
        "max-loras",
        "max-lora-rank",
        "max-num-seqs",
        "max-model-len",
        "kv-cache-memory-bytes",
        "max-num-batched-tokens",
    ):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--gpu-memory-utilization", type=float)
    for name in (
        "enable-lora",
        "enable-prefix-caching",
        "disable-cascade-attn",
        "enable-flashinfer-autotune",
        "enable-sleep-mode",
    ):
        parser.add_argument(f"--{name}", action=BOOLEAN)
    parser.add_argument("--disable-log-stats", action="store_true")
    parser.add_argument("--compilation-config", type=json.loads)
    parser.add_argument("--additional-config", type=json.loads)
    return parser


def validate_parsed_serve_args(args):
    assert args.model


from argparse import BooleanOptionalAction as BOOLEAN  # noqa: E402
