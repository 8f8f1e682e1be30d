"""vLLM's adapter."""

from __future__ import annotations


class LoRAModel:
    def __init__(self, number, rank, loras):
        self.id, self.rank, self.loras = number, rank, loras

    @classmethod
    def from_lora_tensors(cls, number, tensors, helper, device):
        scale, loras = helper.lora_alpha / helper.r, {}
        for name, tensor in tensors.items():
            layer, side, _ = name.rsplit(".", 2)
            loras.setdefault(layer, [None, None])[side == "lora_B"] = tensor * scale if side == "lora_B" else tensor
        return cls(number, helper.r, loras)
