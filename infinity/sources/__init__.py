"""Where the first values of a run come from: the model, its own initialisation, a checkpoint, an older checkpoint."""
