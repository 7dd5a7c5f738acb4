"""What every part of the package uses: validation, files, loading, versions, processes, model cards."""
