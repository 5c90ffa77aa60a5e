"""transformers' Trainer, and those that are made of it such as TRL's, with the state of the training on NVMe."""

from infinity.integrations.transformers.trainer import attach as attach
