"""The devices, with one small interface: cuda, emulated and mock."""
