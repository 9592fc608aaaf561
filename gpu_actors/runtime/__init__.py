"""Actors: cells, mailboxes, calls, supervision, replies. Nothing here knows about attention."""
