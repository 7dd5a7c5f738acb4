"""One mixture from experts that exist already: gates without training, and what they give on held-out rows."""
