"""The kernel families, and what dispatch, plans and programs ask of them: one folder a family."""
