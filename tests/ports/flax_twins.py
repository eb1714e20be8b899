"""Models of transformers, each as a torch and as a Flax module of one tiny configuration with random weights."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import torch
import transformers as hf

from unified_ddp.equivalence import JaxSide, Pair, TorchSide

ROWS, LENGTH, WORDS, LABELS, PIXELS = 4, 6, 30, 5, 8
ENCODER = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
TEXT = {"vocab_size": WORDS, "max_position_embeddings": LENGTH + 4}
CONVOLUTIONS = {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 2], "num_labels": LABELS}
LEARNING_RATE = 1e-2


def torch_loss(model: torch.nn.Module, batch: Any) -> Any:
    logits = model(**_inputs(batch)).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten()), logits


def flax_loss(module: Any, **more: Any) -> Callable[..., Any]:
    def loss_fn(params: Any, batch: Any) -> Any:
        logits = _in_dtype_of(params, module).apply({"params": params}, **_inputs(batch), **more).logits
        return _cross_entropy(logits, batch), logits

    return loss_fn


def flax_loss_with_buffers(module: Any, *, train: bool) -> Callable[..., Any]:
    def loss_fn(params: Any, batch: Any, buffers: Any) -> Any:
        variables = {"params": params, "batch_stats": buffers}
        twin = _in_dtype_of(params, module)
        found, changed = twin.apply(variables, **_inputs(batch), deterministic=not train, mutable=["batch_stats"])
        return _cross_entropy(found.logits, batch), changed["batch_stats"], found.logits

    return loss_fn


def _inputs(batch: Any) -> Any:
    return {key: value for key, value in batch.items() if key != "labels"}


def _in_dtype_of(params: Any, module: Any) -> Any:
    """The Flax classes compute in the dtype they are told, float32 by default, whatever that of their parameters."""
    return module.clone(dtype=jax.tree.leaves(params)[0].dtype)


def _cross_entropy(logits: Any, batch: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def adamw(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, weight_decay=0.1)


def text(*, segments: bool = False, labels: tuple[int, ...] = (), classes: int = LABELS) -> Any:
    """Tokens, the last ones of one row padding."""
    random = np.random.default_rng(0)
    mask = np.ones((ROWS, LENGTH), np.int64)
    mask[1, -2:] = 0
    batch = {
        "input_ids": random.integers(2, WORDS, (ROWS, LENGTH)),
        "attention_mask": mask,
        "position_ids": np.tile(np.arange(LENGTH), (ROWS, 1)),
        "labels": random.integers(0, classes, (ROWS, *labels)),
    }
    return {**batch, "token_type_ids": random.integers(0, 2, (ROWS, LENGTH))} if segments else batch


def next_words(*, segments: bool = False) -> Any:
    return text(segments=segments, labels=(LENGTH,), classes=WORDS)


def images() -> Any:
    random = np.random.default_rng(0)
    pixels = random.normal(size=(ROWS, 3, PIXELS, PIXELS)).astype(np.float32)
    return {"pixel_values": pixels, "labels": random.integers(0, LABELS, ROWS)}


def zeros_for(flax: Any) -> Any:
    """Weights of the Flax side before the torch side's are carried over: none of its own may help it."""
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), flax.params_shape_tree)


def text_pair(torch_type: Any, flax_type: Any, config: Any, batch: Any) -> Pair:
    torch.manual_seed(0)
    flax = flax_type(config, input_shape=(1, LENGTH), _do_init=False)
    more = {"head_mask": None} if "token_type_ids" in batch else {}
    return Pair(
        TorchSide(torch_type(config).eval(), torch_loss, adamw),
        JaxSide(zeros_for(flax), flax_loss(flax.module, **more), optax.adamw(LEARNING_RATE, weight_decay=0.1)),
        [batch],
    )


def image_pair(torch_type: Any, flax_type: Any, config: Any, *, train: bool) -> Pair:
    torch.manual_seed(0)
    model = torch_type(config).train(train)
    flax = flax_type(config, input_shape=(1, PIXELS, PIXELS, 3), _do_init=False)
    variables = zeros_for(flax)
    if "batch_stats" in variables:
        loss = flax_loss_with_buffers(flax.module, train=train)
        side = JaxSide(variables["params"], loss, buffers=variables["batch_stats"])
    else:
        side = JaxSide(variables, flax_loss(flax.module))
    return Pair(TorchSide(model, torch_loss), side, [images()], layout={"pixel_values": "NCHW -> NHWC"})


def bert() -> Pair:
    config = hf.BertConfig(**ENCODER, **TEXT, num_labels=LABELS)
    kinds = hf.BertForSequenceClassification, hf.FlaxBertForSequenceClassification
    return text_pair(*kinds, config, text(segments=True))


def bert_masked() -> Pair:
    config = hf.BertConfig(**ENCODER, **TEXT)
    return text_pair(hf.BertForMaskedLM, hf.FlaxBertForMaskedLM, config, next_words(segments=True))


def gpt2() -> Pair:
    sizes = {"vocab_size": WORDS, "n_positions": LENGTH + 4, "n_embd": 8, "n_layer": 2, "n_head": 2}
    config = hf.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return text_pair(hf.GPT2LMHeadModel, hf.FlaxGPT2LMHeadModel, config, next_words())


def gpt_neo() -> Pair:
    sizes = {"hidden_size": 8, "num_layers": 2, "num_heads": 2, "intermediate_size": 12, "window_size": 4}
    dropouts = {"resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0}
    config = hf.GPTNeoConfig(**TEXT, **sizes, **dropouts, attention_types=[[["global", "local"], 1]])
    return text_pair(hf.GPTNeoForCausalLM, hf.FlaxGPTNeoForCausalLM, config, next_words())


def llama() -> Pair:
    sizes = {key: value for key, value in ENCODER.items() if "dropout" not in key}
    config = hf.LlamaConfig(**TEXT, **sizes, num_key_value_heads=1)
    return text_pair(hf.LlamaForCausalLM, hf.FlaxLlamaForCausalLM, config, next_words())


def vit() -> Pair:
    config = hf.ViTConfig(**ENCODER, image_size=PIXELS, patch_size=4, num_labels=LABELS)
    return image_pair(hf.ViTForImageClassification, hf.FlaxViTForImageClassification, config, train=False)


def regnet(*, train: bool = False) -> Pair:
    config = hf.RegNetConfig(**CONVOLUTIONS, groups_width=4, layer_type="y")
    return image_pair(hf.RegNetForImageClassification, hf.FlaxRegNetForImageClassification, config, train=train)


def resnet(*, train: bool = False) -> Pair:
    config = hf.ResNetConfig(**CONVOLUTIONS)
    return image_pair(hf.ResNetForImageClassification, hf.FlaxResNetForImageClassification, config, train=train)
