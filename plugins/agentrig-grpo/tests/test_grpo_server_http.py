from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

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
        logp = torch.log_softmax(logits / 0.8, -1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor([c["logprob"] for c in content]), logp, atol=1e-4, rtol=1e-4)
        assert all(len(c["top_logprobs"]) == 2 for c in content)
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


def test_seed_and_temperature_0_repeat(client):
    def text(**more):
        return ask(client, **more).json()["choices"][0]["message"]["content"]

    assert text() == text()
    assert text(seed=6) != text()
    assert text(temperature=0, seed=1) == text(temperature=0, seed=None) == text(temperature=1e-38, seed=2)


def test_stop_strings_end_and_cut_the_text(client):
    whole = ask(client, max_tokens=60, temperature=2.0, seed=11).json()["choices"][0]["message"]["content"]
    stop = whole[len(whole) // 2 : len(whole) // 2 + 2]
    answer = ask(client, max_tokens=60, temperature=2.0, seed=11, stop=["never this", stop], return_token_ids=True)
    choice = answer.json()["choices"][0]
    assert choice["message"]["content"] == whole[: whole.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert 0 < len(choice["token_ids"]) < 60


def test_concurrent_requests_get_the_replies_of_single_ones(client, server):
    def one(seed):
        return ask(client, seed=seed, return_token_ids=True).json()["choices"][0]["token_ids"]

    alone = [one(seed) for seed in range(20)]
    before = health(server)["counts"]
    with ThreadPoolExecutor(20) as pool:
        assert list(pool.map(one, range(20))) == alone
    after = health(server)["counts"]
    assert after["prefills"] == before["prefills"], "the prompt was there already"
    assert after["steps"] - before["steps"] < 20 * 12, "they ran in one batch"


def test_a_stream_has_the_content_of_the_whole_reply(client):
    whole = ask(client, return_token_ids=True, logprobs=True, max_tokens=30).json()
    chunks = []
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 30, "seed": 5, "stream": True, "logprobs": True}
    body |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", "/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert chunks[-1]["usage"] == whole["usage"]
    pieces = [c["choices"][0] for c in chunks[1:-1]]
    choice = whole["choices"][0]
    assert "".join(p["delta"]["content"] for p in pieces) == choice["message"]["content"]
    assert [t for p in pieces for t in p["token_ids"]] == choice["token_ids"]
    assert [e for p in pieces for e in p["logprobs"]["content"]] == choice["logprobs"]["content"]
    assert pieces[-1]["finish_reason"] == choice["finish_reason"]
    assert len(pieces) > 5


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


def test_new_weights_are_used_and_old_ones_can_be_restored(server, client, make_model):
    before = ask(client, temperature=0).json()
    server.take(checkpoint.weights(make_model(seed=3)), 1)
    after = ask(client, temperature=0).json()
    assert after["system_fingerprint"] == "v1"
    assert after["choices"] != before["choices"]
    server.take(checkpoint.weights(make_model()), 0)
    assert ask(client, temperature=0).json()["choices"] == before["choices"]


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
