"""From a request to a launch."""
