"""Host memory while a model loads in parts, read back: no rank but the first may hold much more than its part."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import psutil

from framework.build.assembly import Assembly
from framework.build.loading.sharded import needs_whole_model
from framework.build.ranks import local_part
from framework.memory.units import size
from framework.run.ranks.coordinator import Coordinator
from framework.run.rehearsal.footprint import whole_bytes
from framework.run.rehearsal.load_trace import largest_unit_bytes

SHARE = 0.3
"""Of the whole model, what a rank may take next to its own part."""
SLACK_BYTES = 256 << 20
"""What a load takes besides weights: libraries that it imports, and what the allocator keeps. Not measured on cards."""
_EVERY = 0.02
"""Seconds between two looks: a checkpoint of 1 GiB takes ten times as long to read."""
_STATUS = Path("/proc/self/status")


class HostWatch:
    """As a context, how much this process's own memory grew at its most: `grown`, in bytes. Pages of mapped files do
    not count, which ranks share and the system may take back."""

    def __init__(self) -> None:
        self.grown = 0
        self._began = own_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "HostWatch":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while True:
            self.grown = max(self.grown, own_bytes() - self._began)
            if self._ended.wait(_EVERY):
                return


def own_bytes() -> int:
    """Memory of this process in RAM that no file is behind."""
    try:
        lines = (line.split() for line in _STATUS.read_text().splitlines())
        kinds = {words[0]: int(words[1]) << 10 for words in lines if words[0] in ("RssAnon:", "RssShmem:")}
        return sum(kinds.values())
    except OSError:  # not Linux
        return int(psutil.Process().memory_info().rss)


def describe_load(coordinator: Coordinator, assembly: Assembly, grown: int) -> Iterator[str]:
    """What the ranks took while the model loaded in parts, and a warning where one other than the first took more than
    that asks for. Every rank must go through this. Nothing where the model is not loaded in parts."""
    config = assembly.config
    is_promised = assembly.is_in_parts and config.model.load_pretrained_weights and not needs_whole_model(config)
    if coordinator.ranks.world == 1 or not is_promised:
        return
    own, model = _own_part(assembly), whole_bytes(assembly)
    texts = coordinator.gathered("grown while loading", json.dumps([grown, own]))
    (first, _), *others = [json.loads(text) for text in texts]
    most = max(took for took, _ in others)
    yield (
        f"load      host memory of the first rank grew by {size(first)}, of others by {size(most)} at most; the model "
        f"is {size(model)}"
    )
    limit = int(SHARE * model) + SLACK_BYTES
    for rank, (took, part) in enumerate(others, 1):
        if took - part > limit:
            yield (
                f"warning   loading in parts: requested but not in effect. Host memory of rank {rank} grew by "
                f"{size(took)}, {size(limit + part)} were to suffice: together the ranks of a machine may need more "
                "than it has"
            )


def _own_part(assembly: Assembly) -> int:
    """What is on the host by right: the rank's own part where it stays there, and on the CPU a unit that is whole."""
    on_cpu = assembly.place.kind == "cpu"
    if not on_cpu and not assembly.config.fsdp.is_on_host:
        return 0
    parts = sum(part.numel() * part.element_size() for part in map(local_part, assembly.model.parameters()))
    return parts + (largest_unit_bytes(assembly) if on_cpu else 0)
