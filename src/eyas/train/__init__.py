"""From features to checkpoints."""
