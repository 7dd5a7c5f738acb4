"""Training of routed models with TRL. Needs the extra `train`."""
