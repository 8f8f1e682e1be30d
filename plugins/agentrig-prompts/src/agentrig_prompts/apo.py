"""Automatic prompt optimization: textual gradients and a beam (Pryzant et al. 2023, arXiv 2305.03495).

In each step, with p a prompt of the beam B, x a minibatch of training tasks, and M the reflecting model:

    g  = M("what is wrong with p", p, x, the answers under p, their rewards)     the gradient: a critique in words
    p' = M("change p against g", p, g)                                           the step against it
    B  = the `beam_width` best on validation of B and all p'

up to `branch_factor` times for each p. A bandit picks the best, as in the paper, so that not every p' costs a rollout
of each validation task: all run on a quarter of these, the better half on half of them, and the better half of those
on all (successive halving).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from agentrig.algorithms import Session
from agentrig_prompts.asking import shown
from agentrig_prompts.config import ApoConfig
from agentrig_prompts.search import Prompts, Scores, Search, best_of, mean, scores_of

CRITIQUE = """You review the prompt of an assistant:
```
<curr_param>
```

The prompt is a template, filled in for each task; its fields: {fields}. These are tasks, what the assistant answered,
and what a grader says of the answers:
<side_info>

What is wrong with the prompt? For each answer that could be better, name what in the prompt led to it: a fact or a rule
that is missing, an instruction that is wrong or unclear. Quote the facts and rules that the grader names. Also say what
must stay as it is, because it led to good answers. Do not write a new prompt."""

EDIT = """An assistant works with this prompt:
```
<curr_param>
```

The prompt is a template, filled in for each task. Keep these fields and add none: {fields}. Write a brace that is text
twice: {{ }}.

A reviewer looked at the assistant's answers and says of the prompt:
<side_info>

Change the prompt so that nothing of this remains to be said. The assistant sees neither the review nor the tasks that
it is about, so put every fact and rule that it needs into the prompt, in general words. Reply with the changed prompt
between two lines of ```."""


class ApoSearch(Search):
    """One search."""

    def __init__(self, config: ApoConfig) -> None:
        super().__init__(config)
        self.making = (config.minibatch + 2, config.minibatch + 2)  # with the critique, and the new text
        self._width, self._branches = config.beam_width, config.branch_factor

    def begin(self, session: Session) -> None:
        """Check as each search does; then put the validation tasks in an order of chance."""
        super().begin(session)
        self._random = random.Random(session.seed)
        self._validation = self._random.sample(self._validation, len(self._validation))

    def search(self) -> None:
        """Widen the beam and narrow it, until the budget is used or nothing is left to improve."""
        session, ended, tried, new = self._session, 0, 1, 0
        self.affords(len(self._validation) + self._each)
        beam: list[Prompts] = [self._best[0]]
        scores = self._scores(beam, len(self._validation))
        while self.goes_on(ended, (beam[0], mean(scores[0])), candidates=tried, attempts=new):
            if ended < session.first_step - 1:  # as it was when the budget was perhaps another one
                new = int(session.lines[ended]["algorithm"]["attempts"])
            else:
                most = len(beam) * self._branches
                new = next(n for n in range(most, 0, -1) if n == 1 or self.affords(n * self._each))
            children = list[Prompts]()
            for attempt in range(new):
                self.affords((new - attempt) * self._each + len(children) * len(self._validation))
                child = self._child(beam[attempt % len(beam)])
                if child is not None and child not in [*beam, *children]:
                    children.append(child)
            self.affords(len(children) * len(self._validation))
            beam, scores = self._best_of([*beam, *children])
            ended, tried = ended + 1, tried + len(children)

    def _child(self, prompts: Prompts) -> Prompts | None:
        """Return prompts with one text changed; None if no answer could be better, or no usable text came back."""
        lines = self._asking.rollouts(self._random.sample(self._train, self._config.minibatch), prompts)
        name = self._random.choice(sorted(prompts))
        seen = [line for line in lines if line["value"] is not None]
        if all(line["value"] >= self._config.perfect for line in seen):
            return None
        critique = self._asking.reply(CRITIQUE, prompts[name], shown(seen)).strip()
        if not critique:
            self._asking.refuse(name, "the critique is empty")
            return None
        text = self._asking.better(EDIT, prompts[name], name, critique)
        return {**prompts, name: text} if text else None

    def _best_of(self, candidates: Sequence[Prompts]) -> tuple[list[Prompts], list[Scores]]:
        """Return the next beam, the best first, and its scores."""
        whole = len(self._validation)
        for tasks in (math.ceil(whole / 4), math.ceil(whole / 2), whole):
            scores = self._scores(candidates, tasks)
            kept = self._width if tasks == whole else max(self._width, math.ceil(len(candidates) / 2))
            order = ranked(scores)[:kept]
            candidates = [candidates[place] for place in order]
        return list(candidates), [scores[place] for place in order]

    def _scores(self, candidates: Sequence[Prompts], tasks: int) -> list[Scores]:
        batch = self._validation[:tasks]
        return [dict(enumerate(scores_of(self._asking.rollouts(batch, prompts)))) for prompts in candidates]


def ranked(candidates: Sequence[Scores]) -> list[int]:
    """Return the places of candidates, the best first; of equal ones the earlier first."""
    left, order = list(range(len(candidates))), list[int]()
    while left:  # no sort: a candidate that left out many tasks is equal to better and to worse ones
        order.append(left.pop(best_of([candidates[place] for place in left])))
    return order
