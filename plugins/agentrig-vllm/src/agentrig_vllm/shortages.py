"""What vLLM says when a device's memory is too small for it, as one message with the setting that helps."""

from __future__ import annotations

import re

from agentrig.device_memory import GONE, shortage

STARTS = re.compile(
    r"Free memory on device .*?\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less than desired GPU memory "
    r"utilization \((?P<share>[\d.]+), (?P<wanted>[\d.]+) GiB\)"
)
ONE_REQUEST = re.compile(
    r"max seq len \((?P<context>\d+)\), \(?(?P<needed>[\d.]+) GiB KV cache is needed, which is larger than the "
    r"available KV cache memory \((?P<left>-?[\d.]+) GiB\)(?:.*?estimated maximum model length is (?P<fits>\d+))?"
)
TOKENS = re.compile(
    r"max seq len \((?P<context>\d+)\) is larger than the maximum number of tokens that can be stored in KV cache "
    r"\((?P<fits>\d+)\)"
)
NO_CACHE = re.compile(r"No available memory for the cache blocks")

LEAST_SHARE = 0.05
"""A share of the device below which no server starts."""

MORE = "Set a larger server.gpu_memory_utilization"


def shortage_in(text: str, *, started: bool) -> str:
    """Return which memory vLLM lacks and what to set; '' if its text is about another matter.

    Args:
        text: vLLM's answer to an order, or the last lines of its log.
        started: Whether it had started before.
    """
    if found := STARTS.search(text):
        free, total, wanted = (float(found[name]) for name in ("free", "total", "wanted"))
        share = int(100 * free / total - 1) / 100
        cure = "End the other processes on the device, or use another device (server.device)"
        if share >= LEAST_SHARE:
            cure = f"Set server.gpu_memory_utilization = {share:g}, or end the other processes on the device"
        return (
            f"it asks for {wanted:.1f} GiB of the device's {total:.1f} GiB (server.gpu_memory_utilization = "
            f"{float(found['share']):g}), and {free:.1f} GiB are free: other processes hold {total - free:.1f} GiB, "
            f"the run's learner among them\n  {cure}"
        )
    if found := ONE_REQUEST.search(text):
        fits = f"algorithm.max_length = {found['fits']}, or " if int(found["fits"] or 0) > 0 else ""
        return (
            f"the keys and values of one request of {found['context']} tokens need {found['needed']} GiB, and the "
            f"server's share leaves {found['left']} GiB for them beside its weights\n  Set {fits}a larger "
            "server.gpu_memory_utilization"
        )
    if found := TOKENS.search(text):
        return (
            f"its memory for keys and values holds {found['fits']} tokens, and one request may have "
            f"{found['context']}\n  Set algorithm.max_length = {found['fits']}, or a larger "
            "server.gpu_memory_utilization"
        )
    if NO_CACHE.search(text):
        return f"the server's share of the device leaves no memory for keys and values beside its weights\n  {MORE}"
    lines = [line for line in text.splitlines() if GONE.search(line)]
    if not lines:
        return ""
    said = max(lines, key=len)  # several processes log the same error, some of them only its class
    if started:
        cure = (
            "The learner takes what the server leaves: lower algorithm.tokens_per_batch, or set "
            "server.gpu_memory_utilization lower"
        )
    else:
        cure = "Set server.max_num_seqs lower, end the other processes on the device, or serve a smaller model"
    return f"its device ran out of memory: {shortage(said, 'the server')}\n  {cure}"
