"""vLLM's worker, with a model that joins layers and pads its vocabulary as vLLM does, and a file for CUDA's handles."""

from __future__ import annotations

import base64
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import torch
from agentrig_vllm import transfer
from safetensors.torch import load_file

from agentrig import device_memory

PARTS = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2),
         "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}  # fmt: skip


def _opened(message, device):
    assert device == 0, "the learner's GPU is the server's"
    return torch.from_file(message["file"], shared=True, size=message["size"], dtype=torch.uint8)


def _shared(buffer):
    with tempfile.NamedTemporaryFile(dir=os.environ["STAND_IN_FOLDER"], delete=False) as file:
        file.write(buffer.numpy().tobytes())
    counter = Path(f"/dev/shm/torch_{os.getpid()}_stand_in")
    counter.touch()
    handle = base64.b64encode(f"/{counter.name}".encode()).decode()
    return {"file": file.name, "size": buffer.numel(), "ref_counter_handle": handle}


if holds := os.environ.get("STAND_IN_HOLDS"):
    device_memory.held_here = lambda device: int(holds)
transfer.opened = _opened
transfer.shared = _shared
torch.cuda.synchronize = torch.cuda.ipc_collect = lambda *device: None


class Model:
    def __init__(self, file, dtype):
        self._rows = {}
        self._held = {}
        self.wrapped = ()
        state = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
        for name, tensor in state.items():
            for part, (joined, place) in PARTS.items():
                if f".{part}." in name:
                    self._rows.setdefault(name.replace(part, joined), {})[place] = tensor.shape[0]
        self.load_weights(state.items())

    def named_parameters(self):
        for name, tensor in self._held.items():
            layer, _, kind = name.rpartition(".")
            yield (f"{layer}.base_layer.{kind}" if layer in self.wrapped else name), tensor

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


class Adapters:
    """vLLM's manager: it packs adapters by the layers that it has, and ignores the others."""

    packed_modules_mapping: ClassVar = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, model, args):
        self.modules, self._registered = {}, {}
        state = dict(model.named_parameters())
        for name in [name for name in state if name.split(".")[-2] in args.lora_target_modules and "bias" not in name]:
            rows = model._rows.get(name, {0: len(state[name])})
            width, rank, dtype = state[name].shape[1], args.max_lora_rank, state[name].dtype
            first = tuple(torch.zeros(1, 1, rank, width, dtype=dtype) for _ in rows)
            second = tuple(torch.zeros(1, 1, rows[i], rank, dtype=dtype) for i in sorted(rows))
            layer = name.removesuffix(".weight")
            self.modules[layer] = SimpleNamespace(lora_a_stacked=first, lora_b_stacked=second)
        model.wrapped = tuple(self.modules)

    def create_dummy_lora(self, number, rank, embedding_modules):
        return SimpleNamespace(id=number, rank=rank, loras={})

    def remove_adapter(self, number):
        self._registered.pop(number)

    def add_adapter(self, adapter):
        assert adapter.id not in self._registered
        self._registered[adapter.id] = adapter

    def activate_adapter(self, number):
        loras = self._registered[number].loras
        for name, layer in self.modules.items():
            head, _, joined = name.rpartition(".")
            for i, part in enumerate(self.packed_modules_mapping.get(joined, [joined])):
                layer.lora_a_stacked[i].zero_()
                layer.lora_b_stacked[i].zero_()
                if f"{head}.{part}" in loras:
                    first, second = loras[f"{head}.{part}"]
                    layer.lora_a_stacked[i][0, 0, : len(first)].copy_(first)
                    layer.lora_b_stacked[i][0, 0, :, : second.shape[1]].copy_(second)


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
        self.vllm_config = SimpleNamespace(additional_config=args.additional_config)
        if args.enable_lora:
            manager = SimpleNamespace(_adapter_manager=Adapters(self._model, args))
            self.model_runner = SimpleNamespace(lora_manager=manager)

    def compile_or_warm_up_model(self):
        pass

    def get_model(self):
        return self._model
