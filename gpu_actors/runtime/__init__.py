"""Actors as such: cells, mailboxes, calls, supervision, replies. Knows no attention.

Imports from other rooms: arrays, devices, tracing, validation.
"""
