"""Scripts that train a MoE-LoRA adapter with TRL's trainers; copy one and change it."""
