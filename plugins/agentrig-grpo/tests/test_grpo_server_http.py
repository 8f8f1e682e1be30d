from __future__ import annotations

import time

import httpx
import pytest
import torch
from agentrig_grpo import checkpoint
from embedded_servers import embedded, health

MESSAGES = [{"role": "system", "content": "count"}, {"role": "user", "content": "select name from question?"}]


@pytest.fixture(scope="module")
def server(model_dir):
    with embedded(model_dir, slots=8, max_length=200) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    headers = {"Authorization": f"Bearer {server.api_key}"}
    with httpx.Client(base_url=server.base_url, timeout=60, headers=headers) as made:
        yield made


def ask(client, **more):
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "seed": 5, **more}
    return client.post("/chat/completions", json=body)


def test_a_reply_has_ids_and_logprobs_where_vllm_puts_them(client, tokenizer, model_dir):
    answer = ask(client, logprobs=True, top_logprobs=2, return_token_ids=True, n=3, temperature=0.8).json()
    text = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert answer["prompt_token_ids"] == prompt
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    model = checkpoint.load_model(model_dir)
    for choice in answer["choices"]:
        ids, content = choice["token_ids"], choice["logprobs"]["content"]
        assert choice["message"] == {
            "role": "assistant",
            "content": tokenizer.decode(ids, skip_special_tokens=True),
        }
        assert choice["finish_reason"] == ("stop" if ids[-1] == tokenizer.eos_token_id else "length")
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        logp = torch.log_softmax(logits / 0.8, -1)
        own = logp.gather(1, torch.tensor(ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor([c["logprob"] for c in content]), own, atol=1e-4, rtol=1e-4)
        tops = torch.tensor([[top["logprob"] for top in c["top_logprobs"]] for c in content])
        torch.testing.assert_close(tops, logp.topk(2).values, atol=1e-4, rtol=1e-4)
    used = sum(len(c["token_ids"]) for c in answer["choices"])
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": used,
        "total_tokens": len(prompt) + used,
    }
    plain = ask(client).json()
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]
    assert plain["choices"][0]["logprobs"] is None


def test_broken_bodies_and_wrong_routes(client):
    assert "not JSON" in client.post("/chat/completions", content=b"{").json()["error"]["message"]
    assert "JSON object" in client.post("/chat/completions", content=b"[]").json()["error"]["message"]
    response = client.get("/nothing")
    assert response.status_code == 404
    assert "/v1/chat/completions" in response.json()["error"]["message"]
    assert client.get("/chat/completions").status_code == 405
    for route in ("/messages", "/responses"):
        said = client.post(route, json={}).json()["error"]["message"]
        assert f"there is no POST /v1{route}; with gateway.use=on, agentrig's gateway answers it" in said


def test_a_client_that_hangs_up_frees_its_row(client, server):
    body = {"model": "tiny", "messages": MESSAGES, "temperature": 0.01, "n": 8, "max_tokens": 150}
    with pytest.raises(httpx.ReadTimeout):
        client.post("/chat/completions", json=body, timeout=0.02)
    deadline = time.monotonic() + 10
    while health(server)["running"] and time.monotonic() < deadline:
        time.sleep(0.02)
    assert health(server)["running"] == 0


def test_a_text_is_tokenized_as_it_is(client, server, tokenizer):
    def tokenize(**body):
        return client.post(server.base_url.removesuffix("/v1") + "/tokenize", json={"model": "tiny", **body})

    text = 'select name\n "messages" é'
    wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenize(prompt=text).json() == {"count": len(wanted), "max_model_len": 200, "tokens": wanted}
    assert tokenize(prompt=text, add_special_tokens=False).json()["tokens"] == wanted
    assert tokenize(messages=MESSAGES).json()["tokens"] != wanted
    for body, why in (
        ({"prompt": 3}, "prompt"),
        ({"prompt": text, "add_special_tokens": True}, "is not implemented"),
        ({"prompt": text, "color": 1}, "unknown field"),
        ({}, "messages"),
    ):
        refused = tokenize(**body)
        assert refused.status_code == 400
        assert why in refused.text
