"""Where the first values of a run come from: the model, its own initialization, a checkpoint, an older checkpoint."""
