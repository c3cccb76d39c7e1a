"""The parameters of a vision-language model: SigLIP tower, projection, decoder. No JAX."""

from __future__ import annotations

from collections.abc import Iterator

from ostraka.planner._config import Config
from ostraka.planner._layers import Parameter, Traits, decoder, dense, norm


def gemma3(config: Config, *, text: Config, vision: Config, traits: Traits) -> Iterator[Parameter]:
    """Gemma 3 with its vision tower; the outer config says whether there is a head."""
    width, words = vision.number("hidden_size"), text.number("hidden_size")
    tied = {"tie_word_embeddings": True}
    for path, shape in decoder(Config({**text.values, **tied}, text.defaults), traits):
        yield f"language_model/{path}", shape
    if not config.flag("tie_word_embeddings"):
        yield from dense("lm_head", words, text.number("vocab_size"))
    yield from dense("multi_modal_projector/mm_input_projection", width, words)
    yield from norm("multi_modal_projector/mm_soft_emb_norm", width)
    yield from _tower(vision, "vision_tower", width)


def _tower(config: Config, at: str, width: int) -> Iterator[Parameter]:
    patch = config.number("patch_size")
    patches = (config.number("image_size") // patch) ** 2
    kernel = (patch, patch, config.number("num_channels"), width)
    yield f"{at}/embeddings/patch_embedding/kernel", kernel
    yield f"{at}/embeddings/patch_embedding/bias", (width,)
    yield f"{at}/embeddings/position_embedding/embedding", (patches, width)
    for layer in range(config.number("num_hidden_layers")):
        inside = f"{at}/encoder/layers/{layer}"
        yield from norm(f"{inside}/layer_norm1", width, bias=True)
        yield from norm(f"{inside}/layer_norm2", width, bias=True)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from dense(f"{inside}/self_attn/{name}", width, width, bias=True)
        yield from _two_kernels(config, f"{inside}/mlp", width)
    yield from norm(f"{at}/post_layernorm", width, bias=True)
    if config.flag("vision_use_head"):
        yield from _pooling_head(config, f"{at}/head", width)


def _pooling_head(config: Config, at: str, width: int) -> Iterator[Parameter]:
    yield f"{at}/probe", (1, 1, width)
    yield from dense(f"{at}/attention/in_proj", width, 3 * width, bias=True)
    yield from dense(f"{at}/attention/out_proj", width, width, bias=True)
    yield from norm(f"{at}/layernorm", width, bias=True)
    yield from _two_kernels(config, f"{at}/mlp", width)


def _two_kernels(config: Config, at: str, width: int) -> Iterator[Parameter]:
    hidden = config.number("intermediate_size")
    yield from dense(f"{at}/fc1", width, hidden, bias=True)
    yield from dense(f"{at}/fc2", hidden, width, bias=True)
