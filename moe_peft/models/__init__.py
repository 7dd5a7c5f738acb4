"""The routed parts of a model, either with a MoE-LoRA adapter or a native transformers MoE."""
