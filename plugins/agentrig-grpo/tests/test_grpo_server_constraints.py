"""`response_format`: replies are JSON of the schema, and their log-probabilities are the unconstrained policy's."""

from __future__ import annotations

import json

import httpx
import jsonschema
import pytest
import torch
from agentrig_grpo import checkpoint
from agentrig_grpo.server.constraints import KEPT, ConstraintError, Constraints
from agentrig_grpo.server.engine import Engine, Request
from agentrig_grpo.server.loading import build_decoder
from agentrig_grpo.server.sampling import Settings, sample
from tool_models import ToolModels, served

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["left", "right"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "turn", "schema": SCHEMA, "strict": True}}
MESSAGES = [{"role": "user", "content": "select name"}]


@pytest.fixture(scope="module")
def url(model_dir, tokenizer):
    with served(ToolModels(model_dir, {"none": tokenizer}), "none") as url:
        yield url


def ask(url, **more):
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 200, "seed": 3, "response_format": FORMAT, **more}
    return httpx.post(f"{url}/chat/completions", json=body, timeout=60)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0}, {"temperature": 2.0, "top_p": 0.3}])
def test_replies_fit_the_schema_and_their_logprobs_are_the_policys_own(url, model_dir, sampling):
    answer = ask(url, n=2, logprobs=True, return_token_ids=True, **sampling).json()
    model, prompt = checkpoint.load_model(model_dir), answer["prompt_token_ids"]
    for choice in answer["choices"]:
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        assert choice["finish_reason"] == "stop"
        ids = choice["token_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        logp = torch.log_softmax(logits / (sampling.get("temperature", 1.0) or 1.0), -1)
        own = logp.gather(1, torch.tensor(ids)[:, None])[:, 0]
        told = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
        torch.testing.assert_close(told, own, atol=1e-3, rtol=1e-3)
        # A random model would hardly write this by itself, and the numbers say so.
        assert told.sum() < -20


def test_rows_with_and_without_a_schema_share_a_batch(url):
    """A constraint concerns its own row: one beside it samples what it samples alone."""
    with httpx.Client(base_url=url, timeout=60) as client:
        plain = {"model": "tiny", "messages": MESSAGES, "max_tokens": 40, "seed": 3}
        alone = client.post("/chat/completions", json=plain).json()["choices"][0]["message"]["content"]
        decoded = ask(url, response_format={"type": "text"}, max_tokens=40).json()["choices"][0]["message"]["content"]
    assert decoded == alone
    with pytest.raises(json.JSONDecodeError):
        json.loads(alone)


def test_any_json_object_and_the_other_types(url):
    found = ask(url, response_format={"type": "json_object"}, max_tokens=300, seed=1, stream=True).text
    text = "".join(
        json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content", "")
        for line in found.splitlines()
        if line.startswith("data: {")
    )
    assert text.startswith("{")
    empty = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    assert ask(url, response_format=empty, max_tokens=3).status_code == 200


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"type": "xml"}, 'must be an object with the type "text", "json_object" or "json_schema"'),
        ({"type": "json_schema"}, "json_schema.schema"),
        (
            {"type": "json_schema", "json_schema": {"schema": {"type": "robot"}}},
            "can't be enforced: Invalid type: robot",
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://127.0.0.1/x"}}},
            "does not fetch resources",
        ),
        ({"type": "json_schema", "json_schema": {"schema": {"pattern": "("}}}, "can't be enforced"),
        ({"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}, "no text fits it. Does it refer to itself"),
    ],
)
def test_a_format_that_can_not_be_enforced_is_refused_in_words(url, form, words):
    response = ask(url, response_format=form)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "response_format")
    assert words in error["message"]


def test_a_constraint_that_fails_ends_its_own_request_only(model_dir, tokenizer):
    class Failing:
        def __init__(self, at):
            self.left = at

        def allowed(self):
            self.left -= 1
            if self.left < 0:
                raise ConstraintError("too complex")
            return torch.ones(300, dtype=torch.bool)

        def accept(self, token):
            pass

    decoder, _ = build_decoder(model_dir, device="cpu", dtype=torch.float32, slots=4, max_length=64)
    engine = Engine(decoder, eos=[], slots=4)
    failing = Request(prompt=(5, 6), max_tokens=6, constraint=Failing(2))
    beside = Request(prompt=(5, 6), max_tokens=6, seed=1)
    alone = Request(prompt=(5, 6), max_tokens=6, seed=1)
    for requests in ([failing, beside], [alone]):
        for request in requests:
            engine.submit(request)
        while engine.busy:
            engine.tick()
    assert (failing.finish, failing.error, len(failing.tokens)) == ("error", "too complex", 2)
    assert (beside.finish, beside.tokens) == ("length", alone.tokens)


def test_a_token_is_sampled_from_what_is_allowed_even_if_the_policy_gives_it_no_chance():
    logits = torch.tensor([[0.0, 300.0, -200.0, -200.0]])
    allowed = torch.tensor([[False, False, True, True]])
    for temperature in (1.0, 0.0):
        settings = Settings.of([temperature], [0.9], torch.device("cpu"))
        tokens, logp = sample(logits, settings, [0.9], allowed)
        assert tokens.tolist() == [3 if temperature else 2]
        torch.testing.assert_close(logp, torch.log_softmax(logits, -1))


def test_schemas_are_compiled_once_and_old_ones_are_dropped(tokenizer):
    constraints = Constraints(tokenizer, 300)
    first = constraints.constraint({"const": 1})
    for i in range(KEPT + 1):
        constraints.constraint({"const": i})
    assert constraints._compiled.cache_info().currsize == KEPT
    first.accept(int(first.allowed().nonzero()[0]))
    fresh = constraints.constraint({"const": 1}).allowed()
    assert tokenizer.convert_ids_to_tokens(fresh.nonzero()[:, 0].tolist()) == ["1"], "each reply has its own state"


def test_a_tokenizer_that_llguidance_can_not_read_is_an_error_in_words():
    with pytest.raises(ConstraintError, match="can't read this model's tokenizer"):
        Constraints(object(), 300).constraint({"type": "object"})
