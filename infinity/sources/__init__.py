"""Sources of a run's initial values: the model itself, its initialization code, weight files, or a checkpoint."""
