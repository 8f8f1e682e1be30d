"""GEPA: prompts evolve by reflection on rollouts, along the Pareto front of validation tasks (arXiv 2507.19457).

    the agent's prompts on validation → [a candidate of the front → minibatch → reflection → its child on that minibatch
    → if it is better: on validation] … → the best on validation, measured once on held-out tasks

The search is that of the package `gepa`; rollouts, budget and record are the run's. An iteration is a step of the run.
"""

from __future__ import annotations

from typing import Any

from gepa.api import optimize
from gepa.core.adapter import EvaluationBatch

from agentrig_prompts.asking import Example, log, shown
from agentrig_prompts.search import Search, best_of, margin, mean, scores_of

REFLECT = """An assistant works with this prompt:
```
<curr_param>
```

The prompt is a template, filled in for each task. Keep these fields and add none: {fields}. Write a brace that is text
twice: {{ }}.

These are tasks, what the assistant answered, and what a grader says of the answers:
<side_info>

Write a better prompt. Work out from the examples what the task is, what makes an answer good, and which facts and rules
the assistant was not told, and put these into the prompt: the assistant sees nothing else. Reply with the new prompt
between two lines of ```."""


class GepaSearch(Search):
    """What gepa calls as its adapter, stopper, criterion of acceptance and logger."""

    def search(self) -> None:
        """Let gepa search."""
        self.affords(len(self._validation) + self._each)
        adapter: Any = self
        optimize(
            seed_candidate=dict(self._best[0]),
            trainset=self._train,
            valset=self._validation,
            adapter=adapter,
            reflection_minibatch_size=self._config.minibatch,
            perfect_score=self._config.perfect,
            acceptance_criterion=adapter,
            stop_callbacks=adapter.stop,
            logger=adapter,
            seed=self._session.seed,
        )

    def log(self, message: str) -> None:
        """Implement gepa's logger."""
        log.debug("%s", message)

    def evaluate(self, batch: list[Example], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        """Implement `GEPAAdapter.evaluate`."""
        lines = self._asking.rollouts(batch, candidate)
        return EvaluationBatch(outputs=lines, scores=scores_of(lines), trajectories=lines)

    def make_reflective_dataset(self, candidate: Any, eval_batch: Any, components_to_update: Any) -> dict[str, Any]:
        """Implement `GEPAAdapter.make_reflective_dataset`: what has not failed."""
        examples = [line for line in eval_batch.outputs if line["value"] is not None]
        return {name: examples for name in components_to_update if examples}

    def propose_new_texts(self, candidate: Any, reflective_dataset: Any, components_to_update: Any) -> dict[str, str]:
        """Implement `GEPAAdapter.propose_new_texts`; without a usable text there is no new candidate."""
        ask = self._asking.better
        better = {name: ask(REFLECT, candidate[name], name, shown(seen)) for name, seen in reflective_dataset.items()}
        return {name: text for name, text in better.items() if text is not None}

    def should_accept(self, proposal: Any, state: Any) -> bool:
        """Implement gepa's criterion: a higher sum over the tasks that neither candidate has left out."""
        before, after = proposal.subsample_scores_before, proposal.subsample_scores_after
        return margin(dict(enumerate(after)), dict(enumerate(before))) > 0

    def stop(self, state: Any) -> bool:
        """Implement gepa's stopper, called before each iteration: end the step before, and say whether to end."""
        candidates, scores = state.program_candidates, state.prog_candidate_val_subscores
        best = best_of(scores)
        found = (candidates[best], mean(scores[best]))
        return not self.goes_on(state.i + 1, found, candidates=len(candidates))
