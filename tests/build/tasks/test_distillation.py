"""A teacher's next tokens against formulas in float64, whole logits against chunks, and one split against another."""

import pytest
import torch

from framework.build.resolve_model import settle
from framework.errors import RequestError
from framework.run.evaluate import evaluate
from framework.run.step import train_step
from tests.grids import thinned
from tests.tiny import GPT2, LLAMA, split, tiny_assembly, tiny_config, unequal_rows

WIDE = {**LLAMA, "hidden_size": 48, "num_hidden_layers": 3}
KINDS = ("forward_kl", "reverse_kl", "jsd")


def config(chunk=False, teacher=None, architecture=LLAMA, **distillation):
    teacher = {"architecture": WIDE, "load_pretrained_weights": False, **(teacher or {})}
    training = {"task": "distillation", "teacher": teacher, "distillation": distillation, "learning_rate": 1e-2}
    return tiny_config(architecture, training=training, model={"chunked_loss": chunk})


def sharp(assembly):
    """The teacher with an opinion: random heads hardly prefer any token."""
    with torch.no_grad():
        assembly.frozen_model.get_output_embeddings().weight.mul_(30)
    return assembly


def expected(assembly, batch, kind, temperature, alpha):
    with torch.no_grad():
        q, p = (
            (m(input_ids=batch["input_ids"]).logits[:, :-1].double()) for m in (assembly.model, assembly.frozen_model)
        )
    labels = batch["labels"][:, 1:]
    label_losses = -q.log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    q, p = (q / temperature).softmax(-1), (p / temperature).softmax(-1)
    kl = lambda a, b: (a * (a / b).log()).sum(-1)  # noqa: E731
    found = {"forward_kl": kl(p, q), "reverse_kl": kl(q, p), "jsd": (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2}[kind]
    losses = alpha * temperature**2 * found + (1 - alpha) * label_losses
    return float(losses[labels != -100].mean())


@pytest.mark.parametrize(("chunk", "kind"), thinned([False, 7], KINDS))
def test_the_loss_is_the_published_one(kind, chunk):
    assembly, batch = sharp(tiny_assembly(config(chunk, divergence=kind, temperature=1.7, alpha=0.3))), unequal_rows()
    wanted = expected(assembly, batch, kind, 1.7, 0.3)
    assert train_step(assembly, [batch], 1).loss == pytest.approx(wanted, rel=1e-5)


RULES = {"alone": {}} | {str(kind): {"divergence": kind, "temperature": 1.7, "alpha": 0.6} for kind in KINDS}


def gradients(asked, batches):
    assembly, seen = sharp(tiny_assembly(asked)), {}

    def observe(phase):
        if phase == "optimizer_step":
            seen.update({name: p.grad.clone() for name, p in assembly.model.named_parameters()})

    return train_step(assembly, batches, 1, observe), seen, evaluate(assembly, batches, lambda _: None)


@pytest.mark.parametrize(("rule", "architecture"), thinned(RULES, {"llama": LLAMA, "gpt2": GPT2}))
def test_neither_chunks_nor_split_change_anything(architecture, rule):
    batch = unequal_rows()
    whole, reference, expected = gradients(config(architecture=architecture, **rule), [batch])
    for chunk, batches in ((5, [batch]), (False, split(batch, 1)), (10_000, split(batch, 2))):
        result, seen, told_too = gradients(config(chunk, architecture=architecture, **rule), batches)
        assert result.loss == pytest.approx(whole.loss, rel=1e-5)
        assert told_too == pytest.approx(expected, rel=1e-5)
        for name, gradient in reference.items():
            torch.testing.assert_close(seen[name], gradient, rtol=1e-4, atol=1e-6)


def test_the_student_comes_to_say_what_the_teacher_says_and_the_teacher_stays():
    assembly, batch = sharp(tiny_assembly(config(16, alpha=1.0), steps=30)), unequal_rows()
    before = [parameter.clone() for parameter in assembly.frozen_model.parameters()]
    first = evaluate(assembly, [batch], lambda _: None)
    for step in range(1, 31):
        train_step(assembly, [batch], step)
    last = evaluate(assembly, [batch], lambda _: None)
    assert last["divergence"] < 0.5 * first["divergence"]
    assert all(map(torch.equal, assembly.frozen_model.parameters(), before))
    assert not any(parameter.requires_grad for parameter in assembly.frozen_model.parameters())
    assert not assembly.frozen_model.training


def test_half_precision_chunks_are_near_whole_logits():
    batch = unequal_rows()
    losses = []
    for chunk in (False, 7):
        asked = config(chunk).model_copy()
        training = asked.training.model_copy(update={"mixed_precision_dtype": "bf16"})
        losses.append(train_step(tiny_assembly(asked.model_copy(update={"training": training})), [batch], 1).loss)
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


@pytest.mark.parametrize(
    ("teacher", "key", "arguments"),
    [
        ({"architecture": {**WIDE, "vocab_size": 130}}, "training.teacher.model_name", "130 tokens in its vocabulary"),
        ({"architecture": {**WIDE, "max_position_embeddings": 16}}, "model.model_max_length", "teacher's 16 positions"),
        ({"architecture": {**WIDE, "hiden_size": 3}}, "training.teacher.architecture.hiden_size", "is not a key"),
        ({"architecture": {"model_type": "bert"}}, "training.teacher.architecture.is_decoder", "bidirectional"),
    ],
)
def test_a_teacher_of_another_kind_is_refused(teacher, key, arguments):
    with pytest.raises(RequestError, match=arguments) as caught:
        settle(config(teacher=teacher))
    assert caught.value.problems[0].key == key


def test_a_teacher_whose_logits_chunks_cannot_repeat_is_refused():
    capped = {**WIDE, "model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 3.0}
    with pytest.raises(RequestError, match=r"training\.teacher\.model_name.*after the head"):
        tiny_assembly(config(True, teacher={"architecture": capped}))
    assert tiny_assembly(config(False, teacher={"architecture": capped})).frozen_model is not None
