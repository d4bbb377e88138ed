"""The sizes of a model that decide what it asks of a device, from its published ``config.json``.

Biases and norms are left out (under 0.1 % of the parameters). A matrix's parameters are counted once however often the
model is sharded; who shards divides.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from libs.common.errors import ModelError

Dtype = Literal["bfloat16", "float32"]

BYTES: Mapping[Dtype, float] = {"bfloat16": 2.0, "float32": 4.0}
"""Of one number."""

_NOT_IN_KEY = ("name", "bytes_per_weight", "bytes_per_value")


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A decoder-only transformer with grouped-query attention and a gated MLP, dense or a mixture of experts.

    Attributes:
        hidden: width of the residual stream. intermediate: of the MLP, or of one expert.
        heads, kv_heads, head_dim: attention's. vocabulary: rows of the embedding.
        tied: whether the LM head is the embedding.
        experts: of each layer, 0 for a dense model. experts_per_token: of them that a token is sent to.
        adapter_share: parameters of the LoRA adapter as a share of the model's; 0 when the whole model is trained.
        bytes_per_weight: as the engine holds it. bytes_per_value: of activations and KV cache.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    experts: int = 0
    experts_per_token: int = 0
    adapter_share: float = 0.0
    bytes_per_weight: float = 2.0
    bytes_per_value: float = 2.0

    @cached_property
    def key(self) -> str:
        """Short digest of what decides how fast the model is, for a given dtype: the same for all that differ in weights."""
        sizes = {name: value for name, value in msgspec.structs.asdict(self).items() if name not in _NOT_IN_KEY}
        return hashlib.sha256(msgspec.json.encode(sizes, order="sorted")).hexdigest()[:12]

    @cached_property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @cached_property
    def kv_width(self) -> int:
        """Width of all key heads together; values have the same."""
        return self.kv_heads * self.head_dim

    @cached_property
    def expert_parameters(self) -> int:
        """Of one expert in one layer; of the MLP in a dense model."""
        return 3 * self.hidden * self.intermediate

    @cached_property
    def shared_parameters(self) -> int:
        """That every token uses in all layers, without embedding and head: attention, router, and a dense model's MLP."""
        attention = 2 * self.hidden * (self.query_width + self.kv_width)
        mlp = self.hidden * self.experts if self.experts else self.expert_parameters
        return self.layers * (attention + mlp)

    @cached_property
    def head_parameters(self) -> int:
        """Of the LM head."""
        return self.vocabulary * self.hidden

    @cached_property
    def body_parameters(self) -> int:
        """Of all layers, without embedding and head."""
        return self.shared_parameters + self.layers * self.experts * self.expert_parameters

    @cached_property
    def active_body_parameters(self) -> int:
        """That one token uses in all layers."""
        return self.shared_parameters + self.layers * self.experts_per_token * self.expert_parameters

    @cached_property
    def parameters(self) -> int:
        """Of the whole model, without an adapter."""
        return self.body_parameters + self.head_parameters * (1 if self.tied else 2)

    @cached_property
    def active_parameters(self) -> int:
        """As model cards count them: of the body those that one token uses, embedding and head whole."""
        return self.active_body_parameters + self.head_parameters * (1 if self.tied else 2)

    @cached_property
    def adapter_parameters(self) -> float:
        """Of the LoRA adapter."""
        return self.adapter_share * self.parameters

    @cached_property
    def trained_parameters(self) -> float:
        """That the optimiser changes: the adapter's if there is one."""
        return self.adapter_parameters or float(self.parameters)

    @cached_property
    def weight_bytes(self) -> float:
        """Of the base model in memory; pipelines that share a base hold it once."""
        return self.parameters * self.bytes_per_weight

    @cached_property
    def sync_bytes(self) -> float:
        """That a new policy version brings to an engine."""
        return self.trained_parameters * self.bytes_per_weight

    @cached_property
    def training_bytes(self) -> float:
        """The trainer's state: the compute copy, and fp32 masters, gradients and two moments of what is trained."""
        return self.weight_bytes + 16.0 * self.trained_parameters

    @cached_property
    def kv_bytes(self) -> float:
        """KV cache of one token."""
        return 2 * self.layers * self.kv_width * self.bytes_per_value

    @cached_property
    def activation_bytes(self) -> float:
        """Of one token over all layers: what one kernel writes and the next reads.

        The residual stream and its normed copy before attention and MLP; queries, keys, values and attention's output;
        gate, up and their product.
        """
        mlp = 3 * self.intermediate * (self.experts_per_token or 1)
        return self.layers * (4 * self.hidden + 2 * self.query_width + 2 * self.kv_width + mlp) * self.bytes_per_value

    def touched_parameters(self, tokens: float) -> float:
        """Of the layers, that a step over so many tokens reads; the adapter's included.

        Expected value when each token picks its experts at random and independently: each of E experts is missed by all
        n tokens with probability (1 - k/E)^n. Real routing is less even, so that fewer are touched.
        """
        if not self.experts:
            return self.shared_parameters + self.adapter_parameters
        missed: float = (1.0 - self.experts_per_token / self.experts) ** tokens
        return self.body_parameters + self.adapter_parameters - missed * (self.body_parameters - self.shared_parameters)


def shape_of(config: Mapping[str, Any], *, name: str) -> ModelShape:
    """The shape that a Hugging Face ``config.json`` of a Llama-like model describes.

    Raises:
        KeyError: it lacks a size. TypeError: one isn't a number.
    """
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    experts = int(config.get("num_experts") or 0)
    return ModelShape(
        name=name,
        layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        intermediate=int(config["moe_intermediate_size" if experts else "intermediate_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        vocabulary=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
        experts_per_token=int(config["num_experts_per_tok"]) if experts else 0,
    )


def read_shape(directory: Path, *, dtype: Dtype, name: str = "") -> ModelShape:
    """The shape of a model directory, with numbers of this dtype; named after the directory unless told otherwise.

    Raises:
        ModelError: its ``config.json`` isn't one of a Llama-like model.
    """
    file = directory / "config.json"
    try:
        shape = shape_of(json.loads(file.read_text(encoding="utf-8")), name=name or directory.name)
    except OSError as error:
        raise ModelError(f"{file} can't be read: {error.strerror}") from None
    except KeyError as error:
        raise ModelError(f"{file}: {error.args[0]} is missing, which every Llama-like model has") from None
    except (ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ModelError(f"{file} doesn't describe a Llama-like model: {error}") from None
    return msgspec.structs.replace(shape, bytes_per_weight=BYTES[dtype], bytes_per_value=BYTES[dtype])


def with_adapter(shape: ModelShape, *, rank: int) -> ModelShape:
    """The model with a LoRA adapter of this rank on every linear map of every layer (Hu et al. 2021, section 4)."""
    hidden, query, kv = shape.hidden, shape.query_width, shape.kv_width
    attention = 2 * (hidden + query) + 2 * (hidden + kv)
    mlp = 3 * (hidden + shape.intermediate) * (shape.experts or 1)
    adapter = rank * shape.layers * (attention + mlp)
    return msgspec.structs.replace(shape, name=f"{shape.name} LoRA-{rank}", adapter_share=adapter / shape.parameters)
