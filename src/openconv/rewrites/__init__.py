"""Engines that turn a problem into other problems and leave those to other engines; one file for each rewrite."""
