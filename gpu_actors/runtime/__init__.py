"""Actors as such: cells, mailboxes, calls, supervision, replies. Knows no attention."""
