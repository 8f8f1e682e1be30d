"""What `grpo` does on a GPU that is small, full, shared or limited: each case must end well, or in one message.

    python tests/benchmarks/gpu_bad_input.py [--only NAME,NAME] [--json FILE] [--limit 580] [--list]

Needs one CUDA GPU that nothing else uses, agentrig with its plugins, and vLLM; takes under ten minutes. `make gpu` runs
it. Models are small and have random weights. A process of this script (`Holder`) holds memory where a case has less of
the card, or takes it while a run goes on.

Prints a table: the case, what issue 38 saw of it at `4e4bdf6`, exit status, seconds, ok or not, and the last message,
or the memory plan. A case is ok when it ended as `Case.expects` says: all its steps are there (`end`), or one message
of agentrig says why not (`message`): exit status 1, one paragraph, no traceback. After both, no process of the run may
be left. Exit status 0: all are ok.

`--hardware cpu` runs the cases that need no GPU, to test this script.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import groupby, repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import attrs

sys.path.insert(0, str(Path(__file__).parent))
import one_gpu
import verl_step

GIB = 1 << 30
CONTEXT = 9000
"""Context of the models in tokens: room for the longest rows."""

EMPTY = "7b"
"""The shape whose file of weights has no content: its runs must be refused before they read it."""

LEAVES = 10.0
"""Seconds that processes of a run may take to end after it."""

SMALL, SHORT = "8x4x200+32", "32x4x816+128"
TOO_MUCH = 0.3
"""GiB that are left of a card when another process takes all that it can."""

NO_SLICE = {"CUDA_VISIBLE_DEVICES": "MIG-00000000-0000-0000-0000-000000000000"}


@attrs.frozen(kw_only=True)
class Case:
    """One thing that goes wrong on people's cards.

    Attributes:
        name: For `--only`.
        about: What it is, for the table.
        before: What it did at `4e4bdf6`, as issue 38 saw it, for the table; '' where that was not seen.
        expects: How it must end; `either` where it depends on the moment.
        shape: The model's, one of `verl_step.SHAPES`.
        rows: Tasks x n x prompt + response tokens of a step.
        keys: Settings of the run.
        server: The model's server.
        steps: Steps of the run.
        says: Regular expression that the message must contain.
        leave: GiB of the card that are free when the run starts; 0 for all of it. The same for all that run at once.
        take: GiB that another process takes once two steps have ended, as far as they are there; 0 for none.
        runs: How many runs start at once.
        environ: Variables of the run.
        beside: Cases that stand together and share this name run at once. '' is a case that needs the card for itself.
        limit_s: Longest wait for the runs, seconds.
        cpu: Whether it says something on a CPU too.
    """

    name: str
    about: str
    expects: Literal["end", "message", "either"]
    shape: str = "135m"
    rows: str = SMALL
    keys: Sequence[str] = ()
    server: str = "embedded"
    steps: int = 2
    before: str = ""
    says: str = ""
    leave: float = 0.0
    take: float = 0.0
    runs: int = 1
    environ: Mapping[str, str] = {}
    beside: str = ""
    limit_s: float = 60.0
    cpu: bool = False


def refused(name: str, about: str, *keys: str, says: str, **more: Any) -> Case:
    """Return a case that must be refused before the run takes anything of the card."""
    return Case(name=name, about=about, expects="message", keys=keys, says=says, beside="first", **more)


CASES = (
    refused("limit-above", "a limit above the card's memory", "hardware.memory_gib=4000", says=r"memory_gib = 4000"),
    refused("limit-negative", "a negative limit", "hardware.memory_gib=-1", says=r"memory_gib"),
    refused("limit-word", "a limit that is no number", "hardware.memory_gib=all", says=r"memory_gib"),
    refused("cannot-fit", "7B in 8 GiB: nothing helps", "hardware.memory_gib=8", says="smaller model", shape=EMPTY),
    refused("fits-as-adapters", "all weights of 7B in 40 GiB", "hardware.memory_gib=40", says="lora_rank", shape=EMPTY,
            server="vllm"),
    refused("pass-too-large", "a pass by hand that does not fit", "hardware.memory_gib=12",
            "algorithm.tokens_per_batch=49152", "algorithm.gradient_checkpointing=false", shape="0.5b",
            says="gradient_checkpointing|tokens_per_batch = "),
    refused("no-such-slice", "a MIG slice that is not there", says="cuda", environ=NO_SLICE),
    refused("no-pass", "a pass of -3 tokens", "algorithm.tokens_per_batch=-3", says="tokens_per_batch", cpu=True),
    Case(name="rows-16x8", about="16x8, 4000 + 200, by default in 24 GiB", before="refused after the server's start",
         expects="end", shape="0.5b", rows="16x8x4000+200", keys=("hardware.memory_gib=24",), server="vllm",
         beside="first", limit_s=180),
    Case(name="rows-4x16", about="4x16, 8000 + 512, by default in 24 GiB", before="refused after the server's start",
         expects="end", shape="0.5b", rows="4x16x8000+512", keys=("hardware.memory_gib=24",), server="vllm",
         beside="first", limit_s=180),
    Case(name="sleep-4x16", about="4x16 with server_sleep and tokens_per_batch=49152, in 24 GiB",
         before="out of memory at the first wake", expects="end", shape="0.5b", rows="4x16x8000+512",
         keys=("algorithm.server_sleep=true", "algorithm.tokens_per_batch=49152", "hardware.memory_gib=24"),
         server="vllm", steps=3, beside="first", limit_s=180),
    Case(name="two-at-once", about="two runs on one card at once, with a limit of 0: the whole card", expects="either",
         keys=("hardware.memory_gib=0",), runs=2, limit_s=90, cpu=True),
    Case(name="free-2", about="2 GiB free", expects="message", shape="0.5b", leave=2.0, says=r"free for"),
    Case(name="share-0.1", about="24 GiB free, 32x4, 0.5B with the server's share set to 0.1",
         before="refused: others' memory was taken for the server's", expects="end", shape="0.5b", rows=SHORT,
         keys=("server.gpu_memory_utilization=0.1",), server="vllm", leave=24.0, beside="share", limit_s=120),
    Case(name="share-0.4", about="the same with 0.4, which does not fit", expects="message", shape="0.5b", rows=SHORT,
         keys=("server.gpu_memory_utilization=0.4",), server="vllm", leave=24.0, says="gpu_memory_utilization",
         beside="share"),
    Case(name="free-24", about="24 GiB free, 32x4, 0.5B by default", before="vLLM's traceback of 60 lines",
         expects="end", shape="0.5b", rows=SHORT, server="vllm", leave=24.0, limit_s=120),
    Case(name="adapters-24", about="24 GiB free, 32x4, 1.5B with adapters of rank 16", expects="end", shape="1.5b",
         before="torch.OutOfMemoryError at the delivery", rows=SHORT, keys=("algorithm.lora_rank=16",), server="vllm",
         leave=24.0, limit_s=150),
    Case(name="busy-90", about="others' server holds 90% of the card", expects="either", shape="0.5b", leave=-0.1,
         limit_s=100),
    Case(name="take-all", about="another process takes 40 GiB and more, all that is free, in step 3; the server sleeps",
         expects="either", steps=4, keys=("algorithm.server_sleep=true",), take=1000.0, limit_s=80),
)  # fmt: skip


@attrs.frozen(kw_only=True)
class Ended:
    """How one run ended.

    Attributes:
        status: The exit status; negative for a signal.
        steps: Steps that ended.
        log: What it printed.
        killed: Whether it was stopped after `Case.limit_s`.
        left: Processes of it that were still there `LEAVES` seconds later.
    """

    status: int
    steps: int
    log: str
    killed: bool = False
    left: int = 0


def main() -> None:
    """Run the cases, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of cases, with commas between")
    parser.add_argument("--json", type=Path, help="a file for the results; it is written after each case")
    parser.add_argument("--limit", type=float, default=580.0, help="seconds for all cases")
    parser.add_argument("--hardware", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--list", action="store_true", help="print the cases, and run none")
    options = parser.parse_args()
    cases = chosen(options.only, options.hardware)
    if options.list:
        print("\n".join(f"{case.name:18} {case.expects:8} {case.about}" for case in cases))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that nothing is left behind
    with tempfile.TemporaryDirectory(prefix="agentrig-gpu-", ignore_cleanup_errors=True) as folder:
        found = Bench(Path(folder), options.hardware, options.json, until=time.monotonic() + options.limit).run(cases)
    print(table(found), flush=True)
    sys.exit(0 if all(each["ok"] for each in found) else 1)


def chosen(names: str, hardware: str) -> list[Case]:
    """Return the cases of these names, or all; on a CPU those that say something there, with the smallest model."""
    wanted = [name for name in names.split(",") if name]
    if unknown := set(wanted) - {case.name for case in CASES}:
        sys.exit(f"no such case: {', '.join(sorted(unknown))}. --list prints them")
    cases = [case for case in CASES if not wanted or case.name in wanted]
    if hardware == "cuda":
        return cases
    return [attrs.evolve(case, shape="18m", rows="2x4x64+16") for case in cases if case.cpu]


@attrs.frozen
class Bench:
    """Where and how the cases run.

    Attributes:
        folder: For models and runs.
        hardware: `cuda` or `cpu`.
        results: The file of results; None for none.
        until: When the last case must have ended, `time.monotonic`.
    """

    folder: Path
    hardware: str
    results: Path | None
    until: float = attrs.field(kw_only=True)

    def run(self, cases: Sequence[Case]) -> list[dict[str, Any]]:
        """Run the cases, those with one `Case.beside` at once, and return their results in order."""
        begun = time.monotonic()
        make = get_context("spawn").Process(target=prepare, args=(self.folder, list(cases)))
        make.start()  # a process of its own: its context would be counted on the card
        make.join()
        if make.exitcode:
            sys.exit(f"the models could not be made: exit status {make.exitcode}")
        print(f"models made in {time.monotonic() - begun:.0f} s", flush=True)
        found: dict[str, dict[str, Any]] = {}
        lock = threading.Lock()

        def one(case: Case, holder: Holder | None) -> None:
            result = self.result(case, holder)
            with lock:
                found[case.name] = result
                print(line_of(result), flush=True)
                if self.results:
                    done = {"card": card(self.hardware), "cases": [found[c.name] for c in cases if c.name in found]}
                    self.results.write_text(json.dumps(done, indent=1) + "\n", "utf-8")

        for _, together in groupby(cases, key=lambda case: case.beside or case.name):
            batch = list(together)
            with Holder.of(batch[0]) as holder, ThreadPoolExecutor(len(batch)) as threads:
                list(threads.map(one, batch, repeat(holder)))
        return [found[case.name] for case in cases]

    def result(self, case: Case, holder: Holder | None) -> dict[str, Any]:
        """Run a case, and return what the table shows of it."""
        named = {"name": case.name, "about": case.about, "before": case.before}
        begun, limit = time.monotonic(), min(case.limit_s, self.until - time.monotonic())
        if limit < case.limit_s / 3:
            return {**named, "ok": False, "why": "not run: no time is left", "runs": []}
        try:
            ended, holds = self.ended(case, limit, holder)
        except HolderFailed as error:
            return {**named, "ok": False, "why": str(error), "runs": []}
        why = next(filter(None, (fault(case, each) for each in ended)), "")
        if not why and case.runs > 1 and all(each.status for each in ended):
            why = "no run ended well"
        return {
            **named, "expects": case.expects, "ok": not why, "why": why,
            "seconds": round(time.monotonic() - begun, 1), "held": holds,
            "runs": [
                {"status": each.status, "steps": each.steps, "message": message_of(each.log),
                 "plan": re.findall(r"memory: .*", each.log)[:3], **({"end": each.log[-3000:]} if why else {})}
                for each in ended
            ],
        }  # fmt: skip

    def ended(self, case: Case, limit: float, holder: Holder | None) -> tuple[list[Ended], list[str]]:
        """Start a case's runs, wait for them, and return how they ended, and what was held of the card."""
        folders = [self.folder / case.name / str(i) for i in range(case.runs)]
        holds = [holder.began] if holder else []
        until = time.monotonic() + limit
        with ExitStack() as stack:
            runs = [stack.enter_context(self.started(case, folder)) for folder in folders]
            while any(run.poll() is None for run in runs) and time.monotonic() < until:
                if holder and case.take and len(holds) == 1 and steps_of(folders[0]) >= 2:
                    holds.append(holder.ask("take", case.take))
                time.sleep(0.05)
            found = []
            for run, folder in zip(runs, folders, strict=True):
                killed = run.poll() is None
                if killed:
                    run.kill()
                log = (folder / "log.txt").read_text("utf-8", errors="replace")
                left = 0 if killed else left_of(folder)
                found.append(Ended(status=run.wait(), steps=steps_of(folder), log=log, killed=killed, left=left))
        shutil.rmtree(self.folder / case.name, ignore_errors=True)  # checkpoints of 1.5B fill a disk
        if case.take and len(holds) == 1:
            found = [attrs.evolve(each, log=f"{each.log}\nnothing was taken: step 2 did not end") for each in found]
        return found, holds

    @contextmanager
    def started(self, case: Case, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Start a run; nothing of it is left at the end."""
        tasks, n, prompt, answer = verl_step.parsed(case.rows)
        folder.mkdir(parents=True)
        plugin = folder / "bench_plugin.py"
        plugin.write_text(f"PROMPTS = {str(self.folder / f'prompts-{prompt}.json')!r}\n" + verl_step.PLUGIN, "utf-8")
        words = [
            "--plugin", str(plugin), "--tasks", "bench-prompts", "--agent", "bench-call", "--reward", "bench-hash",
            "--adapter", "agent-match", "--algorithm", "grpo", "--hardware", self.hardware, "--server", case.server,
            "adapter.match=write_query", f"algorithm.model={self.folder / case.shape}",
            f"algorithm.steps={case.steps}", f"algorithm.tasks_per_step={tasks}", f"algorithm.group_size={n}",
            f"algorithm.max_tokens={answer}", f"algorithm.max_length={prompt + answer + 64}", "algorithm.lr=1e-6",
            "algorithm.validate_every=0", "algorithm.ppo_epochs=1", "algorithm.mini_batches=1", "run.report_tasks=2",
            "run.seed=0", "run.audit=false", "runners.n=2", "runners.threads=64", f"run.directory={folder}",
            "run.name=run", *case.keys,
        ]  # fmt: skip
        with one_gpu.running(words, folder / "log.txt", environ={**os.environ, **case.environ}) as run:
            yield run


def prepare(folder: Path, cases: Sequence[Case]) -> None:
    """Write the cases' models and prompts; runs in a process of its own."""
    for shape in {case.shape for case in cases}:
        if shape == EMPTY:
            make_empty(shape, folder / shape)
        else:
            verl_step.make_model(shape, folder / shape, context=CONTEXT)
    for prompt in {verl_step.parsed(case.rows)[2] for case in cases}:
        verl_step.make_prompts(folder / f"prompts-{prompt}.json", prompt)


def make_empty(shape: str, folder: Path) -> None:
    """Write a model whose file of weights is as long as it should be, and takes no place on the disk."""
    import torch
    from agentrig_grpo import checkpoint
    from agentrig_grpo.naming import model_directory
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = checkpoint.load_tokenizer(model_directory("mini"))
    config = Qwen2Config(**verl_step.SHAPES[shape], max_position_embeddings=CONTEXT, dtype="bfloat16")
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in model.state_dict().items():
        begin, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    folder.mkdir()
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


class HolderFailed(RuntimeError):
    """The process that should hold memory does not."""


@attrs.frozen
class Holder:
    """A process that holds memory of a device, as other people's programs do.

    Attributes:
        process: It ends when its standard input is closed, also because this script has died.
        began: What it held when the runs began, in words.
    """

    process: subprocess.Popen[bytes]
    began: str = ""

    @classmethod
    @contextmanager
    def of(cls, case: Case, device: str = "cuda") -> Iterator[Holder | None]:
        """Start the one that a case needs, if any, which holds what the case wants at the start."""
        if not case.leave and not case.take:
            yield None
            return
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import gpu_bad_input as g; g.hold()"
        command = [sys.executable, "-c", code, device]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
            try:
                what: Literal["leave", "take"] = "leave" if case.leave else "take"
                yield cls(process, cls(process).ask(what, case.leave))
            finally:
                process.kill()

    def ask(self, what: Literal["leave", "take"], gib: float) -> str:
        """Let it hold memory, and return what it holds, in words.

        Args:
            what: Whether so much is left, or so much is taken, as far as it is there.
            gib: How much, GiB; as a negative number the share of the device that is left.

        Raises:
            HolderFailed: It has died.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(f"{what} {gib}\n".encode())
        said = self.process.stdout.readline().decode().strip()
        if not said:
            raise HolderFailed(f"the process that should {what} {gib:g} GiB has died")
        return said


def hold() -> None:
    """Hold as much of a device as standard input says, until it is closed; what a `Holder`'s process runs."""
    import torch

    device, kept = sys.argv[1], []
    for line in sys.stdin:
        what, gib = line.split()
        free, total = torch.cuda.mem_get_info() if device == "cuda" else (GIB, 4 * GIB)
        size = to_take(what, float(gib), free, total)
        if size:
            kept.append(torch.empty(size, dtype=torch.uint8, device=device))
        elif device == "cuda":
            torch.zeros(1, device=device)  # the library's own memory is taken before it is counted
        left = torch.cuda.mem_get_info()[0] if device == "cuda" else free - size
        print(f"{size / GIB:.1f} GiB were taken, {left / GIB:.1f} GiB are free", flush=True)


def to_take(what: str, gib: float, free: int, total: int) -> int:
    """Return how many bytes to take; see `Holder.ask`."""
    left = -gib * total if gib < 0 else gib * GIB
    size = free - left if what == "leave" else min(left, free - TOO_MUCH * GIB)
    return max(0, int(size))


def fault(case: Case, ended: Ended) -> str:
    """Return what is wrong with the way a run ended; '' for nothing."""
    message = message_of(ended.log)
    if ended.killed:
        return f"stopped after {case.limit_s:g} s"
    if ended.left:
        return f"{ended.left} processes were left"
    if "Traceback (most recent call last)" in ended.log:
        return "a traceback"
    if ended.status == 0:
        if case.expects == "message":
            return "it should have been refused"
        return "" if ended.steps == case.steps else f"{ended.steps} of {case.steps} steps"
    if case.expects == "end":
        return "it should have ended well"
    if ended.status != 1:
        return f"exit status {ended.status}"
    if not message:
        return "no message"
    if "\n\n" in message or len(message) > 2000:
        return "more than one paragraph"
    return "" if re.search(case.says, message) else f"the message does not say {case.says}"


def message_of(log: str) -> str:
    """Return the last message of a run's output: all from the last line that begins with `agentrig: `."""
    return "agentrig: " + log.rpartition("\nagentrig: ")[2].strip() if "\nagentrig: " in (log := f"\n{log}") else ""


def steps_of(folder: Path) -> int:
    """Return how many steps of a case's run have ended."""
    return len(one_gpu.lines_of(folder / "run"))


def left_of(folder: Path) -> int:
    """Return how many processes of a case's run are left some seconds after it."""
    until = time.monotonic() + LEAVES
    while (left := len(one_gpu.processes_naming(str(folder / "bench_plugin.py")))) and time.monotonic() < until:
        time.sleep(0.2)
    return left


def card(hardware: str) -> str:
    """Return the card's name and memory."""
    if hardware != "cuda":
        return hardware
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader", "--id=0"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()


def line_of(result: Mapping[str, Any]) -> str:
    """Return a result as a line of the table."""
    status = ", ".join(str(run["status"]) for run in result["runs"]) or "-"
    said = next(
        (run["message"] or "".join(run["plan"][:1]) for run in result["runs"] if run["message"] or run["plan"]), ""
    )
    verdict = "ok" if result["ok"] else f"NOT OK: {result['why']}"
    first = " ".join(said.split())
    short = first if len(first) <= 300 else first[:297] + "…"
    what = f"{result['about']} | {result['before']}"
    return f"| {what} | {status} | {result.get('seconds', 0):g} | {verdict} | {short.replace('|', '/')} |"


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the table in Markdown."""
    head = "| what | in issue 38 | exit status | seconds | | last message |" + "\n" + "| --- " * 6 + "|"
    good = sum(bool(result["ok"]) for result in results)
    return "\n".join([head, *map(line_of, results), f"\n{good} of {len(results)} cases are ok"])


if __name__ == "__main__":
    main()
