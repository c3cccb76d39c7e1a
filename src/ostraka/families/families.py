"""The common model families: their parameters by Hugging Face configs, their tensors by name. Pure.

A parameter has the path and the shape that it has in a Flax NNX model. Names are those of Hugging
Face where the sharding presets know them. Fields that a config leaves out have the defaults of the
config class in `transformers`. `tests/support/record_hf_shapes.py` asks the real models.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn, cast

from ostraka.errors import nearest
from ostraka.families import _table
from ostraka.families._table import Row
from ostraka.tree.nodes import natural_order

HEAD = "lm_head/kernel"
"""The path of a language model's head."""

Parameter = tuple[str, tuple[int, ...]]
"""A path below the model, and a shape."""

_MOST = 10_000_000
"""A larger number is probably a mistake, and a plan for it would take too long."""


class Config(dict[str, Any]):
    """The fields of a `config.json`, read as `transformers` reads them.

    Those that it leaves out have the defaults of its family. Null stays None.
    """

    def number(self, name: str, null: int | None = None, *, least: int = 1) -> int:
        """A count. `null` is the value to use for null, if null is allowed."""
        found = self.get(name)
        if found is None and null is not None:
            return null
        if type(found) is not int or not least <= found <= _MOST:
            kind = "a positive integer" if least else "an integer, zero or more"
            self._refuse(name, f"{kind}, at most {_MOST:,}")
        return found

    def flag(self, name: str) -> bool:
        """A boolean. Null is false."""
        found = self.get(name)
        if found is not None and type(found) is not bool:
            self._refuse(name, "true or false")
        return bool(found)

    def numbers(self, name: str) -> list[int]:
        """A list of integers. Null is an empty one."""
        found = self.get(name)
        listed = cast("list[Any]", found) if isinstance(found, list) else []
        if (found is not None and listed is not found) or any(type(n) is not int for n in listed):
            self._refuse(name, "a list of integers")
        return listed

    def section(self, name: str) -> Mapping[str, Any]:
        """A config within the config. Null is an empty one."""
        found = self.get(name)
        if found is not None and not isinstance(found, dict):
            self._refuse(name, "a JSON object")
        return cast("dict[str, Any]", found or {})

    def _refuse(self, name: str, kind: str) -> NoReturn:
        value = self.get(name)
        shown = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
        raise ValueError(f"the config has {shown} as its {name!r}; it must be {kind}")


_DECODER_FIELDS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


def decoder_sizes(*sizes: int | None) -> dict[str, Any]:
    """The fields that the config of every decoder has, from layers and width to vocabulary."""
    return dict(zip(_DECODER_FIELDS, sizes, strict=True))


_Condition = bool | str | Callable[[Config, int], bool]
"""True, a field of the config that is true or false, or a function of the config and a layer."""


@dataclass(frozen=True, slots=True)
class Component:
    """Rows of the table whose sizes come from one config."""

    rows: tuple[Row, ...]
    parts: Mapping[str, _Condition]
    """The optional parts that models have. They lack all others."""
    derived: Mapping[str, Callable[[Config], int]] = field(default_factory=dict[str, Any])
    """Sizes that are not fields of the config."""
    config: Callable[[Config], Config] = lambda config: config
    """Finds the component's config in that of the model."""
    layers: str = "num_hidden_layers"
    """The field with the number of layers."""

    def parameters(self, model: Config) -> Iterator[Parameter]:
        """The parameters that a model with this config has."""
        config = self.config(model)
        for row in self.rows:
            layers = range(config.number(self.layers)) if "{n}" in row.path else range(1)
            conditions = [self._condition(config, part) for part in row.parts]
            by_layer = [one for one in conditions if not isinstance(one, bool)]
            has_all = False not in conditions
            present = [n for n in layers if has_all and all(one(config, n) for one in by_layer)]
            shape = tuple(self._size(config, size) for size in row.shape) if present else ()
            yield from ((row.path.replace("{n}", str(n)), shape) for n in present)

    def _condition(self, config: Config, part: str) -> bool | Callable[[Config, int], bool]:
        condition = self.parts.get(part, False)
        return config.flag(condition) if isinstance(condition, str) else condition

    def _size(self, config: Config, size: int | str) -> int:
        if isinstance(size, int):
            return size
        return self.derived[size](config) if size in self.derived else config.number(size)


@dataclass(frozen=True, slots=True)
class Family:
    """The models of one `model_type`."""

    components: tuple[Component, ...]
    embedding: str
    """The tensor that a tied head is made of."""
    defaults: Mapping[str, Any]
    """Fields that a config.json may leave out."""
    ignored: tuple[str, ...] = ()
    """Patterns of tensors that are no parameters: tables for rotations, masks."""
    prefixes: tuple[tuple[str, str], ...] = ()
    """How names begin in other versions of `transformers`, and in the table.

    The same for models that were saved without their head.
    """
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    """Other names of fields."""

    @property
    def rows(self) -> Iterator[Row]:
        """All rows. A model has some of them, as its config says."""
        return (row for component in self.components for row in component.rows)

    def read(self, values: Mapping[str, Any]) -> Config:
        """A config.json, with the defaults of this family."""
        named = {self.aliases.get(name, name): value for name, value in values.items()}
        return Config({**self.defaults, **named})


def parameters_of(values: Mapping[str, Any]) -> list[Parameter]:
    """All parameters of the model that a config describes, ordered as NNX orders them."""
    kind = values.get("model_type")
    if kind is None:
        raise ValueError(
            "the config has no 'model_type': give the config.json of a Hugging Face model"
        )
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(
            f"the config is of the family {kind!r}{nearest(str(kind), list(FAMILIES))}; those that "
            f"can be planned are {', '.join(FAMILIES)}"
        )
    family = FAMILIES[kind]
    config = family.read(values)
    found = [p for component in family.components for p in component.parameters(config)]
    order = cache(natural_order)
    return sorted(found, key=lambda parameter: [*map(order, parameter[0].split("/"))])


def is_tied(kind: str, values: Mapping[str, Any]) -> bool:
    """True if the head of a model is its embedding. Raises ValueError if the field is invalid."""
    return FAMILIES[kind].read(values).flag("tie_word_embeddings")


def dtype_of(values: Mapping[str, Any]) -> str:
    """The dtype that the weights are published in."""
    within = values.get("text_config")
    for fields in (values, within if isinstance(within, Mapping) else {}):
        found = fields.get("torch_dtype") or fields.get("dtype")
        if found:
            return str(found)
    return "float32"


# Sizes and parts


def _head_size(config: Config) -> int:
    width, heads = config.number("hidden_size"), config.number("num_attention_heads")
    if config.get("head_dim") is None and heads > width:
        raise ValueError(
            f"the config has {heads:,} as its 'num_attention_heads', more than its 'hidden_size' "
            f"of {width:,} can be divided among: give 'head_dim', or fewer heads"
        )
    return config.number("head_dim", width // heads)


def _queries(config: Config) -> int:
    return config.number("num_attention_heads") * _head_size(config)


def _keys(config: Config) -> int:
    heads = config.number("num_attention_heads")
    return config.number("num_key_value_heads", heads) * _head_size(config)


def _is_sparse(config: Config, layer: int) -> bool:
    step = config.number("decoder_sparse_step")
    some = config.number("num_experts", least=0) > 0
    return some and (layer + 1) % step == 0 and layer not in config.numbers("mlp_only_layers")


def _is_untied(config: Config, layer: int) -> bool:
    return not config.flag("tie_word_embeddings")


def _gemma3_text(config: Config) -> Config:
    """The config of the decoder. The outer config says whether there is a head."""
    text = FAMILIES["gemma3_text"].read(config.section("text_config"))
    return Config({**text, "tie_word_embeddings": config.get("tie_word_embeddings")})


def _gemma3_vision(config: Config) -> Config:
    return Config({**_SIGLIP, **config.section("vision_config")})


_SIGLIP = {
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "vision_use_head": True,
}


# Llama and its relatives

_DECODER_SIZES: dict[str, Callable[[Config], int]] = {
    "head": _head_size,
    "queries": _queries,
    "keys": _keys,
    "queries, keys, values": lambda config: _queries(config) + 2 * _keys(config),
    "gate, up": lambda config: 2 * config.number("intermediate_size"),
}

_Parts = dict[str, _Condition]
_PLAIN: _Parts = {"head": _is_untied, "input_layernorm": True, "separate": True, "gated": True}
_BIASES: _Parts = {"input bias": "attention_bias", "output bias": "attention_bias"}
_FOUR_NORMS: _Parts = {"pre_feedforward_layernorm": True, "post_feedforward_layernorm": True}
_HEAD_NORMS: _Parts = {"one norm for all heads": True}
_EXPERTS: _Parts = {
    "sparse": _is_sparse,
    "gated": lambda config, layer: not _is_sparse(config, layer),
}
_GEMMA_DEFAULTS: dict[str, Any] = {"head_dim": 256, "tie_word_embeddings": True}
_GEMMA3_PARTS: _Parts = _PLAIN | _BIASES | _FOUR_NORMS | _HEAD_NORMS


def _decoder(
    parts: _Parts,
    sizes: Sequence[int | None],
    aliases: Mapping[str, str] | None = None,
    **defaults: Any,
) -> Family:
    return Family(
        (Component(_table.DECODER, parts, _DECODER_SIZES),),
        "model.embed_tokens.weight",
        {**decoder_sizes(*sizes), **defaults},
        ("model.layers.{n}.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
        (("model.language_model.", "model."), ("language_model.", ""), ("", "model.")),
        aliases or {},
    )


# Others

_GEMMA3_VISION_SIZES: dict[str, Callable[[Config], int]] = {
    "patches": lambda config: (config.number("image_size") // config.number("patch_size")) ** 2,
    "queries, keys, values": lambda config: 3 * config.number("hidden_size"),
}
_GEMMA3_PROJECTOR_SIZES: dict[str, Callable[[Config], int]] = {
    "vision width": lambda config: _gemma3_vision(config).number("hidden_size"),
    "text width": lambda config: _gemma3_text(config).number("hidden_size"),
}
_GEMMA3 = Family(
    (
        Component(_table.GEMMA3_TEXT, _GEMMA3_PARTS, _DECODER_SIZES, _gemma3_text),
        Component(
            _table.SIGLIP, {"pooling": "vision_use_head"}, _GEMMA3_VISION_SIZES, _gemma3_vision
        ),
        Component(_table.GEMMA3_PROJECTOR, {}, _GEMMA3_PROJECTOR_SIZES),
    ),
    "language_model.model.embed_tokens.weight",
    {"tie_word_embeddings": True},
    (
        "language_model.model.layers.{n}.self_attn.rotary_emb.inv_freq",
        "language_model.model.rotary_emb.inv_freq",
        "vision_tower.vision_model.embeddings.position_ids",
    ),
    (
        ("model.language_model.", "language_model.model."),
        ("model.vision_tower.vision_model.", "vision_tower.vision_model."),
        ("model.vision_tower.", "vision_tower.vision_model."),
        ("vision_tower.", "vision_tower.vision_model."),
        ("lm_head.", "language_model.lm_head."),
        ("model.", ""),
    ),
)
_GPT2_SIZES: dict[str, Callable[[Config], int]] = {
    "queries, keys, values": lambda config: 3 * config.number("n_embd"),
    "keys, values": lambda config: 2 * config.number("n_embd"),
    "inner": lambda config: config.number("n_inner", 4 * config.number("n_embd")),
}
_GPT2_PARTS: _Parts = {"head": _is_untied, "cross-attention": "add_cross_attention"}
_GPT2_MASKS = ("attn.bias", "attn.masked_bias", "crossattention.bias", "crossattention.masked_bias")
_GPT2_DEFAULTS = {
    "n_layer": 12,
    "n_embd": 768,
    "n_positions": 1024,
    "vocab_size": 50257,
    "tie_word_embeddings": True,
}
_GPT2 = Family(
    (Component(_table.GPT2, _GPT2_PARTS, _GPT2_SIZES, layers="n_layer"),),
    "transformer.wte.weight",
    _GPT2_DEFAULTS,
    tuple(f"transformer.h.{{n}}.{name}" for name in _GPT2_MASKS),
    (("", "transformer."),),
    {
        "num_hidden_layers": "n_layer",
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
    },
)
_NEOX_SIZES: dict[str, Callable[[Config], int]] = {
    "queries, keys, values": lambda config: 3 * config.number("hidden_size")
}
_NEOX_PARTS: _Parts = {"head": _is_untied, "attention": "attention_bias"}
_GPT_NEOX = Family(
    (Component(_table.GPT_NEOX, _NEOX_PARTS, _NEOX_SIZES),),
    "gpt_neox.embed_in.weight",
    {**decoder_sizes(44, 6144, 24576, 64, None, 50432), "attention_bias": True},
    (
        "gpt_neox.layers.{n}.attention.bias",
        "gpt_neox.layers.{n}.attention.masked_bias",
        "gpt_neox.layers.{n}.attention.rotary_emb.inv_freq",
        "gpt_neox.rotary_emb.inv_freq",
    ),
    (("lm_head.", "embed_out."), ("", "gpt_neox.")),
)

FAMILIES: dict[str, Family] = {
    "llama": _decoder(
        _PLAIN | _BIASES | {"mlp bias": "mlp_bias"}, (32, 4096, 11008, 32, None, 32000)
    ),
    "mistral": _decoder(_PLAIN, (32, 4096, 14336, 32, 8, 32000)),
    "mixtral": _decoder(
        _PLAIN | {"gated": False, "mixtral": True},
        (32, 4096, 14336, 32, 8, 32000),
        aliases={"num_experts": "num_local_experts"},
        num_local_experts=8,
    ),
    "qwen2": _decoder(_PLAIN | {"input bias": True}, (32, 4096, 22016, 32, 32, 151936)),
    "qwen2_moe": _decoder(
        # Every token passes through the shared expert, besides those that are chosen for it.
        _PLAIN | {"input bias": "qkv_bias"} | _EXPERTS | {"shared": _is_sparse},
        (24, 2048, 5632, 16, 16, 151936),
        num_experts=60,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        decoder_sparse_step=1,
        qkv_bias=True,
    ),
    "qwen3": _decoder(
        _PLAIN | _BIASES | _HEAD_NORMS, (32, 4096, 22016, 32, 32, 151936), head_dim=128
    ),
    "qwen3_moe": _decoder(
        _PLAIN | _BIASES | _HEAD_NORMS | _EXPERTS,
        (24, 2048, 6144, 32, 4, 151936),
        aliases={"num_local_experts": "num_experts"},
        num_experts=128,
        moe_intermediate_size=768,
        decoder_sparse_step=1,
    ),
    "gemma": _decoder(_PLAIN | _BIASES, (28, 3072, 24576, 16, 16, 256000), **_GEMMA_DEFAULTS),
    "gemma2": _decoder(
        _PLAIN | _BIASES | _FOUR_NORMS, (26, 2304, 9216, 8, 4, 256000), **_GEMMA_DEFAULTS
    ),
    "gemma3": _GEMMA3,
    "gemma3_text": _decoder(_GEMMA3_PARTS, (26, 2304, 9216, 8, 4, 262208), **_GEMMA_DEFAULTS),
    "phi3": _decoder(
        _PLAIN | {"separate": False, "gated": False, "fused": True},
        (32, 3072, 8192, 32, None, 32064),
    ),
    "starcoder2": _decoder(
        _PLAIN
        | {"gated": False, "two kernels": True, "norm bias": True}
        | dict.fromkeys(("input bias", "output bias", "mlp bias"), "use_bias"),
        (30, 3072, 12288, 24, 2, 49152),
        use_bias=True,
        tie_word_embeddings=True,
    ),
    "olmo2": _decoder(
        (_PLAIN | _BIASES | {"input_layernorm": False})
        | dict.fromkeys(("post_feedforward_layernorm", "a norm for each head"), True),
        (32, 4096, 11008, 32, None, 50304),
    ),
    "gpt2": _GPT2,
    "gpt_neox": _GPT_NEOX,
}
