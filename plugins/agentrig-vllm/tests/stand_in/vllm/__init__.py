"""A stand-in for vLLM on a machine without a GPU: the modules that `agentrig_vllm.serving` and `worker` import.

It has vLLM's processes (an engine forked from the server's), its command line, its application with the fields that
agentrig sets, and a worker that holds tensors as vLLM does. It computes nothing.
"""
