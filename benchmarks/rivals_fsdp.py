"""Sharded training as others would write it: by hand in the style of torchtitan, and with transformers' Trainer.

Imports nothing of `framework`. Each function trains the causal model that an architecture (keys of a transformers
config) describes, from random float32 weights, computing in bfloat16, on `data`: int64 `[steps, ranks, rows, tokens]`
on the host. It calls `clock.start()` when everything is built and `clock.tick()` at the end of each step, and returns
the mean loss of all steps and ranks.
"""

import re
import tempfile
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

RATE = 1e-4


class Clock(Protocol):
    """Timer of the steps."""

    def start(self) -> None: ...

    def tick(self) -> None: ...


def by_hand(
    architecture: dict[str, Any], data: Tensor, device: torch.device, clock: Clock, is_compiled: bool = False
) -> float:
    """torchtitan's way: built on meta; units are the blocks, the embedding, and the head, which is not freed between
    forward and backward; checkpointing keeps no random state; nothing is read from the card before the end.
    `is_compiled`: each block with its checkpointing, before it is sharded."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture), dtype=torch.float32)
    _split(model, device, is_compiled)
    _give_values(model, device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    mean = torch.zeros((), device=device)
    clock.start()
    for rows in data[:, dist.get_rank()]:
        ids = rows.to(device)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        del logits
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        mean += loss.detach() / len(data)
        clock.tick()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def _split(model: nn.Module, device: torch.device, is_compiled: bool) -> None:
    """Checkpoint and shard each block, then the other modules, as torchtitan's `apply_fsdp` does."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    settings = {"mesh": init_device_mesh(device.type, (dist.get_world_size(),)), "mp_policy": policy}
    inner, head = model.model, model.lm_head
    for index, block in enumerate(inner.layers):
        wrapped = checkpoint_wrapper(block, preserve_rng_state=False)
        if is_compiled:
            wrapped.compile()
        inner.layers[index] = fully_shard(wrapped, **settings)
    tail = [inner.norm, head]
    if head.weight is inner.embed_tokens.weight:
        tail.append(inner.embed_tokens)  # a tied weight is in one unit
    else:
        fully_shard(inner.embed_tokens, **settings)
    fully_shard(tail, reshard_after_forward=False, **settings)
    fully_shard(model, **settings)


def _give_values(model: nn.Module, device: torch.device) -> None:
    """Draw random weights instead of loading a checkpoint; constants of positions are computed again."""
    model.to_empty(device=device)
    model.tie_weights()
    rotary = model.model.rotary_emb
    with torch.device(device):
        model.model.rotary_emb = type(rotary)(rotary.config)
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.ones_(parameter) if parameter.ndim == 1 else nn.init.normal_(parameter, std=0.02)


class _Watch(TrainerCallback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.clock.start()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.clock.tick()


def by_trainer(
    architecture: dict[str, Any], data: Tensor, device: torch.device, clock: Clock, trainers_checkpoints: bool = False
) -> float:
    """transformers' Trainer with accelerate's FSDP2. Blocks are checkpointed by accelerate, as the Trainer advises, or
    by `gradient_checkpointing`, which it warns about."""
    from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture), dtype=torch.float32)
    steps, _, micro, _ = data.shape
    rows = [{"input_ids": row, "labels": row} for row in data.flatten(0, 2)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=micro,
            max_steps=steps,
            learning_rate=RATE,
            bf16=True,
            optim="adamw_torch_fused",
            gradient_checkpointing=trainers_checkpoints,
            fsdp=True,
            fsdp_config={"version": 2, "activation_checkpointing": not trainers_checkpoints},
            train_sampling_strategy="sequential",  # so that each rank has the rows that it has elsewhere
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=device.type == "cpu",
        )
        if arguments.use_cpu:
            PartialState().distributed_type = DistributedType.MULTI_GPU  # accelerate shards on cards alone
        try:
            trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[_Watch(clock)])
            loss = float(trainer.train().training_loss)
            _verify(trainer.model)
            return loss
        finally:
            AcceleratorState._reset_state(True)
            GradientState._reset_state()


def _verify(model: nn.Module) -> None:
    """Check that each block is a unit and recomputed, and that shards are float32: the timed settings are the requested
    ones."""
    blocks = [module for name, module in model.named_modules() if re.fullmatch(r".*layers\.\d+", name)]
    units = sum(isinstance(block, FSDPModule) for block in blocks)
    wrapped = sum(isinstance(block, CheckpointWrapper) or block.gradient_checkpointing for block in blocks)
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if not (blocks and units == wrapped == len(blocks) and dtypes == {torch.float32}):
        raise RuntimeError(f"of {len(blocks)} blocks {units} are sharded, {wrapped} checkpointed; weights are {dtypes}")
