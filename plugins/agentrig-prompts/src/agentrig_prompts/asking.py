"""What a search asks of models: rollouts under candidate prompts, and reflections. All goes into the run's record."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from gepa.strategies.instruction_proposal import InstructionProposalSignature as Signature

from agentrig import Endpoint, Task
from agentrig.algorithms import Session
from agentrig.endpoints import without_proxy
from agentrig.errors import RunStopped
from agentrig.prompting import fields, misfit
from agentrig.rollouts import Rollout
from agentrig.text import cut
from agentrig.traces import reply_of, token_count
from agentrig_prompts.config import GepaConfig
from agentrig_prompts.record import Record, digest_of

log = logging.getLogger(__name__)

Example = tuple[str, Task]
"""A task, with its role: ids are unique within a split only."""

SHOWN = 4000
"""Most characters of an input, an answer or a reply that the reflecting model sees."""

EXAMPLE = 300
"""Most characters of a refused reply that are shown to the user."""


class Stopping(BaseException):
    """Ends a search from within, as gepa goes on after any `Exception`; its cause, if any, is the error of the run."""


class Asking:
    """Asks the models: the run's, which reflects too if the settings name no other.

    Attributes:
        step: The step that is under way.
        spare: Calls that may go into further attempts at failed rollouts, so that the budget is kept.
        reflections: What the reflecting model was asked.
        refused: Attempts at a new prompt that gave no text, or no prompt with the same fields.
        usable: Those that gave one.
        example: Why the latest of those was refused, and what came back; empty without one.
        reflection_s: Seconds of reflections since somebody set it to 0.
    """

    def __init__(self, session: Session, endpoints: Sequence[Endpoint], config: GepaConfig, record: Record) -> None:
        self._session, self._endpoints, self._config, self._record = session, endpoints, config, record
        self.step, self.reflection_s, self.spare, self.reflections, self.refused, self.usable = 1, 0.0, 0, 0, 0, 0
        self.example = self._came = ""
        url, model = config.reflection_base_url, config.reflection_model
        self._reflecting = Endpoint.at(url, model, config.reflection_api_key) if url else endpoints[0]

    def rollouts(self, batch: Sequence[Example], prompts: Mapping[str, str]) -> list[Mapping[str, Any]]:
        """Return a line of the record for each task; its `value` is None if every attempt failed.

        Raises:
            RunStopped: Too many rollouts have failed.
            Stopping: See `_answer`.
        """
        tasks = {digest_of(prompts, role, task.id): task for role, task in batch}
        last, tries = dict[str, Rollout](), 0
        while left := {key: task for key, task in tasks.items() if self._record.settled(key) is None}:
            self._attempts(left, prompts, last)
            failed = [key for key in left if last[key].failure is not None]
            away = len(failed) == len(left) and not any(last[key].trace.llm_calls() for key in left)
            if away and self._answer(self._endpoints[0], "/models")[1]:
                continue  # the model was away: that was no attempt
            tries, paid = tries + 1, sum(bool(last[key].trace.llm_calls()) for key in failed)
            if tries > self._config.retries or paid > self.spare:
                self._session.check_failures(list(last.values()), step=self.step)
                for key in failed:
                    self._record.add(key, calls=0, tokens=0, settled=True, value=None)
            self.spare -= paid
        lines = [self._record.settled(digest_of(prompts, role, task.id)) for role, task in batch]
        return [line for line in lines if line is not None]

    def _attempts(self, tasks: Mapping[str, Task], prompts: Mapping[str, str], last: dict[str, Rollout]) -> None:
        """Run each task once, and record each rollout as soon as it has ended: a killed run does not pay it again."""
        keys = list(tasks)

        def record(groups: Mapping[int, Sequence[Rollout]]) -> None:
            for place, (rollout,) in groups.items():
                last[keys[place]] = rollout
                self._record.add(keys[place], **_line(rollout))

        if self._session.stopping:
            raise Stopping
        self._session.prompts = prompts
        each = list(tasks.values())
        self._session.rollouts(each, n=1, endpoint=self._endpoints, step=self.step, on_groups=record)

    def better(self, template: str, prompt: str, name: str, seen: str) -> str | None:
        """Return a new text for the prompt of a name, or None if the reply has none that could be used; see `reply`."""
        reply = self.reply(template, prompt, seen)
        found = Signature.output_extractor(reply)["new_instruction"] if "```" in reply else ""
        why = misfit(found, prompt) if found else "the reply has no prompt between two lines of ```"
        if why:
            self.refuse(name, f"a new text is refused: {why}")
        self.usable += not why
        return None if why else found

    def refuse(self, name: str, why: str) -> None:
        """Count and log the latest reply, which could not be used, to a question about the prompt of a name."""
        self.refused += 1
        self.example = f"{why}; what came back: {' '.join(self._came.split())[:EXAMPLE]}"
        log.warning("step %d, prompt %s: %s", self.step, name, why)

    def reply(self, template: str, prompt: str, seen: str) -> str:
        """Return what the reflecting model says of a prompt; empty if that is no chat completion.

        Args:
            template: What is asked, with `{fields}`, `<curr_param>` and `<side_info>` in it: there the prompt's fields,
                the prompt, and what is seen of it are put in.
            prompt: Its text.
            seen: See `shown`.

        Raises:
            Stopping: The model refuses the request; or see `_answer`.
        """
        start = time.perf_counter()
        self.reflections += 1
        named = ", ".join(f"{{{field}}}" for field in sorted(fields(prompt))) or "there are none"
        asked = template.replace("{fields}", named).replace("<curr_param>", prompt).replace("<side_info>", seen)
        key = digest_of("reflection", self.reflections, asked)
        if (known := self._record.settled(key)) is not None:
            self._came = str(known["reply"])
            return self._came
        model, messages = self._reflecting, [{"role": "user", "content": asked}]
        body = {"model": model.model, "messages": messages, "temperature": self._config.reflection_temperature}
        response, _ = self._answer(model, "/chat/completions", body)
        if response.status_code >= 400:
            raise Stopping from RunStopped(
                f"the reflecting model at {model.base_url} refuses the request: {_said(response)}. Set "
                "reflection_base_url, reflection_model and reflection_api_key in config.toml, then "
                f"{self._session.resumes}"
            )
        try:
            answer = response.json()
            text, tokens = str(answer["choices"][0]["message"]["content"] or ""), _used({"response": answer})
        except (ValueError, LookupError, TypeError):
            text, tokens = "", 0  # refused, as a reply without a prompt is
            log.warning("the model at %s did not answer with a chat completion: %.200s", model.base_url, response.text)
        self._record.add(key, calls=1, tokens=tokens, settled=True, reply=text)
        self.reflection_s += time.perf_counter() - start
        self._came = text or response.text[:EXAMPLE]
        return text

    def _answer(self, endpoint: Endpoint, path: str, body: Any = None) -> tuple[httpx.Response, bool]:
        """Ask until a server answers; return the answer, and whether it was away at first.

        Raises:
            Stopping: It stays away, or the user asked to end.
        """
        end, pause, away = time.monotonic() + self._config.patience_s, 0.5, False
        key = {"Authorization": f"Bearer {endpoint.api_key}"}
        without_proxy(endpoint.base_url)
        with httpx.Client(base_url=endpoint.base_url, headers=key, timeout=600) as client:
            while True:
                try:
                    response = client.request("GET" if body is None else "POST", path, json=body)
                    if response.status_code < 500 and response.status_code != 429:
                        return response, away
                    why = _said(response)
                except httpx.HTTPError as error:
                    why = str(error) or type(error).__name__
                away = True
                if self._session.stopping:
                    raise Stopping
                if time.monotonic() + pause > end:
                    raise Stopping from RunStopped(
                        f"the model at {endpoint.base_url} does not answer: {why}. The run waited for it "
                        f"(algorithm.patience_s). What was paid is kept; when it answers: {self._session.resumes}"
                    )
                time.sleep(pause)
                pause = min(2 * pause, 30.0)


def shown(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return lines of the record as the reflecting model sees them, in gepa's form."""
    examples = [{key: line[key] for key in ("Inputs", "Generated Outputs", "Feedback")} for line in lines]
    given = {"current_instruction_doc": "", "dataset_with_feedback": examples}
    return str(Signature.prompt_renderer({**given, "prompt_template": "<curr_param><side_info>"}))


def _line(rollout: Rollout) -> dict[str, Any]:
    """Return what the record keeps of a rollout; one that failed settles nothing."""
    calls, score = rollout.trace.llm_calls(), rollout.score
    line = {"rollout": rollout.id, "task": rollout.task.id, "calls": int(bool(calls)), "settled": False}
    line["tokens"] = sum(_used(call.attributes) for call in calls)
    if rollout.value is None or score is None:
        return {**line, "failure": rollout.failure}
    said = score.feedback or score.details.get("reason") or score.details.get("wrong") or ""
    replies = [cut(reply_of(call.attributes), SHOWN) for call in calls]
    return {
        **line,
        **{"settled": True, "value": rollout.value},
        "Inputs": {key: cut(str(value), SHOWN) for key, value in rollout.task.input.items()},
        "Generated Outputs": {"answer": cut(str(rollout.outcome.answer), SHOWN), "replies": replies},
        "Feedback": f"{cut(str(said), SHOWN)}\nreward {rollout.value:g}".strip(),
    }


def _used(attributes: Mapping[str, Any]) -> int:
    """Return the tokens that the answer of a call states; 0 if it states none."""
    return sum(token_count(attributes, part) or 0 for part in ("prompt", "response"))


def _said(response: httpx.Response) -> str:
    return f"{response.status_code} {response.text[:200]}"
