"""Memory that runs out in a step: what the step did is undone, and it is made again in smaller micro batches.

`training.on_oom: shrink` does so as often as there is something to halve; `stop` undoes the step and saves what was
learnt until then. The rows of a step and their order depend on the global batch alone, so no step is lost.

Of several ranks that hold copies any may run out. Each tells the others so before they next do something together, and
at the end of every try (`Ranks.check_in`): all of them undo what they did, and go on with the same smaller size.
"""

from collections.abc import Iterator
from types import TracebackType

from torch.distributed import DistError

from framework.build.ranks import OutOfMemoryElsewhere
from framework.run.oom.failure import Failure, RetriedRun
from framework.run.oom.report import is_memory_failure
from framework.run.oom.smaller_batches import Size, shrinks
from framework.run.undo import Attempt, release


def attempts(session: RetriedRun, key: Size) -> Iterator["RetriedAttempt"]:
    """`for attempt in tries(..): with attempt as way_back: ...` does something until memory suffices for it.

    Each time it does not, that is told and undone, and `key` is smaller for the next try. Raises OutOfMemory, after
    saving what was learnt, when that was not asked for, nothing is left to halve, or what was done cannot be undone.
    """
    repaired = False
    while True:
        attempt = RetriedAttempt(session, key, repaired)
        yield attempt
        if attempt.succeeded:
            break
        repaired = True
    if repaired:
        session.plan_again()


class RetriedAttempt:
    """One try, as a context whose value is the way back from it. It succeeds on all ranks or on none."""

    def __init__(self, session: RetriedRun, key: Size, repaired: bool) -> None:
        self._session, self._key, self._repaired = session, key, repaired
        self._way_back = Attempt(session.assembly, shrinks(session.config) and not session.has_stepped)
        self.succeeded = False

    def __enter__(self) -> Attempt:
        return self._way_back

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        found = self._found(error)
        self.succeeded = found is None
        if found is None or not (isinstance(found, OutOfMemoryElsewhere) or _is_own(found)):
            return False
        self._session.settle()  # the step before this one was made
        failure = Failure(self._session, self._key, self._way_back, found)
        release(found)
        if failure.can_be_undone:
            self._way_back.undo()
        if failure.repair is None:
            raise failure.ended(self._repaired) from None
        self._session.shrink(failure.repair, failure.where)
        return True

    def _found(self, error: BaseException | None) -> BaseException | None:
        """What went wrong on this rank, or else on another, when each has told the others."""
        if isinstance(error, OutOfMemoryElsewhere):  # which has just been told
            return error
        ranks = self._session.coordinator.ranks
        try:
            if error is None:
                ranks.check_in()
            elif _is_own(error):
                ranks.check_in(has_failed=True)
        except OutOfMemoryElsewhere as elsewhere:
            return elsewhere
        return error


def _is_own(error: BaseException) -> bool:
    """Whether memory ran out in what this rank did by itself: an exchange that failed cannot be undone by one side."""
    return is_memory_failure(error) and not isinstance(error, DistError)
