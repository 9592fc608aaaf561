"""What an attention request means: the messages and results, the problem that they state, and its masks and scores."""
