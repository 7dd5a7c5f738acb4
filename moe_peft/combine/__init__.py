"""Combines existing experts in one mixture: sets gates without training and measures them on held-out rows."""
