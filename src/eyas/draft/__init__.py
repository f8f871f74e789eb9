"""The draft model: its layers, attention, rope and first weights."""
