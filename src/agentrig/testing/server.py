"""The checks of a server: of its answers, of its weights, and of its end."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from urllib.parse import urlsplit

import psutil

from agentrig.delivery.asking import CannotAnswer, CannotScore, ask
from agentrig.delivery.digests import digests
from agentrig.endpoints import port_taken
from agentrig.servers import ServerError, ServerPlan
from agentrig.testing.elsewhere import elsewhere, left, living
from agentrig.testing.kit import basic, needs
from agentrig.testing.server_subject import MARK, NAME, ServerSubject
from agentrig.testing.subject import CheckFailed, CheckSkipped, refuse

CLOSE_S = 5.0
"""How long a port may stay open after its process has ended: its threads end one by one."""


@basic
def check_starts(subject: ServerSubject) -> None:
    """It starts, and its attributes are what the plan asks for.

    Why: An algorithm relies on these: a wrong address or dtype ends the run or its proof of delivery.
    Cure: Set endpoints, dtype and context in __enter__, as agentrig.servers.Server describes them.
    """
    server = subject.server
    faults = {"it has no endpoint": not server.endpoints}
    for endpoint in server.endpoints:
        place = urlsplit(endpoint.base_url)
        local = place.hostname in ("127.0.0.1", "::1", "localhost")
        faults |= {
            f"{endpoint.base_url} does not end in /v1": not place.path.endswith("/v1"),
            f"{place.hostname} is not this machine's own address": not local,
            f'the endpoint\'s model is "{endpoint.model}", not the plan\'s "{NAME}"': endpoint.model != NAME,
            "the endpoint has sampling fields; the algorithm sets them": bool(endpoint.sampling),
            "the endpoint says token_ids=False": not endpoint.token_ids,
        }
    fits = 0 < server.context <= subject.context
    faults[f"dtype is {server.dtype}, and the plan's float32"] = server.dtype != "float32"
    faults[f"context is {server.context}; the plan allows {subject.context}"] = not fits
    refuse(faults)


def check_token_ids(subject: ServerSubject) -> None:
    """An answer has the token ids of its prompt and of itself, with a log-probability each.

    Why: These tokens are trained: other ones than were sampled make every importance ratio wrong.
    Cure: Return the ids that the model saw and sampled; never tokenize the text again.
    """
    text = subject.prompt()
    reply = subject.ask(text)
    own = subject.policy.ids(text)
    if list(reply.prompt) != own:
        raise CheckFailed(f"prompt_token_ids has {len(reply.prompt)} tokens; the chat template makes {len(own)}: {own}")
    if reply.text != subject.policy.text(reply.tokens):
        raise CheckFailed(f"the message is {reply.text!r}, and its tokens say {subject.policy.text(reply.tokens)!r}")


def check_logprobs(subject: ServerSubject) -> None:
    """Log-probabilities are the model's own, at temperatures other than 1 too.

    Why: The importance ratio divides by them: a run with others trains on noise, and the proof of delivery fails.
    Cure: Return log softmax(logits / temperature), before top-p cuts, from the weights that sampled.
    """
    for temperature in (1.0, 0.7):
        subject.compare(subject.prompt(6), temperature=temperature)


def check_greedy(subject: ServerSubject) -> None:
    """Temperature 0 takes the likeliest token, always.

    Why: Validation is greedy: one that samples measures the temperature, not the policy.
    Cure: At temperature 0 take the likeliest token.
    """
    subject.give()
    for _ in range(3):
        text = subject.prompt(3)
        reply = subject.ask(text, temperature=0)
        worst = max(subject.policy.gaps(subject.policy.ids(text), reply.tokens))
        if worst > subject.tolerance:
            raise CheckFailed(f"at temperature 0 it took a token that is {worst:.3f} nats below the likeliest one")


def check_seed(subject: ServerSubject) -> None:
    """A seed gives the same answer again; other seeds, and no seed, give others.

    Why: A run that is repeated, or resumed, must sample the same; one seed for all gives groups of equal answers.
    Cure: Give each request a random stream of its own, made from its seed and nothing else that changes.
    """
    text = subject.prompt()
    first, again = (list(subject.ask(text, seed=5).tokens) for _ in range(2))
    if first != again:
        raise CheckFailed(f"the same request with seed 5 sampled {first}, then {again}")
    for what, fields in (("four seeds", [{"seed": s} for s in range(4)]), ("no seed, four times", [{}] * 4)):
        if len({tuple(subject.ask(text, **f).tokens) for f in fields}) == 1:
            raise CheckFailed(f"{what} gave the same tokens at temperature 1: {first}")


@needs(check_greedy)
def check_sampling(subject: ServerSubject) -> None:
    """max_tokens, top_p, stop and n have their effect.

    Why: An algorithm sets these fields; one that is ignored trains other answers than the run file says.
    Cure: Honour max_tokens, top_p, stop and n, or refuse the request with a message.
    """
    text = subject.prompt()
    likeliest = subject.ask(text, temperature=0, max_tokens=12)
    short = subject.ask(text, temperature=0, max_tokens=3)
    if list(short.tokens) != list(likeliest.tokens[:3]) or (len(likeliest.tokens) > 3 and short.finish != "length"):
        raise CheckFailed(f"max_tokens=3 gave {len(short.tokens)} tokens, finish_reason {short.finish}")
    narrow = subject.ask(text, top_p=1e-6, max_tokens=3)
    if list(narrow.tokens) != list(short.tokens):
        raise CheckFailed(f"top_p=1e-6 sampled {list(narrow.tokens)}; only {list(short.tokens)} is left under it")
    several = subject.replies(text, n=3, seed=1)
    if len(several) != 3 or len({tuple(r.tokens) for r in several}) == 1:
        raise CheckFailed(f"n=3 gave {len(several)} answers with {len({tuple(r.tokens) for r in several})} texts")
    for number in range(8):  # a small random model may sample no letter at all
        text = subject.prompt(number)
        likeliest = subject.ask(text, temperature=0, max_tokens=12)
        letters = [c for c in likeliest.text if c.isascii() and c.isprintable()]
        if not letters:
            continue
        stopped = subject.ask(text, temperature=0, max_tokens=12, stop=[letters[-1]])
        if letters[-1] in stopped.text or stopped.finish != "stop":
            raise CheckFailed(
                f"stop=[{letters[-1]!r}] gave {stopped.text!r}, finish_reason {stopped.finish}; without it the text is "
                f"{likeliest.text!r}"
            )
        return
    raise CheckSkipped("the model sampled no letter in 8 answers, so that stop could not be tried")


@needs(check_logprobs)
def check_concurrent(subject: ServerSubject) -> None:
    """Requests at once get the answers to their own prompts.

    Why: A step sends hundreds of requests at once: a mixed-up answer trains one task with another's tokens.
    Cure: Keep the state of each request by itself, or answer one after another.
    """
    subject.give()
    texts = [subject.prompt(i) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for text, reply in zip(texts, pool.map(partial(subject.ask, seed=1), texts), strict=True):
            subject.compare(text, reply, when=f"with {len(texts)} requests at once: ")


@needs(check_logprobs)
def check_scores(subject: ServerSubject) -> None:
    """It scores given tokens as the model does.

    Why: With scores of given tokens a run proves bit by bit that the weights have arrived.
    Cure: Answer prompt_logprobs at /completions as vLLM does: null, then {token: {logprob}} for each next token.
    """
    subject.give()
    ids = subject.policy.ids(subject.prompt(4))
    try:
        answer = ask(subject.endpoint, ids)
    except (CannotScore, CannotAnswer) as error:
        raise CheckSkipped(f"it does not score tokens, so runs use the weaker proof of delivery: {error}") from None
    own = subject.policy.logprobs(ids[:1], ids[1:])
    far = max(abs(a - b) for a, b in zip(own, answer.logprobs, strict=True))
    if not far <= subject.tolerance:
        raise CheckFailed(f"prompt_logprobs differ from transformers' by {far:.4f}")


def check_context(subject: ServerSubject) -> None:
    """A prompt that is too long is refused with a message, and the next one is answered.

    Why: A prompt that is cut in silence is trained as if the model had read all of it.
    Cure: Answer 400 with the number of tokens and the context; cut nothing.
    """
    answer = subject.post("/chat/completions", subject.body(subject.prompt(subject.context)))
    if not 400 <= answer.status_code < 500:
        raise CheckFailed(f"a prompt of over {subject.context} tokens is answered with status {answer.status_code}")
    if str(subject.server.context) not in answer.text:
        raise CheckFailed(
            f"the refusal does not name the context of {subject.server.context} tokens: {answer.text[:200]}"
        )
    subject.ask(subject.prompt())


def check_key(subject: ServerSubject) -> None:
    """Requests without the key, or with another, are refused.

    Why: Every process on the machine could use the server, or read the answers that are trained.
    Cure: Answer 401 to each request without the endpoint's key, on every route.
    """
    body = subject.body(subject.prompt())
    url = subject.endpoint.base_url
    for name, sent in (("no key", ""), ("a wrong key", "wrong")):
        headers = {"Authorization": f"Bearer {sent}"} if sent else {}
        found = {
            "POST /chat/completions": subject.post("/chat/completions", body, key=sent).status_code,
            "POST /completions": subject.post("/completions", {"model": NAME, "prompt": [5, 6]}, key=sent).status_code,
            "GET /models": subject.client.get(f"{url}/models", headers=headers).status_code,
        }
        for route, status in found.items():
            if status < 400:
                raise CheckFailed(f"{route} with {name} is answered with status {status}")


def check_takes_weights(subject: ServerSubject) -> None:
    """Weights arrive whole: later versions, merged adapters, and for prompts that older weights have answered.

    Why: A server that keeps a tensor, or the keys and values of a prompt, samples from a policy that nobody trains.
    Cure: Load every tensor of every version before `take` returns, with its values as they are now, whatever its
        layout, gradient or identity; drop every kept prompt, or keep it under the version that computed it.
    """
    for _ in range(3):
        version = subject.give("all")
        subject.compare(subject.prompt(), when=f"after version {version}, with every tensor changed: ")
    subject.policy.restore()
    subject.give(None)
    subject.take(subject.policy.merged(seed=11))
    subject.compare(subject.prompt(), when="after merged adapters: some tensors changed, not contiguous in memory: ")
    text = subject.prompt(24)
    subject.give()
    for _ in range(2):
        subject.compare(text)
    subject.give()
    for again in (text, text + " and"):
        subject.compare(again, when="a prompt that older weights had answered: ")


def check_reads_only(subject: ServerSubject) -> None:
    """`take` does not change the tensors that it gets.

    Why: These are the learner's own tensors: a server that writes to them changes the policy that is trained.
    Cure: Copy before you round, scale or move a tensor in place.
    """
    subject.policy.change(21, "most")
    given = [(name, tensor.clone()) for name, tensor in subject.policy.weights()]
    before = digests(given)
    subject.take(given)
    changed = [name for name, digest in digests(given).items() if digest != before[name]]
    if changed:
        raise CheckFailed(f"`take` changed {len(changed)} of the learner's tensors, {changed[0]} among them")


@needs(check_takes_weights)
def check_refuses_weights(subject: ServerSubject) -> None:
    """Weights that do not fit are refused, and the old ones stay.

    Why: Weights that do not fit, or are not finite, would be sampled from until somebody looks at the answers.
    Cure: Check names, shapes and finite values, raise ServerError, and keep the weights that were there.
    """
    for fault in ("missing", "shape", "nan"):
        subject.give()
        given = {name: tensor.clone() for name, tensor in subject.policy.weights()}
        name = [name for name, tensor in given.items() if tensor.ndim == 2][-1]
        if fault == "missing":
            say = f"without {name}"
            del given[name]
        elif fault == "shape":
            say = f"{name} with another shape"
            given[name] = given[name][:, :-1].contiguous()
        else:
            say = f"{name} with a NaN"
            given[name][-1, -1] = math.nan
        try:
            subject.take(given.items())
        except ServerError:
            subject.compare(subject.prompt(), when=f"after weights that it refused ({say}): ")
        except Exception as error:
            raise CheckFailed(f"weights {say} raise {type(error).__name__}: {error}") from error
        else:
            raise CheckFailed(f"it takes weights {say}")


def check_version(subject: ServerSubject) -> None:
    """Answers state the version of the weights.

    Why: By it a run finds replicas that still answer with old weights.
    Cure: Answer with system_fingerprint = "v" and the version of the latest `take`, "v0" before the first.
    """
    for _ in range(2):
        wanted = f"v{subject.give()}"
        found = subject.ask(subject.prompt()).version
        if found is None:
            raise CheckSkipped("its answers have no system_fingerprint: a run cannot tell its replicas apart")
        if found != wanted:
            raise CheckFailed(f'system_fingerprint is "{found}" after version {wanted[1:]}')


@needs(check_takes_weights)
def check_digests(subject: ServerSubject) -> None:
    """The digests that it states are those of its weights.

    Why: A digest of other tensors than it computes with proves a delivery that did not happen.
    Cure: Compute `held()` from the parameters that the model uses at that moment, or return None.
    """
    subject.give()
    subject.give()
    found = subject.server.held()
    if found is None:
        with contextlib.suppress(CannotScore, CannotAnswer):
            found = [ask(subject.endpoint, subject.policy.ids(subject.prompt())).digests]
        if not found or not found[0]:
            raise CheckSkipped("it states no digests: the proof of delivery compares log-probabilities")
    own = digests(subject.policy.weights())
    for mapping in found:
        known = own.keys() & mapping.keys()
        wrong = [name for name in sorted(known) if mapping[name] != own[name]]
        if not known:
            raise CheckFailed("none of its digests has a name that the learner knows")
        if wrong:
            raise CheckFailed(
                f"{len(wrong)} of {len(known)} digests are not those of its weights: {', '.join(wrong[:3])}"
            )


@needs(check_takes_weights)
def check_sleep(subject: ServerSubject) -> None:
    """After `sleep` and `wake` it takes weights and answers with them, each time.

    Why: With algorithm.server_sleep the learner computes in between: old weights after it train nothing.
    Cure: Free memory in `sleep`, take it back in `wake` and at the end of `take`, and load whatever `take` brings.
    """
    server = subject.server
    text = subject.prompt()
    for _ in range(2):
        with subject.marking():
            server.sleep()
            server.wake()
        subject.give("all")
        subject.compare(text, when="a prompt that was answered before the server slept: ")
        subject.compare(subject.prompt())


def check_ends(subject: ServerSubject) -> None:
    """`__exit__` ends all processes, closes the port and removes the files, also after an error.

    Why: What it leaves behind keeps a GPU's memory, a port or the disk until somebody finds it.
    Cure: End every process in __exit__ (agentrig.processes.servers.ServerProcess does), and remove your files.
    """
    server = subject.server
    urls = [e.base_url for e in server.endpoints]
    error = ValueError("an error of the run")
    subject.running = None
    with subject.marking():
        if server.__exit__(ValueError, error, None):  # type: ignore[func-returns-value]
            raise CheckFailed("`__exit__` returns True, which hides the run's own error", "Return None.")
    if running := left(subject.processes, CLOSE_S):
        raise CheckFailed(f"after `__exit__` {len(running)} processes still run: {_names(running)}")
    _closed(urls, "`__exit__`")
    if files := sorted(p.name for p in subject.temporary.iterdir()):
        raise CheckFailed(f"after `__exit__` there are {len(files)} temporary files: {', '.join(files[:3])}")


@needs(check_ends)
def check_names_its_death(subject: ServerSubject) -> None:
    """If its processes die, `check` says so, and `__exit__` still ends the rest.

    Why: Without it a run whose server died reports failing agents, and nobody looks at the server's log.
    Cure: Raise ServerError in `check` and `take`, with what happened and the end of the log.
    """
    server = subject.server
    server.check()
    victims = subject.processes()
    if not victims:
        raise CheckSkipped("it has no process of its own")
    for victim in victims:
        with contextlib.suppress(psutil.Error):
            victim.kill()
    psutil.wait_procs(victims, timeout=10)

    def silent() -> list[str]:
        try:
            server.check()
        except ServerError as error:
            return [] if str(error).strip() else ["a ServerError without a word"]
        return ["nothing"]

    try:
        if said := left(silent, 10.0):
            raise CheckFailed(f"all its processes were killed, and `check` raises {said[0]}")
    finally:
        subject.stop()


def check_ends_with_its_run(subject: ServerSubject) -> None:
    """If the process that started it is killed, all its processes end by themselves.

    Why: A run that is killed (out of memory, a cluster's limit) leaves a server that holds the device.
    Cure: Let the process watch its parent: a pipe that closes, or prctl's death signal (docs/servers.md).
    """
    if not subject.registered:
        raise CheckSkipped("give its name or FILE.py:NAME: a process of its own starts it, and is killed")
    temporary = subject.folder / "killed"
    temporary.mkdir(exist_ok=True)
    variables = {**subject.blocking, MARK: str(temporary), "TMPDIR": str(temporary)}
    sent = subject.sendable(), subject.plan()
    urls, pids = elsewhere(_started_there, *sent, environment=variables, ends_all=False)
    started = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]

    running = left(lambda: living(started), subject.end_s)
    for process in running:
        process.kill()
    if running:
        raise CheckFailed(
            f"{subject.end_s:g} s after its run was killed {len(running)} of its processes run: {_names(running)}"
        )
    _closed(urls, "its run was killed")


def _started_there(subject: ServerSubject, plan: ServerPlan) -> tuple[list[str], list[int]]:
    """Start the server in a process that then ends at once; return its addresses and its processes."""
    server = subject.made(plan)
    server.__enter__()
    return [e.base_url for e in server.endpoints], [p.pid for p in psutil.Process().children(recursive=True)]


def _closed(urls: list[str], after: str) -> None:
    places = [(url, urlsplit(url)) for url in urls]
    heard = left(lambda: [url for url, at in places if port_taken(at.port or 80, at.hostname or "127.0.0.1")], CLOSE_S)
    if heard:
        raise CheckFailed(f"after {after} something still listens at {heard[0]}")


def _names(processes: Sequence[psutil.Process]) -> str:
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found.append(f"{process.pid} ({' '.join(process.cmdline())[:60]})")
    return ", ".join(found)
