"""Part of a stand-in for vLLM."""
