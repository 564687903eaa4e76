"""`model`: the network, its dtype, kernels and tokenizer."""

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
    "an adapter leaves the whole model frozen; peft.lora_target_modules selects its modules",
)

_PRETRAINED = UsedWith(
    "model.load_pretrained_weights",
    because="random weights have no rows to initialize new ones from: set model.architecture.vocab_size",
    refused=True,
)


class TokenizerTraining(Params):
    """A tokenizer trained on the training text instead of a downloaded one."""

    train: Annotated[str, Field(pattern="^bpe$")] = "bpe"
    """The algorithm; only byte-level BPE is available."""
    vocab_size: Annotated[Integer, Field(ge=300)] = 4096
    """Tokens in the vocabulary. Embeddings, and the logits of every position, grow in proportion."""


class ModelParams(Params):
    """Which model to train."""

    model_name: NoURL | None = None
    """Hub id or local folder. If `architecture` is also set, planning needs no network."""
    architecture: FrozenMapping | None = None
    """A Hugging Face config written out: `{model_type: llama, hidden_size: 2048, ...}`."""
    load_pretrained_weights: bool = True
    """false: random initial weights of `architecture`."""
    torch_dtype_str: TorchDtype | None = None
    """dtype of the weights: 4 bytes a weight in float32, 2 in bfloat16. Unset: float32 if the weights are trained
    (small updates would round away in bfloat16), the checkpoint's dtype if they are frozen."""
    attn_implementation: Attention | Auto | None = None
    """Attention kernel. `eager` keeps sequence x sequence scores per head; the others do not. Unset: `sdpa` if the
    model supports it, else `eager`."""
    sdpa_backend: SdpaBackend | None = None
    """The kernel that `sdpa` must use: `cudnn`, `flash`, `efficient` or `math`, which keeps sequence x sequence scores
    per head. Unset: torch's choice for the card. A kernel that does not support the model is an error."""
    enable_liger_kernel: bool = False
    """Liger's fused kernels for norms, MLPs and rotary positions: fewer activations and launches. Needs a GPU and the
    packages liger-kernel and triton. It does not include the loss: see `chunked_loss`."""
    chunked_loss: bool | Auto | Positive | None = None
    """Compute head and loss over this many tokens at a time (true: 1024), so that the full logits never exist. Takes
    one chunk of logits instead of all of them in float32 with their gradient: 11 GiB less for 8,192 tokens with a
    vocabulary of 128,256. Unset: true if the model's head is known to be one linear layer whose output is the logits;
    false in distillation."""
    model_max_length: Positive | Auto | None = None
    """Maximum tokens of a row. Activations grow in proportion. Unset: the smaller of 2048 and the model's positions."""
    rope_scaling: RopeScaling | None = None
    """Scale rotary positions for rows longer than the model was trained on: `{rope_type: yarn, factor: 4}`."""
    offload_frozen_base: bool | Auto = False
    """Keep the blocks' frozen weights in host memory (pinned on a GPU), with two blocks at a time on the device, so
    that an adapter can be trained on a model larger than the card. Costs host memory and one copy of the blocks over
    the link in forward and one in backward. Needs `training.use_peft`."""
    freeze_layers: Annotated[Strings, _TRAINED] = ()
    """Modules to freeze, by name or glob (`layers.1` is not `layers.10`); `embeddings` matches all embeddings. Saves
    their gradients and states."""
    freeze_router: Annotated[bool, _TRAINED] = False
    """Freeze the routers of a mixture of experts, so that the routing of tokens stays. Saves their gradients and
    states."""
    freeze_first_blocks: Annotated[Count, _TRAINED] = 0
    """Freeze the first n transformer blocks. With `freeze_layers: [embeddings]` in addition they keep no activations
    either."""
    tokenizer_name: Annotated[NoURL | None, NO_MEMORY] = None
    """Hub id or folder of the tokenizer. Unset: the model's."""
    tokenizer: Annotated[TokenizerTraining | None, NO_MEMORY] = None
    """Train a tokenizer on the training text: `{train: bpe, vocab_size: 4096}`."""
    added_tokens: Annotated[Strings, _PRETRAINED] = ()
    """Tokens to add to the tokenizer, one id each. Their rows of the embedding, and of an untied head, start as the
    mean of the tokens that they were split into, in unused rows or new ones: hidden size x dtype bytes each, with
    gradients and states if they are trained."""
    resize_embeddings: Annotated[bool | Positive, _PRETRAINED] = False
    """Grow embedding and head to the length of the tokenizer if it is longer; a number rounds up to a multiple of it.
    New rows cost as for `added_tokens`, which always grows them if needed."""
    chat_template: Annotated[str | None, NO_MEMORY] = None
    """Jinja template of a chat: `alpaca`, `chatml`, `gemma`, `llama3`, `mistral`, `phi3`, `plain`, `vicuna` or
    `zephyr`, a path to a file, or its text. Saved with the tokenizer. Unset: the tokenizer's own."""
    trust_remote_code: Annotated[bool, NO_MEMORY] = False
    """Run Python code that comes with the model; a warning names it and its revision. Only for models that you would
    also install as a program. Set it in a recipe or on the command line; for a run's own config the command line must
    repeat it."""
    model_revision: Annotated[str | None, NO_MEMORY, UsedUnless("model.model_name", (None,))] = None
    """Branch, tag or commit of a hub model."""
