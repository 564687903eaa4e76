"""The phase of a failure, recognized by its stack."""

from pathlib import Path

import pytest
import yaml

from framework.memory.explain import explain_evidence
from framework.memory.explain.evidence import Evidence

END = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity of 8.00 GiB"
LIB = "/env/lib/python3.12/site-packages"
STACKS = yaml.safe_load(Path(__file__).with_name("stacks.yaml").read_text())


def stack(*frames: tuple[str, str, str]) -> str:
    calls = "".join(f'  File "{file}", line 1, in {function}\n    {code}\n' for file, function, code in frames)
    return f"Traceback (most recent call last):\n{calls}{END}\n"


TRAIN = ("train.py", "main", "trainer.train()")
BACKWARD = (f"{LIB}/torch/_tensor.py", "backward", "torch.autograd.backward(self, gradient)")


@pytest.mark.parametrize("case", STACKS["frames"], ids=lambda case: str(case["phase"]))
def test_the_innermost_telling_frame_decides(case):
    calls = [tuple(part.replace("$LIB", LIB) for part in call) for call in case["calls"]]
    assert explain_evidence(Evidence(stack(*calls))).phase == case["phase"]


def test_the_first_optimizer_step_is_recognized_by_the_states_it_makes():
    first = stack(TRAIN, (f"{LIB}/torch/optim/adam.py", "_init_group", 'state["exp_avg"] = torch.zeros_like(p)'))
    later = stack(TRAIN, (f"{LIB}/torch/optim/adam.py", "_fused_adam", "torch._fused_adamw_(params)"))
    assert [explain_evidence(Evidence(text)).is_first_step for text in (first, later)] == [True, False]


def test_only_the_stack_of_the_rank_that_reported_counts():
    own = [f"[rank1]: {line}" for line in stack(TRAIN, BACKWARD).splitlines()]
    other = [f"[rank0]: {line}" for line in stack(TRAIN, ("s.py", "f", "optimizer.step()")).splitlines()[:-1]]
    mixed = [line for pair in zip(own, [*other, ""], strict=False) for line in pair]
    assert explain_evidence(Evidence("\n".join(mixed))).phase == "backward"


def test_an_earlier_traceback_is_not_taken_for_the_stack():
    earlier = stack(TRAIN, ("s.py", "f", "optimizer.step()")).replace(END, "ValueError: caught")
    assert explain_evidence(Evidence(earlier + stack(TRAIN, BACKWARD))).phase == "backward"


@pytest.mark.parametrize("case", STACKS["texts"], ids=lambda case: case["name"])
def test_other_ways_to_print_a_stack(case):
    assert explain_evidence(Evidence(case["text"].replace("$END", END))).phase == case["phase"]
