"""vLLM's server for a checkpoint. vLLM itself needs a GPU: a program of the same name replaces it."""

from __future__ import annotations

import json
import os
import urllib.request

import pytest
from agentrig_verl.serve import serve_model

from agentrig.errors import AgentrigError

PROGRAM = """
import http.server, json, os, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"pid": os.getpid(), "words": sys.argv[1:]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

if "broken" in sys.argv:
    sys.exit("ValueError: no such model")
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    package = tmp_path / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_a_model_is_served_until_the_block_ends(vllm):
    options = {"enforce-eager": True, "hf-overrides": {"a": 1}, "allowed-origins": ["x", "y"]}
    with serve_model("m", sampling={"temperature": 0.0}, max_model_len=64, memory=0.5, options=options) as endpoint:
        health = endpoint.base_url.removesuffix("/v1") + "/health"
        with urllib.request.urlopen(health, timeout=5) as answer:
            told = json.loads(answer.read())
        assert (endpoint.model, endpoint.sampling, endpoint.token_ids) == ("m", {"temperature": 0.0}, True)
    words = " ".join(told["words"])
    assert words.startswith("serve m --host 127.0.0.1 --port ")
    assert words.endswith('--max-model-len 64 --enforce-eager --hf-overrides {"a": 1} --allowed-origins x y')
    with pytest.raises(ProcessLookupError):
        os.kill(told["pid"], 0)


def test_a_server_that_fails_to_start_is_named_with_its_last_output(vllm):
    with (
        pytest.raises(AgentrigError, match=r"(?s)vLLM has died \(exit status 1\).*ValueError: no such model"),
        serve_model("broken", sampling={}, max_model_len=None, memory=0.5),
    ):
        raise AssertionError("it is not up")
