"""Tiny random Qwen-VL models with their tokenizer, template and image processor."""

from __future__ import annotations

import io
import json
from pathlib import Path

import torch
from PIL import Image as Pillow
from PIL import ImageDraw
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel
from transformers import (
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from agentrl.documents.images import Image, image_of_bytes

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
PLAIN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
IDS = {text: len(LETTERS) + number for number, text in enumerate((*SPECIAL, *PLAIN))}
VOCABULARY = len(LETTERS) + len(IDS)

TEMPLATE = Path(__file__).with_name("tiny_vision.jinja").read_text(encoding="utf-8")


def vision_model(kind: str = "qwen3_vl", seed: int = 0) -> PreTrainedModel:
    """``qwen2_5_vl`` or ``qwen3_vl``: 2 layers, hidden 32, a tower of 2 blocks; patches of 4 × 4 pixels."""
    torch.manual_seed(seed)
    text = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
        "initializer_range": 0.3, "eos_token_id": IDS["<|im_end|>"],
        "bos_token_id": None,
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    tokens = {
        "image_token_id": IDS["<|image_pad|>"], "video_token_id": IDS["<|video_pad|>"],
        "vision_start_token_id": IDS["<|vision_start|>"], "vision_end_token_id": IDS["<|vision_end|>"],
        "attn_implementation": "sdpa", "eos_token_id": IDS["<|im_end|>"],
    }  # fmt: skip
    tower = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32, "initializer_range": 0.3,
    }  # fmt: skip
    if kind == "qwen2_5_vl":
        text["rope_parameters"] = {**rope, "mrope_section": [2, 1, 1]}
        tower |= {"fullatt_block_indexes": [1], "window_size": 16}
        config = Qwen2_5_VLConfig(text_config=text, vision_config=tower, **tokens)
        return Qwen2_5_VLForConditionalGeneration(config).train()
    text |= {
        "rope_parameters": {**rope, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
        "head_dim": 8,
    }
    tower |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=text, vision_config=tower, **tokens)
    ).train()


def save_vision_model(folder: Path, kind: str = "qwen3_vl", seed: int = 0) -> Path:
    """Write a whole model folder: weights, tokenizer, template and image processor."""
    vision_model(kind, seed).save_pretrained(str(folder))
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(LETTERS)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
    })  # fmt: skip
    _write(folder / "preprocessor_config.json", {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2,
        "temporal_patch_size": 2, "size": {"shortest_edge": 64, "longest_edge": 1024},
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    })  # fmt: skip
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def drawn(color: str = "red", size: tuple[int, int] = (24, 16), squares: int = 1) -> bytes:
    """Return a PNG of ``squares`` squares of a color."""
    picture = Pillow.new("RGB", size, "white")
    draw = ImageDraw.Draw(picture)
    for number in range(squares):
        draw.rectangle((1 + 6 * number, 2, 4 + 6 * number, 8), fill=color)
    stream = io.BytesIO()
    picture.save(stream, format="PNG")
    return stream.getvalue()


def drawn_image(color: str = "red", size: tuple[int, int] = (24, 16), squares: int = 1) -> Image:
    """Return ``drawn`` as a stored image."""
    return image_of_bytes(drawn(color, size, squares))
