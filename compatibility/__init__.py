"""What works with what, as tables that a run makes: model families, trainers, training engines."""
