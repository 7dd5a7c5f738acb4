"""Shared by all parts of the package: validation, files, loading, versions, processes and model cards."""
