"""What tests take from inside other rooms than their own, by room. If it moves, only a line here changes."""
