"""`sft`: its gradient is that of plain cross-entropy, and what a demonstrated call is in tokens."""

from __future__ import annotations

import copy

import pytest
import torch
from agentrig_grpo.config import SftConfig
from agentrig_grpo.encoding import encode
from agentrig_grpo.learner import Learner, TrainSample
from agentrig_grpo.server.chat import Chat

from agentrig.demonstrations import Reply, Turn
from agentrig.testing.tiny_model import make_model, make_tokenizer

ASKED = ({"role": "user", "content": "count the names"},)


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(make_tokenizer())


def sample(prompt: list[int], reply: list[int], place: int, worth: float = 1.0) -> TrainSample:
    return TrainSample(
        prompt_ids=prompt, response_ids=reply, logprobs=None, advantage=worth, rollout=place, group=f"g{place}"
    )


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_the_gradient_is_that_of_the_cross_entropy_of_transformers(mode: str) -> None:
    torch.set_num_threads(1)
    rows = [([5, 6, 7], [8, 9]), ([5, 6, 7], [10, 11, 12, 13]), ([20], [21, 22, 23])]
    model = make_model(seed=3)
    plain = copy.deepcopy(model).train()
    losses = []
    for prompt, reply in rows:  # by the library's own loss: -100 leaves a token out
        labels = torch.tensor([[-100] * len(prompt) + reply])
        loss = plain(input_ids=torch.tensor([prompt + reply]), labels=labels).loss
        losses.append(loss * len(reply) / 9 if mode == "token-mean" else loss / 3)
    wanted = torch.stack(losses).sum()
    wanted.backward()

    config = SftConfig(lr=1e-3, loss_agg_mode=mode, max_grad_norm=float("inf"), dtype="float32")
    learner, seen = Learner(model, config, dtype="float32", seed=0), {}

    def keep(*given: object) -> None:
        seen.update({name: p.grad.clone() for name, p in learner.trained.items()})

    learner.optimizer.register_step_pre_hook(keep)
    figures = learner.update([sample(*row, place) for place, row in enumerate(rows)], step=1)
    assert figures["loss"] == pytest.approx(wanted.item(), rel=1e-5), "the loss is the cross-entropy itself"
    assert (figures["trained_tokens"], figures["ratio_max"], figures["clip_fraction"]) == (9, 1, 0)
    for name, parameter in plain.named_parameters():
        assert torch.allclose(seen[name], parameter.grad, rtol=1e-4, atol=1e-6), name


def test_a_later_mini_batch_is_learned_by_cross_entropy_too() -> None:
    rows = [sample([5, 6, 7], [8, 9], 0), sample([20], [21, 22, 23], 1)]
    many = Learner(make_model(), SftConfig(lr=1e-2, mini_batches=2), dtype="float32", seed=0).update(rows, step=1)
    assert (many["updates"], many["ratio_max"], many["clip_fraction"], many["kl"]) == (2, 1, 0, 0)


def test_recorded_ids_hold_if_they_say_the_same_with_this_tokenizer(chat: Chat) -> None:
    turn = Turn(messages=ASKED, reply=Reply(content="select a name"))
    prompt, reply = encode(turn, chat, 512)
    assert chat.text(reply) == "select a name"
    assert reply[-1] == chat.tokenizer.eos_token_id

    def kept(prompt: object, reply: object) -> object:
        return encode(
            Turn(messages=ASKED, reply=turn.reply, prompt_token_ids=prompt, response_token_ids=reply), chat, 512
        )

    letters = [chat.tokenizer(letter)["input_ids"][0] for letter in "select"]
    spelled = [*letters, *chat.tokenizer(" a name")["input_ids"], chat.tokenizer.eos_token_id]
    assert spelled != list(reply)
    assert kept(prompt, spelled) == (prompt, spelled), "as it was sampled"
    for other in ([prompt, [*spelled, 40]], [prompt[1:], spelled], [prompt, [10**9]]):
        assert kept(*other) == (prompt, reply), "of another tokenizer: written again"


@pytest.mark.parametrize(
    ("messages", "reply", "message"),
    [
        (ASKED, Reply(content=" "), "the reply is empty"),
        (ASKED, Reply(content="x" * 600), "tokens, and the context is 512"),
        (ASKED, Reply(content="a <|end|> b"), "can't write the reply"),
        (ASKED, Reply(content="a", reasoning="so"), "reasoning, which is not learned"),
        (ASKED, Reply(tool_calls=[{"name": "add", "arguments": {}}]), "tool"),
        (({"role": "assistant", "tool_calls": ["add"]},), Reply(content="a"), "these are no messages of a chat"),
    ],
)
def test_what_cannot_be_learned_is_refused_with_its_reason(
    messages: tuple[dict[str, object]], reply: Reply, message: str, chat: Chat
) -> None:
    with pytest.raises(ValueError, match=message):
        encode(Turn(messages=messages, reply=reply), chat, 512)


def test_what_the_template_refuses_cannot_be_learned() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system message') }}"
    with pytest.raises(ValueError, match=r"the chat template refuses these messages: .*no system message"):
        encode(Turn(messages=ASKED, reply=Reply(content="a")), Chat(tokenizer), 512)
