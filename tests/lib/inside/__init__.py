"""What tests take from inside a room that is not theirs, by room. If it moves, one line here follows it."""
