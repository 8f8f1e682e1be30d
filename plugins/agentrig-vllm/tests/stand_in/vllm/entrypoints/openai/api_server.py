"""vLLM's application: it answers with what it was asked and the version that it was given."""

from __future__ import annotations

from types import SimpleNamespace

from fastapi import FastAPI, Request


def build_app(args, supported_tasks, model_config):
    app = FastAPI()

    @app.get("/health")
    async def health():
        return {}

    @app.post("/v1/completions")
    async def complete(request: Request):
        state = request.app.state
        adapter = state.openai_serving_models.lora_requests.get(args.served_model_name[0])
        return {
            "model": args.served_model_name[0],
            "system_fingerprint": state.openai_serving_completion.system_fingerprint,
            "calls": state.engine.calls,
            "adapter": adapter.lora_int_id if adapter else None,
        }

    @app.post("/tokenize")
    async def tokenize():
        return {"tokens": []}

    return app


async def init_app_state(engine, state, args, supported_tasks):
    state.engine = engine
    named = [SimpleNamespace(name=name) for name in args.served_model_name]
    state.openai_serving_models = SimpleNamespace(base_model_paths=named, lora_requests={})
    state.openai_serving_chat = SimpleNamespace(system_fingerprint="vllm-0.24.0")
    state.openai_serving_completion = SimpleNamespace(system_fingerprint="vllm-0.24.0")
