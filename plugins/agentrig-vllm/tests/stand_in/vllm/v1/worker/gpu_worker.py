"""vLLM's worker, with a model that joins layers and pads its vocabulary as vLLM does, and a file for CUDA's handles."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from agentrig_vllm import transfer
from safetensors.torch import load_file

PARTS = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2),
         "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}  # fmt: skip


def _opened(message, device):
    assert device == 0, "the learner's GPU is the server's"
    return torch.from_file(message["file"], shared=True, size=message["size"], dtype=torch.uint8)


transfer.opened = _opened
torch.cuda.synchronize = torch.cuda.ipc_collect = lambda *device: None


class Model:
    def __init__(self, file, dtype):
        self._rows = {}
        self._held = {}
        state = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
        for name, tensor in state.items():
            for part, (joined, place) in PARTS.items():
                if f".{part}." in name:
                    self._rows.setdefault(name.replace(part, joined), {})[place] = tensor.shape[0]
        self.load_weights(state.items())

    def named_parameters(self):
        return iter(self._held.items())

    def load_weights(self, weights):
        loaded = set()
        for name, tensor in weights:
            part = next((each for each in PARTS if f".{each}." in name), None)
            place, start, rows = name, 0, tensor.shape[0]
            if part is not None:
                joined, number = PARTS[part]
                place = name.replace(part, joined)
                start = sum(self._rows[place][i] for i in range(number))
                rows = sum(self._rows[place].values())
            elif "embed_tokens" in name:
                rows = -(-rows // 64) * 64
            held = self._held.setdefault(place, torch.zeros(rows, *tensor.shape[1:], dtype=tensor.dtype))
            assert part is not None or rows == held.shape[0], f"the shapes of {name} differ"
            held[start : start + tensor.shape[0]].copy_(tensor)
            loaded.add(place)
        return loaded


class Worker:
    def __init__(self, args):
        if os.environ.get("STAND_IN_FAILS", "").startswith("says "):
            raise ValueError(os.environ["STAND_IN_FAILS"].removeprefix("says "))
        if os.environ.get("STAND_IN_FAILS") == "load":
            raise MemoryError("CUDA out of memory")
        if os.environ.get("STAND_IN_FAILS") == "hang":
            import time

            time.sleep(600)
        self.device = torch.device("cpu")
        self._model = Model(Path(args.model) / "model.safetensors", getattr(torch, args.dtype))

    def get_model(self):
        return self._model
