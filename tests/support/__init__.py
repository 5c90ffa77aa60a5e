"""What tests share: models, ranks, runs, engines that fail, and the programs that tests start."""
