"""The actors of a context: what each takes, launches and answers."""
