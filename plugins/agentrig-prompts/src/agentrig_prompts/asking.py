"""What a search asks of models: rollouts under candidate prompts, and reflections. All goes into the run's record."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
from gepa.strategies.instruction_proposal import InstructionProposalSignature as Signature

from agentrig import Endpoint, Task
from agentrig.algorithms import Session
from agentrig.errors import RunStopped
from agentrig.prompting import fields, misfit
from agentrig.rollouts import Rollout
from agentrig.traces import mapping, reply_of
from agentrig_prompts.config import SearchConfig
from agentrig_prompts.record import Record, digest_of

log = logging.getLogger(__name__)

Ask = Callable[[httpx.Client], httpx.Response]
Example = tuple[str, Task]
"""A task, with its role: ids are unique within a split only."""

Seen = str | Sequence[Mapping[str, Any]]

SHOWN = 4000
"""Most characters of an input, an answer or a reply that the reflecting model sees."""

EXAMPLE = 300
"""Most characters of a refused reply that are shown to the user."""


class Stopping(BaseException):
    """Ends a search from within, as gepa goes on after any `Exception`; its cause, if any, is the error of the run."""


class Asking:
    """Asks the models.

    Args:
        session: The run's.
        endpoints: The model's server; it reflects too, if the settings name no other model.
        config: The settings.
        record: What was paid before.

    Attributes:
        step: The step that is under way.
        spare: Calls that may go into further attempts at failed rollouts, so that the budget is kept.
        reflections: What the reflecting model was asked.
        refused: Of these, those that gave no text, or no prompt with the same fields.
        example: Why the latest of those was refused, and what came back; empty without one.
        reflection_s: Seconds of reflections since somebody set it to 0.
    """

    def __init__(self, session: Session, endpoints: Sequence[Endpoint], config: SearchConfig, record: Record) -> None:
        self._session, self._endpoints, self._config, self._record = session, endpoints, config, record
        self.step, self.spare, self.reflections, self.refused, self.reflection_s = 1, 0, 0, 0, 0.0
        self.example = ""
        self._asked: Counter[str] = Counter()
        self._reflecting = endpoints[0]
        if config.reflection_base_url:
            key = config.reflection_api_key.reveal() if config.reflection_api_key else "none"
            url = config.reflection_base_url.rstrip("/")
            self._reflecting = Endpoint(base_url=url, model=config.reflection_model, api_key=key)

    def rollouts(self, batch: Sequence[Example], prompts: Mapping[str, str]) -> list[Mapping[str, Any]]:
        """Return a line of the record for each task; its `value` is None if every attempt failed.

        Raises:
            RunStopped: The model can't be reached, or too many rollouts have failed.
        """
        tasks = {digest_of(prompts, role, task.id): task for role, task in batch}
        last: dict[str, Rollout] = {}
        tries = 0
        while left := [key for key in tasks if self._record.settled(key) is None]:
            now = self._attempts({key: tasks[key] for key in left}, prompts)
            last |= now
            failed = [key for key in left if now[key].failure is not None]
            away = len(failed) == len(left) and not any(rollout.trace.llm_calls() for rollout in now.values())
            if away and self._waits(self._endpoints[0], lambda client: client.get("/models"))[1]:
                continue  # the model was away: that was no attempt
            tries, paid = tries + 1, sum(bool(now[key].trace.llm_calls()) for key in failed)
            if tries > self._config.retries or paid > self.spare:
                self._session.check_failures(list(last.values()), step=self.step)
                for key in failed:
                    self._record.add(key, calls=0, tokens=0, settled=True, value=None)
            self.spare -= paid
        lines = [self._record.settled(digest_of(prompts, role, task.id)) for role, task in batch]
        return [line for line in lines if line is not None]

    def _attempts(self, tasks: Mapping[str, Task], prompts: Mapping[str, str]) -> dict[str, Rollout]:
        """Run each task once, and record each rollout as soon as it has ended: a killed run does not pay it again."""
        keys, ended = list(tasks), dict[str, Rollout]()

        def record(groups: Mapping[int, Sequence[Rollout]]) -> None:
            for place, (rollout,) in groups.items():
                ended[keys[place]] = rollout
                self._record.add(keys[place], **_line(rollout))

        if self._session.stopping:
            raise Stopping
        self._session.prompts = prompts
        each = list(tasks.values())
        self._session.rollouts(each, n=1, endpoint=self._endpoints, step=self.step, on_groups=record)
        return ended

    def better(self, template: str, prompt: str, name: str, seen: Seen) -> str | None:
        """Return a new text for a prompt, or None if the reply has none that could be used.

        Args:
            template: What is asked, with `{fields}` in it, and `<curr_param>` and `<side_info>`, as gepa writes them:
                there the prompt's fields, the prompt, and what is seen of it are put in.
            prompt: The text to improve.
            name: The prompt's name, for messages.
            seen: Lines of the record, or a text.

        Raises:
            Stopping: The model can't be reached, or refuses the request; or the user asked to end.
        """
        reply, body = self._reply(_asked(template, prompt, seen))
        found = Signature.output_extractor(reply)["new_instruction"] if "```" in reply else ""
        why = misfit(found, prompt) if found else "the reply has no prompt between two lines of ```"
        return self._usable(found, name, f"a new text is refused: {why}" if why else "", body)

    def critique(self, template: str, prompt: str, name: str, seen: Seen) -> str | None:
        """Return what the model says of a prompt, or None if it says nothing; see `better`."""
        reply, body = self._reply(_asked(template, prompt, seen))
        return self._usable(reply.strip(), name, "" if reply.strip() else "the critique is empty", body)

    def _usable(self, text: str, name: str, why: str, body: str) -> str | None:
        if not why:
            return text
        self.refused += 1
        self.example = f"{why}; what came back: {' '.join(body.split())[:EXAMPLE]}"
        log.warning("step %d, prompt %s: %s", self.step, name, why)
        return None

    def _reply(self, asked: str) -> tuple[str, str]:
        """Return the reply's text, and what came back: the same, or the body of an answer that has no reply."""
        start = time.perf_counter()
        self.reflections += 1
        self._asked[asked] += 1
        key = digest_of("reflection", asked, self._asked[asked])
        if (known := self._record.settled(key)) is not None:
            return str(known["reply"]), str(known.get("body", known["reply"]))
        model, messages = self._reflecting, [{"role": "user", "content": asked}]
        body = {"model": model.model, "messages": messages, "temperature": self._config.reflection_temperature}
        try:
            response, _ = self._waits(model, lambda client: client.post("/chat/completions", json=body))
            if response.status_code >= 400:
                said = f"{response.status_code} {response.text[:200]}"
                raise RunStopped(
                    f"the reflecting model at {model.base_url} refuses the request: {said}. Set reflection_base_url, "
                    f"reflection_model and reflection_api_key in config.toml, then {self._session.resumes}"
                )
        except RunStopped as stopped:
            raise Stopping from stopped
        try:
            answer = response.json()
            text, tokens = str(answer["choices"][0]["message"]["content"] or ""), _used(answer)
        except (ValueError, LookupError, TypeError):
            text, tokens = "", 0  # refused, as a reply without a prompt is
            log.warning("the model at %s did not answer with a chat completion: %.200s", model.base_url, response.text)
        odd = {} if text else {"body": response.text[:EXAMPLE]}
        self._record.add(key, calls=1, tokens=tokens, settled=True, reply=text, **odd)
        self.reflection_s += time.perf_counter() - start
        return text, odd.get("body", text)

    def _waits(self, endpoint: Endpoint, ask: Ask) -> tuple[httpx.Response, bool]:
        """Ask until a server answers; return the answer, and whether it was away at first.

        Raises:
            RunStopped: It stays away.
            Stopping: The user asked to end.
        """
        end, pause, away = time.monotonic() + self._config.patience_s, 0.5, False
        key = {"Authorization": f"Bearer {endpoint.api_key}"}
        with httpx.Client(base_url=endpoint.base_url, headers=key, timeout=600) as client:
            while True:
                try:
                    response = ask(client)
                    if response.status_code < 500 and response.status_code != 429:
                        return response, away
                    why = f"{response.status_code} {response.text[:200]}"
                except httpx.HTTPError as error:
                    why = str(error) or type(error).__name__
                away = True
                if self._session.stopping:
                    raise Stopping
                if time.monotonic() + pause > end:
                    raise RunStopped(
                        f"the model at {endpoint.base_url} does not answer: {why}. The run waited for it "
                        f"(algorithm.patience_s). What was paid is kept; when it answers: {self._session.resumes}"
                    )
                time.sleep(pause)
                pause = min(2 * pause, 30.0)


def _asked(template: str, prompt: str, seen: Seen) -> str:
    """Return what is asked of the reflecting model."""
    named = ", ".join(f"{{{field}}}" for field in sorted(fields(prompt))) or "there are none"
    template = template.replace("{fields}", named)
    if isinstance(seen, str):
        return template.replace("<curr_param>", prompt).replace("<side_info>", seen)
    examples = [{key: line[key] for key in ("Inputs", "Generated Outputs", "Feedback")} for line in seen]
    given = {"current_instruction_doc": prompt, "dataset_with_feedback": examples, "prompt_template": template}
    return str(Signature.prompt_renderer(given))


def _line(rollout: Rollout) -> dict[str, Any]:
    """Return what the record keeps of a rollout; one that failed settles nothing."""
    calls, score = rollout.trace.llm_calls(), rollout.score
    line = {"rollout": rollout.id, "task": rollout.task.id, "calls": int(bool(calls)), "settled": False}
    line["tokens"] = sum(_used(mapping(call.attributes.get("response"))) for call in calls)
    if rollout.value is None or score is None:
        return {**line, "failure": rollout.failure}
    said = score.feedback or score.details.get("reason") or score.details.get("wrong") or ""
    replies = [_short(reply_of(call.attributes)) for call in calls]
    return {
        **line,
        **{"settled": True, "value": rollout.value},
        "Inputs": {key: _short(value) for key, value in rollout.task.input.items()},
        "Generated Outputs": {"answer": _short(rollout.outcome.answer), "replies": replies},
        "Feedback": f"{_short(said)}\nreward {rollout.value:g}".strip(),
    }


def _used(answer: Mapping[str, Any]) -> int:
    """Return the tokens that an answer states; 0 if it states none."""
    usage = mapping(answer.get("usage"))
    return sum(n for name in ("prompt_tokens", "completion_tokens") if isinstance(n := usage.get(name), int))


def _short(value: Any) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} …"
