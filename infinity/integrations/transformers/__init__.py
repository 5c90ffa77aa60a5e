"""transformers' Trainer and its subclasses, such as TRL's, with the training state on NVMe."""

from infinity.integrations.transformers.trainer import attach as attach
