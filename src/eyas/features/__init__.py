"""The target's hidden states, stored in shards of whole rows."""
