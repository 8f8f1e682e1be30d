"""The environment variables that agentrig and its plugins read; docs/reference.md is generated from this list."""

from __future__ import annotations

from collections.abc import Mapping

VARIABLES: Mapping[str, str] = {
    "AGENTRIG_BLOCK": "names of plugins or distributions that are never imported, separated by commas",
    "AGENTRIG_CACHE": "folder for generated files; by default `agentrig` in your cache folder",
    "AGENTRIG_SPIDER_DIR": "Spider's folder, for the task set `spider`",
    "VERL_SPIDER_DATA_DIR": "the same, under the name that the reference uses",
    "AGENTRIG_YES": "`1`: stop a stale Ray cluster without asking, as `--yes` does",
    "OPENAI_BASE_URL": "the model server of `eval` and `dev` whose command names no model, and of Agent Lightning's "
    "algorithms",
    "OPENAI_API_BASE": "the same, under its older name",
    "OPENAI_API_KEY": "that server's key; runners get it as `endpoint.api_key`, never as a variable",
    "NO_PROXY": "hosts that are reached without a proxy; in a runner the endpoint's private address is added",
    "no_proxy": "the same",
    "HF_HOME": "where Hugging Face keeps models and its login",
    "HF_HUB_CACHE": "where Hugging Face keeps models",
    "HF_TOKEN": "Hugging Face's key, which `doctor` looks for when a model must be downloaded",
    "HF_ENDPOINT": "a mirror of huggingface.co",
    "MODELSCOPE_CACHE": "where ModelScope keeps models",
    "MODELSCOPE_DOMAIN": "ModelScope's host",
    "MODELSCOPE_ENDPOINT": "ModelScope's address",
    "TMPDIR": "the folder for temporary files",
    "XDG_CACHE_HOME": "the user's cache folder",
    "HOME": "the user's folder",
    "PATH": "where programs such as `nvidia-smi` are searched",
    "PYTHONSAFEPATH": "if the user has set it, runners keep it",
    "CUDA_VISIBLE_DEVICES": "the GPUs that a run may use",
    "ASCEND_RT_VISIBLE_DEVICES": "the NPUs that a run may use",
    "ASCEND_HOME_PATH": "where CANN is installed",
    "ASCEND_TOOLKIT_HOME": "the same, under another name",
    "ATB_HOME_PATH": "where Ascend's transformer library is installed",
    "MASTER_PORT": "the port of torch's distributed processes; `doctor` looks whether it is free",
    "RAY_ADDRESS": "the Ray cluster to join",
    "RAY_AUTH_MODE": "whether that cluster asks for a token",
    "RAY_AUTH_TOKEN": "its token",
    "RAY_AUTH_TOKEN_PATH": "a file that holds its token",
    "RAY_TMPDIR": "where Ray keeps its sessions",
    "VERL_DISABLE_FLASH_ATTN_CE": "verl's switch for flash-attn's cross-entropy",
    "VLLM_PLUGINS": "the plugins that vLLM loads",
    "WANDB_API_KEY": "the login of Weights & Biases, for the tracker `wandb`, and verl's logger of that name",
    "WANDB_IDENTITY_TOKEN_FILE": "another form of that login",
    "WANDB_MODE": "`offline` or `disabled`: no login is needed",
    "WANDB_BASE_URL": "another server of Weights & Biases",
    "NETRC": "the file that holds that login",
    "SWANLAB_API_KEY": "the login of SwanLab, for the tracker `swanlab`, and verl's logger of that name",
    "SWANLAB_MODE": "`local`, `offline` or `disabled`: no login is needed",
    "MLFLOW_TRACKING_URI": "MLflow's server or store, for the tracker `mlflow`",
}
"""Name to meaning: variables that a user may set."""

INTERNAL: Mapping[str, str] = {
    "AGENTRIG_PROGRAM": "marks the processes that a program of the agent `command` has started",
    "AGENTRIG_SAMPLING": "what the agent `command` gives its program: the run's sampling fields, as JSON",
    "AGENTRIG_HEADERS": "the same: HTTP headers for every call to the model, as JSON",
    "AGENTRIG_INPUT": "the same: the task's input as JSON, or the file that has it",
    "AGENTRIG_ANSWER_URL": "the same: where the program posts its answer, if it answers by a callback",
    "AGENTRIG_ANSWER_KEY": "the same: the bearer key of that address",
    "AGENTRIG_AGENT_FOLDER": "the folder from which the agent `agent-lightning-1` imports its class",
    "AGENTRIG_RUNNER": "marks the processes that a runner has started, so that they end with it",
    "AGENTRIG_SCRATCH": "the folder for a run's temporary files",
    "AGENTRIG_KEEP_SAFEPATH": "tells a runner that the user has set `PYTHONSAFEPATH`",
    "AGENTRIG_DOCTOR_ASKED": "the doctor's arguments, for the process in which it tries the imports of a run",
    "AGENTRIG_KIT": "marks the processes of a server that `agentrig.testing` checks",
    "KIT_OF_RUNNERS_KEY": "set while the kit starts runners: a key that they must not get",
    "AGENTRIG_WORKER_SETUP": "the functions that prepare a Ray worker for its hardware",
}
"""Name to meaning: variables that agentrig sets for its own processes; don't set them."""
