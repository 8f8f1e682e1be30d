"""The checks of a server's answers: token ids, log-probabilities, sampling fields, refusals."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from agentrig.delivery.asking import CannotAnswer, CannotScore, ask
from agentrig.testing.checks import CheckFailed, CheckSkipped
from agentrig.testing.server_bench import NAME, TABLE, Reply, ServerBench

TEXTS = 8
"""How many prompts are tried until the model samples a letter."""


@TABLE.check(
    "starts",
    why="An algorithm relies on these: a wrong address or dtype ends the run or its proof of delivery.",
    cure="Set endpoints, dtype and context in __enter__, as agentrig.servers.Server describes them.",
)
def starts(bench: ServerBench) -> None:
    """It starts, and its attributes are what the plan asks for."""
    server = bench.server
    wrong = []
    for endpoint in server.endpoints:
        place = urlsplit(endpoint.base_url)
        wrong += [f"{endpoint.base_url} does not end in /v1"] * (not place.path.endswith("/v1"))
        wrong += [f"{place.hostname} is not this machine's own address"] * (
            place.hostname not in ("127.0.0.1", "::1", "localhost")
        )
        wrong += [f'the endpoint\'s model is "{endpoint.model}", not the plan\'s "{NAME}"'] * (endpoint.model != NAME)
        wrong += ["the endpoint has sampling fields; the algorithm sets them"] * bool(endpoint.sampling)
        wrong += ["the endpoint says token_ids=False"] * (not endpoint.token_ids)
    wrong += ["it has no endpoint"] * (not server.endpoints)
    wrong += [f"dtype is {server.dtype}, and the plan's float32"] * (server.dtype != "float32")
    wrong += [f"context is {server.context}; the plan allows {bench.context}"] * (
        not 0 < server.context <= bench.context
    )
    if wrong:
        raise CheckFailed("; ".join(wrong))


@TABLE.check(
    "token-ids",
    why="These tokens are trained: other ones than were sampled make every importance ratio wrong.",
    cure="Return the ids that the model saw and sampled; never tokenize the text again.",
    needs=("starts",),
)
def token_ids(bench: ServerBench) -> None:
    """An answer has the token ids of its prompt and of itself, with a log-probability each."""
    text = bench.prompt()
    reply = bench.ask(text)
    own = bench.policy.ids(text)
    if list(reply.prompt) != own:
        raise CheckFailed(f"prompt_token_ids has {len(reply.prompt)} tokens; the chat template makes {len(own)}: {own}")
    if len(reply.tokens) != len(reply.logprobs) or not reply.tokens:
        raise CheckFailed(f"{len(reply.tokens)} tokens came with {len(reply.logprobs)} log-probabilities")
    if reply.text != bench.policy.text(reply.tokens):
        raise CheckFailed(f"the message is {reply.text!r}, and its tokens say {bench.policy.text(reply.tokens)!r}")


@TABLE.check(
    "logprobs",
    why="The importance ratio divides by them: a run with others trains on noise, and the proof of delivery fails.",
    cure="Return log softmax(logits / temperature), before top-p cuts, from the weights that sampled.",
    needs=("starts",),
)
def logprobs(bench: ServerBench) -> None:
    """Log-probabilities are the model's own, at temperatures other than 1 too."""
    for temperature in (1.0, 0.7):
        text = bench.prompt(6)
        bench.compare(text, bench.ask(text, temperature=temperature), temperature=temperature)


@TABLE.check(
    "greedy",
    why="Validation is greedy: one that samples measures the temperature, not the policy.",
    cure="At temperature 0 take the likeliest token.",
    needs=("starts",),
)
def greedy(bench: ServerBench) -> None:
    """Temperature 0 takes the likeliest token, always."""
    bench.give()
    for _ in range(3):
        text = bench.prompt(3)
        reply = bench.ask(text, temperature=0)
        worst = max(bench.policy.gaps(bench.policy.ids(text), reply.tokens))
        if worst > bench.tolerance:
            raise CheckFailed(f"at temperature 0 it took a token that is {worst:.3f} nats below the likeliest one")


@TABLE.check(
    "seed",
    why="A run that is repeated, or resumed, must sample the same; one seed for all gives groups of equal answers.",
    cure="Give each request a random stream of its own, made from its seed and nothing else that changes.",
    needs=("starts",),
)
def seed(bench: ServerBench) -> None:
    """A seed gives the same answer again; other seeds, and no seed, give others."""
    text = bench.prompt()
    first, again = (list(bench.ask(text, seed=5).tokens) for _ in range(2))
    if first != again:
        raise CheckFailed(f"the same request with seed 5 sampled {first}, then {again}")
    for what, fields in (("four seeds", [{"seed": s} for s in range(4)]), ("no seed, four times", [{}] * 4)):
        if len({tuple(bench.ask(text, **f).tokens) for f in fields}) == 1:
            raise CheckFailed(f"{what} gave the same tokens at temperature 1: {first}")


@TABLE.check(
    "sampling",
    why="An algorithm sets these fields; one that is ignored trains other answers than the run file says.",
    cure="Honour max_tokens, top_p, stop and n, or refuse the request with a message.",
    needs=("greedy",),
)
def sampling(bench: ServerBench) -> None:
    """max_tokens, top_p, stop and n have their effect."""
    text = bench.prompt()
    likeliest = bench.ask(text, temperature=0, max_tokens=12)
    short = bench.ask(text, temperature=0, max_tokens=3)
    if list(short.tokens) != list(likeliest.tokens[:3]) or (len(likeliest.tokens) > 3 and short.finish != "length"):
        raise CheckFailed(f"max_tokens=3 gave {len(short.tokens)} tokens, finish_reason {short.finish}")
    narrow = bench.ask(text, top_p=1e-6, max_tokens=3)
    if list(narrow.tokens) != list(short.tokens):
        raise CheckFailed(f"top_p=1e-6 sampled {list(narrow.tokens)}; only {list(short.tokens)} is left under it")
    several = bench.replies(text, n=3, seed=1)
    if len(several) != 3 or len({tuple(r.tokens) for r in several}) == 1:
        raise CheckFailed(f"n=3 gave {len(several)} answers with {len({tuple(r.tokens) for r in several})} texts")
    for number in range(TEXTS):  # a small random model may sample no letter at all
        text = bench.prompt(number)
        likeliest = bench.ask(text, temperature=0, max_tokens=12)
        letters = [c for c in likeliest.text if c.isascii() and c.isprintable()]
        if not letters:
            continue
        stopped = bench.ask(text, temperature=0, max_tokens=12, stop=[letters[-1]])
        if letters[-1] in stopped.text or stopped.finish != "stop":
            raise CheckFailed(
                f"stop=[{letters[-1]!r}] gave {stopped.text!r}, finish_reason {stopped.finish}; without it the text is "
                f"{likeliest.text!r}"
            )
        return
    raise CheckSkipped(f"the model sampled no letter in {TEXTS} answers, so that stop could not be tried")


@TABLE.check(
    "concurrent",
    why="A step sends hundreds of requests at once: a mixed-up answer trains one task with another's tokens.",
    cure="Keep the state of each request by itself, or answer one after another.",
    needs=("logprobs",),
)
def concurrent(bench: ServerBench) -> None:
    """Requests at once get the answers to their own prompts."""
    bench.give()
    texts = [bench.prompt(i) for i in range(8)]

    def one(text: str) -> Reply:
        return bench.ask(text, seed=1)

    with ThreadPoolExecutor(8) as pool:
        for text, reply in zip(texts, pool.map(one, texts), strict=True):
            try:
                bench.compare(text, reply)
            except CheckFailed as failed:
                raise CheckFailed(f"with {len(texts)} requests at once: {failed.what}") from None


@TABLE.check(
    "scores",
    why="With scores of given tokens a run proves bit by bit that the weights have arrived.",
    cure="Answer prompt_logprobs at /completions as vLLM does: null, then {token: {logprob}} for each next token.",
    needs=("logprobs",),
)
def scores(bench: ServerBench) -> None:
    """It scores given tokens as the model does."""
    bench.give()
    ids = bench.policy.ids(bench.prompt(4))
    try:
        answer = ask(bench.endpoint, ids)
    except (CannotScore, CannotAnswer) as error:
        raise CheckSkipped(f"it does not score tokens, so runs use the weaker proof of delivery: {error}") from None
    own = bench.policy.logprobs(ids[:1], ids[1:])
    far = max(abs(a - b) for a, b in zip(own, answer.logprobs, strict=True))
    if not far <= bench.tolerance:
        raise CheckFailed(f"prompt_logprobs differ from transformers' by {far:.4f}")


@TABLE.check(
    "context",
    why="A prompt that is cut in silence is trained as if the model had read all of it.",
    cure="Answer 400 with the number of tokens and the context; cut nothing.",
    needs=("starts",),
)
def context(bench: ServerBench) -> None:
    """A prompt that is too long is refused with a message, and the next one is answered."""
    answer = bench.post("/chat/completions", bench.body(bench.prompt(bench.context)))
    if not 400 <= answer.status_code < 500:
        raise CheckFailed(f"a prompt of over {bench.context} tokens is answered with status {answer.status_code}")
    if str(bench.server.context) not in answer.text:
        raise CheckFailed(
            f"the refusal does not name the context of {bench.server.context} tokens: {answer.text[:200]}"
        )
    bench.ask(bench.prompt())


@TABLE.check(
    "key",
    why="Every process on the machine could use the server, or read the answers that are trained.",
    cure="Answer 401 to each request without the endpoint's key, on every route.",
    needs=("starts",),
)
def key(bench: ServerBench) -> None:
    """Requests without the key, or with another, are refused."""
    body = bench.body(bench.prompt())
    url = bench.endpoint.base_url
    for name, sent in (("no key", ""), ("a wrong key", "wrong")):
        headers = {"Authorization": f"Bearer {sent}"} if sent else {}
        found = {
            "POST /chat/completions": bench.post("/chat/completions", body, key=sent).status_code,
            "POST /completions": bench.post("/completions", {"model": NAME, "prompt": [5, 6]}, key=sent).status_code,
            "GET /models": bench.client.get(f"{url}/models", headers=headers).status_code,
        }
        for route, status in found.items():
            if status < 400:
                raise CheckFailed(f"{route} with {name} is answered with status {status}")
