"""verl's FSDP engine with shared tokens: common prefixes of a mini-batch's rows are computed once.

The rows of a mini-batch become a forest (`agentrig_forest`). It is cut into packs under the token budget of verl's
micro-batches; the rows of a pack are a micro-batch. The model runs once over the tokens of a pack, and verl's own loss
function gets log-probabilities, and entropies, by row, as from its own engine. Sharding, precision, optimizer and
checkpoints are verl's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch  # noqa: TID253  (runs in verl's workers; imported by the actor only)
from agentrig_forest.kernels import fuse_norms
from agentrig_forest.scoring import prepare, score
from agentrig_forest.sequences import Batch, collate
from verl.utils import fsdp_utils, tensordict_utils  # noqa: TID253
from verl.utils.device import get_device_id, get_device_name  # noqa: TID253
from verl.utils.model import convert_weight_keys  # noqa: TID253
from verl.utils.py_functional import append_to_dict  # noqa: TID253
from verl.workers.engine import EngineRegistry  # noqa: TID253
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: TID253
from verl.workers.utils.losses import ppo_loss  # noqa: TID253

from agentrig_verl.gathering import gathered, units
from agentrig_verl.micro_batches import MicroBatch, cut, split
from agentrig_verl.rows import Row, by_row, old_logprobs, places_of, rows_of, trained_only, without_gradient

MODEL_TYPE = "agentrig_forest"
"""The name of this engine in verl's registry."""


LOGITS = 1 << 27
"""Most logits that are held at once: in fp32, with their gradient and its parts, about 2 GiB."""


@attrs.define
class Tokens:
    """Tokens of all passes since the last `take`: what the rows have, and what was computed."""

    traced: int = 0
    computed: int = 0


@EngineRegistry.register(model_type=MODEL_TYPE, backend=["fsdp", "fsdp2"], device="cuda")
class ForestEngine(FSDPEngineWithLMHead):  # type: ignore[misc]
    """Computes each token prefix that rows share once.

    Attributes:
        tokens: Counts the tokens of training passes.
        skips: Whether a row whose advantages are all 0 has no gradient under the loss function, so that none of its
            tokens need be computed; see `skips_zero_advantage`.
        sent: The dtype of the weights for the servers; None for that of the optimizer's.
    """

    sent: torch.dtype | None = None

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.model_config.model_type = "language_model"  # what verl builds; its registry needed the other name
        self.tokens = Tokens()
        self.skips = False
        self._room = room_of(self.model_config.hf_config, checkpointing=self.model_config.enable_gradient_checkpointing)

    def _build_module(self) -> Any:
        self.model_config.hf_config._attn_implementation = "sdpa"  # to load it; replaced below
        module = super()._build_module()
        if not prepare(module):
            raise ValueError(
                f"tokens of a {module.config.model_type} model cannot be shared: set algorithm.engine=verl"
            )
        for part in module.modules():
            if getattr(part, "attention_dropout", 0.0):
                raise ValueError("this model has dropout, so shared tokens are not exact: set algorithm.engine=verl")
        module.forward = scoring(module)
        return module

    def _build_fsdp_module(self, module: Any) -> Any:
        head, chosen = module.get_output_embeddings(), fsdp_utils._select_fsdp2_wrap_targets

        def without_head(*given: Any) -> list[Any]:
            return [part for part in chosen(*given) if part is not head]

        # The head is called for each chunk of logits, and the ranks have different numbers of chunks. Sharded by
        # itself it would be gathered in each call; as a part of the whole model it is gathered once in a pass.
        fsdp_utils._select_fsdp2_wrap_targets = without_head
        try:
            module = super()._build_fsdp_module(module)
        finally:
            fsdp_utils._select_fsdp2_wrap_targets = chosen
        if get_device_name() != "cpu" and self._autocast_dtype != torch.float32:
            fuse_norms(module)
        return module

    def get_per_tensor_param(self, **more: Any) -> Any:
        """Return names and values of all weights for the servers, as verl; without LoRA in a faster way."""
        if self._qat_enabled or self._is_lora or not units(self.module):
            return super().get_per_tensor_param(**more)
        inner, found = self.module._fsdp_wrapped_module, gathered(self.module, self.sent)
        return (each for name, value in found for each in convert_weight_keys({name: value}, inner).items()), None

    def forward_backward_batch(
        self, data: Any, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Run a mini-batch: forward, verl's loss and, unless `forward_only`, backward.

        Args:
            data: Ragged rows, as verl's trainer sends them.
            loss_function: verl's, called with the rows of each micro-batch; None for log-probabilities only.
            forward_only: Compute no gradient.

        Returns:
            As verl's own engine: `model_output` by row (of training only if asked for), `loss` and `metrics` of each
            micro-batch.
        """
        keep = forward_only or tensordict_utils.get_non_tensor_data(data, "return_model_output", False)
        group = self.get_data_parallel_group()
        count = data["loss_mask"].sum().to(get_device_id())
        torch.distributed.all_reduce(count, group=group)
        tensordict_utils.assign_non_tensor(
            data, sp_size=1, batch_num_tokens=count.item(), dp_size=self.get_data_parallel_size()
        )
        rows = rows_of(data)
        if not forward_only:
            self.tokens.traced += sum(row.traced for row in rows)
            if self.skips and not tensordict_utils.get_non_tensor_data(data, "calculate_entropy", False):
                rows = without_gradient(rows, data)
        parts = self._cut(rows, tokens_of_a_pass(data, rows, self._room), group)
        outputs = []
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            mode = torch.no_grad() if forward_only else self._gradient_sync_context(is_last_micro_batch=last)
            with mode, torch.profiler.record_function(f"micro_batch{i}"):
                loss, output = self._pass(data, part, loss_function)
                if not forward_only:
                    (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            outputs.append((part.members, output if keep else {**output, "model_output": {}}))
            if not forward_only:
                self.tokens.computed += part.pack.tokens
        return _gathered(outputs, len(rows))

    def _cut(self, rows: Sequence[Row], budget: int, group: Any) -> list[MicroBatch]:
        """Cut rows into micro-batches, as many on each rank: each pass of a sharded model is one of all ranks."""
        parts = cut(rows, budget)
        most = torch.tensor(len(parts), device=get_device_id())
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=group)
        while len(parts) < int(most):
            parts = split(parts)
        return parts

    def _pass(
        self, data: Any, part: MicroBatch, loss_function: Callable[..., Any] | None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Compute one micro-batch's loss and output."""
        device = torch.device(get_device_id())
        batch = collate(part.pack, share=True, varlen=device.type == "cuda" and self._autocast_dtype != torch.float32)
        batch = trained_only(batch, part.samples).to(device)
        calculate_entropy = tensordict_utils.get_non_tensor_data(data, "calculate_entropy", False)
        # FSDP hands the weights over in the precision of `mixed_precision`, so autocast would change nothing.
        logprobs, entropy = self.module(
            forest=batch,
            temperature=_temperature(data),
            entropy_gradient=calculate_entropy and torch.is_grad_enabled(),
        )
        micro = tensordict_utils.index_select_tensor_dict(data, [row.index for row in part.members])
        micro = micro.to(get_device_id())
        places = places_of(batch, part.samples, part.members)
        like, training = micro["input_ids"], torch.is_grad_enabled()
        known = old_logprobs(micro, part.members) if self.skips and training else None
        model_output = {"log_probs": by_row(logprobs, places, like, known)}
        if calculate_entropy:
            model_output["entropy"] = by_row(entropy, places, like)
        loss, metrics = torch.ones((), device=device), {}
        if loss_function is not None:
            group = self.get_data_parallel_group()
            loss, metrics = loss_function(model_output=model_output, data=micro, dp_group=group)
        detached = {name: x.detach() for name, x in model_output.items()}
        return loss, {"model_output": detached, "loss": loss.detach().item(), "metrics": metrics}


def _temperature(data: Any) -> float:
    """Return the batch's temperature.

    Raises:
        ValueError: Its rows have different ones, and rows that share tokens share their logits.
    """
    value = tensordict_utils.get_non_tensor_data(data, "temperature", 1.0)
    found = set(value.flatten().tolist()) if isinstance(value, torch.Tensor) else {float(value)}
    if len(found) != 1:
        raise ValueError(f"rows with different temperatures ({sorted(found)}): set algorithm.engine=verl")
    return float(found.pop())


def _gathered(outputs: Sequence[tuple[Sequence[Row], dict[str, Any]]], rows: int) -> dict[str, Any]:
    """Return the outputs of micro-batches as those of the mini-batch, its rows in their own order."""
    by_name: dict[str, list[torch.Tensor]] = {}
    metrics: dict[str, Any] = {}
    for members, output in outputs:
        for name, values in output["model_output"].items():
            placed = by_name.setdefault(name, [torch.empty(0)] * rows)
            for row, value in zip(members, values.unbind(), strict=True):
                placed[row.index] = value
        append_to_dict(metrics, output["metrics"])
    model_output = {name: torch.nested.as_nested_tensor(x, layout=torch.jagged) for name, x in by_name.items()}
    return {"model_output": model_output, "loss": [output["loss"] for _, output in outputs], "metrics": metrics}


def scoring(model: Any) -> Callable[..., Any]:
    """Return a model's forward that scores a batch of a forest: sharded models gather weights around it.

    Without `forest` it is the model's own.
    """
    plain = model.forward

    @functools.wraps(plain)
    def forward(
        *args: Any,
        forest: Batch | None = None,
        temperature: float = 1.0,
        entropy_gradient: bool = False,
        **more: Any,
    ) -> Any:
        if forest is None:
            return plain(*args, **more)
        return score(model, forest, temperature, chunk=LOGITS, entropy_gradient=entropy_gradient)

    return forward


def tokens_of_a_pass(data: Any, rows: Sequence[Row], room: float) -> int:
    """Return the token budget of a pass.

    With verl's `use_dynamic_bsz` it is `max_token_len_per_gpu`. Otherwise verl's own engine would hold
    `micro_batch_size_per_gpu` padded rows; a pass has `room` times their tokens.

    Args:
        rows: All of its rows.
        room: See `room_of`.
    """
    get = tensordict_utils.get_non_tensor_data
    if get(data, "use_dynamic_bsz", True):
        return int(get(data, "max_token_len_per_gpu", None))
    held = int(get(data, "micro_batch_size_per_gpu", None)) * max(row.length for row in rows)
    return int(held * room)


def room_of(config: Any, *, checkpointing: bool) -> float:
    """Return how many tokens fit into the memory that verl's own engine needs for one.

    Both keep each layer's input (with gradient checkpointing) or what each layer needs for its gradient. verl's engine
    also keeps the logits of every token and their gradient; here those of a chunk exist at a time.

    Args:
        config: The model's configuration, of a dense transformer.
        checkpointing: Whether layers are computed again for the gradient.
    """
    width = 2  # bytes of a number in bf16
    layer = width * (8 * config.hidden_size + 4 * config.intermediate_size)
    inputs = width * config.hidden_size * config.num_hidden_layers
    kept: int = inputs + layer if checkpointing else layer * config.num_hidden_layers
    logits: int = 2 * width * config.vocab_size
    return 1 + logits / kept


def skips_zero_advantage(loss_function: Any) -> bool:
    """Return whether rows whose advantages are all 0 have no gradient under a loss function.

    Args:
        loss_function: As verl's workers set it: `ppo_loss` with its configuration.
    """
    if not isinstance(loss_function, functools.partial) or loss_function.func is not ppo_loss:
        return False
    config = loss_function.keywords["config"]
    mode = config.policy_loss.get("loss_mode", "vanilla")
    return mode == "vanilla" and not config.use_kl_loss and not config.entropy_coeff
