"""How many drafted tokens the target accepts, simulated and measured."""
