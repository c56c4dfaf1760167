"""Keys of a Hugging Face config.json that do not change the computation.

A key that is neither read nor listed here is refused, so that no new feature of a checkpoint is silently ignored.
"""

# Provenance of the file.
PROVENANCE_KEYS = (
    "_name_or_path",
    "name_or_path",
    "_commit_hash",
    "auto_map",
    "custom_pipelines",
    "is_llama_config",
    "model_name",
    "tokenizer_class",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
)

# Training, and outputs or caches of a forward pass. The engine's own dtype replaces the file's.
RUNTIME_KEYS = (
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_attn_implementation_internal",
    "attention_dropout",
    "attn_implementation",
    "chunk_size_feed_forward",
    "dtype",
    "embd_pdrop",
    "finetuning_task",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "label2id",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "resid_pdrop",
    "prefix",
    "return_dict",
    "task_specific_params",
    "tf_legacy_loss",
    "torch_dtype",
    "torchscript",
    "use_bfloat16",
    "use_cache",
)

# Defaults of `generate` in older files. The engine takes sampling from each request.
GENERATION_KEYS = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_scores",
    "pad_token_id",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
)

# Keys of a model whose language model is in `text_config`.
VISION_KEYS = (
    "ignore_index",
    "audio_config",
    "audio_token_id",
    "boa_token_id",
    "boi_token_id",
    "boi_token_index",
    "bos_token_id",
    "eoa_token_id",
    "eoa_token_index",
    "eoi_token_id",
    "eoi_token_index",
    "image_token_id",
    "image_token_index",
    "language_model_only",
    "media_placeholder_token_id",
    "use_unified_vision_chunk",
    "video_placeholder",
    "mm_tokens_per_image",
    "multimodal_projector_bias",
    "projector_hidden_act",
    "spatial_merge_size",
    "video_token_id",
    "vision_config",
    "vision_end_token_id",
    "vision_feature_layer",
    "vision_soft_tokens_per_image",
    "vision_start_token_id",
)

# Keys of the MTP module, which drafts tokens with the target's own layers; an engine omits it.
MTP_KEYS = (
    "index_share_for_mtp_iteration",
    "mtp_layers_block_type",
    "mtp_num_hidden_layers",
    "mtp_num_layers",
    "mtp_transformer_layers",
    "mtp_use_dedicated_embeddings",
    "num_mtp_layers",
    "num_mtp_modules",
    "num_nextn_predict_layers",
    "use_mtp",
)

# Parts that some family has unless its file says false: no neutral value where nothing reads the key.
ON_BY_DEFAULT = (
    "attn_output_gate",
    "attn_temperature_tuning",
    "is_causal",
    "norm_topk_prob",
    "rope_interleave",
    "use_qk_norm",
    "use_rope",
    "use_routing_bias",
)

HARMLESS_KEYS = (*PROVENANCE_KEYS, *RUNTIME_KEYS, *GENERATION_KEYS, *MTP_KEYS)
