"""Random compositions of model, data, optimizer, features and layout, compared with one process."""
