import pytest
import torch

from framework.build.data.batches import collate
from framework.errors import NonFinite
from framework.run.step import train_step
from tests.grids import thinned
from tests.tiny import GPT2, LLAMA, split, tiny_assembly, tiny_config, unequal_rows


def gradients(config, size):
    """Gradients of one step, taken where the step hands them to the optimizer, with its result."""
    assembly, seen = tiny_assembly(config), {}

    def observe(phase):
        if phase == "optimizer_step":
            seen.update({name: p.grad.clone() for name, p in assembly.model.named_parameters() if p.grad is not None})

    result = train_step(assembly, split(unequal_rows(), size), 1, observe)
    return seen, result


@pytest.mark.parametrize("architecture", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("size", [4, 2, 1])
def test_loss_and_gradients_do_not_depend_on_the_split(architecture, size):
    """Rows with very different label counts, 1x8 against 2x4, 4x2 and 8x1."""
    config = tiny_config(architecture)
    whole, reference = gradients(config, 8)
    parts, result = gradients(config, size)
    assert result.loss == pytest.approx(reference.loss, rel=1e-6)
    assert result.grad_norm == pytest.approx(reference.grad_norm, rel=1e-5)
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-5, atol=1e-7)


def test_the_mean_of_micro_batch_means_would_have_been_wrong():
    """The test above can fail: averaging per micro-batch gives another loss on these rows."""
    assembly = tiny_assembly(tiny_config())
    means = [train_step(tiny_assembly(tiny_config()), [part], 1).loss for part in split(unequal_rows(), 1)]
    whole = train_step(assembly, [unequal_rows()], 1).loss
    assert abs(sum(means) / len(means) - whole) > 1e-4


@pytest.mark.parametrize("chunk", [None, True, 5, 10_000])
@pytest.mark.parametrize("architecture", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_chunked_loss_is_exact(architecture, chunk):
    full, reference = gradients(tiny_config(architecture, model={"chunked_loss": False}), 4)
    chunked, result = gradients(tiny_config(architecture, model={"chunked_loss": chunk}), 4)
    assert result.loss == pytest.approx(reference.loss, rel=1e-6)
    for name, gradient in full.items():
        torch.testing.assert_close(chunked[name], gradient, rtol=1e-5, atol=1e-7)


def test_gradient_checkpointing_is_exact():
    plain, reference = gradients(tiny_config(), 4)
    checkpointed, result = gradients(tiny_config(training={"enable_gradient_checkpointing": True}), 4)
    assert result.loss == reference.loss
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, rtol=0, atol=0)


def test_clipping_limits_the_update_and_reports_the_norm_before_it():
    _, loose = gradients(tiny_config(training={"max_grad_norm": 0}), 8)
    seen, tight = gradients(tiny_config(training={"max_grad_norm": 1e-3}), 8)
    assert tight.grad_norm == pytest.approx(loose.grad_norm, rel=1e-5)
    assert seen  # taken before clipping
    config = tiny_config(training={"optimizer": "sgd", "max_grad_norm": 1e-3, "learning_rate": 1.0})
    assembly = tiny_assembly(config)
    before = [p.detach().clone() for p in assembly.trained]
    train_step(assembly, [unequal_rows()], 1)
    moved = torch.stack([(p.detach() - q).norm() for p, q in zip(assembly.trained, before, strict=True)]).norm()
    assert float(moved) == pytest.approx(1e-3, rel=1e-2)


def test_phases_are_observed_in_order():
    phases: list[str] = []
    train_step(tiny_assembly(tiny_config()), split(unequal_rows(), 4), 1, phases.append)
    one = ["forward", "loss", "backward"]
    assert phases == [*one, *one, "optimizer_step", "end"]


def test_no_step_goes_through_the_whole_model_for_its_parameters(monkeypatch):
    assembly, walks = tiny_assembly(tiny_config()), []
    train_step(assembly, split(unequal_rows(), 4), 1)
    monkeypatch.setattr(type(assembly.model), "named_modules", lambda *_, **__: walks.append(1) or iter(()))
    train_step(assembly, split(unequal_rows(), 4), 2)
    assert not walks


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_non_finite_step_leaves_the_weights_alone(what):
    """The run stops at the first non-finite loss or gradient, and nothing has changed."""
    assembly = tiny_assembly(tiny_config())
    name, victim = next((n, p) for n, p in assembly.model.named_parameters() if "q_proj" in n)
    if what == "loss":
        victim.data[0, 0] = float("nan")
    else:
        victim.register_hook(lambda gradient: gradient * float("inf"))
    before = {n: p.detach().clone() for n, p in assembly.model.named_parameters()}
    with pytest.raises(NonFinite, match=r"step 3.*supervised tokens.*float32") as caught:
        train_step(assembly, [unequal_rows()], 3)
    if what == "gradient":
        assert name in str(caught.value)
    for n, p in assembly.model.named_parameters():
        assert torch.equal(p.detach().nan_to_num(), before[n].nan_to_num())


@pytest.mark.parametrize(
    ("precision", "optimizer"),
    thinned(
        [("float32", "none"), ("float32", "bf16"), ("float32", "fp16"), ("bfloat16", "none")],
        ["adamw_torch", "adamw_torch_fused", "sgd", "adafactor"],
    ),
)
def test_every_precision_and_optimizer_learns(precision, optimizer):
    dtype, autocast = precision
    rate = {"sgd": 0.5, "adafactor": 1e-2}.get(optimizer, 1e-2)
    config = tiny_config(
        model={"torch_dtype_str": dtype},
        training={"mixed_precision_dtype": autocast, "optimizer": optimizer, "learning_rate": rate},
    )
    assembly = tiny_assembly(config, steps=20)
    losses = [train_step(assembly, [unequal_rows()], step).loss for step in range(1, 21)]
    assert losses[-1] < losses[0] - 0.3
    assert {p.dtype for p in assembly.trained} == {getattr(torch, dtype)}


@pytest.mark.parametrize(
    ("attention", "dtype", "architecture"),
    thinned(["sdpa", "eager"], ["float32", "bfloat16", "fp16"], {"llama": LLAMA, "gpt2": GPT2}),
)
def test_padding_changes_nothing(architecture, dtype, attention):
    """Rows of 3 and 12 tokens in one padded batch, compared with each row by itself; everything finite."""
    config = tiny_config(
        architecture,
        model={"torch_dtype_str": "float32" if dtype == "fp16" else dtype, "attn_implementation": attention},
        training={"mixed_precision_dtype": "fp16" if dtype == "fp16" else "none"},
    )
    tokens = unequal_rows(2, 12)["input_ids"]
    short, long = [{"input_ids": row, "labels": row.clone()} for row in (tokens[:1, :3], tokens[1:])]
    padded = collate([{name: t[0].tolist() for name, t in row.items()} for row in (short, long)], pad_token_id=0)
    assert padded["attention_mask"].sum() == 15

    def run(batches):
        assembly, seen = tiny_assembly(config), {}

        def observe(phase):
            if phase == "optimizer_step":
                scale = assembly.loss_scale.scaler.get_scale()
                seen.update({name: p.grad.float() / scale for name, p in assembly.model.named_parameters()})

        return train_step(assembly, batches, 1, observe).loss, seen

    loss, gradients = run([padded])
    expected, reference = run([short, long])
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    assert loss == pytest.approx(expected, rel=tolerance)
    for name, gradient in reference.items():
        assert torch.isfinite(gradients[name]).all()
        torch.testing.assert_close(gradients[name], gradient, rtol=tolerance, atol=tolerance * 0.1)
