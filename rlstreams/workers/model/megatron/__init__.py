"""Models of megatron-core under Hugging Face names: tables, layouts, log-probs."""
