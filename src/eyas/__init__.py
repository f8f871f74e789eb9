"""Eyas trains EAGLE-3 draft models. Follow the data: prepare, target, features, vocab, draft, train, export, evaluate."""

__version__ = "0.1.0"
