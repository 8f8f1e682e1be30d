"""A model whose frozen weights are its server's: they are on the device once, and the learner reads them there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch  # noqa: TID253  (imported with the learner only)

from agentrig.delivery.digests import Digests, digests
from agentrig.errors import AgentrigError, ConfigError
from agentrig.servers import Lending
from agentrig_grpo.model_files import loading, model_files, weight_files

OWN = 'Let the learner have its own copy: algorithm.lora_base = "own"'


def load_model(
    directory: str | Path, server: object, *, dtype: torch.dtype, device: str, attention: str | None
) -> tuple[Any, Mapping[str, str]]:
    """Return the causal language model of a local Hugging Face directory, with its server's weights, and their digests.

    The digests are those of the directory's files. The server's weights are compared with them here, and with each
    delivery: the learner can't be what says that they are right, since it computes with the same bytes.

    Args:
        directory: The model's; its weights have the dtype.
        attention: One of transformers' implementations; None for its own choice.

    Raises:
        ConfigError: The server can't lend its weights, or names them differently.
        AgentrigError: The server's weights are not those of the files.
        ModelError: See `agentrig_grpo.checkpoint.load_model`.
    """
    if not isinstance(server, Lending):
        raise ConfigError(f"the learner can't read the weights of this server: it has no method lend. {OWN}")
    directory = model_files(directory, "config.json")
    model = skeleton(directory, dtype=dtype, device=device, attention=attention)
    parameters = dict(model.named_parameters())
    found = server.lend({name: list(parameter.shape) for name, parameter in parameters.items()})
    wrong = [name for name in parameters if name not in found or found[name].dtype != dtype]
    if wrong:
        raise ConfigError(f"the server does not hold these weights as the learner has them: {_some(wrong)}. {OWN}")
    attach(model, found)
    stated = digests_of(directory, list(parameters), dtype=dtype, device=device)
    held = digests((name, found[name]) for name in parameters)
    wrong = [name for name in parameters if held[name] != stated[name]]
    if wrong:
        raise AgentrigError(
            f"{len(wrong)} of {len(parameters)} weights that the server holds are not those of {directory}: "
            f"{_some(wrong)}. Nothing was trained. {OWN}"
        )
    return model, stated


def skeleton(directory: Path, *, dtype: torch.dtype, device: str, attention: str | None) -> Any:
    """Return a model in evaluation mode whose parameters have no memory; its buffers are on the device.

    Raises:
        ModelError: The directory's configuration can't be read.
        ConfigError: A buffer can't be computed without loading the model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    with loading(directory, "model"):
        settings = AutoConfig.from_pretrained(str(directory), local_files_only=True)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                settings, dtype=dtype, attn_implementation=attention
            )
        if (directory / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(str(directory), local_files_only=True)
    for name, module in list(model.named_modules()):
        if next(module.buffers(recurse=False), None) is not None:
            try:  # such as the frequencies of positions: they come from the settings alone
                model.set_submodule(name, type(module)(model.config).to(device))
            except Exception as error:
                why = f"{name} of a {settings.model_type} can't be made from its settings"
                raise ConfigError(f"{why} ({type(error).__name__}: {error}). {OWN}") from error
    return model.eval()


def attach(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Let a model compute with tensors in place of its parameters, by their names; tied parameters stay tied."""
    for name in [name for name, _ in model.named_parameters()]:
        owner, _, key = name.rpartition(".")
        model.get_submodule(owner)._parameters[key] = torch.nn.Parameter(tensors[name], requires_grad=False)
    model.tie_weights()


def digests_of(directory: Path, names: list[str], *, dtype: torch.dtype, device: str) -> dict[str, str]:
    """Return name to digest of tensors in a directory's safetensors files; one of them is on the device at a time."""
    found = Digests(dtype)
    wanted = set(names)
    for name, tensor in _tensors(directory, wanted):
        found.add(name, tensor.to(device))
        wanted.discard(name)
    if wanted:
        lack = f"they lack {_some(wanted)}"
        raise ConfigError(f"the files in {directory} name the model's weights differently: {lack}. {OWN}")
    return found.result()


def _tensors(directory: Path, wanted: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for path in weight_files(directory):
        with loading(directory, "model"), safe_open(str(path), framework="pt") as file:
            for name in wanted.intersection(file.keys()):
                yield name, file.get_tensor(name)


def _some(names: Any) -> str:
    """Return the first of some names, and how many more there are."""
    first = sorted(names)[:3]
    return ", ".join(first) + (f" and {len(names) - len(first)} more" if len(names) > len(first) else "")
