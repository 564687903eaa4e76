"""`model`: which network, in which numbers, with which kernels."""

from typing import Annotated

from pydantic import Field

from framework.schema.architecture import RopeScaling
from framework.schema.choices import Attention, SdpaBackend, TorchDtype
from framework.schema.facts import NO_MEMORY, UsedUnless, UsedWith
from framework.schema.params import Auto, FrozenMapping, Integer, Params, Strings
from framework.schema.training import Count, Positive
from framework.schema.urls import NoURL

_TRAINED = UsedWith(
    "training.use_peft",
    (False,),
    "an adapter leaves the whole model frozen; peft.lora_target_modules says where it is",
)

_PRETRAINED = UsedWith(
    "model.load_pretrained_weights",
    because="random weights have no rows to start new ones from: model.architecture.vocab_size is their number",
    refused=True,
)


class TokenizerTraining(Params):
    """A tokenizer built on the training text instead of a downloaded one."""

    train: Annotated[str, Field(pattern="^bpe$")] = "bpe"
    """The algorithm; byte-level BPE is the one there is."""
    vocab_size: Annotated[Integer, Field(ge=300)] = 4096
    """Tokens in the vocabulary. Embeddings, and the logits of every position, grow in proportion."""


class ModelParams(Params):
    """Which model to train."""

    model_name: NoURL | None = None
    """Hub id or local folder. With `architecture` next to it, planning needs no network."""
    architecture: FrozenMapping | None = None
    """A Hugging Face config written out: `{model_type: llama, hidden_size: 2048, ...}`."""
    load_pretrained_weights: bool = True
    """false: start from random weights of `architecture`."""
    torch_dtype_str: TorchDtype | None = None
    """dtype the weights are held in: 4 bytes a weight in float32, 2 in bfloat16. Unset: float32 when the weights are
    trained (small updates would round away in bfloat16), the checkpoint's when they are frozen."""
    attn_implementation: Attention | Auto | None = None
    """Attention kernel. `eager` keeps sequence x sequence scores per head; the others do not. Unset: `sdpa` where the
    model supports it, else `eager`."""
    sdpa_backend: SdpaBackend | None = None
    """The kernel that `sdpa` must take: `cudnn`, `flash`, `efficient` or `math`, which keeps sequence x sequence scores
    per head. Unset: torch's choice for the card. One that cannot serve the model is an error."""
    enable_liger_kernel: bool = False
    """Liger's fused kernels for norms, MLPs and rotary positions: fewer activations and launches. Needs a GPU and the
    packages liger-kernel and triton. The loss that never builds the logits is `chunked_loss`, on or off next to it."""
    chunked_loss: bool | Auto | Positive | None = None
    """Compute head and loss over this many tokens at a time (true: 1024), so that the logits never exist in full.
    Takes a chunk of logits in place of all, in float32 with their gradient: 11 GiB less for 8,192 tokens of 128,256
    words. Unset: true where the model's head is known to be one linear layer whose output is the logits, and false in
    distillation."""
    model_max_length: Positive | Auto | None = None
    """Longest row in tokens. Activations grow in proportion. Unset: the smaller of 2048 and the model's positions."""
    rope_scaling: RopeScaling | None = None
    """Stretch rotary positions for rows longer than the model was trained on: `{rope_type: yarn, factor: 4}`."""
    offload_frozen_base: bool | Auto = False
    """Keep the blocks' frozen weights in host memory (pinned on a GPU) and two blocks of them at a time on the device,
    so that a model larger than the card can be adapted. Costs host memory and one copy of the blocks over the link in
    forward and one in backward. Needs `training.use_peft`."""
    freeze_layers: Annotated[Strings, _TRAINED] = ()
    """Modules that are not trained, by name or glob (`layers.1` is not `layers.10`); `embeddings` means all of them.
    Saves their gradients and states."""
    freeze_router: Annotated[bool, _TRAINED] = False
    """The routers of a mixture of experts are not trained, so that tokens keep going where they went. Saves their
    gradients and states."""
    freeze_first_blocks: Annotated[Count, _TRAINED] = 0
    """The first n transformer blocks are not trained. With `freeze_layers: [embeddings]` next to it they keep no
    activations either."""
    tokenizer_name: Annotated[NoURL | None, NO_MEMORY] = None
    """Hub id or folder of the tokenizer. Unset: the model's."""
    tokenizer: Annotated[TokenizerTraining | None, NO_MEMORY] = None
    """Build a tokenizer on the training text: `{train: bpe, vocab_size: 4096}`."""
    added_tokens: Annotated[Strings, _PRETRAINED] = ()
    """Tokens that are added to the tokenizer, one id each. Their rows of the embedding, and of a head of its own, start
    as the mean of the tokens that spelled them, in rows to spare or in new ones: hidden size x dtype bytes each, with
    gradients and states where they are trained."""
    resize_embeddings: Annotated[bool | Positive, _PRETRAINED] = False
    """Give embedding and head as many rows as the tokenizer has tokens where it has more; a number: rounded up to a
    multiple of it. What new rows cost is said at `added_tokens`, for which it is done anyway."""
    chat_template: Annotated[str | None, NO_MEMORY] = None
    """Jinja template of a chat: `alpaca`, `chatml`, `gemma`, `llama3`, `mistral`, `phi3`, `plain`, `vicuna` or
    `zephyr`, a path to a file, or its text. Saved with the tokenizer. Unset: the tokenizer's own."""
    trust_remote_code: Annotated[bool, NO_MEMORY] = False
    """Run Python code that comes with the model, said with its revision. Only for models you would also install as a
    program. Counts in a recipe and on the command line: where a run's config says it, the command line repeats it."""
    model_revision: Annotated[str | None, NO_MEMORY, UsedUnless("model.model_name", (None,))] = None
    """Branch, tag or commit of a hub model."""
