"""The draft as inference engines load it."""
