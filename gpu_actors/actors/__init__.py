"""The actors, and what they are made of: calls, mailboxes, posts, supervision."""
