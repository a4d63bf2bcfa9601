"""Where the state of a run comes from: it is drawn, or has weights from elsewhere, or goes on from a checkpoint."""
