"""An objective and an optimizer of a program's own: they train, are verified and recorded, and the plan says so."""

import json
from dataclasses import replace

import pytest
import torch

from framework.build.from_python import FromPython
from framework.errors import RequestError, VerificationFailed
from framework.memory.ledger import Plan
from tests.reports.plans import PLAN
from tests.run.test_trainer import config, corpus, metrics, train  # noqa: F401


class Halved:
    """Half of the task's own loss, which trains at half the gradient."""

    def __init__(self, own):
        self.own, self.unit, self.terms = own, own.unit, own.terms
        self.sums, self.metrics = own.sums, own.metrics

    def __call__(self, model, batch, observe):
        return 0.5 * self.own(model, batch, observe)


class Grouped(torch.optim.SGD):
    """Keeps a number in its groups, as Prodigy does."""

    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["momentum"] = 0.5


def test_an_objective_is_what_is_trained(corpus, tmp_path):  # noqa: F811
    steps = {"max_steps": 3, "optimizer": "sgd", "max_grad_norm": 0.0}
    train(config(corpus, tmp_path / "own", training=steps))
    train(config(corpus, tmp_path / "half", training=steps), from_python=FromPython(objective=Halved))
    own, half = (metrics(tmp_path / name)[1] for name in ("own", "half"))
    assert half == pytest.approx(0.5 * own, rel=1e-6)
    norms = [metrics(tmp_path / name, "grad_norm")[1] for name in ("own", "half")]
    assert norms[1] == pytest.approx(0.5 * norms[0], rel=1e-5)
    document = json.loads((tmp_path / "half" / "environment.json").read_text())
    assert document["objective"] == "tests.run.test_from_python.Halved"


def test_an_optimizer_of_torch_trains_as_the_built_in_one_and_resumes(corpus, tmp_path):  # noqa: F811
    steps = {"max_steps": 6, "save_steps": 3}
    train(config(corpus, tmp_path / "own", training=steps))
    given = FromPython(optimizer=torch.optim.AdamW)
    made = config(corpus, tmp_path / "given", training=steps)
    train(made, from_python=given)
    assert metrics(tmp_path / "given") == pytest.approx(metrics(tmp_path / "own"), rel=1e-5)
    longer = config(corpus, tmp_path / "given", training={**steps, "max_steps": 6, "save_total_limit": 3})
    for other, message in ((FromPython(), "not given"), (FromPython(optimizer=torch.optim.RAdam), "RAdam")):
        with pytest.raises(RequestError, match="another run's") as raised:
            train(longer, resume=True, from_python=other)
        assert message in str(raised.value)
    train(longer, resume=True, from_python=given)


def test_an_optimizer_whose_groups_change_is_refused_before_anything_is_saved(corpus, tmp_path):  # noqa: F811
    with pytest.raises(VerificationFailed, match="in its groups: momentum"):
        train(config(corpus, tmp_path / "run"), from_python=FromPython(optimizer=Grouped))
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


def test_an_optimizer_without_some_of_the_weights_is_refused(corpus, tmp_path):  # noqa: F811
    def half(groups):
        return torch.optim.AdamW(groups[:1])

    with pytest.raises(VerificationFailed, match=r"without [0-9]+ of the trained tensors"):
        train(config(corpus, tmp_path / "run"), from_python=FromPython(optimizer=half))


def test_the_plan_says_what_it_does_not_know(corpus, tmp_path, capsys):  # noqa: F811
    from_python = FromPython(Halved, torch.optim.RAdam)
    made = config(corpus, tmp_path / "run", training={"max_steps": 1})
    train(made, quiet=False, planner=lambda _: PLAN, from_python=from_python)
    kept = Plan.from_json(json.loads((tmp_path / "run" / "plan.json").read_text()))
    messages = tuple(from_python.notes(made))
    assert kept == replace(PLAN, warnings=(*PLAN.warnings, *messages))
    assert "training.optimizer=adamw_torch instead, which is not used" in messages[1]
    output = " ".join(capsys.readouterr().err.split())
    assert all(line in output for line in messages)


@pytest.mark.parametrize(
    ("changes", "given", "key"),
    [
        ({"training": {"optimizer_in_backward": True}}, FromPython(None, torch.optim.SGD), "optimizer_in_backward"),
        ({"training": {"optimizer_offload": "host"}}, FromPython(None, torch.optim.SGD), "optimizer_offload"),
        ({"model": {"chunked_loss": True}}, FromPython(Halved), "chunked_loss"),
        ({"training": {"task": "preference"}}, FromPython(Halved), "training.task"),
    ],
)
def test_an_option_that_would_have_no_effect_is_refused(corpus, tmp_path, changes, given, key):  # noqa: F811
    with pytest.raises(RequestError, match=key):
        train(config(corpus, tmp_path / "run", **changes), from_python=given)
    with pytest.raises(RequestError, match=r"a torch\.optim\.Optimizer"):
        train(config(corpus, tmp_path / "run"), from_python=FromPython(optimizer=list))
