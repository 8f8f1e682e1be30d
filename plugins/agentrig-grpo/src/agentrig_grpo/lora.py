"""Low-rank adapters through peft (LoRA, arXiv:2106.09685)."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch  # noqa: TID253  (imported with the learner only)

from agentrig.errors import AgentrigError, ConfigError, nearest
from agentrig_grpo.masters import master_of


def wrap(model: Any, *, rank: int, alpha: int, targets: str) -> Any:
    """Return the model with trainable adapters and everything else frozen.

    Args:
        rank: Of the two factors of each adapter.
        alpha: The adapters' output is scaled by alpha / rank.
        targets: `all-linear`, or names of the modules to adapt, with commas between.

    Raises:
        ConfigError: A target is no module of the model, is no linear layer or embedding, or shares its weights with
            another layer.
    """
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    modules: Any = targets if targets == "all-linear" else _modules(model, targets)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules, lora_dropout=0.0, task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        # peft reads a property of transformers 5 by its former name.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        # peft sets it as the layer needs it, for GPT-2's transposed layers.
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to", UserWarning)
        # Tied weights are checked below.
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)
        wrapped: Any = get_peft_model(model, config)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    shared = {key.removesuffix(".weight") for key in (*tied, *(tied.values() if isinstance(tied, dict) else ()))}
    for name, module in wrapped.get_base_model().named_modules():
        if isinstance(module, LoraLayer) and name in shared:
            raise ConfigError(
                f"[algorithm] lora_targets has {name}, whose weights this model shares with another layer. Merging its "
                "adapter for the server would change both layers or neither"
            )
    return wrapped


def fuse(model: Any) -> int:
    """Let each linear layer's adapters be added to its output by a matrix product; return how many layers there are.

    peft scales and adds in operations of their own: each reads and writes the whole output, and scales its gradient. In
    16 bits the results differ by the rounding of what is added, in fp32 by nothing but the order of sums.

    Args:
        model: A model that peft has wrapped, whose trained and frozen weights have one dtype.
    """
    from peft.tuners.lora import Linear

    layers: list[Any] = [module for module in model.modules() if isinstance(module, Linear)]
    for layer in layers:
        layer.forward = functools.partial(_forward, layer)
    return len(layers)


def _forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
    rows = x.flatten(0, -2)
    out: torch.Tensor = layer.base_layer(rows)
    for adapter in () if layer.disable_adapters else layer.active_adapters:
        inner = torch.nn.functional.linear(rows, layer.lora_A[adapter].weight) * layer.scaling[adapter]
        out.addmm_(inner, layer.lora_B[adapter].weight.t())
    return out.view(*x.shape[:-1], -1)


def _modules(model: Any, targets: str) -> list[str]:
    """Return the targets after checking that each is in the model; peft only requires one match."""
    from transformers.pytorch_utils import Conv1D

    wanted = [target.strip() for target in targets.split(",")]
    fit = (torch.nn.Linear, torch.nn.Embedding, torch.nn.Conv1d, torch.nn.Conv2d, Conv1D)
    named = {name: module for name, module in model.named_modules() if name}
    known = list(dict.fromkeys(name.rsplit(".", 1)[-1] for name, module in named.items() if isinstance(module, fit)))
    for target in wanted:
        found = [module for name, module in named.items() if target and f".{name}".endswith(f".{target}")]
        if found and all(isinstance(module, fit) for module in found):
            continue
        wrong = f"is a {type(found[0]).__name__}, no linear layer or embedding" if found else "matches no module"
        raise ConfigError(
            f"[algorithm] lora_targets: {target!r} {wrong} of this model.{nearest(target, known)}\n"
            f"  modules that can be adapted: {', '.join(known)}; or write all-linear"
        )
    return wanted


class MergedWeights(Mapping[str, torch.Tensor]):
    """The weights of a model with adapters, under the plain model's names. A matrix is merged when it is read.

    So one merged matrix is in memory at a time, and the model stays as it is. Other tensors are the model's own.

    Args:
        model: A model that peft has wrapped.

    Raises:
        AgentrigError: An adapter's factor is not finite.
    """

    def __init__(self, model: Any) -> None:
        from peft.tuners.lora import LoraLayer

        base = model.get_base_model()
        own = base.state_dict(keep_vars=True)  # parameters: they know the fp32 weights that they are copies of
        layers = {name: layer for name, layer in base.named_modules() if isinstance(layer, LoraLayer)}
        self._tensors: dict[str, torch.Tensor] = {}
        self._adapters: dict[str, list[tuple[Any, str, torch.Tensor, torch.Tensor]]] = {}
        for key, tensor in own.items():
            owner, inside, rest = key.rpartition(".base_layer.")
            if ".lora_" in f".{key}":
                continue
            name = f"{owner}.{rest}" if inside else key
            self._tensors[name] = tensor
            if inside and rest == "weight":
                layer = layers[owner]
                self._adapters[name] = [(layer, each, *_named(own, owner, each)) for each in layer.active_adapters]
        for name in getattr(base, "all_tied_weights_keys", None) or {}:
            self._tensors.pop(name, None)
        self._check()

    @torch.no_grad()
    def _check(self) -> None:
        """Check that the factors are finite. It waits for the device once; of merged matrices it would be once each."""
        names = [name for name, adapters in self._adapters.items() for _ in adapters]
        factors = [factor for adapters in self._adapters.values() for adapter in adapters for factor in adapter[2:]]
        largest = torch.stack(torch._foreach_norm(factors, math.inf)).view(-1, 2)
        finite = largest.isfinite().all(1).tolist()
        wrong = [name for name, right in zip(names, finite, strict=True) if not right]
        if wrong:
            raise AgentrigError(
                "the LoRA adapters cannot be merged: they have numbers that are not finite, beside "
                f"{', '.join(wrong[:4])}. Try a lower algorithm.lr"
            )

    @torch.no_grad()
    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a tensor; a matrix with adapters is merged, in fp32."""
        tensor = self._tensors[name]
        for adapter in self._adapters.get(name, ()):
            tensor = _merged(tensor, *adapter)
        return tensor

    @torch.no_grad()
    def fold(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return all weights in a dtype, without a second model: merged ones in the memory of the model's own.

        The model is of no use any more after this.
        """
        found = {}
        for name, own in self._tensors.items():
            if name in self._adapters and own.dtype == dtype:
                found[name] = own.copy_(self[name])
            else:
                found[name] = self[name].to(dtype) if own.is_floating_point() else own
        return found

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, in the model's order."""
        return iter(self._tensors)

    def __len__(self) -> int:
        """Return how many tensors there are."""
        return len(self._tensors)


def _merged(weight: torch.Tensor, layer: Any, adapter: str, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return a layer's weight in fp32 with the scaled product of an adapter's two factors added, in two kernels."""
    merged = weight.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if adapter in layer.lora_embedding_A or getattr(layer, "fan_in_fan_out", False):  # its rows are the inputs
        left, right = first.T, second.T
    else:
        left, right = second.flatten(1), first.flatten(1)  # a convolution's kernel counts as inputs
    merged.flatten(1).addmm_(left, right, alpha=layer.scaling[adapter])
    return merged


def _named(own: Mapping[str, Any], owner: str, adapter: str) -> list[torch.Tensor]:
    """Return an adapter's two fp32 factors, by their names in a state dict."""
    linear = f"{owner}.lora_A.{adapter}.weight" in own
    names = "lora_{}." + adapter + ".weight" if linear else "lora_embedding_{}." + adapter
    return [master_of(own[f"{owner}.{names.format(factor)}"]) for factor in "AB"]


def _held(layer: Any, adapter: str) -> list[torch.Tensor]:
    """Return an adapter's two fp32 factors, those that its layer computes with."""
    if adapter in layer.lora_A:
        return [master_of(part[adapter].weight) for part in (layer.lora_A, layer.lora_B)]
    return [master_of(part[adapter]) for part in (layer.lora_embedding_A, layer.lora_embedding_B)]


@torch.no_grad()
def factors(model: Any, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the two factors of each adapter of a linear layer, as a server computes with them beside the plain weights.

    Args:
        model: A model that peft has wrapped.
        dtype: The server's: it rounds both as the learner does, and the second one is then scaled by alpha / rank.

    Returns:
        Names like `model.layers.0.self_attn.q_proj.lora_A.weight`, and tensors.
    """
    from peft.tuners.lora import LoraLayer

    for name, layer in model.get_base_model().named_modules():
        for adapter in layer.active_adapters if isinstance(layer, LoraLayer) else ():
            first, second = _held(layer, adapter)
            yield f"{name}.lora_A.weight", first.to(dtype)
            yield f"{name}.lora_B.weight", (second.to(dtype).float() * layer.scaling[adapter]).to(dtype)


@torch.no_grad()
def live_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what the model computes with, under the plain model's names: read from its layers, not from a state dict.

    It is another way to what `MergedWeights` returns, from the parameters that the forward pass reads, so that the
    two can be compared. A tensor that two layers share comes under both names. One merged tensor is made at a time.
    """
    adapted: tuple[Any, ...] = ()
    if hasattr(model, "get_base_model"):  # else peft has wrapped nothing, and its import takes seconds
        from peft.tuners.lora import LoraLayer

        adapted = (LoraLayer,)
    base = model.get_base_model() if adapted else model
    for name, module in base.named_modules(remove_duplicate=False):
        if ".lora_" in f".{name}":
            continue
        plain = f"{name}.".replace(".base_layer.", ".").lstrip(".")
        owner = base.get_submodule(name.removesuffix(".base_layer")) if name.endswith(".base_layer") else None
        for key, tensor in module.named_parameters(recurse=False, remove_duplicate=False):
            if key == "weight" and isinstance(owner, adapted):
                for adapter in owner.active_adapters:
                    tensor = _merged(tensor, owner, adapter, *_held(owner, adapter))
            if not isinstance(module, adapted):
                yield plain + key, tensor
        for key, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if key not in module._non_persistent_buffers_set:
                yield plain + key, buffer
