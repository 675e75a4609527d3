"""Folders with tiny models that engines open in milliseconds; holds no tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["CONFIG", "PAGE_BYTES", "chat_folder", "configured", "random_folder", "whole_folder", "write_tokenizer"]

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
PAGE_BYTES = 2 * 2 * 2 * 8 * 16 * 4
"""Of float32 and the default 16 tokens: layers, key and value, heads, head size, tokens, bytes."""


def configured(kind: Callable[..., Any], sizes: dict[str, Any], **changes: Any) -> Any:
    """A configuration of transformers with those of `sizes` that it has, and with `changes`.

    transformers keeps fields that a model does not have, and headrace refuses a config.json with them.
    """
    usual, ours = kind(), ("architectures", "model_type")
    return kind(**{name: size for name, size in sizes.items() if hasattr(usual, name) and name not in ours} | changes)


def random_folder(folder: Path, **changes: Any) -> Path:
    """A bare config.json, for `load_format="random"`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


def write_tokenizer(folder: Path) -> None:
    """One token for each printable ASCII character: its code less 33."""
    from tokenizers import Tokenizer, decoders, models

    core = Tokenizer(models.BPE({chr(code): code - 33 for code in range(33, 127)}, []))
    core.decoder = decoders.ByteLevel()
    core.save(str(folder / "tokenizer.json"))


def whole_folder(folder: Path, **options: Any) -> Path:
    """A checkpoint with config, safetensors and tokenizer, as transformers saves it; attention decides its tokens."""
    import torch
    import transformers

    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG | {"tie_word_embeddings": False}))
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    model.save_pretrained(folder, **options)
    write_tokenizer(folder)
    return folder


def chat_folder(folder: Path) -> Path:
    """A model with a token for each byte and a chat template, which takes any text; its weights are random."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(alphabet, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|end|>"])
    folder.mkdir(parents=True, exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    settings = {"eos_token": "<|end|>", "chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    torch.manual_seed(5)
    sizes = {"vocab_size": 257, "max_position_embeddings": 2048, "eos_token_id": 256, "bos_token_id": None}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG | sizes)).save_pretrained(folder)
    return folder
