"""vLLM's worker, extended to load the learner's weights and to report digests. Runs in vLLM's process."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from typing import Any

import torch  # noqa: TID253  (vLLM's process only)
from vllm.v1.worker.gpu_worker import Worker as GpuWorker  # noqa: TID253  (vLLM's process only)

from agentrig.delivery.digests import copies, held
from agentrig.device_memory import held_here
from agentrig.hardware.memory import CONTEXT, LENDING
from agentrig.processes.supervisor import end_with_parent
from agentrig_vllm.options import ADAPTER, ADAPTERS, LIMITED, PLANNED
from agentrig_vllm.transfer import opened, plain_segments, shared, view_of

BESIDE = CONTEXT + (3 << 28)
"""Bytes of the GPU that are kept from the cache beside tensors: CUDA itself with its libraries, recorded graphs, and
what torch can't use of its blocks. With half a GiB less, three servers that were held to their memory died: 0.21 to
0.34 GiB were unused, and sampling for 512 calls asked for 0.29."""

KEPT = 4
"""Keys and values are kept for this many times the sequences that run at once: later ones may begin with the same."""


class Worker(GpuWorker):
    """Methods with `agentrig` in their names are called by `agentrig_vllm.serving`, with and returning text."""

    def __init__(self, *given: Any, **more: Any) -> None:
        end_with_parent(os.getppid())
        super().__init__(*given, **more)
        self._buffer: torch.Tensor | None = None
        self._loaded: set[str] = set()
        self._known = True

    def init_device(self) -> None:
        """Begin on the device, with the bytes of the run's memory plan.

        They are free: the plan keeps them apart from the learner, which loads meanwhile, and from what others held.
        """
        planned = self._told(PLANNED)
        if planned:
            total = torch.cuda.mem_get_info(self.local_rank)[1]
            self.cache_config.gpu_memory_utilization = min(planned / total, 1.0)
        super().init_device()

    def load_model(self, *given: Any, **more: Any) -> None:
        """Load the weights, where the learner reads them into memory that another process can open."""
        with plain_segments(self.device) if self._told(ADAPTERS) else nullcontext():
            super().load_model(*given, **more)

    @torch.inference_mode()
    def determine_available_memory(self) -> int:
        """Return the bytes for keys and values: what the server's memory leaves, by what this process itself took.

        vLLM measures the whole GPU, where the learner takes memory at the same time. A small model's rest would be
        millions of blocks, and vLLM goes through all of them with each new version of the weights: more than
        `KEPT` times what all sequences need are of no use.
        """
        if self.cache_config.kv_cache_memory_bytes:
            return int(super().determine_available_memory())
        torch.cuda.reset_peak_memory_stats()
        self.model_runner.profile_run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.empty_cache()
        # Adapters are there three times while new ones come, see `agentrig.hardware.memory.ServerNeed.lent`.
        more = LENDING + 2 * sum(t.nbytes for t in self._places().values()) if self._told(ADAPTERS) else 0
        return min(int(self.requested_memory - peak - BESIDE - more), self._useful())

    def compile_or_warm_up_model(self) -> Any:
        """Record graphs; if the run has a limit, torch takes no more than the server's memory from then on.

        The cache is what the largest batch leaves; what torch keeps of batches of other sizes comes on top of that. At
        its most, torch gives back what it keeps for later before it takes more.
        """
        found = super().compile_or_warm_up_model()
        if rank := self._told(ADAPTERS):  # of zeros, until the learner sends its own: requests name them from the start
            manager = self._manager()
            manager.add_adapter(manager.create_dummy_lora(ADAPTER, rank, {}))
            manager.activate_adapter(ADAPTER)
        if self._told(LIMITED):
            total = torch.cuda.mem_get_info(self.local_rank)[1]
            share = (self.requested_memory - CONTEXT) / total
            torch.cuda.set_per_process_memory_fraction(share, self.local_rank)
        return found

    def _told(self, name: str) -> Any:
        """Return what the run's side says in vLLM's `additional_config`; None if nothing."""
        return (self.vllm_config.additional_config or {}).get(name)

    def _useful(self) -> int:
        """Return the bytes for `KEPT` times as many sequences as run at once, all of the full length."""
        layers = self.model_runner.get_kv_cache_spec().values()
        one = sum(int(layer.max_memory_usage_bytes(self.vllm_config)) for layer in layers)
        return KEPT * int(self.scheduler_config.max_num_seqs) * one

    def agentrig_begin(self) -> None:
        """Begin a transfer: no tensor has arrived yet."""
        self._loaded, self._known = set(), True

    def agentrig_load(self, message: str, device: int) -> None:
        """Copy the tensors of one message of `agentrig_vllm.transfer.Sender` into the model."""
        found = json.loads(message)
        if "buffer" in found:
            self._buffer = opened(found["buffer"], device)
        assert self._buffer is not None
        # From another GPU it is copied as a whole first: that GPU may not write into memory that vLLM can put to sleep.
        buffer = self._buffer.to(self.device)
        tensors = [(entry["name"], view_of(buffer, entry)) for entry in found["tensors"]]
        with torch.no_grad():
            if self._told(ADAPTERS):
                self._replace(dict(tensors))
                loaded = None
            else:
                loaded = self.get_model().load_weights(iter(tensors))
        self._known = self._known and loaded is not None
        self._loaded |= loaded or set()
        torch.cuda.synchronize()  # the learner fills the buffer again

    def agentrig_release(self) -> None:
        """Let go of the learner's buffer."""
        self._buffer = None
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    def agentrig_missing(self) -> list[str]:
        """Return the tensors that no message since `agentrig_begin` had; none where the model's class does not say."""
        if not self._known:
            return []
        return sorted({name for name, _ in self.get_model().named_parameters()} - self._loaded)

    def agentrig_memory(self) -> int | None:
        """Return the bytes of its GPU that this process holds; vLLM's other processes hold none."""
        return held_here(self.device)

    def agentrig_held(self, shapes: str) -> str:
        """Return name to digest of the learner's tensors as they are held here, as JSON."""
        return json.dumps(held({**self._parameters(), **self._places()}, json.loads(shapes)))

    def agentrig_lend(self, shapes: str) -> str:
        """Return what another process needs to read the weights that have the learner's names and shapes, as JSON."""
        found = {}
        for name, tensor in copies(self._parameters(), json.loads(shapes)):
            entry = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "offset": 0}
            found[name] = {**entry, **shared(tensor.detach().view(-1).view(torch.uint8))}
        return json.dumps(found)

    def _parameters(self) -> dict[str, torch.Tensor]:
        """Return the model's weights by the names that they have without adapters."""
        return {name.replace(".base_layer.", "."): p for name, p in self.get_model().named_parameters()}

    def _manager(self) -> Any:
        """Return what holds the adapters for vLLM's model."""
        return self.model_runner.lora_manager._adapter_manager

    def _places(self) -> dict[str, torch.Tensor]:
        """Return the adapters that the model computes with, by the learner's names; vLLM has room for one set."""
        found: dict[str, torch.Tensor] = {}
        rank = self._told(ADAPTERS)
        if not rank:
            return found
        manager = self._manager()
        for name, layer in manager.modules.items():
            head, _, joined = name.rpartition(".")
            parts = manager.packed_modules_mapping.get(joined, [joined])
            for part, first, second in zip(parts, layer.lora_a_stacked, layer.lora_b_stacked, strict=True):
                found[f"{head}.{part}.lora_A.weight"] = first[0, 0, :rank]
                found[f"{head}.{part}.lora_B.weight"] = second[0, 0, :, :rank]
        return found

    def _replace(self, tensors: dict[str, torch.Tensor]) -> None:
        """Compute with new adapters in place of those before; the second factors are scaled already."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        missing = tensors.keys() - self._places().keys()
        if missing:
            raise RuntimeError(f"vLLM has no place for {len(missing)} adapters: {', '.join(sorted(missing)[:4])}")
        rank = self._told(ADAPTERS)
        own = {name: tensor.clone() for name, tensor in tensors.items()}  # the learner fills its buffer again
        helper = PEFTHelper(r=rank, lora_alpha=rank, target_modules=[])
        made = LoRAModel.from_lora_tensors(ADAPTER, own, helper, device=str(self.device))
        manager = self._manager()
        manager.remove_adapter(ADAPTER)
        manager.add_adapter(made)
        manager.activate_adapter(ADAPTER)
