"""`infinity train`: fine-tune and pretrain with transformers' Trainer and TRL, with the training state on NVMe."""
