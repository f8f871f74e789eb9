"""The target: facts from its config, its embedding and head, and the engines that run it."""
