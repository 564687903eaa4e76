"""What each lever would save in each phase of a run, by rehearsing the run with that lever moved.

A saving is only worth a figure when it is a rehearsal's: shrinking one term moves the peak to another moment, which the
terms at the old peak cannot tell. A rehearsal takes a tenth of a second (a tiny model) to some ten seconds (8B), and
there are about a dozen to make; so `train` does not wait for them. The process that made the plan goes on with them, at
the lowest priority and for at most `MOST_SECONDS`, while the weights load and the first steps run, and `train` writes
each into `plan.json` as it comes. What is not done in time has no figure there, rather than an estimate.

`framework.run.planning.background_plan` starts `main` and reads from it, one JSON document a line: the plan or the
problems; the list of levers; then position and savings of each. Only `train` asks for it: `plan`, `fit` and `diff` plan
alone.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from framework.errors import RequestError
from framework.memory.explain.moves import HOST
from framework.memory.explain.proposals import Proposal, propose
from framework.memory.ledger import Plan
from framework.memory.planning import make_plan
from framework.run.rehearsal.rehearse import record
from framework.schema.config import TrainingConfig

MOST_SECONDS = 300.0
_LOWEST_PRIORITY = 19


def main() -> int:
    """Plan the config on stdin, then its levers. 0, or 2 with what is wrong with the request."""
    stdout = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print must not mix with the documents
    config = TrainingConfig.model_validate(json.load(sys.stdin))
    with stdout:
        for document in documents(config):
            print(json.dumps(document), file=stdout, flush=True)
            if "errors" in document:
                return 2
    return 0


def documents(config: TrainingConfig) -> Iterator[Mapping[str, Any]]:
    """All that is told of a config, in the order in which it is found out."""
    try:
        rehearsal = record(config)
    except RequestError as error:
        yield {"errors": [problem.to_json() for problem in error.problems]}
        return
    plan = make_plan(rehearsal)
    yield {"plan": plan.to_json()}
    proposals = sorted(propose(rehearsal.config), key=lambda proposal: -_promise(proposal, plan))
    yield {"levers": [entry(proposal) for proposal in proposals]}
    os.nice(_LOWEST_PRIORITY)
    end = time.monotonic() + MOST_SECONDS
    for position, proposal in enumerate(proposals):
        if time.monotonic() > end:
            return
        yield {"position": position, "saves": savings(plan, proposal.config)}
        gc.collect()


def entry(proposal: Proposal) -> dict[str, Any]:
    """A lever in `plan.json`, before anything is known of its savings."""
    words = {"key": proposal.key, "override": proposal.override, "costs": proposal.costs, "exact": proposal.exact}
    return {**words, "saves": None}


def savings(plan: Plan, changed: TrainingConfig) -> dict[str, int] | None:
    """Bytes that a change takes off the allocated peak of each phase, and off the host; None where it cannot run.

    Allocated, not reserved: what is reserved and unused goes back to the driver before memory runs out. Negative where
    the change takes more.
    """
    try:
        other = make_plan(record(changed))
    except RequestError:
        return None
    after = {phase.name: phase.allocated_bytes for phase in other.phases}
    saved = {phase.name: phase.allocated_bytes - after.get(phase.name, 0) for phase in plan.phases}
    return {**saved, HOST: plan.host_bytes - other.host_bytes}


def _promise(proposal: Proposal, plan: Plan) -> int:
    """The bytes at the step's peak that a lever could shrink at best: the most promising are rehearsed first."""
    terms = plan.step_peak.terms.to_json()
    return sum(terms[name] for name in proposal.shrinks)


if __name__ == "__main__":
    sys.exit(main())
