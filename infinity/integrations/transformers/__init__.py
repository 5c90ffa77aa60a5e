"""Support for transformers' `Trainer` and its subclasses, such as TRL's trainers, with the training state on NVMe."""

from infinity.integrations.transformers.trainer import attach as attach
