"""The routed parts of a model with a MoE-LoRA adapter, or of a native transformers MoE."""
