"""`FieldsRead` and `refuse_unread`: a config.json's fields that nothing reads are refused, unless they say nothing.

A field that nobody here knows may change what a model computes: a factor of embeddings, a gate of attention. So it is
refused by name, whether or not another library ignores it. The exceptions are fields about training, generation, tokens
and tools, and values that stand for something being left out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from headrace.adapters.untrusted import refuse

__all__ = ["ABSENT", "FieldsRead", "refuse_unread", "says_nothing"]

_HARMLESS: Final = frozenset(
    """
    architectures model_type auto_map dtype torch_dtype transformers_version quantization_config torchscript
    use_bfloat16 tf_legacy_loss chunk_size_feed_forward finetuning_task id2label label2id num_labels problem_type
    task_specific_params keys_to_ignore_at_inference name_or_path model_name description is_llama_config
    is_composition is_decoder cross_attention_hidden_size tie_encoder_decoder custom_pipelines transformers.js_config

    use_cache cache_implementation return_dict use_return_dict output_attentions output_hidden_states output_past
    output_router_logits output_scores return_dict_in_generate

    max_length max_new_tokens min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p min_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens

    prefix chat_template tokenizer_class tokenizer_name tokenizer_padding_side tokenizer_model_max_length
    bos_token eos_token pad_token unk_token sep_token cls_token mask_token
    model_max_length max_sequence_length max_seq_len seq_length

    init_std init_method layerdrop seq_aux ignored_index predict_special_tokens
    neftune_noise_alpha pretraining_tp ep_size tp_size sequence_parallel use_recompute

    reorder_and_upcast_attn attention_softmax_in_fp32 scale_attention_softmax_in_fp32 fp32_residual_connection
    enable_lm_head_fp32 masked_softmax_fusion pad_key_length pre_allocate_kv_cache validate_runner_input
    inference_runner max_batch_size
    """.split()
)
"""Fields about files, outputs, generation, tokenizers, training, and the dtype or the kernel of a result."""
_HARMLESS_NAMES: Final = re.compile(
    "_.*"
    "|.*_token_(id|ids|index)"
    "|.*dropout.*|.*_pdrop"
    "|initializer_.*|.*_loss|.*_loss_.*|.*_jitter_noise|gradient_checkpointing.*|tensor_parallel_.*"
    "|.*attn_implementation|.*flash_att.*|fuse_.*|fused_.*|use_fused_.*"
    "|summary_.*|classifier_.*|unsloth_.*"
)
_USUAL: Final[Mapping[str, object]] = {
    "is_causal": True,
    "learned_embeddings": True,
    "rotary": True,
    "scale_attn_weights": True,
}
"""Fields of early configs, with the value that says what all models do that have them."""
ABSENT: Final[tuple[object, ...]] = (None, False, 0, "", [], {})
"""Values of a field that say as much as if it were not there."""


class FieldsRead(Mapping[str, object]):
    """The fields of a config.json, with a record of which were looked up."""

    __slots__ = ("_fields", "looked_up")

    def __init__(self, fields: Mapping[str, object], looked_up: set[str] | None = None) -> None:
        self._fields = fields
        self.looked_up: set[str] = set() if looked_up is None else looked_up
        """Names that were looked up, whether or not there are such fields."""

    def __getitem__(self, name: str) -> object:
        """Return the value of a field, which counts as looked up from now on."""
        self.looked_up.add(name)
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the fields."""
        return iter(self._fields)

    def __len__(self) -> int:
        """Return the number of fields."""
        return len(self._fields)

    def changed(self, changes: Mapping[str, object]) -> FieldsRead:
        """Return the fields with `changes`, and with the same record of names."""
        return FieldsRead({**self._fields, **changes}, self.looked_up)


def says_nothing(name: str, value: object) -> bool:
    """Return whether a field that is not read leaves what a model computes as it is."""
    if name in _USUAL and value == _USUAL[name]:
        return True
    return value in ABSENT or name in _HARMLESS or _HARMLESS_NAMES.fullmatch(name) is not None


def refuse_unread(
    fields: Mapping[str, object], read: Collection[str], origin: str, architecture: str, hint: str = ""
) -> None:
    """Refuse the first field that is not among `read` and may say what the model computes.

    Args:
        fields: The fields of a config.json.
        read: Names of fields that are read, or that are known to say nothing in this model.
        origin: Where the fields stand, for messages.
        architecture: Name of the model, for messages.
        hint: What else may be done about it, for messages.
    """
    for name, value in fields.items():
        if name not in read and not says_nothing(name, value):
            refuse(
                origin,
                name,
                value,
                f"null or nothing, since no code for {architecture} reads it; take the field out of the file if the "
                f"model is computed without it{hint}",
            )
