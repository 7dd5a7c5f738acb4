"""The routed parts of a model, whether it has a MoE-LoRA adapter or is a native MoE of transformers."""
